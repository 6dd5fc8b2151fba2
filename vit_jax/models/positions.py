"""Position embeddings: all that is known of each kind is in this file.

To add a kind, add it to `PositionKind`, `Positions`, `check`, `as_array` and `resizers`. One that
acts on queries and keys, inside the blocks, is in `rotation`.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, assert_never

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float, require

PositionKind = Literal['learned', 'sincos2d', 'rope', 'none']
# How learned positions become those of another grid. `bilinear` keeps corners on corners, as the
# paper's code; the others keep the edges of images on edges, each as a library does: `bicubic` as
# transformers, `bicubic_offset` as DINO and DINOv2 of Meta, `bicubic_antialias` as timm, OpenCLIP,
# and DINOv2 with registers, `bilinear_edges` as timm's FlexiViT.
PositionResize = Literal[
    'bilinear', 'bicubic', 'bicubic_offset', 'bicubic_antialias', 'bilinear_edges'
]
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
            case 'none' | 'rope':
                return tokens
            case other:
                assert_never(other)
        return tokens + table.astype(tokens.dtype)


def check(kind: PositionKind, *, width: int, num_heads: int) -> None:
    """Raises UserError for a width, or that of a head, that the kind of positions cannot fill."""
    fits = kind != 'sincos2d' or width % 4 == 0
    require(fits, f'width={width} is not a multiple of 4, as sincos2d positions need')
    fits = kind != 'rope' or width // num_heads % 4 == 0
    require(fits, f'width / num_heads={width // num_heads} is not a multiple of 4, as rope needs')


def as_array(
    kind: PositionKind, grid: Grid, *, length: int, width: int
) -> Float[np.ndarray, '1 n d']:
    """What a kind without parameters adds to `length` tokens, for files that hold arrays only.

    The class token's row is zero. Raises UserError for a kind that is no fixed array.
    """
    require(kind != 'rope', 'rope positions are no array: they turn queries and keys')
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


def rotation(
    kind: PositionKind, grid: Grid, prefix: int, head: int
) -> Callable[[Float[Array, 'b n h k']], Float[Array, 'b n h k']]:
    """What the kind of positions does to queries and keys, whose heads are `head` wide: rope
    rotates those of the patches (DINOv3, section 3.1), not those of the `prefix` tokens before.

    Numbers i and i + k/2 of a head are turned by the same angle: 2 pi y w for the first quarter of
    them, 2 pi x w for the second. y and x are the middle of the patch, from -1 to 1 along the
    image; the k/4 frequencies w fall from 1 to 1/100, that one left out.
    """
    if kind != 'rope':
        return lambda x: x
    y, x = np.mgrid[: grid[0], : grid[1]]
    middles = [(2 * at + 1) / side - 1 for at, side in zip((y, x), grid, strict=True)]
    frequencies = 100.0 ** (-np.arange(head // 4) * 4 / head)
    angles = [2 * math.pi * middle.reshape(-1, 1) * frequencies for middle in middles]
    turned = np.pad(np.tile(np.concatenate(angles, axis=1), 2), ((prefix, 0), (0, 0)))
    cos, sin = (f(turned)[:, None].astype(np.float32) for f in (np.cos, np.sin))

    def rotate(x: Float[Array, 'b n h k']) -> Float[Array, 'b n h k']:
        first, second = jnp.split(x, 2, axis=-1)
        return (x * cos + jnp.concatenate([-second, first], axis=-1) * sin).astype(x.dtype)

    return rotate


def resizers(
    kind: PositionKind, how: PositionResize
) -> dict[str, Callable[[np.ndarray, Grid, Grid], np.ndarray]]:
    """What adapts each parameter of a kind, by name, from an old grid to a new one."""
    match kind:
        case 'learned':
            return {'pos_embedding': functools.partial(resize, how=how)}
        case 'sincos2d' | 'rope' | 'none':
            return {}
        case other:
            assert_never(other)


def resize(
    table: Float[np.ndarray, '1 n d'], old: Grid, new: Grid, *, how: PositionResize = 'bilinear'
) -> Float[np.ndarray, '1 m d']:
    """Learned positions for another grid; the rows before the grid (the class token's) are kept.

    `bilinear` is the paper's code's `scipy.ndimage.zoom(order=1)` (section 3.2), for any pair of
    grids, square or not. Computed in float64.
    """
    prefix = table.shape[1] - old[0] * old[1]
    require(prefix >= 0, f'{table.shape[1]} position embeddings are too few for the grid {old}')
    if old == new:
        return table
    rows, columns = (_weights(size, target, how) for size, target in zip(old, new, strict=True))
    grid = np.einsum('ph,qw,hwd->pqd', rows, columns, table[0, prefix:].reshape(*old, -1))
    resized = grid.reshape(1, -1, grid.shape[-1]).astype(table.dtype)
    return np.concatenate([table[:, :prefix], resized], axis=1)


def _weights(old: int, new: int, how: PositionResize) -> Float[np.ndarray, 'new old']:
    """Along one axis, what each new position takes from each old one."""
    if how == 'bilinear':
        corners = np.linspace(0, old - 1, new)[:, None]
        return np.maximum(0, 1 - np.abs(corners - np.arange(old)))
    step = old / (new + 0.1) if how == 'bicubic_offset' else old / new
    at = (np.arange(new)[:, None] + 0.5) * step - 0.5
    if how == 'bilinear_edges':
        return np.maximum(0, 1 - np.abs(np.clip(at, 0, old - 1) - np.arange(old)))
    if how == 'bicubic_antialias':  # a wider kernel where it shrinks, cut at the edges
        wide = max(step, 1.0)
        weights = _cubic((np.arange(old) - at) / wide, a=-0.5)
        return weights / weights.sum(axis=1, keepdims=True)
    # Beyond an edge its last row goes on, so far as the kernel reaches.
    beyond = np.arange(-2, old + 2)
    to_table = np.clip(beyond, 0, old - 1)[:, None] == np.arange(old)
    return _cubic(beyond - at, a=-0.75) @ to_table


def _cubic(x: Float[np.ndarray, '*s'], *, a: float) -> Float[np.ndarray, '*s']:
    """Keys's cubic convolution kernel of width 4, whose slope at 1 is a."""
    x = np.abs(x)
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * (x**3 - 5 * x**2 + 8 * x - 4)
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
