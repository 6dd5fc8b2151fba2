"""The layout of OpenCLIP, and of OpenAI's CLIP: the image tower lies under `visual.`."""

import dataclasses
import functools
from typing import Any, Literal

from vit_jax.base import Record, UserError, records, require, require_between
from vit_jax.checkpoints.card import Card, Hints
from vit_jax.checkpoints.formats import base, inference, name_map, timm_config
from vit_jax.checkpoints.formats.array_files import FileContents
from vit_jax.checkpoints.formats.base import (
    CLIP,
    Format,
    ParsedCheckpoint,
    Scaling,
    described,
    part,
    require_equal,
)
from vit_jax.checkpoints.formats.inference import NeedsHint
from vit_jax.checkpoints.formats.name_map import NO_BATCH, SAME, VECTOR, NameRule
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.models import ViTConfig

_PREFIX = 'visual.'
_BIAS = 'proj.bias'  # which the projection does not have
_WHERE = 'open_clip_config.json'
# Of a tower of timm's: what is read, and what is dropped in training or was there before it.
_TIMM_TOWER = 'timm_model_name', 'timm_proj', 'timm_pool', 'image_size'
_ONLY_TRAINING = 'timm_model_pretrained', 'timm_drop', 'timm_drop_path', 'timm_proj_bias'
_CROP_MODES = {'shortest': 'center', 'squash': 'squash'}  # of timm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(base.Layout):
    """All files are alike, but for the type of numbers."""

    prefix: str = _PREFIX
    zeros: tuple[str, ...] = (_PREFIX + _BIAS,)


@dataclasses.dataclass
class _VisionConfig(Record):
    """`model_cfg.vision_cfg`. Other keys than these are refused."""

    layers: int | None = None
    width: int | None = None
    head_width: int = 64
    mlp_ratio: float = 4.0
    patch_size: tuple[int, int] | None = None
    image_size: tuple[int, int] = (224, 224)
    ls_init_value: float | None = None  # LayerScale's
    pool_type: Literal['tok'] = 'tok'
    patch_dropout: float = 0.0  # while training
    output_tokens: bool = False  # to other code, beside the pooled one

    def check(self) -> None:
        require_between(self, 'layers', 'width', 'head_width', 'image_size', low=1)
        require_between(self, 'patch_size', low=1)
        require_between(self, 'mlp_ratio', above=0, high=1024)


@dataclasses.dataclass
class PreprocessConfig(Record):
    """`preprocess_cfg`; its size is that of the network."""

    mean: Scaling = CLIP[0]
    std: Scaling = CLIP[1]
    interpolation: str = 'bicubic'
    resize_mode: Literal['shortest', 'squash'] = 'shortest'

    def check(self) -> None:
        base.check_scaling(self, 'mean', 'std')

    @property
    def as_timm(self) -> Preprocessing:
        """The same in the words of timm."""
        words = timm_config.Pretrained(
            interpolation=self.interpolation,
            crop_pct=1.0,
            crop_mode=_CROP_MODES[self.resize_mode],
            mean=self.mean,
            std=self.std,
        )
        return timm_config.preprocessing(words)


