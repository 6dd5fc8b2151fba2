"""The filters that embed patches, and what most of them have in common (ViT paper, figure 7)."""

import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float


def principal_components(
    kernel: Float[Array | np.ndarray, 'p q c width'], count: int = 28
) -> tuple[Float[Array, 'count p q c'], Float[Array, 'count']]:
    """The directions in which `width` filters differ most: of unit length, most variance first.

    And the share of the filters' variance along each: of all, they sum to one; NaN where all
    filters are the same. The mean filter is taken off, so there are no more than
    min(width - 1, p q c) components; fewer than `count` are returned where that is less. The
    largest entry of each is positive.
    """
    width = kernel.shape[-1]
    filters = jnp.asarray(kernel, jnp.float32).reshape(-1, width).T
    centred = filters - filters.mean(axis=0)
    _, deviations, components = jnp.linalg.svd(centred, full_matrices=False)
    variances, components = (deviations**2)[: width - 1], components[: width - 1][:count]
    largest = jnp.abs(components).argmax(axis=1, keepdims=True)
    signs = jnp.sign(jnp.take_along_axis(components, largest, axis=1))
    signed = (components * signs).reshape(-1, *kernel.shape[:3])
    return signed, variances[:count] / variances.sum()


def as_picture(components: Float[Array | np.ndarray, 'n p q c']) -> Float[Array, 'n p q c']:
    """Each alone stretched to [0, 1], as pictures show them; a constant one is 0."""
    components = jnp.asarray(components, jnp.float32)
    low, high = (f(axis=(1, 2, 3), keepdims=True) for f in (components.min, components.max))
    return (components - low) / jnp.where(high > low, high - low, 1)
