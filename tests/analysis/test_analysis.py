"""What is computed from activations: closed forms, other libraries, and activations in bfloat16."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.analysis import attention, cka, residual
from vit_jax.base import UserError

RNG = np.random.default_rng(0)


def random_weights(*shape):
    weights = RNG.exponential(size=shape).astype(np.float32)
    return weights / weights.sum(axis=-1, keepdims=True)


def test_rollout_applies_the_first_layer_first_and_averages_heads():
    """Rows that do not sum to one are normalized together with the identity."""
    weights = random_weights(2, 1, 3, 4, 4)
    first, second = (np.eye(4) + weights.mean(axis=2)[:, 0]) / 2
    np.testing.assert_allclose(attention.rollout(weights)[0], second @ first, rtol=1e-5)
    rolled = attention.rollout(np.full((1, 1, 1, 2, 2), 0.25))
    np.testing.assert_allclose(rolled[0], np.array([[5, 1], [1, 5]]) / 6, rtol=1e-6)


@pytest.mark.parametrize('prefix', [0, 1, 3])
def test_the_distance_of_uniform_attention_is_the_closed_form(prefix):
    """For a row of n patches it is (n^2 - 1) / 3n of a patch."""
    for (rows, columns), size in (((3, 5), (16, 8)), ((1, 7), (4, 32)), ((6, 1), (14, 2))):
        n = rows * columns
        weights = np.zeros((2, 3, 1, prefix + n, prefix + n), np.float32)
        weights[..., prefix:] = 1 / n
        found = attention.mean_attention_distance(weights, (rows, columns), size, prefix=prefix)
        uniform = attention.uniform_distance((rows, columns), size)
        np.testing.assert_allclose(found, np.full((2, 1), uniform), rtol=1e-6)
    assert attention.uniform_distance((1, 7), (4, 32)) == pytest.approx(48 / 21 * 32)


def test_a_head_that_attends_to_the_next_patch_has_the_distance_of_a_patch():
    down, aside = (np.roll(np.eye(12), shift, axis=1) for shift in (4, 1))
    down[8:] = aside[3::4] = 0  # outside the grid of 3x4
    weights = np.stack([down, aside])[None, None]
    found = attention.mean_attention_distance(weights, (3, 4), (10, 100), prefix=0)
    np.testing.assert_allclose(found, [[10 * 8 / 12, 100 * 9 / 12]], rtol=1e-6)


def test_attention_to_the_class_token_has_no_distance():
    weights = random_weights(2, 3, 4, 7, 7)
    halved = weights.copy()
    halved[..., 1:] /= 2
    halved[..., 0, :] = 1  # its own row is left out
    found = [
        attention.mean_attention_distance(w, (2, 3), (8, 8), prefix=1) for w in (weights, halved)
    ]
    np.testing.assert_allclose(found[1], found[0] / 2, rtol=1e-5)


def test_the_number_of_tokens_must_match_the_grid():
    with pytest.raises(UserError, match='0 prefix tokens'):
        attention.mean_attention_distance(random_weights(1, 1, 1, 7, 7), (2, 3), (8, 8), prefix=0)


def test_ratio_and_cosine_are_computed_for_each_token():
    lengths = RNG.uniform(1, 9, size=(2, 3, 4))
    branch = RNG.normal(size=(2, 3, 4, 5))
    skip = branch[..., ::-1] * lengths[..., None]
    np.testing.assert_allclose(residual.norm_ratio(skip, branch), lengths, rtol=1e-5)
    skip, branch = np.array([[3.0, 0, 4]]), np.array([[0.0, 5, 0]])
    np.testing.assert_allclose(residual.cosine(branch, skip + branch), np.sqrt(0.5), rtol=1e-6)
    np.testing.assert_allclose(residual.cosine(branch, -2 * branch), -1, rtol=1e-6)
    assert residual.norm_ratio(skip, 0 * branch) == np.inf


TILES = {'grid': (2, 2), 'prefix': 1}
CASES = {
    'centered_gram': (cka.centered_gram, (8, 3, 4)),
    'rollout': (attention.rollout, (2, 3, 4, 5, 5)),
    'distance': (
        functools.partial(attention.mean_attention_distance, patch_size=(4, 4), **TILES),
        (2, 3, 4, 5, 5),
    ),
    'norm_ratio': (residual.norm_ratio, (2, 3, 4), (2, 3, 4)),
    'cosine': (residual.cosine, (2, 3, 4), (2, 3, 4)),
}


def check_float32(function, *shapes):
    """bfloat16 inputs of these shapes give what the same values in float32 give, in float32."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    rounded = [jax.random.uniform(*pair, jnp.bfloat16) for pair in zip(keys, shapes, strict=True)]
    found = jax.jit(function)(*rounded)
    expected = jax.jit(function)(*(x.astype(jnp.float32) for x in rounded))
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype('float32')}
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, expected
    )


@pytest.mark.parametrize('name', CASES)
def test_bfloat16_activations_are_reduced_in_float32(name):
    check_float32(*CASES[name])
