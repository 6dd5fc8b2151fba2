"""Augments training batches on the device, for example with flips, RandAugment and MixUp.

The random numbers of an example depend only on (seed, epoch, example), not on its batch, or on
processes, devices or threads. MixUp and CutMix mix an example with its neighbor in the batch.

RandAugment (Cubuk et al. 2019) follows the AugReg and big_vision recipes: it applies `layers`
operations at one magnitude, each drawn uniformly from sixteen. To run a batch with different
operations as one vectorized program, every image goes through four passes, and each operation acts
in one of them: an affine gather of pixels, a table of 256 values per channel, a blend with another
image, and a square that is cut out. Quirks of the original TensorFlow code are kept, because the
recipes were tuned with them; the last one is optional (`RandAugment.contrast`):

- A magnitude above 10 is not clipped: 15 and 20 extrapolate the ranges.
- Posterize and solarize get weaker with the magnitude. They are strongest at magnitude 0, so two
  layers at magnitude 0 do change images.
- Color, contrast, brightness and sharpness only increase above magnitude 5. The signs of shears,
  rotations and translations are random.
- A drawn operation is always applied. The original also draws a probability, but does not use it.
- Contrast is scaled around a gray level of (number of pixels) / 256 instead of the mean.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.base import (
    Array,
    Batch,
    Float,
    Int,
    Key,
    Record,
    Scalar,
    UInt8,
    is_off,
    require_between,
)
from vit_jax.data.image_preprocessing import Crop, InceptionCrop, Preprocessing, Size
from vit_jax.data.three_augment import apply_color_jitter, apply_three_augment


class AugregLevel(NamedTuple):
    """Settings of RandAugment and MixUp in AugReg ("How to train your ViT?")."""

    layers: int  # of RandAugment
    magnitude: float  # of RandAugment
    mixup: float  # alpha of MixUp


AUGREG_LEVELS = {
    'none': AugregLevel(layers=0, magnitude=0.0, mixup=0.0),
    'light1': AugregLevel(layers=2, magnitude=0.0, mixup=0.0),
    'light2': AugregLevel(layers=2, magnitude=10.0, mixup=0.2),
    'medium1': AugregLevel(layers=2, magnitude=15.0, mixup=0.2),
    'medium2': AugregLevel(layers=2, magnitude=15.0, mixup=0.5),
    'strong1': AugregLevel(layers=2, magnitude=20.0, mixup=0.5),
    'strong2': AugregLevel(layers=2, magnitude=20.0, mixup=0.8),
}
Image = UInt8[Array, 'h w 3']
Index = Int[Array, '']
# Ranges of the area, as a fraction of the image, and of the aspect ratio of erased rectangles.
_ERASED_AREA = (0.02, 1 / 3)
_ERASED_ASPECT = (0.3, 1 / 0.3)
# A custom augmentation (key, batch) -> batch. The images are uint8 and already cropped. The key is
# the same at every step: derive keys with `example_keys(key, batch)`. The function may return float
# images of 0 to 255, and labels as rows (b k).
AugmentFunction = Callable[[Key[Array, ''], Batch], Batch]
# Purposes of random numbers, folded into an example's key; RandAugment also folds in the layer.
_SHIFT, _FLIP, _RANDAUGMENT, _ERASE, _MIX, _THREE_AUGMENT, _JITTER = range(7)
Contrast = Literal['mean', 'pixel_count']
OPERATIONS = tuple(
    'auto_contrast equalize invert rotate posterize solarize color contrast brightness sharpness '
    'shear_x shear_y translate_x translate_y cutout solarize_add'.split()
)
GRAY = 128  # fill value of pixels without a source
_SIDE = 224  # image side to which the following lengths refer
_TRANSLATE = 100  # shift in pixels at magnitude 10
_CUTOUT = 40  # half the side of the square in pixels at magnitude 10
_LUMINANCE = 0.2989, 0.587, 0.114


@dataclasses.dataclass(kw_only=True)
class RandAugment(Record):
    """Number and magnitude of the operations, which the AugReg paper writes as (2, 15)."""

    layers: int = 0  # operations per image
    magnitude: float = 10.0  # strength of each operation; 1 rotates by 3 degrees
    contrast: Contrast = 'mean'  # gray level it keeps: mean; pixel_count: pixels / 256 (AugReg)

    def check(self) -> None:
        require_between(self, 'layers', 'magnitude', low=0)


@dataclasses.dataclass(kw_only=True)
class Augmentation(Record):
    """Random changes to training images. The fields are in the order of application.

    `crop` replaces the preprocessing's crop and runs on the host; the rest runs on the device.
    `three_augment` is DeiT III's 3-Augment, which DeiT III combines with `color_jitter` 0.3.
    `erasing` is the probability of random erasing (Zhong et al. 2017). `mixup` (Zhang et al. 2017)
    and `cutmix` (Yun et al. 2019) set alpha of Beta(alpha, alpha), from which the weight of the
    second image and its label is drawn. If both are set, each example uses one of them at random.
    """

    crop: Crop | None = None  # crop on the host; None: the preprocessing's crop
    shift_pixels: int = 0  # largest shift in each direction
    flip: bool = False  # flip left to right with probability 1/2
    three_augment: bool = False  # gray, solarize or blur each image, one of them at random
    color_jitter: float = 0.0  # largest relative change of brightness, contrast and saturation
    randaugment: RandAugment = dataclasses.field(default_factory=RandAugment)  # 0 layers: off
    erasing: float = 0.0  # probability that a rectangle is replaced by noise
    mixup: float = 0.0  # alpha of Beta(alpha, alpha) for the weight of the second image; 0: off
    cutmix: float = 0.0  # alpha of Beta(alpha, alpha) for the area of the second image; 0: off

    def check(self) -> None:
        require_between(self, 'erasing', 'color_jitter', low=0, high=1)
        require_between(self, 'shift_pixels', 'mixup', 'cutmix', low=0)

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with their neighbors in the batch."""
        return not (is_off(self.mixup) and is_off(self.cutmix))


