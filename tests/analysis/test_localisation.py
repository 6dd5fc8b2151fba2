import operator

import jax
import numpy as np
import pytest

from vit_jax.analysis import cka
from vit_jax.analysis.localisation import localisation, patches
from vit_jax.base import UserError

RNG = np.random.default_rng(0)


def test_patches_are_the_pixels_of_each_position_row_after_row():
    images = RNG.normal(size=(2, 4, 9, 3))
    found = patches(images, (2, 3))
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
    total, *others = map(jax.jit(localisation), tokens, pixels)
    for other in others:
        total = jax.tree.map(operator.add, total, other)
    expected = np.zeros((3, 6))
    expected[0, 4] = expected[1, 1] = 1
    expected[2] = np.nan
    np.testing.assert_allclose(cka.ratio(*total), expected, atol=0.05)


def test_images_that_are_no_multiple_of_the_grid_are_refused():
    with pytest.raises(UserError, match='images of 5x6 pixels cannot be cut into 2x3 equal'):
        patches(np.zeros((1, 5, 6, 3)), (2, 3))
