"""Position embeddings: tables that are added to tokens, and the rotation of queries and keys.

To add a table, add its name to `PositionKind` and `MULTIPLES`, and its values to `table`. A kind
that acts in attention is computed in `Attention` (vit.py); `RELATIVE` lists those that need the
logits.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float

Tokens = Float[Array, 'b n d']
Heads = Float[Array, 'b _ h k']
Grid = tuple[int, int]  # patches in (height, width)
Table = Float[Array | np.ndarray, '1 m d']  # of the tokens that have positions
# `learned` is the paper's: a vector for each place in the sequence. `learned2d` has two of half the
# width, of the column and of the row. `relative` has a vector for each offset between two places,
# which adds a logit to that of query and key (appendix D.4).
PositionKind = Literal['learned', 'learned2d', 'sincos2d', 'relative', 'rope', 'none']
# The width of an added table is a multiple of this number.
MULTIPLES: dict[PositionKind, int] = {'learned': 1, 'learned2d': 2, 'sincos2d': 4}
RELATIVE: tuple[PositionKind, ...] = ('relative',)  # kinds that change the logits of attention
OF_ONE_GRID: tuple[PositionKind, ...] = ('relative',)  # their parameters are for one grid size
# The learned tables of each kind, as name: (depends on the row, depends on the column).
LEARNED: dict[PositionKind, dict[str, tuple[bool, bool]]] = {
    'learned': {'pos_embedding': (True, True)},
    'learned2d': {'pos_embedding_x': (False, True), 'pos_embedding_y': (True, False)},
}


def table(
    kind: PositionKind, grid: Grid, width: int, *, prefix: int, param: Callable[..., Any]
) -> Table | None:
    """Returns what is added to class tokens and patches; None: nothing.

    Args:
      kind: The kind of positions.
      grid: The patches.
      width: The width of a token.
      prefix: Number of class tokens before the patches.
      param: Makes or finds a parameter by name, initializer and shape, as that of a Flax module.
    """
    normal, (rows, columns) = nn.initializers.normal(0.02), grid
    before = (0, 0), (prefix, 0), (0, 0)  # zeros for class tokens
    match kind:
        case 'learned':
            return param('pos_embedding', normal, (1, prefix + rows * columns, width))
        case 'learned2d':
            x = param('pos_embedding_x', normal, (1, columns, width // 2))
            y = param('pos_embedding_y', normal, (1, rows, width // 2))
            of_each = jnp.tile(x, (1, rows, 1)), jnp.repeat(y, columns, axis=1)
            return jnp.pad(jnp.concatenate(of_each, axis=-1), before)
        case 'sincos2d':
            return np.pad(sincos2d(grid, width)[None], before)
    return None


def add(tokens: Tokens, table: Table | None, *, before: int) -> Tokens:
    """Adds positions to tokens (equation 1).

    Registers, which follow the first `before` tokens, have no positions.
    """
    if table is None:
        return tokens
    if registers := tokens.shape[1] - table.shape[1]:
        zeros = jnp.zeros((1, registers, table.shape[2]), table.dtype)
        table = jnp.concatenate([table[:, :before], zeros, table[:, before:]], axis=1)
    return tokens + jnp.asarray(table).astype(tokens.dtype)


def sincos2d(grid: Grid, width: int) -> Float[np.ndarray, 'n d']:
    """Returns fixed sine and cosine positions, rows of the grid one after the other.

    Each quarter of the width holds one of sin x, cos x, sin y, cos y at width/4 frequencies from 1
    down to 1/10,000 (MoCo v3; "Better plain ViT baselines for ImageNet-1k").
    """
    y, x = np.mgrid[: grid[0], : grid[1]]
    frequencies = 10_000.0 ** -np.linspace(0, 1, width // 4)
    x, y = x.reshape(-1, 1) * frequencies, y.reshape(-1, 1) * frequencies
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1).astype(np.float32)


def rotate(heads: Sequence[Heads], grid: Grid, *, prefix: int) -> list[Heads]:
    """Rotates queries and keys of patches by their position (rope; DINOv3, section 3.1).

    Numbers i and i + k/2 of a head are rotated by the same angle: 2 pi y w for the first quarter of
    them, 2 pi x w for the second. y and x are the middle of the patch, from -1 to 1 along the
    image; the k/4 frequencies w fall from 1 to 1/100, exclusive.

    Args:
      heads: Queries, keys, or the first of them.
      grid: The patches.
      prefix: Number of tokens before the patches, which are not rotated.
    """
    size = heads[0].shape[-1]
    y, x = np.mgrid[: grid[0], : grid[1]]
    middles = [(2 * at + 1) / side - 1 for at, side in zip((y, x), grid, strict=True)]
    frequencies = 100.0 ** (-np.arange(size // 4) * 4 / size)
    angles = [2 * math.pi * middle.reshape(-1, 1) * frequencies for middle in middles]
    turned = np.pad(np.tile(np.concatenate(angles, axis=1), 2), ((prefix, 0), (0, 0)))
    cos, sin = (f(turned)[:, None].astype(np.float32) for f in (np.cos, np.sin))

    def rotate_one(x: Heads) -> Heads:
        first, second = jnp.split(x, 2, axis=-1)
        at = slice(x.shape[1])
        return (x * cos[at] + jnp.concatenate([-second, first], axis=-1) * sin[at]).astype(x.dtype)

    return [rotate_one(x) for x in heads]