def augreg(level: str) -> Augmentation:
    """Returns the augmentation of an AugReg level: Inception crop, flips, RandAugment and MixUp.

    Args:
      level: One of none, light1, light2, medium1, medium2, strong1, strong2.

    Raises:
      KeyError: If the level is unknown.
    """
    values = AUGREG_LEVELS[level]
    randaugment = RandAugment(
        layers=values.layers, magnitude=values.magnitude, contrast='pixel_count'
    )
    return Augmentation(
        crop=InceptionCrop(), flip=True, randaugment=randaugment, mixup=values.mixup
    )


def host_crop(augmentation: Augmentation | AugmentFunction, preprocessing: Preprocessing) -> Crop:
    """Returns the crop of training images: the augmentation's if set, else the preprocessing's."""
    crop = augmentation.crop if isinstance(augmentation, Augmentation) else None
    return crop or preprocessing.crop


def augment(
    key: Key[Array, ''],
    batch: Batch,
    config: Augmentation | AugmentFunction,
    *,
    targets_of: Callable[[Array], Float[Array, 'b k']],
) -> Batch:
    """Augments a batch; the result depends only on the key and on the epoch and index of examples.

    With MixUp or CutMix, images become float32 of 0 to 255 and labels become mixed targets.
    Otherwise images stay uint8 and labels do not change.

    Args:
      key: The same key at every step.
      batch: A batch of a `Loader`.
      config: The augmentation.
      targets_of: Converts labels (b or b k) to targets (b k), which MixUp and CutMix mix.
    """
    if not isinstance(config, Augmentation):
        return config(key, batch)
    keys = example_keys(key, batch)
    images = jax.vmap(lambda key, image: _augment_image(key, image, config))(keys, batch['images'])
    batch = batch | {'images': images}
    if not config.mixes:
        return batch
    size = images.shape[1], images.shape[2]
    own = jax.vmap(lambda key: _draw_own_weight(jax.random.fold_in(key, _MIX), config, size))(keys)
    own = jnp.where(jnp.roll(batch['mask'], 1)[:, None, None], own, 1.0)  # 1 if neighbor is masked
    return batch | {
        'images': _mix(images.astype(jnp.float32), own[..., None]),
        'labels': _mix(targets_of(batch['labels']), own.mean(axis=(1, 2))[:, None]),
    }


def example_keys(key: Key[Array, ''], batch: Batch) -> Key[Array, 'b']:
    """Returns a key for each example, derived from its epoch and its index in the data set."""
    of_epoch = jax.vmap(jax.random.fold_in, (None, 0))(key, batch['epoch'])
    return jax.vmap(jax.random.fold_in)(of_epoch, batch['example'])


def _augment_image(key: Key[Array, ''], image: Image, config: Augmentation) -> Image:
    if pixels := config.shift_pixels:  # the edge is repeated
        padded = jnp.pad(image, ((pixels, pixels), (pixels, pixels), (0, 0)), mode='edge')
        corner = jax.random.randint(jax.random.fold_in(key, _SHIFT), (2,), 0, 2 * pixels + 1)
        image = jax.lax.dynamic_slice(padded, (*corner, 0), image.shape)
    if config.flip:
        coin = jax.random.bernoulli(jax.random.fold_in(key, _FLIP))
        image = jnp.where(coin, image[:, ::-1], image)
    if config.three_augment:
        image = apply_three_augment(jax.random.fold_in(key, _THREE_AUGMENT), image)
    if not is_off(config.color_jitter):
        image = apply_color_jitter(jax.random.fold_in(key, _JITTER), image, config.color_jitter)
    if config.randaugment.layers:
        image = apply_randaugment(jax.random.fold_in(key, _RANDAUGMENT), image, config.randaugment)
    if not is_off(config.erasing):
        image = _erase(jax.random.fold_in(key, _ERASE), image, config.erasing)
    return image


