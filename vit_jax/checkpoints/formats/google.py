"""Reads and writes the npz files of Google's vision_transformer and big_vision.

Both use names of Flax modules. They differ in the version of these names, in their prefix, and in
the place of position embeddings. One name map serves both.
"""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

from vit_jax.base import require
from vit_jax.checkpoints.card import Card, Hints
from vit_jax.checkpoints.formats import base, inference, name_map
from vit_jax.checkpoints.formats.array_files import FileContents
from vit_jax.checkpoints.formats.base import Format, ParsedCheckpoint
from vit_jax.checkpoints.formats.name_map import SAME, ArrayTransform, NameRule, flax_module
from vit_jax.checkpoints.formats.wrappers import choose_prefix
from vit_jax.data.image_preprocessing import Preprocessing, Resize
from vit_jax.models import ModelConfig, Pool, ResNetConfig, ViTConfig

_POSITIONS = tuple(f'{p}pos_embedding' for p in ('', 'Transformer/posembed_input/', 'Transformer/'))
# Images are resized without regard to aspect ratio and EXIF rotation, and scaled to -1..1.
PREPROCESSING = Preprocessing(crop=Resize(), exif_rotation=False)
HINTS = Hints(gelu='tanh', layer_norm_epsilon=1e-6)
_ROOT = 'conv_root/kernel'
# The first kernel of a model, unless it is a BiT.
_PATCHES = re.compile(r'(?!.*root_block/)((?:.*/)?)(?:embedding|conv_root)/kernel')
_GOOGLE = {_POSITIONS[1], _ROOT}  # names that only vision_transformer's files contain
_UNIT = 'block{stage}/unit{unit}'


class _Modules(NamedTuple):
    """Names of the modules in a block."""

    attention: str
    norm2: str
    mlp: str


