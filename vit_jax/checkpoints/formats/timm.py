"""The layout of timm (PyTorch image models): fused projections, fully connected `fc1` and `fc2`."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from vit_jax.base.errors import UserError
from vit_jax.checkpoints.formats.array_files import Stored
from vit_jax.checkpoints.formats.inference import (
    Evidence,
    Hints,
    Recognised,
    count_layers,
    filled,
    find_backbone,
    find_grid,
    find_heads,
    length_of,
    shape_of,
)
from vit_jax.checkpoints.formats.name_map import (
    CONVOLUTION,
    NO_CLASS_ROW,
    SAME,
    Rule,
    torch_backbone,
    torch_linear,
    torch_norm,
    torch_output,
    torch_projections,
)
from vit_jax.models import Pool, ViTConfig

_KNOWN = re.compile(r'(.*\.)?(patch_embed\.proj\.weight|blocks\.0\.attn\.qkv\..*)')
_ROOTS = {True: 'patch_embed.backbone.stem', False: 'patch_embed.backbone'}
_STAGES = 'patch_embed.backbone.stages.'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to name the arrays."""

    name: str = 'timm'
    prefix: str = ''
    dtype: str = 'float32'  # of the arrays in the file
    class_row: bool = True  # positions hold a row for the class token


def matches(names: list[str]) -> bool:
    """Are these the names of such a file?"""
    return any(_KNOWN.fullmatch(name) for name in names)


def table(config: ViTConfig, layout: Layout) -> list[Rule]:
    """Where each array stands."""
    heads, block, ours = config.num_heads, 'blocks.{layer0}', 'encoder/block'
    positions = NO_CLASS_ROW if config.pool == 'cls' and not layout.class_row else SAME
    rules = [
        *torch_linear('patch_embed.proj', 'embedding', CONVOLUTION),
        Rule('cls_token', 'cls'),
        Rule('pos_embed', 'pos_embedding', positions),
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
        Rule('attn_pool.latent', 'pool/probe'),
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


def recognise(evidence: Evidence) -> Recognised:
    """The network and the layout of such a file. Raises UserError where it does not show them."""
    described = evidence.config_json
    hints = filled(evidence.hints, _hinted(described))
    config, layout = _find(evidence.arrays, hints, evidence.image_size)
    preprocessing = _preprocessing(described.get('pretrained_cfg', {}))
    return Recognised(config, layout, preprocessing, tuple(described.get('label_names') or ()))


def usual_layout(format: str, config: ViTConfig) -> Layout:
    """The layout to write where none was read."""
    return Layout()


def notes(config: ViTConfig, layout: Layout, card: dict[str, Any]) -> list[str]:
    """The arguments with which timm builds this network, where they are not its defaults."""
    said = ["act_layer='gelu_tanh'"] if config.gelu == 'tanh' else []
    if config.layer_norm_epsilon != 1e-6:
        said.append(f'norm_layer=partial(LayerNorm, eps={config.layer_norm_epsilon:g})')
    if config.pool == 'cls' and not layout.class_row:
        said.append('no_embed_class=True')
    if config.pool != 'cls':
        said.append(f"global_pool='{'avg' if config.pool == 'gap' else 'map'}', class_token=False")
    if config.pool == 'gap' and config.final_norm == 'before_pool':
        said.append('fc_norm=False')
    return [f'in timm: create_model(..., {", ".join(said)})'] if said else []


def _find(
    arrays: Mapping[str, Stored], hints: Hints, image_size: tuple[int, int] | None
) -> tuple[ViTConfig, Layout]:
    prefix = next(match[1] or '' for name in arrays if (match := _KNOWN.fullmatch(name)))
    inside = {n.removeprefix(prefix): s for n, s in arrays.items() if n.startswith(prefix)}
    width, channels, p, q = shape_of(inside, 'patch_embed.proj.weight', 4)
    root = next((r for r in _ROOTS.values() if f'{r}.conv.weight' in inside), '') + '.conv.weight'
    unit = re.escape(_STAGES) + r'(\d+)\.blocks\.(\d+)\.'
    backbone = find_backbone(inside, root, unit, outputs=0)
    stride = backbone.stride if backbone else 1
    cell = p * stride, q * stride  # pixels of the image for one position
    mlp_dim = shape_of(inside, 'blocks.0.mlp.fc1.bias', 1)[0]
    depth = count_layers(inside, r'blocks\.(\d+)\.')
    pool: Pool = (
        'map' if 'attn_pool.latent' in inside else 'cls' if 'cls_token' in inside else 'gap'
    )
    if pool == 'map' and 'cls_token' in inside or pool == 'cls' and 'fc_norm.bias' in inside:
        raise UserError('pools over patches beside a class token, which is not supported')
    count = shape_of(inside, 'pos_embed', 3)[1]
    rows = (1, 0) if pool == 'cls' else (0,)
    grid, row = find_grid(count, rows=rows, hints=hints, image_size=image_size, cell=cell)
    config = ViTConfig(
        image_size=(grid[0] * cell[0], grid[1] * cell[1]),
        patch_size=(p, q),
        channels=shape_of(inside, root, 4)[1] if backbone else channels,
        backbone=backbone,
        width=width,
        depth=depth,
        mlp_dim=mlp_dim,
        num_heads=find_heads(hints, width, mlp_dim, depth),
        num_classes=length_of(inside, 'head.bias'),
        pool=pool,
        final_norm='after_pool' if 'fc_norm.weight' in inside else 'before_pool',
        representation_size=length_of(inside, 'pre_logits.fc.bias'),
        gelu=hints.gelu or 'exact',
        layer_norm_epsilon=hints.layer_norm_epsilon or 1e-6,
    )
    return config, Layout(prefix=prefix, class_row=bool(row) or pool != 'cls')


def _preprocessing(described: dict[str, Any]) -> dict[str, Any]:
    """What a `pretrained_cfg` says of it; without one, what the converted ViTs are used with."""
    resize = 'bicubic_antialias'
    if described.get('interpolation') == 'bilinear':
        resize = 'bilinear_antialias'
    crop: dict[str, Any] = {'kind': 'CentralCrop', 'scale': 1 / (described.get('crop_pct') or 0.9)}
    if described.get('crop_mode') == 'squash':
        crop = {'kind': 'Resize'}
    values = {name: described.get(name) or (0.5, 0.5, 0.5) for name in ('mean', 'std')}
    return {'crop': crop | {'resize': resize}, 'exif_rotation': False} | {
        name: [255 * value for value in channels] for name, channels in values.items()
    }


def _hinted(described: dict[str, Any]) -> dict[str, Any]:
    """What the config.json of a directory says of the network that the arrays do not show."""
    arguments = described.get('model_args', {})
    gelu = {'gelu_tanh': 'tanh', 'gelu': 'exact'}.get(arguments.get('act_layer'))
    return {'num_heads': arguments.get('num_heads'), 'gelu': gelu}
