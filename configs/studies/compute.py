"""Compares ViTs, hybrids and ResNets at the same amount of computation.

Paper: "An Image is Worth 16x16 Words", section 4.4, figure 5 and table 6: Vision Transformers need
2 to 4 times less computation than ResNets for the same accuracy (the mean of five tasks), and
hybrids are better than ViTs only at small budgets. `full` has the rows of table 6 on JFT-300M, by
name, except R152x2 for 14 epochs and R200x3, which table 3 does not list.
Result: docs/studies.md has the results of `small`; PUBLISHED below is table 6.
Cost: `small` has 30 training runs of 1 to 8 minutes on one CPU core. Table 6 has the exaFLOPs of
`full`.
Command: python -m vit_jax.study --config=configs/studies/compute.py:small \
             --config.base.data=DATA --workdir=DIR
"""

import dataclasses
from typing import Any

from vit_jax.configs.pretrain import vit
from vit_jax.configs.studies import base
from vit_jax.models import Backbone, ResNetConfig
from vit_jax.studies.config import Grid, PlotConfig, Study

# Accuracies in percent after fine-tuning, in the order of base.TASKS.
PUBLISHED = {
    'vit': {
        'B/32': (80.73, 98.61, 90.49, 93.40, 99.27),
        'B/16': (84.15, 99.00, 91.87, 95.80, 99.56),
        'L/32': (84.37, 99.19, 92.52, 95.83, 99.45),
        'L/16,7': (86.30, 99.38, 93.46, 96.81, 99.66),
        'L/16,14': (87.12, 99.38, 94.04, 97.11, 99.56),
        'H/14': (88.08, 99.50, 94.71, 97.11, 99.71),
    },
    'hybrid': {
        'R50+B/32': (84.90, 99.01, 92.24, 95.75, 99.46),
        'R50+B/16': (85.58, 99.14, 92.63, 96.65, 99.40),
        'R50+L/32': (85.68, 99.24, 92.93, 96.97, 99.43),
        'R50+L/16,7': (86.60, 99.18, 93.64, 97.03, 99.40),
        'R50+L/16,14': (87.12, 99.31, 93.89, 97.36, 99.11),
    },
    'resnet': {
        'R50x1': (77.54, 97.67, 86.07, 91.11, 94.26),
        'R50x2': (82.12, 98.29, 89.20, 93.43, 97.02),
        'R101x1': (80.67, 98.48, 89.17, 94.08, 95.95),
        'R152x1': (81.88, 98.82, 90.22, 94.17, 96.94),
        'R152x2': (84.97, 99.06, 92.05, 95.37, 98.62),
    },
}
# Numbers of blocks in `small`; blocks per stage of its ResNets.
DEPTHS = {'vit': (2, 6, 12), 'hybrid': (1, 3, 8)}
BLOCKS = (1,), (1, 1), (2, 2), (3, 3)
ARGUMENTS = 'small', 'full'


def get_config(size: str = 'small') -> Study:
    """Returns a study with a grid for each family; `full` also fine-tunes on five tasks."""
    if size == 'small':
        return _study(size, {family: _small(family) for family in base.SMALL}, tasks={})
    grids = {family: base.rows(*accuracies) for family, accuracies in PUBLISHED.items()}
    return _study(size, grids, tasks=base.TASKS)


def _study(size: str, models: dict[str, Any], tasks: dict[str, Any]) -> Study:
    measure = base.MEASURES[size]
    grids = {
        family: Grid(axes={'network': values}, measures=(measure, 'compute'))
        for family, values in models.items()
    }
    plot = PlotConfig(x='compute', y=measure, logarithmic=True)
    if tasks:
        plot = dataclasses.replace(plot, y='test/accuracy', mean='all')
        for family in models:
            grids[f'{family}-tuned'] = Grid(
                start_from=family,
                axes={'task': tasks},
                measures=('test/accuracy', 'compute'),
                published=base.published(PUBLISHED[family]),
                means={'all': tuple(tasks)},
            )
    config = base.get_config(size)
    if size == 'full':
        config = dataclasses.replace(vit.get_config('jft,B/16'), fewshot=config.fewshot)
    seeds = (0,) if size == 'full' else (0, 1, 2)
    return Study(title='Compute and accuracy', base=config, grids=grids, seeds=seeds, draw=plot)


def _small(family: str) -> dict[str, Any]:
    if family == 'resnet':
        return {
            '-'.join(map(str, blocks)): {
                'model': ResNetConfig(
                    image_size=(32, 32), backbone=Backbone(blocks=blocks, width=32)
                )
            }
            for blocks in BLOCKS
        }
    return {
        str(depth): {'model': base.SMALL[family], 'model.depth': depth} for depth in DEPTHS[family]
    }
