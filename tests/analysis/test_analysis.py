"""What is computed from activations: closed forms, other libraries, and activations in bfloat16."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.signal
import sklearn.decomposition

from vit_jax.analysis import (
    attention,
    cka,
    filters,
    localisation,
    positions,
    receptive_field,
    residual,
)
from vit_jax.analysis.receptive_field import receptive_fields
from vit_jax.base import UserError

RNG = np.random.default_rng(0)


def random_weights(*shape):
    weights = RNG.exponential(size=shape).astype(np.float32)
    return weights / weights.sum(axis=-1, keepdims=True)


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


KERNEL = RNG.normal(size=(2, 3, 2, 40)) * np.linspace(1, 5, 12).reshape(2, 3, 2, 1) + 2


@pytest.mark.full
def test_components_are_those_of_scikit_learn_up_to_sign():
    pca = sklearn.decomposition.PCA(5).fit(KERNEL.reshape(12, 40).T)
    found, shares = map(np.asarray, filters.principal_components(KERNEL, 5))
    signs = np.sign((found.reshape(5, 12) * pca.components_).sum(axis=1))
    np.testing.assert_allclose(found.reshape(5, 12).T * signs, pca.components_.T, atol=1e-4)
    np.testing.assert_allclose(shares, pca.explained_variance_ratio_, rtol=1e-5)


@pytest.mark.full
def test_a_kernel_of_the_other_sign_has_the_same_components():
    found = np.asarray(filters.principal_components(KERNEL)[0])
    np.testing.assert_allclose(filters.principal_components(-KERNEL)[0], found, atol=1e-5)
    flat = found.reshape(len(found), -1)
    assert (flat.max(axis=1) == np.abs(flat).max(axis=1)).all()


@pytest.mark.full
@pytest.mark.parametrize('width, there', [(40, 12), (13, 12), (12, 11), (5, 4), (1, 0)])
def test_there_are_no_more_components_than_differences_of_filters(width, there):
    found, shares = map(np.asarray, filters.principal_components(KERNEL[..., :width], 28))
    assert found.shape == (there, 2, 3, 2)
    flat = found.reshape(there, 12)
    np.testing.assert_allclose(flat @ flat.T, np.eye(there), atol=1e-5)
    if there:
        assert shares.sum() == pytest.approx(1, rel=1e-5)


def test_pictures_reach_from_black_to_white_each_alone():
    pictures = filters.as_picture(
        np.stack([KERNEL[..., 0], 9 * KERNEL[..., 1], 0 * KERNEL[..., 2]])
    )
    assert pictures.min(axis=(1, 2, 3)).tolist() == [0, 0, 0]
    np.testing.assert_allclose(pictures.max(axis=(1, 2, 3)), [1, 1, 0], rtol=1e-6)
    assert pictures.max() <= 1
    order = np.argsort(KERNEL[..., 0], axis=None)
    assert (np.diff(np.asarray(pictures[0]).reshape(-1)[order]) > 0).all()


def test_patches_are_the_pixels_of_each_position_row_after_row():
    images = RNG.normal(size=(2, 4, 9, 3))
    found = localisation.patches(images, (2, 3))
    assert found.shape == (6, 2, 2 * 3 * 3)
    np.testing.assert_array_equal(
        found[4].reshape(2, 2, 3, 3), images[:, 2:4, 3:6].astype(np.float32)
    )


def test_a_token_made_of_the_pixels_of_a_patch_is_about_that_patch_alone():
    """And one that is the same for all images is about none."""
    pixels = RNG.normal(size=(3, 6, 64, 12)).astype(np.float32)  # batches, patches, images
    rotation, _ = np.linalg.qr(RNG.normal(size=(12, 12)))
    tokens = (pixels @ rotation)[:, [4, 1, 0]].swapaxes(1, 2)
    tokens[:, :, 2] = 0.1
    total, *others = map(jax.jit(localisation.localisation), tokens, pixels)
    for other in others:
        total = jax.tree.map(operator.add, total, other)
    expected = np.zeros((3, 6))
    expected[0, 4] = expected[1, 1] = 1
    expected[2] = np.nan
    np.testing.assert_allclose(cka.ratio(*total), expected, atol=0.05)


def test_images_that_are_no_multiple_of_the_grid_are_refused():
    with pytest.raises(UserError, match='images of 5x6 pixels cannot be cut into 2x3 equal'):
        localisation.patches(np.zeros((1, 5, 6, 3)), (2, 3))


def test_a_position_is_wholly_like_itself_and_its_multiples():
    table = RNG.normal(size=(1, 2 + 6, 5))
    table[0, 2 + 4] = -3 * table[0, 2]  # row 1, column 1 of 2x3
    found = positions.similarity(table, (2, 3), prefix=2)
    assert found.shape == (2, 3, 2, 3)
    np.testing.assert_allclose(np.einsum('rcrc->rc', found), 1, atol=1e-6)
    assert found[0, 0, 1, 1] == pytest.approx(-1)
    expected = table[0, 3] @ table[0, 7] / np.linalg.norm(table[0, 3]) / np.linalg.norm(table[0, 7])
    assert found[0, 1, 1, 2] == pytest.approx(expected, abs=1e-6)
    np.testing.assert_array_equal(found, positions.similarity(table[0], (2, 3), prefix=2))


def test_an_embedding_of_zero_is_like_none():
    table = np.ones((6, 5))
    table[1] = 0
    found = np.asarray(positions.similarity(table, (2, 3), prefix=0))
    assert np.isnan(found[0, 1]).all() and np.isnan(found).sum() == 11


def test_rows_that_are_not_prefix_and_grid_are_refused():
    with pytest.raises(UserError, match='7 tokens: expected prefix=0 and 2x3 patches'):
        positions.similarity(np.ones((7, 4)), (2, 3), prefix=0)


IMAGES = RNG.normal(size=(3, 9, 11, 2)).astype(np.float32)
KERNELS = [RNG.normal(size=shape).astype(np.float32) for shape in ((3, 3, 2, 4), (3, 3, 4, 4))]


def convolved(images, kernel):
    dimensions = ('NHWC', 'HWIO', 'NHWC')
    return jax.lax.conv_general_dilated(
        images, kernel, (1, 1), 'SAME', dimension_numbers=dimensions, precision='highest'
    )


def centres(images):
    first = convolved(images, KERNELS[0])
    return jax.numpy.stack([x[:, 4, 5] for x in (first, convolved(first, KERNELS[1]))])


def test_the_field_of_a_convolution_is_its_kernel_and_of_two_their_composition():
    """Of linear layers it is that of any image; each channel drawn and colour counts alone."""
    drawn = np.array([[0, 1], [3, 3], [2, 0]])
    found = receptive_fields(centres, IMAGES, drawn)
    first, second = (kernel.astype(np.float64) for kernel in KERNELS)
    composed = sum(
        scipy.signal.convolve(first[:, :, :, [i]], second[:, :, i, None, :]) for i in range(4)
    )
    for field, kernel in zip(found, (first, composed), strict=True):
        expected = np.zeros((9, 11))
        r = kernel.shape[0] // 2
        weights = np.abs(kernel[..., drawn]).mean(axis=(2, 3, 4))
        expected[4 - r : 5 + r, 5 - r : 6 + r] = weights
        np.testing.assert_allclose(field, expected, atol=1e-5)


def test_the_ratio_is_that_of_lengths_token_by_token_or_place_by_place():
    lengths = RNG.uniform(1, 9, size=(2, 3, 4))
    branch = RNG.normal(size=(2, 3, 4, 5))
    skip = branch[..., ::-1] * lengths[..., None]
    np.testing.assert_allclose(residual.norm_ratio(skip, branch), lengths, rtol=1e-5)


def test_a_branch_that_adds_nothing_has_an_infinite_ratio_and_no_direction():
    skip, branch = np.ones((1, 3)), np.zeros((1, 3))
    assert residual.norm_ratio(skip, branch) == np.inf
    assert residual.norm_ratio(branch, skip) == 0
    assert np.isnan(residual.norm_ratio(branch, branch)).all()
    assert np.isnan(residual.cosine(branch, skip)).all()


def test_a_branch_at_right_angles_to_the_skip_makes_half_a_right_angle_with_the_sum():
    skip, branch = np.array([[3.0, 0, 4]]), np.array([[0.0, 5, 0]])
    np.testing.assert_allclose(residual.cosine(branch, skip + branch), np.sqrt(0.5), rtol=1e-6)
    np.testing.assert_allclose(residual.cosine(branch, -2 * branch), -1, rtol=1e-6)


TILES = {'grid': (2, 2), 'prefix': 1}
DISTANCE = functools.partial(attention.mean_distance, patch_size=(4, 4), **TILES)
CENTRES = functools.partial(receptive_field.receptive_fields, lambda x: x.mean((1, 2))[None])
CASES = {
    'centred_gram': (cka.centred_gram, (8, 3, 4)),
    'rollout': (attention.rollout, (2, 3, 4, 5, 5)),
    'mean_distance': (DISTANCE, (2, 3, 4, 5, 5)),
    'principal_components': (filters.principal_components, (2, 2, 3, 9)),
    'as_picture': (filters.as_picture, (9, 2, 2, 3)),
    'similarity': (functools.partial(positions.similarity, **TILES), (1, 5, 7)),
    'norm_ratio': (residual.norm_ratio, (2, 3, 4), (2, 3, 4)),
    'cosine': (residual.cosine, (2, 3, 4), (2, 3, 4)),
    'receptive_fields': (lambda x: CENTRES(x, jnp.zeros((2, 2), int)), (2, 4, 4, 3)),
    'localisation': (localisation.localisation, (8, 5, 3), (4, 8, 12)),
}


@pytest.mark.parametrize('name', CASES)
def test_activations_may_be_traced_and_what_is_computed_of_them_is_float32(name):
    function, *shapes = CASES[name]
    arrays = [jax.ShapeDtypeStruct((2, *shape), jnp.bfloat16) for shape in shapes]
    found = jax.tree.leaves(jax.eval_shape(jax.vmap(function), *arrays))
    assert {leaf.dtype for leaf in found} == {jnp.dtype('float32')}


@pytest.mark.full
@pytest.mark.parametrize('name', CASES)
def test_nothing_is_rounded_after_the_activations(name):
    function, *shapes = CASES[name]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    rounded = [jax.random.uniform(*pair, jnp.bfloat16) for pair in zip(keys, shapes, strict=True)]
    found = jax.jit(function)(*rounded)
    expected = jax.jit(function)(*(x.astype(jnp.float32) for x in rounded))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, expected
    )
