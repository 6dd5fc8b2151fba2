"""Effective receptive fields: how much each pixel changes the center feature of a layer.

Luo et al. 2016; Raghu et al. 2021, section 5 and appendix C.4.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float, Int


def receptive_fields(
    centers: Callable[[Float[Array, 'b h w c']], Float[Array, 'l b d']],
    images: Float[Array | np.ndarray, 'b h w c'],
    channels: Int[Array | np.ndarray, 'b s'],
) -> Float[Array, 'l h w']:
    """Computes the mean absolute derivative of the center feature of each layer by each pixel.

    Args:
      centers: Returns the d center features of l layers for each image; the features of an image
        must not depend on other images.
      images: The images.
      channels: s channels of each image, from 0 to d - 1, that are differentiated.

    Returns:
      The mean over images, these channels, and colors. There is one backward pass for each layer
      and channel, one at a time.
    """
    features, pullback = jax.vjp(centers, jnp.asarray(images))
    each = jnp.arange(len(images))

    def field_of_channel(layer: Int[Array, ''], channel: Int[Array, 'b']) -> Float[Array, 'h w']:
        (gradients,) = pullback(jnp.zeros_like(features).at[layer, each, channel].set(1))
        return jnp.abs(gradients).mean(axis=(0, 3), dtype=jnp.float32)

    def field(layer: Int[Array, '']) -> Float[Array, 'h w']:
        drawn = jnp.asarray(channels).T
        return jax.lax.map(lambda channel: field_of_channel(layer, channel), drawn).mean(axis=0)

    return jax.lax.map(field, jnp.arange(len(features)))
