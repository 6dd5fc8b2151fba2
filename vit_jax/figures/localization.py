"""Localization of tokens (Raghu et al., section 7).

Each tile belongs to one token of the last block, or one place of the last feature map. It shows the
CKA of that token with the pixels of each image patch, which is noisy with few images. A token that
still represents its own patch is brightest there. In the paper, this holds for models with a class
token, and much less for models that average all tokens and for ResNets.
"""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.analysis.cka import Terms, centered_gram, terms
from vit_jax.base import Array, Float, Params, UserError
from vit_jax.figures import cka, layers, style
from vit_jax.figures.figure import Figure, Images, Numbers, PlacedModel
from vit_jax.models import ResNetConfig

_TILES = 4  # drawn tokens per side of the grid


def compute(images: Images, model: PlacedModel) -> Numbers:
    """Compares tokens of the last block, or places of the last feature map, with image patches.

    Returns `cka` (t rows columns), and the (row, column) of the `tokens` (t 2), which is (-1, -1)
    for class tokens.
    """
    config = model.loaded.config
    rows, columns = config.grid
    prefix = 0
    class_tokens = 0
    if not isinstance(config, ResNetConfig):
        prefix = config.num_prefix_tokens
        class_tokens = config.num_class_tokens
    last = layers.output_layers(config)[-1:]
    wanted = layers.same_reduction(last, lambda x: x.reshape(len(x), -1, x.shape[-1]))

    def batch_terms(params: Params, pixels: Float[Array, 'b h w c']) -> Terms:
        captured = model.loaded.model.capture(params, pixels, wanted)[1]
        (x,) = layers.select_layers(captured, last)
        tokens = jnp.concatenate([x[:, :class_tokens], x[:, prefix:]], axis=1)
        return compare_with_patches(tokens, split_into_patches(pixels, (rows, columns)))

    values = cka.compute_cka(map(model.compile(batch_terms), images.batches(model)))
    places = [(-1, -1)] * class_tokens + [(i, j) for i in range(rows) for j in range(columns)]
    return {'cka': values.reshape(-1, rows, columns), 'tokens': np.array(places)}


def split_into_patches(
    images: Float[Array | np.ndarray, 'b h w c'], grid: tuple[int, int]
) -> Float[Array, 'm b f']:
    """Splits images into a grid of patches, in row-major order.

    Returns:
      Pixels of shape (patches, images, values).

    Raises:
      UserError: If the image size is not a multiple of the grid.
    """
    b, h, w, c = images.shape
    rows, columns = grid
    if h % rows or w % columns:
        raise UserError(
            f'images: got {h}x{w} pixels; expected a multiple of the grid {rows}x{columns}'
        )
    cut = jnp.asarray(images).reshape(b, rows, h // rows, columns, w // columns, c)
    return cut.transpose(1, 3, 0, 2, 4, 5).reshape(rows * columns, b, -1)


def compare_with_patches(
    tokens: Float[Array | np.ndarray, 'b t d'], patches: Float[Array | np.ndarray, 'm b f']
) -> Terms:
    """Computes the CKA terms of each token with each patch, for one minibatch.

    `analysis.cka.ratio` of the terms, summed over minibatches, is the CKA (t m). It is NaN for
    tokens that are equal for all images, such as the class token before the first block.

    Args:
      tokens: Tokens, or the locations of a ResNet's feature map.
      patches: Pixels of patches from `split_into_patches`.

    Raises:
      UserError: If there are fewer than 4 images.
    """
    grams = jax.vmap(centered_gram)
    return terms(grams(jnp.asarray(tokens).swapaxes(0, 1)), grams(jnp.asarray(patches)))


def draw(numbers: Numbers) -> style.Drawing:
    """Draws tiles of the class tokens, and of tokens evenly spread over the grid."""
    from matplotlib.patches import Rectangle

    values = numbers['cka']
    tokens = numbers['tokens']
    kept = [style.evenly(n, _TILES) for n in values.shape[1:]]
    y, x = tokens.T
    shown = np.flatnonzero((y < 0) | np.isin(y, kept[0]) & np.isin(x, kept[1]))
    columns = len(kept[1]) + 1
    rows = -(-len(shown) // columns)
    title = 'Part of the image that each token represents; its own patch is framed'
    height = 1.6 * values.shape[1] / values.shape[2] + 0.3
    drawing, panels = style.panels(rows, columns, 1.6, height, title)
    low = float(np.nanmin(values, initial=0))
    high = float(np.nanmax(values, initial=1e-3))
    for axes, token in zip(panels.flat, shown.tolist(), strict=False):
        row, column = tokens[token].tolist()
        axes.imshow(values[token], cmap=style.SEQUENTIAL, vmin=low, vmax=high)
        axes.set_title('class token' if row < 0 else f'row {row}, column {column}', pad=3)
        if row >= 0:
            corner = (column - 0.5, row - 0.5)
            frame = style.COLORS[1]
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=frame, linewidth=2))
    style.add_colorbar(panels, 'CKA of token and patch', low=low, high=high)
    return drawing


def finding(numbers: Numbers) -> str:
    """Returns the share of tokens that are most similar to their own patch."""
    values = numbers['cka']
    tokens = numbers['tokens']
    places = [(t, *place) for t, place in enumerate(tokens.tolist()) if place[0] >= 0]
    hits = np.mean([values[place] >= np.nanmax(values[place[0]], initial=-1) for place in places])
    chance = f'{1 / values[0].size:.1%} by chance'
    return f'{hits:.0%} of {len(places)} tokens are most similar to their own patch; {chance}.'


FIGURE = Figure(__doc__, compute, draw, finding)
