import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vit_jax.data import three_augment
from vit_jax.data.three_augment import BRIGHTNESS, CONTRAST, SATURATION

_Y, _X = np.mgrid[0:41, 0:56]
SMOOTH = [20 + 3 * _X + _Y, 255 - 6 * _Y, 128 + 90 * np.sin(_X / 5) * np.cos(_Y / 9)]
PHOTO = np.stack(SMOOTH, axis=-1).clip(0, 255).astype(np.uint8)
NOISE = np.random.default_rng(2).integers(0, 256, (7, 5, 3), np.uint8)
change_color = jax.jit(three_augment.change_color)


def assert_as_pillow(image, expected, *, share=0.02):
    """Asserts equality, except for one level in a share of the values.

    XLA may round a product and a sum once instead of twice. This changes a value at the border of
    two levels, which a factor of two decimals often gives: 127 - 1.11 * 100.
    """
    apart = np.abs(np.asarray(image).astype(int) - np.asarray(expected))
    assert apart.max() <= 1 and (apart > 0).mean() <= share


@pytest.mark.parametrize('image', [PHOTO, NOISE], ids=['photo', 'noise'])
def test_a_blur_is_the_gaussian_blur_of_pillow(image):
    blur = jax.jit(three_augment.blur)
    for sigma in 0.1, 0.33, 0.7, 1.2, 1.41, 1.42, 1.7, 2.0:  # from 1.414 the box has five pixels
        expected = Image.fromarray(image).filter(ImageFilter.GaussianBlur(sigma))
        assert_as_pillow(blur(jnp.asarray(image), jnp.float32(sigma)), expected)


@pytest.mark.parametrize('factor', [0.0, 0.7, 0.93, 1.0, 1.11, 1.3])
def test_each_color_is_changed_as_by_pillow(factor):
    enhancers = ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color
    for operation, enhancer in zip((BRIGHTNESS, CONTRAST, SATURATION), enhancers, strict=True):
        for image in PHOTO, NOISE:
            expected = enhancer(Image.fromarray(image)).enhance(factor)
            found = change_color(jnp.asarray(image), operation, jnp.float32(factor))
            assert_as_pillow(found, expected, share=0.02 if factor % 1 else 0)


def test_an_image_becomes_gray_solarized_or_blurred_equally_often():
    image, pillow = jnp.asarray(PHOTO), Image.fromarray(PHOTO)
    change = functools.partial(three_augment.apply_three_augment, image=image)
    found = [*np.asarray(jax.jit(jax.vmap(change))(jax.random.split(jax.random.key(0), 300)))]
    for expected in pillow.convert('L').convert('RGB'), ImageOps.solarize(pillow):
        others = [one for one in found if (one != np.asarray(expected)).any()]
        assert 67 <= len(found) - len(others) <= 133  # 4 deviations of 300 draws of 1/3
        found = others

    limits = [pillow.filter(ImageFilter.GaussianBlur(sigma)) for sigma in (2.0, 1.9, 0.5, 0.1)]
    # A wider blur has a smaller variance.
    low, lower, higher, high = (np.var(one) for one in limits)
    assert low <= np.var(found, axis=(1, 2, 3)).min() < lower
    assert higher < np.var(found, axis=(1, 2, 3)).max() <= 1.01 * high  # rounded


def test_a_jitter_draws_every_order_and_factors_of_its_range():
    keys = jax.random.split(jax.random.key(0), 600)
    draw = functools.partial(three_augment.draw_color_jitter, strength=0.3)
    factors, orders = map(np.asarray, jax.jit(jax.vmap(draw))(keys))
    assert 0.7 <= factors.min() < 0.705 and 1.295 < factors.max() <= 1.3
    assert abs(np.corrcoef(factors.T) - np.eye(3)).max() < 0.17  # 4 deviations
    unique, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(unique) == 6 and all(63 <= count <= 137 for count in counts)  # 4 deviations of 1/6
