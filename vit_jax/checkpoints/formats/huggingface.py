"""The layout of Hugging Face's transformers: a directory of `config.json` and weights.

The names on disk are older than those in the memory of transformers 5; both are read. Hybrids are
the `vit-hybrid` files of transformers 4.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

from vit_jax.base import UserError, require
from vit_jax.checkpoints.card import Card, Hints
from vit_jax.checkpoints.formats import base, huggingface_processor, inference, name_map
from vit_jax.checkpoints.formats.array_files import FileContents, LazyArray
from vit_jax.checkpoints.formats.base import (
    Format,
    ParsedCheckpoint,
    described,
    part,
    require_equal,
)
from vit_jax.checkpoints.formats.huggingface_config import (
    FAMILIES,
    GELUS,
    Config,
    Family,
    check_backbone,
    description,
    dinov2_mlp,
    family_for,
    family_of,
    require_supported,
    vision_config,
)
from vit_jax.checkpoints.formats.huggingface_labels import PROBLEM_TYPES, class_names
from vit_jax.checkpoints.formats.inference import NeedsHint
from vit_jax.checkpoints.formats.name_map import NO_BATCH, SAME, VECTOR, NameRule
from vit_jax.models import Pool, ViTConfig

_KNOWN = re.compile(r'.*(embeddings\.patch_embeddings?(\.projection)?|layernorm_before)\.weight')
# What is beside the network: of masked pre-training, and of the text tower.
_IGNORED = r'(.*\.)?embeddings\.mask_token|decoder\..*|.*\.position_ids'
_TEXT = r'text_model\..*|text_projection\..*|logit_(scale|bias)'
_ROOT = 'backbone.bit.embedder'
_UNIT = 'backbone.bit.encoder.stages.{stage0}.layers.{unit0}'
_DINOV2 = 'dinov2', 'dinov2_with_registers'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(base.Layout):
    """How these files differ among themselves."""

    prefix: str = 'vit.'  # none: the file of a model without a head
    family: str = 'vit'  # a key of FAMILIES
    old_names: bool = True  # those on disk
    bare_blocks: bool = False  # blocks without the prefix, as transformers 5 writes ViTMSN

    @property
    def names(self) -> Family:
        """What the arrays are called."""
        family = FAMILIES[self.family]
        return family if self.old_names else family.in_memory

    @property
    def block(self) -> str:
        """What the names of a block begin with; {layer0} is its number."""
        return self.names.block if self.bare_blocks else self.prefix + self.names.block


def _rules(config: ViTConfig, layout: Layout) -> list[NameRule]:
    module = functools.partial(name_map.torch_module, num_heads=config.num_heads)
    names, ours = layout.names, 'encoder/block'
    block = layout.block
    is_tower = names.norm == 'post_layernorm'  # CLIP's and SigLIP's have no axis for the batch
    rules = [
        *module(names.embedding, 'embedding'),
        NameRule(names.cls, ('cls',), VECTOR if is_tower else SAME),
        NameRule('embeddings.distillation_token', ('dist',)),
        NameRule('embeddings.register_tokens', ('registers',)),
        NameRule(names.positions, ('pos_embedding',), NO_BATCH if is_tower else SAME),
        *module('pre_layrnorm', 'pre_norm'),
        *module(names.norm, 'encoder/norm'),
        *_map_head_rules(config),
    ]
    rules = [rule._replace(theirs=layout.prefix + rule.theirs) for rule in rules]
    for norm, theirs in enumerate(names.norms, 1):
        rules += module(f'{block}.{theirs}', f'{ours}/norm{norm}')
    for projection, theirs in zip(('query', 'key', 'value'), names.projections, strict=True):
        rules += module(f'{block}.{theirs}', f'{ours}/attention/{projection}')
    rules += module(f'{block}.{names.out}', f'{ours}/attention/out')
    for scale, branch in enumerate(('attention', 'mlp'), 1):
        theirs = f'{block}.layer_scale{scale}.lambda1'
        rules.append(NameRule(theirs, (f'{ours}/{branch}_scale',)))
    rules += _mlp_rules(config, layout, block) + _head_rules(config, layout)
    if config.backbone is not None:
        patches = f'{layout.prefix}embeddings.patch_embeddings.'
        root, unit = patches + _ROOT, patches + _UNIT
        rules += name_map.torch_backbone(config, f'{root}.convolution', f'{root}.norm', unit)
    return rules


def _mlp_rules(config: ViTConfig, layout: Layout, block: str) -> list[NameRule]:
    module, ours = name_map.torch_module, 'encoder/block/mlp'
    if config.gelu is None and layout.family in _DINOV2:
        joined = module(f'{block}.mlp.weights_in', f'{ours}/gate', f'{ours}/dense1')
        return joined + module(f'{block}.mlp.weights_out', f'{ours}/dense2')
    first, second = layout.names.mlp
    rules = module(f'{block}.{first}', f'{ours}/dense1') + module(
        f'{block}.{second}', f'{ours}/dense2'
    )
    return rules + module(f'{block}.mlp.gate_proj', f'{ours}/gate')


def _map_head_rules(config: ViTConfig) -> list[NameRule]:
    """SigLIP's attention pooling."""
    module = functools.partial(name_map.torch_module, num_heads=config.num_heads)
    joined = [f'pool/attention/{name}' for name in ('query', 'key', 'value')]
    return [
        NameRule('head.probe', ('pool/probe',)),
        *module('head.attention.in_proj', *joined, separator='_'),
        *module('head.attention.out_proj', 'pool/attention/out'),
        *module('head.layernorm', 'pool/norm'),
        *module('head.mlp.fc1', 'pool/mlp/dense1'),
        *module('head.mlp.fc2', 'pool/mlp/dense2'),
    ]


