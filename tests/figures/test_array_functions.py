"""Functions of arrays that compute the numbers of one figure: closed forms and other libraries."""

import functools
import operator
import subprocess
import sys

import jax
import numpy as np
import pytest
import scipy.signal
import sklearn.decomposition

from tests.analysis.test_analysis import check_float32
from vit_jax.analysis import cka
from vit_jax.base import UserError
from vit_jax.figures import filters, localization, positions
from vit_jax.figures.receptive_fields import receptive_fields

RNG = np.random.default_rng(0)
WITHOUT_MATPLOTLIB = """
import sys

sys.modules['matplotlib'] = None  # its import fails
from vit_jax.figures import curves
from vit_jax.figures.figure import NAMES, find_figure

for name in NAMES:
    find_figure(name)
"""


@pytest.mark.gate
def test_modules_of_figures_can_be_imported_without_matplotlib():
    subprocess.run([sys.executable, '-c', WITHOUT_MATPLOTLIB], check=True, timeout=300)


def test_numbers_of_tokens_and_pixels_must_match_the_grid():
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
    rng = np.random.default_rng(0)  # the noise of CKA must be below the tolerance
    pixels = rng.normal(size=(3, 6, 64, 12)).astype(np.float32)  # batches, patches, images
    rotation, _ = np.linalg.qr(rng.normal(size=(12, 12)))
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


CASES = {
    'components': (filters.principal_components, (2, 2, 3, 9)),
    'positions': (
        functools.partial(positions.position_similarity, grid=(2, 2), prefix=1),
        (1, 5, 7),
    ),
    'localization': (localization.compare_with_patches, (8, 5, 3), (4, 8, 12)),
}


@pytest.mark.parametrize('name', CASES)
def test_bfloat16_activations_are_reduced_in_float32(name):
    check_float32(*CASES[name])
