"""The config.json of transformers' ViTs: what each kind of model says, and what it leaves out."""

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from vit_jax.base import Record, UserError, require, require_between
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats.base import part, require_equal
from vit_jax.checkpoints.formats.huggingface_labels import of_head
from vit_jax.models import Backbone, Gelu, ViTConfig

GELUS: dict[str, Gelu] = {'gelu': 'exact', 'gelu_pytorch_tanh': 'tanh', 'quick_gelu': 'quick'}
GELUS |= {'gelu_new': 'tanh', 'gelu_fast': 'tanh'}
_HIDDEN_ACT = {'exact': 'gelu', 'tanh': 'gelu_pytorch_tanh', 'quick': 'quick_gelu'}
_QKV = 'query', 'key', 'value'
_LETTERS = 'attention.q_proj', 'attention.k_proj', 'attention.v_proj'


class Family(NamedTuple):
    """One kind of model: what its name is, and how the arrays of its parts are named."""

    model_type: str
    models: tuple[str, str]  # their classes: without a head, with one
    prefix: str  # in front of all names but the head's, in a model with a head
    # What a config.json means that does not say it.
    epsilon: float
    hidden_act: str = 'gelu'
    num_heads: int = 12
    processor: str = 'ViT'  # whose class prepares images, where nothing says it
    embedding: str = 'embeddings.patch_embeddings.projection'
    cls: str = 'embeddings.cls_token'
    positions: str = 'embeddings.position_embeddings'
    block: str = 'encoder.layer.{layer0}'
    norms: tuple[str, str] = ('layernorm_before', 'layernorm_after')
    projections: tuple[str, str, str] = (
        'attention.attention.query',
        'attention.attention.key',
        'attention.attention.value',
    )
    out: str = 'attention.output.dense'
    mlp: tuple[str, str] = ('intermediate.dense', 'output.dense')
    norm: str = 'layernorm'
    head: str = 'classifier'

    @property
    def in_memory(self) -> 'Family':
        """The names of transformers 5 in memory: those on disk are the older ones."""
        return self._replace(
            block=self.block if self.model_type.startswith('dinov2') else 'layers.{layer0}',
            projections=_LETTERS,
            out='attention.o_proj',
            mlp=('mlp.fc1', 'mlp.fc2'),
        )


_VIT = Family('vit', ('ViTModel', 'ViTForImageClassification'), 'vit.', epsilon=1e-12)
_DINOV2 = Family(
    'dinov2',
    ('Dinov2Model', 'Dinov2ForImageClassification'),
    'dinov2.',
    epsilon=1e-6,
    processor='Bit',
    norms=('norm1', 'norm2'),
    mlp=('mlp.fc1', 'mlp.fc2'),
)
_CLIP = Family(
    'clip_vision_model',
    ('CLIPVisionModel', 'CLIPVisionModelWithProjection'),
    'vision_model.',
    epsilon=1e-5,
    hidden_act='quick_gelu',
    processor='CLIP',
    embedding='embeddings.patch_embedding',
    cls='embeddings.class_embedding',
    positions='embeddings.position_embedding.weight',
    block='encoder.layers.{layer0}',
    norms=('layer_norm1', 'layer_norm2'),
    projections=('self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj'),
    out='self_attn.out_proj',
    mlp=('mlp.fc1', 'mlp.fc2'),
    norm='post_layernorm',
    head='visual_projection',
)
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        _VIT,
        _VIT._replace(
            model_type='vit-hybrid', models=('ViTHybridModel', 'ViTHybridForImageClassification')
        ),
        _VIT._replace(model_type='vit_mae', models=('ViTMAEModel', 'ViTForImageClassification')),
        _VIT._replace(
            model_type='vit_msn',
            models=('ViTMSNModel', 'ViTMSNForImageClassification'),
            epsilon=1e-6,
        ),
        _VIT._replace(
            model_type='deit',
            models=('DeiTModel', 'DeiTForImageClassification'),
            prefix='deit.',
            processor='DeiT',
        ),
        _VIT._replace(
            model_type='ijepa',
            models=('IJepaModel', 'IJepaForImageClassification'),
            prefix='ijepa.',
        ),
        _DINOV2,
        _DINOV2._replace(
            model_type='dinov2_with_registers',
            models=('Dinov2WithRegistersModel', 'Dinov2WithRegistersForImageClassification'),
            prefix='dinov2_with_registers.',
        ),
        _CLIP,
        _CLIP._replace(
            model_type='siglip_vision_model',
            models=('SiglipVisionModel', 'SiglipForImageClassification'),
            epsilon=1e-6,
            hidden_act='gelu_pytorch_tanh',
            processor='Siglip',
            head='classifier',
        ),
        _DINOV2._replace(
            model_type='dinov3_vit',
            models=('DINOv3ViTModel', 'DINOv3ViTModel'),
            prefix='',
            epsilon=1e-5,
            num_heads=6,
            processor='DINOv3ViT',
            embedding='embeddings.patch_embeddings',
            block='layer.{layer0}',
            projections=_LETTERS,
            out='attention.o_proj',
            mlp=('mlp.up_proj', 'mlp.down_proj'),
            norm='norm',
        ),
    )
}
_TOWERS = {'clip': 'clip_vision_model', 'siglip': 'siglip_vision_model'}  # of two


