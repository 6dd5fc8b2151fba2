"""Attention weights of all layers: rollout, and the mean attention distance of each head."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float, require


def rollout(
    weights: Float[Array | np.ndarray, 'l b h n n'], *, skips: Sequence[bool] | None = None
) -> Float[Array, 'b n n']:
    """Computes how much of each input token (last axis) is in each token after the last layer.

    Attention rollout (Abnar and Zuidema 2020; ViT paper, figure 6 and appendix D.8): the weights
    of queries (fourth axis) and keys are averaged over heads, the identity is added for the skip
    connection, rows are normalized to sum to one, and the matrices of the layers are multiplied,
    the first layer applied first. `skips` marks the layers that have a skip connection (all).
    """
    heads = jnp.asarray(weights, jnp.float32).mean(axis=2)
    skip = jnp.ones(len(heads)) if skips is None else jnp.asarray(skips, jnp.float32)
    mixed = heads + skip[:, None, None, None] * jnp.eye(heads.shape[-1])
    mixed = mixed / mixed.sum(axis=-1, keepdims=True)
    return functools.reduce(lambda x, layer: jnp.matmul(layer, x, precision='highest'), mixed)


def mean_distance(
    weights: Float[Array | np.ndarray, 'l b h n n'],
    grid: tuple[int, int],
    patch_size: tuple[int | float, int | float],
    *,
    prefix: int,
) -> Float[Array, 'l h']:
    """Computes the mean attention distance of each head, in pixels (ViT paper, appendix D.7).

    The distances between the centers of patches are weighted by the attention of a query patch
    and averaged over queries and images. Tokens before the patches are left out, and the rest of a
    row is not normalized again: attention to the class token counts as distance zero.

    Args:
      weights: Attention weights: layers, images, heads, queries, keys.
      grid: Rows and columns of patches.
      patch_size: Height and width in pixels from one patch to the next.
      prefix: Number of tokens before the patches, such as the class token.

    Raises:
      UserError: If the number of tokens is not prefix + rows * columns.
    """
    n = weights.shape[-1]
    require_tokens(n, grid, prefix=prefix)
    places = np.argwhere(np.ones(grid)) * np.array(patch_size)
    distances = np.linalg.norm(places[:, None] - places, axis=-1).astype(np.float32)
    among = jnp.asarray(weights, jnp.float32)[..., prefix:, prefix:]
    return jnp.einsum('lbhqk,qk->lbhq', among, distances, precision='highest').mean(axis=(1, 3))


def uniform_distance(grid: tuple[int, int], patch_size: tuple[int | float, int | float]) -> float:
    """Returns the mean distance of a head that attends equally to all patches, in pixels.

    Along a side of s patches, s - |d| pairs of patches are d apart.
    """
    apart = [np.arange(1 - side, side) for side in grid]
    rows, columns = (side - np.abs(d) for side, d in zip(grid, apart, strict=True))
    distances = np.hypot.outer(*(d * size for d, size in zip(apart, patch_size, strict=True)))
    return float(rows @ distances @ columns / np.prod(grid) ** 2)


def require_tokens(n: int, grid: tuple[int, int], *, prefix: int) -> None:
    """Raises UserError if n tokens are not `prefix` tokens and a grid of patches."""
    rows, columns = grid
    fits = prefix >= 0 and n == prefix + rows * columns
    require(fits, f'{n} tokens: expected prefix={prefix} and {rows}x{columns} patches')
