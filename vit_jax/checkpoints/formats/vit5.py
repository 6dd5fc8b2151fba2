"""Reads and writes the files of ViT-5 (arXiv:2602.08071, github.com/wangf3014/ViT-5).

They have the names of timm, and norms for queries and keys. ViT-5 rotates pairs of adjacent
features of a head by RoPE, and our models rotate features half a head apart. The features of each
head are reordered accordingly, in queries, keys, values, and the inputs of the output layer. The
files also contain the frequencies of RoPE, which are compared with ours.
"""

import re
from collections.abc import Iterable

import numpy as np

from vit_jax.base import require
from vit_jax.checkpoints.card import Card, Hints
from vit_jax.checkpoints.formats import base, inference, timm
from vit_jax.checkpoints.formats.array_files import FileContents
from vit_jax.checkpoints.formats.base import Format, ParsedCheckpoint
from vit_jax.checkpoints.formats.name_map import ArrayTransform, NameRule
from vit_jax.checkpoints.formats.timm import Layout
from vit_jax.models import ViTConfig

_LAYOUT = Layout(class_row=False, variants=('gamma_1',))
_ATTENTION = 'encoder/block/attention'
# The axis of the features of a head in each parameter, without the depth axis.
_HEAD_AXES = {f'{_ATTENTION}/query/{leaf}': -1 for leaf in ('kernel', 'bias')}
_HEAD_AXES |= {f'{_ATTENTION}/out/kernel': -2}
# Fields of `ViTConfig` that have only this value in ViT-5.
_FIXED = {'positions': 'learned_rope', 'norm': 'rms', 'qk_norm': True, 'gelu': 'exact'}
_FIXED |= {'layer_norm_epsilon': 1e-6, 'pool': 'cls', 'num_class_tokens': 1, 'pre_norm': False}
_FIXED |= {'parallel': False, 'positions_at': 'stem', 'final_norm': 'before_pool'}
_FIXED |= {'backbone': None, 'representation_size': None}


def _matches(names: Iterable[str]) -> bool:
    return any(re.fullmatch(timm.VIT5, name) for name in names)


def _rules(config: ViTConfig, layout: Layout) -> list[NameRule]:
    order = np.arange(config.width // config.num_heads).reshape(-1, 2).T.reshape(-1)
    inverse = np.argsort(order)

    def reorder(rule: NameRule, axis: int) -> NameRule:
        to_ours, to_theirs = rule.transform
        transform = ArrayTransform(
            lambda a: to_ours(a).take(order, axis), lambda a: to_theirs(a.take(inverse, axis))
        )
        return rule._replace(transform=transform)

    rules = [
        reorder(rule, _HEAD_AXES[rule.ours[0]]) if rule.ours[0] in _HEAD_AXES else rule
        for rule in timm.make_rules(config, layout)
    ]
    for letter, name in ('q', 'query'), ('k', 'key'):
        norm = f'blocks.{{layer0}}.attn.{letter}_norm.weight'
        rules.append(reorder(NameRule(norm, (f'{_ATTENTION}/{name}_norm/scale',)), -1))
    return rules


def _constants(config: ViTConfig) -> dict[str, np.ndarray]:
    """Returns the frequencies of RoPE for patches, and for registers if there are any."""
    size = config.width // config.num_heads
    powers = np.arange(size // 4, dtype=np.float32) * 4 / size  # float32, as in ViT-5's code
    bases = {'rope': 10_000} | ({'rope_reg': 100} if config.registers else {})
    frequencies = {name: 1 / np.float32(number) ** powers for name, number in bases.items()}
    return {
        f'blocks.{layer}.attn.{name}.freqs': array
        for layer in range(config.depth)
        for name, array in frequencies.items()
    }


def _parse(contents: FileContents, hints: Hints) -> ParsedCheckpoint[Layout]:
    arrays = contents.arrays
    width, mlp_dim = inference.shape_of(arrays, 'blocks.0.mlp.fc2.weight', 2)
    head_size = inference.shape_of(arrays, 'blocks.0.attn.q_norm.weight', 1)[0]
    config, _ = inference.infer_config(
        arrays,
        inference.with_defaults(hints, Hints(gelu='exact', layer_norm_epsilon=1e-6)),
        axes='OIHW',
        embedding='patch_embed.proj.weight',
        table='pos_embed',
        rows=(0,),
        depth=inference.count_layers(arrays, r'blocks\.(\d+)\.'),
        mlp_dim=mlp_dim,
        num_heads=width // head_size,
        num_classes=inference.length_of(arrays, 'head.bias'),
        registers=arrays['reg_token'].shape[1] if 'reg_token' in arrays else 0,
        positions='learned_rope',
        position_resize='bicubic',
        norm='rms',
        qk_norm=True,
        qkv_bias='blocks.0.attn.qkv.bias' in arrays,
        layer_scale=1e-4,
    )
    preprocessing = base.TimmPreprocessing(mean=base.IMAGENET[0], std=base.IMAGENET[1])
    return ParsedCheckpoint(config, _LAYOUT, preprocessing.preprocessing('center'))


def _notes(config: ViTConfig, card: Card, layout: Layout) -> list[str]:
    """Raises UserError for models that ViT-5's code does not support; returns no notes."""
    wanted = _FIXED | {'grid': (config.grid[0],) * 2}
    for name, only in wanted.items():
        value = getattr(config, name)
        require(value == only, f'the vit5 format cannot hold {name}={value}; use format=vit_jax')
    require(config.layer_scale is not None, 'the vit5 format cannot hold layer_scale=None')
    return []


VIT5 = Format[Layout](
    name='vit5',
    suffix='.safetensors',
    matches=_matches,
    parse=_parse,
    rules=_rules,
    usual_layout=lambda config: _LAYOUT,
    notes=_notes,
    constants=_constants,
    positions=('learned_rope',),
)
