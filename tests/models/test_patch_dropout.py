"""PatchDropout: which patches are left in training, and what the network computes of them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from vit_jax.base.errors import UserError
from vit_jax.models import Regularization, build, count_multiply_adds, positions, variant

HALF, KEY = Regularization(patch_dropout=0.5), jax.random.key(0)


def test_each_example_keeps_as_many_patches_each_of_them_equally_often():
    examples, patches, count = 4000, 9, 4
    kept = np.asarray(positions.draw_kept(KEY, (examples, patches), count))
    assert kept.shape == (examples, count)
    assert (np.diff(kept, axis=1) > 0).all() and kept.min() >= 0 and kept.max() < patches
    frequency = np.bincount(kept.reshape(-1), minlength=patches) / examples
    rate = count / patches
    deviation = math.sqrt(rate * (1 - rate) / examples)
    np.testing.assert_allclose(frequency, rate, atol=5 * deviation)


@pytest.mark.gate
@pytest.mark.parametrize(
    'values',
    [
        {'positions': 'learned_rope', 'registers': 4, 'pool': 'cls_dist'},
        {'pool': 'gap', 'positions': 'sincos2d'},
        {'pool': 'cls_gap', 'positions': 'rope', 'registers': 2},
        {'pool': 'map', 'positions_at': 'every_layer', 'registers': 1, 'class_tokens': 1},
        {'positions_at': 'every_layer_shared', 'positions': 'learned2d', 'registers': 3},
    ],
)
def test_kept_patches_have_their_own_positions(values, monkeypatch):
    """If all are kept in another order, it changes nothing: no head depends on the order."""
    config = tiny.model(image_size=(8, 12), **values)
    model, params = tiny.built(config, regularization=HALF)
    orders = np.random.default_rng(0).permuted(np.tile(np.arange(6), (2, 1)), axis=1)
    monkeypatch.setattr(positions, 'draw_kept', lambda *_: jnp.asarray(orders))
    images, apply = tiny.images(config=config), jax.jit(model.apply)
    # Sums over tokens are taken in another order.
    np.testing.assert_allclose(
        apply(params, images, KEY), apply(params, images), rtol=2e-5, atol=2e-6
    )


def test_class_tokens_and_registers_stay_and_evaluation_has_all_patches():
    config = tiny.model(pool='none', class_tokens=2, registers=3, num_classes=None)
    model, params = tiny.built(config, regularization=HALF)
    images = tiny.images()
    kept = jax.eval_shape(model.apply, params, images, KEY)
    assert kept.shape == (2, 2 + 3 + 2, config.width)
    programs = [jax.jit(one.apply).lower(params, images) for one in (model, build(config))]
    assert programs[0].as_text() == programs[1].as_text()


@pytest.mark.gate
def test_a_dropped_patch_has_no_influence(monkeypatch):
    model, params = tiny.built(tiny.model(), regularization=HALF)
    monkeypatch.setattr(positions, 'draw_kept', lambda *_: jnp.array([[0, 3]]))
    gradient = jax.jit(jax.grad(lambda x: model.apply(params, x, KEY).std()))(tiny.images(1))
    rows = np.abs(gradient).reshape(2, 4, 2, 4, 3).sum(axis=(1, 3, 4)) > 0
    np.testing.assert_array_equal(rows, [[True, False], [False, True]])


def test_multiply_adds_are_those_of_the_tokens_that_are_left():
    config = variant('Ti/16', num_classes=None)
    d, hidden, n, m = config.width, config.mlp_dim, 197, 99
    per_block = (n - m) * (4 * d * d + 2 * d * hidden) + (n * n - m * m) * 2 * d
    saved = count_multiply_adds(config) - count_multiply_adds(config, regularization=HALF)
    assert saved == config.depth * per_block


@pytest.mark.parametrize(
    'values, rate, named',
    [
        ({'positions': 'relative'}, 0.5, 'positions=relative'),
        ({'patch_outputs': 3}, 0.5, 'patch_outputs'),
        ({}, 0.9, 'keeps no patch of 4'),
    ],
)
def test_what_needs_all_patches_is_rejected(values, rate, named):
    with pytest.raises(UserError, match=f'regularization.patch_dropout={rate}: .*{named}'):
        build(tiny.model(**values), regularization=Regularization(patch_dropout=rate))


def test_the_number_of_kept_patches_is_rounded_to_the_nearest():
    counts = [Regularization(patch_dropout=rate).num_kept(49) for rate in (0.25, 0.5, 0.7)]
    assert counts == [37, 24, 15]  # of 36.75, 24.5 and 14.7; halves to even
