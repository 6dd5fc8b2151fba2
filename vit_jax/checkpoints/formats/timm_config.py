"""What timm's config.json says: the architecture, the arguments that changed it, preprocessing.

What follows from the name of an architecture was verified against timm 1.0.31, for all names that
it publishes (tests/checkpoints/formats/test_timm_names.py).
"""

import dataclasses
import re
from collections.abc import Collection
from typing import Any, NamedTuple

from vit_jax.base import Record, UserError, records, require, require_between
from vit_jax.checkpoints.formats.base import (
    CLIP,
    HALF,
    IMAGENET,
    Scaling,
    check_scaling,
    described,
    foreign_preprocessing,
    mlp_ratio,
    part,
    require_equal,
)
from vit_jax.data.image_preprocessing import CentralCrop, Preprocessing, ResizeMethod
from vit_jax.models import Gelu, Pool, ViTConfig
from vit_jax.models.config import PositionResize

GELUS: dict[str, Gelu] = {'gelu_tanh': 'tanh', 'gelu': 'exact', 'quick_gelu': 'quick'}
_RESIZE_METHODS: dict[str, ResizeMethod] = {'bilinear': 'bilinear_antialias'}
_RESIZE_METHODS |= {'bicubic': 'bicubic_antialias', 'lanczos': 'lanczos_antialias'}
_CROP_MODES = 'center', 'squash'
# Arguments that change no function: what is dropped in training, and how parameters begin.
NO_FUNCTION = re.compile(r'(.*_)?drop(_path)?_rate|weight_init|fix_init|dynamic_img_size')
POOLS: dict[str, Pool] = {'token': 'cls', 'avg': 'gap', 'map': 'map', '': 'none'}  # by global_pool
_TANH = re.compile(
    r'vit_(base_patch32_siglip(_gap)?_256|large_patch16_siglip(_gap)?_512'
    r'|so400m_patch16_siglip(_gap)?_(256|384|512)|giantopt_patch16_siglip(_gap)?_(256|384))'
)
# Published under a name whose GELU is exact, but trained with QuickGELU: timm has both names for
# each of these networks, and one file of weights.
_QUICK = re.compile(
    r'vit_\w+_clip_\d+ (openai|metaclip_400m|metaclip_2pt5b|dfn5b)|vit_large_\w+ dfn2b'
    r'|vit_huge_patch14_clip_224 metaclip2_worldwide|vit_base_patch32_\w+ laion400m_e32'
)
_HAS_NO_QKV_BIAS = re.compile(
    r'.*_miil|vit_giant_patch16_lingbot|vit_medium_patch16_gap_.*|vit_so150m2_.*|.*_dinov3'
)
_ROTATES = re.compile(r'.*_(dinov3|dinov3_qkvb|lingbot)')
_VIT = re.compile(r'(aimv2|beit(v2|3)?|deit3?|eva(02)?|(flexi|naflex|sam)?vit|test_vit\d?)(_.*)?')
_HEADS = {'vit_base_patch16_gap_224': 16, 'vit_huge_plus_patch16_dinov3': 20}
_HEADS |= {'vit_huge_plus_patch16_dinov3_qkvb': 20}

# Kinds of networks that are not read, by the names of their architectures, and by their arrays.
_OTHER_NAMES = {
    r'.*_rpn_.*': 'norms behind attention and MLP',
    r'eva02_.*': "EVA-02's rotation of queries and keys",
    r'vit_pe_.*|.*_rope_.*|.*sapiens2.*': "a rotation of queries and keys that is not DINOv3's",
    r'.*_radio_.*': "RADIO's patches",
}
_OTHER_ARRAYS = {
    r'embeds\..*': 'NaFlexViT',
    r'neck\..*': "SAM's image encoder",
    r'(.*\.)?(relative_position_bias_table|rel_pos.*|shared_rel_pos.*)': 'relative positions',
    r'.*\.attn\.rel_pos.*': 'relative positions',
    r'rope\.freqs': 'a learned rotation of queries and keys',
    r'.*\.attn\.[qk]_norm\..*': 'norms of queries and keys',
    r'.*\.(mlp|attn)\.norm\..*': 'a norm within attention or the MLP',
    r'.*\.lambda_[qk]\d': 'differential attention',
    r'.*\.in_proj\.weight': 'attention and MLP side by side',
    r'.*\.attn\.k_proj\.weight': 'queries, keys and values apart',
    r'patch_embed\.norm\..*': 'a norm of the patches',
    r'patch_embed\.backbone\.0\..*': "MobileCLIP's convolutions before the patches",
}


