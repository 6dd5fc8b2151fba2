"""Position embeddings: all that is known of each kind is in this file.

To add a kind, add it to `PositionKind`, `Positions`, `check`, `as_array` and `resizers`. One that
acts inside the blocks (on queries and keys, or at every block's input) is also called there, in
`vit.py`.
"""

from collections.abc import Callable
from typing import Literal, assert_never

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float, require

PositionKind = Literal['learned', 'sincos2d', 'none']
Grid = tuple[int, int]  # patches in (height, width)


class Positions(nn.Module):
    """Adds positions to the tokens (equation 1). Its parameters lie where the caller's do."""

    kind: PositionKind
    grid: Grid

    @nn.compact
    def __call__(self, tokens: Float[Array, 'b n d']) -> Float[Array, 'b n d']:
        _, length, width = tokens.shape
        match self.kind:
            case 'learned':
                normal = nn.initializers.normal(0.02)
                table = self.param('pos_embedding', normal, (1, length, width))
            case 'sincos2d':
                table = jnp.asarray(as_array(self.kind, self.grid, length=length, width=width))
            case 'none':
                return tokens
            case other:
                assert_never(other)
        return tokens + table.astype(tokens.dtype)


def check(kind: PositionKind, *, width: int) -> None:
    """Raises UserError for a width that the kind of positions cannot fill."""
    fits = kind != 'sincos2d' or width % 4 == 0
    require(fits, f'width={width} is not a multiple of 4, as sincos2d positions need')


def as_array(
    kind: PositionKind, grid: Grid, *, length: int, width: int
) -> Float[np.ndarray, '1 n d']:
    """What a kind without parameters adds to `length` tokens, for files that hold arrays only.

    The class token's row is zero. Raises UserError for a kind that is no fixed array.
    """
    if kind == 'none':
        return np.zeros((1, length, width), np.float32)
    require(kind == 'sincos2d', f'{kind} positions are parameters already')
    table = sincos2d(grid, width)
    return np.pad(table, ((length - len(table), 0), (0, 0)))[None]


def sincos2d(grid: Grid, width: int) -> Float[np.ndarray, 'n d']:
    """Fixed sine and cosine positions, rows of the grid one after the other.

    Each quarter of the width holds one of sin x, cos x, sin y, cos y at width/4 frequencies from 1
    down to 1/10,000 (MoCo v3; "Better plain ViT baselines for ImageNet-1k").
    """
    y, x = np.mgrid[: grid[0], : grid[1]]
    frequencies = 10_000.0 ** -np.linspace(0, 1, width // 4)
    x, y = x.reshape(-1, 1) * frequencies, y.reshape(-1, 1) * frequencies
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1).astype(np.float32)


def resizers(kind: PositionKind) -> dict[str, Callable[[np.ndarray, Grid, Grid], np.ndarray]]:
    """What adapts each parameter of a kind, by name, from an old grid to a new one."""
    match kind:
        case 'learned':
            return {'pos_embedding': resize}
        case 'sincos2d' | 'none':
            return {}
        case other:
            assert_never(other)


def resize(table: Float[np.ndarray, '1 n d'], old: Grid, new: Grid) -> Float[np.ndarray, '1 m d']:
    """Learned positions for another grid: bilinear, corners kept on corners.

    The rows before the grid (the class token's) are kept. On the grid it is the paper's code's
    `scipy.ndimage.zoom(order=1)` (section 3.2), for any pair of grids, square or not.
    """
    prefix = table.shape[1] - old[0] * old[1]
    require(prefix >= 0, f'{table.shape[1]} position embeddings are too few for the grid {old}')
    if old == new:
        return table
    rows, columns = (
        np.maximum(0, 1 - np.abs(np.linspace(0, size - 1, target)[:, None] - np.arange(size)))
        for size, target in zip(old, new, strict=True)
    )
    grid = np.einsum('ph,qw,hwd->pqd', rows, columns, table[0, prefix:].reshape(*old, -1))
    resized = grid.reshape(1, -1, grid.shape[-1]).astype(table.dtype)
    return np.concatenate([table[:, :prefix], resized], axis=1)
