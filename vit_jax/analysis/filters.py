"""Principal components, such as those of the patch embedding filters (ViT paper, figure 7)."""

import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float


def principal_components(
    kernel: Float[Array | np.ndarray, '*shape width'], count: int = 28
) -> tuple[Float[Array, 'count *shape'], Float[Array, 'count']]:
    """Computes the principal components of `width` filters.

    The mean filter is subtracted, so there are at most min(width - 1, size of a filter) components.

    Args:
      kernel: Filters of any shape along the last axis: a patch embedding kernel (height, width,
        channels, filters), or features of patches (d, patches).
      count: Maximum number of components to return.

    Returns:
      Components of unit length in order of decreasing variance, with a positive largest entry, and
      the fraction of the variance that each explains. Fractions are NaN if all filters are equal.
    """
    width = kernel.shape[-1]
    filters = jnp.asarray(kernel, jnp.float32).reshape(-1, width).T
    centered = filters - filters.mean(axis=0)
    _, deviations, components = jnp.linalg.svd(centered, full_matrices=False)
    variances, components = (deviations**2)[: width - 1], components[: width - 1][:count]
    largest = jnp.abs(components).argmax(axis=1, keepdims=True)
    signs = jnp.sign(jnp.take_along_axis(components, largest, axis=1))
    signed = (components * signs).reshape(-1, *kernel.shape[:-1])
    return signed, variances[:count] / variances.sum()


def to_unit_range(components: Float[Array | np.ndarray, 'n p q c']) -> Float[Array, 'n p q c']:
    """Scales each component to [0, 1]; constant components become 0."""
    components = jnp.asarray(components, jnp.float32)
    low, high = (f(axis=(1, 2, 3), keepdims=True) for f in (components.min, components.max))
    return (components - low) / jnp.where(high > low, high - low, 1)