def _erase(key: Key[Array, ''], image: Image, probability: Scalar) -> Image:
    """Replaces a rectangle of random area, aspect ratio and position by noise."""
    size = image.shape[0], image.shape[1]
    coin_key, area_key, aspect_key, corner_key, noise_key = jax.random.split(key, 5)
    min_area, max_area = _ERASED_AREA
    area = math.prod(size) * jax.random.uniform(area_key, (), minval=min_area, maxval=max_area)
    low, high = jnp.log(jnp.asarray(_ERASED_ASPECT))
    aspect = jnp.exp(jax.random.uniform(aspect_key, (), minval=low, maxval=high))
    sides = jnp.sqrt(jnp.stack([area * aspect, area / aspect]))
    sides = jnp.minimum(jnp.rint(sides), jnp.asarray(size))
    corner = jnp.floor(jax.random.uniform(corner_key, (2,)) * (jnp.asarray(size) - sides + 1))
    is_erased = jax.random.bernoulli(coin_key, probability)
    hidden = _box_mask(corner, corner + sides, size) & is_erased
    noise = jax.random.bits(noise_key, image.shape, jnp.uint8)
    return jnp.where(hidden[..., None], noise, image)


def _draw_own_weight(key: Key[Array, ''], config: Augmentation, size: Size) -> Float[Array, 'h w']:
    """Draws an image's own weight per pixel: constant for MixUp, 0 in a box for CutMix."""
    mixup_key, cutmix_key, center_key, coin_key = jax.random.split(key, 4)
    if not is_off(config.mixup):
        own = jax.random.beta(mixup_key, config.mixup, config.mixup)
        # At least 1/2, because otherwise two neighbors could become the same image.
        mixed = jnp.full(size, jnp.maximum(own, 1 - own))
    if not is_off(config.cutmix):
        cut = 1 - jax.random.beta(cutmix_key, config.cutmix, config.cutmix)
        half = jnp.sqrt(cut) * jnp.asarray(size) / 2
        center = jax.random.uniform(center_key, (2,)) * jnp.asarray(size)
        pasted = 1.0 - _box_mask(jnp.rint(center - half), jnp.rint(center + half), size)
    if is_off(config.mixup):
        return pasted
    if is_off(config.cutmix):
        return mixed
    return jnp.where(jax.random.bernoulli(coin_key), mixed, pasted)


def _mix(values: Float[Array, 'b ...'], own: Float[Array, 'b ...']) -> Float[Array, 'b ...']:
    return own * values + (1 - own) * jnp.roll(values, 1, axis=0)


def _box_mask(corner: Float[Array, '2'], opposite: Float[Array, '2'], size: Size) -> Array:
    """Returns a mask (h w) of the pixels in the box from `corner` to `opposite` (exclusive)."""
    rows, columns = map(jnp.arange, size)
    in_rows = (rows >= corner[0]) & (rows < opposite[0])
    return in_rows[:, None] & (columns >= corner[1]) & (columns < opposite[1])


def apply_randaugment(key: Key[Array, ''], image: Image, config: RandAugment) -> Image:
    """Applies `config.layers` randomly drawn operations."""
    for layer in range(config.layers):
        draw_key, op_key = jax.random.split(jax.random.fold_in(key, layer))
        op = jax.random.randint(draw_key, (), 0, len(OPERATIONS))
        image = apply_op(op_key, image, op, magnitude=config.magnitude, contrast=config.contrast)
    return image


def apply_op(
    key: Key[Array, ''], image: Image, operation: Index, *, magnitude: float, contrast: Contrast
) -> Image:
    """Applies the operation with this index in OPERATIONS; the key sets its sign and position."""
    sign_key, place_key = jax.random.split(key)
    sign = jnp.where(jax.random.bernoulli(sign_key), 1.0, -1.0)
    level = magnitude / 10
    factor = 0.1 + 1.8 * level  # of color, contrast, brightness and sharpness; 1: unchanged
    image = _warp(image, operation, sign * magnitude / 10)
    tables = _make_lookup_tables(image, operation, level, factor, contrast)
    image = jnp.stack([tables[c][image[..., c]] for c in range(3)], axis=-1).astype(jnp.uint8)
    return _cut_out(place_key, _blend(image, operation, factor), operation, level)


def _is(operation: Index, name: str) -> Array:
    return operation == OPERATIONS.index(name)


