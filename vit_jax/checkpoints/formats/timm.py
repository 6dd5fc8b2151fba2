"""The layout of timm (PyTorch image models), and of Meta's own DINOv2: fused projections, `fc1`.

Arrays alone do not say which activation, epsilon or pooling a network has. timm's config.json has
the name of the architecture, which does, the arguments that changed it, and the preprocessing.
"""

import dataclasses
import functools
import re
from collections.abc import Collection, Mapping
from typing import Any

from vit_jax.base import UserError, require
from vit_jax.checkpoints.card import Card, Hints
from vit_jax.checkpoints.formats import base, inference, name_map, open_clip
from vit_jax.checkpoints.formats.array_files import FileContents, LazyArray
from vit_jax.checkpoints.formats.base import (
    Format,
    ParsedCheckpoint,
    described,
    part,
)
from vit_jax.checkpoints.formats.inference import NeedsHint
from vit_jax.checkpoints.formats.name_map import NO_CLASS_ROW, SAME, NameRule
from vit_jax.checkpoints.formats.timm_config import (
    GELUS,
    NO_FUNCTION,
    POOLS,
    Architecture,
    Arguments,
    Description,
    Pretrained,
    architecture,
    is_of_meta,
    preprocessing,
    require_same,
    require_supported,
    usual,
    was_trained_with_quick_gelu,
)
from vit_jax.models import Pool, ViTConfig

_KNOWN = re.compile(r'(.*\.)?(patch_embed\.proj\.weight|blocks\.0\.attn\.qkv\..*)')
_ROOTS = {True: 'patch_embed.backbone.stem', False: 'patch_embed.backbone'}
_UNIT = 'patch_embed.backbone.stages.{stage0}.blocks.{unit0}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(base.Layout):
    """How these files differ among themselves."""

    eva: bool = False  # names of timm's class Eva: gamma_1, q_bias, fc1_g
    split_bias: bool = False  # q_bias and v_bias, and none of keys
    registers: str = 'reg_token'
    gated: tuple[str, str] = ('fc1', 'fc2')  # a SwiGLU's, whose first one is gate and value


_DINOV3 = Layout(eva=True, split_bias=True, zeros=('blocks.{layer0}.attn.k_bias',))


