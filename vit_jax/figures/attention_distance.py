"""Attention distance (ViT paper, figure 7, right, and appendix D.7).

The mean distance from a patch to the patches that it attends to, weighted by the attention and
averaged over patches and images. Attention to the class token counts as distance zero. The distance
is similar to the receptive field size of a convolution. In models trained on much data, some heads
of the first blocks attend locally and others globally; all heads of the last blocks attend
globally.
"""

import numpy as np

from vit_jax.analysis import attention
from vit_jax.base import Array, Float
from vit_jax.figures import style
from vit_jax.figures.figure import Figure, Images, Numbers, PlacedModel
from vit_jax.models.taps import Reduction


def compute(images: Images, model: PlacedModel) -> Numbers:
    """Returns `distance` (l k) in pixels, its value for `uniform` attention, image `width`."""
    config = model.vit
    captures = images.capture(model, {'attention/weights': mean_distance(model)})
    patches = config.num_tokens - config.num_prefix_tokens
    uniform = attention.uniform_distance(config.grid, model.patch_size)
    return {
        'distance': np.mean([captured['attention/weights'] for captured in captures], axis=0),
        # Uniform attention over all tokens: the class token contributes distance zero.
        'uniform': np.array(uniform * patches / config.num_tokens),
        'width': np.array(config.image_size[1]),
    }


def mean_distance(model: PlacedModel) -> Reduction:
    """Returns a function from attention weights (b k n n) to the mean distance (k) per head."""
    grid = model.vit.grid
    patch_size = model.patch_size
    prefix = model.vit.num_prefix_tokens

    def distances(weights: Float[Array, 'b k n n']) -> Float[Array, 'k']:
        return attention.mean_attention_distance(weights[None], grid, patch_size, prefix=prefix)[0]

    return distances


def draw(numbers: Numbers) -> style.Drawing:
    """Draws a dot per head over the depth."""
    distance = numbers['distance']
    uniform = float(numbers['uniform'])
    blocks, heads = distance.shape
    title = f'Mean attention distance per head, for images {numbers["width"]} pixels wide'
    drawing = style.canvas(8.0, 4.6, title)
    axes = drawing.subplots()
    depth = np.arange(blocks).repeat(heads)
    axes.scatter(depth, distance, s=28, alpha=0.5, color=style.COLORS[0], label='head')
    axes.plot(distance.mean(axis=1), **style.line_style(1, 'mean of the heads'))
    axes.axhline(uniform, color='black', linestyle='--', label='uniform attention')
    axes.set_ylabel('mean attention distance (pixels)')
    axes.set_ylim(0, 1.08 * max(uniform, distance.max()))
    style.label_depth_axis(axes)
    style.add_legend(drawing, axes)
    return drawing


FIGURE = Figure(__doc__, compute, draw)
