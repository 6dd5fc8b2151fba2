import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.data.augment import augment, normalize
from vit_jax.data.transforms import Preprocessing

IMAGES = np.random.default_rng(0).integers(0, 256, (64, 6, 7, 3), np.uint8)
ON_DEVICE = jnp.asarray(IMAGES)


def test_nothing_asked_for_changes_nothing():
    result = augment(jax.random.key(0), ON_DEVICE, flip=False, shift_pixels=0)
    np.testing.assert_array_equal(result, IMAGES)


def test_about_half_the_images_are_flipped_and_none_otherwise_changed():
    result = np.asarray(augment(jax.random.key(0), ON_DEVICE, flip=True, shift_pixels=0))
    same = (result == IMAGES).all(axis=(1, 2, 3))
    flipped = (result == IMAGES[:, :, ::-1]).all(axis=(1, 2, 3))
    assert (same ^ flipped).all() and 16 < flipped.sum() < 48  # 4 deviations of 64 coins


def test_each_image_is_moved_by_its_own_whole_pixels():
    result = np.asarray(augment(jax.random.key(0), ON_DEVICE, flip=False, shift_pixels=2))
    padded = np.pad(IMAGES, ((0, 0), (2, 2), (2, 2), (0, 0)), mode='edge')
    corners = set()
    for image, wide in zip(result, padded, strict=True):
        found = [
            (y, x)
            for y in range(5)
            for x in range(5)
            if (wide[y : y + 6, x : x + 7] == image).all()
        ]
        assert len(found) == 1
        corners.update(found)
    assert len(corners) > 15  # of 25


def test_normalize_maps_black_to_minus_one_and_white_to_one():
    pixels = np.zeros((1, 1, 2, 3), np.uint8)
    pixels[0, 0, 1] = 255
    pixels = jnp.asarray(pixels)
    assert normalize(pixels, Preprocessing())[0, 0, :, 0].tolist() == [-1, 1]
    by_channel = Preprocessing(mean=(0.0, 255.0, 51.0), std=(255.0, 255.0, 51.0))
    assert normalize(pixels, by_channel)[0, 0, 1].tolist() == [1, 0, 4]
