"""Compares Adam and SGD for fine-tuning ResNets, or AdamW and Muon for training a ViT (`muon`).

Paper: "An Image is Worth 16x16 Words", appendix D.1, table 7: ResNets that were pre-trained with
Adam on JFT-300M are fine-tuned with both optimizers; Adam is better on most tasks. JFT is not
public: `full` refers to it by name. Muon is from "Muon is Scalable for LLM Training"
(arXiv:2502.16982). `muon` holds out a tenth of the training images and compares learning rates on
them, not on test images.
Result: With `muon`, Muon reaches 52.5 % and AdamW 41.1 % at their best rates (docs/studies.md).
The fine-tuning was not run here yet; PUBLISHED below is table 7.
Cost: `small` has 3 training runs of 4 minutes on one CPU core, and 6 fine-tunings of 2 minutes.
`muon` has 24 training runs of 1 minute on one CPU core.
Command: python -m vit_jax.study --config=configs/studies/optimizers.py:small \
             --config.base.data=DATA --workdir=DIR
"""

import dataclasses
from typing import Any

from vit_jax.config import EvalConfig
from vit_jax.configs.pretrain import vit
from vit_jax.configs.studies import base
from vit_jax.studies.config import Grid, PlotConfig, Study
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig

# Accuracies in percent, in the order of base.TASKS.
PUBLISHED = {
    'adamw': {
        'R50x1': (77.54, 97.67, 86.07, 91.11, 94.26),
        'R152x2': (84.97, 99.06, 92.05, 95.37, 98.62),
    },
    'sgd': {
        'R50x1': (78.24, 97.46, 85.17, 91.00, 92.06),
        'R152x2': (84.37, 99.07, 91.06, 94.79, 99.32),
    },
}
# The learning rate of Adam is our choice; the paper does not state it.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    'adamw': {
        'optimizer': OptimizerConfig(kind='adamw', clip_norm=1.0),
        'schedule.learning_rate': 3e-4,
    },
    'sgd': {},
}
RATES = {'adamw': (0.0003, 0.001, 0.003, 0.006), 'muon': (0.003, 0.006, 0.012, 0.024)}
ARGUMENTS = 'small', 'full', 'muon'


def get_config(size: str = 'small') -> Study:
    """Returns a study of ResNets that are fine-tuned with both optimizers, or a study of Muon."""
    if size == 'muon':
        return _compare_muon()
    config = base.get_config(size)
    published: dict[str, float] = {}
    if size == 'small':
        models: dict[str, Any] = {'resnet': {'model': base.SMALL['resnet']}}
        tasks: dict[str, Any] = {'digits': base.fine_tuning('small')}
    else:
        config = dataclasses.replace(vit.get_config('jft,R50x1'), fewshot=config.fewshot)
        models = base.rows('R50x1', 'R152x2')
        tasks = base.TASKS
        for optimizer, accuracies in PUBLISHED.items():
            for run, accuracy in base.published(accuracies).items():
                published[f'{run}-{optimizer}'] = accuracy
    return Study(
        title='Fine-tuning ResNets',
        base=config,
        grids={
            'train': Grid(axes={'network': models}),
            'tune': Grid(
                start_from='train',
                axes={'task': tasks, 'optimizer': OPTIMIZERS},
                published=published,
            ),
        },
        seeds=(0, 1, 2),
        draw=PlotConfig(x='optimizer'),
    )


def _compare_muon() -> Study:
    """Returns a study of the small ViT with AdamW and Muon at four learning rates each."""
    config = dataclasses.replace(
        base.get_config('small'),
        train_split='train[:90%]',
        evals={'validation': EvalConfig(split='train[90%:]')},
        total=Duration(steps=1200),
        schedule=ScheduleConfig(warmup=Duration(steps=120)),
    )
    measure = 'validation/accuracy'
    grids = {
        kind: Grid(
            changes={'optimizer.kind': kind},
            axes={'rate': {str(rate): {'schedule.learning_rate': rate} for rate in rates}},
            measures=(measure,),
        )
        for kind, rates in RATES.items()
    }
    return Study(
        title='AdamW and Muon',
        base=config,
        grids=grids,
        seeds=(0, 1, 2),
        draw=PlotConfig(x='rate', y=measure, logarithmic=True),
    )
