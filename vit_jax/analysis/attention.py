"""Attention maps of all layers: what flows from where (rollout), and how far heads look."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float, require


def rollout(
    weights: Float[Array | np.ndarray, 'l b h n n'], *, skips: Sequence[bool] | None = None
) -> Float[Array, 'b n n']:
    """How much of each input token (last axis) is in each token after the last layer.

    Abnar and Zuidema 2020, as for figure 6 of the ViT paper (appendix D.8): the heads are averaged,
    the identity is added for the skip connection, rows are normalised to sum to one, and the
    layers' matrices multiplied, the first layer applied first. Of queries (fourth axis) and keys.
    `skips` says which layers have a skip connection, where not all have: no identity elsewhere.
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
    """Mean distance, in pixels, between a patch and those that it attends to, of each head.

    The distances of patches' centres, weighted by the attention of a query patch and averaged over
    queries and images (ViT paper, appendix D.7). The `prefix` tokens before the patches, as the
    class token, are left out of queries and keys, and what remains of a row is not normalised
    again: attention to the class token counts as distance zero. `grid`: rows and columns of
    patches; `patch_size`: pixels of the image, (height, width), from one patch to the next. Raises
    UserError where prefix and grid are not the tokens.
    """
    n = weights.shape[-1]
    require_tokens(n, grid, prefix=prefix)
    places = np.argwhere(np.ones(grid)) * np.array(patch_size)
    distances = np.linalg.norm(places[:, None] - places, axis=-1).astype(np.float32)
    among = jnp.asarray(weights, jnp.float32)[..., prefix:, prefix:]
    return jnp.einsum('lbhqk,qk->lbhq', among, distances, precision='highest').mean(axis=(1, 3))


def uniform_distance(grid: tuple[int, int], patch_size: tuple[int | float, int | float]) -> float:
    """The mean distance of a head that attends to all patches alike, in pixels.

    From the number of pairs of patches that are so many rows and columns apart: along a side of s
    patches, s - |d| pairs are d apart.
    """
    apart = [np.arange(1 - side, side) for side in grid]
    rows, columns = (side - np.abs(d) for side, d in zip(grid, apart, strict=True))
    distances = np.hypot.outer(*(d * size for d, size in zip(apart, patch_size, strict=True)))
    return float(rows @ distances @ columns / np.prod(grid) ** 2)


def require_tokens(n: int, grid: tuple[int, int], *, prefix: int) -> None:
    """Raises UserError where n tokens are not `prefix` ones and a grid of patches."""
    rows, columns = grid
    fits = prefix >= 0 and n == prefix + rows * columns
    require(fits, f'{n} tokens: expected prefix={prefix} and {rows}x{columns} patches')
