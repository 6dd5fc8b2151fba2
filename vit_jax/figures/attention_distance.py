"""Attention distance (ViT paper, figure 7, right, and appendix D.7).

The distance from a patch to the patches that it attends to, weighted by the attention, averaged
over patches and images. Attention to the class token counts as distance zero. The distance
corresponds to the receptive field of a convolution: in networks trained on much data some heads of
the first blocks attend locally and others globally, and all heads of the last blocks globally.
"""

import numpy as np

from vit_jax.analysis import attention
from vit_jax.base import Array, Float
from vit_jax.figures import style
from vit_jax.figures.figure import Figure, Images, Network, Numbers
from vit_jax.models.taps import Reduction


def compute(images: Images, network: Network) -> Numbers:
    """Returns the `distance` (l k) in pixels, its `uniform` value, and the image `width`."""
    config = network.vit
    captures = images.captures(network, {'attention/weights': mean_distance(network)})
    patches = config.num_tokens - config.prefix
    uniform = attention.uniform_distance(config.grid, network.patch_size)
    return {
        'distance': np.mean([each['attention/weights'] for each in captures], axis=0),
        # Attention to all tokens: the part for the class token has no distance.
        'uniform': np.array(uniform * patches / config.num_tokens),
        'width': np.array(config.image_size[1]),
    }


def mean_distance(network: Network) -> Reduction:
    """Returns a function from attention weights (b k n n) to the mean distance (k) of heads."""
    grid, size, prefix = network.vit.grid, network.patch_size, network.vit.prefix

    def distances(weights: Float[Array, 'b k n n']) -> Float[Array, 'k']:
        return attention.mean_distance(weights[None], grid, size, prefix=prefix)[0]

    return distances


@style.styled
def draw(numbers: Numbers) -> style.Drawing:
    """Draws a dot for each head by depth."""
    distance, uniform = numbers['distance'], float(numbers['uniform'])
    blocks, heads = distance.shape
    title = f'Mean attention distance of each head, in images {numbers["width"]} pixels wide'
    drawing = style.canvas(8.0, 4.6, title)
    axes = drawing.subplots()
    depth = np.arange(blocks).repeat(heads)
    axes.scatter(depth, distance, s=28, alpha=0.5, color=style.COLORS[0], label='a head')
    axes.plot(distance.mean(axis=1), **style.line(1, 'mean of the heads'))
    axes.axhline(uniform, color='black', linestyle='--', label='uniform attention')
    axes.set_ylabel('mean attention distance (pixels)')
    axes.set_ylim(0, 1.08 * max(uniform, distance.max()))
    style.by_depth(axes)
    style.legend(drawing, axes)
    return drawing


FIGURE = Figure(__doc__, compute, draw)
