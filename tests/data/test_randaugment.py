import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from vit_jax.data import augmentation
from vit_jax.data.augmentation import OPERATIONS, RandAugment

# Smooth, of every value, no two channels alike: what a photo is to these operations.
_Y, _X = np.mgrid[0:40, 0:40]
PHOTO = np.stack(
    [20 + 3 * _X + _Y, 255 - 6 * _Y, 128 + 90 * np.sin(_X / 5) * np.cos(_Y / 9)], axis=-1
).astype(np.uint8)


@functools.partial(jax.jit, static_argnames=('magnitude', 'contrast'))
def _operate(key, image, operation, *, magnitude, contrast):
    return augmentation.apply_op(key, image, operation, magnitude=magnitude, contrast=contrast)


def operated(name, magnitude, *, image=PHOTO, key=0, contrast='mean'):
    operation = jnp.asarray(OPERATIONS.index(name))
    options = {'magnitude': float(magnitude), 'contrast': contrast}
    return np.asarray(_operate(jax.random.key(key), jnp.asarray(image), operation, **options))


def pillow(name, magnitude):
    image, factor = Image.fromarray(PHOTO), 0.1 + 0.18 * magnitude
    enhancers = {
        'color': ImageEnhance.Color,
        'contrast': ImageEnhance.Contrast,
        'brightness': ImageEnhance.Brightness,
        'sharpness': ImageEnhance.Sharpness,
    }
    if name in enhancers:
        return np.asarray(enhancers[name](image).enhance(factor))
    functions = {
        'auto_contrast': ImageOps.autocontrast,
        'equalize': ImageOps.equalize,
        'invert': ImageOps.invert,
        'posterize': lambda image: ImageOps.posterize(image, int(0.4 * magnitude)),
        'solarize': lambda image: ImageOps.solarize(image, int(25.6 * magnitude)),
    }
    return np.asarray(functions[name](image))


BY_VALUE = OPERATIONS[:3] + OPERATIONS[4:10]


@pytest.mark.parametrize('magnitude', [4, 9, 15])
@pytest.mark.parametrize('name', BY_VALUE)
def test_values_become_what_pillow_makes_of_them(name, magnitude):
    # Pillow rounds its tables in float64 and its gray to other thousandths: one level, which
    # `color` multiplies by its factor of at most 2.8.
    tolerance = {'auto_contrast': 1, 'color': 2}.get(name, 0)
    found, expected = operated(name, magnitude).astype(int), pillow(name, magnitude)
    np.testing.assert_allclose(found, expected, atol=tolerance)


def test_solarize_add_brightens_the_dark_half():
    added = np.minimum(PHOTO.astype(int) + 55, 255)
    np.testing.assert_array_equal(operated('solarize_add', 5), np.where(PHOTO < 128, added, PHOTO))


def test_a_quarter_turn_is_a_quarter_turn():
    turned = {operated('rotate', 30, key=key).tobytes() for key in range(12)}
    assert turned == {np.rot90(PHOTO, k).copy().tobytes() for k in (1, 3)}


@pytest.mark.parametrize('name, axis', [('translate_x', 1), ('translate_y', 0)])
def test_translation_moves_by_a_part_of_the_side_and_uncovers_gray(name, axis):
    # 100 pixels of 224 at magnitude 10: 25 of 40 pixels at magnitude 14
    image = PHOTO if axis == 1 else PHOTO.swapaxes(0, 1)
    forward = np.concatenate([np.full((40, 25, 3), 128), image[:, :15]], axis=1)
    backward = np.concatenate([image[:, 25:], np.full((40, 25, 3), 128)], axis=1)
    expected = {e.astype(np.uint8).swapaxes(0, 1 - axis).tobytes() for e in (forward, backward)}
    assert {operated(name, 14, key=key).tobytes() for key in range(12)} == expected


@pytest.mark.parametrize('name, axis', [('shear_x', 1), ('shear_y', 0)])
def test_shearing_moves_each_line_by_its_number(name, axis):
    image = PHOTO if axis == 1 else PHOTO.swapaxes(0, 1)
    expected = set()
    for sign in 1, -1:
        sheared = np.full_like(image, 128)
        for row in range(40):
            shift = round(0.33 * row)
            if sign > 0:
                sheared[row, : 40 - shift] = image[row, shift:]
            else:
                sheared[row, shift:] = image[row, : 40 - shift]
        expected.add(sheared.swapaxes(0, 1 - axis).tobytes())
    assert {operated(name, 11, key=key).tobytes() for key in range(12)} == expected


def test_cutout_hides_one_square():
    for key in range(5):
        hidden = (operated('cutout', 10, key=key) != PHOTO).any(axis=-1)
        rows, columns = np.flatnonzero(hidden.any(axis=1)), np.flatnonzero(hidden.any(axis=0))
        # 80 pixels of 224: 14 of 40, fewer at the edge
        assert 7 <= np.ptp(rows) + 1 <= 14 and 7 <= np.ptp(columns) + 1 <= 14
        inside = operated('cutout', 10, key=key)[
            rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1
        ]
        assert (inside == 128).all()


def test_the_originals_contrast_is_measured_from_the_number_of_pixels():
    flat = np.full((40, 40, 3), 60, np.uint8)
    found = operated('contrast', 15, image=flat, contrast='pixel_count')
    assert found[0, 0, 0] == int(40 * 40 / 256 + 2.8 * (60 - 40 * 40 / 256))
    np.testing.assert_array_equal(operated('contrast', 15, image=flat), flat)


def test_magnitude_zero_is_at_its_strongest_for_two_operations():
    assert not operated('posterize', 0).any()
    np.testing.assert_array_equal(operated('solarize', 0), 255 - PHOTO)


@pytest.mark.gate
def test_every_operation_is_drawn_and_each_layer_draws_its_own():
    config = RandAugment(layers=1, magnitude=9.0)
    keys = jax.random.split(jax.random.key(1), 300)
    image = jnp.asarray(PHOTO)
    once = jax.jit(jax.vmap(lambda key: augmentation.apply_randaugment(key, image, config)))(keys)
    fixed = {n: operated(n, 9).tobytes() for n in OPERATIONS[:11] if n != 'rotate'}
    seen = [np.asarray(image).tobytes() for image in once]
    for name, expected in fixed.items():
        if not name.startswith('shear'):
            assert 4 <= seen.count(expected) <= 38, name  # 300 / 16, 4 deviations
    assert not (np.asarray(once) == PHOTO).all(axis=(1, 2, 3)).any()
    twice = RandAugment(layers=2, magnitude=9.0)
    result = jax.jit(lambda key: augmentation.apply_randaugment(key, image, twice))(keys[0])
    assert (np.asarray(result) != np.asarray(once[0])).any()