def _rules(config: ViTConfig, layout: Layout) -> list[NameRule]:
    block, ours = 'blocks.{layer0}', 'encoder/block'
    without_row = config.positioned_prefix == 1 and not layout.class_row
    module = functools.partial(name_map.torch_module, num_heads=config.num_heads)
    projections = [f'{ours}/attention/{name}' for name in ('query', 'key', 'value')]
    qkv = module(f'{block}.attn.qkv', *projections)
    if layout.split_bias:
        qkv = [rule for rule in qkv if not rule.theirs.endswith('bias')]
        for letter, name in zip('qkv', projections, strict=True):
            *_, bias = module('', name)
            qkv.append(bias._replace(theirs=f'{block}.attn.{letter}_bias'))
    scales = ('gamma_1', 'gamma_2') if layout.eva else ('ls1.gamma', 'ls2.gamma')
    rules = [
        *module('patch_embed.proj', 'embedding'),
        NameRule('cls_token', ('cls',)),
        NameRule('dist_token', ('dist',)),
        NameRule(layout.registers, ('registers',)),
        NameRule('pos_embed', ('pos_embedding',), NO_CLASS_ROW if without_row else SAME),
        *module('norm_pre', 'pre_norm'),
        *module(f'{block}.norm1', f'{ours}/norm1'),
        *module(f'{block}.norm2', f'{ours}/norm2'),
        *qkv,
        *module(f'{block}.attn.proj', f'{ours}/attention/out'),
        NameRule(f'{block}.{scales[0]}', (f'{ours}/attention_scale',)),
        NameRule(f'{block}.{scales[1]}', (f'{ours}/mlp_scale',)),
        *_mlp_rules(config, layout, block),
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


def _mlp_rules(config: ViTConfig, layout: Layout, block: str) -> list[NameRule]:
    module, theirs, ours = name_map.torch_module, f'{block}.mlp', 'encoder/block/mlp'
    first, second = layout.gated if config.gelu is None else ('fc1', 'fc2')
    rules = module(f'{theirs}.{second}', f'{ours}/dense2')
    if config.gelu is not None:
        return rules + module(f'{theirs}.{first}', f'{ours}/dense1')
    if layout.eva:
        gate, value = f'{theirs}.fc1_g', f'{theirs}.fc1_x'
        return rules + module(gate, f'{ours}/gate') + module(value, f'{ours}/dense1')
    return rules + module(f'{theirs}.{first}', f'{ours}/gate', f'{ours}/dense1')


def _arguments(config: ViTConfig, layout: Layout) -> dict[str, Any]:
    """What timm's create_model is to be given for this network, where it is not a default."""
    act = {'tanh': 'gelu_tanh', 'quick': 'quick_gelu'}.get(config.gelu or '')
    arguments: dict[str, Any] = {'act_layer': act} if act else {}
    if config.positioned_prefix == 1 and not layout.class_row and not layout.eva:
        arguments['no_embed_class'] = True
    if config.pool not in ('cls', 'cls_dist') or layout.eva:
        pools = {ours: theirs for theirs, ours in POOLS.items()}
        arguments['global_pool'] = pools.get(config.pool, 'token')
    if config.positioned_prefix == 0:
        arguments['class_token'] = False
    if (config.final_norm == 'after_pool') != (config.pool == 'gap'):
        arguments['fc_norm'] = config.final_norm == 'after_pool'
    if config.registers:
        arguments['num_reg_tokens' if layout.eva else 'reg_tokens'] = config.registers
    if f'{layout.prefix}blocks.{{layer0}}.attn.qkv.bias' in layout.zeros:
        arguments['qkv_bias'] = False
    if config.pre_norm:
        arguments['pre_norm'] = True
    if config.layer_scale is not None:
        arguments['init_values'] = config.layer_scale
    return arguments


def _description(config: ViTConfig, card: Card, layout: Layout) -> dict[str, Any]:
    if config.pool == 'cls_gap':
        raise UserError('the timm layout has no head of the class token and the mean together')
    arguments = _arguments(config, layout)
    if config.gelu is None:
        arguments['act_layer'] = 'silu'
    name = 'vit_base_patch16_dinov3' if config.positions == 'rope' else ''
    pool = arguments.get('global_pool', 'token')
    arguments['img_size'] = config.image_size
    return {'architecture': name, 'global_pool': pool, 'model_args': arguments}


def _notes(config: ViTConfig, card: Card, layout: Layout) -> list[str]:
    """The arguments with which timm builds this network, where they are not its defaults."""
    arguments = [f'{name}={value!r}' for name, value in _arguments(config, layout).items()]
    if config.gelu is None and not layout.eva:
        arguments.append('mlp_layer=SwiGLUPacked, act_layer=SiLU')
    if config.layer_norm_epsilon != 1e-6:
        arguments.append(f'norm_layer=partial(LayerNorm, eps={config.layer_norm_epsilon:g})')
    of = '...'
    if config.positions == 'rope':
        of = f"'vit_..._dinov3{'_qkvb' if layout.split_bias else ''}'"
    of = "'deit_..._distilled_...'" if config.pool == 'cls_dist' else of
    if not arguments and of == '...':
        return []
    return [f'in timm: create_model({", ".join([of, *arguments])})']


def _parse(clues: FileContents, hints: Hints) -> ParsedCheckpoint[Layout]:
    declared: dict[str, Any] = clues.description('config.json')
    where = 'config.json'
    prefix = next(match[1] or '' for name in clues.arrays if (match := _KNOWN.fullmatch(name)))
    tower = open_clip.timm_tower(clues) if prefix.startswith('visual.') else {}
    if tower:
        declared, where = tower, 'open_clip_config.json'
    right = f"{where} is not timm's, as the arrays are: it has no architecture"
    require(not declared or isinstance(declared.get('architecture'), str), right)
    stated = part(declared, 'model_args', where=where)
    arguments = described(Arguments, stated, where=f'{where}.model_args')
    strange = {*stated} - {*vars(arguments)}
    strange = {n for n in strange if stated[n] is not None and not NO_FUNCTION.fullmatch(n)}
    odd = ', '.join(f'{name}={stated[name]!r}' for name in sorted(strange))
    require(not strange, f'{where}.model_args: {odd} is not supported')
    inside = {n.removeprefix(prefix): a for n, a in clues.arrays.items() if n.startswith(prefix)}
    pretrained, taken = Pretrained.read(declared, where=where), ''
    if not declared:
        pretrained, taken = usual(inside)
    description = described(Description, declared, where=where)
    architecture, _, tag = description.architecture.partition('.')
    description.architecture, pretrained.tag = architecture, pretrained.tag or tag
    require_supported(description.architecture, inside)
    known = _known(clues, hints, inside, arguments, pretrained, description)
    clues = clues._replace(arrays=inside)
    declared_size = _declared(inside, arguments, pretrained)
    layout = _layout(inside, known, arguments, prefix)
    config, layout = _infer(clues, hints, declared_size, layout, known, arguments, description)
    halves = 2 if config.gelu is None and not layout.eva else 1
    require_same(config, arguments, pretrained, description, halves=halves)
    names = description.label_names or description.labels
    fits = len(names) in (0, config.num_classes)
    require(fits, f'{where}: {len(names)} label_names for {config.num_classes} classes')
    ignored = re.escape(prefix) + 'mask_token'  # of masked pre-training
    if tower:  # beside that of text
        ignored += r'|(?!visual\.).*'
    # CLIP's projection has no bias: timm gives it one of zeros.
    projects = config.pre_norm and config.num_classes and not inside['head.bias'].read().any()
    return ParsedCheckpoint(
        config,
        layout,
        preprocessing(pretrained),
        names,
        ignored=ignored,
        loss='contrastive' if projects else None,
        remarks=(f'no config.json: {taken}',) if taken else (),
    )


def _known(
    clues: FileContents,
    hints: Hints,
    arrays: Collection[str],
    arguments: Arguments,
    pretrained: Pretrained,
    description: Description,
) -> Architecture:
    """What the name of the architecture says, changed by the arguments."""
    name = description.architecture
    known = architecture(name)
    if not name and 'norm_pre.weight' in arrays:
        known = known._replace(epsilon=1e-5)
        if hints.gelu is None:
            raise NeedsHint('without config.json: say gelu=quick, as OpenAI trained, or gelu=exact')
    if arguments.num_heads is not None:
        known = known._replace(num_heads=arguments.num_heads)
    if arguments.act_layer in GELUS:
        return known._replace(gelu=GELUS[arguments.act_layer])
    if was_trained_with_quick_gelu(name, pretrained.tag):
        described_as = clues.description('open_clip_config.json')
        beside = part(described_as, 'model_cfg', where='open_clip_config.json')
        if beside.get('quick_gelu') is True:
            return known._replace(gelu='quick')
        if hints.gelu is None:
            raise NeedsHint(
                f'{name}.{pretrained.tag} was trained with QuickGELU, but timm computes this '
                'architecture with the exact one: say gelu=quick, as it was trained, or gelu=exact'
            )
    return known


def _declared(
    arrays: Mapping[str, LazyArray], arguments: Arguments, pretrained: Pretrained
) -> tuple[int, int] | None:
    """The size of images, which the preprocessing of fine-tuned networks may not say rightly."""
    size = arguments.img_size or (pretrained.input_size and pretrained.input_size[1:])
    if size is None or not {'patch_embed.proj.weight', 'pos_embed'} <= arrays.keys():
        return size
    height, width = size
    p, q, _, _ = inference.kernel_shape(arrays, 'patch_embed.proj.weight')
    rows = inference.shape_of(arrays, 'pos_embed', 3)[1] - (height // p) * (width // q)
    if 'reg_token' in arrays and rows == arrays['reg_token'].shape[1] + ('cls_token' in arrays):
        raise UserError('its registers have positions, which is not supported')
    return size if 0 <= rows <= 2 or arguments.img_size else None


def _layout(
    arrays: Mapping[str, LazyArray], known: Architecture, arguments: Arguments, prefix: str
) -> Layout:
    """How the arrays are named; whether positions have a class row is not known yet."""
    split_bias = 'blocks.0.attn.q_bias' in arrays
    zeros = ['blocks.{layer0}.attn.k_bias'] if split_bias else []
    may_lack = not known.qkv_bias or arguments.qkv_bias is False
    if may_lack and not split_bias and 'blocks.0.attn.qkv.bias' not in arrays:
        zeros.append('blocks.{layer0}.attn.qkv.bias')
    return Layout(
        prefix=prefix,
        zeros=tuple(prefix + name for name in zeros),
        eva=bool({'blocks.0.gamma_1', 'blocks.0.mlp.fc1_g.weight'} & arrays.keys()),
        split_bias=split_bias,
        registers='register_tokens' if 'register_tokens' in arrays else 'reg_token',
        gated=('w12', 'w3') if 'blocks.0.mlp.w12.weight' in arrays else ('fc1', 'fc2'),
    )


def _infer(
    clues: FileContents,
    hints: Hints,
    declared_size: tuple[int, int] | None,
    layout: Layout,
    known: Architecture,
    arguments: Arguments,
    description: Description,
) -> tuple[ViTConfig, Layout]:
    """The network, and the layout with what its positions show."""
    inside = clues.arrays
    root = next((r for r in _ROOTS.values() if f'{r}.conv.weight' in inside), '')
    first, second = (f'blocks.0.mlp.{name}.weight' for name in layout.gated)
    _, mlp_dim = inference.shape_of(inside, second, 2)
    gated = first not in inside or inside[first].shape[0] == 2 * mlp_dim
    registers = inside[layout.registers].shape[1] if layout.registers in inside else 0
    pools = [p for p in (description.global_pool, arguments.global_pool) if p is not None]
    pool, class_tokens = _pool(inside, next(iter(pools), None))
    wrong = f'config.json says global_pool={pools}, once for itself and once within model_args'
    require(len({*pools}) < 2, wrong)
    resize = known.position_resize
    if not clues.description('config.json') and is_of_meta(inside):
        resize = 'bicubic_antialias' if registers else 'bicubic_offset'
    defaults = Hints(num_heads=known.num_heads, gelu=known.gelu, layer_norm_epsilon=known.epsilon)
    hints = inference.with_defaults(hints, defaults)
    options: dict[str, Any] = {'gelu': None} if gated else {}
    options |= {'positions': 'rope'} if known.rope else {}
    config, row = inference.infer_config(
        inside,
        hints,
        image_size=declared_size,
        embedding='patch_embed.proj.weight',
        root=f'{root}.conv.weight',
        unit=_UNIT,
        table=None if known.rope else 'pos_embed',
        rows=_rows(class_tokens, arguments),
        depth=inference.count_layers(inside, r'blocks\.(\d+)\.'),
        mlp_dim=mlp_dim,
        num_classes=inference.length_of(inside, 'head.bias'),
        pool=pool,
        class_tokens=class_tokens if pool not in ('cls', 'cls_dist') and class_tokens else None,
        registers=registers,
        pre_norm='norm_pre.weight' in inside,
        layer_scale=_layer_scale(inside, arguments),
        final_norm='after_pool' if 'fc_norm.weight' in inside else 'before_pool',
        representation_size=inference.length_of(inside, 'pre_logits.fc.bias'),
        position_resize=resize,
        **options,
    )
    return config, dataclasses.replace(layout, class_row=bool(row) or class_tokens == 0)


def _pool(arrays: Mapping[str, LazyArray], stated: str | None) -> tuple[Pool, int]:
    """What the head reads, and the number of class tokens: of the arrays, where nothing says it."""
    tokens = ('cls_token' in arrays) + ('dist_token' in arrays)
    found = 'map' if 'attn_pool.latent' in arrays else 'token'
    if found == 'token' and (not tokens or 'fc_norm.weight' in arrays):
        found = 'avg'
    stated = found if stated is None else stated
    known = ', '.join(map(repr, POOLS))
    require(stated in POOLS, f'global_pool={stated!r} is not supported: expected one of {known}')
    fits = (stated == 'map') == (found == 'map') and (stated != 'token' or tokens > 0)
    require(fits, f'global_pool={stated!r}: its arrays are those of global_pool={found!r}')
    if tokens < 2:
        return POOLS[stated], tokens
    require(stated == 'token', f'global_pool={stated!r} beside a distillation token')
    return 'cls_dist', 2


def _rows(class_tokens: int, arguments: Arguments) -> tuple[int, ...]:
    """How many positions there may be before those of the patches, the usual number first."""
    if class_tokens == 1 and arguments.no_embed_class is None:
        return 1, 0
    return (0,) if arguments.no_embed_class else (class_tokens,)


def _layer_scale(arrays: Mapping[str, LazyArray], arguments: Arguments) -> float | None:
    scales = 'blocks.0.ls1.gamma', 'blocks.0.gamma_1'
    found = any(name in arrays for name in scales)
    wrong = f'config.json.model_args says init_values={arguments.init_values}, no array has them'
    require(found or not arguments.init_values, wrong)
    return (arguments.init_values or 1e-5) if found else None


TIMM = Format[Layout](
    name='timm',
    suffix='.safetensors',
    matches=lambda names: any(map(_KNOWN.fullmatch, names)),
    parse=_parse,
    rules=_rules,
    usual_layout=lambda config: _DINOV3 if config.positions == 'rope' else Layout(),
    notes=_notes,
    description=_description,
    positions=('learned', 'rope'),
)