def _head_rules(config: ViTConfig, layout: Layout) -> list[NameRule]:
    module, head = name_map.torch_module, layout.names.head
    if config.pool == 'cls_dist':
        two = {'cls_classifier': 'head/cls', 'distillation_classifier': 'head/dist'}
        return [rule for theirs, ours in two.items() for rule in module(theirs, ours)]
    if config.num_classes is None:
        return module(f'{layout.prefix}pooler.dense', 'pre_logits')
    absent = {f'{head}.bias'} - {*layout.zeros} if head == 'visual_projection' else {}
    return [rule for rule in module(head, 'head') if rule.theirs not in absent]


def _notes(config: ViTConfig, card: Card, layout: Layout) -> list[str]:
    if getattr(card.preprocessing.crop, 'resize', 'bilinear') != 'bilinear':
        return []
    return ['transformers smooths images before it shrinks them; this network was used without']


def _parse(clues: FileContents, hints: Hints) -> ParsedCheckpoint[Layout]:
    arrays, said = clues.arrays, clues.description('config.json')
    try:
        family = family_of(said, arrays)
        values = vision_config(said, family)
        require_supported(values)
    except UserError as error:
        raise UserError(f'config.json: {error}') from error
    declared = described(Config, values, where='config.json')
    layout = _layout(family, declared, arrays)
    config = _infer(clues, hints, declared, layout)
    if config.backbone is not None:
        check_backbone(config.backbone, values)
    if config.num_classes is not None and family.head == 'visual_projection':
        require_equal(said, {'projection_dim': config.num_classes}, where='config.json')
    where = 'processor_config.json'  # which transformers reads first
    processor = part(clues.description(where), 'image_processor', where=where)
    processor = processor or clues.description('preprocessor_config.json')
    preprocessing, size = huggingface_processor.read(processor, family.processor)
    pool = '' if config.pool == 'map' else r'|(vision_model\.)?head\..*'
    text = f'|{_TEXT}{pool}' if family.norm == 'post_layernorm' else ''
    problem = said.get('problem_type')
    if family.head == 'visual_projection' and config.num_classes is not None:
        problem = 'contrastive'  # a projection, and no classifier
    remarks = []
    if not processor:
        usual = f'images are prepared as is usual for {family.model_type}'
        remarks.append(f'no preprocessor_config.json: {usual}')
    return ParsedCheckpoint(
        config,
        layout,
        preprocessing,
        class_names=class_names(said, config.num_classes),
        ignored=_IGNORED + text,
        loss=next((loss for loss, name in PROBLEM_TYPES.items() if name == problem), problem),
        remarks=tuple(remarks),
        processor_size=size if processor else None,
    )


