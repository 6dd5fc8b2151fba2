"""What position embeddings say of where a patch is (ViT paper, figures 7 and 10)."""

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
    """Cosine of the position embedding of each patch with those of all patches.

    The `prefix` rows before the patches (the class token's) are left out; `grid`: rows and columns
    of patches. NaN where an embedding is zero. Raises UserError where prefix and grid do not make
    the rows that there are.
    """
    *_, n, width = pos_embedding.shape
    require_tokens(n, grid, prefix=prefix)
    table = jnp.asarray(pos_embedding, jnp.float32).reshape(n, width)[prefix:]
    unit = (table / jnp.linalg.norm(table, axis=1, keepdims=True)).reshape(*grid, width)
    return jnp.einsum('rcd,ijd->rcij', unit, unit, precision='highest')
