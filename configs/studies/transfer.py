"""Compares which part of a pre-trained model to train, by amount and similarity of the data.

Paper: "An Image is Worth 16x16 Words", section 4.1, always trains all parameters. Common advice is
to train the head for little data that is similar to the pre-training data, and everything for much
data. The study trains the head, everything at a tenth of the learning rate, the last two blocks, or
everything. `small` pre-trains on five classes of CIFAR-10; `near` has the other five classes, `far`
scikit-learn's digits. `full` starts from B/16 from ImageNet-21k; `near` is Pets, `far` EuroSAT.
Result: not run here yet.
Cost: `small` has 3 training runs of 3 minutes on one CPU core, and 48 fine-tunings of 1 minute.
Command: python -m vit_jax.study --config=configs/studies/transfer.py:small \
             --config.base.data=DATA --workdir=DIR
"""

import dataclasses
from typing import Any

from vit_jax.configs.studies import base
from vit_jax.studies.config import Grid, PlotConfig, Study

LEARNED = 'airplane', 'automobile', 'bird', 'cat', 'deer'
NEAR = 'dog', 'frog', 'horse', 'ship', 'truck'
TRAINED: dict[str, dict[str, Any]] = {
    'head': {'optimizer.trained_blocks': 0},
    'small-rate': {},  # a tenth of the learning rate, see get_config
    'last-blocks': {'optimizer.trained_blocks': 2},
    'all': {},
}
SHARES: dict[str, dict[str, dict[str, Any]]] = {
    'small': {
        'little': {'train_split': 'train[:3%]'},
        'much': {'train_split': 'train'},
    },
    'full': {
        'little': {'train_split': 'train[:5%]'},
        'much': {'train_split': 'train[:90%]'},
    },
}
ARGUMENTS = 'small', 'full'


def get_config(size: str = 'small') -> Study:
    """Returns a study of trained parts by amount and similarity of the data."""
    far = base.fine_tuning('small')
    near = {name: value for name, value in far.items() if name not in ('data', 'eval_split')}
    tasks: dict[str, dict[str, Any]]
    if size == 'small':
        config = dataclasses.replace(base.get_config('small'), classes=LEARNED)
        tasks = {'near': near | {'classes': NEAR}, 'far': far | {'classes': ()}}
        before = {'train': Grid()}
        start: dict[str, Any] = {'start_from': 'train'}
    else:
        config = dataclasses.replace(
            base.get_config('full'), model=None, preprocessing=None, start_from='vit:B/16-in21k'
        )
        near = base.fine_tuning('full', 'pets,0.01')
        far = near | {'data': 'tfds:eurosat/rgb', 'eval_split': 'train[90%:]'}
        tasks = {'near': near, 'far': far}
        before = {}
        start = {}
    rate = tasks['near']['schedule'].learning_rate / 10
    trained = TRAINED | {'small-rate': {'schedule.learning_rate': rate}}
    tune = Grid(axes={'target': tasks, 'data': SHARES[size], 'trained': trained}, **start)
    return Study(
        title='What to train of a pre-trained network',
        base=config,
        grids=before | {'tune': tune},
        seeds=(0, 1, 2),
        draw=PlotConfig(x='trained'),
    )
