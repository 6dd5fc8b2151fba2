"""What a file does not say of its network: inferred from shapes and sizes, or asked for."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from vit_jax.base import UserError, require
from vit_jax.checkpoints.card import Hints
from vit_jax.checkpoints.formats.array_files import LazyArray
from vit_jax.models import SIZES, Backbone, ModelConfig, Pool, ResNetConfig, ViTConfig
from vit_jax.models.positions import PositionKind

# Heads of published networks that are none of the sizes with a name: depth, width, mlp_dim.
_HEADS = {
    (10, 256, 1024): 4,
    (12, 640, 2560): 10,
    (12, 896, 3584): 14,
    (14, 256, 1280): 4,
    (14, 320, 1792): 5,
    (20, 512, 2048): 8,
    (21, 832, 2176): 13,
    (27, 1152, 4304): 16,
    (40, 1536, 4096): 24,
    (40, 1536, 6144): 16,
    (40, 4096, 8192): 32,
}


_MOST_PATCHES = 2**20  # whose positions are computed when a file is opened


class NeedsHint(UserError):
    """The file leaves open what network it is; the message names the hint that settles it."""


class Clues(NamedTuple):
    """All that is known of a file whose network is not known yet."""

    arrays: Mapping[str, LazyArray]
    hints: Hints
    image_size: tuple[int, int] | None = None  # of the images for which the network is wanted
    declared: tuple[int, int] | None = None  # of the images that it takes, as the file says
    subtree: str = ''  # of an npz
    beside: Mapping[str, dict[str, Any]] = {}  # JSON objects, by the names of their files

    def json(self, name: str) -> dict[str, Any]:
        """The JSON object in a file of this name beside the arrays; {} where there is none."""
        return self.beside.get(name, {})

    def with_defaults(self, defaults: Hints) -> 'Clues':
        """The same with the hints of `defaults` where there are none."""
        given = {name: value for name, value in vars(self.hints).items() if value is not None}
        return self._replace(hints=dataclasses.replace(defaults, **given))


def hints_of(config: ModelConfig) -> Hints:
    """All hints, as one would give them who knows the network."""
    return Hints(**{name: getattr(config, name, None) for name in vars(Hints())})


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


def kernel_shape(arrays: Mapping[str, LazyArray], name: str) -> tuple[int, ...]:
    """Height, width, inputs and outputs of a convolution: Flax's kernel, or PyTorch's weight."""
    axes = 'HWIO' if name.endswith('kernel') else 'OIHW'
    if name in arrays and len(arrays[name].shape) == 5:
        raise UserError(f'{name} has the shape {arrays[name].shape}: of videos, not of images')
    sizes = dict(zip(axes, shape_of(arrays, name, 4), strict=True))
    return tuple(sizes[axis] for axis in 'HWIO')


def infer_backbone(arrays: Mapping[str, LazyArray], root: str, unit: str) -> Backbone | None:
    """The backbone; None where its first kernel, `root`, is not among the arrays.

    `unit` is what names in a unit begin with; its numbers are {stage} and {unit}, counted from 1,
    or {stage0} and {unit0}.
    """
    if root not in arrays:
        return None
    pattern = unit.format_map(dict.fromkeys(('stage', 'unit', 'stage0', 'unit0'), r'(\d+)'))
    units = {match.groups() for name in arrays if (match := re.match(pattern, name))}
    counts = collections.Counter(int(stage) for stage, _ in units)
    blocks = tuple(counts[stage] for stage in sorted(counts))
    return Backbone(blocks=blocks, width=kernel_shape(arrays, root)[-1])


def infer_vit(
    clues: Clues,
    *,
    embedding: tuple[int, ...],
    root: str,
    unit: str,
    table: str | None,
    rows: tuple[int, ...],
    num_heads: int | None = None,
    gated: bool = False,
    rope: bool = False,
    **values: Any,
) -> tuple[ViTConfig, int]:
    """The ViT of these values, the rest inferred; and how many of its positions no patch has.

    Its MLPs are SwiGLUs where they are `gated`, and its positions rotations with `rope`.

    `embedding` is the shape of the patches' kernel; `root` and `unit` are those of
    `infer_backbone`, `table` and `rows` those of `infer_grid`.
    """
    arrays, hints = clues.arrays, clues.hints
    values['gelu'] = None if gated else hints.gelu
    values['layer_norm_epsilon'] = hints.layer_norm_epsilon
    fixed: PositionKind = 'rope' if rope else 'sincos2d'
    p, q, channels, width = embedding
    stride, backbone = 1, infer_backbone(arrays, root, unit)
    if backbone is not None:
        stride, channels = backbone.stride, kernel_shape(arrays, root)[2]
    cell = p * stride, q * stride
    (grid, row), heads = _all_of(
        lambda: infer_grid(clues, table, rows=rows, cell=cell),
        lambda: num_heads or infer_heads(hints, width, values['mlp_dim'], values['depth']),
    )
    image_size, declared = (grid[0] * cell[0], grid[1] * cell[1]), clues.declared
    if declared and (declared[0] // cell[0], declared[1] // cell[1]) == grid:
        image_size = declared  # its last pixels may fill no patch
    config = ViTConfig(
        image_size=image_size,
        patch_size=(p, q),
        channels=channels,
        backbone=backbone,
        width=width,
        num_heads=heads,
        positions='learned' if table else fixed,
        **values,
    )
    return config, row


def _all_of(*inferred: Callable[[], Any]) -> list[Any]:
    """What each infers. Raises one NeedsHint for all that raise one."""
    found, asked = [], []
    for infer in inferred:
        try:
            found.append(infer())
        except NeedsHint as error:
            asked.append(str(error))
    if asked:
        raise NeedsHint('; '.join(asked))
    return found


def infer_heads(hints: Hints, width: int, mlp_dim: int, depth: int) -> int:
    """The number of heads, where no array shows it: as hinted, or that of the published sizes."""
    if hints.num_heads is not None:
        if width % hints.num_heads:
            raise UserError(f'num_heads={hints.num_heads} does not divide the width {width}')
        return hints.num_heads
    known = {size[:3]: size[3] for size in SIZES.values()} | _HEADS
    if (depth, width, mlp_dim) not in known:
        raise NeedsHint(
            f'the number of heads is not in the file, and {depth} layers of width {width} with an '
            f'MLP of {mlp_dim} are no known variant; say it with num_heads=N, often width / 64'
        )
    return known[depth, width, mlp_dim]


def infer_grid(
    clues: Clues, table: str | None, *, rows: tuple[int, ...], cell: tuple[int, int]
) -> tuple[tuple[int, int], int]:
    """The grid (height, width) of an array of position embeddings, and how many rows are before it.

    `rows` are the numbers of such rows, of class and distillation token, that it may have, the
    usual one first: a square grid is taken only with that. `cell` is the size in pixels of the part
    of the image that a patch covers. Without an array the positions are computed. Raises NeedsHint,
    which says what would settle it.
    """
    hinted = clues.hints.grid
    wanted, declared = (
        (size[0] // cell[0], size[1] // cell[1]) if size else None
        for size in (clues.image_size, clues.declared)
    )
    if table is None:
        if grid := hinted or declared or wanted:
            wrong = f'a grid of {grid[0]:,}x{grid[1]:,}: more than {_MOST_PATCHES:,} patches'
            require(math.prod(grid) <= _MOST_PATCHES, wrong)
            return grid, 0
        raise NeedsHint(
            'positions are computed, so that the grid is not in the file; '
            f'say it with grid=(14, 14), or with image_size={(14 * cell[0], 14 * cell[1])}'
        )
    positions = shape_of(clues.arrays, table, 3)[1]
    side = math.isqrt(positions - rows[0])
    square = (side, side) if side**2 == positions - rows[0] > 0 else None
    grid = hinted or declared or square or wanted
    for row in rows:
        if grid is not None and math.prod(grid) == positions - row:
            return grid, row
    if hinted is not None:
        patches = math.prod(hinted)
        raise UserError(f'grid={hinted} has {patches} patches, the file {positions} positions')
    if declared is not None:
        wrong = f'images of {clues.declared} pixels have {declared[0]}x{declared[1]} patches'
        raise UserError(f'{table}: {positions} positions, but its {wrong}')
    offers = [grid for row in rows for grid in _near_squares(positions - row)]
    token = ' and perhaps a class token' if len(rows) > 1 else ''
    raise NeedsHint(
        f'{positions} positions{token} fit more than one grid; say which with '
        + ' or '.join(f'grid={grid}' for grid in offers[:4])
    )


def summarize(config: ModelConfig, parameters: int, *, projects: bool) -> str:
    """The network, and the number of its parameters, in one line; `projects` as a card has it."""
    head = 'no head' if config.num_classes is None else f'{config.num_classes} classes'
    head = f'a projection to {config.num_classes}' if projects else head
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
    pools: dict[Pool, str] = {'cls': 'class token', 'gap': 'mean of tokens'}
    pools |= {'map': 'attention pooling', 'none': 'all tokens'}
    pools |= {'cls_gap': 'class token and mean of patches'}
    pools |= {'cls_dist': 'class and distillation token'}
    unread = f': {config.unread}' if config.unread else ''
    parts = [f'{config.depth} layers of width {config.width}', f'{config.num_heads} heads']
    parts.append(pools[config.pool])
    parts += [f'{config.registers} registers'] * (config.registers > 0)
    parts += ['rotated queries and keys'] * (config.positions == 'rope')
    usual = 'learned', 'rope'
    parts += [f'{config.positions} positions'] * (config.positions not in usual)
    parts += ['positions in every layer'] * (config.positions_at != 'stem')
    parts += ['a norm before the blocks'] * config.pre_norm
    parts += ['LayerScale'] * (config.layer_scale is not None)
    parts.append(f'grid {config.grid[0]}x{config.grid[1]} (images {height}x{width}{unread})')
    parts.append('SwiGLU' if config.gelu is None else f'{config.gelu} GELU')
    parts += [f'epsilon {config.layer_norm_epsilon:g}']
    parts += [f'{config.patch_outputs} outputs for each patch'] * (config.patch_outputs is not None)
    parts.append(head)
    return f'{name}: {", ".join(parts)}'


def _near_squares(count: int) -> list[tuple[int, int]]:
    """The grids of this many patches that are nearest to a square: both ways round."""
    for height in range(math.isqrt(max(1, count)), 1, -1):
        if count % height == 0:
            return sorted({(height, count // height), (count // height, height)})
    return []
