"""Reads and writes models of Hugging Face transformers: directories of `config.json` and weights.

`config.json` describes the model; absent keys have the defaults of the model_type. The arrays show
only which optional parts exist: a head, and a tanh layer before it. Without config.json, the names
of the arrays determine the model_type, and their shapes the sizes.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from vit_jax.base import Record, UserError, require, tree_names
from vit_jax.checkpoints.card import Card, Hints
from vit_jax.checkpoints.formats import base, huggingface_processor, inference, name_map
from vit_jax.checkpoints.formats.array_files import FileContents, JsonObject
from vit_jax.checkpoints.formats.base import Format, ParsedCheckpoint
from vit_jax.checkpoints.formats.inference import NeedsHint
from vit_jax.checkpoints.formats.name_map import NO_BATCH, SAME, VECTOR, NameRule
from vit_jax.models import Gelu, Pool, ViTConfig, abstract_params

_PATCHES = re.compile(r'(.*?)embeddings\.patch_embeddings?(\.projection)?\.weight')
# Arrays that a model may not use: for masked pre-training, the text tower or attention pooling.
_IGNORED = (
    r'(.*\.)?embeddings\.mask_token|decoder\..*|.*\.position_ids|text_(model|projection)\..*'
    r'|logit_(scale|bias)|(vision_model\.)?head\.(probe|(attention|layernorm|mlp)\..*)'
)
# By hidden_act; None: SwiGLU, whose activation is SiLU. Older names come first, because the last
# name of each value is written.
_GELUS: dict[str, Gelu | None] = {
    'gelu_python': 'exact',
    'swish': None,
    'gelu_new': 'tanh',
    'gelu_fast': 'tanh',
    'gelu_accurate': 'tanh',
    'gelu_python_tanh': 'tanh',
    'gelu': 'exact',
    'gelu_pytorch_tanh': 'tanh',
    'quick_gelu': 'quick',
    'silu': None,
}
# The training loss, by problem_type.
_LOSSES = {
    'single_label_classification': 'softmax',
    'multi_label_classification': 'sigmoid',
    'regression': 'regression',
}
# Keys with the only value that is supported.
_ONLY = {'rope_theta': 100.0, 'pooler_act': 'tanh', 'proj_bias': True, 'mlp_bias': True}
# Keys that do not change image features: of training, of masked pre-training, of other towers, of
# transformers' backbone classes, of parts that the arrays show, and keys that `_parse` checks.
_NO_EFFECT = (
    rf'{base.NO_EFFECT}|{"|".join(_ONLY)}|(text|vision)_config(_dict)?|rope_parameters'
    r'|\w*dropout\w*|drop_path_rate|pos_embed_(jitter|rescale|shift)|decoder_\w+|mask_ratio'
    r'|norm_pix_loss|use_(mask_token|gated_mlp)|encoder_stride|layerscale_value|apply_layernorm'
    r'|logit_scale_init_value|reshape_\w+|out_\w+|stage_names|projection_dim|pooler_output_size'
)
# Keys that have the same values as fields of `ViTConfig`.
_FIELDS = {
    'image_size': 'image_size',
    'patch_size': 'patch_size',
    'num_channels': 'channels',
    'hidden_size': 'width',
    'num_hidden_layers': 'depth',
    'num_attention_heads': 'num_heads',
    'intermediate_size': 'mlp_dim',
    'num_register_tokens': 'registers',
}
# CLIP and SigLIP store these arrays without a batch axis.
_TRANSFORMS = {
    'embeddings.class_embedding': VECTOR,
    'embeddings.position_embedding.weight': NO_BATCH,
}
_QKV = 'query', 'key', 'value'
_BLOCK = 'encoder/block'
_BIASES = {f'{name}_bias': f'{_BLOCK}/attention/{name}/bias' for name in _QKV}
# Names of modules and arrays in files of most families, by our names.
_NAMES = {
    'embedding': 'embeddings.patch_embeddings.projection',
    'cls': 'embeddings.cls_token',
    'dist': 'embeddings.distillation_token',
    'registers': 'embeddings.register_tokens',
    'pos_embedding': 'embeddings.position_embeddings',
    'pre_norm': 'pre_layrnorm',
    f'{_BLOCK}/norm1': '{block}.layernorm_before',
    f'{_BLOCK}/norm2': '{block}.layernorm_after',
    **{f'{_BLOCK}/attention/{name}': f'{{block}}.attention.attention.{name}' for name in _QKV},
    f'{_BLOCK}/attention/out': '{block}.attention.output.dense',
    f'{_BLOCK}/attention_scale': '{block}.layer_scale1.lambda1',
    f'{_BLOCK}/mlp/gate': '{block}.mlp.gate_proj',
    f'{_BLOCK}/mlp/dense1': '{block}.intermediate.dense',
    f'{_BLOCK}/mlp/dense2': '{block}.output.dense',
    f'{_BLOCK}/mlp_scale': '{block}.layer_scale2.lambda1',
    'encoder/norm': 'layernorm',
    'pre_logits': 'pooler.dense',
    'pool/probe': 'head.probe',
    'pool/attention/out': 'head.attention.out_proj',
    'pool/norm': 'head.layernorm',
    'pool/mlp/dense1': 'head.mlp.fc1',
    'pool/mlp/dense2': 'head.mlp.fc2',
    'head': 'classifier',
    'head/cls': 'cls_classifier',
    'head/dist': 'distillation_classifier',
}


def _attention(letters: str, out: str) -> dict[str, str]:
    """Returns names of the attention's modules; `letters` is a pattern for q, k and v: {}_proj."""
    names = {f'{_BLOCK}/attention/{n}': f'{{block}}.{letters.format(n[0])}' for n in _QKV}
    return names | {f'{_BLOCK}/attention/out': f'{{block}}.{out}'}


