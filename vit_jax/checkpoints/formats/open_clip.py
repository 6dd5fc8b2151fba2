"""Reads and writes the image tower of OpenCLIP and OpenAI CLIP checkpoints, under `visual.`.

This module reads towers with OpenAI's names. If the tower is a timm model, timm.py reads it with
the description that `timm_description` returns.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

from vit_jax.base import Record, require
from vit_jax.checkpoints.card import Card, Hints
from vit_jax.checkpoints.formats import base, inference, name_map
from vit_jax.checkpoints.formats.array_files import FileContents, JsonObject
from vit_jax.checkpoints.formats.base import CLIP, Format, Layout, ParsedCheckpoint, Scaling
from vit_jax.checkpoints.formats.inference import Arrays, NeedsHint
from vit_jax.checkpoints.formats.name_map import NO_BATCH, SAME, VECTOR, NameRule
from vit_jax.models import ViTConfig

_FILE = 'open_clip_config.json'
_BIAS = 'proj.bias'  # stands for the bias of our head; CLIP's projection has none
_BLOCK = 'transformer.resblocks'
# Fields of `ViTConfig` that all these towers share.
_SHARED: dict[str, Any] = {
    'pre_norm': True,
    'layer_norm_epsilon': 1e-5,
    'position_resize': 'bicubic_antialias',
}
# Keys that do not change image features: of the text tower, of training, of preprocessing, and of
# the projection, whose presence the arrays show.
_NO_EFFECT = (
    r'(vision|text|multimodal)_cfg|custom_text|(nonscalar|init)_logit_(scale|bias)|size|fill_color'
    r'|patch_dropout|output_tokens|timm_(model_pretrained|drop|drop_path|proj_bias)'
)


@dataclasses.dataclass
class _Model(Record):
    """The keys of `model_cfg` that concern the image tower."""

    embed_dim: int | None = None
    quick_gelu: bool = False


@dataclasses.dataclass
class _Vision(Record):
    """`model_cfg.vision_cfg`, with OpenCLIP's defaults."""

    layers: int = 12
    width: int = 768
    head_width: int = 64
    mlp_ratio: float = 4.0
    patch_size: tuple[int, int] = (16, 16)
    image_size: tuple[int, int] = (224, 224)
    ls_init_value: float | None = None  # initial value of LayerScale
    pool_type: Literal['tok'] = 'tok'
    timm_model_name: str = ''
    timm_pool: str = 'avg'
    timm_proj: str = 'linear'


@dataclasses.dataclass
class _Preprocess(base.TimmPreprocessing):
    """The keys of `preprocess_cfg`; the image size comes from the model."""

    mean: Scaling = CLIP[0]
    std: Scaling = CLIP[1]
    resize_mode: Literal['shortest', 'squash'] = 'shortest'
    mode: Literal['RGB'] = 'RGB'


class _Description(NamedTuple):
    """The parts of open_clip_config.json that concern the image tower."""

    model: _Model
    vision: _Vision
    preprocess: _Preprocess


def _read_description(contents: FileContents) -> _Description:
    described = contents.description(_FILE)
    described.record(_Model, ignored='(model|preprocess)_cfg')  # rejects other keys
    model = described.part('model_cfg')
    vision = model.part('vision_cfg').record(_Vision, ignored=_NO_EFFECT)
    preprocess = described.part('preprocess_cfg').record(_Preprocess, ignored=_NO_EFFECT)
    return _Description(
        model=model.record(_Model, ignored=_NO_EFFECT), vision=vision, preprocess=preprocess
    )


def timm_description(contents: FileContents) -> JsonObject:
    """Returns a config.json of timm for the image tower; empty if it is not a timm model."""
    _, vision, preprocess = _read_description(contents)
    if not vision.timm_model_name:
        return JsonObject({}, _FILE)
    require(
        vision.timm_proj == 'none',
        f'{_FILE}: timm_proj={vision.timm_proj!r} is not supported; expected none',
    )
    values = {
        'architecture': vision.timm_model_name,
        'global_pool': vision.timm_pool,
        'input_size': [3, *vision.image_size],
        'crop_pct': 1.0,
        'crop_mode': 'center' if preprocess.resize_mode == 'shortest' else 'squash',
    }
    images = {name: getattr(preprocess, name) for name in ('interpolation', 'mean', 'std')}
    return JsonObject(values | images, _FILE)


