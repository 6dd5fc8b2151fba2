"""The layout of timm (PyTorch image models): fused projections, fully connected `fc1` and `fc2`."""

import re
from collections.abc import Iterable
from typing import Any

from vit_jax.base import records
from vit_jax.base.errors import UserError
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats import base, inference
from vit_jax.checkpoints.formats.base import Clues, Format, Layout, Recognised, vision_transformer
from vit_jax.checkpoints.formats.name_map import (
    CONVOLUTION,
    NO_CLASS_ROW,
    SAME,
    NameRule,
    torch_backbone,
    torch_linear,
    torch_norm,
    torch_output,
    torch_projections,
)
from vit_jax.data.image_preprocessing import CentralCrop, Crop, Preprocessing, Resize, ResizeMethod
from vit_jax.models import Gelu, ModelConfig, Pool, ViTConfig

_KNOWN = re.compile(r'(.*\.)?(patch_embed\.proj\.weight|blocks\.0\.attn\.qkv\..*)')
_ROOTS = {True: 'patch_embed.backbone.stem', False: 'patch_embed.backbone'}
_POOLS: dict[Pool, str] = {'cls': 'token', 'gap': 'avg', 'map': 'map', 'none': ''}
_GELUS: dict[Any, Gelu] = {'gelu_tanh': 'tanh', 'gelu': 'exact'}
_STAGES = 'patch_embed.backbone.stages.'


def _matches(names: Iterable[str]) -> bool:
    return any(_KNOWN.fullmatch(name) for name in names)


def _rules(config: ModelConfig, layout: Layout) -> list[NameRule]:
    config = vision_transformer(config, 'timm')
    heads, block, ours = config.num_heads, 'blocks.{layer0}', 'encoder/block'
    positions = NO_CLASS_ROW if config.pool == 'cls' and not layout.class_row else SAME
    rules = [
        *torch_linear('patch_embed.proj', 'embedding', CONVOLUTION),
        NameRule('cls_token', 'cls'),
        NameRule('pos_embed', 'pos_embedding', positions),
        *torch_norm(f'{block}.norm1', f'{ours}/norm1'),
        *torch_norm(f'{block}.norm2', f'{ours}/norm2'),
        *torch_projections(
            f'{block}.attn.qkv', f'{ours}/attention', ('query', 'key', 'value'), num_heads=heads
        ),
        *torch_output(f'{block}.attn.proj', f'{ours}/attention/out', num_heads=heads),
        *torch_linear(f'{block}.mlp.fc1', f'{ours}/mlp/dense1'),
        *torch_linear(f'{block}.mlp.fc2', f'{ours}/mlp/dense2'),
        *torch_norm('norm', 'encoder/norm'),
        *torch_norm('fc_norm', 'norm'),
        NameRule('attn_pool.latent', 'pool/probe'),
        *torch_projections('attn_pool.q', 'pool/attention', ('query',), num_heads=heads),
        *torch_projections('attn_pool.kv', 'pool/attention', ('key', 'value'), num_heads=heads),
        *torch_output('attn_pool.proj', 'pool/attention/out', num_heads=heads),
        *torch_norm('attn_pool.norm', 'pool/norm'),
        *torch_linear('attn_pool.mlp.fc1', 'pool/mlp/dense1'),
        *torch_linear('attn_pool.mlp.fc2', 'pool/mlp/dense2'),
        *torch_linear('pre_logits.fc', 'pre_logits'),
        *torch_linear('head', 'head'),
    ]
    if config.backbone is not None:
        root = _ROOTS[bool(config.backbone.blocks)]
        rules += torch_backbone(
            f'{root}.conv', f'{root}.norm', f'{_STAGES}{{stage0}}.blocks.{{unit0}}'
        )
    return [rule._replace(theirs=layout.prefix + rule.theirs) for rule in rules]