_MLP = {f'{_BLOCK}/mlp/dense1': '{block}.mlp.fc1', f'{_BLOCK}/mlp/dense2': '{block}.mlp.fc2'}


class Family(NamedTuple):
    """Names and defaults of one model_type."""

    prefix: str  # of all names except the head's, in a model with a head
    block: str = 'encoder.layer.{layer0}'  # name of block {layer0}
    class_tokens: int = 1
    defaults: dict[str, Any] = {}  # defaults of config.json that differ from those in `Config`
    names: dict[str, str] = {}  # entries that differ from _NAMES


_DINOV2 = Family(
    'dinov2.',
    defaults={'layer_norm_eps': 1e-6, 'patch_size': (14, 14)},
    names={f'{_BLOCK}/norm1': '{block}.norm1', f'{_BLOCK}/norm2': '{block}.norm2'} | _MLP,
)
_CLIP = Family(
    'vision_model.',
    'encoder.layers.{layer0}',
    defaults={'layer_norm_eps': 1e-5, 'hidden_act': 'quick_gelu', 'patch_size': (32, 32)},
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
    'deit': Family('deit.', class_tokens=2),
    'ijepa': Family('ijepa.', class_tokens=0, defaults={'patch_size': (14, 14)}),
    'dinov2': _DINOV2,
    'dinov2_with_registers': _DINOV2._replace(
        prefix='dinov2_with_registers.', defaults=_DINOV2.defaults | {'num_register_tokens': 4}
    ),
    'dinov3_vit': Family(
        '',
        'layer.{layer0}',
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
        defaults={'layer_norm_eps': 1e-6, 'hidden_act': 'gelu_pytorch_tanh'},
        names=_CLIP.names | {'head': 'classifier'},
    ),
}
PREFIXES = {family.prefix for family in _FAMILIES.values()} - {''}
# The image tower of models with two towers.
_TOWERS = {'clip': 'clip_vision_model', 'siglip': 'siglip_vision_model'}


@dataclasses.dataclass
class Config(Record):
    """Keys of config.json, or of its vision_config, that change the model."""

    image_size: tuple[int, int] = (224, 224)
    patch_size: tuple[int, int] = (16, 16)
    num_channels: int = 3
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    mlp_ratio: float = 4.0  # only DINOv2
    num_register_tokens: int = 0
    hidden_act: str = 'gelu'  # a key of _GELUS
    layer_norm_eps: float = 1e-12
    qkv_bias: bool = True
    query_bias: bool = True  # only DINOv3
    key_bias: bool = True  # only DINOv3
    value_bias: bool = True  # only DINOv3
    use_swiglu_ffn: bool = False  # only DINOv2
    vision_use_head: bool = True  # only SigLIP


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(base.Layout):
    """Variant of these files."""

    family: str = 'vit'  # a key of _FAMILIES
    bare_blocks: bool = False  # names of blocks have no prefix, as in ViTMSN by transformers 5