class Architecture(NamedTuple):
    """What follows from the name; without one, what most networks have."""

    gelu: Gelu = 'exact'
    epsilon: float = 1e-6
    num_heads: int | None = None
    rope: bool = False  # as DINOv3's
    qkv_bias: bool = True
    position_resize: PositionResize = 'bicubic_antialias'


def architecture(name: str) -> Architecture:
    """The facts behind a name such as vit_base_patch16_224; '' where none is known."""
    gelu: Gelu = 'tanh' if _TANH.fullmatch(name) else 'exact'
    rope = _ROTATES.fullmatch(name) is not None
    return Architecture(
        gelu='quick' if '_quickgelu_' in name else gelu,
        epsilon=1e-5 if rope or '_clip_' in name and not name.startswith('eva') else 1e-6,
        num_heads=_HEADS.get(name),
        rope=rope,
        qkv_bias=not _HAS_NO_QKV_BIAS.fullmatch(name),
        position_resize='bilinear_edges' if name.startswith('flexivit') else 'bicubic_antialias',
    )


def was_trained_with_quick_gelu(name: str, tag: str) -> bool:
    """Has timm this file of weights under a name whose GELU is not that of their training?"""
    return _QUICK.fullmatch(f'{name} {tag}') is not None


def _unsupported(name: str, arrays: Collection[str]) -> str | None:
    """What such a network has that ours have not; None where nothing is known of it."""
    for pattern, what in _OTHER_NAMES.items():
        if re.fullmatch(pattern, name):
            return what
    if name and not _VIT.fullmatch(name):
        return 'none of the ViTs of timm'
    for array in arrays:
        for pattern, what in _OTHER_ARRAYS.items():
            if re.fullmatch(pattern, array):
                return what
    has_norm = {'norm.weight', 'fc_norm.weight'} & {*arrays}
    return None if has_norm else 'no norm behind the blocks'


def require_supported(name: str, arrays: Collection[str]) -> None:
    """Raises UserError for an architecture that is not read, whether its name or its arrays say it,
    and for one that its name alone would say."""
    if what := _unsupported(name, arrays):
        raise UserError(f'{name}{": " if name else ""}{what}: not supported')
    right = "no positions are among the arrays: DINOv3's need the config.json beside them"
    require(name != '' or 'pos_embed' in arrays, right)


@dataclasses.dataclass
class Arguments(Record):
    """`model_args`: with what the architecture was made."""

    img_size: tuple[int, int] | None = None
    patch_size: tuple[int, int] | None = None
    in_chans: int | None = None
    num_classes: int | None = None
    global_pool: str | None = None
    embed_dim: int | None = None
    depth: int | None = None
    num_heads: int | None = None
    mlp_ratio: float | None = None
    qkv_bias: bool | None = None
    init_values: float | None = None
    class_token: bool | None = None
    reg_tokens: int | None = None
    num_reg_tokens: int | None = None  # of the class Eva
    no_embed_class: bool | None = None
    pool_include_prefix: bool = False
    pre_norm: bool | None = None
    fc_norm: bool | None = None
    act_layer: str | None = None

    def check(self) -> None:
        require_between(self, 'num_heads', 'img_size', 'patch_size', low=1)
        require_between(self, 'mlp_ratio', above=0, high=1024)
        known = f'expected one of {", ".join(GELUS)}, silu'
        fits = self.act_layer in (None, 'silu', *GELUS)
        require(fits, f'act_layer={self.act_layer!r} is not supported: {known}')
        require(not self.pool_include_prefix, 'pool_include_prefix=True is not supported')


# Of timm, where a pretrained_cfg leaves them out.
_DEFAULTS = {'mean': IMAGENET[0], 'std': IMAGENET[1], 'crop_pct': 0.875}


