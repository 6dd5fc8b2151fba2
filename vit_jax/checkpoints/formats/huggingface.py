"""The layout of Hugging Face's transformers: a directory of `config.json` and weights.

`config.json` describes the model; a key that it leaves out has the default of its model_type. The
arrays say only which optional parts there are: a head, a tanh layer before it. Without config.json
the names of the arrays tell the model_type, and their shapes the sizes.
"""

import dataclasses
import functools
import re
from typing import Any, Literal, NamedTuple

from vit_jax.base import Record, require
from vit_jax.checkpoints.card import Card, Hints
from vit_jax.checkpoints.formats import base, huggingface_processor, inference, name_map
from vit_jax.checkpoints.formats.array_files import FileContents, JsonObject
from vit_jax.checkpoints.formats.base import Format, ParsedCheckpoint
from vit_jax.checkpoints.formats.inference import NeedsHint
from vit_jax.checkpoints.formats.name_map import NO_BATCH, SAME, VECTOR, NameRule
from vit_jax.models import Gelu, Pool, ViTConfig

_PATCHES = re.compile(r'.*embeddings\.patch_embeddings?(\.projection)?\.weight')
# Arrays next to the model: of masked pre-training, and of the text tower.
_IGNORED = r'(.*\.)?embeddings\.mask_token|decoder\..*|.*\.position_ids'
_TEXT = r'text_model\..*|text_projection\..*|logit_(scale|bias)'
_MAP_HEAD = r'(vision_model\.)?head\..*'
_GELUS: dict[str, Gelu] = {'gelu': 'exact', 'gelu_pytorch_tanh': 'tanh', 'quick_gelu': 'quick'}
_GELUS |= {'gelu_new': 'tanh', 'gelu_fast': 'tanh'}
_HIDDEN_ACT = {'exact': 'gelu', 'tanh': 'gelu_pytorch_tanh', 'quick': 'quick_gelu', None: 'silu'}
# By the loss of the training.
_PROBLEM_TYPES = {'softmax': 'single_label_classification'}
_PROBLEM_TYPES |= {'sigmoid': 'multi_label_classification', 'regression': 'regression'}
# Keys that other models use, with the only value that is supported.
_ONLY: dict[str, Any] = {'auto_map': None, 'quantization_config': None, 'rope_scaling': None}
_ONLY |= {'rope_theta': 100.0, 'pooler_act': 'tanh', 'proj_bias': True, 'mlp_bias': True}
_QKV = 'query', 'key', 'value'
_BLOCK = 'encoder/block'
_SWIGLU = 'encoder.layer.{layer0}.mlp.weights'  # of DINOv2
# Theirs by ours, in models such as ViT: of modules, and of single arrays.
_MODULES = {
    'embedding': 'embeddings.patch_embeddings.projection',
    'pre_norm': 'pre_layrnorm',
    f'{_BLOCK}/norm1': '{block}.layernorm_before',
    f'{_BLOCK}/norm2': '{block}.layernorm_after',
    **{f'{_BLOCK}/attention/{name}': f'{{block}}.attention.attention.{name}' for name in _QKV},
    f'{_BLOCK}/attention/out': '{block}.attention.output.dense',
    f'{_BLOCK}/mlp/gate': '{block}.mlp.gate_proj',
    f'{_BLOCK}/mlp/dense1': '{block}.intermediate.dense',
    f'{_BLOCK}/mlp/dense2': '{block}.output.dense',
    'encoder/norm': 'layernorm',
    'pre_logits': 'pooler.dense',
    'pool/attention/out': 'head.attention.out_proj',
    'pool/norm': 'head.layernorm',
    'pool/mlp/dense1': 'head.mlp.fc1',
    'pool/mlp/dense2': 'head.mlp.fc2',
    'head': 'classifier',
    'head/cls': 'cls_classifier',
    'head/dist': 'distillation_classifier',
}
_ARRAYS = {
    'cls': 'embeddings.cls_token',
    'dist': 'embeddings.distillation_token',
    'registers': 'embeddings.register_tokens',
    'pos_embedding': 'embeddings.position_embeddings',
    f'{_BLOCK}/attention_scale': '{block}.layer_scale1.lambda1',
    f'{_BLOCK}/mlp_scale': '{block}.layer_scale2.lambda1',
    'pool/probe': 'head.probe',
}


def _attention(letters: str, out: str) -> dict[str, str]:
    """Returns names such as q_proj from a pattern such as {}_proj."""
    names = {f'{_BLOCK}/attention/{n}': f'{{block}}.{letters.format(n[0])}' for n in _QKV}
    return names | {f'{_BLOCK}/attention/out': f'{{block}}.{out}'}


