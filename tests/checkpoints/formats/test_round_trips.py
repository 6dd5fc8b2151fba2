"""Every kind of network in every format: it comes back the same, or it is refused."""

import dataclasses
import functools
import itertools
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from tests import tiny
from tests.networks import ENDINGS, changed, loaded
from vit_jax.base.errors import UserError
from vit_jax.base.tree_names import named_leaves
from vit_jax.models import ViTConfig

HINTS = typing.get_type_hints(ViTConfig)
CHOICES = {name: typing.get_args(HINTS[name]) for name in ('pool', 'positions', 'final_norm')} | {
    'representation_size': (None, 6),
    'num_classes': (None, 3),
}


@functools.cache
def networks():
    """One of each kind, and its outputs when they are asked for."""
    kinds = itertools.product(*CHOICES.values())
    configs = (tiny.model(depth=1, **dict(zip(CHOICES, values, strict=True))) for values in kinds)
    return [
        (network, functools.cache(lambda n=network: outputs(n))) for network in map(loaded, configs)
    ]


def outputs(network):
    """Logits, or features without a head; op by op, as each network would be compiled anew."""
    with jax.disable_jit():
        params = jax.tree.map(jnp.asarray, network.params)
        return np.asarray(network.model.apply(params, tiny.images(config=network.config)))


def hints_of(notes):
    """The keyword arguments that the notes of `save` ask for."""
    told = [match[1] for note in notes if (match := re.search('load this one with (.*)', note))]
    return eval(f'dict({", ".join(told)})')  # as a reader would type them


def same_arrays(one, other):
    one, other = named_leaves(one), named_leaves(other)
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize('gelu', typing.get_args(HINTS['gelu']))
@pytest.mark.parametrize('format', ENDINGS)
def test_a_network_comes_back_the_same_or_is_refused(format, gelu, tmp_path):
    kept, wrong = 0, []
    # Our own keeps the configuration as it is, and takes its time: every 11th has every choice.
    every = 11 if format == 'vit_jax' else 1
    for number, (network, expected) in enumerate(networks()[::every]):
        config = dataclasses.replace(network.config, gelu=gelu)
        network = changed(network, model=config)
        path = tmp_path / f'{number}{ENDINGS[format]}'
        try:
            notes = vit_jax.save(network, str(path), format)
        except UserError:
            assert not path.exists()
            continue
        kept += 1
        try:
            again = vit_jax.load(path, **hints_of(notes))
        except UserError as error:
            wrong.append((config, str(error)))
            continue
        same = same_arrays(again.params, network.params)
        if dataclasses.replace(again.config, positions=config.positions) != config:
            wrong.append((config, again.config))
        elif (again.config != config or not same) and gelu == 'tanh':
            # Only where the position of the class token moves into the token does anything round.
            close = np.allclose(outputs(again), expected(), rtol=0, atol=1e-5)
            wrong += [] if close else [(config, again.config)]
    assert not wrong, (len(wrong), wrong[0])
    assert kept > 8
