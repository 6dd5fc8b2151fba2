"""The layout of Hugging Face's transformers: a directory of `config.json` and weights.

The names on disk are older than those in the memory of transformers 5; both are read. Hybrids are
the `vit-hybrid` files of transformers 4.
"""

import dataclasses
import functools
import re
from typing import Any

from vit_jax.base import Record, UserError, require, require_between
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats import base, inference, name_map
from vit_jax.checkpoints.formats.base import (
    HALF,
    Format,
    Recognised,
    Scaling,
    check_scaling,
    described,
    foreign_preprocessing,
)
from vit_jax.checkpoints.formats.inference import Clues, Hints
from vit_jax.checkpoints.formats.name_map import NameRule
from vit_jax.data.image_preprocessing import CentralCrop, Crop, Preprocessing, Resize, ResizeMethod
from vit_jax.models import Gelu, ViTConfig
from vit_jax.models.resnet import LARGEST

# What it stores beside the network: what masked pre-training used.
_IGNORED = r'(vit\.)?embeddings\.mask_token|decoder\..*'

_GELU: dict[str, Gelu] = {'gelu': 'exact', 'gelu_pytorch_tanh': 'tanh'}
_GELU |= {'gelu_new': 'tanh', 'gelu_fast': 'tanh'}
_HIDDEN_ACT: dict[Gelu, str] = {'exact': 'gelu', 'tanh': 'gelu_pytorch_tanh'}
# By the loss of the training.
_PROBLEM_TYPE = {'softmax': 'single_label_classification'}
_PROBLEM_TYPE |= {'sigmoid': 'multi_label_classification'}
_PATCHES = 'embeddings.patch_embeddings'
_KNOWN = re.compile(r'.*(patch_embeddings\.projection|layernorm_before)\.weight')
_ROOT = f'{_PATCHES}.backbone.bit.embedder'
_UNIT = f'{_PATCHES}.backbone.bit.encoder.stages.{{stage0}}.layers.{{unit0}}'
# By Pillow's numbers.
_RESIZE_METHODS: dict[int, ResizeMethod] = {2: 'bilinear_antialias', 3: 'bicubic_antialias'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(base.Layout):
    """How these files differ among themselves."""

    prefix: str = 'vit.'  # none: the file of a model without a head
    old_names: bool = True  # those on disk


@dataclasses.dataclass
class _Config(Record):
    """What is read of a config.json."""

    image_size: tuple[int, int] | None = None
    hidden_act: str = 'gelu'
    layer_norm_eps: float = 1e-12
    num_attention_heads: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    intermediate_size: int | None = None
    problem_type: str | None = None

    def check(self) -> None:
        sizes = 'hidden_size', 'num_hidden_layers', 'intermediate_size', 'num_attention_heads'
        require_between(self, 'image_size', *sizes, low=1)
        require_between(self, 'layer_norm_eps', above=0, below=1)


@dataclasses.dataclass
class _Processor(Record):
    """What is read of a preprocessor_config.json; by default as ViT's usual image processor."""

    size: dict[str, int] | tuple[int, int] | None = None
    crop_size: dict[str, int] | tuple[int, int] | None = None
    resample: int = 2
    image_mean: Scaling = HALF
    image_std: Scaling = HALF

    def check(self) -> None:
        for name in 'size', 'crop_size':
            size = getattr(self, name)
            sides = size.values() if isinstance(size, dict) else size or ()
            fits = all(0 < side <= LARGEST for side in sides)
            require(fits, f'{name}={size}: expected pixels from 1 to {LARGEST:,}')
        require(self.resample in _RESIZE_METHODS, f'resample={self.resample} is not read')
        check_scaling(self, 'image_mean', 'image_std')


def _rules(config: ViTConfig, layout: Layout) -> list[NameRule]:
    module = functools.partial(name_map.torch_module, num_heads=config.num_heads)
    prefix, ours = layout.prefix, 'encoder/block'
    if layout.old_names:
        block = f'{prefix}encoder.layer.{{layer0}}'
        attention, out = f'{block}.attention.attention', f'{block}.attention.output.dense'
        names = {'query': 'query', 'key': 'key', 'value': 'value'}
        mlp = f'{block}.intermediate.dense', f'{block}.output.dense'
    else:
        block = f'{prefix}layers.{{layer0}}'
        attention, out = f'{block}.attention', f'{block}.attention.o_proj'
        names = {'query': 'q_proj', 'key': 'k_proj', 'value': 'v_proj'}
        mlp = f'{block}.mlp.fc1', f'{block}.mlp.fc2'
    rules = [
        *module(f'{prefix}{_PATCHES}.projection', 'embedding'),
        NameRule(f'{prefix}embeddings.cls_token', ('cls',)),
        NameRule(f'{prefix}embeddings.position_embeddings', ('pos_embedding',)),
        *module(f'{block}.layernorm_before', f'{ours}/norm1'),
        *module(f'{block}.layernorm_after', f'{ours}/norm2'),
        *module(out, f'{ours}/attention/out'),
        *module(mlp[0], f'{ours}/mlp/dense1'),
        *module(mlp[1], f'{ours}/mlp/dense2'),
        *module(f'{prefix}layernorm', 'encoder/norm'),
        *(module('classifier', 'head') if prefix else module('pooler.dense', 'pre_logits')),
    ]
    for name, theirs in names.items():
        rules += module(f'{attention}.{theirs}', f'{ours}/attention/{name}')
    root, unit = prefix + _ROOT, prefix + _UNIT
    return rules + name_map.torch_backbone(config, f'{root}.convolution', f'{root}.norm', unit)


def _notes(config: ViTConfig, card: Card, layout: Layout) -> list[str]:
    if getattr(card.preprocessing.crop, 'resize', 'bilinear') != 'bilinear':
        return []
    return ['transformers smooths images before it shrinks them; this network was used without']


def _recognise(clues: Clues) -> Recognised[Layout]:
    arrays = clues.arrays
    declared = described(_Config, clues.config_json, where='config.json')
    processor = described(_Processor, clues.processor_json, where='preprocessor_config.json')
    prefix = 'vit.' if any(name.startswith('vit.') for name in arrays) else ''
    old_names = any(name.startswith(f'{prefix}encoder.layer.') for name in arrays)
    block = f'{prefix}encoder.layer' if old_names else f'{prefix}layers'
    mlp = 'intermediate.dense' if old_names else 'mlp.fc1'
    defaults = Hints(
        num_heads=declared.num_attention_heads,
        gelu=_GELU.get(declared.hidden_act),
        layer_norm_epsilon=declared.layer_norm_eps,
    )
    clues = clues._replace(image_size=declared.image_size).with_defaults(defaults)
    if clues.hints.gelu is None:
        act = f'hidden_act={declared.hidden_act!r}'
        raise UserError(f'config.json: {act} is not one of {", ".join(_GELU)}')
    config, _ = inference.infer_vit(
        clues,
        embedding=inference.kernel_shape(arrays, f'{prefix}{_PATCHES}.projection.weight'),
        root=f'{prefix}{_ROOT}.convolution.weight',
        unit=prefix + _UNIT,
        table=f'{prefix}embeddings.position_embeddings',
        rows=(1,),
        depth=inference.count_layers(arrays, block + r'\.(\d+)\.'),
        mlp_dim=inference.shape_of(arrays, f'{block}.0.{mlp}.bias', 1)[0],
        num_classes=inference.length_of(arrays, 'classifier.bias'),
        representation_size=inference.length_of(arrays, 'pooler.dense.bias'),
    )
    found = {'hidden_size': config.width, 'num_hidden_layers': config.depth}
    for name, value in (found | {'intermediate_size': config.mlp_dim}).items():
        if (given := getattr(declared, name)) not in (None, value):
            raise UserError(f'config.json says {name}={given}, the arrays {value}')
    layout = Layout(prefix=prefix, old_names=old_names)
    problem = declared.problem_type
    return Recognised(
        config,
        layout,
        _preprocessing(processor),
        class_names=_class_names(clues.config_json, config.num_classes),
        ignored=_IGNORED,
        loss=next((loss for loss, name in _PROBLEM_TYPE.items() if name == problem), problem),
    )


def _class_names(described: dict[str, Any], count: int | None) -> tuple[str, ...]:
    """The names in `id2label`, unless they are the placeholders that stand for none."""
    labels = described.get('id2label')
    if not isinstance(labels, dict) or count is None:
        return ()
    names = tuple(str(labels.get(str(i))) for i in range(count))
    if len(labels) != count or all(name == f'LABEL_{i}' for i, name in enumerate(names)):
        return ()
    return names


def _preprocessing(processor: _Processor) -> Preprocessing:
    resize = _RESIZE_METHODS[processor.resample]
    crop: Crop = Resize(resize=resize)
    if isinstance(processor.size, dict) and (edge := processor.size.get('shortest_edge')):
        cut = processor.crop_size or (edge, edge)
        scale = edge / min(cut.values() if isinstance(cut, dict) else cut)
        crop = CentralCrop(scale=scale, resize=resize)
    return foreign_preprocessing(crop, processor.image_mean, processor.image_std)


def _description(config: ViTConfig, card: Card) -> dict[str, Any]:
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
    labels = card.class_names or tuple(f'LABEL_{i}' for i in range(config.num_classes or 0))
    head = config.num_classes is not None
    hybrid = 'Hybrid' if config.backbone else ''
    square = config.image_size[0] == config.image_size[1]
    beside: dict[str, Any] = {}
    if (problem := _PROBLEM_TYPE.get(card.loss or '')) and head:
        beside['problem_type'] = problem
    if backbone := config.backbone:
        beside['backbone_config'] = {
            'model_type': 'bit',
            'layer_type': 'bottleneck',
            'global_padding': 'same',
            'embedding_dynamic_padding': True,
            'embedding_size': backbone.width,
            'depths': list(backbone.blocks),
            'hidden_sizes': [4 * backbone.width * 2**i for i in range(len(backbone.blocks))],
            'out_features': [f'stage{len(backbone.blocks)}'],
        }
    return {
        'architectures': [f'ViT{hybrid}{"ForImageClassification" if head else "Model"}'],
        'model_type': 'vit-hybrid' if hybrid else 'vit',
        'dtype': 'float32',
        'hidden_size': config.width,
        'num_hidden_layers': config.depth,
        'num_attention_heads': config.num_heads,
        'intermediate_size': config.mlp_dim,
        'hidden_act': _HIDDEN_ACT[config.gelu],
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
    } | beside


def _processor(config: ViTConfig, preprocessing: Preprocessing) -> dict[str, Any]:
    """The preprocessor_config.json, as far as transformers has such a preprocessing."""
    crop, (height, width) = preprocessing.crop, config.image_size
    both = {'height': height, 'width': width}
    size: dict[str, Any] = {'size': both}
    if isinstance(crop, CentralCrop):
        edge = round(crop.scale * min(height, width))
        size = {'size': {'shortest_edge': edge}, 'do_center_crop': True, 'crop_size': both}
    return size | {
        'image_processor_type': 'ViTImageProcessor',
        'do_resize': True,
        'resample': 3 if getattr(crop, 'resize', None) == 'bicubic_antialias' else 2,
        'do_rescale': True,
        'rescale_factor': 1 / 255,
        'do_normalize': True,
        'image_mean': [value / 255 for value in preprocessing.mean],
        'image_std': [value / 255 for value in preprocessing.std],
    }


HUGGINGFACE = Format[Layout](
    name='huggingface',
    suffix='.safetensors',
    matches=lambda names: any(map(_KNOWN.fullmatch, names)),
    recognise=_recognise,
    rules=_rules,
    usual_layout=lambda config: Layout(prefix='vit.' if config.num_classes is not None else ''),
    notes=_notes,
    file_name='model.safetensors',
    files_beside=lambda config, card: {
        'config.json': _description(config, card),
        'preprocessor_config.json': _processor(config, card.preprocessing),
    },
)
