"""The npz layouts of google-research: vision_transformer, and big_vision.

They name arrays as Flax modules do and differ in the version of those names, in what stands in
front of them, and in where positions are. One name map serves both.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import Any

from vit_jax.base import require
from vit_jax.checkpoints.card import Card, Hints
from vit_jax.checkpoints.formats import base, inference, name_map
from vit_jax.checkpoints.formats.array_files import FileContents
from vit_jax.checkpoints.formats.base import Format, ParsedCheckpoint
from vit_jax.checkpoints.formats.name_map import SAME, ArrayTransform, NameRule, flax_module
from vit_jax.data.image_preprocessing import Preprocessing, Resize
from vit_jax.models import Backbone, ModelConfig, Pool, ResNetConfig, ViTConfig

_POSITIONS = tuple(f'{p}pos_embedding' for p in ('', 'Transformer/posembed_input/', 'Transformer/'))
# Squeezed to the size, the camera's rotation ignored, values from -1 to 1.
PREPROCESSING = Preprocessing(crop=Resize(), exif_rotation=False)
HINTS = Hints(gelu='tanh', layer_norm_epsilon=1e-6)
_ATTENTION = 'query', 'key', 'value', 'out'
_KNOWN = re.compile(r'(?!.*root_block/)(.*/)?(embedding/kernel|conv_root/kernel|Transformer/.*)')
_UNIT = 'block{stage}/unit{unit}'
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
    map_head: bool = False  # there may be attention pooling


GOOGLE_LAYOUT = Layout()
BIGVISION_LAYOUT = Layout(
    prefix='params/',
    before_linen=False,
    positions=_POSITIONS[0],
    class_row=False,
    group_norm_4d=False,
    map_head=True,
)


def _matches_google(names: Iterable[str]) -> bool:
    """As the paper's code writes them: nothing in front, positions at their place, no MAP head."""
    names = set(names)
    if not any(name.startswith('Transformer/') for name in names):
        return 'conv_root/kernel' in names
    return _POSITIONS[1] in names and 'MAPHead_0/probe' not in names


def _rules(config: ModelConfig, layout: Layout) -> list[NameRule]:
    attention, norm2, mlp = _MODULES[layout.before_linen]
    block = f'Transformer/encoderblock{"" if layout.stacked else "_{layer0}"}'
    ours = 'encoder/block'
    group = ArrayTransform(lambda a: a.reshape(-1), lambda a: a.reshape(1, 1, 1, -1))
    group = group if layout.group_norm_4d else SAME
    has_token = isinstance(config, ViTConfig) and config.pool == 'cls'
    positions = name_map.NO_CLASS_ROW if has_token and not layout.class_row else SAME
    rules = [
        *flax_module('embedding', 'embedding'),
        NameRule('cls', ('cls',)),
        NameRule(layout.positions, ('pos_embedding',), positions),
        *flax_module(f'{block}/LayerNorm_0', f'{ours}/norm1'),
        *flax_module(f'{block}/{norm2}', f'{ours}/norm2'),
        *flax_module(f'{block}/{mlp}/Dense_0', f'{ours}/mlp/dense1'),
        *flax_module(f'{block}/{mlp}/Dense_1', f'{ours}/mlp/dense2'),
        *flax_module('Transformer/encoder_norm', 'encoder/norm'),
        *flax_module('pre_logits', 'pre_logits'),
        *flax_module('head', 'head'),
        *flax_module('conv_root', 'backbone/conv_root'),
        *flax_module('gn_root', 'backbone/norm_root', group),
    ]
    for projection in _ATTENTION:
        rules += flax_module(f'{block}/{attention}/{projection}', f'{ours}/attention/{projection}')
    for stage, unit in name_map.units(config):
        there, here = _UNIT.format(stage=stage, unit=unit), f'backbone/stage{stage}/unit{unit}'
        for index in ('1', '2', '3', '_proj'):
            rules += flax_module(f'{there}/conv{index}', f'{here}/conv{index}')
            rules += flax_module(f'{there}/gn{index}', f'{here}/norm{index}', group)
    if layout.map_head:
        head = 'MAPHead_0/'
        rules.append(NameRule(f'{head}probe', ('pool/probe',)))
        rules += flax_module(f'{head}LayerNorm_0', 'pool/norm')
        rules += flax_module(f'{head}MlpBlock_0/Dense_0', 'pool/mlp/dense1')
        rules += flax_module(f'{head}MlpBlock_0/Dense_1', 'pool/mlp/dense2')
        for projection in _ATTENTION:
            theirs = f'{head}MultiHeadDotProductAttention_0/{projection}'
            rules += flax_module(theirs, f'pool/attention/{projection}')
    return [rule._replace(theirs=layout.prefix + rule.theirs) for rule in rules]


def as_published(card: Card) -> Card:
    """The card of a network of the papers as their own file has it, if others converted it."""
    model = card.model
    if isinstance(model, ViTConfig):
        model = dataclasses.replace(model, position_resize='bilinear')
    return dataclasses.replace(card, model=model, preprocessing=PREPROCESSING, class_names=())


