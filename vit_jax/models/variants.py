"""The table of names: `B/16` and its relatives."""

import re
from typing import Any

from vit_jax import records
from vit_jax.models.vit import ViTConfig

# depth, width, mlp_dim, num_heads. B, L, H: table 1 of the paper; Ti, S: "How to train your
# ViT?"; g, G: "Scaling Vision Transformers", table 2; M: big_vision.
SIZES = {
    'Ti': (12, 192, 768, 3),
    'S': (12, 384, 1536, 6),
    'M': (12, 512, 2048, 8),
    'B': (12, 768, 3072, 12),
    'L': (24, 1024, 4096, 16),
    'H': (32, 1280, 5120, 16),
    'g': (40, 1408, 6144, 16),
    'G': (48, 1664, 8192, 16),
}


def variant(name: str, **changes: Any) -> ViTConfig:
    """The configuration of `SIZE/PATCH`, such as `B/16`, or `B/16x8` for patches 16 high, 8 wide.

    `changes` are fields of ViTConfig that differ from the defaults, such as `image_size`.
    Raises ValueError for a name that is not in the table.
    """
    match = re.fullmatch(r'(\w+)/(\d+)(?:x(\d+))?', name)
    if not match:
        raise ValueError(f'variant {name!r}: expected SIZE/PATCH, such as B/16 or B/16x8')
    size, height, width = match.groups()
    if size not in SIZES:
        raise ValueError(f'variant {name!r}: no size {size!r}; {records.nearest(size, SIZES)}')
    depth, model_width, mlp_dim, num_heads = SIZES[size]
    values: dict[str, Any] = {
        'patch_size': (int(height), int(width or height)),
        'depth': depth,
        'width': model_width,
        'mlp_dim': mlp_dim,
        'num_heads': num_heads,
    }
    return ViTConfig(**(values | changes))
