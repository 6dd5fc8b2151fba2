"""The npz layouts of google-research: vision_transformer, and big_vision.

They name arrays as Flax modules do and differ in the version of those names, in what stands in
front of them, and in where positions lie. One table serves all.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from vit_jax.base.errors import UserError
from vit_jax.checkpoints.formats.array_files import NeedsHint, Stored
from vit_jax.checkpoints.formats.inference import (
    Evidence,
    Hints,
    Recognised,
    count_layers,
    find_backbone,
    find_grid,
    grid_of,
    length_of,
    shape_of,
)
from vit_jax.checkpoints.formats.name_map import NO_CLASS_ROW, SAME, Rule, Turn, dense, norm
from vit_jax.models import Backbone, ModelConfig, ResNetConfig, ViTConfig

_POSITIONS = (
    'pos_embedding',
    'Transformer/posembed_input/pos_embedding',
    'Transformer/pos_embedding',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to name the arrays."""

    name: str = 'google'  # or 'bigvision'
    prefix: str = ''
    dtype: str = 'float32'  # of the arrays in the file
    stacked: bool = False  # one array for all blocks
    before_linen: bool = True  # modules of a block numbered through: MlpBlock_3
    positions: str = _POSITIONS[1]
    class_row: bool = True  # positions hold a row for the class token
    group_norm_4d: bool = True  # (1, 1, 1, c)
    map_head: str = 'MAPHead_0/'


GOOGLE = Layout()
BIGVISION = Layout(
    name='bigvision',
    prefix='params/',
    before_linen=False,
    positions=_POSITIONS[0],
    class_row=False,
    group_norm_4d=False,
)


def matches(names: list[str]) -> bool:
    """Are these the names of such a file?"""
    known = r'(?!.*root_block/)(.*/)?(embedding/kernel|conv_root/kernel|Transformer/.*)'
    return any(re.fullmatch(known, name) for name in names)


def table(config: ModelConfig, layout: Layout) -> list[Rule]:
    """Where each array stands."""
    attention, norm2, mlp = 'MultiHeadDotProductAttention_0', 'LayerNorm_1', 'MlpBlock_0'
    if layout.before_linen:
        attention, norm2, mlp = 'MultiHeadDotProductAttention_1', 'LayerNorm_2', 'MlpBlock_3'
    block = f'Transformer/encoderblock{"" if layout.stacked else "_{layer0}"}'
    ours, head = 'encoder/block', layout.map_head
    group = Turn(lambda a: a.reshape(-1), lambda a: a.reshape(1, 1, 1, -1))
    group = group if layout.group_norm_4d else SAME
    has_token = isinstance(config, ViTConfig) and config.pool == 'cls'
    positions = NO_CLASS_ROW if has_token and not layout.class_row else SAME
    rules = [
        *dense('embedding', 'embedding'),
        Rule('cls', 'cls'),
        Rule(layout.positions, 'pos_embedding', positions),
        *norm(f'{block}/LayerNorm_0', f'{ours}/norm1'),
        *norm(f'{block}/{norm2}', f'{ours}/norm2'),
        *dense(f'{block}/{mlp}/Dense_0', f'{ours}/mlp/dense1'),
        *dense(f'{block}/{mlp}/Dense_1', f'{ours}/mlp/dense2'),
        *norm('Transformer/encoder_norm', 'encoder/norm'),
        *dense('pre_logits', 'pre_logits'),
        *dense('head', 'head'),
        Rule('conv_root/kernel', 'backbone/conv_root/kernel'),
        *norm('gn_root', 'backbone/norm_root', group),
    ]
    for projection in ('query', 'key', 'value', 'out'):
        rules += dense(f'{block}/{attention}/{projection}', f'{ours}/attention/{projection}')
    for index in ('1', '2', '3', '_proj'):
        there, here = 'block{stage}/unit{unit}', 'backbone/stage{stage}/unit{unit}'
        rules.append(Rule(f'{there}/conv{index}/kernel', f'{here}/conv{index}/kernel'))
        rules += norm(f'{there}/gn{index}', f'{here}/norm{index}', group)
    if layout.name == 'bigvision':
        rules += [
            Rule(f'{head}probe', 'pool/probe'),
            *norm(f'{head}LayerNorm_0', 'pool/norm'),
            *dense(f'{head}MlpBlock_0/Dense_0', 'pool/mlp/dense1'),
            *dense(f'{head}MlpBlock_0/Dense_1', 'pool/mlp/dense2'),
        ]
        for projection in ('query', 'key', 'value', 'out'):
            theirs = f'{head}MultiHeadDotProductAttention_0/{projection}'
            rules += dense(theirs, f'pool/attention/{projection}')
    return [rule._replace(theirs=layout.prefix + rule.theirs) for rule in rules]


def recognise(evidence: Evidence) -> Recognised:
    """The network and the layout of such a file. Raises UserError where it does not show them."""
    config, layout = _find(evidence)
    # Squeezed to the size, the camera's rotation ignored, values from -1 to 1.
    preprocessing = {'crop': {'kind': 'Resize'}, 'exif_rotation': False}
    # What is outside belongs to the training of such a file, or to another tower of it.
    outside = f'(?!{re.escape(layout.prefix)}).*' if layout.prefix else None
    return Recognised(config, layout, preprocessing, ignored=outside)


def usual_layout(format: str, config: ModelConfig) -> Layout:
    """The layout to write where none was read."""
    return GOOGLE if format == 'google' else BIGVISION


