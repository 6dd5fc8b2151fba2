"""Compares kinds of position embeddings, and the layers where they are added.

Paper: "An Image is Worth 16x16 Words", appendix D.4, table 8: B/16 without positions is 3 % worse
than with any kind. All kinds are within 0.5 % of each other, wherever they are added.
Result: docs/studies.md has the results of `small`; PUBLISHED below is table 8.
Cost: `small` has 24 training runs of 3 minutes on one CPU core.
Command: python -m vit_jax.study --config=configs/studies/positions.py:small \
             --config.base.data=DATA --workdir=DIR
"""

from typing import Any

from vit_jax.configs.studies import base
from vit_jax.studies.config import Grid, PlotConfig, Study

# Linear 5-shot accuracy of B/16 on ImageNet; the table does not state the training data.
PUBLISHED = {
    'none': 0.61382,
    'learned': 0.64206,
    'learned-every_layer': 0.63964,
    'learned-every_layer_shared': 0.64292,
    'learned2d': 0.64001,
    'learned2d-every_layer': 0.64046,
    'learned2d-every_layer_shared': 0.64022,
    'relative': 0.64032,
}
ARGUMENTS = 'small', 'full'


def get_config(size: str = 'small') -> Study:
    """Returns a study of the rows of table 8."""
    measure = base.MEASURES[size]
    return Study(
        title='Position embeddings',
        base=base.get_config(size),
        grids={
            'train': Grid(
                axes={'positions': {name: _changes(name) for name in PUBLISHED}},
                measures=(measure,),
                published=PUBLISHED if size == 'full' else {},
            )
        },
        seeds=(0, 1, 2),
        draw=PlotConfig(x='positions', y=measure),
    )


def _changes(name: str) -> dict[str, Any]:
    kind, _, where = name.partition('-')
    return {'model.positions': kind, 'model.positions_at': where or 'stem'}
