"""Infers a model from the names and shapes of its arrays, and from hints."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from vit_jax.base import UserError, require
from vit_jax.checkpoints.card import Hints
from vit_jax.checkpoints.formats.array_files import LazyArray
from vit_jax.checkpoints.formats.name_map import NameRule
from vit_jax.models import SIZES, Backbone, ModelConfig, ResNetConfig, ViTConfig
from vit_jax.models.positions import LEARNED

Arrays = Mapping[str, LazyArray]
# Number of heads of published models by depth, width and mlp_dim; most of their sizes have no name.
_NUM_HEADS = {(size.depth, size.width, size.mlp_dim): size.num_heads for size in SIZES.values()} | {
    (10, 256, 1024): 4,
    (12, 640, 2560): 10,
    (12, 896, 3584): 14,
    (14, 256, 1280): 4,
    (14, 320, 1792): 5,
    (18, 896, 2304): 14,
    (20, 512, 2048): 8,
    (21, 832, 2176): 13,
    (27, 1152, 4304): 16,
    (40, 1536, 4096): 24,
    (40, 1536, 6144): 16,
    (40, 4096, 8192): 32,
}
# Fields that a summary shows if they differ from the default.
_OPTIONS = (
    'pool',
    'gelu',
    'layer_norm_epsilon',
    'positions',
    'positions_at',
    'registers',
    'pre_norm',
    'norm',
    'layer_scale',
    'qkv_bias',
    'qk_norm',
    'parallel',
    'final_norm',
    'patch_outputs',
)


class NeedsHint(UserError):
    """The file does not determine the model; the message names the missing hint."""


def with_defaults(hints: Hints, defaults: Hints) -> Hints:
    """Fills missing hints with values from `defaults`."""
    known = {name: value for name, value in vars(hints).items() if value is not None}
    return dataclasses.replace(defaults, **known)


def shape_of(arrays: Arrays, name: str, *ranks: int) -> tuple[int, ...]:
    """Returns the shape of an array. Raises UserError if it is missing or has another rank."""
    require(name in arrays, f'the array {name} is missing')
    shape = arrays[name].shape
    require(
        len(shape) in ranks and 0 not in shape,
        f'{name}: shape {shape}; expected {" or ".join(map(str, ranks))} axes',
    )
    return shape


def length_of(arrays: Arrays, name: str) -> int | None:
    """Returns the length of a vector; None if the file does not contain it."""
    return shape_of(arrays, name, 1)[0] if name in arrays else None


def count_layers(names: Iterable[str], prefix: str) -> int:
    """Counts blocks, as distinct numbers after the prefix."""
    pattern = re.compile(rf'{re.escape(prefix)}(\d+)[./]')
    return len({match[1] for name in names if (match := pattern.match(name))})


def kernel_shape(arrays: Arrays, name: str, *ranks: int) -> tuple[int, ...]:
    """Returns the shape of a kernel with the axes of Flax: (height, width, inputs, outputs).

    PyTorch calls kernels `weight`, with the axes (outputs, inputs, height, width).
    """
    shape = shape_of(arrays, name, *ranks)
    return (*shape[2:], shape[1], shape[0]) if name.endswith('weight') else shape


def infer_backbone(arrays: Arrays, root: str, unit: str) -> Backbone:
    """Infers the convolutional backbone of a hybrid or a ResNet.

    Args:
      arrays: All arrays of the model.
      root: Name of the first kernel.
      unit: Name of a unit, with {stage} and {unit} from 1, or {stage0} and {unit0} from 0.
    """
    pattern = unit.format_map(dict.fromkeys(('stage', 'unit', 'stage0', 'unit0'), r'(\d+)'))
    units = {match.groups() for name in arrays if (match := re.match(pattern, name))}
    counts = collections.Counter(int(stage) for stage, _ in units)
    blocks = tuple(counts[stage] for stage in sorted(counts))
    return Backbone(blocks=blocks, width=kernel_shape(arrays, root, 4)[-1])


def infer_config(
    arrays: Arrays,
    rules: Iterable[NameRule],
    hints: Hints,
    *,
    rows: tuple[int, ...],
    image_size: tuple[int, int] | None = None,
    root: str = '',
    unit: str = '',
    **values: Any,
) -> tuple[ViTConfig, int]:
    """Infers a ViT from its arrays.

    Args:
      arrays: All arrays of the model.
      rules: The name map of the format.
      hints: Values that take precedence over inferred ones.
      rows: Possible numbers of rows before the patches' positions, the usual one first.
      image_size: Image size stated by a description.
      root: Name of a hybrid's first kernel; a file without this array is not a hybrid.
      unit: As for `infer_backbone`.
      **values: Known fields of `ViTConfig`.

    Returns:
      The model, and the number of rows of the table before the patches' positions.

    Raises:
      NeedsHint: If the arrays do not determine the grid or the number of heads.
      UserError: If an array is missing or has the wrong rank, or positions do not fit the grid.
    """
    names = {ours: rule.theirs for rule in rules for ours in rule.ours}
    table = names['pos_embedding'] if values.get('positions', 'learned') in LEARNED else None
    p, q, _, width = kernel_shape(arrays, names['embedding/kernel'], 4)
    backbone = infer_backbone(arrays, root, unit) if root in arrays else None
    stride = backbone.stride if backbone else 1
    cell = p * stride, q * stride  # pixels per position
    stated = (image_size[0] // cell[0], image_size[1] // cell[1]) if image_size else None
    grid, num_rows = _infer_grid(arrays, table, rows=rows, known=hints.grid or stated)
    inferred: dict[str, Any] = {
        # A stated size need not be a multiple of the patch size.
        'image_size': image_size if stated == grid else (grid[0] * cell[0], grid[1] * cell[1]),
        'patch_size': (p, q),
        'channels': kernel_shape(arrays, root if backbone else names['embedding/kernel'], 4)[2],
        'backbone': backbone,
        'width': width,
        'gelu': hints.gelu,
        'layer_norm_epsilon': hints.layer_norm_epsilon,
    }
    values = inferred | _infer_layers(arrays, names) | values
    if 'num_heads' not in values:
        values['num_heads'] = _infer_heads(hints, width, values['mlp_dim'], values['depth'])
    return ViTConfig(**values), num_rows


def _infer_layers(arrays: Arrays, names: Mapping[str, str]) -> dict[str, Any]:
    """Infers `ViTConfig` fields from arrays; `names` maps parameter names to array names."""
    first = {ours: theirs.replace('{layer0}', '0') for ours, theirs in names.items()}
    norm = names['encoder/block/norm1/scale']
    is_stacked = '{layer0}' not in norm
    if is_stacked:
        depth = shape_of(arrays, norm, 2)[0]
    else:
        depth = count_layers(arrays, norm.partition('{layer0}')[0])
    mlp_kernel = first['encoder/block/mlp/dense2/kernel']
    registers = first.get('registers', '')
    head = first['head/kernel']
    return {
        'depth': depth,
        'mlp_dim': kernel_shape(arrays, mlp_kernel, 3 if is_stacked else 2)[-2],
        'registers': arrays[registers].shape[1] if registers in arrays else 0,
        'pre_norm': first.get('pre_norm/scale') in arrays,
        'layer_scale': 1e-5 if first.get('encoder/block/attention_scale') in arrays else None,
        'num_classes': kernel_shape(arrays, head, 2)[-1] if head in arrays else None,
        'representation_size': length_of(arrays, first.get('pre_logits/bias', '')),
    }


def _infer_heads(hints: Hints, width: int, mlp_dim: int, depth: int) -> int:
    num_heads = hints.num_heads or _NUM_HEADS.get((depth, width, mlp_dim))
    if num_heads is None:
        raise NeedsHint(
            f'unknown number of heads for {depth} layers of width {width} with MLPs of {mlp_dim}; '
            'set num_heads=N, often width / 64'
        )
    return num_heads


def _infer_grid(
    arrays: Arrays, table: str | None, *, rows: tuple[int, ...], known: tuple[int, int] | None
) -> tuple[tuple[int, int], int]:
    """Returns the known grid or a square one, and the number of rows before its positions."""
    if table is None:
        if known is None:
            raise NeedsHint('positions are not stored; set the grid, for example grid=(14, 14)')
        return known, 0
    count = shape_of(arrays, table, 2, 3)[-2]  # with or without a batch axis
    side = math.isqrt(max(0, count - rows[0]))
    grid = known or (side, side)
    num_rows = next((number for number in rows if math.prod(grid) == count - number), None)
    require(
        num_rows is not None or known is None,
        f'{table}: {count} positions; expected {math.prod(grid)} for the grid {grid}',
    )
    if num_rows is None:
        raise NeedsHint(f'{count} positions fit several grids; set grid=(ROWS, COLUMNS)')
    return grid, num_rows


def summarize(config: ModelConfig, parameters: int, is_projection: bool) -> str:
    """Describes a model in one line; `parameters` is their number, `is_projection` as in `Card`."""
    if is_projection:
        head = f'a projection to {config.num_classes}'
    else:
        head = 'no head' if config.num_classes is None else f'{config.num_classes} classes'
    images = f'images {config.image_size[0]}x{config.image_size[1]}'
    ending = f'{head}; {parameters:,} parameters'
    backbone = config.backbone
    if isinstance(config, ResNetConfig):
        return f'ResNet, stages {config.backbone.blocks}, {images}, {ending}'
    sizes = {size: name for name, size in SIZES.items()}
    size = config.depth, config.width, config.mlp_dim, config.num_heads
    p, q = config.patch_size
    name = f'{sizes[size]}/{p}' if size in sizes and p == q else f'patches {p}x{q}'
    if backbone is not None:
        stages = f'stages {backbone.blocks}' if backbone.blocks else 'stem only'
        name = f'hybrid ({stages}), {name} on its feature map'
    images += f': {config.unused_pixels}' if config.unused_pixels else ''
    defaults = ViTConfig()
    options = [
        f'{field}={getattr(config, field)}'
        for field in _OPTIONS
        if getattr(config, field) != getattr(defaults, field)
    ]
    blocks = f'{config.depth} layers of width {config.width}, {config.num_heads} heads'
    grid = f'grid {config.grid[0]}x{config.grid[1]} ({images})'
    return ', '.join([f'{name}: {blocks}', grid, *options, ending])