def _recognise(clues: Clues) -> Recognised[Layout]:
    described = clues.config_json
    arguments = described.get('model_args', {})
    gelu = _GELUS.get(arguments.get('act_layer'))
    said = {'num_heads': arguments.get('num_heads'), 'gelu': gelu}
    defaults = records.from_dict(inference.Hints, said, where='config.json')
    config, layout = _infer(clues._replace(hints=inference.with_defaults(clues.hints, defaults)))
    preprocessing = _preprocessing(described.get('pretrained_cfg', {}))
    return Recognised(config, layout, preprocessing, tuple(described.get('label_names') or ()))


def _notes(card: Card, layout: Layout) -> list[str]:
    """The arguments with which timm builds this network, where they are not its defaults."""
    config = vision_transformer(card.model, 'timm')
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


def _infer(clues: Clues) -> tuple[ViTConfig, Layout]:
    arrays, hints = clues.arrays, clues.hints
    prefix = next(match[1] or '' for name in arrays if (match := _KNOWN.fullmatch(name)))
    inside = {n.removeprefix(prefix): s for n, s in arrays.items() if n.startswith(prefix)}
    width, channels, p, q = inference.shape_of(inside, 'patch_embed.proj.weight', 4)
    root = next((r for r in _ROOTS.values() if f'{r}.conv.weight' in inside), '') + '.conv.weight'
    unit = re.escape(_STAGES) + r'(\d+)\.blocks\.(\d+)\.'
    backbone = inference.infer_backbone(inside, root, unit, outputs=0)
    cell = inference.cell_of((p, q), backbone)
    mlp_dim = inference.shape_of(inside, 'blocks.0.mlp.fc1.bias', 1)[0]
    depth = inference.count_layers(inside, r'blocks\.(\d+)\.')
    pool: Pool = (
        'map' if 'attn_pool.latent' in inside else 'cls' if 'cls_token' in inside else 'gap'
    )
    if pool == 'map' and 'cls_token' in inside or pool == 'cls' and 'fc_norm.bias' in inside:
        raise UserError('pools over patches beside a class token, which is not supported')
    count = inference.shape_of(inside, 'pos_embed', 3)[1]
    rows = (1, 0) if pool == 'cls' else (0,)
    grid, row = inference.infer_grid(
        count, rows=rows, hints=hints, image_size=clues.image_size, cell=cell
    )
    config = ViTConfig(
        image_size=(grid[0] * cell[0], grid[1] * cell[1]),
        patch_size=(p, q),
        channels=inference.shape_of(inside, root, 4)[1] if backbone else channels,
        backbone=backbone,
        width=width,
        depth=depth,
        mlp_dim=mlp_dim,
        num_heads=inference.infer_heads(hints, width, mlp_dim, depth),
        num_classes=inference.length_of(inside, 'head.bias'),
        pool=pool,
        final_norm='after_pool' if 'fc_norm.weight' in inside else 'before_pool',
        representation_size=inference.length_of(inside, 'pre_logits.fc.bias'),
        gelu=hints.gelu or 'exact',
        layer_norm_epsilon=hints.layer_norm_epsilon or 1e-6,
    )
    return config, Layout(prefix=prefix, class_row=bool(row) or pool != 'cls')


def _preprocessing(described: dict[str, Any]) -> Preprocessing:
    """What a `pretrained_cfg` says of it; without one, what the converted ViTs are used with."""
    is_bilinear = described.get('interpolation') == 'bilinear'
    resize: ResizeMethod = 'bilinear_antialias' if is_bilinear else 'bicubic_antialias'
    crop: Crop = CentralCrop(scale=1 / (described.get('crop_pct') or 0.9), resize=resize)
    if described.get('crop_mode') == 'squash':
        crop = Resize(resize=resize)
    mean, std = (described.get(name) or (0.5, 0.5, 0.5) for name in ('mean', 'std'))
    return base.foreign_preprocessing(crop, mean, std, where='config.json')


TIMM = Format[Layout](
    name='timm',
    suffix='.safetensors',
    matches=_matches,
    recognise=_recognise,
    rules=_rules,
    usual_layout=lambda config: Layout(),
    notes=_notes,
)