def _warp(image: Image, operation: Index, level: Float[Array, '']) -> Image:
    """Rotates, shears or translates by fetching each pixel from its source; gray if outside."""
    height, width, _ = image.shape
    angle = jnp.where(_is(operation, 'rotate'), jnp.deg2rad(30 * level), 0.0)
    shear_x = jnp.where(_is(operation, 'shear_x'), 0.3 * level, 0.0)
    shear_y = jnp.where(_is(operation, 'shear_y'), 0.3 * level, 0.0)
    shift_x = jnp.where(_is(operation, 'translate_x'), _TRANSLATE / _SIDE * width * level, 0.0)
    shift_y = jnp.where(_is(operation, 'translate_y'), _TRANSLATE / _SIDE * height * level, 0.0)

    y, x = jnp.meshgrid(jnp.arange(height) * 1.0, jnp.arange(width) * 1.0, indexing='ij')
    middle_y = (height - 1) / 2
    middle_x = (width - 1) / 2
    # Rotations fix the center, shears the top left corner.
    dy = y - middle_y
    dx = x - middle_x
    from_x = middle_x + jnp.cos(angle) * dx - jnp.sin(angle) * dy + shear_x * y + shift_x
    from_y = middle_y + jnp.sin(angle) * dx + jnp.cos(angle) * dy + shear_y * x + shift_y
    row = jnp.rint(from_y).astype(int)
    column = jnp.rint(from_x).astype(int)
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    fetched = image[jnp.clip(row, 0, height - 1), jnp.clip(column, 0, width - 1)]
    return jnp.where(inside[..., None], fetched, jnp.uint8(GRAY))


def _make_lookup_tables(
    image: Image, operation: Index, level: float, factor: float, contrast: Contrast
) -> Int[Array, '3 256']:
    """Returns a lookup table from old to new values, 0 to 255, for each channel."""
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
    """Returns the table that maps the smallest value to 0 and the largest to 255."""
    low = values.min().astype(jnp.float32)
    high = values.max().astype(jnp.float32)
    value = jnp.arange(256)
    stretched = (value - low) * (255 / jnp.maximum(1.0, high - low))
    return jnp.where(high > low, _to_8_bits(stretched), value)


def _equalize_table(values: UInt8[Array, 'n']) -> Int[Array, '256']:
    """Returns the table of a histogram equalization."""
    counts = jnp.zeros(256, jnp.int32).at[values].add(1)
    step = (values.size - counts[values.max()]) // 255
    before = jnp.cumsum(counts) - counts
    table = jnp.minimum(255, (before + step // 2) // jnp.maximum(1, step))
    return jnp.where(step > 0, table, jnp.arange(256))


def _blend(image: Image, operation: Index, factor: float) -> Image:
    """Blends the image with a gray (color) or a smoothed one (sharpness); `factor` 1: unchanged."""
    is_color = _is(operation, 'color')
    pixels = image.astype(jnp.float32)
    other = jnp.where(is_color, _luminance(image)[..., None], _smooth(pixels))
    amount = jnp.where(is_color | _is(operation, 'sharpness'), factor, 1.0)
    return _to_8_bits(other + amount * (pixels - other)).astype(jnp.uint8)


def _smooth(pixels: Float[Array, 'h w 3']) -> Float[Array, 'h w 3']:
    """Averages each pixel and its 8 neighbors with weights 5 and 1; edge pixels stay unchanged."""
    height, width, _ = pixels.shape
    if min(height, width) < 3:
        return pixels
    total = 4 * pixels[1:-1, 1:-1]
    for dy, dx in itertools.product(range(3), range(3)):
        total = total + pixels[dy : height - 2 + dy, dx : width - 2 + dx]
    return pixels.at[1:-1, 1:-1].set(jnp.floor(total / 13 + 0.5))


def _cut_out(key: Key[Array, ''], image: Image, operation: Index, level: float) -> Image:
    """Replaces a square around a random point by gray, for the operation `cutout`."""
    height, width, _ = image.shape
    center = jax.random.uniform(key, (2,)) * jnp.asarray([height, width]) - 0.5
    half = int(level * _CUTOUT / _SIDE * min(height, width))
    square = _box_mask(center - half, center + half, (height, width))
    hidden = square & _is(operation, 'cutout')
    return jnp.where(hidden[..., None], jnp.uint8(GRAY), image)


def _luminance(image: Image) -> Float[Array, 'h w']:
    """Returns the luminance, rounded to integers."""
    red, green, blue = (image[..., c] * weight for c, weight in enumerate(_LUMINANCE))
    return jnp.floor(red + green + blue + 0.5)


def _to_8_bits(values: Float[Array, '...']) -> Int[Array, '...']:
    """Clips to 0 to 255 and truncates to integers, as the original and Pillow do."""
    return jnp.clip(values, 0, 255).astype(jnp.int32)
