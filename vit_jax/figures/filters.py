"""Filters of the patch embedding (ViT paper, figure 7, left).

The principal components of the filters of the patch embedding, or of the first convolution of a
ResNet or hybrid, each scaled to the full color range. In a trained model they look like smooth
waves, edges and color contrasts, from coarse to fine. Noise means that the model was trained only
briefly.
"""

import numpy as np

from vit_jax.analysis import filters
from vit_jax.base import UserError
from vit_jax.figures import style
from vit_jax.figures.figure import Figure, Images, Numbers, PlacedModel
from vit_jax.models.resnet import standardize

_COMPONENTS, _COLUMNS = 28, 7  # as in figure 7 of the paper


def compute(images: Images, model: PlacedModel) -> Numbers:
    """Returns `components` (k p q c) in [0, 1] and their share of the variance `explained` (k)."""
    params, config = model.loaded.params, model.loaded.config
    kernel: np.ndarray
    if config.backbone is None:
        kernel = np.asarray(params['embedding']['kernel'], np.float32)
    else:
        kernel = np.asarray(standardize(params['backbone']['conv_root']['kernel']))
    components, explained = filters.principal_components(kernel, _COMPONENTS)
    if not np.isfinite(explained).all():
        raise UserError('all filters are equal, so they have no principal components')
    pictures = np.asarray(filters.to_unit_range(components))
    return {'components': pictures, 'explained': np.asarray(explained)}


def draw(numbers: Numbers) -> style.Drawing:
    """Draws the components in rows of seven."""
    components, explained = numbers['components'], numbers['explained']
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
