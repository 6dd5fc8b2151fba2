"""Measures how many images a Vision Transformer needs to overtake a ResNet.

Paper: "An Image is Worth 16x16 Words", section 4.3. In figure 4, B/32 is far below R50x1 with 9 M
images of JFT and above it with 90 M and more; the same holds for L/16 and R152x2. The
regularization is constant, and each model is evaluated at its best step on held-out images. JFT is
not public: `full` has random, nested parts of ImageNet-21k, each trained for as many steps as 90
epochs of all images. `sets` reproduces figure 3 and table 5: models from ImageNet, ImageNet-21k or
JFT are fine-tuned on five tasks; larger ViTs are worse with the smallest data set and better with
the largest. `sets` has the regularization of table 3; the paper tuned it for smaller data sets.
Result: docs/studies.md has the results of `small`; PUBLISHED below is table 5.
Cost: `small` has 36 training runs of 3 to 10 minutes on one CPU core, and as many fine-tunings.
Command: python -m vit_jax.study --config=configs/studies/data.py:small \
             --config.base.data=DATA --workdir=DIR
"""

import dataclasses
from typing import Any

from vit_jax.config import EvalConfig
from vit_jax.configs.pretrain import vit
from vit_jax.configs.studies import base
from vit_jax.evaluation.probing import FewshotConfig
from vit_jax.models import ModelConfig, Regularization, ViTConfig
from vit_jax.studies.config import Grid, PlotConfig, Study
from vit_jax.training.duration import Duration

IMAGENET_21K = 14_197_122  # images
SHARES = {'small': ('2%', '10%', '30%', '98%'), 'full': ('3%', '10%', '30%', '98%')}
# Accuracies in percent after fine-tuning, in the order of base.TASKS; epochs as in table 6, or 90.
PUBLISHED = {
    'imagenet,B/16': (77.91, 98.13, 87.13, 93.81, 89.49),
    'imagenet,B/32': (73.38, 97.77, 86.31, 92.04, 85.43),
    'imagenet,L/16': (76.53, 97.86, 86.35, 93.64, 89.66),
    'imagenet,L/32': (71.16, 97.94, 87.07, 91.35, 86.36),
    'imagenet21k,B/16': (83.97, 98.95, 91.67, 94.43, 99.38),
    'imagenet21k,B/32': (81.28, 98.79, 91.97, 93.02, 99.11),
    'imagenet21k,L/16,90': (85.15, 99.16, 93.44, 94.73, 99.61),
    'imagenet21k,L/32,90': (80.99, 99.13, 93.04, 93.09, 99.19),
    'jft,B/16': (84.15, 99.00, 91.87, 95.80, 99.56),
    'jft,B/32': (80.73, 98.61, 90.49, 93.40, 99.27),
    'jft,L/16,14': (87.12, 99.38, 94.04, 97.11, 99.56),
    'jft,L/32': (84.37, 99.19, 92.52, 95.83, 99.45),
    'jft,H/14': (88.04, 99.50, 94.55, 97.56, 99.68),
}
ARGUMENTS = 'small', 'full', 'sets'


def _models(size: str) -> dict[str, Any]:
    """Returns the models of figure 4 and a hybrid; half-B32 is b/32 in the paper (half sizes)."""
    if size == 'small':
        return base.SMALL
    rows = 'L/16,7', 'L/32', 'B/32', 'R50+B/32', 'R50x1', 'R152x2'
    models: dict[str, Any] = {
        base.name_of(row.partition(',')[0]): vit.get_config(f'jft,{row}').model for row in rows
    }
    half = {'width': 384, 'mlp_dim': 1536, 'num_heads': 6, 'representation_size': 384}
    return models | {'half-B32': dataclasses.replace(models['B32'], **half)}


def _changes(model: ModelConfig) -> dict[str, Any]:
    """Returns the changes for a model; a ResNet has no dropout."""
    without = {} if isinstance(model, ViTConfig) else {'regularization': Regularization()}
    return {'model': model} | without


def get_config(size: str = 'small') -> Study:
    """Returns a study of models by shares of the data or by data sets, with fine-tuning."""
    if size == 'sets':
        return _sets()
    study_base = base.get_config(size)
    every_steps = 250 if size == 'small' else 5_000
    fewshot = study_base.fewshot or FewshotConfig(shots=(5,))
    test = study_base.eval_split
    if size == 'full':
        study_base.total = Duration(examples=90 * IMAGENET_21K)
    study_base = dataclasses.replace(
        study_base,
        eval_split='test',
        evals={'held_out': EvalConfig(split='train[98%:]'), 'test': EvalConfig(split=test)},
        eval_every_steps=every_steps,
        checkpoint_every_steps=every_steps,
        keep_checkpoints=1000,
        fewshot=dataclasses.replace(fewshot, every_steps=every_steps),
    )
    tasks: dict[str, Any] = base.TASKS
    if size == 'small':
        tasks = {'digits': base.fine_tuning('small')}
    few_shot = 'fewshot/5_shot_accuracy'
    return Study(
        title='Pre-training data and networks',
        base=study_base,
        grids={
            'train': Grid(
                axes={
                    'network': {name: _changes(m) for name, m in _models(size).items()},
                    'data': {share: {'train_split': f'train[:{share}]'} for share in SHARES[size]},
                },
                best='held_out/accuracy',
                measures=('test/accuracy', few_shot),
            ),
            'tune': Grid(
                start_from='train',
                changes={'train_split': 'train', 'evals': {}, 'keep_checkpoints': 1},
                axes={'task': tasks},
            ),
        },
        seeds=(0, 1, 2),
        draw=PlotConfig(x='data', y=few_shot, logarithmic=True),
    )


def _sets() -> Study:
    grids = {}
    fields = 'data', 'eval_split', 'model', 'total', 'loss', 'optimizer', 'schedule'
    for data in vit.DATA:
        accuracies = {
            row: values for row, values in PUBLISHED.items() if row.startswith(f'{data},')
        }
        names = {row: row.split(',')[1] for row in accuracies}
        grids[data] = Grid(
            axes={
                'network': {
                    base.name_of(name): base.fields(vit.get_config(row), *fields, 'regularization')
                    for row, name in names.items()
                }
            },
            measures=(),
        )
        grids[f'{data}-tuned'] = Grid(
            start_from=data,
            axes={'task': base.TASKS},
            published=base.published({names[row]: v for row, v in accuracies.items()}),
            means={'all': tuple(base.TASKS)},
        )
    plot = PlotConfig(x='network', mean='all')
    start = vit.get_config('jft,B/16')
    return Study(title='Pre-training sets', base=start, grids=grids, draw=plot)
