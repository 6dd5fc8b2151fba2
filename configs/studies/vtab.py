"""Fine-tunes one model on each of the 19 tasks of VTAB-1k, with the means of their groups.

Paper: "An Image is Worth 16x16 Words", table 2, figure 2 and table 9; recipe and data are those in
configs/finetune/vtab.py. Models from JFT are not public: set --config.base.start_from to another
checkpoint. A task with missing data fails with the command that prepares it, and the others
continue.
Result: The means of the 19 tasks, of three runs each, are 77.6 % (H/14 from JFT), 76.3 % (L/16 from
JFT) and 72.7 % (L/16 from ImageNet-21k). PUBLISHED below is table 9.
Cost: L/16 takes 19 x 1.5 exaFLOPs, and 390,000 test images at 384 pixels, for each seed.
Command: python -m vit_jax.study --config=configs/studies/vtab.py:L/16-in21k --workdir=DIR
"""

from typing import Any

from vit_jax.configs.finetune import vtab
from vit_jax.data.sources.vtab import TASKS, VtabTask
from vit_jax.studies.config import Grid, Study

# Table 9: test accuracies in percent, in the order of TASKS.
# fmt: off
PUBLISHED = {
    'L/16-in21k': (90.8, 84.1, 74.1, 99.3, 92.7, 61.0, 80.9,  82.5, 95.6, 85.2, 75.3,
                   70.3, 56.1, 41.9, 74.7, 64.9, 79.9, 30.5, 41.7),
    'B/16-in21k': (),  # not in the table
    'L/16-jft': (95.4, 81.9, 74.3, 99.7, 96.7, 63.5, 87.4,  83.6, 96.5, 89.7, 77.1,
                 86.4, 63.1, 49.7, 74.5, 60.5, 82.2, 36.2, 51.1),
    'H/14-jft': (95.3, 85.5, 75.2, 99.7, 97.2, 65.0, 88.9,  83.3, 96.7, 91.4, 76.6,
                 91.7, 63.8, 53.1, 79.4, 63.3, 84.5, 33.2, 51.2),
}
# fmt: on
ARGUMENTS = tuple(PUBLISHED)


def get_config(model: str = 'L/16-in21k') -> Study:
    """Returns a study of the 19 tasks; the base has the crops and flips of most tasks."""
    base = vtab.get_config('caltech101')
    base.start_from = None if model.endswith('jft') else f'vit:{model}'
    groups: dict[str, tuple[str, ...]] = {
        group: tuple(name for name, task in TASKS.items() if task.group == group)
        for group in ('natural', 'specialized', 'structured')
    }
    published = dict(zip(TASKS, PUBLISHED[model], strict=False))
    grid = Grid(
        axes={'task': {name: _changes(name, task) for name, task in TASKS.items()}},
        published={name: percent / 100 for name, percent in published.items()},
        means=groups | {'all': tuple(TASKS)},
    )
    return Study(title=f'VTAB-1k, {model}', base=base, grids={'vtab': grid}, seeds=(0, 1, 2))


def _changes(name: str, task: VtabTask) -> dict[str, Any]:
    uncropped: dict[str, Any] = {} if task.crop else {'augmentation.crop': None}
    unflipped: dict[str, Any] = {} if task.flip else {'augmentation.flip': False}
    return {'data': f'vtab:{name}'} | uncropped | unflipped
