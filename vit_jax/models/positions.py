"""Position embeddings: tables that are added to tokens, and rotary embeddings (RoPE).

To add a table, extend `PositionKind`, `WIDTH_MULTIPLES`, `make_table`, and `LEARNED` if the table
has parameters. Kinds that act in attention are computed in `Attention` (vit.py); `RELATIVE` lists
the kinds that change the attention logits.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float, Int, Key

Tokens = Float[Array, 'b n d']
Heads = Float[Array, 'b _ h k']
Grid = tuple[int, int]  # patches in (height, width)
Table = Float[Array | np.ndarray, '1 m d']  # embeddings of class tokens and patches
Kept = Int[Array, 'b k']  # numbers of the patches that PatchDropout keeps, in ascending order
# `learned` is the paper's, with one vector per position in the sequence. `learned2d` concatenates
# two vectors of half the width, one per column and one per row. `relative` has one vector per
# offset between two positions, whose product with the query is added to the logit (appendix D.4).
PositionKind = Literal['learned', 'learned2d', 'sincos2d', 'relative', 'rope', 'none']
# The kinds that are added to tokens, with the number that the width must be a multiple of.
WIDTH_MULTIPLES: dict[PositionKind, int] = {'learned': 1, 'learned2d': 2, 'sincos2d': 4}
RELATIVE: tuple[PositionKind, ...] = ('relative',)  # kinds that change the attention logits
FIXED_GRID: tuple[PositionKind, ...] = ('relative',)  # kinds that cannot be resized
# Learned tables of each kind, by parameter name: (depends on row, depends on column).
LEARNED: dict[PositionKind, dict[str, tuple[bool, bool]]] = {
    'learned': {'pos_embedding': (True, True)},
    'learned2d': {'pos_embedding_x': (False, True), 'pos_embedding_y': (True, False)},
}


def make_table(
    kind: PositionKind, grid: Grid, width: int, *, class_tokens: int, param: Callable[..., Any]
) -> Table | None:
    """Makes the embeddings that are added to class tokens and patches.

    Args:
      kind: Kind of positions.
      grid: Number of patches along (height, width).
      width: Embedding dimension.
      class_tokens: Number of class tokens before the patches.
      param: Returns a parameter by name, initializer and shape, like `param` of a Flax module.

    Returns:
      The embeddings, or None for a kind that is not added to tokens.
    """
    normal, (rows, columns) = nn.initializers.normal(0.02), grid
    padding = (0, 0), (class_tokens, 0), (0, 0)  # zeros for class tokens
    match kind:
        case 'learned':
            return param('pos_embedding', normal, (1, class_tokens + rows * columns, width))
        case 'learned2d':
            x = param('pos_embedding_x', normal, (1, columns, width // 2))
            y = param('pos_embedding_y', normal, (1, rows, width // 2))
            halves = jnp.tile(x, (1, rows, 1)), jnp.repeat(y, columns, axis=1)
            return jnp.pad(jnp.concatenate(halves, axis=-1), padding)
        case 'sincos2d':
            return np.pad(sincos2d(grid, width)[None], padding)
    return None


class SharedPositions(NamedTuple):
    """Positions that are the same in all blocks."""

    table: Table | None  # embeddings that every block adds; None: no block adds these
    kept: Kept | None  # None: all patches


def draw_kept(key: Key[Array, ''], shape: tuple[int, int], count: int) -> Kept:
    """Draws which `count` patches each example keeps; `shape` is (examples, patches)."""
    order = jnp.argsort(jax.random.uniform(key, shape), axis=1)
    return jnp.sort(order[:, :count], axis=1)


def keep_patches(
    tokens: Float[Array | np.ndarray, '_ n ...'], kept: Kept, before: int
) -> Float[Array, 'b m ...']:
    """Removes the patches that PatchDropout drops from tokens, or from a table for all examples.

    Args:
      tokens: Values of tokens, of which the first `before` are not patches and stay.
      kept: Numbers of the patches to keep.
      before: Number of tokens before the patches.
    """
    tokens = jnp.asarray(tokens)
    index = kept.reshape(kept.shape + (1,) * (tokens.ndim - 2))
    patches = jnp.take_along_axis(tokens[:, before:], index, axis=1)
    rest = jnp.broadcast_to(tokens[:, :before], (len(kept), before, *tokens.shape[2:]))
    return jnp.concatenate([rest, patches], axis=1)


def add(tokens: Tokens, table: Table | None, class_tokens: int, kept: Kept | None = None) -> Tokens:
    """Adds positions to tokens (equation 1), except to registers.

    Args:
      tokens: The first `class_tokens` tokens are class tokens, then registers, then patches.
      table: Embeddings of class tokens and all patches; None: nothing is added.
      class_tokens: Number of class tokens.
      kept: Numbers of the patches in `tokens`; None: all.
    """
    if table is None:
        return tokens
    if kept is not None:
        table = keep_patches(table, kept, class_tokens)
    if registers := tokens.shape[1] - table.shape[1]:
        zeros = jnp.zeros((len(table), registers, table.shape[2]), table.dtype)
        table = jnp.concatenate([table[:, :class_tokens], zeros, table[:, class_tokens:]], axis=1)
    return tokens + jnp.asarray(table).astype(tokens.dtype)


def sincos2d(grid: Grid, width: int) -> Float[np.ndarray, 'n d']:
    """Computes fixed sine and cosine embeddings of a grid, in row-major order.

    The quarters of the width are sin x, cos x, sin y, cos y, at width/4 frequencies from 1 down to
    1/10,000 (MoCo v3; "Better plain ViT baselines for ImageNet-1k").
    """
    y, x = np.mgrid[: grid[0], : grid[1]]
    frequencies = 10_000.0 ** -np.linspace(0, 1, width // 4)
    x, y = x.reshape(-1, 1) * frequencies, y.reshape(-1, 1) * frequencies
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1).astype(np.float32)


def rotate(
    heads: Sequence[Heads], grid: Grid, num_prefix_tokens: int, kept: Kept | None = None
) -> list[Heads]:
    """Rotates queries and keys of patches by their positions (RoPE; DINOv3, section 3.2).

    (y, x) is the center of a patch, with the image between -1 and 1. The k/4 frequencies w fall
    from 1 to 1/100, exclusive. Features i and i + k/2 of a head form a pair, which is rotated by
    one angle: 2 pi y w for i in the first quarter of the features, 2 pi x w in the second.

    Args:
      heads: Arrays of queries or keys, of all tokens or of the leading ones.
      grid: Number of patches along (height, width).
      num_prefix_tokens: Number of tokens before the patches, which are not rotated.
      kept: Numbers of the patches in `heads`; None: all.
    """
    size = heads[0].shape[-1]
    y, x = np.mgrid[: grid[0], : grid[1]]
    centers = [(2 * index + 1) / side - 1 for index, side in zip((y, x), grid, strict=True)]
    frequencies = 100.0 ** (-np.arange(size // 4) * 4 / size)
    patch_angles = [2 * math.pi * center.reshape(-1, 1) * frequencies for center in centers]
    angles = np.pad(np.concatenate(2 * patch_angles, axis=1), ((num_prefix_tokens, 0), (0, 0)))
    cos, sin = (f(angles)[None, :, None].astype(np.float32) for f in (np.cos, np.sin))
    if kept is not None:
        cos, sin = (keep_patches(table, kept, num_prefix_tokens) for table in (cos, sin))

    def rotate_one(x: Heads) -> Heads:
        first, second = jnp.split(x, 2, axis=-1)
        n = x.shape[1]
        turned = jnp.concatenate([-second, first], axis=-1)
        return (x * cos[:, :n] + turned * sin[:, :n]).astype(x.dtype)

    return [rotate_one(x) for x in heads]
