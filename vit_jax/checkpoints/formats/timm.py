"""The layout of timm (PyTorch image models): fused projections, fully connected `fc1` and `fc2`."""

import dataclasses
import functools
import re
from typing import Any

from vit_jax.base import Record, UserError, require_between
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats import inference, name_map
from vit_jax.checkpoints.formats.base import (
    HALF,
    Format,
    Layout,
    Recognised,
    Scaling,
    check_scaling,
    described,
    foreign_preprocessing,
)
from vit_jax.checkpoints.formats.inference import Clues, Hints
from vit_jax.checkpoints.formats.name_map import NO_CLASS_ROW, SAME, NameRule
from vit_jax.data.image_preprocessing import CentralCrop, Crop, Preprocessing, Resize, ResizeMethod
from vit_jax.models import Gelu, Pool, ViTConfig

_KNOWN = re.compile(r'(.*\.)?(patch_embed\.proj\.weight|blocks\.0\.attn\.qkv\..*)')
_ROOTS = {True: 'patch_embed.backbone.stem', False: 'patch_embed.backbone'}
_UNIT = 'patch_embed.backbone.stages.{stage0}.blocks.{unit0}'
_POOLS: dict[Pool, str] = {'cls': 'token', 'gap': 'avg', 'map': 'map', 'none': ''}
_GELUS: dict[Any, Gelu] = {'gelu_tanh': 'tanh', 'gelu': 'exact'}


@dataclasses.dataclass
class _Arguments(Record):
    """What is read of `model_args`."""

    num_heads: int | None = None
    act_layer: str | None = None

    def check(self) -> None:
        require_between(self, 'num_heads', low=1)


@dataclasses.dataclass
class _Pretrained(Record):
    """What is read of `pretrained_cfg`; by default as the converted ViTs are used."""

    interpolation: str | None = None
    crop_pct: float = 0.9
    crop_mode: str | None = None
    mean: Scaling = HALF
    std: Scaling = HALF

    def check(self) -> None:
        require_between(self, 'crop_pct', low=1 / 16, high=1)
        check_scaling(self, 'mean', 'std')


@dataclasses.dataclass
class _Description(Record):
    """What else is read of a config.json."""

    label_names: tuple[str, ...] = ()


def _rules(config: ViTConfig, layout: Layout) -> list[NameRule]:
    block, ours = 'blocks.{layer0}', 'encoder/block'
    positions = NO_CLASS_ROW if config.pool == 'cls' and not layout.class_row else SAME
    module = functools.partial(name_map.torch_module, num_heads=config.num_heads)
    rules = [
        *module('patch_embed.proj', 'embedding'),
        NameRule('cls_token', ('cls',)),
        NameRule('pos_embed', ('pos_embedding',), positions),
        *module(f'{block}.norm1', f'{ours}/norm1'),
        *module(f'{block}.norm2', f'{ours}/norm2'),
        *module(f'{block}.attn.qkv', *(f'{ours}/attention/{n}' for n in ('query', 'key', 'value'))),
        *module(f'{block}.attn.proj', f'{ours}/attention/out'),
        *module(f'{block}.mlp.fc1', f'{ours}/mlp/dense1'),
        *module(f'{block}.mlp.fc2', f'{ours}/mlp/dense2'),
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
        *module('head', 'head'),
    ]
    if config.backbone is not None:
        root = _ROOTS[bool(config.backbone.blocks)]
        rules += name_map.torch_backbone(config, f'{root}.conv', f'{root}.norm', _UNIT)
    return [rule._replace(theirs=layout.prefix + rule.theirs) for rule in rules]


def _notes(config: ViTConfig, card: Card, layout: Layout) -> list[str]:
    """The arguments with which timm builds this network, where they are not its defaults."""
    arguments = ["act_layer='gelu_tanh'"] if config.gelu == 'tanh' else []
    if config.layer_norm_epsilon != 1e-6:
        arguments.append(f'norm_layer=partial(LayerNorm, eps={config.layer_norm_epsilon:g})')
    if config.pool == 'cls' and not layout.class_row:
        arguments.append('no_embed_class=True')
    if config.pool != 'cls':
        arguments.append(f"global_pool='{_POOLS[config.pool]}', class_token=False")
    if (config.final_norm == 'after_pool') != (config.pool == 'gap'):
        arguments.append(f'fc_norm={config.final_norm == "after_pool"}')
    return [f'in timm: create_model(..., {", ".join(arguments)})'] if arguments else []


def _recognise(clues: Clues) -> Recognised[Layout]:
    declared, where = clues.config_json, 'config.json'
    part = {name: declared.get(name, {}) for name in ('model_args', 'pretrained_cfg')}
    arguments = described(_Arguments, part['model_args'], where=f'{where}.model_args')
    pretrained = described(_Pretrained, part['pretrained_cfg'], where=f'{where}.pretrained_cfg')
    names = described(_Description, declared, where=where).label_names
    gelu = _GELUS.get(arguments.act_layer, 'exact')
    defaults = Hints(num_heads=arguments.num_heads, gelu=gelu, layer_norm_epsilon=1e-6)
    prefix = next(match[1] or '' for name in clues.arrays if (match := _KNOWN.fullmatch(name)))
    inside = {n.removeprefix(prefix): a for n, a in clues.arrays.items() if n.startswith(prefix)}
    root = next((r for r in _ROOTS.values() if f'{r}.conv.weight' in inside), '')
    pool: Pool = 'cls' if 'cls_token' in inside else 'gap'
    pool = 'map' if 'attn_pool.latent' in inside else pool
    if pool == 'map' and 'cls_token' in inside or pool == 'cls' and 'fc_norm.bias' in inside:
        raise UserError('pools over patches beside a class token, which is not supported')
    config, row = inference.infer_vit(
        clues._replace(arrays=inside).with_defaults(defaults),
        embedding=inference.kernel_shape(inside, 'patch_embed.proj.weight'),
        root=f'{root}.conv.weight',
        unit=_UNIT,
        table='pos_embed',
        rows=(1, 0) if pool == 'cls' else (0,),
        depth=inference.count_layers(inside, r'blocks\.(\d+)\.'),
        mlp_dim=inference.shape_of(inside, 'blocks.0.mlp.fc1.bias', 1)[0],
        num_classes=inference.length_of(inside, 'head.bias'),
        pool=pool,
        final_norm='after_pool' if 'fc_norm.weight' in inside else 'before_pool',
        representation_size=inference.length_of(inside, 'pre_logits.fc.bias'),
    )
    layout = Layout(prefix=prefix, class_row=bool(row) or pool != 'cls')
    return Recognised(config, layout, _preprocessing(pretrained), names)


def _preprocessing(pretrained: _Pretrained) -> Preprocessing:
    is_bilinear = pretrained.interpolation == 'bilinear'
    resize: ResizeMethod = 'bilinear_antialias' if is_bilinear else 'bicubic_antialias'
    crop: Crop = CentralCrop(scale=1 / pretrained.crop_pct, resize=resize)
    if pretrained.crop_mode == 'squash':
        crop = Resize(resize=resize)
    return foreign_preprocessing(crop, pretrained.mean, pretrained.std)


TIMM = Format[Layout](
    name='timm',
    suffix='.safetensors',
    matches=lambda names: any(map(_KNOWN.fullmatch, names)),
    recognise=_recognise,
    rules=_rules,
    usual_layout=lambda config: Layout(),
    notes=_notes,
)
