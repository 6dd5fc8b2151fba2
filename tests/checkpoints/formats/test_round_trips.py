"""Every kind of model in every format: it comes back the same, or it is rejected."""

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


def choices(name):
    return typing.get_args(typing.get_type_hints(ViTConfig)[name])


@functools.cache
def networks(every):
    """One of each kind: every so many of all combinations."""
    names = 'pool', 'final_norm', 'representation_size', 'positions', 'num_classes'
    kinds = itertools.product(
        choices('pool'), choices('final_norm'), (None, 6), choices('positions'), (None, 3)
    )
    values = [dict(zip(names, kind, strict=True)) for kind in kinds]
    valid = [v for v in values if v['pool'] != 'cls_dist' or v['representation_size'] is None]
    return [loaded(tiny.model(depth=1, **kind)) for kind in valid[::every]]


def outputs(network):
    """Logits, or features without a head; op by op, as each model would be compiled anew."""
    with jax.disable_jit():
        params = jax.tree.map(jnp.asarray, network.params)
        return np.asarray(network.model.apply(params, tiny.images(config=network.config)))


def hints_of(notes):
    """The keyword arguments that the notes of `save` ask for."""
    stated = [match[1] for note in notes if (match := re.search('load this file with (.*)', note))]
    return eval(f'dict({", ".join(stated)})')  # as a reader would type them


# Every 19th of the combinations has every choice, every 7th most pairs of them. A GELU is written
# apart from all else. open_clip holds CLIP, vit5 ViT-5.
CASES = [
    pytest.param(format, gelu, every, marks=mark)
    for format in ENDINGS
    if format not in ('open_clip', 'vit5')
    for gelu, every, mark in [
        ('tanh', 19, pytest.mark.gate),
        ('quick', 19, pytest.mark.nightly),
        ('exact', 7, pytest.mark.nightly),
    ]
]


@pytest.mark.parametrize('format, gelu, every', CASES)
def test_a_model_comes_back_the_same_or_is_rejected(format, gelu, every, tmp_path):
    chosen = networks(19 if format == 'vit_jax' else every)  # our own format is slow to write
    assert {network.config.pool for network in chosen} == {*choices('pool')}
    kept = 0
    for number, network in enumerate(chosen):
        config = dataclasses.replace(network.config, gelu=gelu)
        network = changed(network, model=config)
        path = tmp_path / f'{number}{ENDINGS[format]}'
        try:
            notes = vit_jax.save(network, str(path), format)
        except UserError:
            assert not path.exists()
            continue
        kept += 1
        again = vit_jax.load(path, **hints_of(notes))
        assert dataclasses.replace(again.config, positions=config.positions) == config
        one, other = named_leaves(network.params), named_leaves(again.params)
        same = one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)
        # What differs is before the encoder: one GELU and one kind of output show it.
        if not (same and again.config == config) and (gelu, config.num_classes) == ('tanh', 3):
            # Only where the position of the class token moves into the token does anything round.
            np.testing.assert_allclose(outputs(again), outputs(network), rtol=0, atol=1e-5)
    assert kept > 3 * (every < 19)