@dataclasses.dataclass
class Config(Record):
    """What is read of a config.json, or of its `vision_config`. None: it does not say it."""

    image_size: tuple[int, int] | None = None
    patch_size: tuple[int, int] | None = None
    num_channels: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    intermediate_size: int | None = None
    mlp_ratio: float = 4.0  # DINOv2's
    num_register_tokens: int | None = None
    hidden_act: str | None = None
    layer_norm_eps: float | None = None
    pooler_act: str = 'tanh'
    rope_theta: float = 100.0
    qkv_bias: bool = True
    query_bias: bool | None = None  # these five of DINOv3
    key_bias: bool | None = None
    value_bias: bool | None = None
    proj_bias: bool | None = None
    mlp_bias: bool | None = None
    use_swiglu_ffn: bool | None = None
    use_gated_mlp: bool | None = None
    vision_use_head: bool | None = None

    def check(self) -> None:
        sizes = 'hidden_size', 'num_hidden_layers', 'intermediate_size', 'num_attention_heads'
        require_between(self, 'image_size', 'patch_size', 'num_channels', *sizes, low=1)
        require_between(self, 'layer_norm_eps', above=0, below=1)
        require_between(self, 'mlp_ratio', above=0, high=1024)
        require(self.rope_theta == 100, f'rope_theta={self.rope_theta:g}: only 100 is supported')
        known = f'hidden_act={self.hidden_act!r} is not one of {", ".join(GELUS)}'
        require(self.hidden_act in (None, 'silu', *GELUS), known)


def vision_config(declared: dict[str, Any], family: Family) -> dict[str, Any]:
    """The part of a config.json that is about images: all of it, or that of a model of two towers.

    CLIP's may have a second one, `vision_config_dict`, which with its own defaults takes the place
    of the first. UserError where that changes what the arrays do not show.
    """
    if declared.get('model_type') not in _TOWERS:
        return declared
    values = part(declared, 'vision_config', where='config.json')
    other = values.get('model_type', family.model_type)
    wrong = f'vision_config.model_type={other!r} within model_type={declared["model_type"]!r}'
    require(other == family.model_type, wrong)
    later = part(declared, 'vision_config_dict', where='config.json')
    if not later or declared['model_type'] != 'clip':
        return values
    usual = {
        'hidden_act': family.hidden_act,
        'layer_norm_eps': family.epsilon,
        'num_attention_heads': family.num_heads,
    }
    for name, value in usual.items():
        now = later.get(name, value)
        wrong = f'vision_config says {name}={values.get(name)}, vision_config_dict means {now}'
        require(values.get(name, now) == now, wrong)
    return values | later


def require_supported(values: dict[str, Any]) -> None:
    """Raises UserError for what no array shows, and other networks have."""
    for name in 'rope_scaling', 'quantization_config':
        require(values.get(name) is None, f'{name}={values.get(name)} is not supported')
    theta = part(values, 'rope_parameters', where='config.json').get('rope_theta', 100)
    require(theta == 100, f'rope_parameters.rope_theta={theta}: only 100 is supported')


def check_backbone(backbone: Backbone, declared: dict[str, Any]) -> None:
    """Raises UserError where a config.json says another backbone than the arrays have."""
    stated = part(declared, 'backbone_config', where='config.json')
    require(not declared.get('use_timm_backbone'), 'use_timm_backbone=True is not supported')
    found = _backbone_config(backbone) | {
        'hidden_act': 'relu',
        'num_groups': 32,
        'output_stride': 32,
        'width_factor': 1,
    }
    require_equal(stated, found, where='config.json.backbone_config')


def _backbone_config(backbone: Backbone) -> dict[str, Any]:
    return {
        'model_type': 'bit',
        'layer_type': 'bottleneck',
        'global_padding': 'same',
        'embedding_dynamic_padding': True,
        'embedding_size': backbone.width,
        'depths': list(backbone.blocks),
        'hidden_sizes': [4 * backbone.width * 2**i for i in range(len(backbone.blocks))],
        'out_features': [f'stage{len(backbone.blocks)}'],
    }


def family_of(declared: dict[str, Any], arrays: Iterable[str]) -> Family:
    """The family that config.json names; without one, that of the arrays.

    Raises UserError for one that is not read.
    """
    if not declared:
        return FAMILIES[_found('\n'.join(arrays))]
    name = declared.get('model_type')
    right = "is not transformers', as the arrays are: it has no model_type"
    require(name is not None, right)
    if not isinstance(name, str):
        raise UserError(f'model_type={name!r}: expected a name')
    name = _TOWERS.get(name, name)
    known = ', '.join(sorted({*FAMILIES, *_TOWERS}))
    require(name in FAMILIES, f'model_type={name!r} is not supported: expected one of {known}')
    own_code = 'auto_map: the network is computed by code of its own, which is not supported'
    require(not declared.get('auto_map'), own_code)
    named = declared.get('architectures') or []
    require(isinstance(named, list), f'architectures={named!r}: expected a list of names')
    architecture = next(iter(named), '')
    wrong = f'{architecture}: its head reads the mean of tokens before their norm'
    require(architecture != 'CLIPForImageClassification', f'{wrong}, which is not supported')
    return FAMILIES[name]


