"""The table of names: `B/16`, `R50+B/16`, `R152x2` and their relatives."""

import re
from typing import Any

from vit_jax.base.errors import UserError
from vit_jax.base.records import nearest, require
from vit_jax.models.config import Backbone, ModelConfig, ResNetConfig, ViTConfig

# depth, width, mlp_dim, num_heads. B, L, H: table 1 of the paper; Ti, S: "How to train your
# ViT?"; g, G: "Scaling Vision Transformers", table 2; M: big_vision; 22B: "Scaling Vision
# Transformers to 22 Billion Parameters" (arXiv:2302.05442), table 1.
SIZES = {
    'Ti': (12, 192, 768, 3),
    'S': (12, 384, 1536, 6),
    'M': (12, 512, 2048, 8),
    'B': (12, 768, 3072, 12),
    'L': (24, 1024, 4096, 16),
    'H': (32, 1280, 5120, 16),
    'g': (40, 1408, 6144, 16),
    'G': (48, 1664, 8192, 16),
    '22B': (48, 6144, 24576, 48),
}
# Units of each stage by the number of layers in a ResNet's name (26 is AugReg's).
DEPTHS = {
    '26': (2, 2, 2, 2),
    '50': (3, 4, 6, 3),
    '101': (3, 4, 23, 3),
    '152': (3, 8, 36, 3),
    '200': (3, 24, 36, 3),
}
# Other options of a size (section 2 of its paper).
_OPTIONS: dict[str, dict[str, Any]] = {
    '22B': {'parallel': True, 'qk_norm': True, 'norm': 'rms', 'qkv_bias': False, 'pool': 'map'}
}


def variant(name: str, **changes: Any) -> ModelConfig:
    """The configuration of a name. Raises UserError for one that is not in the tables.

    `B/16` is a ViT: SIZE/PATCH, or `B/16x8` for patches 16 high and 8 wide. `R50+B/16` is a
    hybrid: the number after the slash is how much smaller its grid is than the image, and at 16
    the last stage's units move to the third (section 4.1). `R+Ti/16` is a root with 8x8 patches
    (AugReg; its grid is 32 times smaller, whatever the name says). `R152x2` is a ResNet, twice
    as wide. `changes` are fields of the configuration that differ, such as `image_size`.
    """
    if match := re.fullmatch(r'R(\d+)x(\d+)', name):
        backbone = Backbone(blocks=_blocks(name, match[1]), width=64 * int(match[2]))
        return ResNetConfig(**({'backbone': backbone} | changes))
    match = re.fullmatch(r'(?:R(\d*)\+)?(\w+)/((\d+)(?:x(\d+))?)', name)
    if not match:
        known = 'SIZE/PATCH, such as B/16 or B/16x8, a hybrid such as R50+B/16, a ResNet as R152x2'
        raise UserError(f'variant {name!r}: expected {known}')
    layers, size, patch, height, width = match.groups()
    require(size in SIZES, f'variant {name!r}: no size {size!r}; {nearest(size, SIZES)}')
    values: dict[str, Any] = {'patch_size': (int(height), int(width or height))}
    values |= zip(('depth', 'width', 'mlp_dim', 'num_heads'), SIZES[size], strict=True)
    values |= _OPTIONS.get(size, {})
    if layers is not None:
        values |= _hybrid(name, layers, reduction=patch)
    return ViTConfig(**(values | changes))


def _hybrid(name: str, layers: str, *, reduction: str) -> dict[str, Any]:
    """The backbone of a hybrid, and the patches on its feature map."""
    if not layers and reduction == '16':
        return {'backbone': Backbone(blocks=()), 'patch_size': (8, 8)}
    require(reduction in ('16', '32'), f'variant {name!r}: a hybrid ends with /16 or /32')
    *blocks, third, fourth = _blocks(name, layers)
    stages = (*blocks, third + fourth) if reduction == '16' else (*blocks, third, fourth)
    return {'backbone': Backbone(blocks=stages), 'patch_size': (1, 1)}


def _blocks(name: str, layers: str) -> tuple[int, ...]:
    known = f'known: {", ".join(DEPTHS)}'
    require(layers in DEPTHS, f'variant {name!r}: no ResNet of {layers or "no"} layers; {known}')
    return DEPTHS[layers]
