"""Attention rollout (ViT paper, figures 6 and 14, appendix D.8; Abnar and Zuidema).

An estimate of how much each patch contributes to the tokens that the head reads (class token, mean
of patches, or attention pooling). The attention of each block is averaged over its heads, the
identity is added for the skip connection, and the matrices of all blocks are multiplied. In a good
classifier, bright places are on the object in the image.
"""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.analysis import attention
from vit_jax.base import Array, Float
from vit_jax.figures import style
from vit_jax.figures.attention_maps import average_pooled_tokens
from vit_jax.figures.figure import Figure, Images, Numbers, PlacedModel

_SHOWN = 6  # images
_PAIRS = 2  # image pairs per row


def compute(images: Images, model: PlacedModel) -> Numbers:
    """Returns the first `images` (b h w 3) in [0, 1], and their `relevance` (b rows columns)."""
    config = model.vit
    prefix = config.num_prefix_tokens
    skips = [block not in config.blocks_without_skips for block in range(config.depth)]

    @jax.jit
    def relevance(captured: dict[str, Array]) -> Float[Array, 'b m']:
        rolled = attention.rollout(captured['attention/weights'][:, :, None], skips=skips)
        if config.pool == 'map':
            pooling = captured['pool/attention/weights']  # over patches only
            return jnp.einsum('bn,bnm->bm', pooling, rolled[:, prefix:])[:, prefix:]
        return average_pooled_tokens(config, rolled)[:, prefix:]

    wanted = {'attention/weights': lambda weights: weights.mean(axis=1)}
    if config.pool == 'map':
        wanted['pool/attention/weights'] = lambda weights: weights.mean(axis=(1, 2))
    captures = images.capture(model, wanted, _SHOWN)
    batches = [np.asarray(relevance(captured)) for captured in captures]
    shown = np.concatenate(batches)[:_SHOWN].reshape(-1, *config.grid)
    return {'images': images.first_images(model, len(shown)), 'relevance': shown}


def draw(numbers: Numbers) -> style.Drawing:
    """Draws each image, and a gray copy overlaid with the relevance of its patches."""
    images = numbers['images']
    relevance = style.divide_by_max(numbers['relevance'])
    height, width = images.shape[1:3]
    title = 'Attention rollout: contribution of each patch to the output'
    rows = -(-len(images) // _PAIRS)
    drawing, axes = style.panels(rows, 2 * _PAIRS, 2.0, 2.0 * height / width, title)
    edges = (-0.5, width - 0.5, height - 0.5, -0.5)
    how = {'extent': edges, 'interpolation': 'bilinear', 'alpha': 0.5, **style.UNIT_RANGE}
    for (left, right), image, shares in zip(axes.reshape(-1, 2), images, relevance, strict=False):
        left.imshow(image)
        right.imshow(image.mean(axis=-1), cmap='gray', vmin=0, vmax=1)
        right.imshow(shares, **how)
    style.add_colorbar(axes, 'relevance, relative to\nthe largest in the image')
    return drawing


FIGURE = Figure(__doc__, compute, draw)
