"""RandAugment on the device: sixteen operations as four passes over an image.

Cubuk et al., "RandAugment" (2019), as the AugReg and big_vision recipes run it: `layers` times one
of sixteen operations, drawn evenly, at one magnitude. Every operation is a step in one of four
passes: pixels move (one affine gather), values go through a table of 256 entries by channel, the
image is blended with another one, a square is cut out. So a batch of all is one batched program.

What is odd in the original is kept, because recipes were tuned with it; the last is a
choice (`RandAugment.contrast`):

- a magnitude above 10 is not clipped: 15 and 20 extrapolate the ranges;
- posterize and solarize grow weaker with the magnitude, and at magnitude 0 they are at their
  strongest, so that two layers at magnitude 0 are not nothing;
- the enhancing operations only ever strengthen above magnitude 5; shears and rotations have a sign;
- a chosen operation is always applied: the probability that the original draws has no effect;
- contrast was measured from the number of pixels instead of their mean gray.
"""

import dataclasses
import itertools
from typing import Literal

import jax
import jax.numpy as jnp

from vit_jax.base import Array, Float, Int, Key, Record, UInt8, require_between

Image = UInt8[Array, 'h w 3']
Index = Int[Array, '']
Contrast = Literal['mean', 'pixel_count']
OPERATIONS = tuple(
    'auto_contrast equalize invert rotate posterize solarize color contrast brightness sharpness '
    'shear_x shear_y translate_x translate_y cutout solarize_add'.split()
)
GRAY = 128  # what fills uncovered pixels
_SIDE = 224  # the image side for which lengths in pixels are given
_TRANSLATE, _CUTOUT = 100, 40  # pixels at magnitude 10
_LUMINANCE = 0.2989, 0.587, 0.114


@dataclasses.dataclass(kw_only=True)
class RandAugment(Record):
    """Number and magnitude of the operations, which the paper writes as (2, 15)."""

    layers: int = 0  # operations on an image
    magnitude: float = 10.0  # of each operation; 1 is up to 3 degrees of rotation
    contrast: Contrast = 'mean'  # from the mean gray, as Pillow, or pixels / 256, as the original

    def check(self) -> None:
        require_between(self, 'layers', 'magnitude', low=0)


def randaugment(key: Key[Array, ''], image: Image, config: RandAugment) -> Image:
    """Applies `layers` operations drawn from the key."""
    for layer in range(config.layers):
        choice, rest = jax.random.split(jax.random.fold_in(key, layer))
        chosen = jax.random.randint(choice, (), 0, len(OPERATIONS))
        image = operate(rest, image, chosen, magnitude=config.magnitude, contrast=config.contrast)
    return image


def operate(
    key: Key[Array, ''], image: Image, operation: Index, *, magnitude: float, contrast: Contrast
) -> Image:
    """Applies one operation, an index of OPERATIONS; the key decides sign and place."""
    sign_key, place_key = jax.random.split(key)
    sign = jnp.where(jax.random.bernoulli(sign_key), 1.0, -1.0)
    level = magnitude / 10
    factor = 0.1 + 1.8 * level  # of an enhancing operation: 1 leaves the image as it is
    image = _warp(image, operation, sign * magnitude / 10)
    tables = _make_tables(image, operation, level, factor, contrast)
    image = jnp.stack([tables[c][image[..., c]] for c in range(3)], axis=-1).astype(jnp.uint8)
    return _cut_out(place_key, _blend(image, operation, factor), operation, level)


def _is(operation: Index, name: str) -> Array:
    return operation == OPERATIONS.index(name)


def _warp(image: Image, operation: Index, level: Float[Array, '']) -> Image:
    """Rotates, shears or translates: each pixel is fetched from its source; gray from outside."""
    height, width, _ = image.shape
    angle = jnp.where(_is(operation, 'rotate'), jnp.deg2rad(30 * level), 0.0)
    shear_x = jnp.where(_is(operation, 'shear_x'), 0.3 * level, 0.0)
    shear_y = jnp.where(_is(operation, 'shear_y'), 0.3 * level, 0.0)
    shift_x = jnp.where(_is(operation, 'translate_x'), _TRANSLATE / _SIDE * width * level, 0.0)
    shift_y = jnp.where(_is(operation, 'translate_y'), _TRANSLATE / _SIDE * height * level, 0.0)

    y, x = jnp.meshgrid(jnp.arange(height) * 1.0, jnp.arange(width) * 1.0, indexing='ij')
    middle_y, middle_x = (height - 1) / 2, (width - 1) / 2
    dy, dx = y - middle_y, x - middle_x  # a rotation keeps the middle, a shear the corner
    from_x = middle_x + jnp.cos(angle) * dx - jnp.sin(angle) * dy + shear_x * y + shift_x
    from_y = middle_y + jnp.sin(angle) * dx + jnp.cos(angle) * dy + shear_y * x + shift_y
    row, column = jnp.rint(from_y).astype(int), jnp.rint(from_x).astype(int)
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    fetched = image[jnp.clip(row, 0, height - 1), jnp.clip(column, 0, width - 1)]
    return jnp.where(inside[..., None], fetched, jnp.uint8(GRAY))