_MLP = {f'{_BLOCK}/mlp/dense1': '{block}.mlp.fc1', f'{_BLOCK}/mlp/dense2': '{block}.mlp.fc2'}


class Family(NamedTuple):
    """The models of one model_type."""

    prefix: str  # in front of all names but the head's, in a model with a head
    block: str = 'encoder.layer.{layer0}'  # {layer0} is its number
    class_tokens: int = 1
    processor: str = 'ViT'  # prepares images if no file says which one does
    defaults: dict[str, Any] = {}  # of a config.json, if they differ from the defaults of `Config`
    names: dict[str, str] = {}  # that differ from _MODULES and _ARRAYS


_DINOV2 = Family(
    'dinov2.',
    processor='Dinov2',
    defaults={'layer_norm_eps': 1e-6, 'patch_size': 14},
    names={f'{_BLOCK}/norm1': '{block}.norm1', f'{_BLOCK}/norm2': '{block}.norm2'} | _MLP,
)
_CLIP = Family(
    'vision_model.',
    'encoder.layers.{layer0}',
    processor='CLIP',
    defaults={'layer_norm_eps': 1e-5, 'hidden_act': 'quick_gelu', 'patch_size': 32},
    names={
        'embedding': 'embeddings.patch_embedding',
        'cls': 'embeddings.class_embedding',
        'pos_embedding': 'embeddings.position_embedding.weight',
        f'{_BLOCK}/norm1': '{block}.layer_norm1',
        f'{_BLOCK}/norm2': '{block}.layer_norm2',
        'encoder/norm': 'post_layernorm',
        'head': 'visual_projection',
    }
    | _attention('self_attn.{}_proj', 'self_attn.out_proj')
    | _MLP,
)
_FAMILIES = {  # by model_type
    'vit': Family('vit.'),
    'vit_mae': Family('vit.'),
    'vit_msn': Family('vit.', defaults={'layer_norm_eps': 1e-6}),
    'deit': Family('deit.', class_tokens=2, processor='DeiT'),
    'ijepa': Family('ijepa.', class_tokens=0, defaults={'patch_size': 14}),
    'dinov2': _DINOV2,
    'dinov2_with_registers': _DINOV2._replace(
        prefix='dinov2_with_registers.', defaults=_DINOV2.defaults | {'num_register_tokens': 4}
    ),
    'dinov3_vit': Family(
        '',
        'layer.{layer0}',
        processor='DINOv3ViT',
        defaults={'layer_norm_eps': 1e-5, 'hidden_size': 384, 'intermediate_size': 1536}
        | {'num_attention_heads': 6, 'key_bias': False},
        names=_DINOV2.names
        | _attention('attention.{}_proj', 'attention.o_proj')
        | {
            'embedding': 'embeddings.patch_embeddings',
            f'{_BLOCK}/mlp/dense1': '{block}.mlp.up_proj',
            f'{_BLOCK}/mlp/dense2': '{block}.mlp.down_proj',
            'encoder/norm': 'norm',
        },
    ),
    'clip_vision_model': _CLIP,
    'siglip_vision_model': _CLIP._replace(
        class_tokens=0,
        processor='Siglip',
        defaults={'layer_norm_eps': 1e-6, 'hidden_act': 'gelu_pytorch_tanh'},
        names=_CLIP.names | {'head': 'classifier'},
    ),
}
PREFIXES = {family.prefix for family in _FAMILIES.values()} - {''}
_TOWERS = {'clip': 'clip_vision_model', 'siglip': 'siglip_vision_model'}  # of two towers


@dataclasses.dataclass
class Config(Record):
    """The keys of a config.json, or its vision_config, that decide what is computed."""

    image_size: tuple[int, int] = (224, 224)
    patch_size: tuple[int, int] = (16, 16)
    num_channels: int = 3
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    mlp_ratio: float = 4.0  # of DINOv2
    num_register_tokens: int = 0
    hidden_act: Literal[
        'gelu', 'gelu_pytorch_tanh', 'gelu_new', 'gelu_fast', 'quick_gelu', 'silu'
    ] = 'gelu'
    layer_norm_eps: float = 1e-12
    qkv_bias: bool = True
    query_bias: bool = True  # these three of DINOv3
    key_bias: bool = True
    value_bias: bool = True
    use_swiglu_ffn: bool = False  # of DINOv2
    use_gated_mlp: bool = False  # of DINOv3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(base.Layout):
    """How these files differ."""

    prefix: str = 'vit.'  # '': the file of a model without a head
    family: str = 'vit'  # a key of _FAMILIES

    @property
    def names(self) -> dict[str, str]:
        """Their names by ours, without what is in front of them."""
        family = _FAMILIES[self.family]
        names = _MODULES | _ARRAYS | family.names
        return {ours: theirs.replace('{block}', family.block) for ours, theirs in names.items()}

    @property
    def biases(self) -> list[str]:
        """The biases of queries, keys and values in all blocks."""
        return [f'{self.prefix}{self.names[f"{_BLOCK}/attention/{name}"]}.bias' for name in _QKV]

    @property
    def is_tower(self) -> bool:
        """Whether this is the image tower of CLIP or SigLIP."""
        return self.family in _TOWERS.values()


