"""Deeper, wider, smaller patches, a wider MLP: what is the next multiply-add best spent on?

Paper: "An Image is Worth 16x16 Words", appendix D.2, figure 8: of a network of 8 blocks, width
1024, an MLP of 2048 and patches of 32, more depth helps most, up to 64 blocks, width least, and
smaller patches help robustly without a parameter more.
Result: docs/studies.md. Cost of `small`: 36 trainings of 1 to 14 minutes on one CPU core.
Command: python -m vit_jax.study --config=configs/studies/scaling.py:small \
             --config.base.data=DATA --workdir=DIR
"""

from typing import Any

from vit_jax.configs.studies import base
from vit_jax.studies.config import Drawing, Grid, Study

# The values of each axis; the base is one of them.
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
    """Four grids, in each of which one size alone is changed."""
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
        draw=Drawing(x='compute', y=measure, logarithmic=True),
    )
