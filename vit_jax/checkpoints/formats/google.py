"""The npz layouts of google-research: vision_transformer, and big_vision.

They name arrays as Flax modules do and differ in the version of those names, in what stands in
front of them, and in where positions are. One name map serves both, but for attention pooling.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import Any

from vit_jax.base.errors import UserError
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats import base, inference
from vit_jax.checkpoints.formats.base import Clues, Format, Recognised
from vit_jax.checkpoints.formats.name_map import (
    NO_CLASS_ROW,
    SAME,
    ArrayTransform,
    NameRule,
    dense,
    norm,
)
from vit_jax.data.image_preprocessing import Preprocessing, Resize
from vit_jax.models import ModelConfig, Pool, ResNetConfig, ViTConfig

_POSITIONS = tuple(f'{p}pos_embedding' for p in ('', 'Transformer/posembed_input/', 'Transformer/'))
# Squeezed to the size, the camera's rotation ignored, values from -1 to 1.
_PREPROCESSING = Preprocessing(crop=Resize(), exif_rotation=False)
_ATTENTION = 'query', 'key', 'value', 'out'
# The modules of a block, by whether they are numbered through: attention, second norm, MLP.
_MODULES = {
    True: ('MultiHeadDotProductAttention_1', 'LayerNorm_2', 'MlpBlock_3'),
    False: ('MultiHeadDotProductAttention_0', 'LayerNorm_1', 'MlpBlock_0'),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(base.Layout):
    """How these files differ among themselves. The defaults are those of vision_transformer."""

    stacked: bool = False  # one array for all blocks
    before_linen: bool = True  # modules of a block are numbered through: MlpBlock_3
    positions: str = _POSITIONS[1]
    group_norm_4d: bool = True  # (1, 1, 1, c)
    map_head: str = 'MAPHead_0/'


GOOGLE_LAYOUT = Layout()
BIGVISION_LAYOUT = Layout(
    prefix='params/',
    before_linen=False,
    positions=_POSITIONS[0],
    class_row=False,
    group_norm_4d=False,
)


def _matches(names: Iterable[str]) -> bool:
    known = r'(?!.*root_block/)(.*/)?(embedding/kernel|conv_root/kernel|Transformer/.*)'
    return any(re.fullmatch(known, name) for name in names)


def _matches_google(names: Iterable[str]) -> bool:
    """As the paper's code writes them: nothing in front, positions at their place, no MAP head."""
    names = set(names)
    if not any(name.startswith('Transformer/') for name in names):
        return 'conv_root/kernel' in names
    return _POSITIONS[1] in names and not names & {'MAPHead_0/probe', 'probe'}


def _rules(config: ModelConfig, layout: Layout) -> list[NameRule]:
    attention, norm2, mlp = _MODULES[layout.before_linen]
    block = f'Transformer/encoderblock{"" if layout.stacked else "_{layer0}"}'
    ours = 'encoder/block'
    group = ArrayTransform(lambda a: a.reshape(-1), lambda a: a.reshape(1, 1, 1, -1))
    group = group if layout.group_norm_4d else SAME
    has_token = isinstance(config, ViTConfig) and config.pool == 'cls'
    positions = NO_CLASS_ROW if has_token and not layout.class_row else SAME
    rules = [
        *dense('embedding', 'embedding'),
        NameRule('cls', 'cls'),
        NameRule(layout.positions, 'pos_embedding', positions),
        *norm(f'{block}/LayerNorm_0', f'{ours}/norm1'),
        *norm(f'{block}/{norm2}', f'{ours}/norm2'),
        *dense(f'{block}/{mlp}/Dense_0', f'{ours}/mlp/dense1'),
        *dense(f'{block}/{mlp}/Dense_1', f'{ours}/mlp/dense2'),
        *norm('Transformer/encoder_norm', 'encoder/norm'),
        *dense('pre_logits', 'pre_logits'),
        *dense('head', 'head'),
        NameRule('conv_root/kernel', 'backbone/conv_root/kernel'),
        *norm('gn_root', 'backbone/norm_root', group),
    ]
    for projection in _ATTENTION:
        rules += dense(f'{block}/{attention}/{projection}', f'{ours}/attention/{projection}')
    for index in ('1', '2', '3', '_proj'):
        there, here = 'block{stage}/unit{unit}', 'backbone/stage{stage}/unit{unit}'
        rules.append(NameRule(f'{there}/conv{index}/kernel', f'{here}/conv{index}/kernel'))
        rules += norm(f'{there}/gn{index}', f'{here}/norm{index}', group)
    return _prefixed(rules, layout)