def _rules(config: ViTConfig, layout: Layout) -> list[NameRule]:
    module = functools.partial(name_map.torch_module, num_heads=config.num_heads)
    block = f'{_BLOCK}.{{layer0}}'
    ours = 'encoder/block'
    joined = [f'{ours}/attention/{name}' for name in ('query', 'key', 'value')]
    rules = [
        *module('conv1', 'embedding'),
        NameRule('class_embedding', ('cls',), VECTOR),
        NameRule('positional_embedding', ('pos_embedding',), NO_BATCH),
        *module('ln_pre', 'pre_norm'),
        *module(f'{block}.ln_1', f'{ours}/norm1'),
        *module(f'{block}.ln_2', f'{ours}/norm2'),
        *module(f'{block}.attn.in_proj', *joined, separator='_'),
        *module(f'{block}.attn.out_proj', f'{ours}/attention/out'),
        *module(f'{block}.mlp.c_fc', f'{ours}/mlp/dense1'),
        *module(f'{block}.mlp.c_proj', f'{ours}/mlp/dense2'),
        NameRule(f'{block}.ls_1.gamma', (f'{ours}/attention_scale',)),
        NameRule(f'{block}.ls_2.gamma', (f'{ours}/mlp_scale',)),
        *module('ln_post', 'encoder/norm'),
        NameRule('proj', ('head/kernel',), SAME),
        *([NameRule(_BIAS, ('head/bias',))] if layout.prefix + _BIAS in layout.zeros else []),
    ]
    return [rule._replace(theirs=layout.prefix + rule.theirs) for rule in rules]


def _infer(arrays: Arrays, hints: Hints) -> ViTConfig:
    """Infers the model of a file without a description."""
    if hints.gelu is None:
        raise NeedsHint(f'unknown GELU without {_FILE}; set gelu=quick (OpenAI) or gelu=exact')
    rules = _rules(ViTConfig(), Layout())
    config, _ = inference.infer_config(arrays, rules, hints, rows=(1,), **_SHARED)
    return config


def _build_config(arrays: Arrays, model: _Model, vision: _Vision) -> ViTConfig:
    """Builds the model from its description; the arrays show only whether it has a projection."""
    return ViTConfig(
        image_size=vision.image_size,
        patch_size=vision.patch_size,
        width=vision.width,
        depth=vision.layers,
        mlp_dim=int(vision.width * vision.mlp_ratio),
        num_heads=vision.width // vision.head_width,
        gelu='quick' if model.quick_gelu else 'exact',
        layer_scale=vision.ls_init_value,
        num_classes=model.embed_dim if 'proj' in arrays else None,
        **_SHARED,
    )


def _parse(contents: FileContents, hints: Hints) -> ParsedCheckpoint[Layout]:
    prefix = 'visual.' if any(name.startswith('visual.') for name in contents.arrays) else ''
    arrays = {n.removeprefix(prefix): a for n, a in contents.arrays.items() if n.startswith(prefix)}
    described = _read_description(contents)
    is_described = bool(contents.description(_FILE))
    if is_described:
        config = _build_config(arrays, described.model, described.vision)
    else:
        config = _infer(arrays, hints)
    return ParsedCheckpoint(
        config,
        Layout(prefix=prefix, zeros=(prefix + _BIAS,)),
        described.preprocess.preprocessing(described.preprocess.resize_mode),
        ignored=r'(?!visual\.).*' if prefix else None,  # the text tower
        loss=None if config.num_classes is None else 'contrastive',  # the head is a projection
        remarks=() if is_described else (f'no {_FILE}: images are preprocessed as by OpenAI',),
    )


def _description(config: ViTConfig, card: Card, layout: Layout) -> dict[str, Any]:
    """Returns the keys of open_clip_config.json that concern the image tower."""
    preprocessing = card.preprocessing
    crop = preprocessing.crop
    vision = {
        'image_size': list(config.image_size),
        'layers': config.depth,
        'width': config.width,
        'head_width': config.width // config.num_heads,
        'patch_size': config.patch_size[0],
        'mlp_ratio': config.mlp_dim / config.width,
        'ls_init_value': config.layer_scale,
    }
    return {
        'model_cfg': {
            'embed_dim': config.num_classes or config.width,
            'vision_cfg': vision,
            'quick_gelu': config.gelu == 'quick',
        },
        'preprocess_cfg': {
            'mean': [value / 255 for value in preprocessing.mean],
            'std': [value / 255 for value in preprocessing.std],
            'interpolation': getattr(crop, 'resize', 'bilinear').removesuffix('_antialias'),
            'resize_mode': 'shortest' if getattr(crop, 'keep_aspect', False) else 'squash',
        },
    }


OPEN_CLIP = Format[Layout](
    name='open_clip',
    suffix='.safetensors',
    matches=lambda names: not {'ln_post.weight', 'visual.ln_post.weight'}.isdisjoint(names),
    parse=_parse,
    rules=_rules,
    usual_layout=lambda config: Layout(prefix='visual.', zeros=(f'visual.{_BIAS}',)),
    notes=lambda config, card, layout: ['OpenCLIP also needs a text tower, which is not written'],
    descriptions=lambda *model: {_FILE: _description(*model)},
    file_name='open_clip_model.safetensors',
)
