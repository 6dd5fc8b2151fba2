"""Reads and writes the files of ViT-5 (arXiv:2602.08071, github.com/wangf3014/ViT-5).

They have the names of timm, and norms for queries and keys. ViT-5 rotates pairs of adjacent
features of a head by RoPE, and our models rotate features half a head apart. The features of each
head are reordered accordingly, in queries, keys, values, and the inputs of the output layer. The
files also contain the frequencies of RoPE, which are compared with ours.
"""

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
_HEAD_AXES = {
    f'{_ATTENTION}/query/kernel': -1,
    f'{_ATTENTION}/query/bias': -1,
    f'{_ATTENTION}/out/kernel': -2,
}


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
    bases = {'rope': 10_000}
    if config.registers:
        bases['rope_reg'] = 100
    frequencies = {name: 1 / np.float32(number) ** powers for name, number in bases.items()}
    return {
        f'blocks.{layer}.attn.{name}.freqs': array
        for layer in range(config.depth)
        for name, array in frequencies.items()
    }


def _parse(contents: FileContents, hints: Hints) -> ParsedCheckpoint[Layout]:
    arrays = contents.arrays
    width = inference.shape_of(arrays, 'blocks.0.norm1.weight', 1)[0]
    head_size = inference.shape_of(arrays, 'blocks.0.attn.q_norm.weight', 1)[0]
    config, _ = inference.infer_config(
        arrays,
        timm.make_rules(ViTConfig(), _LAYOUT),
        hints,
        rows=(0,),
        num_heads=width // head_size,
        gelu='exact',
        layer_norm_epsilon=1e-6,
        positions='learned_rope',
        position_resize='bicubic',
        norm='rms',
        pre_norm=False,
        representation_size=None,
        qk_norm=True,
        qkv_bias='blocks.0.attn.qkv.bias' in arrays,
        layer_scale=1e-4,
    )
    preprocessing = base.TimmPreprocessing(mean=base.IMAGENET[0], std=base.IMAGENET[1])
    return ParsedCheckpoint(config, _LAYOUT, preprocessing.preprocessing('center'))


def _notes(config: ViTConfig, card: Card, layout: Layout) -> list[str]:
    """Raises UserError for a grid that is not square; returns no notes."""
    require(
        config.grid[0] == config.grid[1],
        f'the vit5 format cannot hold grid={config.grid}; use format=vit_jax',
    )
    return []


VIT5 = Format[Layout](
    name='vit5',
    suffix='.safetensors',
    matches=lambda names: 'blocks.0.attn.rope.freqs' in names,
    parse=_parse,
    rules=_rules,
    usual_layout=lambda config: _LAYOUT,
    notes=_notes,
    constants=_constants,
    positions=('learned_rope',),
)
