"""Position embeddings: what is added to tokens, and the rotation of queries and keys.

To add a kind, add it to `PositionKind` (config.py), and to `table` or where it acts. Relative
positions add to the logits of attention (attention.py).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float, Params, require
from vit_jax.models.config import ViTConfig

Tokens = Float[Array, 'b n d']
Heads = Float[Array, 'b _ h k']
Grid = tuple[int, int]  # patches in (height, width)
Table = Float[Array | np.ndarray, '1 m d']  # of the tokens that have positions
# The learned parameters of each kind. Does it span the rows of the grid, and its columns?
_LEARNED = {
    'learned': {'pos_embedding': (True, True)},
    'learned2d': {'pos_embedding_x': (False, True), 'pos_embedding_y': (True, False)},
}


def table(config: ViTConfig, param: Callable[..., Any]) -> Table | None:
    """Returns what is added to class tokens and patches; None: nothing.

    Args:
      config: The architecture.
      param: Makes or finds a parameter by name, initializer and shape, as that of a Flax module.
    """
    normal, (rows, columns), width = nn.initializers.normal(0.02), config.grid, config.width
    before = (0, 0), (config.positioned_prefix, 0), (0, 0)  # zeros for class tokens
    match config.positions:
        case 'learned':
            length = config.positioned_prefix + rows * columns
            return param('pos_embedding', normal, (1, length, width))
        case 'learned2d':
            x = param('pos_embedding_x', normal, (1, columns, width // 2))
            y = param('pos_embedding_y', normal, (1, rows, width // 2))
            of_each = jnp.tile(x, (1, rows, 1)), jnp.repeat(y, columns, axis=1)
            return jnp.pad(jnp.concatenate(of_each, axis=-1), before)
        case 'sincos2d':
            return np.pad(sincos2d(config.grid, width)[None], before)
        case 'relative' | 'rope' | 'none':
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


def as_array(config: ViTConfig, params: Params) -> Float[np.ndarray, '1 m d']:
    """Returns what is added to class tokens and patches as an array, from parameters by name.

    Raises:
      UserError: If the positions act in attention.
    """
    wrong = f'{config.positions} positions are no array: they act in attention'
    require(config.positions not in ('relative', 'rope'), wrong)
    found = table(config, lambda name, *_: params[name])
    if found is None:
        return np.zeros((1, config.num_tokens - config.registers, config.width), np.float32)
    return np.asarray(found)


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


def grid_parameters(config: ViTConfig) -> dict[str, tuple[bool, bool]]:
    """Maps the name of each learned table to two booleans: does it span the rows, the columns?"""
    place = 'encoder/block/' if config.positions_at == 'every_layer' else ''
    return {place + name: axes for name, axes in _LEARNED.get(config.positions, {}).items()}