@dataclasses.dataclass
class Pretrained(Record):
    """What is read of `pretrained_cfg`; without one, how the converted ViTs are used."""

    input_size: tuple[int, int, int] | None = None  # channels, height, width
    num_classes: int | None = None
    interpolation: str = 'bicubic'
    crop_pct: float = 0.9
    crop_mode: str = 'center'
    mean: Scaling = HALF
    std: Scaling = HALF
    tag: str = ''

    def check(self) -> None:
        require_between(self, 'crop_pct', low=1 / 16, high=1)
        require_between(self, 'input_size', low=1)
        check_scaling(self, 'mean', 'std')
        for name, known in {'interpolation': _RESIZE_METHODS, 'crop_mode': _CROP_MODES}.items():
            value, right = getattr(self, name), f'expected one of {", ".join(known)}'
            require(value in known, f'{name}={value!r} is not supported: {right}')

    @staticmethod
    def read(declared: dict[str, Any], *, where: str) -> 'Pretrained':
        """That of a config.json; the oldest have its fields among their own. timm's defaults."""
        values = part(declared, 'pretrained_cfg', where=where)
        if not values:
            own = {*records.hints(Pretrained)} - {'num_classes'}  # which is of the network
            values = {name: declared[name] for name in own if name in declared}
        values = _DEFAULTS | values if values else {}
        return described(Pretrained, values, where=f'{where}.pretrained_cfg')


def usual(arrays: Collection[str]) -> tuple[Pretrained, str]:
    """How images are prepared where nothing says it, and what is taken for granted, in words."""
    if is_of_meta(arrays):
        mean, std = IMAGENET
        return Pretrained(mean=mean, std=std, crop_pct=0.875), 'images are prepared as for DINOv2'
    if 'norm_pre.weight' in arrays:
        mean, std = CLIP
        return Pretrained(mean=mean, std=std), 'images are prepared as for CLIP'
    return Pretrained(), 'GELU, epsilon, pooling and preparation are taken to be those of most ViTs'


def is_of_meta(arrays: Collection[str]) -> bool:
    """Are these, beside which there is no config.json, as Meta itself publishes DINOv2?"""
    return 'mask_token' in arrays


@dataclasses.dataclass
class Description(Record):
    """What else is read of a config.json."""

    architecture: str = ''
    num_classes: int | None = None
    global_pool: str | None = None
    label_names: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()  # its older name


def require_same(
    config: ViTConfig,
    arguments: Arguments,
    pretrained: Pretrained,
    description: Description,
    *,
    halves: int,
) -> None:
    """Raises UserError where the config.json says other things than the arrays.

    As in timm, `pretrained_cfg` counts for classes and channels where nothing else says them.
    """
    act, classes = arguments.act_layer, config.num_classes or 0
    wrong = f'config.json.model_args says act_layer={act}, the arrays a {{}} MLP'
    require(
        act is None or (act == 'silu') == (config.gelu is None),
        wrong.format('SwiGLU' if config.gelu is None else 'plain'),
    )
    stated = {n: v for n, v in vars(arguments).items() if v is not None}
    found = {
        'in_chans': config.channels,
        'patch_size': config.patch_size,
        'mlp_ratio': mlp_ratio(config, arguments.mlp_ratio or 4.0, halves=halves),
        'embed_dim': config.width,
        'depth': config.depth,
        'num_heads': config.num_heads,
        'num_classes': classes,
        'class_token': config.positioned_prefix > 0,
        'reg_tokens': config.registers,
        'num_reg_tokens': config.registers,
        'pre_norm': config.pre_norm,
        'fc_norm': config.final_norm == 'after_pool',
    }
    require_equal(stated, found, where='config.json.model_args')
    if description.num_classes is not None:
        stated = {'num_classes': description.num_classes}
        require_equal(stated, {'num_classes': classes}, where='config.json')
    elif arguments.num_classes is None and pretrained.num_classes is not None:
        stated = {'num_classes': pretrained.num_classes}
        require_equal(stated, {'num_classes': classes}, where='config.json.pretrained_cfg')
    if arguments.in_chans is None and pretrained.input_size is not None:
        stated, found = {'channels': pretrained.input_size[0]}, {'channels': config.channels}
        require_equal(stated, found, where='config.json.pretrained_cfg.input_size')


def preprocessing(pretrained: Pretrained) -> Preprocessing:
    """How timm's evaluation prepares images for the network."""
    crop = CentralCrop(
        scale=1 / pretrained.crop_pct,
        keep_aspect=pretrained.crop_mode != 'squash',
        resize=_RESIZE_METHODS[pretrained.interpolation],
        rounding='timm',
    )
    return foreign_preprocessing(crop, pretrained.mean, pretrained.std)