def _found(names: str) -> str:
    """The model_type of arrays with these names."""
    if 'pre_layrnorm' in names:
        return 'clip_vision_model'
    if 'position_embedding.weight' in names:
        return 'siglip_vision_model'
    if 'layer_scale1' in names:
        if 'position_embeddings' not in names:
            return 'dinov3_vit'
        return 'dinov2_with_registers' if 'register_tokens' in names else 'dinov2'
    return 'deit' if 'distillation_token' in names else 'vit'


def family_for(config: ViTConfig) -> Family:
    """The family to write a network as; whether it has such a one is seen when it is read."""
    if config.backbone is not None:
        return FAMILIES['vit-hybrid']
    if config.positions == 'rope':
        return FAMILIES['dinov3_vit']
    if config.pre_norm:
        return FAMILIES['clip_vision_model']
    if config.layer_scale is not None:
        return FAMILIES['dinov2_with_registers' if config.registers else 'dinov2']
    if config.pool == 'map':
        return FAMILIES['siglip_vision_model']
    if config.positioned_prefix == 0:
        return FAMILIES['ijepa']
    return FAMILIES['deit' if config.positioned_prefix == 2 else 'vit']


def description(
    family: Family, config: ViTConfig, card: Card, *, without_bias: Collection[str]
) -> dict[str, Any]:
    """The config.json of a network, of whose `projections` these have no bias.

    Raises UserError for a network that transformers does not have.
    """
    if config.num_classes is not None and family.models[0] == family.models[1]:
        raise UserError(f'the huggingface layout has no head for {family.model_type}: drop it')
    if config.num_classes is not None and config.representation_size is not None:
        raise UserError(
            'the huggingface layout has no tanh layer between network and head: drop the head '
            '(num_classes=None)'
        )
    if config.patch_size[0] != config.patch_size[1]:
        raise UserError(f'the huggingface layout has square patches, not {config.patch_size}')
    square = config.image_size[0] == config.image_size[1]
    architecture = family.models[config.num_classes is not None]
    if config.pool == 'cls_dist':
        architecture = 'DeiTForImageClassificationWithTeacher'
    beside = _of_family(family, config, without_bias) | of_head(config, card)
    return {
        'architectures': [architecture],
        'model_type': family.model_type,
        'hidden_size': config.width,
        'num_hidden_layers': config.depth,
        'num_attention_heads': config.num_heads,
        'hidden_act': _HIDDEN_ACT[config.gelu] if config.gelu else 'silu',
        'layer_norm_eps': config.layer_norm_epsilon,
        'image_size': config.image_size[0] if square else list(config.image_size),
        'patch_size': config.patch_size[0],
        'num_channels': config.channels,
    } | beside


def _of_family(family: Family, config: ViTConfig, without_bias: Collection[str]) -> dict[str, Any]:
    """What only this kind of model says."""
    qkv_bias = not without_bias
    dropout = {'hidden_dropout_prob': 0.0, 'attention_probs_dropout_prob': 0.0}
    intermediate = {'intermediate_size': config.mlp_dim}
    registers = {'num_register_tokens': config.registers}
    match family.model_type:
        case 'dinov2' | 'dinov2_with_registers':
            gated = config.gelu is None
            ratio = next(
                (r for r in range(1, 65) if dinov2_mlp(config, float(r)) == config.mlp_dim), None
            )
            wrong = f'the huggingface layout has no MLP of {config.mlp_dim} for {config.width}'
            require(ratio is not None, f'{wrong}: a whole multiple')
            values: dict[str, Any] = {
                'mlp_ratio': ratio,
                'use_swiglu_ffn': gated,
                'qkv_bias': qkv_bias,
            }
            with_registers = family.model_type != 'dinov2'
            return dropout | values | (registers if with_registers else {'use_mask_token': False})
        case 'dinov3_vit':
            gated = config.gelu is None
            values = {'use_gated_mlp': gated, 'rope_theta': 100.0}
            for name, projection in zip(_QKV, family.projections, strict=True):
                values[f'{name}_bias'] = projection not in without_bias
            return intermediate | registers | values
        case 'clip_vision_model':
            return intermediate | {'projection_dim': config.num_classes or 512}
        case 'siglip_vision_model':
            return intermediate | {'vision_use_head': config.pool == 'map'}
    values = {
        'pooler_act': 'tanh',
        'pooler_output_size': config.representation_size or config.width,
    }
    if backbone := config.backbone:
        values['backbone_config'] = _backbone_config(backbone)
    return dropout | intermediate | {'qkv_bias': qkv_bias} | values


def dinov2_mlp(config: ViTConfig, ratio: float) -> int:
    """The width of the hidden layer that an `mlp_ratio` means: a SwiGLU's has two thirds of it."""
    plain = int(config.width * ratio)
    return plain if config.gelu else (int(plain * 2 / 3) + 7) // 8 * 8