def _make_tables(
    image: Image, operation: Index, level: float, factor: float, contrast: Contrast
) -> Int[Array, '3 256']:
    """Returns the new value of each value 0 to 255 of each channel."""
    value = jnp.arange(256)
    bits = max(0, 8 - int(level * 4))
    added = jnp.clip(value + int(level * 110), 0, 255)
    middle = {
        'mean': jnp.rint(_luminance(image).mean()),
        'pixel_count': jnp.asarray(min(255.0, image.shape[0] * image.shape[1] / 256)),
    }[contrast]
    same_for_all = {
        'invert': 255 - value,
        'posterize': (value >> bits) << bits,
        'solarize': jnp.where(value < int(level * 256), value, 255 - value),
        'solarize_add': jnp.where(value < 128, added, value),
        'brightness': _to_8_bits(factor * value),
        'contrast': _to_8_bits(middle + factor * (value - middle)),
    }
    table = value
    for name, changed in same_for_all.items():
        table = jnp.where(_is(operation, name), changed, table)
    rows = []
    for values in image.reshape(-1, 3).T:
        row = jnp.where(_is(operation, 'auto_contrast'), _stretch_table(values), table)
        rows.append(jnp.where(_is(operation, 'equalize'), _equalize_table(values), row))
    return jnp.stack(rows)


def _stretch_table(values: UInt8[Array, 'n']) -> Int[Array, '256']:
    """Returns the table that maps the least value to 0 and the greatest to 255."""
    low, high = values.min().astype(jnp.float32), values.max().astype(jnp.float32)
    value = jnp.arange(256)
    stretched = (value - low) * (255 / jnp.maximum(1.0, high - low))
    return jnp.where(high > low, _to_8_bits(stretched), value)


def _equalize_table(values: UInt8[Array, 'n']) -> Int[Array, '256']:
    """Returns the table that makes all values about equally frequent."""
    counts = jnp.zeros(256, jnp.int32).at[values].add(1)
    step = (values.size - counts[values.max()]) // 255
    before = jnp.cumsum(counts) - counts
    table = jnp.minimum(255, (before + step // 2) // jnp.maximum(1, step))
    return jnp.where(step > 0, table, jnp.arange(256))


def _blend(image: Image, operation: Index, factor: float) -> Image:
    """Extrapolates from gray (color) or from a smoothed image (sharpness)."""
    is_color, pixels = _is(operation, 'color'), image.astype(jnp.float32)
    other = jnp.where(is_color, _luminance(image)[..., None], _smooth(pixels))
    amount = jnp.where(is_color | _is(operation, 'sharpness'), factor, 1.0)
    return _to_8_bits(other + amount * (pixels - other)).astype(jnp.uint8)


def _smooth(pixels: Float[Array, 'h w 3']) -> Float[Array, 'h w 3']:
    """Averages each pixel and its neighbors with weights 5 to 1; the edge stays."""
    height, width, _ = pixels.shape
    if min(height, width) < 3:
        return pixels
    total = 4 * pixels[1:-1, 1:-1]
    for dy, dx in itertools.product(range(3), range(3)):
        total = total + pixels[dy : height - 2 + dy, dx : width - 2 + dx]
    return pixels.at[1:-1, 1:-1].set(jnp.floor(total / 13 + 0.5))


def _cut_out(key: Key[Array, ''], image: Image, operation: Index, level: float) -> Image:
    """Cuts out a gray square around a point anywhere in the image."""
    height, width, _ = image.shape
    center = jax.random.uniform(key, (2,)) * jnp.asarray([height, width])
    half = int(level * _CUTOUT / _SIDE * min(height, width))
    in_rows = jnp.abs(jnp.arange(height) + 0.5 - center[0]) < half
    in_columns = jnp.abs(jnp.arange(width) + 0.5 - center[1]) < half
    hidden = in_rows[:, None] & in_columns & _is(operation, 'cutout')
    return jnp.where(hidden[..., None], jnp.uint8(GRAY), image)


def _luminance(image: Image) -> Float[Array, 'h w']:
    """Returns the luminance in whole levels."""
    red, green, blue = (image[..., c] * weight for c, weight in enumerate(_LUMINANCE))
    return jnp.floor(red + green + blue + 0.5)


def _to_8_bits(values: Float[Array, '...']) -> Int[Array, '...']:
    """Clips to 0 to 255 and drops fractions, as the original and Pillow do."""
    return jnp.clip(values, 0, 255).astype(jnp.int32)
