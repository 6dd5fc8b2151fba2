"""Attention rollout and mean attention distance, from attention weights."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float, require


def rollout(
    weights: Float[Array | np.ndarray, 'l b h n n'], *, skips: Sequence[bool] | None = None
) -> Float[Array, 'b n n']:
    """Computes attention rollout (Abnar and Zuidema 2020; ViT paper, figure 6, appendix D.8).

    Attention weights are averaged over heads, the identity is added for the skip connection, and
    rows are normalized to sum to one. The matrices of all layers are then multiplied.

    Args:
      weights: Attention weights: layers, images, heads, queries, keys.
      skips: Whether each layer has a skip connection; None: all have one.

    Returns:
      Contribution of each input token (last axis) to each token after the last layer.
    """
    heads = jnp.asarray(weights, jnp.float32).mean(axis=2)
    skip = jnp.ones(len(heads)) if skips is None else jnp.asarray(skips, jnp.float32)
    mixed = heads + skip[:, None, None, None] * jnp.eye(heads.shape[-1])
    mixed = mixed / mixed.sum(axis=-1, keepdims=True)
    return functools.reduce(lambda x, layer: jnp.matmul(layer, x, precision='highest'), mixed)


def mean_attention_distance(
    weights: Float[Array | np.ndarray, 'l b h n n'],
    grid: tuple[int, int],
    patch_size: tuple[int | float, int | float],
    *,
    prefix: int,
) -> Float[Array, 'l h']:
    """Computes the mean attention distance of each head (ViT paper, appendix D.7).

    Distances between patch centers are weighted by attention, and averaged over query patches and
    images. Tokens before the patches are left out without normalizing the remaining weights, so
    attention to the class token counts as distance zero.

    Args:
      weights: Attention weights: layers, images, heads, queries, keys.
      grid: Rows and columns of patches.
      patch_size: Height and width from one patch to the next, in pixels.
      prefix: Number of tokens before the patches, such as the class token.

    Returns:
      Distances in pixels.

    Raises:
      UserError: If the number of tokens is not prefix + rows * columns.
    """
    n = weights.shape[-1]
    require_tokens(n, grid, prefix=prefix)
    corners = np.argwhere(np.ones(grid)) * np.array(patch_size)
    distances = np.linalg.norm(corners[:, None] - corners, axis=-1).astype(np.float32)
    patches = jnp.asarray(weights, jnp.float32)[..., prefix:, prefix:]
    return jnp.einsum('lbhqk,qk->lbhq', patches, distances, precision='highest').mean(axis=(1, 3))


def uniform_distance(grid: tuple[int, int], patch_size: tuple[int | float, int | float]) -> float:
    """Computes the mean attention distance of a head that attends equally to all patches.

    Args:
      grid: Rows and columns of patches.
      patch_size: Height and width from one patch to the next, in pixels.

    Returns:
      The distance in pixels.
    """
    # In a row or column of s patches, s - |d| ordered pairs of patches have the offset d.
    offsets = [np.arange(1 - side, side) for side in grid]
    rows, columns = (side - np.abs(d) for side, d in zip(grid, offsets, strict=True))
    distances = np.hypot.outer(*(d * size for d, size in zip(offsets, patch_size, strict=True)))
    return float(rows @ distances @ columns / np.prod(grid) ** 2)


def require_tokens(n: int, grid: tuple[int, int], *, prefix: int) -> None:
    """Raises UserError unless n is `prefix` plus the number of patches in the grid."""
    rows, columns = grid
    fits = prefix >= 0 and n == prefix + rows * columns
    require(fits, f'got {n} tokens; expected {prefix} prefix tokens and {rows}x{columns} patches')
