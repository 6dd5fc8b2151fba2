"""The npz layouts of google-research: vision_transformer, and big_vision.

They name arrays as Flax modules do and differ in the version of those names, in what stands in
front of them, and in where positions are. One name map serves both.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import Any

from vit_jax.base.errors import UserError
from vit_jax.checkpoints.card import Card, Hints
from vit_jax.checkpoints.formats import base, inference, name_map
from vit_jax.checkpoints.formats.base import Format, Recognised
from vit_jax.checkpoints.formats.inference import Clues
from vit_jax.checkpoints.formats.name_map import SAME, ArrayTransform, NameRule, flax_module
from vit_jax.data.image_preprocessing import Preprocessing, Resize
from vit_jax.models import ModelConfig, Pool, ResNetConfig, ViTConfig

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
    map_head: str | None = None  # in front of attention pooling


GOOGLE_LAYOUT = Layout()
BIGVISION_LAYOUT = Layout(
    prefix='params/',
    before_linen=False,
    positions=_POSITIONS[0],
    class_row=False,
    group_norm_4d=False,
    map_head='MAPHead_0/',
)


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
    if (head := layout.map_head) is not None:
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
    usual = {'gelu': 'tanh', 'layer_norm_epsilon': 1e-6}
    if isinstance(config, ResNetConfig):
        lost = [f'image_size={config.image_size}'] if config.image_size != (224, 224) else []
    else:
        lost = [f'{n}={getattr(config, n)!r}' for n, v in usual.items() if getattr(config, n) != v]
        if config.grid[0] != config.grid[1] or config.positions == 'sincos2d':
            lost.append(f'grid={config.grid}')
    notes = [f'npz files do not say it: load this one with {", ".join(lost)}'] if lost else []
    # What is read for it, whatever was written.
    read = {'preprocessing': (PREPROCESSING,), 'class_names': ((),), 'loss': (None, 'softmax')}
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
    return Recognised(config, layout, PREPROCESSING, ignored=outside)


def _infer(clues: Clues) -> tuple[ModelConfig, dict[str, Any]]:
    """The network, and the values of the Layout that its arrays show."""
    inside, root = clues.arrays, 'conv_root/kernel'
    num_classes = inference.length_of(inside, 'head/bias')
    layout: dict[str, Any] = {}
    if 'gn_root/scale' in inside:
        layout['group_norm_4d'] = len(inside['gn_root/scale'].shape) == 4
    backbone = inference.infer_backbone(inside, root, _UNIT)
    if backbone is not None and not any(name.startswith('Transformer/') for name in inside):
        config = ResNetConfig(
            image_size=clues.image_size or (224, 224),
            channels=inference.kernel_shape(inside, root)[2],
            backbone=backbone,
            num_classes=num_classes,
        )
        return config, layout
    stacked = any(name.startswith('Transformer/encoderblock/') for name in inside)
    before_linen = any('/MlpBlock_3/' in name for name in inside)
    block = 'Transformer/encoderblock' + ('' if stacked else '_0')
    attention, _, mlp = _MODULES[before_linen]
    heads = [head for head in ('MAPHead_0/', '') if f'{head}probe' in inside]
    pool: Pool = 'cls' if 'cls' in inside else 'map' if heads else 'gap'
    table = next((name for name in _POSITIONS if name in inside), None)
    if table is None and before_linen:  # big_vision alone has networks without them
        raise UserError(f'the array {_POSITIONS[1]} is missing')
    vit, row = inference.infer_vit(
        clues.with_defaults(HINTS),
        embedding=inference.kernel_shape(inside, 'embedding/kernel'),
        root=root,
        unit=_UNIT,
        table=table,
        # Only big_vision keeps positions at the root, and never with a row for the class token.
        rows=(0,) if pool != 'cls' or table == _POSITIONS[0] else (1, 0),
        depth=inference.shape_of(inside, f'{block}/LayerNorm_0/scale', 2)[0]
        if stacked
        else inference.count_layers(inside, r'Transformer/encoderblock_(\d+)/'),
        mlp_dim=inference.shape_of(inside, f'{block}/{mlp}/Dense_0/bias', 1 + stacked)[-1],
        num_heads=inference.shape_of(inside, f'{block}/{attention}/query/bias', 2 + stacked)[-2],
        num_classes=num_classes,
        pool=pool,
        representation_size=inference.length_of(inside, 'pre_logits/bias'),
    )
    layout |= {'stacked': stacked, 'before_linen': before_linen, 'class_row': bool(row)}
    layout |= {'positions': table or _POSITIONS[0]} | ({'map_head': heads[0]} if heads else {})
    return vit, layout


GOOGLE = Format[Layout](
    name='google',
    suffix='.npz',
    matches=_matches_google,
    recognise=functools.partial(_recognise, GOOGLE_LAYOUT),
    rules=_rules,
    usual_layout=lambda config: GOOGLE_LAYOUT,
    notes=_notes,
    resnets=True,
)
BIGVISION = dataclasses.replace(
    GOOGLE,
    name='bigvision',
    matches=lambda names: any(map(_KNOWN.fullmatch, names)),
    recognise=functools.partial(_recognise, BIGVISION_LAYOUT),
    usual_layout=lambda config: BIGVISION_LAYOUT,
    positions=('learned', 'sincos2d'),
)
