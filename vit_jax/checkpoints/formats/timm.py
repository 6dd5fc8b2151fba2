"""The format of timm (PyTorch image models), and of Meta's own DINOv2: joined projections, `fc1`.

timm's config.json names an architecture and the arguments that changed it, not the sizes. Sizes
come from the arrays unless an argument states them. The activation, the epsilon and other options
come from the name. These facts were verified for all names of timm 1.0.31
(tests/checkpoints/formats/test_timm_names.py).
"""

import dataclasses
import functools
import re
from typing import Any, Literal

from vit_jax.base import Record, require, require_between
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
# Parts of names in some files: of timm's class Eva, and of DINOv2 as Meta publishes it.
_VARIANTS = {'gamma_1', 'q_bias', 'fc1_g', 'w12', 'register_tokens'}

GELUS: dict[str, Gelu] = {'gelu_tanh': 'tanh', 'gelu': 'exact', 'quick_gelu': 'quick'}
POOLS: dict[str, Pool] = {'token': 'cls', 'avg': 'gap', 'map': 'map', '': 'none'}  # by global_pool
# Fields of `ViTConfig` that names and shapes of arrays do not show.
_OPTIONS = 'gelu', 'layer_norm_epsilon', 'pool', 'final_norm', 'registers', 'positions', 'pre_norm'
# Of `pretrained_cfg`, which older files have at the top: its keys, and timm's defaults of others.
_PRETRAINED = {'tag', 'input_size', 'interpolation', 'crop_pct', 'crop_mode', 'mean', 'std'}
_DEFAULTS: dict[str, Any] = {'mean': base.IMAGENET[0], 'std': base.IMAGENET[1], 'crop_pct': 0.875}
# Arguments that change no outputs: dropout, and how parameters are initialized.
_NO_EFFECT = r'(.*_)?drop(_path)?_rate|weight_init|fix_init|dynamic_img_size'
_TANH = re.compile(
    r'vit_(base_patch32_siglip(_gap)?_256|large_patch16_siglip(_gap)?_512'
    r'|so400m_patch16_siglip(_gap)?_(256|384|512)|giantopt_patch16_siglip(_gap)?_(256|384))'
)
# Weights that were trained with QuickGELU, and that timm publishes under a name with the exact GELU
# as well.
_QUICK = re.compile(
    r'vit_\w+_clip_\d+ (openai|metaclip_400m|metaclip_2pt5b|dfn5b)|vit_large_\w+ dfn2b'
    r'|vit_huge_patch14_clip_224 metaclip2_worldwide|vit_base_patch32_\w+ laion400m_e32'
)
_ROPE = re.compile(r'.*_(dinov3|dinov3_qkvb|lingbot)')
_HEADS = {'vit_base_patch16_gap_224': 16, 'vit_huge_plus_patch16_dinov3': 20}
_HEADS |= {'vit_huge_plus_patch16_dinov3_qkvb': 20}
# The excluded architectures have the same arrays, but other norms, rotations or patches.
_SUPPORTED = re.compile(
    r'(?!vit_pe_|.*(_rpn_|_rope_|_radio_|sapiens2))(deit3?|eva|flexivit|test_vit\d?|vit)(_.*)?'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(base.Layout):
    """How the files differ."""

    variants: tuple[str, ...] = ()  # of _VARIANTS

    @property
    def mlp(self) -> tuple[str, str]:
        """The names of an MLP's two layers; the first one of a SwiGLU may be `fc1_g`, `fc1_x`."""
        return ('w12', 'w3') if 'w12' in self.variants else ('fc1', 'fc2')


_DINOV3 = Layout(variants=('fc1_g', 'gamma_1', 'q_bias'), zeros=('blocks.{layer0}.attn.k_bias',))


@dataclasses.dataclass
class _Arguments(Record):
    """`model_args` in config.json: with what the architecture was created."""

    img_size: tuple[int, int] | None = None
    patch_size: tuple[int, int] | None = None
    in_chans: int | None = None
    num_classes: int | None = None
    global_pool: Literal['token', 'avg', 'map', ''] | None = None
    embed_dim: int | None = None
    depth: int | None = None
    num_heads: int | None = None
    mlp_ratio: float | None = None
    qkv_bias: bool | None = None
    init_values: float | None = None
    class_token: bool | None = None
    reg_tokens: int | None = None
    num_reg_tokens: int | None = None  # of the class Eva
    no_embed_class: bool = False
    pre_norm: bool | None = None
    fc_norm: bool | None = None
    act_layer: Literal['gelu', 'gelu_tanh', 'quick_gelu', 'silu'] | None = None

    def check(self) -> None:
        require_between(self, 'mlp_ratio', above=0, high=1024)


@dataclasses.dataclass
class _Description(Record):
    """config.json and its `pretrained_cfg`; if that is absent, images are prepared as usual."""

    architecture: str = ''
    tag: str = ''
    num_classes: int | None = None
    global_pool: Literal['token', 'avg', 'map', ''] | None = None
    label_names: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()  # an older name of `label_names`
    input_size: tuple[int, int, int] | None = None  # channels, height, width
    interpolation: Literal['bilinear', 'bicubic', 'lanczos'] = 'bicubic'
    crop_pct: float = 0.9
    crop_mode: Literal['center', 'squash'] = 'center'
    mean: base.Scaling = base.HALF
    std: base.Scaling = base.HALF

    def check(self) -> None:
        require_between(self, 'crop_pct', low=1 / 16, high=1)
        require_between(self, 'input_size', low=1)
        base.check_scaling(self, 'mean', 'std')


def _rules(config: ViTConfig, layout: Layout) -> list[NameRule]:
    block, ours = 'blocks.{layer0}', 'encoder/block'
    module = functools.partial(name_map.torch_module, num_heads=config.num_heads)
    projections = [f'{ours}/attention/{name}' for name in ('query', 'key', 'value')]
    qkv = module(f'{block}.attn.qkv', *projections)
    if 'q_bias' in layout.variants:
        qkv = qkv[:-1]
        for letter, name in zip('qkv', projections, strict=True):
            qkv += module(f'{block}.attn.{letter}', name, separator='_')[-1:]
    scale = 'gamma_{}' if 'gamma_1' in layout.variants else 'ls{}.gamma'
    registers = 'register_tokens' if 'register_tokens' in layout.variants else 'reg_token'
    adds_row = config.positioned_prefix == 1 and not layout.class_row
    rules = [
        *module('patch_embed.proj', 'embedding'),
        NameRule('cls_token', ('cls',)),
        NameRule('dist_token', ('dist',)),
        NameRule(registers, ('registers',)),
        NameRule('pos_embed', ('pos_embedding',), NO_CLASS_ROW if adds_row else SAME),
        *module('norm_pre', 'pre_norm'),
        *module(f'{block}.norm1', f'{ours}/norm1'),
        *module(f'{block}.norm2', f'{ours}/norm2'),
        *qkv,
        *module(f'{block}.attn.proj', f'{ours}/attention/out'),
        NameRule(f'{block}.{scale.format(1)}', (f'{ours}/attention_scale',)),
        NameRule(f'{block}.{scale.format(2)}', (f'{ours}/mlp_scale',)),
        *_mlp_rules(config, layout, f'{block}.mlp', f'{ours}/mlp'),
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


def _mlp_rules(config: ViTConfig, layout: Layout, theirs: str, ours: str) -> list[NameRule]:
    module, (first, second) = name_map.torch_module, layout.mlp
    rules = module(f'{theirs}.{second}', f'{ours}/dense2')
    if config.gelu is not None:
        return rules + module(f'{theirs}.{first}', f'{ours}/dense1')
    if 'fc1_g' in layout.variants:
        gate, value = f'{theirs}.fc1_g', f'{theirs}.fc1_x'
        return rules + module(gate, f'{ours}/gate') + module(value, f'{ours}/dense1')
    return rules + module(f'{theirs}.{first}', f'{ours}/gate', f'{ours}/dense1')


def _parse(contents: FileContents, hints: Hints) -> ParsedCheckpoint[Layout]:
    prefix = next(m[1] or '' for name in contents.arrays if (m := _KNOWN.fullmatch(name)))
    arrays = {n.removeprefix(prefix): a for n, a in contents.arrays.items() if n.startswith(prefix)}
    stated = contents.description('config.json')
    ignored = f'{re.escape(prefix)}mask_token'  # of masked pre-training
    if prefix.startswith('visual.'):
        stated = open_clip.timm_description(contents) or stated
        ignored += r'|(?!visual\.).*'  # the text tower
    arguments = stated.part('model_args').record(_Arguments, ignored=_NO_EFFECT)
    pretrained, remarks = stated.part('pretrained_cfg'), list[str]()
    merged = JsonObject({**pretrained, **stated}, stated.where)
    says_preparation = bool(pretrained) or not _PRETRAINED.isdisjoint(stated)
    described = merged.record(_Description, defaults=_DEFAULTS if says_preparation else {})
    if not stated:
        described, remark = _assume(arrays)
        remarks.append(remark)
    named = described.architecture != '' or not stated
    require(named, f"{stated.where}: it has no architecture, so it is not timm's; the arrays are")
    config, layout = _build_config(prefix, arrays, hints, arguments, described)
    # CLIP's projection has no bias: timm gives it a bias of zeros.
    bias = arrays.get('head.bias')
    projects = bias is not None and config.pre_norm and not bias.read().any()
    preprocessing = base.timm_preprocessing(
        described.mean,
        described.std,
        interpolation=described.interpolation,
        keep_aspect=described.crop_mode == 'center',
        crop_pct=described.crop_pct,
    )
    return ParsedCheckpoint(
        config,
        layout,
        preprocessing,
        described.label_names or described.labels,
        ignored=ignored,
        loss='contrastive' if projects else None,
        remarks=tuple(remarks),
    )


def _assume(arrays: Arrays) -> tuple[_Description, str]:
    """Returns how images are prepared for a file without config.json, and a remark about that."""
    if 'mask_token' in arrays:
        described = _Description(**_DEFAULTS)
        return described, 'no config.json: images are prepared as for DINOv2'
    if 'norm_pre.weight' in arrays:
        described = _Description(mean=base.CLIP[0], std=base.CLIP[1])
        return described, 'no config.json: images are prepared as for CLIP'
    text = 'no config.json: assumed the usual GELU, epsilon, pooling and preprocessing of ViTs'
    return _Description(), text


def _build_config(
    prefix: str, arrays: Arrays, hints: Hints, arguments: _Arguments, described: _Description
) -> tuple[ViTConfig, Layout]:
    """Returns the model: of the arguments, of facts of its name, and of sizes of the arrays."""
    name, _, tag = described.architecture.partition('.')
    is_known = not name or _SUPPORTED.fullmatch(name) is not None
    require(is_known, f'{name}: this architecture of timm is not supported')
    parts = {part for array in arrays for part in array.split('.')}
    layout = Layout(prefix=prefix, variants=tuple(sorted(_VARIANTS & parts)))
    has_bias = any(array.endswith('attn.qkv.bias') for array in arrays)
    absent = '' if _first(arguments.qkv_bias, has_bias) else 'qkv.bias'
    absent = 'k_bias' if 'q_bias' in layout.variants else absent
    zeros = (f'{prefix}blocks.{{layer0}}.attn.{absent}',) if absent else ()
    positions = {'positions': 'rope'} if _ROPE.fullmatch(name) else {}
    num_tokens = ('cls_token' in arrays) + ('dist_token' in arrays)
    config, row = inference.infer_config(
        arrays,
        _add_facts(name, described.tag or tag, arrays, hints, arguments),
        axes='OIHW',
        embedding='patch_embed.proj.weight',
        root=next((r for root in _ROOTS.values() if (r := f'{root}.conv.weight') in arrays), ''),
        unit=_UNIT,
        table=None if positions else 'pos_embed',
        rows=(0,) if arguments.no_embed_class else (num_tokens, 0),
        image_size=_first(arguments.img_size, described.input_size and described.input_size[1:]),
        **positions,
        **_options(name, arrays, arguments, described) | _mlp(arrays, arguments, layout),
    )
    class_row = bool(row) or num_tokens == 0
    return config, dataclasses.replace(layout, class_row=class_row, zeros=zeros)


def _first(*values: Any) -> Any:
    """Returns the first value that is not None: what is stated comes before what is inferred."""
    return next((value for value in values if value is not None), None)


def _add_facts(name: str, tag: str, arrays: Arrays, hints: Hints, arguments: _Arguments) -> Hints:
    """Returns the hints, completed by arguments and by what the name of the architecture says."""
    has_clip_name = '_clip_' in name and not name.startswith('eva')
    is_clip = has_clip_name if name else 'norm_pre.weight' in arrays
    if arguments.act_layer is None and hints.gelu is None:
        way = 'say gelu=quick, as it was trained, or gelu=exact'
        if is_clip and not name:
            raise NeedsHint(f'no config.json: {way}')
        if _QUICK.fullmatch(f'{name} {tag}'):
            raise NeedsHint(f'{name}.{tag} was trained with QuickGELU, timm computes GELU: {way}')
    gelu: Gelu = 'quick' if '_quickgelu_' in name else 'tanh' if _TANH.fullmatch(name) else 'exact'
    defaults = Hints(
        num_heads=_HEADS.get(name),
        gelu=gelu,
        layer_norm_epsilon=1e-5 if is_clip or _ROPE.fullmatch(name) else 1e-6,
    )
    return inference.with_defaults(hints, defaults)


def _mlp(arrays: Arrays, arguments: _Arguments, layout: Layout) -> dict[str, Any]:
    """Returns the size of the MLPs, and gelu=None for SwiGLUs."""
    first, second = (f'blocks.0.mlp.{name}.weight' for name in layout.mlp)
    width, mlp_dim = inference.shape_of(arrays, second, 2)
    is_joined = first in arrays and arrays[first].shape[0] == 2 * mlp_dim
    is_gated = is_joined or 'fc1_g' in layout.variants
    if arguments.mlp_ratio is not None:  # if joined, of gate and value together
        mlp_dim = int(width * arguments.mlp_ratio) // (2 if is_joined else 1)
    if arguments.act_layer is not None:
        is_gated = arguments.act_layer == 'silu'
    return {'mlp_dim': mlp_dim} | ({'gelu': None} if is_gated else {})


def _options(
    name: str, arrays: Arrays, arguments: _Arguments, described: _Description
) -> dict[str, Any]:
    """Returns other fields of `ViTConfig`."""
    inferred = 'map' if 'attn_pool.latent' in arrays else 'token'
    if inferred == 'token' and ('cls_token' not in arrays or 'fc_norm.weight' in arrays):
        inferred = 'avg'
    pool: Pool = POOLS[_first(arguments.global_pool, described.global_pool, inferred)]
    pool = 'cls_dist' if pool == 'cls' and 'dist_token' in arrays else pool
    tokens = next((n for n in ('reg_token', 'register_tokens') if n in arrays), None)
    registers = arrays[tokens].shape[1] if tokens else 0
    resize: PositionResize = 'bicubic_antialias'
    if not name and 'mask_token' in arrays and not registers:  # as Meta resizes them
        resize = 'bicubic_offset'
    has_scale = any(array in arrays for array in ('blocks.0.ls1.gamma', 'blocks.0.gamma_1'))
    has_class_token = _first(arguments.class_token, 'cls_token' in arrays)
    after_pool = _first(arguments.fc_norm, 'fc_norm.weight' in arrays)
    head = inference.length_of(arrays, 'head.bias')
    options = {
        'width': arguments.embed_dim,
        'patch_size': arguments.patch_size,
        'num_heads': arguments.num_heads,
        'gelu': GELUS.get(arguments.act_layer or ''),
        'channels': _first(arguments.in_chans, described.input_size and described.input_size[0]),
        'depth': _first(arguments.depth, inference.count_layers(arrays, r'blocks\.(\d+)\.')),
        'pool': pool,
        'class_tokens': 1 if has_class_token and pool not in ('cls', 'cls_dist') else None,
        'registers': _first(arguments.reg_tokens, arguments.num_reg_tokens, registers),
        'pre_norm': _first(arguments.pre_norm, 'norm_pre.weight' in arrays),
        'layer_scale': arguments.init_values or (1e-5 if has_scale else None),
        'final_norm': 'after_pool' if after_pool else 'before_pool',
        'representation_size': inference.length_of(arrays, 'pre_logits.fc.bias'),
        'position_resize': 'bilinear_edges' if name.startswith('flexivit') else resize,
    }
    options = {field: value for field, value in options.items() if value is not None}
    num_classes = _first(arguments.num_classes, described.num_classes, head)
    return options | {'num_classes': num_classes or None}


def _notes(config: ViTConfig, card: Card, layout: Layout) -> list[str]:
    """Returns the options that are not timm's defaults."""
    require(config.pool != 'cls_gap', 'the timm format has no pool=cls_gap')
    usual = ViTConfig(gelu='exact')
    options = {name: getattr(config, name) for name in _OPTIONS}
    stated = [f'{name}={value}' for name, value in options.items() if value != getattr(usual, name)]
    stated += ['no_embed_class'] * (not layout.class_row and config.positions == 'learned')
    note = f'tell timm.create_model what the file does not say: {", ".join(stated)}'
    return [note] if stated else []


TIMM = Format[Layout](
    name='timm',
    suffix='.safetensors',
    matches=lambda names: any(map(_KNOWN.fullmatch, names)),
    parse=_parse,
    rules=_rules,
    usual_layout=lambda config: _DINOV3 if config.positions == 'rope' else Layout(),
    notes=_notes,
    positions=('learned', 'rope'),
)