def _layout(family: Family, declared: Config, arrays: Mapping[str, LazyArray]) -> Layout:
    prefix = family.prefix if any(name.startswith(family.prefix) for name in arrays) else ''
    usual = Layout(prefix=prefix, family=family.model_type)
    bare = dataclasses.replace(usual, bare_blocks=True)
    layout = usual
    others = (bare,) if prefix else ()  # without a prefix these are the usual ones
    for possible in usual, dataclasses.replace(usual, old_names=False), *others:
        first = f'{possible.block}.{possible.names.projections[0]}.weight'
        if first.replace('{layer0}', '0') in arrays:
            layout = possible
    block = layout.block
    biases = [f'{block}.{projection}.bias' for projection in layout.names.projections]
    may_lack = not declared.qkv_bias or family.model_type == 'dinov3_vit'
    zeros = [n for n in biases if may_lack and n.replace('{layer0}', '0') not in arrays]
    _check_biases(declared, layout, first=block.replace('{layer0}', '0'), arrays=arrays)
    if 'visual_projection.weight' in arrays:
        zeros.append('visual_projection.bias')
    return dataclasses.replace(layout, zeros=tuple(zeros))


def _check_biases(
    declared: Config, layout: Layout, *, first: str, arrays: Mapping[str, LazyArray]
) -> None:
    """Raises UserError for biases of the first block that config.json says it has not."""
    names = layout.names
    said = dict(zip(('query_bias', 'key_bias', 'value_bias'), names.projections, strict=True))
    said |= {'proj_bias': names.out, 'mlp_bias': names.mlp[0]}
    off = {of for name, of in said.items() if getattr(declared, name) is False}
    off |= {*names.projections} if not declared.qkv_bias else set()
    there = sorted(f'{first}.{of}.bias' for of in off if f'{first}.{of}.bias' in arrays)
    if there:
        raise UserError(f'config.json says that there is no bias, but {there[0]} is there')


def _infer(clues: FileContents, hints: Hints, declared: Config, layout: Layout) -> ViTConfig:
    """The network. Raises UserError where config.json says other things than the arrays."""
    arrays, family, names = clues.arrays, FAMILIES[layout.family], layout.names
    prefix, said = layout.prefix, bool(clues.description('config.json'))
    block = layout.block.replace('{layer0}', '0')
    hidden_act = declared.hidden_act or family.hidden_act
    if layout.family == 'clip_vision_model' and not said and hints.gelu is None:
        raise NeedsHint('without config.json: say gelu=quick, as OpenAI trained, or gelu=exact')
    defaults = Hints(
        num_heads=declared.num_attention_heads or (family.num_heads if said else None),
        gelu=GELUS.get(hidden_act, 'exact'),
        layer_norm_epsilon=declared.layer_norm_eps or family.epsilon,
    )
    swiglu = f'{block}.mlp.weights_out.weight'
    gated = swiglu in arrays or f'{block}.mlp.gate_proj.weight' in arrays
    second = swiglu if swiglu in arrays else f'{block}.{names.mlp[1]}.weight'
    width, mlp_dim = inference.shape_of(arrays, second, 2)
    registers, pooler = f'{prefix}embeddings.register_tokens', f'{prefix}pooler.dense.bias'
    silu = hidden_act == 'silu'
    wrong = f'config.json: hidden_act={hidden_act!r}, but the arrays are those of '
    require(gated or not silu, f'{wrong}a plain MLP')
    require(silu or not gated or layout.family in _DINOV2, f'{wrong}a SwiGLU')
    if pooler in arrays:
        wrong = f'config.json: pooler_act={declared.pooler_act!r} is not supported: expected tanh'
        require(declared.pooler_act == 'tanh', wrong)
    rope = layout.family == 'dinov3_vit'
    pool, tokens = _pool(arrays, layout)
    options: dict[str, Any] = {'gelu': None} if gated else {}
    options |= {'positions': 'rope'} if rope else {}
    config, _ = inference.infer_config(
        _in_rank_3(clues, prefix + names.positions).arrays,
        inference.with_defaults(hints, defaults),
        image_size=declared.image_size,
        embedding=f'{prefix}{names.embedding}.weight',
        root=f'{prefix}embeddings.patch_embeddings.{_ROOT}.convolution.weight',
        unit=f'{prefix}embeddings.patch_embeddings.{_UNIT}',
        table=None if rope else prefix + names.positions,
        rows=(tokens,),
        depth=inference.count_layers(
            arrays, re.escape(layout.block).replace(r'\{layer0\}', r'(\d+)') + r'\.'
        ),
        mlp_dim=mlp_dim,
        num_classes=_num_classes(arrays, names.head),
        representation_size=inference.length_of(arrays, pooler),
        pool=pool,
        class_tokens=tokens if (pool, tokens) in (('cls', 2), ('gap', 1)) else None,
        registers=inference.shape_of(arrays, registers, 3)[1] if registers in arrays else 0,
        pre_norm=f'{prefix}pre_layrnorm.weight' in arrays,
        layer_scale=1e-5 if f'{block}.layer_scale1.lambda1' in arrays else None,
        position_resize='bicubic_antialias'
        if layout.family == 'dinov2_with_registers'
        else 'bicubic',
        **options,
    )
    _compare(config, declared, layout)
    return config


