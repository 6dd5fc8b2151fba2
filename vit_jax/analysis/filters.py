"""The filters that embed patches, and what most of them have in common (ViT paper, figure 7)."""

import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float


def principal_components(
    kernel: Float[Array | np.ndarray, 'p q c width'], count: int = 28
) -> Float[Array, 'count p q c']:
    """The directions in which `width` filters differ most: of unit length, most variance first.

    The mean filter is taken off, so there are no more than min(width - 1, p q c) components; fewer
    than `count` are returned where that is less. The largest entry of each is positive.
    """
    _, components = _decomposed(kernel)
    components = components[:count]
    largest = jnp.abs(components).argmax(axis=1, keepdims=True)
    signs = jnp.sign(jnp.take_along_axis(components, largest, axis=1))
    return (components * signs).reshape(-1, *kernel.shape[:3])


def explained_variance(
    kernel: Float[Array | np.ndarray, 'p q c width'], count: int = 28
) -> Float[Array, 'count']:
    """The share of the filters' variance along each principal component; of all, they sum to one.

    NaN where all filters are the same.
    """
    variances, _ = _decomposed(kernel)
    return variances[:count] / variances.sum()


def as_picture(components: Float[Array | np.ndarray, 'n p q c']) -> Float[Array, 'n p q c']:
    """Each alone stretched to [0, 1], as pictures show them; a constant one is 0."""
    components = jnp.asarray(components, jnp.float32)
    low, high = (f(axis=(1, 2, 3), keepdims=True) for f in (components.min, components.max))
    return (components - low) / jnp.where(high > low, high - low, 1)


def _decomposed(
    kernel: Float[Array | np.ndarray, 'p q c width'],
) -> tuple[Float[Array, 'm'], Float[Array, 'm f']]:
    """Variances and components of the filters, largest first, as many as can be told apart."""
    width = kernel.shape[-1]
    filters = jnp.asarray(kernel, jnp.float32).reshape(-1, width).T
    centred = filters - filters.mean(axis=0)
    _, deviations, components = jnp.linalg.svd(centred, full_matrices=False)
    return (deviations**2)[: width - 1], components[: width - 1]