def timm_tower(clues: FileContents) -> dict[str, Any]:
    """The config.json that timm would write of its network within OpenCLIP's; {} without one."""
    declared = clues.description(_WHERE)
    model = part(declared, 'model_cfg', where=_WHERE)
    vision = part(model, 'vision_cfg', where=f'{_WHERE}.model_cfg')
    if not vision.get('timm_model_name'):
        return {}
    known = {'patch_dropout', 'output_tokens', *_TIMM_TOWER, *_ONLY_TRAINING}
    odd = ', '.join(f'{n}={vision[n]!r}' for n in {*vision} - known if vision[n] is not None)
    require(not odd, f'{_WHERE}.model_cfg.vision_cfg: {odd} is not supported')
    projection = vision.get('timm_proj', 'linear')
    wrong = f'{_WHERE}: timm_proj={projection!r} is not supported: expected none'
    require(projection == 'none', wrong)
    prepared = part(declared, 'preprocess_cfg', where=_WHERE)
    how = described(PreprocessConfig, prepared, where=f'{_WHERE}.preprocess_cfg')
    image = {name: vision[name] for name in ('image_size',) if name in vision}
    size = described(_VisionConfig, image, where=f'{_WHERE}.model_cfg.vision_cfg').image_size
    preparation = {
        'input_size': [3, *size],
        'crop_pct': 1.0,
        'crop_mode': _CROP_MODES[how.resize_mode],
        'interpolation': how.interpolation,
        'mean': how.mean,
        'std': how.std,
    }
    return {
        'architecture': vision['timm_model_name'],
        'global_pool': vision.get('timm_pool', 'avg'),
        'pretrained_cfg': preparation,
    }


def _rules(config: ViTConfig, layout: Layout) -> list[NameRule]:
    module = functools.partial(name_map.torch_module, num_heads=config.num_heads)
    block, ours = 'transformer.resblocks.{layer0}', 'encoder/block'
    joined = [f'{ours}/attention/{name}' for name in ('query', 'key', 'value')]
    scales = {'ls_1.gamma': 'attention_scale', 'ls_2.gamma': 'mlp_scale'}
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
        *(NameRule(f'{block}.{theirs}', (f'{ours}/{name}',)) for theirs, name in scales.items()),
        *module('ln_post', 'encoder/norm'),
        NameRule('proj', ('head/kernel',), SAME),
        *([NameRule(_BIAS, ('head/bias',))] if layout.prefix + _BIAS in layout.zeros else []),
    ]
    return [rule._replace(theirs=layout.prefix + rule.theirs) for rule in rules]


