"""Compares ways to scale a ViT: depth, width, patch size and MLP.

Paper: "An Image is Worth 16x16 Words", appendix D.2, figure 8: starting from 8 blocks, width 1024,
an MLP of 2048 and patches of 32, depth helps most, up to 64 blocks, and width least. Smaller
patches help robustly without more parameters.
Result: docs/studies.md has the results for patches of `small`.
Cost: `small` has 36 training runs of 1 to 14 minutes on one CPU core.
Command: python -m vit_jax.study --config=configs/studies/scaling.py:small \
             --config.base.data=DATA --workdir=DIR
"""

from typing import Any

from vit_jax.configs.studies import base
from vit_jax.studies.config import Grid, PlotConfig, Study

# The values of each axis, including the base.
VALUES: dict[str, dict[str, tuple[int, ...]]] = {
    'small': {
        'depth': (2, 6, 12),
        'width': (32, 64, 128),
        'patch': (16, 8, 4),
        'mlp': (64, 128, 256),
    },
    'full': {
        'depth': (2, 4, 8, 16, 32, 64),
        'width': (256, 512, 1024, 2048),
        'patch': (64, 32, 16, 8),
        'mlp': (512, 1024, 2048, 4096, 8192),
    },
}
FIELDS = {'depth': 'depth', 'width': 'width', 'patch': 'patch_size', 'mlp': 'mlp_dim'}
# Starting point of appendix D.2.
D2: dict[str, dict[str, Any]] = {
    'small': {},
    'full': {
        'model.depth': 8,
        'model.width': 1024,
        'model.mlp_dim': 2048,
        'model.patch_size': (32, 32),
        'model.num_heads': 16,
        'model.representation_size': 1024,
    },
}
ARGUMENTS = 'small', 'full'


def get_config(size: str = 'small') -> Study:
    """Returns a study with four grids that each change one size."""
    measure = base.MEASURES[size]
    grids = {
        name: Grid(
            changes=D2[size],
            axes={name: {str(n): {f'model.{FIELDS[name]}': n} for n in values}},
            measures=(measure, 'compute'),
        )
        for name, values in VALUES[size].items()
    }
    return Study(
        title='What to scale',
        base=base.get_config(size),
        grids=grids,
        seeds=(0, 1, 2),
        draw=PlotConfig(x='compute', y=measure, logarithmic=True),
    )
