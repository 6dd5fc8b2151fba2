"""Averages of checkpoints: python -m vit_jax.convert --average."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

import vit_jax
from tests import networks, tiny
from vit_jax import convert
from vit_jax.base.errors import UserError

NAMES = tuple('abcdefghij')
LOADED = networks.loaded(tiny.model(), class_names=NAMES)


def other_head(loaded):
    """The model with another head, so that logits are linear in what differs."""
    head = jax.tree.map(lambda leaf: np.flip(leaf) - 0.1, loaded.params['head'])
    return networks.changed(loaded, params=loaded.params | {'head': head})


@pytest.fixture
def average(tmp_path):
    """Saves models, runs the program on them, and loads its output."""

    def run(*models, flags=('--average',)):
        paths = [str(tmp_path / str(number)) for number in range(len(models))]
        for model, path in zip(models, paths, strict=True):
            vit_jax.save(model, path, 'vit_jax', overwrite=True)
        words = *paths, str(tmp_path / 'out'), '--overwrite', *flags
        assert convert.main(convert.make_parser().parse_args(words)) == 0
        return vit_jax.load(tmp_path / 'out')

    return run


def test_copies_average_to_the_same_bits(average):
    chex.assert_trees_all_equal(average(LOADED, LOADED, LOADED).params, LOADED.params)
    found = average(LOADED, other_head(LOADED), flags=('--weights=1,0',))
    chex.assert_trees_all_equal(found.params, LOADED.params)
    assert found.card == LOADED.card


def test_logits_of_averaged_heads_are_averages(average):
    models, images = (LOADED, other_head(LOADED)), tiny.images()
    one, two = (model.logits(images) for model in models)
    found = average(*models, flags=('--average', '--weights=.25,.75')).logits(images)
    np.testing.assert_allclose(found, 0.25 * one + 0.75 * two, atol=1e-5)  # float32 rounding


@pytest.mark.parametrize(
    'other, name',
    [
        (networks.loaded(tiny.model(depth=2), class_names=NAMES), 'model.depth'),
        (networks.changed(LOADED, class_names=(*NAMES[:9], 'z')), "class_names.9: 'j' -> 'z'"),
        (networks.changed(LOADED, loss='sigmoid'), 'loss'),
        (
            networks.changed(
                LOADED, preprocessing=dataclasses.replace(LOADED.preprocessing, mean=(1.0,) * 3)
            ),
            'preprocessing.mean',
        ),
    ],
)
def test_another_kind_of_model_is_rejected_by_name(other, name, average):
    with pytest.raises(UserError, match=name):
        average(LOADED, other)


@pytest.mark.parametrize(
    'models, flags, name',
    [(2, (), 'IN'), (1, ('--average',), 'IN'), (2, ('--weights=.5,.6',), 'weights')],
)
def test_wrong_numbers_of_checkpoints_and_weights_are_rejected(models, flags, name, average):
    with pytest.raises(UserError, match=name):
        average(*[LOADED] * models, flags=flags)