def _rules(config: ViTConfig, layout: Layout) -> list[NameRule]:
    module = functools.partial(name_map.torch_module, num_heads=config.num_heads)
    names = layout.names
    transforms = {'cls': VECTOR, 'pos_embedding': NO_BATCH} if layout.is_tower else {}
    rules = [NameRule(names[ours], (ours,), transforms.get(ours, SAME)) for ours in _ARRAYS]
    modules = {ours: names[ours] for ours in _MODULES}
    if config.gelu is None and layout.family.startswith('dinov2'):  # gate and value are one matrix
        modules = {ours: theirs for ours, theirs in modules.items() if '/mlp/' not in ours}
        rules += module(f'{_SWIGLU}_in', f'{_BLOCK}/mlp/gate', f'{_BLOCK}/mlp/dense1')
        rules += module(f'{_SWIGLU}_out', f'{_BLOCK}/mlp/dense2')
    for ours, theirs in modules.items():
        rules += module(theirs, ours)
    # SigLIP's attention pooling.
    joined = (f'pool/attention/{name}' for name in _QKV)
    rules += module('head.attention.in_proj', *joined, separator='_')
    heads = [rule for rule in rules if rule.ours[0].startswith('head/')]
    body = [rule for rule in rules if rule not in heads]
    return heads + [rule._replace(theirs=layout.prefix + rule.theirs) for rule in body]


def _parse(contents: FileContents, hints: Hints) -> ParsedCheckpoint[Layout]:
    described, arrays = contents.description('config.json'), contents.arrays
    remarks = list[str]()
    if not described:
        described = _infer_description(arrays, hints)
        name = described['model_type']
        remarks.append(f'no config.json: activation and epsilon are those that {name} usually has')
    model_type = str(described.get('model_type'))
    family = _TOWERS.get(model_type, model_type)
    types = ', '.join([*_FAMILIES, *_TOWERS])
    wrong = f'config.json: model_type={model_type!r} is not supported: expected one of {types}'
    require(family in _FAMILIES, wrong)
    known = _FAMILIES[family]
    values = described.part('vision_config') if model_type in _TOWERS else described
    values.expect(_ONLY)
    values.part('rope_parameters').expect({'rope_theta': 100.0})
    fields = values.record(Config, defaults=known.defaults)
    values.expect({'hidden_act': 'silu'} if fields.use_gated_mlp else {})
    layout = _layout_of(family, arrays)
    has_bias = fields.query_bias, fields.key_bias, fields.value_bias
    pairs = zip(layout.biases, has_bias, strict=True)
    zeros = [bias for bias, has in pairs if not (has and fields.qkv_bias)]
    zeros += ['visual_projection.bias'] if family == 'clip_vision_model' else []
    config = _model(fields, layout, arrays, hints)
    processor = contents.description('processor_config.json').part('image_processor')
    processor = processor or contents.description('preprocessor_config.json')  # as transformers
    preprocessing, size = huggingface_processor.parse(processor, known.processor)
    usual = f'images are prepared as is usual for {family}'
    remarks += [] if processor else [f'no preprocessor_config.json: {usual}']
    problem = described.get('problem_type')
    loss = next((loss for loss, name in _PROBLEM_TYPES.items() if name == problem), problem)
    projects = family == 'clip_vision_model' and config.num_classes is not None
    ignored = [_IGNORED] + [_TEXT] * layout.is_tower
    ignored += [_MAP_HEAD] * (layout.is_tower and config.pool != 'map')
    return ParsedCheckpoint(
        config,
        dataclasses.replace(layout, zeros=tuple(zeros)),
        preprocessing,
        class_names=_class_names(described, config.num_classes),
        ignored='|'.join(ignored),
        loss='contrastive' if projects else loss,
        remarks=tuple(remarks),
        processor_size=size if processor else None,
    )


def _layout_of(family: str, arrays: inference.Arrays) -> Layout:
    prefix = _FAMILIES[family].prefix
    has_prefix = any(name.startswith(prefix) for name in arrays)
    return Layout(prefix=prefix if has_prefix else '', family=family)


