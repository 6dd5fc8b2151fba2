"""Reads and writes files of timm (PyTorch image models), and of DINOv2 as published by Meta.

timm's config.json contains the name of an architecture and arguments that change it, but no sizes.
Sizes and optional parts are inferred from the arrays. The activation, the epsilon and the number of
heads follow from the arguments and the name. tests/checkpoints/formats/test_timm_names.py verifies
this for all names of timm 1.0.31.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, Literal

from vit_jax.base import UserError, require, require_between
from vit_jax.checkpoints.card import Card, Hints
from vit_jax.checkpoints.formats import base, inference, name_map, open_clip
from vit_jax.checkpoints.formats.array_files import FileContents, JsonObject
from vit_jax.checkpoints.formats.base import Format, ParsedCheckpoint
from vit_jax.checkpoints.formats.inference import Arrays, NeedsHint
from vit_jax.checkpoints.formats.name_map import NO_CLASS_ROW, SAME, NameRule
from vit_jax.models import Gelu, Pool, ViTConfig
from vit_jax.models.config import PositionResize

_KNOWN = re.compile(r'(.*\.)?(patch_embed\.proj\.weight|blocks\.0\.attn\.qkv\..*)')
_ROOTS = {True: 'patch_embed.backbone.stem', False: 'patch_embed.backbone'}
_UNIT = 'patch_embed.backbone.stages.{stage0}.blocks.{unit0}'
# Parts of names that only some files have: files of timm's class Eva, and Meta's DINOv2. In
# the variant `reg_rows`, registers have rows in the position table.
_VARIANTS = {'gamma_1', 'q_bias', 'fc1_g', 'w12', 'register_tokens'}

# By act_layer; None: SwiGLU.
_GELUS: dict[str, Gelu | None] = {
    'gelu_tanh': 'tanh',
    'gelu': 'exact',
    'quick_gelu': 'quick',
    'silu': None,
}
_POOLS: dict[str, Pool] = {'token': 'cls', 'avg': 'gap', 'map': 'map', '': 'none'}  # by global_pool
_SUPPORTED_POOLS = *_POOLS.values(), 'cls_dist'
# Fields of `ViTConfig` that have only this value in timm.
_FIXED = {'parallel': False, 'norm': 'layer', 'qkv_bias': True, 'positions_at': 'stem'}
# Keys of the preprocessing, in `pretrained_cfg` or, in older files, at the top level; and timm's
# defaults.
_IMAGES = {'input_size', 'interpolation', 'crop_pct', 'crop_mode', 'mean', 'std'}
_DEFAULTS: dict[str, Any] = {'mean': base.IMAGENET[0], 'std': base.IMAGENET[1], 'crop_pct': 0.875}
# Arguments that are not needed: dropout, initialization, and parts that the arrays show.
_NO_EFFECT = (
    r'(.*_)?drop(_path)?_rate|weight_init|fix_init|init_values|dynamic_img_size|patch_size|in_chans'
    r'|embed_dim|mlp_ratio|qkv_bias|class_token|(num_)?reg_tokens|pre_norm|fc_norm'
)
# Keys outside of the arguments that are not needed.
_METADATA = (
    rf'{base.NO_EFFECT}|{_NO_EFFECT}|model_args|pretrained_cfg|num_features|label_descriptions'
    r'|(origin_)?url|file|source|hf_\w+|custom_load|(test|min|fixed)_input_size|first_conv'
    r'|test_crop_pct|classifier|(test_)?pool_size|license|description|paper_\w+|notes|do_pooling'
)
# Architectures with the tanh approximation of the GELU.
_TANH = re.compile(
    r'vit_(base_patch32_siglip(_gap)?_256|large_patch16_siglip(_gap)?_512'
    r'|so400m_patch16_siglip(_gap)?_(256|384|512)|giantopt_patch16_siglip(_gap)?_(256|384))'
)
# Weights trained with QuickGELU that timm also publishes under an architecture with the exact GELU.
_QUICK = re.compile(
    r'vit_\w+_clip_\d+ (openai|metaclip_400m|metaclip_2pt5b|dfn5b)|vit_large_\w+ dfn2b'
    r'|vit_huge_patch14_clip_224 metaclip2_worldwide|vit_base_patch32_\w+ laion400m_e32'
)
_ROPE = re.compile(r'.*_(dinov3|dinov3_qkvb|lingbot)')  # architectures with rotary positions
# Numbers of heads that the sizes do not determine, by architecture.
_HEADS = {
    'vit_base_patch16_gap_224': 16,
    'vit_huge_plus_patch16_dinov3': 20,
    'vit_huge_plus_patch16_dinov3_qkvb': 20,
}
# Features that are not supported, by architecture. The arrays of some have the same names.
_UNSUPPORTED = {
    r'beit(v2)?_.*|vit_s?relpos_.*|samvit_.*': 'relative positions',
    r'eva02_.*|vit_pe_.*|.*(_rope_|_sapiens2).*': "rotary positions that differ from DINOv3's",
    r'beit3_.*': 'a norm in the MLP',
    r'.*_rpn_.*': 'norms after attention and MLP',
    r'.*_radio_.*': 'its missing final norm',
    r'test_vit3': 'attention pooling of registers (pool_include_prefix)',
    r'(?!deit3?_|eva_|flexivit_|test_vit|vit_).*': 'layers of another kind',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(base.Layout):
    """Variant of these files."""

    variants: tuple[str, ...] = ()  # elements of _VARIANTS

    @property
    def mlp(self) -> tuple[str, str]:
        """The names of the two layers of an MLP; the gate of `fc1_x` is `fc1_g`."""
        if 'fc1_g' in self.variants:
            return 'fc1_x', 'fc2'
        if 'w12' in self.variants:
            return 'w12', 'w3'
        return 'fc1', 'fc2'


_DINOV3 = Layout(variants=('fc1_g', 'gamma_1', 'q_bias'), zeros=('blocks.{layer0}.attn.k_bias',))


@dataclasses.dataclass
class _Description(base.TimmPreprocessing):
    """Keys of config.json, `pretrained_cfg` and `model_args` that the arrays do not show."""

    architecture: str = ''
    tag: str = ''
    img_size: tuple[int, int] | None = None
    num_heads: int | None = None
    depth: int | None = None
    num_classes: int | None = None
    global_pool: Literal['token', 'avg', 'map', ''] | None = None
    no_embed_class: bool = False
    qk_norm: bool = False
    act_layer: Literal['gelu', 'gelu_tanh', 'quick_gelu', 'silu'] | None = None
    label_names: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()  # an older name of `label_names`
    input_size: tuple[int, int, int] | None = None  # channels, height, width
    crop_pct: float = 0.9
    crop_mode: Literal['center', 'squash'] = 'center'

    def check(self) -> None:
        require_between(self, 'crop_pct', low=1 / 16, high=1)
        super().check()


def make_rules(config: ViTConfig, layout: Layout) -> list[NameRule]:
    """Returns the name map of these files."""
    block = 'blocks.{layer0}'
    ours = 'encoder/block'
    module = functools.partial(name_map.torch_module, num_heads=config.num_heads)
    projections = [f'{ours}/attention/{name}' for name in ('query', 'key', 'value')]
    qkv = module(f'{block}.attn.qkv', *projections)
    if 'q_bias' in layout.variants:
        qkv = qkv[:-1]
        for letter, name in zip('qkv', projections, strict=True):
            qkv += module(f'{block}.attn.{letter}', name, separator='_')[-1:]
    scale = 'gamma_{}' if 'gamma_1' in layout.variants else 'ls{}.gamma'
    registers = 'register_tokens' if 'register_tokens' in layout.variants else 'reg_token'
    first, second = layout.mlp
    is_joined = config.gelu is None and first != 'fc1_x'
    names = ['gate', 'dense1'] if is_joined else ['dense1']
    adds_row = config.num_class_tokens == 1 and not layout.class_row
    rules = [
        *module('patch_embed.proj', 'embedding'),
        NameRule(registers if 'reg_rows' in layout.variants else 'cls_token', ('cls',)),
        NameRule('dist_token', ('dist',)),
        NameRule(registers, ('registers',)),
        NameRule('pos_embed', ('pos_embedding',), NO_CLASS_ROW if adds_row else SAME),
        *module('norm_pre', 'pre_norm'),
        *module(f'{block}.norm1', f'{ours}/norm1'),
        *module(f'{block}.norm2', f'{ours}/norm2'),
        *qkv,
        *module(f'{block}.attn.q_norm', f'{ours}/attention/query_norm'),
        *module(f'{block}.attn.k_norm', f'{ours}/attention/key_norm'),
        *module(f'{block}.attn.proj', f'{ours}/attention/out'),
        NameRule(f'{block}.{scale.format(1)}', (f'{ours}/attention_scale',)),
        NameRule(f'{block}.{scale.format(2)}', (f'{ours}/mlp_scale',)),
        *module(f'{block}.mlp.{first}', *(f'{ours}/mlp/{name}' for name in names)),
        *([] if is_joined else module(f'{block}.mlp.fc1_g', f'{ours}/mlp/gate')),
        *module(f'{block}.mlp.{second}', f'{ours}/mlp/dense2'),
        *module('norm', 'encoder/norm'),
        *module('fc_norm', 'norm'),
        NameRule('attn_pool.latent', ('pool/probe',)),
        *module('attn_pool.q', 'pool/attention/query'),
        *module('attn_pool.kv', 'pool/attention/key', 'pool/attention/value'),
        *module('attn_pool.proj', 'pool/attention/out'),
        *module('attn_pool.norm', 'pool/norm'),
        *module('attn_pool.mlp.fc1', 'pool/mlp/dense1'),
        *module('attn_pool.mlp.fc2', 'pool/mlp/dense2'),
        *module('pre_logits.fc', 'pre_logits'),
        *module('head', 'head/cls' if config.pool == 'cls_dist' else 'head'),
        *module('head_dist', 'head/dist'),
    ]
    if config.backbone is not None:
        root = _ROOTS[bool(config.backbone.blocks)]
        rules += name_map.torch_backbone(config, f'{root}.conv', f'{root}.norm', _UNIT)
    return [rule._replace(theirs=layout.prefix + rule.theirs) for rule in rules]


def _parse(contents: FileContents, hints: Hints) -> ParsedCheckpoint[Layout]:
    prefix = next(m[1] or '' for name in contents.arrays if (m := _KNOWN.fullmatch(name)))
    arrays = {n.removeprefix(prefix): a for n, a in contents.arrays.items() if n.startswith(prefix)}
    stated = contents.description('config.json')
    ignored = f'{re.escape(prefix)}mask_token'  # from masked pre-training
    if prefix.startswith('visual.'):
        stated = open_clip.timm_description(contents) or stated
        ignored += r'|(?!visual\.).*'  # the text tower
    arguments = stated.part('model_args')
    arguments.record(_Description, ignored=_NO_EFFECT)  # rejects other arguments
    pretrained = stated.part('pretrained_cfg')
    clip = contents.description('open_clip_config.json').part('model_cfg')  # may be there too
    activation = {'act_layer': 'quick_gelu'} if clip.get('quick_gelu') and not prefix else {}
    merged = JsonObject(
        activation | _without_none(pretrained) | _without_none(stated) | _without_none(arguments),
        stated.where,
    )
    defaults = _DEFAULTS if pretrained or not _IMAGES.isdisjoint(stated) else {}
    described = merged.record(_Description, ignored=_METADATA, defaults=defaults)
    remarks = []
    if not stated:
        described, models = _assume(arrays)
        remarks.append(f'no config.json: images are preprocessed as for {models}')
    require(described.architecture != '' or not stated, f'{stated.where}: architecture is missing')
    config, layout = _build_config(prefix, arrays, hints, described)
    # CLIP's projection has no bias; timm stores zeros.
    bias = arrays.get('head.bias')
    projects = bias is not None and config.pre_norm and not bias.read().any()
    return ParsedCheckpoint(
        config,
        layout,
        described.preprocessing(described.crop_mode, described.crop_pct),
        described.label_names or described.labels,
        ignored=ignored,
        loss='contrastive' if projects else None,
        remarks=tuple(remarks),
    )


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _assume(arrays: Arrays) -> tuple[_Description, str]:
    """Returns the preprocessing for a file without config.json, and the models that have it."""
    if 'mask_token' in arrays:
        return _Description(**_DEFAULTS), 'DINOv2'
    if 'norm_pre.weight' in arrays:
        return _Description(mean=base.CLIP[0], std=base.CLIP[1]), 'CLIP'
    return _Description(), "most ViTs; GELU, epsilon and pooling are assumed to be timm's defaults"


def _build_config(
    prefix: str, arrays: Arrays, hints: Hints, described: _Description
) -> tuple[ViTConfig, Layout]:
    """Builds the model: sizes and parts from the arrays, options from the description."""
    name, _, tag = described.architecture.partition('.')
    for pattern, feature in _UNSUPPORTED.items():
        if re.fullmatch(pattern, name or 'vit_'):
            raise UserError(f'timm model {name} is not supported because of {feature}')
    parts_of_names = {part for array in arrays for part in array.split('.')}
    layout = Layout(variants=tuple(sorted(_VARIANTS & parts_of_names)))
    attention = f'{prefix}blocks.{{layer0}}.attn'
    zeros: tuple[str, ...] = ()
    if 'q_bias' in layout.variants:
        zeros = (f'{attention}.k_bias',)
    elif not any(array.endswith('attn.qkv.bias') for array in arrays):
        zeros = (f'{attention}.qkv.bias',)
    options = _options(name, arrays, described, layout)
    num_tokens = len({'cls_token', 'dist_token'} & arrays.keys())
    registers = arrays['reg_token'].shape[1] if 'reg_token' in arrays and num_tokens == 0 else 0
    first_kernels = [f'{root}.conv.weight' for root in _ROOTS.values()]  # of hybrids
    config, num_rows = inference.infer_config(
        arrays,
        make_rules(ViTConfig(), layout),
        _add_facts(name, described.tag or tag, arrays, hints, described),
        root=next((kernel for kernel in first_kernels if kernel in arrays), ''),
        unit=_UNIT,
        rows=(0,) if described.no_embed_class else (num_tokens, 0, registers),
        image_size=described.img_size or (described.input_size and described.input_size[1:]),
        **options,
    )
    if registers and num_rows:  # stored as class tokens that no pool reads
        config = dataclasses.replace(config, registers=0, class_tokens=registers)
        layout = dataclasses.replace(layout, variants=(*layout.variants, 'reg_rows'))
    class_row = bool(num_rows) or num_tokens == 0
    return config, dataclasses.replace(layout, prefix=prefix, class_row=class_row, zeros=zeros)


def _add_facts(name: str, tag: str, arrays: Arrays, hints: Hints, described: _Description) -> Hints:
    """Fills missing hints with facts that follow from the name of the architecture."""
    has_clip_name = '_clip_' in name and not name.startswith('eva')
    is_clip = has_clip_name if name else 'norm_pre.weight' in arrays
    is_undecided = _QUICK.fullmatch(f'{name} {tag}') is not None if name else is_clip
    if is_undecided and described.act_layer is None and hints.gelu is None:
        raise NeedsHint(f'{name or "CLIP"}: GELU unknown; set gelu=quick (OpenAI) or exact (timm)')
    gelu: Gelu = 'exact'
    if '_quickgelu_' in name:
        gelu = 'quick'
    elif _TANH.fullmatch(name):
        gelu = 'tanh'
    defaults = Hints(
        num_heads=_HEADS.get(name),
        gelu=gelu,
        layer_norm_epsilon=1e-5 if is_clip or _ROPE.fullmatch(name) else 1e-6,
    )
    return inference.with_defaults(hints, defaults)


def _options(name: str, arrays: Arrays, described: _Description, layout: Layout) -> dict[str, Any]:
    """Returns fields of `ViTConfig` from the arrays and the description."""
    first, second = layout.mlp
    mlp_dim = inference.shape_of(arrays, f'blocks.0.mlp.{second}.weight', 2)[1]
    first_kernel = arrays.get(f'blocks.0.mlp.{first}.weight')
    is_joined = first_kernel is not None and first_kernel.shape[0] == 2 * mlp_dim
    is_gated = is_joined or 'fc1_g' in layout.variants
    inferred = 'map' if 'attn_pool.latent' in arrays else 'token'
    if inferred == 'token' and ('cls_token' not in arrays or 'fc_norm.weight' in arrays):
        inferred = 'avg'
    pool = _POOLS[inferred if described.global_pool is None else described.global_pool]
    pool = 'cls_dist' if pool == 'cls' and 'dist_token' in arrays else pool
    resize: PositionResize = 'bicubic_antialias'
    if name.startswith('flexivit'):
        resize = 'bilinear_edges'
    elif not name and 'mask_token' in arrays and 'register_tokens' not in layout.variants:
        resize = 'bicubic_offset'  # DINOv2 by Meta without registers
    options: dict[str, Any] = {
        'pool': pool,
        'class_tokens': 1 if 'cls_token' in arrays and pool not in ('cls', 'cls_dist') else None,
        'final_norm': 'after_pool' if 'fc_norm.weight' in arrays else 'before_pool',
        'position_resize': resize,
        'qk_norm': described.qk_norm or 'blocks.0.attn.q_norm.weight' in arrays,
    }
    stated = {name: getattr(described, name) for name in ('depth', 'num_heads', 'num_classes')}
    options |= {name: value or None for name, value in stated.items() if value is not None}
    if described.act_layer is not None or is_gated:
        options['gelu'] = _GELUS[described.act_layer or 'silu']
    if _ROPE.fullmatch(name):
        options['positions'] = 'rope'
    return options


def _notes(config: ViTConfig, card: Card, layout: Layout) -> list[str]:
    """Returns the options that the file does not state; rejects models that timm does not have."""
    for name, only in _FIXED.items():
        value = getattr(config, name)
        require(value == only, f'the timm format cannot hold {name}={value}; use format=vit_jax')
    require(
        config.pool in _SUPPORTED_POOLS,
        f'the timm format cannot hold pool={config.pool}; use format=vit_jax',
    )
    arguments = ', '.join(_model_arguments(config, layout))
    note = f'not stored in the file; pass to timm.create_model: {arguments}'
    return [note] if arguments else []


def _model_arguments(config: ViTConfig, layout: Layout) -> list[str]:
    """Returns arguments of timm's `VisionTransformer` that are not its defaults."""
    by_gelu = {gelu: name for name, gelu in _GELUS.items()}
    by_pool = {pool: name for name, pool in _POOLS.items()}
    pool = by_pool.get(config.pool, 'token')  # cls_dist: models such as deit_tiny_distilled
    has_fc_norm = config.final_norm == 'after_pool'
    epsilon = config.layer_norm_epsilon
    arguments = {
        f'act_layer={by_gelu[config.gelu]!r}': config.gelu != 'exact',
        f'norm_layer=functools.partial(timm.layers.LayerNorm, eps={epsilon!r})': epsilon != 1e-6,
        f'global_pool={pool!r}': pool != 'token',
        f'fc_norm={has_fc_norm}': has_fc_norm != (pool == 'avg'),  # timm's default
        f'reg_tokens={config.registers}': config.registers > 0,
        "pos_embed='none'": config.positions == 'none',
        'no_embed_class=True': not layout.class_row and config.positions == 'learned',
        'pre_norm=True': config.pre_norm,
        'qk_norm=True': config.qk_norm,
    }
    return [argument for argument, is_needed in arguments.items() if is_needed]


TIMM = Format[Layout](
    name='timm',
    suffix='.safetensors',
    matches=lambda names: any(map(_KNOWN.fullmatch, names)),
    parse=_parse,
    rules=make_rules,
    usual_layout=lambda config: _DINOV3 if config.positions == 'rope' else Layout(),
    notes=_notes,
    is_complete=False,
    positions=('learned', 'rope'),
)