_LINEN = _Modules(attention='MultiHeadDotProductAttention_0', norm2='LayerNorm_1', mlp='MlpBlock_0')
_BEFORE_LINEN = _Modules(
    attention='MultiHeadDotProductAttention_1', norm2='LayerNorm_2', mlp='MlpBlock_3'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(base.Layout):
    """Variant of these files. The defaults are correct for vision_transformer."""

    stacked: bool = False  # one array for all blocks
    before_linen: bool = True  # submodules are numbered consecutively over all types: MlpBlock_3
    positions: str = _POSITIONS[1]  # name of the position embeddings
    group_norm_4d: bool = True  # scale and bias of group norms have shape (1, 1, 1, c)
    map_head: bool = False  # attention pooling is supported

    @property
    def modules(self) -> _Modules:
        """The names of the modules in a block."""
        return _BEFORE_LINEN if self.before_linen else _LINEN


GOOGLE_LAYOUT = Layout()
BIGVISION_LAYOUT = Layout(
    prefix='params/',
    before_linen=False,
    positions=_POSITIONS[0],
    class_row=False,
    group_norm_4d=False,
    map_head=True,
)


def _block(layout: Layout) -> str:
    """Returns the name of a block, with the placeholder {layer0} unless blocks are stacked."""
    return f'Transformer/encoderblock{"" if layout.stacked else "_{layer0}"}'


def _rules(config: ModelConfig, layout: Layout) -> list[NameRule]:
    block = _block(layout)
    group = SAME
    if layout.group_norm_4d:
        group = ArrayTransform(lambda a: a.reshape(-1), lambda a: a.reshape(1, 1, 1, -1))
    has_token = isinstance(config, ViTConfig) and config.pool == 'cls'
    positions = name_map.NO_CLASS_ROW if has_token and not layout.class_row else SAME
    rules = [
        *flax_module('embedding', 'embedding'),
        NameRule('cls', ('cls',)),
        NameRule(layout.positions, ('pos_embedding',), positions),
        *flax_module(f'{block}/LayerNorm_0', 'encoder/block/norm1'),
        *flax_module(f'{block}/{layout.modules.norm2}', 'encoder/block/norm2'),
        *flax_module('Transformer/encoder_norm', 'encoder/norm'),
        *flax_module('pre_logits', 'pre_logits'),
        *flax_module('head', 'head'),
        *flax_module('conv_root', 'backbone/conv_root'),
        *flax_module('gn_root', 'backbone/norm_root', group),
    ]
    blocks = [(block, 'encoder/block', layout.modules)]
    if layout.map_head:
        blocks.append(('MAPHead_0', 'pool', _LINEN))
        rules.append(NameRule('MAPHead_0/probe', ('pool/probe',)))
        rules += flax_module('MAPHead_0/LayerNorm_0', 'pool/norm')
    for theirs, ours, modules in blocks:
        for name in ('query', 'key', 'value', 'out'):
            rules += flax_module(f'{theirs}/{modules.attention}/{name}', f'{ours}/attention/{name}')
        rules += flax_module(f'{theirs}/{modules.mlp}/Dense_0', f'{ours}/mlp/dense1')
        rules += flax_module(f'{theirs}/{modules.mlp}/Dense_1', f'{ours}/mlp/dense2')
    for stage, unit in name_map.units(config):
        theirs = _UNIT.format(stage=stage, unit=unit)
        ours = f'backbone/stage{stage}/unit{unit}'
        for index in ('1', '2', '3', '_proj'):
            rules += flax_module(f'{theirs}/conv{index}', f'{ours}/conv{index}')
            rules += flax_module(f'{theirs}/gn{index}', f'{ours}/norm{index}', group)
    return [rule._replace(theirs=layout.prefix + rule.theirs) for rule in rules]


def as_published(card: Card) -> Card:
    """Returns the card of the original file for a copy that another library converted."""
    assert isinstance(card.model, ViTConfig)  # no ResNet has a published name
    model = dataclasses.replace(card.model, position_resize='bilinear')
    return dataclasses.replace(card, model=model, preprocessing=PREPROCESSING, class_names=())


def _notes(config: ModelConfig, card: Card, layout: Layout) -> list[str]:
    """Returns the hints that a reader needs, because the file has only arrays."""
    assumed: dict[str, Any] = {'image_size': (224, 224)}
    if isinstance(config, ViTConfig):
        assumed = {'gelu': HINTS.gelu, 'layer_norm_epsilon': HINTS.layer_norm_epsilon}
        is_square = config.grid[0] == config.grid[1]
        if not is_square or config.positions == 'sincos2d':
            assumed['grid'] = None
    hints = [
        f'{name}={getattr(config, name)!r}'
        for name, value in assumed.items()
        if getattr(config, name) != value
    ]
    return [f'npz files store no settings; load this file with {", ".join(hints)}'] if hints else []


def _parse(usual: Layout, contents: FileContents, hints: Hints) -> ParsedCheckpoint[Layout]:
    # The first prefix that occurs contains the parameters; other arrays belong to the training run.
    roots = 'params/', 'opt/target/', ''
    root = next(r for r in roots if any(name.startswith(r) for name in contents.arrays))
    matches = (_PATCHES.fullmatch(name) for name in contents.arrays if name.startswith(root))
    prefixes = sorted({match[1] for match in matches if match})
    prefix, remarks = choose_prefix(prefixes, contents.key) if prefixes else ('', ())
    inside = {n.removeprefix(prefix): a for n, a in contents.arrays.items() if n.startswith(prefix)}
    if _ROOT in inside and not any(name.startswith('Transformer/') for name in inside):
        layout = usual
        config: ModelConfig = ResNetConfig(
            channels=inference.kernel_shape(inside, _ROOT, 4)[2],
            backbone=inference.infer_backbone(inside, _ROOT, _UNIT),
            num_classes=inference.length_of(inside, 'head/bias'),
        )
    else:
        config, layout = _parse_vit(usual, inside, inference.with_defaults(hints, HINTS))
    norm = inside.get('gn_root/scale')
    is_4d = len(norm.shape) == 4 if norm else layout.group_norm_4d
    layout = dataclasses.replace(layout, prefix=prefix, group_norm_4d=is_4d)
    outside = f'(?!{re.escape(prefix)}).*' if prefix else None
    return ParsedCheckpoint(config, layout, PREPROCESSING, ignored=outside, remarks=remarks)


def _parse_vit(usual: Layout, arrays: inference.Arrays, hints: Hints) -> tuple[ViTConfig, Layout]:
    pool: Pool = 'cls' if 'cls' in arrays else 'gap'
    pool = 'map' if 'MAPHead_0/probe' in arrays else pool
    table = next((name for name in _POSITIONS if name in arrays), None)
    layout = dataclasses.replace(
        usual,
        prefix='',
        stacked=any(name.startswith('Transformer/encoderblock/') for name in arrays),
        before_linen=any('/MlpBlock_3/' in name for name in arrays),
        positions=table or _POSITIONS[0],
    )
    # Only big_vision has models without a position table.
    has_table = table is not None or not layout.before_linen
    require(has_table, f'the array {_POSITIONS[1]} is missing')
    query = f'{_block(layout)}/{layout.modules.attention}/query/bias'.replace('{layer0}', '0')
    *_, num_heads, _ = inference.shape_of(arrays, query, 3 if layout.stacked else 2)
    config, num_rows = inference.infer_config(
        arrays,
        _rules(ViTConfig(), layout),
        hints,
        # Only big_vision keeps positions at the root, and never with a row for the class token.
        rows=(0,) if pool != 'cls' or table == _POSITIONS[0] else (1, 0),
        root=_ROOT,
        unit=_UNIT,
        num_heads=num_heads,
        pool=pool,
        positions='learned' if table else 'sincos2d',
    )
    return config, dataclasses.replace(layout, class_row=bool(num_rows))


GOOGLE = Format[Layout](
    name='google',
    suffix='.npz',
    matches=lambda names: 'MAPHead_0/probe' not in names and not _GOOGLE.isdisjoint(names),
    parse=functools.partial(_parse, GOOGLE_LAYOUT),
    rules=_rules,
    usual_layout=lambda config: GOOGLE_LAYOUT,
    notes=_notes,
    resnets=True,
)
BIGVISION = dataclasses.replace(
    GOOGLE,
    name='bigvision',
    matches=lambda names: any(map(_PATCHES.fullmatch, names)),
    parse=functools.partial(_parse, BIGVISION_LAYOUT),
    usual_layout=lambda config: BIGVISION_LAYOUT,
    positions=('learned', 'sincos2d'),
)
