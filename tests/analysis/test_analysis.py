"""What is computed from activations: closed forms, other libraries, and activations in bfloat16."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.signal
import sklearn.decomposition

from vit_jax.analysis import attention, cka, residual
from vit_jax.base import UserError
from vit_jax.figures import filters, localization, positions
from vit_jax.figures.receptive_fields import receptive_fields

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


def test_numbers_of_tokens_and_pixels_must_match_the_grid():
    with pytest.raises(UserError, match='0 prefix tokens'):
        attention.mean_attention_distance(random_weights(1, 1, 1, 7, 7), (2, 3), (8, 8), prefix=0)
    with pytest.raises(UserError, match='0 prefix tokens'):
        positions.position_similarity(np.ones((7, 4)), (2, 3), prefix=0)
    with pytest.raises(UserError, match='5x6'):
        localization.split_into_patches(np.zeros((1, 5, 6, 3)), (2, 3))


KERNEL = RNG.normal(size=(2, 3, 2, 40)) * np.linspace(1, 5, 12).reshape(2, 3, 2, 1) + 2


@pytest.mark.parametrize('width, count', [(40, 12), (13, 12), (12, 11), (1, 0)])
def test_components_are_those_of_scikit_learn_with_a_positive_largest_entry(width, count):
    kernel = KERNEL[..., :width]
    found, shares = map(np.asarray, filters.principal_components(kernel, 28))
    assert found.shape == (count, 2, 3, 2)
    flat = found.reshape(count, 12)
    assert (flat.max(axis=1, initial=0) == np.abs(flat).max(axis=1, initial=0)).all()
    if count:
        pca = sklearn.decomposition.PCA(count).fit(kernel.reshape(12, width).T)
        signs = np.sign((flat * pca.components_).sum(axis=1))
        np.testing.assert_allclose(flat.T * signs, pca.components_.T, atol=1e-4)
        np.testing.assert_allclose(shares, pca.explained_variance_ratio_, rtol=1e-4)


def test_each_picture_reaches_from_black_to_white():
    kernels = np.stack([KERNEL[..., 0], 9 * KERNEL[..., 1], 0 * KERNEL[..., 2]])
    pictures = filters.to_unit_range(kernels)
    assert pictures.min(axis=(1, 2, 3)).tolist() == [0, 0, 0]
    np.testing.assert_allclose(pictures.max(axis=(1, 2, 3)), [1, 1, 0], rtol=1e-6)


def test_patches_are_the_pixels_of_each_position_row_after_row():
    images = RNG.normal(size=(2, 4, 9, 3)).astype(np.float32)
    found = localization.split_into_patches(images, (2, 3))
    assert found.shape == (6, 2, 2 * 3 * 3)
    np.testing.assert_array_equal(found[4].reshape(2, 2, 3, 3), images[:, 2:4, 3:6])


def test_a_token_made_of_the_pixels_of_a_patch_represents_that_patch_alone():
    """The row of a token that is the same for all images is NaN."""
    pixels = RNG.normal(size=(3, 6, 64, 12)).astype(np.float32)  # batches, patches, images
    rotation, _ = np.linalg.qr(RNG.normal(size=(12, 12)))
    tokens = (pixels @ rotation)[:, [4, 1, 0]].swapaxes(1, 2)
    tokens[:, :, 2] = 0.1
    total, *others = map(jax.jit(localization.compare_with_patches), tokens, pixels)
    for other in others:
        total = jax.tree.map(operator.add, total, other)
    expected = np.zeros((3, 6))
    expected[0, 4] = expected[1, 1] = 1
    expected[2] = np.nan
    np.testing.assert_allclose(cka.ratio(*total), expected, atol=0.05)


def test_a_position_is_similar_to_itself_and_its_multiples():
    table = RNG.normal(size=(1, 2 + 6, 5))
    table[0, 2 + 4] = -3 * table[0, 2]  # row 1, column 1 of 2x3
    table[0, 2 + 1] = 0
    found = np.asarray(positions.position_similarity(table, (2, 3), prefix=2))
    np.testing.assert_allclose(np.einsum('rcrc->rc', found)[1], 1, atol=1e-6)
    assert found[0, 0, 1, 1] == pytest.approx(-1)
    assert np.isnan(found[0, 1]).all() and np.isnan(found).sum() == 11
    expected = table[0, 4] @ table[0, 7] / np.linalg.norm(table[0, 4]) / np.linalg.norm(table[0, 7])
    assert found[0, 2, 1, 2] == pytest.approx(expected, abs=1e-6)


IMAGES = RNG.normal(size=(3, 9, 11, 2)).astype(np.float32)
KERNELS = [RNG.normal(size=shape).astype(np.float32) for shape in ((3, 3, 2, 4), (3, 3, 4, 4))]


def convolved(images, kernel):
    dimensions = ('NHWC', 'HWIO', 'NHWC')
    return jax.lax.conv_general_dilated(
        images, kernel, (1, 1), 'SAME', dimension_numbers=dimensions, precision='highest'
    )


def centers(images):
    first = convolved(images, KERNELS[0])
    return jax.numpy.stack([x[:, 4, 5] for x in (first, convolved(first, KERNELS[1]))])


def test_the_field_of_a_convolution_is_its_kernel_and_of_two_their_composition():
    """Each channel and color counts alone."""
    channels = np.array([[0, 1], [3, 3], [2, 0]])
    found = receptive_fields(centers, IMAGES, channels)
    first, second = (kernel.astype(np.float64) for kernel in KERNELS)
    composed = sum(
        scipy.signal.convolve(first[:, :, :, [i]], second[:, :, i, None, :]) for i in range(4)
    )
    for field, kernel in zip(found, (first, composed), strict=True):
        expected = np.zeros((9, 11))
        r = kernel.shape[0] // 2
        weights = np.abs(kernel[..., channels]).mean(axis=(2, 3, 4))
        expected[4 - r : 5 + r, 5 - r : 6 + r] = weights
        np.testing.assert_allclose(field, expected, atol=1e-5)


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
    'components': (filters.principal_components, (2, 2, 3, 9)),
    'positions': (functools.partial(positions.position_similarity, **TILES), (1, 5, 7)),
    'norm_ratio': (residual.norm_ratio, (2, 3, 4), (2, 3, 4)),
    'cosine': (residual.cosine, (2, 3, 4), (2, 3, 4)),
    'localization': (localization.compare_with_patches, (8, 5, 3), (4, 8, 12)),
}


@pytest.mark.parametrize('name', CASES)
def test_bfloat16_activations_are_reduced_in_float32(name):
    function, *shapes = CASES[name]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    rounded = [jax.random.uniform(*pair, jnp.bfloat16) for pair in zip(keys, shapes, strict=True)]
    found = jax.jit(function)(*rounded)
    expected = jax.jit(function)(*(x.astype(jnp.float32) for x in rounded))
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype('float32')}
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, expected
    )