def _rules(config: ViTConfig, layout: Layout) -> list[NameRule]:
    module = functools.partial(name_map.torch_module, num_heads=config.num_heads)
    family = _FAMILIES[layout.family]
    prefix = layout.prefix
    names = _NAMES | family.names
    joined = (f'pool/attention/{name}' for name in _QKV)
    rules = module(f'{prefix}head.attention.in_proj', *joined, separator='_')
    # DINOv2 stores the gate and the value of a SwiGLU in one matrix.
    if config.gelu is None and layout.family.startswith('dinov2'):
        names = {ours: theirs for ours, theirs in names.items() if '/mlp/' not in ours}
        weights = f'{prefix}{family.block}.mlp.weights'
        rules += module(f'{weights}_in', f'{_BLOCK}/mlp/gate', f'{_BLOCK}/mlp/dense1')
        rules += module(f'{weights}_out', f'{_BLOCK}/mlp/dense2')
    for ours, theirs in names.items():
        is_bare = ours.startswith('head') or (layout.bare_blocks and '{block}' in theirs)
        path = ('' if is_bare else prefix) + theirs.replace('{block}', family.block)
        rules += [NameRule(path, (ours,), _TRANSFORMS.get(theirs, SAME)), *module(path, ours)]
    return rules


def _names_in_file(config: ViTConfig, layout: Layout) -> dict[str, str]:
    """Returns the names in the file by our names; {layer0} is the number of a block."""
    return {ours: rule.theirs for rule in _rules(config, layout) for ours in rule.ours}


def _parse(contents: FileContents, hints: Hints) -> ParsedCheckpoint[Layout]:
    stated = contents.description('config.json')
    arrays = contents.arrays
    prefix = next(match[1] for name in arrays if (match := _PATCHES.fullmatch(name)))
    described = stated or _infer_description(arrays, hints, prefix)
    model_type = str(described.get('model_type'))
    family = _TOWERS.get(model_type, model_type)
    require(
        family in _FAMILIES,
        f'config.json: model_type={model_type!r} is not supported; '
        f'expected one of {", ".join([*_FAMILIES, *_TOWERS])}',
    )
    is_bare = prefix != '' and any(name.startswith('encoder.layer.') for name in arrays)
    layout = Layout(prefix=prefix, family=family, bare_blocks=is_bare)
    tower = described.part('vision_config_dict') or described.part('vision_config')
    values = JsonObject(described | tower, 'config.json') if model_type in _TOWERS else described
    values.expect(_ONLY)
    values.part('rope_parameters').expect({'rope_theta': 100.0, 'rope_type': 'default'})
    fields = values.record(Config, ignored=_NO_EFFECT, defaults=_FAMILIES[family].defaults)
    require(
        fields.hidden_act in _GELUS,
        f'config.json.hidden_act={fields.hidden_act!r}; expected one of {", ".join(_GELUS)}',
    )
    values.expect({'use_gated_mlp': _GELUS[fields.hidden_act] is None})  # of DINOv3
    config = _build_config(fields, layout, arrays, hints)
    names = _names_in_file(config, layout)
    has_bias = {key: fields.qkv_bias and getattr(fields, key) for key in _BIASES}
    zeros = [names[bias] for key, bias in _BIASES.items() if not has_bias[key]]
    if family == 'clip_vision_model':
        zeros.append(names['head/bias'])
    processor = contents.description('processor_config.json').part('image_processor')
    # transformers also prefers processor_config.json.
    processor = processor or contents.description('preprocessor_config.json')
    preprocessing, size = huggingface_processor.parse(processor, family)
    remarks = []
    if not stated:
        remarks.append(f'no config.json: assuming the activation and epsilon of {family}')
    if not processor:
        remarks.append(
            f'no preprocessor_config.json: images are preprocessed as is usual for {family}'
        )
    projects = family == 'clip_vision_model' and config.num_classes is not None
    return ParsedCheckpoint(
        config,
        dataclasses.replace(layout, zeros=tuple(zeros)),
        preprocessing,
        class_names=_class_names(described, config.num_classes),
        ignored=_IGNORED,
        loss='contrastive' if projects else _LOSSES.get(str(described.get('problem_type'))),
        remarks=tuple(remarks),
        processor_size=size if processor else None,
    )


