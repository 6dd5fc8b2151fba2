"""Effective receptive fields: which pixels change what is in the middle of a layer, and how much.

Luo et al. 2016; Raghu et al. 2021, section 5 and appendix C.4.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float, Int


def receptive_fields(
    centres: Callable[[Float[Array, 'b h w c']], Float[Array, 'l b d']],
    images: Float[Array | np.ndarray, 'b h w c'],
    channels: Int[Array | np.ndarray, 'b s'],
) -> Float[Array, 'l h w']:
    """The mean absolute derivative, by each pixel, of the feature in the centre of each layer.

    `centres(images)` are the centre features of l layers, d channels each; those of an image must
    depend on no other image. `channels`: s channels of each image, drawn from 0 to d - 1, of which
    one at a time is differentiated. The mean is over images, these channels, and the images'
    colours. Memory is that of one backward pass, time that of one for each layer and channel.
    """
    features, pullback = jax.vjp(centres, jnp.asarray(images))
    each = jnp.arange(len(images))

    def field_of_channel(layer: Int[Array, ''], channel: Int[Array, 'b']) -> Float[Array, 'h w']:
        (gradients,) = pullback(jnp.zeros_like(features).at[layer, each, channel].set(1))
        return jnp.abs(gradients).mean(axis=(0, 3), dtype=jnp.float32)

    def field(layer: Int[Array, '']) -> Float[Array, 'h w']:
        drawn = jnp.asarray(channels).T
        return jax.lax.map(lambda channel: field_of_channel(layer, channel), drawn).mean(axis=0)

    return jax.lax.map(field, jnp.arange(len(features)))
