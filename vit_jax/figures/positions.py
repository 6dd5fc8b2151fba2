"""Position embeddings (ViT paper, figure 7, center).

Each tile belongs to one position, and shows the cosine similarity of its embedding and the
embedding of every position: purple if they are similar, orange if they are opposite. If the model
has learned the grid, a tile is darkest at its own place and neighbors are similar. In large models,
rows and columns form a cross.
"""

import jax.numpy as jnp
import numpy as np

from vit_jax.analysis.attention import require_tokens
from vit_jax.base import Array, Float, UserError
from vit_jax.figures import style
from vit_jax.figures.figure import Figure, Images, Numbers, PlacedModel
from vit_jax.models.model import compute_position_table
from vit_jax.models.positions import LEARNED, WIDTH_MULTIPLES

_MOST_TILES = 14  # per side


def compute(images: Images, model: PlacedModel) -> Numbers:
    """Returns the cosine `similarity` (rows columns rows columns) of all pairs of positions."""
    config = model.vit
    if config.positions not in WIDTH_MULTIPLES:
        raise UserError('the model has no position embeddings')
    if config.positions_at == 'every_layer' and config.positions in LEARNED:
        raise UserError('not supported for separate position embeddings in each layer')
    table = compute_position_table(config, model.loaded.params)
    prefix = config.num_class_tokens
    return {'similarity': np.asarray(position_similarity(table, config.grid, prefix=prefix))}


def position_similarity(
    pos_embedding: Float[Array | np.ndarray, '1 n d'] | Float[Array | np.ndarray, 'n d'],
    grid: tuple[int, int],
    *,
    prefix: int,
) -> Float[Array, 'rows columns rows columns']:
    """Computes the cosine similarity of the position embeddings of each pair of patches.

    Args:
      pos_embedding: Position embeddings of all tokens.
      grid: Rows and columns of patches.
      prefix: Number of tokens before the patches, which are left out.

    Returns:
      Cosine similarities; NaN if an embedding is zero.

    Raises:
      UserError: If the number of embeddings is not prefix + rows * columns.
    """
    *_, n, width = pos_embedding.shape
    require_tokens(n, grid, prefix=prefix)
    table = jnp.asarray(pos_embedding, jnp.float32).reshape(n, width)[prefix:]
    unit = (table / jnp.linalg.norm(table, axis=1, keepdims=True)).reshape(*grid, width)
    return jnp.einsum('rcd,ijd->rcij', unit, unit, precision='highest')


def draw(numbers: Numbers) -> style.Drawing:
    """Draws a tile per position."""
    similarity = numbers['similarity']
    rows, columns = (range(0, n, -(-n // _MOST_TILES)) for n in similarity.shape[:2])
    tiles = similarity[np.ix_(rows, columns)]
    title = 'Similarity of each position embedding to all others, one tile per position'
    drawing = style.canvas_for(tiles, title)
    axes = drawing.subplots()
    how = {'cmap': style.DIVERGING, 'vmin': -1, 'vmax': 1}
    style.draw_mosaic(axes, tiles, rows=rows, columns=columns, **how)
    axes.set(xlabel='column of the patch', ylabel='row of the patch')
    style.add_colorbar(axes, 'cosine similarity', low=-1.0, cmap=style.DIVERGING)
    return drawing


FIGURE = Figure(__doc__, compute, draw, needs_images=False)