def _family_of(has: Callable[[str], bool]) -> str:
    """Returns the model_type; `has` returns whether a model has a module or array of this name."""
    is_dino = has(f'{_BLOCK}/attention_scale')
    kinds = {
        'clip_vision_model': has('pre_norm'),
        'siglip_vision_model': has('pool/probe') or has('embeddings.position_embedding.'),
        'dinov3_vit': is_dino and not has('pos_embedding'),
        'dinov2_with_registers': has('registers'),
        'dinov2': is_dino,
        'deit': has('dist'),
        'vit': has('cls'),
        'ijepa': True,
    }
    return next(name for name, fits in kinds.items() if fits)


def _infer_description(arrays: inference.Arrays, hints: Hints, prefix: str) -> JsonObject:
    """Infers a config.json for a file without one, with the defaults of its family."""
    joined = '\n'.join(arrays)
    family = _family_of(lambda ours: _NAMES.get(ours, ours).removeprefix('{block}') in joined)
    if family == 'clip_vision_model' and hints.gelu is None:
        raise NeedsHint('unknown GELU without config.json; set gelu=quick (OpenAI) or gelu=exact')
    layout = Layout(prefix=prefix, family=family)
    usual = Config(**_FAMILIES[family].defaults)
    defaults = Hints(gelu=_GELUS[usual.hidden_act], layer_norm_epsilon=usual.layer_norm_eps)
    gated: dict[str, Any] = {'gelu': None} if re.search(r'mlp\.(weights_in|gate)', joined) else {}
    config, _ = inference.infer_config(
        arrays,
        _rules(ViTConfig(**gated), layout),
        inference.with_defaults(hints, defaults),
        rows=(_FAMILIES[family].class_tokens,),
        positions='rope' if family == 'dinov3_vit' else 'learned',
        **gated,
    )
    biases = [_names_in_file(config, layout)[bias] for bias in _BIASES.values()]
    zeros = tuple(name for name in biases if name.replace('{layer0}', '0') not in arrays)
    described = _describe(config, dataclasses.replace(layout, zeros=zeros))
    return JsonObject(described | {'vision_use_head': True}, 'config.json')


def _build_config(
    fields: Config, layout: Layout, arrays: inference.Arrays, hints: Hints
) -> ViTConfig:
    family = layout.family
    num_tokens = _FAMILIES[family].class_tokens
    heads = (_NAMES | _FAMILIES[family].names)['head'], _NAMES['head/cls']
    head = next((f'{name}.weight' for name in heads if f'{name}.weight' in arrays), None)
    pool: Pool = 'cls' if num_tokens else 'gap'
    if f'{layout.prefix}head.probe' in arrays and not head and fields.vision_use_head:
        pool = 'map'
    elif head and family.startswith('dinov2'):
        pool = 'cls_gap'
    elif head == 'cls_classifier.weight':
        pool = 'cls_dist'
    gelu = None if fields.use_swiglu_ffn else _GELUS[fields.hidden_act]
    values: dict[str, Any] = {ours: getattr(fields, key) for key, ours in _FIELDS.items()}
    if family.startswith('dinov2'):  # a SwiGLU has 2/3 of the width, rounded up to a multiple of 8
        plain = int(fields.hidden_size * fields.mlp_ratio)
        values['mlp_dim'] = (int(plain * 2 / 3) + 7) // 8 * 8 if fields.use_swiglu_ffn else plain
    return ViTConfig(
        **values,
        num_classes=inference.shape_of(arrays, head, 2)[0] if head else None,
        class_tokens=2 if pool == 'cls' and num_tokens == 2 else None,
        positions='rope' if family == 'dinov3_vit' else 'learned',
        position_resize='bicubic_antialias' if family == 'dinov2_with_registers' else 'bicubic',
        pre_norm=family == 'clip_vision_model',
        gelu=gelu and (hints.gelu or gelu),
        layer_norm_epsilon=hints.layer_norm_epsilon or fields.layer_norm_eps,
        layer_scale=1e-5 if family.startswith('dino') else None,
        pool=pool,
        representation_size=inference.length_of(arrays, f'{layout.prefix}pooler.dense.bias'),
    )


