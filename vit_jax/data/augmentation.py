"""Augmentation of training batches on the device: random changes of images, MixUp, CutMix.

The random numbers of an example depend on (seed, epoch, example) alone, not on its batch,
processes, devices or threads. Mixing takes a second example, its neighbor in the batch.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from vit_jax.base import Array, Batch, Float, Key, Record, UInt8, require_between
from vit_jax.data.image_preprocessing import Crop, InceptionCrop, Preprocessing, Size
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
Image = UInt8[Array, 'h w c']
_ERASED_AREA, _ERASED_ASPECT = (0.02, 1 / 3), (0.3, 1 / 0.3)
# Your own augmentation: (key, batch) -> batch, of uint8 images as the preprocessing crops them.
# The key is the same at every step: use `example_keys(key, batch)`, or fold in epoch and example.
# Images may become floats of 0 to 255, and labels rows (b k).
AugmentFunction = Callable[[Key[Array, ''], Batch], Batch]
# What a key of an example is for; the layers of RandAugment fold in more.
_SHIFT, _FLIP, _RANDAUGMENT, _ERASE, _MIX = range(5)


@dataclasses.dataclass(kw_only=True)
class Augmentation(Record):
    """Random changes to training images, in the order in which they are applied.

    `crop` replaces the preprocessing's, on the host; the rest runs on the device. `erasing` is the
    probability that a rectangle becomes noise (Zhong et al. 2017). `mixup` (Zhang et al. 2017) and
    `cutmix` (Yun et al. 2019) are the alpha of the Beta(alpha, alpha) from which the weight of
    another image and its label is drawn; 0 is none. With both, a coin decides for each example.
    """

    crop: Crop | None = None  # None: the preprocessing's
    shift_pixels: int = 0  # the largest shift, in each direction
    flip: bool = False  # left to right, with probability 1/2
    randaugment: RandAugment = dataclasses.field(default_factory=RandAugment)  # 0 layers: none
    erasing: float = 0.0  # the probability that a rectangle becomes noise
    mixup: float = 0.0  # alpha of Beta(alpha, alpha), the weight of another image; 0: none
    cutmix: float = 0.0  # likewise, of the area of another image; 0: none

    def check(self) -> None:
        require_between(self, 'erasing', low=0, high=1)
        require_between(self, 'shift_pixels', 'mixup', 'cutmix', low=0)


def augreg(level: str) -> Augmentation:
    """Returns an Inception crop, flips, the original RandAugment and MixUp of an AUGREG level."""
    layers, magnitude, mixup = AUGREG[level]
    strength = RandAugment(layers=layers, magnitude=magnitude, contrast='pixel_count')
    return Augmentation(crop=InceptionCrop(), flip=True, randaugment=strength, mixup=mixup)


def host_crop(augmentation: Augmentation | AugmentFunction, preprocessing: Preprocessing) -> Crop:
    """Returns the crop of training images on the host: the augmentation's, if it has one."""
    own = augmentation.crop if isinstance(augmentation, Augmentation) else None
    return own or preprocessing.crop


def augment(
    key: Key[Array, ''],
    batch: Batch,
    config: Augmentation | AugmentFunction,
    *,
    targets_of: Callable[[Array], Float[Array, 'b k']],
) -> Batch:
    """Augments a batch, as a function of (key, epoch, example).

    Images stay uint8 and labels as they are; with mixing, images become float32 of 0 to 255 and
    labels the rows (b k) that `targets_of` returns for them, mixed.
    """
    if not isinstance(config, Augmentation):
        return config(key, batch)
    keys = example_keys(key, batch)
    images = jax.vmap(lambda key, image: _augment_image(key, image, config))(keys, batch['images'])
    batch = batch | {'images': images}
    if not config.mixup and not config.cutmix:
        return batch
    size = images.shape[1], images.shape[2]
    own = jax.vmap(lambda key: _draw_own_weight(jax.random.fold_in(key, _MIX), config, size))(keys)
    own = jnp.where(jnp.roll(batch['mask'], 1)[:, None, None], own, 1.0)  # no image to mix with
    return batch | {
        'images': _mix(images.astype(jnp.float32), own[..., None]),
        'labels': _mix(targets_of(batch['labels']), own.mean(axis=(1, 2))[:, None]),
    }


def example_keys(key: Key[Array, ''], batch: Batch) -> Key[Array, 'b']:
    """Returns one key for each example of the batch, by its epoch and index in the data set."""
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
    if config.randaugment.layers:
        image = randaugment(jax.random.fold_in(key, _RANDAUGMENT), image, config.randaugment)
    if config.erasing:
        image = _erase(jax.random.fold_in(key, _ERASE), image, config.erasing)
    return image


def _erase(key: Key[Array, ''], image: Image, probability: float) -> Image:
    """Replaces a rectangle of random area, aspect and place by noise."""
    size = image.shape[0], image.shape[1]
    coin, area_key, aspect_key, place, noise = jax.random.split(key, 5)
    least, most = _ERASED_AREA
    area = math.prod(size) * jax.random.uniform(area_key, (), minval=least, maxval=most)
    low, high = jnp.log(jnp.asarray(_ERASED_ASPECT))
    aspect = jnp.exp(jax.random.uniform(aspect_key, (), minval=low, maxval=high))
    sides = jnp.sqrt(jnp.stack([area * aspect, area / aspect]))
    sides = jnp.minimum(jnp.rint(sides), jnp.asarray(size))
    corner = jnp.floor(jax.random.uniform(place, (2,)) * (jnp.asarray(size) - sides + 1))
    hidden = _box_mask(corner, corner + sides, size) & jax.random.bernoulli(coin, probability)
    return jnp.where(hidden[..., None], jax.random.bits(noise, image.shape, jnp.uint8), image)


def _draw_own_weight(key: Key[Array, ''], config: Augmentation, size: Size) -> Float[Array, 'h w']:
    """Draws an image's own weight at each pixel: one number (MixUp), or 0 in a box (CutMix)."""
    mixup_key, cutmix_key, place, coin = jax.random.split(key, 4)
    if config.mixup:
        own = jax.random.beta(mixup_key, config.mixup, config.mixup)
        mixed = jnp.full(size, jnp.maximum(own, 1 - own))  # else two images may end up as one
    if config.cutmix:
        cut = 1 - jax.random.beta(cutmix_key, config.cutmix, config.cutmix)
        half = jnp.sqrt(cut) * jnp.asarray(size) / 2
        center = jax.random.uniform(place, (2,)) * jnp.asarray(size)
        pasted = 1.0 - _box_mask(jnp.rint(center - half), jnp.rint(center + half), size)
    if config.mixup and config.cutmix:
        return jnp.where(jax.random.bernoulli(coin), mixed, pasted)
    return mixed if config.mixup else pasted


def _mix(values: Float[Array, 'b ...'], own: Float[Array, 'b ...']) -> Float[Array, 'b ...']:
    return own * values + (1 - own) * jnp.roll(values, 1, axis=0)


def _box_mask(corner: Float[Array, '2'], opposite: Float[Array, '2'], size: Size) -> Array:
    """Returns which pixels (h w) lie between two corners, the second one excluded."""
    rows, columns = map(jnp.arange, size)
    in_rows = (rows >= corner[0]) & (rows < opposite[0])
    return in_rows[:, None] & (columns >= corner[1]) & (columns < opposite[1])