def notes(config: ModelConfig, layout: Layout, card: dict[str, Any]) -> list[str]:
    """What a reader of such a file has to be told, because it does not say so itself."""
    if not isinstance(config, ViTConfig):
        return []
    values = {'gelu': 'tanh', 'layer_norm_epsilon': 1e-6}
    said = [f'{n}={getattr(config, n)!r}' for n, v in values.items() if getattr(config, n) != v]
    if config.grid[0] != config.grid[1] or config.positions == 'sincos2d':
        said.append(f'grid={config.grid}')
    return [f'npz files do not say it: load this one with {", ".join(said)}'] if said else []


def _find(evidence: Evidence) -> tuple[ModelConfig, Layout]:
    arrays, subtree, image_size = evidence.arrays, evidence.subtree, evidence.image_size
    known = 'params/', 'opt/target/'
    prefix = next((p for p in known if any(name.startswith(p) for name in arrays)), '')
    prefix += f'{subtree}/' if subtree else ''
    inside = {
        name.removeprefix(prefix): stored
        for name, stored in arrays.items()
        if name.startswith(prefix)
    }
    if not inside:
        raise UserError(f'no array is under {prefix}')
    towers = [
        n.removesuffix('/embedding/kernel') for n in inside if n.endswith('/embedding/kernel')
    ]
    if towers and 'embedding/kernel' not in inside:
        named = ' or '.join(f':{tower}' for tower in towers)
        raise UserError(f'the network is in a part of it: put {named} after the name of the file')
    unit, num_classes = r'block(\d+)/unit(\d+)/', length_of(inside, 'head/bias')
    backbone = find_backbone(inside, 'conv_root/kernel', unit, outputs=3)
    changes: dict[str, Any] = {'prefix': prefix}
    if 'gn_root/scale' in inside:
        changes['group_norm_4d'] = len(inside['gn_root/scale'].shape) == 4
    if backbone is not None and not any(name.startswith('Transformer/') for name in inside):
        config = ResNetConfig(
            image_size=image_size or (224, 224),
            channels=shape_of(inside, 'conv_root/kernel', 4)[2],
            backbone=backbone,
            num_classes=num_classes,
        )
        return config, dataclasses.replace(BIGVISION if prefix else GOOGLE, **changes)
    values, found = _vit(inside, evidence.hints, image_size, backbone)
    is_google = found['positions'] == _POSITIONS[1] and not prefix and values['pool'] != 'map'
    layout = dataclasses.replace(GOOGLE if is_google else BIGVISION, **changes, **found)
    return ViTConfig(num_classes=num_classes, backbone=backbone, **values), layout


def _vit(
    inside: Mapping[str, Stored],
    hints: Hints,
    image_size: tuple[int, int] | None,
    backbone: Backbone | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values of the ViTConfig and of the Layout."""
    p, q, channels, width = shape_of(inside, 'embedding/kernel', 4)
    blocks = [name for name in inside if re.match(r'Transformer/encoderblock(_\d+)?/', name)]
    stacked = any(name.startswith('Transformer/encoderblock/') for name in blocks)
    before_linen = any('/MlpBlock_3/' in name for name in blocks)
    block = 'Transformer/encoderblock' + ('' if stacked else '_0')
    attention, mlp = (
        ('Attention_1', 'MlpBlock_3') if before_linen else ('Attention_0', 'MlpBlock_0')
    )
    query = f'{block}/MultiHeadDotProduct{attention}/query/bias'
    map_head = next((h for h in ('MAPHead_0/', '') if f'{h}probe' in inside), None)
    pool = 'cls' if 'cls' in inside else 'gap' if map_head is None else 'map'
    stride = backbone.stride if backbone else 1
    cell = p * stride, q * stride  # pixels of the image for one position
    grid, layout = _positions(inside, pool, hints, image_size, cell)
    config = {
        'image_size': (grid[0] * cell[0], grid[1] * cell[1]),
        'patch_size': (p, q),
        'channels': shape_of(inside, 'conv_root/kernel', 4)[2] if backbone else channels,
        'width': width,
        'depth': (
            shape_of(inside, f'{block}/LayerNorm_0/scale', 2)[0]
            if stacked
            else count_layers(blocks, r'Transformer/encoderblock_(\d+)/')
        ),
        'mlp_dim': shape_of(inside, f'{block}/{mlp}/Dense_0/bias', 1 + stacked)[-1],
        'num_heads': shape_of(inside, query, 2 + stacked)[-2],
        'pool': pool,
        'representation_size': length_of(inside, 'pre_logits/bias'),
        'positions': 'learned' if layout['positions'] in inside else 'sincos2d',
        'gelu': hints.gelu or 'tanh',
        'layer_norm_epsilon': hints.layer_norm_epsilon or 1e-6,
    }
    layout |= {'stacked': stacked, 'before_linen': before_linen}
    return config, layout | ({'map_head': map_head} if map_head is not None else {})


def _positions(
    inside: Mapping[str, Stored],
    pool: str,
    hints: Hints,
    image_size: tuple[int, int] | None,
    cell: tuple[int, int],
) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, and where the layout keeps positions."""
    name = next((name for name in _POSITIONS if name in inside), None)
    if name is None:
        grid = hints.grid or grid_of(image_size, cell)
        if grid is None:
            raise NeedsHint(
                'positions are fixed sines and cosines, so that the grid is not in the file; '
                f'say it with grid=(14, 14), or with image_size={(14 * cell[0], 14 * cell[1])}'
            )
        return grid, {'positions': _POSITIONS[0], 'class_row': False}
    # Only big_vision keeps positions at the root, and never with a row for the class token.
    rows = (0,) if pool != 'cls' or name == _POSITIONS[0] else (1, 0)
    count = shape_of(inside, name, 3)[1]
    grid, row = find_grid(count, rows=rows, hints=hints, image_size=image_size, cell=cell)
    return grid, {'positions': name, 'class_row': bool(row)}