def _class_names(described: JsonObject, count: int | None) -> tuple[str, ...]:
    """Returns the names in `id2label`, unless they are the placeholders LABEL_0, LABEL_1, ..."""
    if not count:
        return ()
    labels = described.part('id2label')
    if not labels:
        return ()
    keys = [str(index) for index in range(count)]
    differing_keys = sorted({*labels} ^ {*keys})
    if differing_keys:
        key = differing_keys[0]
        state = 'unexpected' if key in labels else 'missing'
        raise UserError(f"id2label: {state} key {key!r}; the keys must be '0' to '{keys[-1]}'")
    for key, name in labels.items():
        is_name = isinstance(name, str | int) and not isinstance(name, bool)
        require(is_name, f'id2label: got {name!r} for {key!r}; expected the name of a class')
    names = tuple(str(labels[key]) for key in keys)
    placeholders = tuple(f'LABEL_{key}' for key in keys)
    return () if names == placeholders else names


def _usual_layout(config: ViTConfig) -> Layout:
    """Returns the layout to write a model; `writing` checks that it is read back unchanged."""
    ours = tree_names.named_leaves(abstract_params(config))
    family = _family_of(lambda part: any(name.startswith(part) for name in ours))
    is_bare = config.num_classes is None and family not in _TOWERS.values()
    prefix = '' if is_bare else _FAMILIES[family].prefix
    # CLIP's projection has no bias; other families have no such name.
    return Layout(prefix=prefix, family=family, zeros=('visual_projection.bias',))


def _descriptions(config: ViTConfig, card: Card, layout: Layout) -> dict[str, dict[str, Any]]:
    """Returns the JSON files. Raises UserError for a head that transformers does not have."""
    description = _describe(config, layout)
    num_classes = config.num_classes
    has_head = layout.family != 'dinov3_vit' and config.representation_size is None
    require(
        has_head or num_classes is None,
        'the huggingface format has no head for dinov3_vit or with representation_size; '
        'use num_classes=None or --drop_head',
    )
    if num_classes is not None and not card.is_projection:
        labels = card.class_names or [f'LABEL_{i}' for i in range(num_classes)]
        problem_types = {loss: name for name, loss in _LOSSES.items()}
        description['id2label'] = {str(i): name for i, name in enumerate(labels)}
        description['label2id'] = {name: i for i, name in enumerate(labels)}
        description['problem_type'] = problem_types.get(card.loss or '')
    processor = huggingface_processor.describe(config, card.preprocessing)
    return {'config.json': description, 'preprocessor_config.json': processor}


def _describe(config: ViTConfig, layout: Layout) -> dict[str, Any]:
    """Returns the keys of config.json except the classes; model types ignore unknown keys."""
    is_gated = config.gelu is None
    names = _names_in_file(config, layout)
    values = {key: getattr(config, ours) for key, ours in _FIELDS.items()}
    for key in 'image_size', 'patch_size':
        height, width = values[key]
        values[key] = height if height == width else [height, width]
    has_bias = {key: names[bias] not in layout.zeros for key, bias in _BIASES.items()}
    return values | {
        'model_type': layout.family,
        'dtype': layout.dtype,
        'layer_norm_eps': config.layer_norm_epsilon,
        'hidden_act': {gelu: name for name, gelu in _GELUS.items()}[config.gelu],
        # Only DINOv2 has the next three keys.
        'mlp_ratio': round(config.mlp_dim * (1.5 if is_gated else 1) / config.width),
        'use_swiglu_ffn': is_gated,
        'use_mask_token': False,
        'use_gated_mlp': is_gated,  # only DINOv3
        **has_bias,  # only DINOv3
        'qkv_bias': any(has_bias.values()),
        'pooler_output_size': config.representation_size or config.width,
        'projection_dim': config.num_classes or 512,  # only CLIP
        'vision_use_head': config.pool == 'map',  # only SigLIP
    }


HUGGINGFACE = Format[Layout](
    name='huggingface',
    suffix='.safetensors',
    matches=lambda names: any(map(_PATCHES.fullmatch, names)),
    parse=_parse,
    rules=_rules,
    usual_layout=_usual_layout,
    positions=('learned', 'rope'),
    file_name='model.safetensors',
    descriptions=_descriptions,
)
