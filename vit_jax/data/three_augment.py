"""3-Augment and color jitter on the device (DeiT III, Touvron et al. 2022, section 3.2).

The original calls Pillow and torchvision, which round to 8 bits after each operation. These
functions round in the same places. Few pixels differ, by one gray level, because XLA may fuse a
product and a sum in float32 (FMA), which rounds once instead of twice.
"""

import functools

import jax
import jax.numpy as jnp

from vit_jax.base import Array, Float, Int, Key, Scalar, UInt8

Image = UInt8[Array, 'h w 3']
_SIGMA = 0.1, 2.0  # range of the standard deviation of the blur, in pixels
_SOLARIZE = 128  # solarize inverts values from here on
_PASSES = 3  # box filters of a blur in each direction
_LUMA = 19595, 38470, 7471  # weights of red, green and blue in 2^16 parts (ITU-R 601-2)
BRIGHTNESS, CONTRAST, SATURATION = range(3)  # operations of the color jitter


def apply_three_augment(key: Key[Array, ''], image: Image) -> Image:
    """Converts the image to gray, solarizes or blurs it; each has probability 1/3."""
    choice_key, sigma_key = jax.random.split(key)
    choice = jax.random.randint(choice_key, (), 0, 3)
    low, high = _SIGMA
    sigma = jax.random.uniform(sigma_key, (), minval=low, maxval=high)
    gray = jnp.broadcast_to(_to_gray(image)[..., None], image.shape).astype(jnp.uint8)
    solarized = jnp.where(image < _SOLARIZE, image, 255 - image)
    return jax.lax.select_n(choice, gray, solarized, blur(image, sigma))


def blur(image: Image, sigma: Float[Array, '']) -> Image:
    """Blurs the image as Pillow's GaussianBlur does: with three box filters in each direction.

    The boxes have fractional ends (Gwosdek et al. 2011). They have at most five pixels, which
    suffices up to a `sigma` of 2.4. Edge pixels are repeated.
    """
    variance = sigma * sigma / _PASSES
    whole = jnp.floor((jnp.sqrt(12 * variance + 1) - 1) / 2)  # the whole part of the box's radius
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance)
    part = part / (6 * (variance - (whole + 1) ** 2))
    middle = (2**24 / (2 * (whole + part) + 1)).astype(jnp.uint32)
    end = (2**24 - (2 * whole.astype(jnp.uint32) + 1) * middle) // 2
    near = jnp.where(whole > 0, middle, end)
    far = jnp.where(whole > 0, end, 0)

    def apply_box(axis: int, _: Int[Array, ''], pixels: Image) -> Image:
        padded = jnp.pad(pixels, [(2, 2) if n == axis else (0, 0) for n in range(3)], mode='edge')
        padded = padded.astype(jnp.uint32)
        length = pixels.shape[axis]
        second_left, left, center, right, second_right = (
            jax.lax.slice_in_dim(padded, i, i + length, axis=axis) for i in range(5)
        )
        total = middle * center + near * (left + right) + far * (second_left + second_right)
        return ((total + 2**23) >> 24).astype(jnp.uint8)

    for axis in 1, 0:
        # In a loop, because XLA fuses the boxes otherwise and computes them again for each pixel.
        image = jax.lax.fori_loop(0, _PASSES, functools.partial(apply_box, axis), image)
    return image


def apply_color_jitter(key: Key[Array, ''], image: Image, strength: Scalar) -> Image:
    """Changes brightness, contrast and saturation by random factors, in random order."""
    factors, order = draw_color_jitter(key, strength)
    for operation in order:
        image = change_color(image, operation, factors[operation])
    return image


def draw_color_jitter(
    key: Key[Array, ''], strength: Scalar
) -> tuple[Float[Array, '3'], Int[Array, '3']]:
    """Draws a factor in 1 - strength to 1 + strength for each operation, and their order."""
    factor_key, order_key = jax.random.split(key)
    factors = jax.random.uniform(factor_key, (3,), minval=1 - strength, maxval=1 + strength)
    return factors, jax.random.permutation(order_key, 3)


def change_color(image: Image, operation: Int[Array, ''], factor: Float[Array, '']) -> Image:
    """Blends the image with black (BRIGHTNESS), its mean gray (CONTRAST) or its gray (SATURATION).

    A factor of 1 changes nothing; a factor of 0 returns the other image.
    """
    gray = _to_gray(image)
    mean = (gray.sum() + gray.size // 2) // gray.size
    other = jax.lax.select_n(operation, jnp.zeros_like(gray), jnp.full_like(gray, mean), gray)
    other = other[..., None].astype(jnp.float32)
    pixels = image.astype(jnp.float32)
    return jnp.clip(other + factor * (pixels - other), 0, 255).astype(jnp.uint8)


def _to_gray(image: Image) -> Int[Array, 'h w']:
    """Returns the luma of each pixel, rounded as Pillow does."""
    red, green, blue = (image[..., c].astype(jnp.int32) * w for c, w in enumerate(_LUMA))
    return (red + green + blue + 2**15) >> 16
