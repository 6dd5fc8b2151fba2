"""What a file does not say of its network, and how it is found out or asked for."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from vit_jax.base import records
from vit_jax.base.errors import UserError
from vit_jax.base.records import Record
from vit_jax.checkpoints.formats.array_files import NeedsHint, Stored
from vit_jax.models import SIZES, Backbone, Gelu, ModelConfig, ResNetConfig


@dataclasses.dataclass(kw_only=True)
class Hints(Record):
    """What a file of another system may not say of itself. None: it does, or there is a rule."""

    grid: tuple[int, int] | None = None  # of the position embeddings, in patches (height, width)
    num_heads: int | None = None
    gelu: Gelu | None = None
    layer_norm_epsilon: float | None = None


class Evidence(NamedTuple):
    """All that is known of a file whose network is to be found out."""

    arrays: dict[str, Stored]
    hints: Hints
    image_size: tuple[int, int] | None  # of the images it is wanted for
    subtree: str  # of an npz
    config_json: dict[str, Any]  # that lies beside it; {} where there is none
    processor_json: dict[str, Any]


class Recognised(NamedTuple):
    """What was found out."""

    config: ModelConfig
    layout: Any  # of the module that recognised it
    preprocessing: dict[str, Any]
    class_names: tuple[str, ...] = ()
    ignored: str | None = None  # names that belong to something else


def filled(hints: Hints, values: Mapping[str, Any]) -> Hints:
    """The hints, with what a file says of itself where nothing was said."""
    found = {name: values.get(name) for name in records.to_dict(hints)}
    merged = found | {n: v for n, v in records.to_dict(hints).items() if v is not None}
    return records.from_dict(Hints, merged, where='hints')


def shape_of(arrays: Mapping[str, Stored], name: str, rank: int) -> tuple[int, ...]:
    """The shape of an array. Raises UserError where it is missing or of another rank."""
    if name not in arrays:
        raise UserError(f'the array {name} is missing')
    shape = arrays[name].shape
    if len(shape) != rank or 0 in shape:
        raise UserError(f'{name} has the shape {shape}, expected {rank} axes')
    return shape


def length_of(arrays: Mapping[str, Stored], name: str) -> int | None:
    """The length of a vector that a network need not have."""
    return shape_of(arrays, name, 1)[0] if name in arrays else None


def count_layers(names: Iterable[str], pattern: str) -> int:
    """How many different numbers the group of the pattern matches at the beginning of names."""
    layers = {match[1] for name in names if (match := re.match(pattern, name))}
    if not layers:
        raise UserError('no encoder block is in it')
    return len(layers)


def find_backbone(
    arrays: Mapping[str, Stored], root: str, unit: str, *, outputs: int
) -> Backbone | None:
    """The backbone, if there is one: `root` is the name of its first kernel.

    The groups of the pattern `unit` match the stage and the unit at the beginning of names;
    `outputs` is the axis of a kernel's output channels.
    """
    if root not in arrays:
        return None
    units = {match.groups() for name in arrays if (match := re.match(unit, name))}
    stages = sorted({int(stage) for stage, _ in units})
    blocks = tuple(sum(int(stage) == number for stage, _ in units) for number in stages)
    return Backbone(blocks=blocks, width=shape_of(arrays, root, 4)[outputs])


def find_heads(hints: Hints, width: int, mlp_dim: int, depth: int) -> int:
    """The number of heads of a layout whose arrays do not show it, from the table of sizes."""
    if hints.num_heads is not None:
        if hints.num_heads < 1 or width % hints.num_heads:
            raise UserError(f'num_heads={hints.num_heads} does not divide the width {width}')
        return hints.num_heads
    known = {size[:3]: size[3] for size in SIZES.values()}
    if (depth, width, mlp_dim) not in known:
        raise NeedsHint(
            f'the number of heads is not in the file, and {depth} layers of width {width} with an '
            f'MLP of {mlp_dim} are no known variant; say it with num_heads=N, often width / 64'
        )
    return known[depth, width, mlp_dim]


def grid_of(image_size: tuple[int, int] | None, cell: tuple[int, int]) -> tuple[int, int] | None:
    """How many cells (height, width) fit into the images that are wanted, if there are any."""
    return (image_size[0] // cell[0], image_size[1] // cell[1]) if image_size else None


def find_grid(
    positions: int,
    *,
    rows: tuple[int, ...],
    hints: Hints,
    image_size: tuple[int, int] | None,
    cell: tuple[int, int],
) -> tuple[tuple[int, int], int]:
    """The grid of a table of positions, and how many of its rows stand before the grid.

    `rows` are the possible numbers of those, `cell` is the part of the image that one position
    stands for. The size of the images that are wanted settles what else is ambiguous. Raises
    UserError that says what would settle it.
    """
    if hints.grid is not None:
        for row in rows:
            if math.prod(hints.grid) == positions - row:
                return hints.grid, row
        raise UserError(
            f'grid={hints.grid} has {math.prod(hints.grid)} patches, the file {positions} positions'
        )
    square = {row: math.isqrt(max(0, positions - row)) for row in rows}
    square = {row: side for row, side in square.items() if side and side**2 == positions - row}
    plain = [row for row in rows if row]
    if square and (len(rows) == 1 or list(square) == plain):
        row, side = square.popitem()
        return (side, side), row
    wanted = grid_of(image_size, cell)
    for row in rows:
        if wanted is not None and math.prod(wanted) == positions - row:
            return wanted, row
    offers = [grid for row in rows for grid in _near_squares(positions - row)]
    token = ' and perhaps a class token' if len(rows) > 1 else ''
    raise NeedsHint(
        f'{positions} positions{token} fit more than one grid; say which with '
        + ' or '.join(f'grid={grid}' for grid in offers[:4])
    )


def summarize(config: ModelConfig) -> str:
    """What was found out, in one line."""
    head = 'no head' if config.num_classes is None else f'{config.num_classes} classes'
    height, width = config.image_size
    if isinstance(config, ResNetConfig):
        backbone = config.backbone
        stages = f'stages {backbone.blocks}, width {backbone.width}'
        return f'ResNet, {stages}, images {height}x{width}, {head}'
    sizes = {values: name for name, values in SIZES.items()}
    size = config.depth, config.width, config.mlp_dim, config.num_heads
    p, q = config.patch_size
    patch = f'{p}' if p == q else f'{p}x{q}'
    name = f'{sizes[size]}/{patch}' if size in sizes else f'patches {p}x{q}'
    if config.backbone is not None:
        stages = f'stages {config.backbone.blocks}' if config.backbone.blocks else 'root alone'
        name = f'hybrid ({stages}), {name} on its feature map'
    pool = {'cls': 'class token', 'gap': 'mean of tokens', 'map': 'attention pooling'}
    return (
        f'{name}: {config.depth} layers of width {config.width}, {config.num_heads} heads, '
        f'{pool.get(config.pool, config.pool)}, grid {config.grid[0]}x{config.grid[1]} '
        f'(images {height}x{width}), {config.gelu} GELU, epsilon {config.layer_norm_epsilon:g}, '
        f'{head}'
    )


def _near_squares(count: int) -> list[tuple[int, int]]:
    """The grid of this many patches that is nearest to a square, standing and lying."""
    for height in range(math.isqrt(max(1, count)), 1, -1):
        if count % height == 0:
            width = count // height
            return [(height, width)] if height == width else [(height, width), (width, height)]
    return []
