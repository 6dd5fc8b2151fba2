"""The layout of Hugging Face's transformers: a directory of `config.json` and weights.

The names on disk are older than those in the memory of transformers 5; both are read. Hybrids are
the `vit-hybrid` files of transformers 4.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from vit_jax.base.errors import UserError
from vit_jax.checkpoints.formats.array_files import Stored
from vit_jax.checkpoints.formats.inference import (
    Evidence,
    Hints,
    Recognised,
    count_layers,
    find_backbone,
    find_grid,
    find_heads,
    length_of,
    shape_of,
)
from vit_jax.checkpoints.formats.name_map import (
    CONVOLUTION,
    Rule,
    torch_backbone,
    torch_linear,
    torch_norm,
    torch_output,
    torch_projections,
)
from vit_jax.models import Backbone, Gelu, ViTConfig

# What it stores beside the network: what masked pre-training used.
_IGNORED = r'(vit\.)?embeddings\.mask_token|decoder\..*'

_GELU: dict[str, Gelu] = {
    'gelu': 'exact',
    'gelu_new': 'tanh',
    'gelu_pytorch_tanh': 'tanh',
    'gelu_fast': 'tanh',
}
_PATCHES = 'embeddings.patch_embeddings'
_ROOT = f'{_PATCHES}.backbone.bit.embedder'
_STAGES = f'{_PATCHES}.backbone.bit.encoder.stages.'
_BILINEAR, _BICUBIC = 2, 3  # Pillow's numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to name the arrays."""

    name: str = 'huggingface'
    prefix: str = 'vit.'  # none: the file of a model without a head
    dtype: str = 'float32'  # of the arrays in the file
    old_names: bool = True  # those on disk


def matches(names: list[str]) -> bool:
    """Are these the names of such a file?"""
    known = f'{_PATCHES}.projection.weight', 'layernorm_before.weight'
    return any(name.endswith(known) for name in names)


def table(config: ViTConfig, layout: Layout) -> list[Rule]:
    """Where each array stands."""
    prefix, heads, ours = layout.prefix, config.num_heads, 'encoder/block'
    if layout.old_names:
        block = f'{prefix}encoder.layer.{{layer0}}'
        attention, out = f'{block}.attention.attention.{{}}', f'{block}.attention.output.dense'
        names = {'query': 'query', 'key': 'key', 'value': 'value'}
        mlp = f'{block}.intermediate.dense', f'{block}.output.dense'
    else:
        block = f'{prefix}layers.{{layer0}}'
        attention, out = f'{block}.attention.{{}}', f'{block}.attention.o_proj'
        names = {'query': 'q_proj', 'key': 'k_proj', 'value': 'v_proj'}
        mlp = f'{block}.mlp.fc1', f'{block}.mlp.fc2'
    rules = [
        *torch_linear(f'{prefix}{_PATCHES}.projection', 'embedding', CONVOLUTION),
        Rule(f'{prefix}embeddings.cls_token', 'cls'),
        Rule(f'{prefix}embeddings.position_embeddings', 'pos_embedding'),
        *torch_norm(f'{block}.layernorm_before', f'{ours}/norm1'),
        *torch_norm(f'{block}.layernorm_after', f'{ours}/norm2'),
        *torch_output(out, f'{ours}/attention/out', num_heads=heads),
        *torch_linear(mlp[0], f'{ours}/mlp/dense1'),
        *torch_linear(mlp[1], f'{ours}/mlp/dense2'),
        *torch_norm(f'{prefix}layernorm', 'encoder/norm'),
        *torch_backbone(
            f'{prefix}{_ROOT}.convolution',
            f'{prefix}{_ROOT}.norm',
            f'{prefix}{_STAGES}{{stage0}}.layers.{{unit0}}',
        ),
    ]
    for name, theirs in names.items():
        theirs = attention.replace('{}', theirs)
        rules += torch_projections(theirs, f'{ours}/attention', (name,), num_heads=heads)
    if prefix:
        rules += torch_linear('classifier', 'head')
    else:
        rules += torch_linear('pooler.dense', 'pre_logits')
    return rules


def usual_layout(format: str, config: ViTConfig) -> Layout:
    """The layout to write where none was read: with `vit.` where there is a head."""
    return Layout(prefix='vit.' if config.num_classes is not None else '')


def notes(config: ViTConfig, layout: Layout, card: dict[str, Any]) -> list[str]:
    """What a reader has to be told, because the directory does not say it."""
    if card['preprocessing']['crop'].get('resize', 'bilinear') != 'bilinear':
        return []
    return ['transformers smooths images before it shrinks them; this network was used without']