def _in_rank_3(clues: FileContents, table: str) -> FileContents:
    """The same, where the table of positions has an axis for the batch."""
    stored = clues.arrays.get(table)
    if stored is None or len(stored.shape) != 2:
        return clues
    return clues._replace(arrays={**clues.arrays, table: stored._replace(shape=(1, *stored.shape))})


def _pool(arrays: Mapping[str, LazyArray], layout: Layout) -> tuple[Pool, int]:
    """What the head reads, and the number of class tokens."""
    names, prefix = layout.names, layout.prefix
    tokens = sum(prefix + n in arrays for n in (names.cls, 'embeddings.distillation_token'))
    has_head = 'classifier.weight' in arrays
    if layout.family == 'siglip_vision_model' and f'{prefix}head.probe' in arrays and not has_head:
        return 'map', tokens
    if tokens == 0:
        return 'gap', 0
    if 'distillation_classifier.weight' in arrays:
        return 'cls_dist', tokens
    return 'cls_gap' if has_head and layout.family in _DINOV2 else 'cls', tokens


def _num_classes(arrays: Mapping[str, LazyArray], head: str) -> int | None:
    for name in (f'{head}.weight', 'cls_classifier.weight'):
        if name in arrays:
            return inference.shape_of(arrays, name, 2)[0]
    return None


def _compare(config: ViTConfig, declared: Config, layout: Layout) -> None:
    """Raises UserError where config.json says other things than the arrays."""
    found: dict[str, Any] = {
        'hidden_size': config.width,
        'num_hidden_layers': config.depth,
        'num_channels': config.channels,
        'num_register_tokens': config.registers,
        'use_swiglu_ffn': config.gelu is None,  # DINOv2's word, and DINOv3's
        'use_gated_mlp': config.gelu is None,
    }
    stated = {name: value for name, value in vars(declared).items() if value is not None}
    stated = {name: stated[name] for name in found.keys() & stated.keys()}
    if config.backbone is None and declared.patch_size is not None:
        stated['patch_size'], found['patch_size'] = declared.patch_size, config.patch_size
    wrong = 'config.json says model_type=dinov2, the arrays have registers'
    require(layout.family != 'dinov2' or not config.registers, wrong)
    wrong = 'config.json says model_type=dinov2_with_registers, the arrays have none'
    require(layout.family != 'dinov2_with_registers' or config.registers > 0, wrong)
    wrong = 'config.json says vision_use_head=False, the arrays have such a head'
    require(declared.vision_use_head is not False or config.pool != 'map', wrong)
    if layout.family in _DINOV2 and declared.hidden_size is not None:
        ratio = declared.mlp_ratio
        found['mlp_ratio'] = ratio if dinov2_mlp(config, ratio) == config.mlp_dim else None
        stated['mlp_ratio'] = ratio
    elif declared.intermediate_size is not None:
        stated['intermediate_size'] = declared.intermediate_size
        found['intermediate_size'] = config.mlp_dim
    require_equal(stated, found, where='config.json')


def _description(config: ViTConfig, card: Card, layout: Layout) -> dict[str, Any]:
    absent = [n for n in layout.names.projections if any(f'.{n}.bias' in z for z in layout.zeros)]
    described = description(FAMILIES[layout.family], config, card, without_bias=absent)
    return described | {'dtype': layout.dtype}


def _usual_layout(config: ViTConfig) -> Layout:
    family = family_for(config)
    is_tower = family.norm == 'post_layernorm'
    return Layout(
        prefix=family.prefix if config.num_classes is not None or is_tower else '',
        family=family.model_type,
        zeros=('visual_projection.bias',) if family.head == 'visual_projection' else (),
    )


HUGGINGFACE = Format[Layout](
    name='huggingface',
    suffix='.safetensors',
    matches=lambda names: any(map(_KNOWN.fullmatch, names)),
    parse=_parse,
    rules=_rules,
    usual_layout=_usual_layout,
    notes=_notes,
    description=_description,
    positions=('learned', 'rope'),
    file_name='model.safetensors',
    files_beside=lambda config, card: {
        'preprocessor_config.json': huggingface_processor.written(config, card.preprocessing),
    },
)
