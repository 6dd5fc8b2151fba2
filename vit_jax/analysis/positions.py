"""Similarity of position embeddings (ViT paper, figures 7 and 10)."""

import jax.numpy as jnp
import numpy as np

from vit_jax.analysis.attention import require_tokens
from vit_jax.base import Array, Float


def similarity(
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