def _infer_description(arrays: inference.Arrays, hints: Hints) -> JsonObject:
    """Returns the config.json of a file without one, for the usual model of its family."""
    joined = '\n'.join(arrays)
    is_dino = 'layer_scale1' in joined
    kinds = {
        'clip_vision_model': 'pre_layrnorm' in joined,
        'siglip_vision_model': 'position_embedding.weight' in joined,
        'dinov3_vit': is_dino and 'position_embeddings' not in joined,
        'dinov2_with_registers': is_dino and 'register_tokens' in joined,
        'dinov2': is_dino,
        'deit': 'distillation_token' in joined,
        'vit': 'cls_token' in joined,
        'ijepa': True,
    }
    family = next(name for name, fits in kinds.items() if fits)
    if family == 'clip_vision_model' and hints.gelu is None:
        raise NeedsHint('no config.json: say gelu=quick, as OpenAI trained it, or gelu=exact')
    known, layout = _FAMILIES[family], _layout_of(family, arrays)
    usual = JsonObject({}, 'config.json').record(Config, defaults=known.defaults)
    defaults = Hints(gelu=_GELUS[usual.hidden_act], layer_norm_epsilon=usual.layer_norm_eps)
    names = {ours: layout.prefix + theirs for ours, theirs in layout.names.items()}
    second = f'{names[f"{_BLOCK}/mlp/dense2"]}.weight'
    if 'mlp.weights_out' in joined:
        second = f'{layout.prefix}{_SWIGLU}_out.weight'
    is_gated = 'mlp.weights_in' in joined or 'mlp.gate_proj' in joined
    gated: dict[str, Any] = {'gelu': None} if is_gated else {}
    blocks = re.escape(layout.prefix + known.block).replace(r'\{layer0\}', r'(\d+)')
    registers = names['registers']
    config, _ = inference.infer_config(
        arrays,
        inference.with_defaults(hints, defaults),
        embedding=f'{names["embedding"]}.weight',
        table=None if family == 'dinov3_vit' else names['pos_embedding'],
        rows=(known.class_tokens,),
        depth=inference.count_layers(arrays, rf'{blocks}\.'),
        mlp_dim=inference.shape_of(arrays, second.replace('{layer0}', '0'), 2)[1],
        registers=inference.shape_of(arrays, registers, 3)[1] if registers in arrays else 0,
        **gated,
    )
    zeros = tuple(b for b in layout.biases if b.replace('{layer0}', '0') not in arrays)
    layout = dataclasses.replace(layout, zeros=zeros)
    return JsonObject(_describe(config, layout), 'config.json')


def _model(fields: Config, layout: Layout, arrays: inference.Arrays, hints: Hints) -> ViTConfig:
    family, tokens = layout.family, _FAMILIES[layout.family].class_tokens
    heads = f'{layout.names["head"]}.weight', 'cls_classifier.weight'
    head = next((name for name in heads if name in arrays), None)
    pool: Pool = 'cls' if tokens else 'gap'
    if f'{layout.prefix}head.probe' in arrays and not head:
        pool = 'map'
    elif head and family.startswith('dinov2'):
        pool = 'cls_gap'
    elif head == 'cls_classifier.weight':
        pool = 'cls_dist'
    gated = fields.use_swiglu_ffn or fields.use_gated_mlp
    mlp_dim = fields.intermediate_size
    if family.startswith('dinov2'):
        mlp_dim = _dinov2_mlp(fields.hidden_size, fields.mlp_ratio, gated=gated)
    registers = family == 'dinov2_with_registers'
    return ViTConfig(
        image_size=fields.image_size,
        patch_size=fields.patch_size,
        channels=fields.num_channels,
        width=fields.hidden_size,
        depth=fields.num_hidden_layers,
        mlp_dim=mlp_dim,
        num_heads=hints.num_heads or fields.num_attention_heads,
        num_classes=inference.shape_of(arrays, head, 2)[0] if head else None,
        class_tokens=2 if (pool, tokens) == ('cls', 2) else None,
        registers=fields.num_register_tokens,
        positions='rope' if family == 'dinov3_vit' else 'learned',
        position_resize='bicubic_antialias' if registers else 'bicubic',
        pre_norm=family == 'clip_vision_model',
        gelu=None if gated else hints.gelu or _GELUS.get(fields.hidden_act),
        layer_scale=1e-5 if family.startswith('dino') else None,
        layer_norm_epsilon=hints.layer_norm_epsilon or fields.layer_norm_eps,
        pool=pool,
        representation_size=inference.length_of(arrays, f'{layout.prefix}pooler.dense.bias'),
    )


