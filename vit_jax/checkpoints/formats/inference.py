"""What a file does not say of its network: inferred from shapes and sizes, or asked for."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

from vit_jax.base.errors import UserError
from vit_jax.base.records import Record
from vit_jax.checkpoints.formats.array_files import LazyArray
from vit_jax.models import SIZES, Backbone, Gelu, ModelConfig, Pool, ResNetConfig


class NeedsHint(UserError):
    """The file leaves open what network is in it; the message names the hint that settles it."""


@dataclasses.dataclass(kw_only=True)
class Hints(Record):
    """What a file of another system may not say of itself. None: it does, or there is a rule."""

    grid: tuple[int, int] | None = None  # of the position embeddings, in patches (height, width)
    num_heads: int | None = None
    gelu: Gelu | None = None
    layer_norm_epsilon: float | None = None


def with_defaults(hints: Hints, defaults: Hints) -> Hints:
    """The hints, those of `defaults` where they are None."""
    given = {name: value for name, value in vars(hints).items() if value is not None}
    return dataclasses.replace(defaults, **given)


def hints_of(config: ModelConfig) -> Hints:
    """All hints, as one would give them who knows the network."""
    if isinstance(config, ResNetConfig):
        return Hints()
    return Hints(
        grid=config.grid,
        num_heads=config.num_heads,
        gelu=config.gelu,
        layer_norm_epsilon=config.layer_norm_epsilon,
    )


def check_hints(hints: Hints, config: ModelConfig) -> None:
    """Raises UserError for a hint that contradicts what was found in the file."""
    for name, value in vars(hints).items():
        found = getattr(config, name, None)
        if value not in (None, found):
            raise UserError(f'{name}={value} was given, but the arrays have {found}')


def shape_of(arrays: Mapping[str, LazyArray], name: str, rank: int) -> tuple[int, ...]:
    """The shape of an array. Raises UserError where it is missing or of another rank."""
    if name not in arrays:
        raise UserError(f'the array {name} is missing')
    shape = arrays[name].shape
    if len(shape) != rank or 0 in shape:
        raise UserError(f'{name} has the shape {shape}, expected {rank} axes')
    return shape


def length_of(arrays: Mapping[str, LazyArray], name: str) -> int | None:
    """The length of a vector; None where the network does not have it."""
    return shape_of(arrays, name, 1)[0] if name in arrays else None


def count_layers(names: Iterable[str], pattern: str) -> int:
    """The number of blocks: of different values of the pattern's group at the start of names."""
    layers = {match[1] for name in names if (match := re.match(pattern, name))}
    if not layers:
        raise UserError('no encoder block is in it')
    return len(layers)


def infer_backbone(
    arrays: Mapping[str, LazyArray], root: str, unit: str, *, outputs: int
) -> Backbone | None:
    """The backbone; None where its first kernel, `root`, is not among the arrays.

    The pattern `unit` matches the beginning of names, with the numbers of stage and unit as
    groups; `outputs` is the axis of a kernel's output channels.
    """
    if root not in arrays:
        return None
    units = {match.groups() for name in arrays if (match := re.match(unit, name))}
    stages = sorted({int(stage) for stage, _ in units})
    blocks = tuple(sum(int(stage) == number for stage, _ in units) for number in stages)
    return Backbone(blocks=blocks, width=shape_of(arrays, root, 4)[outputs])


def cell_of(patch_size: tuple[int, int], backbone: Backbone | None) -> tuple[int, int]:
    """The pixels of the image, (height, width), for which one position stands."""
    stride = backbone.stride if backbone else 1
    return patch_size[0] * stride, patch_size[1] * stride


def infer_heads(hints: Hints, width: int, mlp_dim: int, depth: int) -> int:
    """The number of heads, where no array shows it: as hinted, or that of the published sizes."""
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
    """How many cells (height, width) an image holds; None where its size is not known."""
    return (image_size[0] // cell[0], image_size[1] // cell[1]) if image_size else None


def infer_grid(
    positions: int,
    *,
    rows: tuple[int, ...],
    hints: Hints,
    image_size: tuple[int, int] | None,
    cell: tuple[int, int],
) -> tuple[tuple[int, int], int]:
    """The grid (height, width) of a table of position embeddings, and whether it has a class row.

    `positions` is the length of the table, `rows` the numbers of class tokens (0, 1) that it may
    hold before the patches, `cell` the size in pixels of the part of the image that a patch covers.
    `image_size` settles what is still ambiguous. Raises NeedsHint that says what would settle it.
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


def summarize(config: ModelConfig, parameters: int) -> str:
    """The network, and the number of its parameters, in one line."""
    head = 'no head' if config.num_classes is None else f'{config.num_classes} classes'
    head += f'; {parameters:,} parameters'
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
    pools: dict[Pool, str] = {
        'cls': 'class token',
        'gap': 'mean of tokens',
        'map': 'attention pooling',
        'none': 'all tokens',
    }
    return (
        f'{name}: {config.depth} layers of width {config.width}, {config.num_heads} heads, '
        f'{pools[config.pool]}, grid {config.grid[0]}x{config.grid[1]} '
        f'(images {height}x{width}), {config.gelu} GELU, epsilon {config.layer_norm_epsilon:g}, '
        f'{head}'
    )


def _near_squares(count: int) -> list[tuple[int, int]]:
    """The grids of this many patches that are nearest to a square: both ways round."""
    for height in range(math.isqrt(max(1, count)), 1, -1):
        if count % height == 0:
            width = count // height
            return [(height, width)] if height == width else [(height, width), (width, height)]
    return []
