"""Position embeddings: what each kind adds to the tokens, and how it becomes that of other images.

To add a kind, add it to `PositionKind`, `table`, `check` and `resizers`. One that turns queries and
keys is in `rotation`; one that adds to the logits of attention is in `attention.py`.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, assert_never

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float, Params, UserError, require

# `learned` is the paper's: a vector for each place in the sequence; `learned2d` two of half the
# width, of the column and of the row; `relative` a vector for each offset between two places, with
# which a query has logits besides those with keys (appendix D.4).
PositionKind = Literal['learned', 'learned2d', 'sincos2d', 'relative', 'rope', 'none']
# Where they are added: once, before the blocks; or at the beginning of each, parameters of its own
# or the same for all.
PositionsAt = Literal['stem', 'every_layer', 'every_layer_shared']
# How learned positions become those of another grid. `bilinear` keeps corners on corners, as the
# paper's code; the others keep the edges of images on edges, each as a library does: `bicubic` as
# transformers, `bicubic_offset` as DINO and DINOv2 of Meta, `bicubic_antialias` as timm, OpenCLIP,
# and DINOv2 with registers, `bilinear_edges` as timm's FlexiViT.
PositionResize = Literal[
    'bilinear', 'bicubic', 'bicubic_offset', 'bicubic_antialias', 'bilinear_edges'
]
Tokens = Float[Array, 'b n d']
Heads = Float[Array, 'b n h k']
Grid = tuple[int, int]  # patches in (height, width)
Table = Float[Array | np.ndarray, '1 m d']  # of the tokens that have positions
_BLOCK = 'encoder/block/'  # whose parameters are stacked: the depth in front


def table(
    kind: PositionKind, grid: Grid, param: Callable[..., Any], *, length: int, width: int
) -> Table | None:
    """What is added to `length` tokens, of which the last are the patches; None: nothing.

    `param` makes or finds a parameter, as that of a Flax module: by name, initializer and shape.
    """
    normal, (rows, columns) = nn.initializers.normal(0.02), grid
    before = (0, 0), (length - rows * columns, 0), (0, 0)  # rows of zeros for what is no patch
    match kind:
        case 'learned':
            return param('pos_embedding', normal, (1, length, width))
        case 'learned2d':
            x = param('pos_embedding_x', normal, (1, columns, width // 2))
            y = param('pos_embedding_y', normal, (1, rows, width // 2))
            of_each = jnp.tile(x, (1, rows, 1)), jnp.repeat(y, columns, axis=1)
            return jnp.pad(jnp.concatenate(of_each, axis=-1), before)
        case 'sincos2d':
            return np.pad(sincos2d(grid, width)[None], before)
        case 'relative' | 'rope' | 'none':
            return None
        case other:
            assert_never(other)


def add(tokens: Tokens, table: Table | None, *, before: int) -> Tokens:
    """The tokens with their positions (equation 1).

    Registers, which follow the first `before` tokens where there are any, have none.
    """
    if table is None:
        return tokens
    if registers := tokens.shape[1] - table.shape[1]:
        zeros = jnp.zeros((1, registers, table.shape[2]), table.dtype)
        table = jnp.concatenate([table[:, :before], zeros, table[:, before:]], axis=1)
    return tokens + jnp.asarray(table).astype(tokens.dtype)


def check(kind: PositionKind, at: PositionsAt, *, width: int, num_heads: int) -> None:
    """Raises UserError for a width, or that of a head, that the kind of positions cannot fill, and
    for a place where it is not added."""
    size, name = width, 'width'
    if kind == 'rope':
        size, name = width // num_heads, 'width / num_heads'
    divisor = {'learned2d': 2, 'sincos2d': 4, 'rope': 4}.get(kind, 1)
    wrong = f'{name}={size} is not a multiple of {divisor}, as positions={kind} needs'
    require(size % divisor == 0, wrong)
    if at != 'stem' and kind in ('relative', 'rope', 'none'):
        acts = 'there are no positions' if kind == 'none' else f'{kind} acts in every layer anyway'
        raise UserError(f'positions_at={at}: {acts}; the kinds that are added have a place')


def as_array(
    kind: PositionKind, grid: Grid, params: Params, *, length: int, width: int
) -> Float[np.ndarray, '1 n d']:
    """What is added to `length` tokens as one array, made of parameters that are found by name.

    Rows of tokens before the patches are zero but where they are learned. Raises UserError for a
    kind that adds nothing and acts elsewhere.
    """
    wrong = 'they turn queries and keys' if kind == 'rope' else 'they are logits of attention'
    require(kind not in ('relative', 'rope'), f'{kind} positions are no array: {wrong}')
    found = table(kind, grid, lambda name, *_: params[name], length=length, width=width)
    return np.zeros((1, length, width), np.float32) if found is None else np.asarray(found)


def sincos2d(grid: Grid, width: int) -> Float[np.ndarray, 'n d']:
    """Fixed sine and cosine positions, rows of the grid one after the other.

    Each quarter of the width holds one of sin x, cos x, sin y, cos y at width/4 frequencies from 1
    down to 1/10,000 (MoCo v3; "Better plain ViT baselines for ImageNet-1k").
    """
    y, x = np.mgrid[: grid[0], : grid[1]]
    frequencies = 10_000.0 ** -np.linspace(0, 1, width // 4)
    x, y = x.reshape(-1, 1) * frequencies, y.reshape(-1, 1) * frequencies
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1).astype(np.float32)


def rotation(kind: PositionKind, grid: Grid, prefix: int, head: int) -> Callable[[Heads], Heads]:
    """What the kind of positions does to queries and keys, whose heads are `head` wide: rope
    rotates those of the patches (DINOv3, section 3.1), not those of the `prefix` tokens before. It
    may be given the first of them alone.

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

    def rotate(x: Heads) -> Heads:
        first, second = jnp.split(x, 2, axis=-1)
        at = slice(x.shape[1])
        return (x * cos[at] + jnp.concatenate([-second, first], axis=-1) * sin[at]).astype(x.dtype)

    return rotate


def grid_parameters(kind: PositionKind, at: PositionsAt) -> dict[str, tuple[bool, bool]]:
    """Maps the name of each parameter to two booleans: does it span the rows, the columns?"""
    match kind:
        case 'learned':
            spans = {'pos_embedding': (True, True)}
        case 'learned2d':
            spans = {'pos_embedding_x': (False, True), 'pos_embedding_y': (True, False)}
        case 'sincos2d' | 'relative' | 'rope' | 'none':
            return {}
        case other:
            assert_never(other)
    place = 'encoder/block/' if at == 'every_layer' else ''
    return {place + name: axes for name, axes in spans.items()}