def _notes(config: ModelConfig, card: Card, layout: Layout) -> list[str]:
    read: dict[str, Any] = {'gelu': HINTS.gelu, 'layer_norm_epsilon': HINTS.layer_norm_epsilon}
    if isinstance(config, ResNetConfig):
        read = {'image_size': (224, 224)}
    elif config.grid[0] != config.grid[1] or config.positions == 'sincos2d':
        read['grid'] = None
    lost = [f'{n}={getattr(config, n)!r}' for n, v in read.items() if getattr(config, n) != v]
    return [f'npz files do not say it: load this one with {", ".join(lost)}'] if lost else []


def _parse(usual: Layout, contents: FileContents, hints: Hints) -> ParsedCheckpoint[Layout]:
    known = 'params/', 'opt/target/'
    prefix = next((p for p in known if any(n.startswith(p) for n in contents.arrays)), '')
    prefix += f'{contents.key}/' if contents.key else ''
    inside = {n.removeprefix(prefix): a for n, a in contents.arrays.items() if n.startswith(prefix)}
    require(bool(inside), f'no array is under {prefix}')
    end = '/embedding/kernel'
    towers = [f':{name.removesuffix(end)}' for name in inside if name.endswith(end)]
    alone = not towers or 'embedding/kernel' in inside
    require(alone, f'several models: add {" or ".join(towers)} to the name of the file')
    root = 'conv_root/kernel'
    if root in inside and not any(name.startswith('Transformer/') for name in inside):
        backbone = inference.infer_backbone(inside, root, _UNIT)
        config: ModelConfig = ResNetConfig(
            channels=inference.kernel_shape(inside, root)[2],
            backbone=backbone or Backbone(),
            num_classes=inference.length_of(inside, 'head/bias'),
        )
        layout = usual
    else:
        config, layout = _parse_vit(usual, inside, inference.with_defaults(hints, HINTS))
    if 'gn_root/scale' in inside:
        is_4d = len(inside['gn_root/scale'].shape) == 4
        layout = dataclasses.replace(layout, group_norm_4d=is_4d)
    # What is outside belongs to the training of such a file, or to another tower.
    outside = f'(?!{re.escape(prefix)}).*' if prefix else None
    layout = dataclasses.replace(layout, prefix=prefix)
    return ParsedCheckpoint(config, layout, PREPROCESSING, ignored=outside)


def _parse_vit(usual: Layout, arrays: inference.Arrays, hints: Hints) -> tuple[ViTConfig, Layout]:
    stacked = any(name.startswith('Transformer/encoderblock/') for name in arrays)
    before_linen = any('/MlpBlock_3/' in name for name in arrays)
    block = 'Transformer/encoderblock' + ('' if stacked else '_0')
    attention, _, mlp = _MODULES[before_linen]
    pool: Pool = 'cls' if 'cls' in arrays else 'gap'
    pool = 'map' if 'MAPHead_0/probe' in arrays else pool
    table = next((name for name in _POSITIONS if name in arrays), None)
    # Only big_vision has models without a table: one whose table is missing is damaged.
    require(table is not None or not before_linen, f'the array {_POSITIONS[1]} is missing')
    config, row = inference.infer_config(
        arrays,
        hints,
        embedding='embedding/kernel',
        root='conv_root/kernel',
        unit=_UNIT,
        table=table,
        # Only big_vision keeps positions at the root, and never with a row for the class token.
        rows=(0,) if pool != 'cls' or table == _POSITIONS[0] else (1, 0),
        depth=inference.shape_of(arrays, f'{block}/LayerNorm_0/scale', 2)[0]
        if stacked
        else inference.count_layers(arrays, r'Transformer/encoderblock_(\d+)/'),
        mlp_dim=inference.shape_of(arrays, f'{block}/{mlp}/Dense_0/bias', 1 + stacked)[-1],
        num_heads=inference.shape_of(arrays, f'{block}/{attention}/query/bias', 2 + stacked)[-2],
        num_classes=inference.length_of(arrays, 'head/bias'),
        pool=pool,
        representation_size=inference.length_of(arrays, 'pre_logits/bias'),
    )
    layout = dataclasses.replace(
        usual,
        stacked=stacked,
        before_linen=before_linen,
        class_row=bool(row),
        positions=table or _POSITIONS[0],
    )
    return config, layout


GOOGLE = Format[Layout](
    name='google',
    suffix='.npz',
    matches=_matches_google,
    parse=functools.partial(_parse, GOOGLE_LAYOUT),
    rules=_rules,
    usual_layout=lambda config: GOOGLE_LAYOUT,
    notes=_notes,
    resnets=True,
)
BIGVISION = dataclasses.replace(
    GOOGLE,
    name='bigvision',
    matches=lambda names: any(map(_KNOWN.fullmatch, names)),
    parse=functools.partial(_parse, BIGVISION_LAYOUT),
    usual_layout=lambda config: BIGVISION_LAYOUT,
    positions=('learned', 'sincos2d'),
)
