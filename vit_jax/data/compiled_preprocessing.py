"""The preprocessing of images as a function to be compiled: crops and resizing as matrix products.

For programs that run without what resizes here, OpenCV and Pillow. Both write down 8 bits after
resizing, Pillow between its two passes too; so does this.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.base import Array, Float, UInt8
from vit_jax.data.image_preprocessing import Preprocessing, ResizeMethod, Sides, Size, normalize


def prepare(
    images: UInt8[Array, 'b _ _ 3'], size: Size, preprocessing: Preprocessing
) -> Float[Array, 'b _ _ 3']:
    """Images (b h w 3) as a network takes them, of the size (height, width).

    Cut and resized as `preprocessing.crop` does it, within one of 255 grey levels, of white noise
    two in one of 100,000 pixels; exactly where nothing is resized. Height and width may be
    symbolic (`jax.export`).
    """
    shape = jnp.int32(images.shape[1]), jnp.int32(images.shape[2])
    crop: Any = preprocessing.crop  # none that is random
    (resized, corner), method = crop.placement(shape, size), crop.resize
    rows, columns = (
        _weights(images.shape[i + 1], resized[i], first=corner[i], count=size[i], method=method)
        for i in (0, 1)
    )

    def across(pixels: Array) -> Array:
        return jnp.einsum('qw,bhwc->bhqc', columns, pixels)

    def down(pixels: Array) -> Array:
        return jnp.einsum('ph,bhwc->bpwc', rows, pixels)

    pixels = images.astype(jnp.float32)
    with jax.default_matmul_precision('highest'):
        if method == 'bilinear':
            pixels = _grey_levels(down(across(pixels)))
        else:
            pixels = jax.lax.cond(
                _is_vertical_first(shape, resized),
                lambda pixels: _grey_levels(across(_grey_levels(down(pixels)))),
                lambda pixels: _grey_levels(down(_grey_levels(across(pixels)))),
                pixels,
            )
    return normalize(pixels, preprocessing)


def _is_vertical_first(shape: Sides, resized: Sides) -> Array:
    """Does Pillow resize columns first? Before its version 13 it never did."""
    fewer_rows, fewer_columns = shape[0] - resized[0], shape[1] - resized[1]
    return (fewer_rows > 0) & (fewer_rows > 2 * fewer_columns)


def _weights(
    length: Any, resized: Any, *, first: Any, count: int, method: ResizeMethod
) -> Float[Array, 'p q']:
    """How a side of `length` pixels is resized: row p weighs them for the pixel `first` + p.

    `count` pixels are wanted, of a side that is `resized` to so many.
    """
    # From the middle of the side, in half pixels: no product can be too large for 32 bits, and
    # whole numbers are exact.
    wanted = 2 * (jnp.arange(count) + first) + 1 - resized
    whole, rest = jnp.divmod(wanted * length, resized)
    there = 2 * jnp.arange(length) + 1 - length
    distances = (there - whole[:, None] - (rest / resized)[:, None]) / 2  # in pixels
    if method != 'bilinear':  # smoothed where the image shrinks
        distances *= jnp.minimum(resized / length, 1)
    weights = _KERNELS[method](distances)
    return weights / weights.sum(axis=1, keepdims=True)


def _triangle(x: Float[Array, 'p q']) -> Float[Array, 'p q']:
    return jnp.maximum(0, 1 - jnp.abs(x))


def _cubic(x: Float[Array, 'p q']) -> Float[Array, 'p q']:
    """Keys' cubic with a = -1/2, which is Pillow's."""
    x = jnp.abs(x)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2
    return jnp.where(x < 1, near, jnp.where(x < 2, far, 0))


def _lanczos(x: Float[Array, 'p q']) -> Float[Array, 'p q']:
    return jnp.where(jnp.abs(x) < 3, jnp.sinc(x) * jnp.sinc(x / 3), 0)


_KERNELS: dict[ResizeMethod, Callable[[Array], Array]] = {
    'bilinear': _triangle,
    'bilinear_antialias': _triangle,
    'bicubic_antialias': _cubic,
    'lanczos_antialias': _lanczos,
}


def _grey_levels(pixels: Float[Array, '...']) -> Float[Array, '...']:
    """Rounded as 8 bits hold it, half up."""
    return jnp.clip(jnp.floor(pixels + 0.5), 0, 255)