def _parse(clues: FileContents, hints: Hints) -> ParsedCheckpoint[Layout]:
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in clues.arrays) else ''
    stored = {n.removeprefix(prefix): a for n, a in clues.arrays.items() if n.startswith(prefix)}
    whole = clues.description(_WHERE)
    model = part(whole, 'model_cfg', where=_WHERE)
    vision = part(model, 'vision_cfg', where=f'{_WHERE}.model_cfg')
    quick = model.get('quick_gelu', False)
    require(isinstance(quick, bool), f'{_WHERE}.model_cfg.quick_gelu={quick!r}: true or false')
    odd = ', '.join(f'{n}={vision[n]!r}' for n in {*vision} - {*records.hints(_VisionConfig)})
    require(not odd, f'{_WHERE}.model_cfg.vision_cfg: {odd} is not supported')
    declared = described(_VisionConfig, vision, where=f'{_WHERE}.model_cfg.vision_cfg')
    prepared = part(whole, 'preprocess_cfg', where=_WHERE)
    preprocess = described(PreprocessConfig, prepared, where=f'{_WHERE}.preprocess_cfg')
    width, mlp_dim = inference.shape_of(stored, 'transformer.resblocks.0.mlp.c_proj.weight', 2)
    if not model and hints.gelu is None:
        raise NeedsHint(f'without {_WHERE}: say gelu=quick, as OpenAI trained, or gelu=exact')
    defaults = Hints(
        num_heads=max(1, width // declared.head_width),
        gelu='quick' if quick else 'exact',
        layer_norm_epsilon=1e-5,
    )
    table = stored.get('positional_embedding')
    if table is not None:
        stored['positional_embedding'] = table._replace(shape=(1, *table.shape))
    config, _ = inference.infer_config(
        stored,
        inference.with_defaults(hints, defaults),
        image_size=declared.image_size if model else None,
        embedding='conv1.weight',
        table='positional_embedding',
        rows=(1,),
        depth=inference.count_layers(stored, r'transformer\.resblocks\.(\d+)\.'),
        mlp_dim=mlp_dim,
        num_classes=inference.shape_of(stored, 'proj', 2)[1] if 'proj' in stored else None,
        pre_norm='ln_pre.weight' in stored,
        layer_scale=1e-5 if 'transformer.resblocks.0.ls_1.gamma' in stored else None,
        position_resize='bicubic_antialias',
    )
    stated = {name: value for name, value in vars(declared).items() if name in vision}
    found = {'layers': config.depth, 'width': config.width, 'patch_size': config.patch_size}
    found['mlp_ratio'] = base.mlp_ratio(config, declared.mlp_ratio)
    require_equal(stated, found, where=f'{_WHERE}.model_cfg.vision_cfg')
    if config.num_classes is not None:
        require_equal(model, {'embed_dim': config.num_classes}, where=f'{_WHERE}.model_cfg')
    outside = r'(?!visual\.).*' if prefix else None  # the text tower
    loss = 'contrastive' if config.num_classes is not None else None  # the head is no classifier
    layout = Layout(prefix=prefix, zeros=(prefix + _BIAS,))
    heads = '' if hints.num_heads else f', heads have a width of {declared.head_width}'
    assumed = f'no {_WHERE}: the class token is pooled{heads}'
    remarks = () if model else (f"{assumed}, and images are prepared as for OpenAI's CLIP",)
    return ParsedCheckpoint(
        config, layout, preprocess.as_timm, ignored=outside, loss=loss, remarks=remarks
    )


def _description(config: ViTConfig, card: Card, layout: Layout) -> dict[str, Any]:
    """The open_clip_config.json, as far as it is about images."""
    square = config.image_size[0] == config.image_size[1]
    found = config.gelu, config.layer_norm_epsilon, config.pre_norm
    if found not in (('quick', 1e-5, True), ('exact', 1e-5, True)):
        has = 'gelu=quick or exact, layer_norm_epsilon=1e-05 and pre_norm=True'
        raise UserError(f'the open_clip layout has {has}, not {found}')
    vision = {
        'image_size': config.image_size[0] if square else list(config.image_size),
        'layers': config.depth,
        'width': config.width,
        'head_width': config.width // config.num_heads,
        'patch_size': config.patch_size[0],
        'mlp_ratio': config.mlp_dim / config.width,
    }
    model = {'embed_dim': config.num_classes or config.width, 'vision_cfg': vision}
    return {
        'model_cfg': model | {'quick_gelu': config.gelu == 'quick'},
        'preprocess_cfg': _prepared(card.preprocessing),
    }


def _prepared(how: Preprocessing) -> dict[str, Any]:
    """The `preprocess_cfg` that is nearest to this."""
    return {
        'mean': [value / 255 for value in how.mean],
        'std': [value / 255 for value in how.std],
        'interpolation': getattr(how.crop, 'resize', 'bilinear').removesuffix('_antialias'),
        'resize_mode': 'shortest' if getattr(how.crop, 'keep_aspect', False) else 'squash',
    }


def _notes(config: ViTConfig, card: Card, layout: Layout) -> list[str]:
    notes = ['the image tower alone: OpenCLIP expects a text tower too']
    written = described(PreprocessConfig, _prepared(card.preprocessing), where=_WHERE)
    ours, theirs = card.preprocessing.crop, written.as_timm.crop
    steps = {'scale': 1.0, 'keep_aspect': False, 'resize': None}
    if any(getattr(ours, n, usual) != getattr(theirs, n) for n, usual in steps.items()):
        notes.append(f'OpenCLIP prepares images otherwise: {theirs}, not {ours}')
    return notes


OPEN_CLIP = Format[Layout](
    name='open_clip',
    suffix='.safetensors',
    matches=lambda names: any(
        {f'{prefix}conv1.weight', f'{prefix}ln_post.weight'} <= {*names} for prefix in (_PREFIX, '')
    ),
    parse=_parse,
    rules=_rules,
    usual_layout=lambda config: Layout(),
    notes=_notes,
    description=_description,
    described_in='open_clip_config.json',
    file_name='open_clip_model.safetensors',
)
