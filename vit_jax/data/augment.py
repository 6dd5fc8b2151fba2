"""What happens to a batch of images on the device: random changes while training, scaling."""

import dataclasses

import jax
import jax.numpy as jnp

from vit_jax.data.transforms import Crop, Preprocessing
from vit_jax.typing import Array, Float, Key, UInt8


@dataclasses.dataclass(kw_only=True)
class Augmentation:
    """Random changes to training images."""

    crop: Crop | None = None  # on the host, instead of the preprocessing's
    flip: bool = False  # left to right, every other image
    shift_pixels: int = 0  # the most that an image moves, in each direction


def augment(
    key: Key[Array, ''], images: UInt8[Array, 'b h w c'], *, flip: bool, shift_pixels: int
) -> UInt8[Array, 'b h w c']:
    """Each image moved and flipped by chance, independently; its edge fills what it uncovers."""
    shift_key, flip_key = jax.random.split(key)
    if shift_pixels:
        images = _shifted(shift_key, images, shift_pixels)
    if flip:
        flipped = jax.random.bernoulli(flip_key, shape=(images.shape[0], 1, 1, 1))
        images = jnp.where(flipped, images[:, :, ::-1], images)
    return images


def normalize(
    images: UInt8[Array, 'b h w c'], preprocessing: Preprocessing
) -> Float[Array, 'b h w c']:
    """Pixel values as the model takes them: float32, (value - mean) / std."""
    scaled: Float[Array, 'b h w c'] = preprocessing.scaled(images)
    return scaled


def _shifted(
    key: Key[Array, ''], images: UInt8[Array, 'b h w c'], pixels: int
) -> UInt8[Array, 'b h w c']:
    padded = jnp.pad(images, ((0, 0), (pixels, pixels), (pixels, pixels), (0, 0)), mode='edge')
    corners = jax.random.randint(key, (images.shape[0], 2), 0, 2 * pixels + 1)

    def cut(image: Array, corner: Array) -> Array:
        return jax.lax.dynamic_slice(image, (corner[0], corner[1], 0), images.shape[1:])

    return jax.vmap(cut)(padded, corners)
