"""Effective receptive fields (Luo et al. 2016; Raghu et al. 2021, section 5, appendix C.4)."""

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
    """Computes the mean absolute gradient of each layer's center feature with respect to pixels.

    This takes one backward pass per layer and channel, one at a time.

    Args:
      centers: Maps images to the d features at the center of each of l layers. The features of an
        image must not depend on other images.
      images: Images.
      channels: The s feature channels to differentiate for each image, from 0 to d - 1.

    Returns:
      Gradients, averaged over images, feature channels and colors.
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