def _bigvision_rules(config: ModelConfig, layout: Layout) -> list[NameRule]:
    head = layout.map_head
    rules = [
        NameRule(f'{head}probe', 'pool/probe'),
        *norm(f'{head}LayerNorm_0', 'pool/norm'),
        *dense(f'{head}MlpBlock_0/Dense_0', 'pool/mlp/dense1'),
        *dense(f'{head}MlpBlock_0/Dense_1', 'pool/mlp/dense2'),
    ]
    for projection in _ATTENTION:
        theirs = f'{head}MultiHeadDotProductAttention_0/{projection}'
        rules += dense(theirs, f'pool/attention/{projection}')
    return _rules(config, layout) + _prefixed(rules, layout)


def _prefixed(rules: list[NameRule], layout: Layout) -> list[NameRule]:
    return [rule._replace(theirs=layout.prefix + rule.theirs) for rule in rules]


def _notes(card: Card, layout: Layout) -> list[str]:
    config, values = card.model, {'gelu': 'tanh', 'layer_norm_epsilon': 1e-6}
    if isinstance(config, ResNetConfig):
        lost = [f'image_size={config.image_size}'] if config.image_size != (224, 224) else []
    else:
        lost = [f'{n}={getattr(config, n)!r}' for n, v in values.items() if getattr(config, n) != v]
        if config.grid[0] != config.grid[1] or config.positions == 'sincos2d':
            lost.append(f'grid={config.grid}')
    notes = [f'npz files do not say it: load this one with {", ".join(lost)}'] if lost else []
    # What is read for it, whatever was written.
    read = {'preprocessing': (_PREPROCESSING,), 'class_names': ((),), 'loss': (None, 'softmax')}
    gone = [name for name, values in read.items() if getattr(card, name) not in values]
    return notes + ([f'npz files do not keep: {", ".join(gone)}'] if gone else [])


def _recognise(usual: Layout, clues: Clues) -> Recognised[Layout]:
    known = 'params/', 'opt/target/'
    prefix = next((p for p in known if any(name.startswith(p) for name in clues.arrays)), '')
    prefix += f'{clues.subtree}/' if clues.subtree else ''
    inside = {n.removeprefix(prefix): a for n, a in clues.arrays.items() if n.startswith(prefix)}
    if not inside:
        raise UserError(f'no array is under {prefix}')
    end = '/embedding/kernel'
    towers = [name.removesuffix(end) for name in inside if name.endswith(end)]
    if towers and 'embedding/kernel' not in inside:
        named = ' or '.join(f':{tower}' for tower in towers)
        raise UserError(f'the network is in a part of it: put {named} after the name of the file')
    config, changes = _infer(clues._replace(arrays=inside))
    # What is outside belongs to the training of such a file, or to another tower of it.
    outside = f'(?!{re.escape(prefix)}).*' if prefix else None
    layout = dataclasses.replace(usual, prefix=prefix, **changes)
    return Recognised(config, layout, _PREPROCESSING, ignored=outside)


