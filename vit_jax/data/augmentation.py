"""What happens to a training batch on the device: random changes, mixing, scaling.

What is random of an example depends on (seed, epoch, example) alone: neither on the batch it
falls into, nor on the number of processes, devices or threads. Mixing takes a second example,
its neighbour in the batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.base.array_types import Array, Batch, Float, Key, Num, UInt8
from vit_jax.base.records import Record
from vit_jax.data.image_preprocessing import Crop, InceptionCrop, Preprocessing
from vit_jax.data.randaugment import RandAugment, randaugment

# "How to train your ViT?" (AugReg): RandAugment layers and magnitude, MixUp's alpha.
AUGREG = {
    'none': (0, 0.0, 0.0),
    'light1': (2, 0.0, 0.0),
    'light2': (2, 10.0, 0.2),
    'medium1': (2, 15.0, 0.2),
    'medium2': (2, 15.0, 0.5),
    'strong1': (2, 20.0, 0.5),
    'strong2': (2, 20.0, 0.8),
}
_ERASED_AREA, _ERASED_ASPECT = (0.02, 1 / 3), (0.3, 1 / 0.3)
# What a key of an example is for; the layers of RandAugment fold in more.
_SHIFT, _FLIP, _RANDAUGMENT, _ERASE, _MIX = range(5)


AugmentFunction = Callable[[Any, Batch], Batch]


@dataclasses.dataclass(kw_only=True)
class Augmentation(Record):
    """Random changes to training images, in the order they are made.

    `crop` is cut on the host, at the stored resolution, instead of the preprocessing's; the rest
    runs on the device. `erasing` is the share of images in which a rectangle becomes noise
    (Zhong et al. 2017). `mixup` (Zhang et al. 2017) and `cutmix` (Yun et al. 2019) are the alpha
    of Beta(alpha, alpha), by which an image and its label are mixed with another; 0 is not at all,
    and with both each example has one of them, by chance.
    """

    crop: Crop | None = None
    shift_pixels: int = 0  # the most that an image moves, in each direction
    flip: bool = False  # left to right, every other image
    randaugment: RandAugment = dataclasses.field(default_factory=RandAugment)
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0


def augreg(level: str) -> Augmentation:
    """Inception crop, flip, and RandAugment and MixUp at one of the seven AUGREG levels.

    RandAugment's contrast is the one that those results were made with.
    """
    layers, magnitude, mixup = AUGREG[level]
    strength = RandAugment(layers=layers, magnitude=magnitude, contrast='pixel_count')
    return Augmentation(crop=InceptionCrop(), flip=True, randaugment=strength, mixup=mixup)


def augment(
    key: Key[Array, ''],
    batch: Batch,
    config: Augmentation,
    *,
    targets_of: Callable[[Array], Float[Array, 'b k']],
) -> Batch:
    """The batch with each image changed by chance, as a function of (key, epoch, example).

    Images stay uint8 and labels what they are, unless images are mixed: then images are float32
    and labels rows (b k), which `targets_of` makes of the labels.
    """
    keys = jax.vmap(lambda epoch, example: _folded(key, epoch, example))(
        batch['epoch'], batch['example']
    )
    images = jax.vmap(lambda key, image: _changed(key, image, config))(keys, batch['images'])
    batch = batch | {'images': images}
    if not config.mixup and not config.cutmix:
        return batch
    height, width = images.shape[1:3]
    own = jax.vmap(lambda key: _share(_folded(key, _MIX), config, (height, width)))(keys)
    own = jnp.where(jnp.roll(batch['mask'], 1)[:, None, None], own, 1.0)  # no image to mix with
    return batch | {
        'images': _mixed(images.astype(jnp.float32), own[..., None]),
        'labels': _mixed(targets_of(batch['labels']), own.mean(axis=(1, 2))[:, None]),
    }


def normalize(
    images: Num[Array, 'b h w c'], preprocessing: Preprocessing
) -> Float[Array, 'b h w c']:
    """Pixel values as the model takes them: float32, (value - mean) / std."""
    scaled: Float[Array, 'b h w c'] = preprocessing.scaled(images)
    return scaled


def _folded(key: Key[Array, ''], *numbers: Any) -> Key[Array, '']:
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key


def _changed(
    key: Key[Array, ''], image: UInt8[Array, 'h w c'], config: Augmentation
) -> UInt8[Array, 'h w c']:
    if config.shift_pixels:
        image = _shifted(_folded(key, _SHIFT), image, config.shift_pixels)
    if config.flip:
        image = jnp.where(jax.random.bernoulli(_folded(key, _FLIP)), image[:, ::-1], image)
    if config.randaugment.layers:
        image = randaugment(_folded(key, _RANDAUGMENT), image, config.randaugment)
    if config.erasing:
        image = _erased(_folded(key, _ERASE), image, config.erasing)
    return image


def _shifted(
    key: Key[Array, ''], image: UInt8[Array, 'h w c'], pixels: int
) -> UInt8[Array, 'h w c']:
    """The image moved by whole pixels; its edge fills what it uncovers."""
    padded = jnp.pad(image, ((pixels, pixels), (pixels, pixels), (0, 0)), mode='edge')
    top, left = jax.random.randint(key, (2,), 0, 2 * pixels + 1)
    return jax.lax.dynamic_slice(padded, (top, left, 0), image.shape)


def _erased(
    key: Key[Array, ''], image: UInt8[Array, 'h w c'], probability: float
) -> UInt8[Array, 'h w c']:
    """Noise in a rectangle of random area and aspect, somewhere in the image."""
    height, width, _ = image.shape
    coin, area_key, aspect_key, place, noise = jax.random.split(key, 5)
    area = (
        height
        * width
        * jax.random.uniform(area_key, (), minval=_ERASED_AREA[0], maxval=_ERASED_AREA[1])
    )
    low, high = jnp.log(jnp.asarray(_ERASED_ASPECT))
    aspect = jnp.exp(jax.random.uniform(aspect_key, (), minval=low, maxval=high))
    sides = jnp.sqrt(jnp.stack([area * aspect, area / aspect]))
    sides = jnp.minimum(jnp.rint(sides), jnp.asarray([height, width]))
    corner = jnp.floor(jax.random.uniform(place, (2,)) * (jnp.asarray([height, width]) - sides + 1))
    hidden = _box(corner, corner + sides, height, width) & jax.random.bernoulli(coin, probability)
    return jnp.where(hidden[..., None], jax.random.bits(noise, image.shape, jnp.uint8), image)


def _share(key: Key[Array, ''], config: Augmentation, size: tuple[int, int]) -> Float[Array, 'h w']:
    """How much of each pixel is the image's own: the same everywhere, or all but a rectangle."""
    mixup_key, cutmix_key, place, coin = jax.random.split(key, 4)
    height, width = size
    if config.mixup:
        own = jax.random.beta(mixup_key, config.mixup, config.mixup)
        mixed = jnp.full(size, jnp.maximum(own, 1 - own))  # else two images may end up as one
    if config.cutmix:
        cut = 1 - jax.random.beta(cutmix_key, config.cutmix, config.cutmix)
        half = jnp.sqrt(cut) * jnp.asarray([height, width]) / 2
        centre = jax.random.uniform(place, (2,)) * jnp.asarray([height, width])
        box = _box(jnp.rint(centre - half), jnp.rint(centre + half), height, width)
        pasted = jnp.where(box, 0.0, 1.0)
    if config.mixup and config.cutmix:
        return jnp.where(jax.random.bernoulli(coin), mixed, pasted)
    return mixed if config.mixup else pasted


def _mixed(values: Float[Array, 'b ...'], own: Float[Array, 'b ...']) -> Float[Array, 'b ...']:
    return own * values + (1 - own) * jnp.roll(values, 1, axis=0)


def _box(corner: Float[Array, '2'], opposite: Float[Array, '2'], height: int, width: int) -> Array:
    """Which pixels (h w) lie between two corners, the second one excluded."""
    rows, columns = jnp.arange(height), jnp.arange(width)
    in_rows = (rows >= corner[0]) & (rows < opposite[0])
    return in_rows[:, None] & (columns >= corner[1]) & (columns < opposite[1])
