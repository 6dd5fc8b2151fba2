import numpy as np
import pytest

from vit_jax.analysis import attention
from vit_jax.base import UserError

RNG = np.random.default_rng(0)


def random_weights(*shape):
    weights = RNG.exponential(size=shape).astype(np.float32)
    return weights / weights.sum(axis=-1, keepdims=True)


def test_rollout_rows_sum_to_one():
    rolled = attention.rollout(random_weights(3, 2, 4, 7, 7))
    assert rolled.shape == (2, 7, 7)
    np.testing.assert_allclose(rolled.sum(axis=-1), 1, rtol=1e-6)


@pytest.mark.full
def test_rollout_of_the_identity_is_the_identity():
    weights = np.broadcast_to(np.eye(5), (3, 2, 4, 5, 5))
    np.testing.assert_allclose(attention.rollout(weights), [np.eye(5)] * 2, atol=1e-6)


def test_rollout_applies_the_first_layer_first_and_averages_heads():
    weights = random_weights(2, 1, 3, 4, 4)
    first, second = (np.eye(4) + weights.mean(axis=2)[:, 0]) / 2
    np.testing.assert_allclose(attention.rollout(weights)[0], second @ first, rtol=1e-5)


@pytest.mark.full
def test_tokens_that_attend_with_half_their_weight_keep_more_of_themselves():
    """Rows that do not sum to one, as of a masked attention, are normalised with the identity."""
    rolled = attention.rollout(np.full((1, 1, 1, 2, 2), 0.25))
    np.testing.assert_allclose(rolled[0], np.array([[5, 1], [1, 5]]) / 6, rtol=1e-6)


@pytest.mark.parametrize('prefix', [0, 1, 3])
def test_the_distance_of_an_attention_to_all_alike_is_the_closed_form(prefix):
    """Counted by offsets; of a row of n patches it is (n^2 - 1) / 3n of a patch."""
    for (rows, columns), size in (((3, 5), (16, 8)), ((1, 7), (4, 32)), ((6, 1), (14, 2))):
        n = rows * columns
        weights = np.zeros((2, 3, 1, prefix + n, prefix + n), np.float32)
        weights[..., prefix:] = 1 / n
        found = attention.mean_distance(weights, (rows, columns), size, prefix=prefix)
        uniform = attention.uniform_distance((rows, columns), size)
        np.testing.assert_allclose(found, np.full((2, 1), uniform), rtol=1e-6)
    assert attention.uniform_distance((1, 7), (4, 32)) == pytest.approx(48 / 21 * 32)
    assert attention.uniform_distance((6, 1), (14, 2)) == pytest.approx(35 / 18 * 14)


def test_a_head_that_looks_one_patch_aside_looks_as_far_as_a_patch_is_wide():
    down, aside = (np.roll(np.eye(12), shift, axis=1) for shift in (4, 1))
    down[8:] = aside[3::4] = 0  # what left the grid of 3x4
    weights = np.stack([down, aside])[None, None]
    found = attention.mean_distance(weights, (3, 4), (10, 100), prefix=0)
    np.testing.assert_allclose(found, [[10 * 8 / 12, 100 * 9 / 12]], rtol=1e-6)


def test_attention_to_the_class_token_counts_as_none():
    weights = random_weights(2, 3, 4, 7, 7)
    halved = weights.copy()
    halved[..., 1:] /= 2
    halved[..., 0, :] = 1  # its own row is left out
    found = [attention.mean_distance(w, (2, 3), (8, 8), prefix=1) for w in (weights, halved)]
    np.testing.assert_allclose(found[1], found[0] / 2, rtol=1e-5)


def test_tokens_that_are_not_prefix_and_grid_are_refused():
    weights = random_weights(1, 1, 1, 7, 7)
    with pytest.raises(UserError, match='7 tokens: expected prefix=0 and 2x3 patches'):
        attention.mean_distance(weights, (2, 3), (8, 8), prefix=0)
    with pytest.raises(UserError, match='prefix=-1'):
        attention.mean_distance(weights, (2, 4), (8, 8), prefix=-1)