def _infer(clues: Clues) -> tuple[ModelConfig, dict[str, Any]]:
    """The network, and the values of the Layout that its arrays show."""
    inside, unit = clues.arrays, r'block(\d+)/unit(\d+)/'
    num_classes = inference.length_of(inside, 'head/bias')
    backbone = inference.infer_backbone(inside, 'conv_root/kernel', unit, outputs=3)
    layout: dict[str, Any] = {}
    if 'gn_root/scale' in inside:
        layout['group_norm_4d'] = len(inside['gn_root/scale'].shape) == 4
    if backbone is not None and not any(name.startswith('Transformer/') for name in inside):
        config = ResNetConfig(
            image_size=clues.image_size or (224, 224),
            channels=inference.shape_of(inside, 'conv_root/kernel', 4)[2],
            backbone=backbone,
            num_classes=num_classes,
        )
        return config, layout
    p, q, channels, width = inference.shape_of(inside, 'embedding/kernel', 4)
    stacked = any(name.startswith('Transformer/encoderblock/') for name in inside)
    before_linen = any('/MlpBlock_3/' in name for name in inside)
    block = 'Transformer/encoderblock' + ('' if stacked else '_0')
    attention, _, mlp = _MODULES[before_linen]
    heads = [head for head in ('MAPHead_0/', '') if f'{head}probe' in inside]
    pool: Pool = 'cls' if 'cls' in inside else 'map' if heads else 'gap'
    cell = inference.cell_of((p, q), backbone)
    grid, positions = _positions(clues, pool, cell)
    vit = ViTConfig(
        image_size=(grid[0] * cell[0], grid[1] * cell[1]),
        patch_size=(p, q),
        channels=inference.shape_of(inside, 'conv_root/kernel', 4)[2] if backbone else channels,
        backbone=backbone,
        width=width,
        depth=inference.shape_of(inside, f'{block}/LayerNorm_0/scale', 2)[0]
        if stacked
        else inference.count_layers(inside, r'Transformer/encoderblock_(\d+)/'),
        mlp_dim=inference.shape_of(inside, f'{block}/{mlp}/Dense_0/bias', 1 + stacked)[-1],
        num_heads=inference.shape_of(inside, f'{block}/{attention}/query/bias', 2 + stacked)[-2],
        num_classes=num_classes,
        pool=pool,
        representation_size=inference.length_of(inside, 'pre_logits/bias'),
        positions='learned' if positions['positions'] in inside else 'sincos2d',
        gelu=clues.hints.gelu or 'tanh',
        layer_norm_epsilon=clues.hints.layer_norm_epsilon or 1e-6,
    )
    layout |= {'stacked': stacked, 'before_linen': before_linen} | positions
    return vit, layout | ({'map_head': heads[0]} if heads else {})


def _positions(
    clues: Clues, pool: Pool, cell: tuple[int, int]
) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, and where the layout keeps positions."""
    inside, hints, image_size, *_ = clues
    name = next((name for name in _POSITIONS if name in inside), None)
    if name is None:
        grid = hints.grid or inference.grid_of(image_size, cell)
        if grid is None:
            raise inference.NeedsHint(
                'positions are fixed sines and cosines, so that the grid is not in the file; '
                f'say it with grid=(14, 14), or with image_size={(14 * cell[0], 14 * cell[1])}'
            )
        return grid, {'positions': _POSITIONS[0], 'class_row': False}
    # Only big_vision keeps positions at the root, and never with a row for the class token.
    rows = (0,) if pool != 'cls' or name == _POSITIONS[0] else (1, 0)
    count = inference.shape_of(inside, name, 3)[1]
    grid, row = inference.infer_grid(
        count, rows=rows, hints=hints, image_size=image_size, cell=cell
    )
    return grid, {'positions': name, 'class_row': bool(row)}


GOOGLE = Format[Layout](
    name='google',
    suffix='.npz',
    matches=_matches_google,
    recognise=functools.partial(_recognise, GOOGLE_LAYOUT),
    rules=_rules,
    usual_layout=lambda config: GOOGLE_LAYOUT,
    notes=_notes,
)
BIGVISION = dataclasses.replace(
    GOOGLE,
    name='bigvision',
    matches=_matches,
    recognise=functools.partial(_recognise, BIGVISION_LAYOUT),
    rules=_bigvision_rules,
    usual_layout=lambda config: BIGVISION_LAYOUT,
    positions=('learned', 'sincos2d'),
)
