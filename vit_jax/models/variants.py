"""Named variants of the architectures, such as `B/16`, `R50+B/16` and `R152x2`."""

import re
from typing import Any, NamedTuple

from vit_jax.base.errors import UserError
from vit_jax.base.records import closest, require
from vit_jax.models.config import Backbone, ModelConfig, ResNetConfig, ViTConfig


class Size(NamedTuple):
    """The sizes of a ViT; each is the field of `ViTConfig` with the same name."""

    depth: int
    width: int
    mlp_dim: int
    num_heads: int


# Sources are table 1 of the paper for B, L and H; "How to train your ViT?" for Ti and S; "Scaling
# Vision Transformers", table 2, for g and G; big_vision for M; and "Scaling Vision Transformers to
# 22 Billion Parameters" (arXiv:2302.05442), table 1, for 22B.
SIZES = {
    'Ti': Size(depth=12, width=192, mlp_dim=768, num_heads=3),
    'S': Size(depth=12, width=384, mlp_dim=1536, num_heads=6),
    'M': Size(depth=12, width=512, mlp_dim=2048, num_heads=8),
    'B': Size(depth=12, width=768, mlp_dim=3072, num_heads=12),
    'L': Size(depth=24, width=1024, mlp_dim=4096, num_heads=16),
    'H': Size(depth=32, width=1280, mlp_dim=5120, num_heads=16),
    'g': Size(depth=40, width=1408, mlp_dim=6144, num_heads=16),
    'G': Size(depth=48, width=1664, mlp_dim=8192, num_heads=16),
    '22B': Size(depth=48, width=6144, mlp_dim=24576, num_heads=48),
}
# Units of each stage, by the depth in a ResNet's name (26: "How to train your ViT?").
DEPTHS = {
    '26': (2, 2, 2, 2),
    '50': (3, 4, 6, 3),
    '101': (3, 4, 23, 3),
    '152': (3, 8, 36, 3),
    '200': (3, 24, 36, 3),
}
# Further options of a size (ViT-22B, section 2).
_OPTIONS: dict[str, dict[str, Any]] = {
    '22B': {'parallel': True, 'qk_norm': True, 'norm': 'rms', 'qkv_bias': False, 'pool': 'map'}
}


def variant(name: str, **changes: Any) -> ModelConfig:
    """Returns the configuration of a named variant.

    - `B/16` is a ViT with 16x16 patches; in `B/16x8`, patches are 16 high and 8 wide.
    - `R50+B/16` is a hybrid whose grid is 16 times smaller than the image. With 16, the units of
      the fourth stage move to the third (section 4.1); with 32, there are four stages.
    - `R+Ti/16` is a hybrid of the root and 8x8 patches ("How to train your ViT?"). Despite its
      name, its grid is 32 times smaller than the image.
    - `R152x2` is a ResNet of twice the width.

    Args:
      name: A name as above, with the size Ti, S, M, B, L, H, g, G or 22B.
      changes: Fields of the configuration with other values, such as `image_size`.

    Raises:
      UserError: If the name is unknown.
    """
    if match := re.fullmatch(r'R(\d+)x(\d+)', name):
        backbone = Backbone(blocks=_blocks(name, match[1]), width=64 * int(match[2]))
        return ResNetConfig(**({'backbone': backbone} | changes))
    match = re.fullmatch(r'(?:R(\d*)\+)?(\w+)/((\d+)(?:x(\d+))?)', name)
    if not match:
        forms = 'SIZE/PATCH (B/16, B/16x8), a hybrid (R50+B/16) or a ResNet (R152x2)'
        raise UserError(f'variant {name!r}: expected {forms}')
    layers, size, patch, height, width = match.groups()
    require(size in SIZES, f'variant {name!r}: unknown size {size!r}; {closest(size, SIZES)}')
    values = SIZES[size]._asdict()
    values['patch_size'] = int(height), int(width or height)
    values |= _OPTIONS.get(size, {})
    if layers is not None:
        values |= _hybrid(name, layers, reduction=patch)
    return ViTConfig(**(values | changes))


def _hybrid(name: str, layers: str, *, reduction: str) -> dict[str, Any]:
    """Returns the backbone of a hybrid, and the patch size on its feature map."""
    if not layers and reduction == '16':
        return {'backbone': Backbone(blocks=()), 'patch_size': (8, 8)}
    require(reduction in ('16', '32'), f'variant {name!r}: expected a hybrid with /16 or /32')
    *blocks, third, fourth = _blocks(name, layers)
    stages = (*blocks, third + fourth) if reduction == '16' else (*blocks, third, fourth)
    return {'backbone': Backbone(blocks=stages), 'patch_size': (1, 1)}


def _blocks(name: str, layers: str) -> tuple[int, ...]:
    if layers not in DEPTHS:
        expected = ', '.join(DEPTHS)
        raise UserError(f'variant {name!r}: unknown ResNet depth {layers!r}; expected {expected}')
    return DEPTHS[layers]
