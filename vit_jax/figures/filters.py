"""Filters of the patch embedding (ViT paper, figure 7, left).

The principal components of the filters of the patch embedding, or of the first convolution of a
ResNet or hybrid, each scaled to the full color range. In a trained model they look like smooth
waves, edges and color contrasts, from coarse to fine. Noise means that the model was trained only
briefly.
"""

import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float, UserError
from vit_jax.figures import style
from vit_jax.figures.figure import Figure, Images, Numbers, PlacedModel
from vit_jax.models.resnet import standardize

_COMPONENTS = 28  # as in figure 7 of the paper
_COLUMNS = 7


def compute(images: Images, model: PlacedModel) -> Numbers:
    """Returns `components` (k p q c) in [0, 1] and their share of the variance `explained` (k)."""
    params = model.loaded.params
    config = model.loaded.config
    kernel: np.ndarray
    if config.backbone is None:
        kernel = np.asarray(params['embedding']['kernel'], np.float32)
    else:
        kernel = np.asarray(standardize(params['backbone']['conv_root']['kernel']))
    components, explained = principal_components(kernel, _COMPONENTS)
    if not np.isfinite(explained).all():
        raise UserError('all filters are equal, so they have no principal components')
    pictures = np.asarray(to_unit_range(components))
    return {'components': pictures, 'explained': np.asarray(explained)}


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
    variances = deviations[: width - 1] ** 2
    components = components[: width - 1][:count]
    largest = jnp.abs(components).argmax(axis=1, keepdims=True)
    signs = jnp.sign(jnp.take_along_axis(components, largest, axis=1))
    signed = (components * signs).reshape(-1, *kernel.shape[:-1])
    return signed, variances[:count] / variances.sum()


def to_unit_range(components: Float[Array | np.ndarray, 'n p q c']) -> Float[Array, 'n p q c']:
    """Scales each component to [0, 1]; constant components become 0."""
    components = jnp.asarray(components, jnp.float32)
    low = components.min(axis=(1, 2, 3), keepdims=True)
    high = components.max(axis=(1, 2, 3), keepdims=True)
    return (components - low) / jnp.where(high > low, high - low, 1)


def draw(numbers: Numbers) -> style.Drawing:
    """Draws the components in rows of seven."""
    components = numbers['components']
    explained = numbers['explained']
    count, height, width, _ = components.shape
    title = f'{count} principal components of the filters, of {height} x {width} pixels each, and '
    title += f'their share of the variance: {explained.sum():.0%} together'
    rows = -(-count // _COLUMNS)
    drawing, axes = style.panels(rows, _COLUMNS, 1.2, 1.2 * height / width + 0.25, title)
    for ax, component, share in zip(axes.flat, components, explained, strict=False):
        ax.imshow(component)
        ax.set_title(f'{share:.1%}', pad=3)
    return drawing


FIGURE = Figure(__doc__, compute, draw, needs_images=False)
