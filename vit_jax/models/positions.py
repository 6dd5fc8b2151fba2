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

from vit_jax.base import Array, Float, Int, Key, Num

Tokens = Float[Array, 'b n d']
Heads = Float[Array, 'b _ h k']
Grid = tuple[int, int]  # patches in (height, width)
Table = Float[Array | np.ndarray, '1 m d']  # embeddings of class tokens and patches
KeptPatches = Int[Array, 'b p']  # indices of the patches that are encoded, in ascending order
# `learned` is the paper's, with one vector per position in the sequence. `learned2d` concatenates
# two vectors of half the width, one per column and one per row. `relative` has one vector per
# offset between two positions, whose product with the query is added to the logit (appendix D.4).
# `learned_rope` combines `learned` with RoPE, also for registers, as in ViT-5.
PositionKind = Literal[
    'learned', 'learned2d', 'sincos2d', 'relative', 'rope', 'learned_rope', 'none'
]
# The kinds that are added to tokens, with the number that the width must be a multiple of.
WIDTH_MULTIPLES: dict[PositionKind, int] = {'learned': 1, 'learned2d': 2, 'sincos2d': 4}
WIDTH_MULTIPLES |= {'learned_rope': 1}
ROTARY: tuple[PositionKind, ...] = ('rope', 'learned_rope')  # kinds that rotate queries and keys
RELATIVE: tuple[PositionKind, ...] = ('relative',)  # kinds that change the attention logits
FIXED_GRID: tuple[PositionKind, ...] = ('relative',)  # kinds that cannot be resized
# Learned tables of each kind, by parameter name: (depends on row, depends on column).
LEARNED: dict[PositionKind, dict[str, tuple[bool, bool]]] = {
    'learned': {'pos_embedding': (True, True)},
    'learned2d': {'pos_embedding_x': (False, True), 'pos_embedding_y': (True, False)},
}
LEARNED['learned_rope'] = LEARNED['learned']


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
    normal = nn.initializers.normal(0.02)
    rows, columns = grid
    padding = (0, 0), (class_tokens, 0), (0, 0)  # zeros for class tokens
    match kind:
        case 'learned' | 'learned_rope':
            return param('pos_embedding', normal, (1, class_tokens + rows * columns, width))
        case 'learned2d':
            x = param('pos_embedding_x', normal, (1, columns, width // 2))
            y = param('pos_embedding_y', normal, (1, rows, width // 2))
            halves = [jnp.tile(x, (1, rows, 1)), jnp.repeat(y, columns, axis=1)]
            return jnp.pad(jnp.concatenate(halves, axis=-1), padding)
        case 'sincos2d':
            return np.pad(sincos2d(grid, width)[None], padding)
    return None


class SharedPositions(NamedTuple):
    """Position data that all blocks share."""

    table: Table | None  # embeddings that every block adds; None: nothing is added
    kept_patches: KeptPatches | None  # None: all patches


def draw_kept(key: Key[Array, ''], shape: tuple[int, int], count: int) -> KeptPatches:
    """Draws which `count` patches each example keeps; `shape` is (examples, patches)."""
    return select_kept(jax.random.uniform(key, shape), count)


def select_kept(noise: Float[Array, 'b n'], count: int) -> KeptPatches:
    """Returns the `count` patches of each example with the lowest noise."""
    return jnp.sort(jnp.argsort(noise, axis=1)[:, :count], axis=1)


def keep_patches(
    tokens: Float[Array | np.ndarray, '_ n ...'], kept_patches: KeptPatches, num_prefix: int
) -> Float[Array, 'b m ...']:
    """Selects the kept patches of each example; the tokens before the patches stay.

    Args:
      tokens: Tokens of each example, or a table (1 n ...) for all examples.
      kept_patches: Indices of the patches to keep.
      num_prefix: Number of tokens before the patches.
    """
    tokens = jnp.asarray(tokens)
    index = kept_patches.reshape(kept_patches.shape + (1,) * (tokens.ndim - 2))
    patches = jnp.take_along_axis(tokens[:, num_prefix:], index, axis=1)
    prefix_shape = len(kept_patches), num_prefix, *tokens.shape[2:]
    prefix = jnp.broadcast_to(tokens[:, :num_prefix], prefix_shape)
    return jnp.concatenate([prefix, patches], axis=1)


def restore_patches(
    patches: Float[Array, 'b p d'],
    kept_patches: KeptPatches,
    other: Float[Array, 'b 1 d'],
    count: int,
) -> Float[Array, 'b n d']:
    """Inverts `keep_patches`: puts kept patches in their places, and `other` in all other places.

    `count` is the number of all patches.
    """
    is_kept = (kept_patches[:, :, None] == jnp.arange(count)).any(axis=1)
    rank = jnp.cumsum(is_kept, axis=1) - 1
    index = jnp.where(is_kept, rank, kept_patches.shape[1])
    return jnp.take_along_axis(jnp.concatenate([patches, other], axis=1), index[..., None], axis=1)


def add(
    tokens: Tokens,
    table: Table | None,
    class_tokens: int,
    kept_patches: KeptPatches | None = None,
) -> Tokens:
    """Adds positions to tokens (equation 1), except to registers.

    Args:
      tokens: The first `class_tokens` tokens are class tokens, then registers, then patches.
      table: Embeddings of class tokens and all patches; None: nothing is added.
      class_tokens: Number of class tokens.
      kept_patches: Indices of the patches in `tokens`; None: all.
    """
    if table is None:
        return tokens
    if kept_patches is not None:
        table = keep_patches(table, kept_patches, class_tokens)
    registers = tokens.shape[1] - table.shape[1]
    if registers:
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
    x = x.reshape(-1, 1) * frequencies
    y = y.reshape(-1, 1) * frequencies
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1).astype(np.float32)


def make_angles(
    kind: PositionKind, grid: Grid, head_size: int, *, class_tokens: int, registers: int
) -> Float[np.ndarray, 'n k']:
    """Computes the angles by which RoPE rotates the features of each token; 0: not rotated.

    `rope` rotates patches (DINOv3, section 3.2). (y, x) is the center of a patch, with the image
    between -2 pi and 2 pi, and frequencies fall from 1 to 1/100.

    `learned_rope` rotates patches and registers (ViT-5). (y, x) are the row and column indices of a
    patch, and frequencies fall from 1 to 1/10,000. The registers form a square grid of their own,
    with frequencies from 1 to 1/100.

    Args:
      kind: One of `ROTARY`.
      grid: Number of patches along (height, width).
      head_size: Number of features of a head.
      class_tokens: Number of class tokens, which are not rotated.
      registers: Number of registers, between class tokens and patches.
    """
    if kind == 'rope':
        y, x = (2 * math.pi * ((2 * np.arange(side) + 1) / side - 1) for side in grid)
        patches = _grid_angles(y, x, head_size, base=100)
        return np.pad(patches, ((class_tokens + registers, 0), (0, 0)))
    side = np.arange(math.isqrt(registers))
    rows, columns = map(np.arange, grid)
    return np.concatenate(
        [
            np.zeros((class_tokens, head_size)),
            _grid_angles(side, side, head_size, base=100),
            _grid_angles(rows, columns, head_size, base=10_000),
        ]
    )


def _grid_angles(
    y: Num[np.ndarray, 'r'], x: Num[np.ndarray, 'c'], head_size: int, *, base: int
) -> Float[np.ndarray, 'n k']:
    """Computes the angles of a grid with these rows and columns.

    Features i and i + k/2 of a head of size k form a pair, which is rotated by one angle: y w for i
    in the first quarter of the features, x w in the second. The k/4 frequencies w fall from 1 to
    1/base, exclusive.
    """
    frequencies = float(base) ** (-np.arange(head_size // 4) * 4 / head_size)
    y, x = (side.reshape(-1, 1) for side in np.meshgrid(y, x, indexing='ij'))
    half = np.concatenate([y * frequencies, x * frequencies], axis=1)
    return np.concatenate([half, half], axis=1)


def rotate(
    heads: Sequence[Heads],
    angles: Float[np.ndarray, 'm k'],
    kept_patches: KeptPatches | None = None,
    num_prefix: int = 0,
) -> list[Heads]:
    """Rotates queries and keys by the angles of their positions (RoPE).

    Args:
      heads: Arrays of queries or keys, of all tokens or of the leading ones.
      angles: Angles of all tokens (see `make_angles`).
      kept_patches: Indices of the patches in `heads`; None: all.
      num_prefix: Number of tokens before the patches.
    """
    cos = np.cos(angles)[None, :, None].astype(np.float32)
    sin = np.sin(angles)[None, :, None].astype(np.float32)
    if kept_patches is not None:
        cos = keep_patches(cos, kept_patches, num_prefix)
        sin = keep_patches(sin, kept_patches, num_prefix)

    def rotate_one(x: Heads) -> Heads:
        first, second = jnp.split(x, 2, axis=-1)
        quarter_turn = jnp.concatenate([-second, first], axis=-1)
        n = x.shape[1]
        return (x * cos[:, :n] + quarter_turn * sin[:, :n]).astype(x.dtype)

    return [rotate_one(x) for x in heads]
