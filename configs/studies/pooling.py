"""Compares class token, mean and attention pooling at several learning rates.

Paper: "An Image is Worth 16x16 Words", appendix D.3, figure 9: at a learning rate of 8e-4 the mean
of the tokens of B/16 is far below the class token; at 3e-4 they are equal. Attention pooling (MAP)
is from "Scaling Vision Transformers", section 3.2.
Result: docs/studies.md has the results of `small`.
Cost: `small` has 36 training runs of 3 minutes on one CPU core.
Command: python -m vit_jax.study --config=configs/studies/pooling.py:small \
             --config.base.data=DATA --workdir=DIR
"""

from vit_jax.configs.studies import base
from vit_jax.studies.config import Grid, PlotConfig, Study

RATES = {'small': ('3e-4', '1e-3', '3e-3', '1e-2'), 'full': ('1e-4', '3e-4', '8e-4', '2e-3')}
ARGUMENTS = 'small', 'full'


def get_config(size: str = 'small') -> Study:
    """Returns a study of three kinds of pooling at four learning rates."""
    measure = base.MEASURES[size]
    grid = Grid(
        axes={
            'pool': {pool: {'model.pool': pool} for pool in ('cls', 'gap', 'map')},
            'rate': {rate: {'schedule.learning_rate': float(rate)} for rate in RATES[size]},
        },
        measures=(measure,),
    )
    return Study(
        title='Pooling and the learning rate',
        base=base.get_config(size),
        grids={'train': grid},
        seeds=(0, 1, 2),
        draw=PlotConfig(x='rate', y=measure, logarithmic=True),
    )