def _dinov2_mlp(width: int, ratio: float, *, gated: bool) -> int:
    """Returns the width of the hidden layer: a SwiGLU has two thirds of a plain one's."""
    plain = int(width * ratio)
    return (int(plain * 2 / 3) + 7) // 8 * 8 if gated else plain


def _class_names(described: JsonObject, count: int | None) -> tuple[str, ...]:
    """Returns the names in `id2label`, unless they are the placeholders LABEL_0, LABEL_1, ..."""
    labels = described.part('id2label') if count else {}
    names = tuple(str(labels[number]) for number in sorted(labels, key=int))
    return () if names == tuple(f'LABEL_{i}' for i in range(count or 0)) else names


def _usual_layout(config: ViTConfig) -> Layout:
    """Returns the layout to write a model; reading it back shows whether it fits."""
    kinds = {
        'dinov3_vit': config.positions == 'rope',
        'clip_vision_model': config.pre_norm,
        'dinov2_with_registers': config.layer_scale is not None and config.registers > 0,
        'dinov2': config.layer_scale is not None,
        'siglip_vision_model': config.pool == 'map',
        'ijepa': config.positioned_prefix == 0,
        'deit': config.positioned_prefix == 2,
        'vit': True,
    }
    family = next(name for name, fits in kinds.items() if fits)
    layout = Layout(prefix=_FAMILIES[family].prefix, family=family)
    zeros = ('visual_projection.bias',) if family == 'clip_vision_model' else ()
    bare = config.num_classes is None and not layout.is_tower
    return dataclasses.replace(layout, prefix='' if bare else layout.prefix, zeros=zeros)


def _description(config: ViTConfig, card: Card, layout: Layout) -> dict[str, Any]:
    """Returns the config.json. Raises UserError for a model that transformers does not have."""
    family, values = layout.family, _describe(config, layout)
    if config.num_classes is not None:
        wrong = f'the huggingface layout has no head for {family}: drop it'
        require(family != 'dinov3_vit', wrong)
        wrong = 'the huggingface layout has no tanh layer before a head: drop the head'
        require(config.representation_size is None, wrong)
    if config.num_classes is not None and not card.projects:
        labels = card.class_names or [f'LABEL_{i}' for i in range(config.num_classes)]
        values['id2label'] = {str(i): name for i, name in enumerate(labels)}
        values['label2id'] = {name: i for i, name in enumerate(labels)}
        values['problem_type'] = _PROBLEM_TYPES.get(card.loss or '')
    return values


def _describe(config: ViTConfig, layout: Layout) -> dict[str, Any]:
    """Returns all keys but a classifier's: a model_type ignores those that it does not have."""
    gated = config.gelu is None
    hidden = (_dinov2_mlp(config.width, float(ratio), gated=gated) for ratio in range(1, 65))
    ratio = next((i for i, size in enumerate(hidden, 1) if size == config.mlp_dim), None)
    has_bias = {
        f'{n}_bias': b not in layout.zeros for n, b in zip(_QKV, layout.biases, strict=True)
    }
    return {
        'model_type': layout.family,
        'dtype': layout.dtype,
        'image_size': _one_side(config.image_size),
        'patch_size': _one_side(config.patch_size),
        'num_channels': config.channels,
        'hidden_size': config.width,
        'num_hidden_layers': config.depth,
        'num_attention_heads': config.num_heads,
        'num_register_tokens': config.registers,
        'hidden_act': _HIDDEN_ACT[config.gelu],
        'layer_norm_eps': config.layer_norm_epsilon,
        'intermediate_size': config.mlp_dim,
        'mlp_ratio': ratio,  # of DINOv2, as are the next two
        'use_swiglu_ffn': gated,
        'use_mask_token': False,
        'use_gated_mlp': gated,  # of DINOv3, as are the biases
        **has_bias,
        'qkv_bias': any(has_bias.values()),
        'pooler_output_size': config.representation_size or config.width,
        'projection_dim': config.num_classes or 512,  # of CLIP
        'vision_use_head': config.pool == 'map',  # of SigLIP
    }


def _one_side(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)


HUGGINGFACE = Format[Layout](
    name='huggingface',
    suffix='.safetensors',
    matches=lambda names: any(map(_PATCHES.fullmatch, names)),
    parse=_parse,
    rules=_rules,
    usual_layout=_usual_layout,
    positions=('learned', 'rope'),
    file_name='model.safetensors',
    descriptions=lambda config, card, layout: {
        'config.json': _description(config, card, layout),
        'preprocessor_config.json': huggingface_processor.written(config, card.preprocessing),
    },
)