def beside(config: ViTConfig, card: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The files of the directory beside the weights.

    Raises UserError for a network that transformers does not have.
    """
    return {
        'config.json': _description(config, tuple(card['class_names'])),
        'preprocessor_config.json': _processor(config, card['preprocessing']),
    }


def recognise(evidence: Evidence) -> Recognised:
    """The network and the layout of such a directory, or of the file of weights alone."""
    config, layout = _find(evidence.arrays, evidence.hints, evidence.config_json)
    names = _class_names(evidence.config_json, config.num_classes)
    return Recognised(config, layout, _preprocessing(evidence.processor_json), names, _IGNORED)


def _find(
    arrays: Mapping[str, Stored], hints: Hints, described: dict[str, Any]
) -> tuple[ViTConfig, Layout]:
    prefix = 'vit.' if any(name.startswith('vit.') for name in arrays) else ''
    old_names = any(name.startswith(f'{prefix}encoder.layer.') for name in arrays)
    block = f'{prefix}encoder.layer' if old_names else f'{prefix}layers'
    width, channels, p, q = shape_of(arrays, f'{prefix}{_PATCHES}.projection.weight', 4)
    mlp = 'intermediate.dense' if old_names else 'mlp.fc1'
    mlp_dim = shape_of(arrays, f'{block}.0.{mlp}.bias', 1)[0]
    depth = count_layers(arrays, block.replace('.', r'\.') + r'\.(\d+)\.')
    root = f'{prefix}{_ROOT}.convolution.weight'
    unit = re.escape(prefix + _STAGES) + r'(\d+)\.layers\.(\d+)\.'
    backbone = find_backbone(arrays, root, unit, outputs=0)
    stride = backbone.stride if backbone else 1
    cell = p * stride, q * stride  # pixels of the image for one position
    count = shape_of(arrays, f'{prefix}embeddings.position_embeddings', 3)[1]
    size = _pair(described.get('image_size'), 'image_size')
    grid, _ = find_grid(count, rows=(1,), hints=hints, image_size=size, cell=cell)
    if 'num_attention_heads' in described and hints.num_heads is None:
        hints = dataclasses.replace(hints, num_heads=_whole(described, 'num_attention_heads'))
    gelu = hints.gelu or _gelu(described.get('hidden_act', 'gelu'))
    epsilon = hints.layer_norm_epsilon or float(described.get('layer_norm_eps', 1e-12))
    config = ViTConfig(
        image_size=(grid[0] * cell[0], grid[1] * cell[1]),
        patch_size=(p, q),
        channels=shape_of(arrays, root, 4)[1] if backbone else channels,
        backbone=backbone,
        width=width,
        depth=depth,
        mlp_dim=mlp_dim,
        num_heads=find_heads(hints, width, mlp_dim, depth),
        num_classes=shape_of(arrays, 'classifier.bias', 1)[0]
        if 'classifier.bias' in arrays
        else None,
        representation_size=length_of(arrays, 'pooler.dense.bias'),
        gelu=gelu,
        layer_norm_epsilon=epsilon,
    )
    _check_description(config, described)
    return config, Layout(prefix=prefix, old_names=old_names)


def _class_names(described: dict[str, Any], count: int | None) -> tuple[str, ...]:
    """The names in `id2label`, unless they are the placeholders that stand for none."""
    labels = described.get('id2label')
    if not isinstance(labels, dict) or count is None:
        return ()
    names = tuple(str(labels.get(str(i))) for i in range(count))
    if len(labels) != count or all(name == f'LABEL_{i}' for i, name in enumerate(names)):
        return ()
    return names


def _preprocessing(processor: dict[str, Any]) -> dict[str, Any]:
    """What a `preprocessor_config.json` says of it; without one, ViT's usual image processor."""
    size = processor.get('size', {})
    resize = {_BILINEAR: 'bilinear_antialias', _BICUBIC: 'bicubic_antialias'}.get(
        processor.get('resample', _BILINEAR)
    )
    if resize is None:
        raise UserError(f'preprocessor_config.json: resample={processor["resample"]} is not read')
    crop: dict[str, Any] = {'kind': 'Resize', 'resize': resize}
    if isinstance(size, dict) and 'shortest_edge' in size:
        cut = _pair(processor.get('crop_size', size['shortest_edge']), 'crop_size')
        scale = size['shortest_edge'] / min(cut or (size['shortest_edge'],))
        crop = {'kind': 'CentralCrop', 'scale': scale, 'resize': resize}
    values = {name: processor.get(f'image_{name}', (0.5, 0.5, 0.5)) for name in ('mean', 'std')}
    return {'crop': crop, 'exif_rotation': False} | {
        name: [255 * value for value in channels] for name, channels in values.items()
    }


def _description(config: ViTConfig, names: tuple[str, ...]) -> dict[str, Any]:
    """The config.json of a network. Raises UserError for one that transformers does not have."""
    if config.pool != 'cls' or config.final_norm != 'before_pool':
        raise UserError('the huggingface layout has only ViTs that read the class token')
    if config.num_classes is not None and config.representation_size is not None:
        raise UserError(
            'the huggingface layout has no tanh layer between network and head: drop the head '
            '(num_classes=None)'
        )
    if config.patch_size[0] != config.patch_size[1]:
        raise UserError(f'the huggingface layout has square patches, not {config.patch_size}')
    labels = names or tuple(f'LABEL_{i}' for i in range(config.num_classes or 0))
    head = config.num_classes is not None
    hybrid = 'Hybrid' if config.backbone else ''
    square = config.image_size[0] == config.image_size[1]
    return {
        'architectures': [f'ViT{hybrid}{"ForImageClassification" if head else "Model"}'],
        'model_type': 'vit-hybrid' if hybrid else 'vit',
        'dtype': 'float32',
        'hidden_size': config.width,
        'num_hidden_layers': config.depth,
        'num_attention_heads': config.num_heads,
        'intermediate_size': config.mlp_dim,
        'hidden_act': 'gelu' if config.gelu == 'exact' else 'gelu_pytorch_tanh',
        'layer_norm_eps': config.layer_norm_epsilon,
        'hidden_dropout_prob': 0.0,
        'attention_probs_dropout_prob': 0.0,
        'image_size': config.image_size[0] if square else list(config.image_size),
        'patch_size': config.patch_size[0],
        'num_channels': config.channels,
        'qkv_bias': True,
        'pooler_act': 'tanh',
        'pooler_output_size': config.representation_size or config.width,
        'id2label': {str(i): name for i, name in enumerate(labels)},
        'label2id': {name: i for i, name in enumerate(labels)},
    } | _backbone_description(config.backbone)


def _processor(config: ViTConfig, values: dict[str, Any]) -> dict[str, Any]:
    """The preprocessor_config.json of pre-processing values, as far as transformers has it."""
    crop, (height, width) = values['crop'], config.image_size
    size: dict[str, Any] = {'size': {'height': height, 'width': width}}
    if crop['kind'] == 'CentralCrop':
        size = {
            'size': {'shortest_edge': round(crop['scale'] * min(height, width))},
            'do_center_crop': True,
            'crop_size': {'height': height, 'width': width},
        }
    return size | {
        'image_processor_type': 'ViTImageProcessor',
        'do_resize': True,
        'resample': _BICUBIC if crop.get('resize') == 'bicubic_antialias' else _BILINEAR,
        'do_rescale': True,
        'rescale_factor': 1 / 255,
        'do_normalize': True,
        'image_mean': [value / 255 for value in values['mean']],
        'image_std': [value / 255 for value in values['std']],
    }


def _backbone_description(backbone: Backbone | None) -> dict[str, Any]:
    if backbone is None:
        return {}
    bit = {
        'model_type': 'bit',
        'layer_type': 'bottleneck',
        'global_padding': 'same',
        'embedding_dynamic_padding': True,
        'embedding_size': backbone.width,
        'depths': list(backbone.blocks),
        'hidden_sizes': [4 * backbone.width * 2**i for i in range(len(backbone.blocks))],
        'out_features': [f'stage{len(backbone.blocks)}'],
    }
    return {'backbone_config': bit}


def _check_description(config: ViTConfig, described: dict[str, Any]) -> None:
    """Raises UserError where config.json says something else than the arrays."""
    found = {
        'hidden_size': config.width,
        'num_hidden_layers': config.depth,
        'intermediate_size': config.mlp_dim,
    }
    for name, value in found.items():
        if described.get(name, value) != value:
            raise UserError(f'config.json says {name}={described[name]}, the arrays {value}')


def _gelu(name: object) -> Gelu:
    if name not in _GELU:
        raise UserError(f'config.json: hidden_act={name!r} is not one of {", ".join(_GELU)}')
    return _GELU[str(name)]


def _whole(described: dict[str, Any], name: str) -> int:
    value = described[name]
    if not isinstance(value, int) or value < 1:
        raise UserError(f'config.json: {name}={value!r} is not a positive whole number')
    return value


def _pair(value: Any, name: str) -> tuple[int, int] | None:
    """(height, width) of one number, of two, or of a dictionary of them."""
    if value is None:
        return None
    if isinstance(value, dict):
        value = value.get('height'), value.get('width')
    pair = (value, value) if isinstance(value, int) else value
    if (
        not isinstance(pair, list | tuple)
        or len(pair) != 2
        or not all(isinstance(side, int) and side > 0 for side in pair)
    ):
        raise UserError(f'{name}={value!r} is not a size in pixels')
    return pair[0], pair[1]
