"""Which part of a pre-trained network to train: the four cases of transfer learning.

Little or much target data, near to or far from what was learned before: the head alone, all with a
tenth of the rate, the last two blocks, or all. Common advice: the head for little near data, all
for much; the paper (section 4.1) trains all, always. `small` learns five classes of CIFAR-10: near
are the other five, far are scikit-learn's digits. `full` starts from B/16 of ImageNet-21k; near are
pets, far is EuroSAT.
Result: not run here yet. Cost of `small`: 3 trainings of 3 minutes on one CPU core, and 48
fine-tunings of 1.
Command: python -m vit_jax.study --config=configs/studies/transfer.py:small \
             --config.base.data=DATA --workdir=DIR
"""

import dataclasses
from typing import Any

from vit_jax.configs.studies import base
from vit_jax.studies.config import Drawing, Grid, Study

LEARNED = 'airplane', 'automobile', 'bird', 'cat', 'deer'
NEAR = 'dog', 'frog', 'horse', 'ship', 'truck'
TRAINED: dict[str, dict[str, Any]] = {
    'head': {'optimizer.trained_blocks': 0},
    'small-rate': {},  # a tenth of it, below
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
    """Trained parts by amount and kind of data."""
    how = base.fine_tuning('small')
    own = {name: value for name, value in how.items() if name not in ('data', 'eval_split')}
    tasks: dict[str, dict[str, Any]]
    if size == 'small':
        config = dataclasses.replace(base.get_config('small'), classes=LEARNED)
        tasks = {'near': own | {'classes': NEAR}, 'far': how | {'classes': ()}}
        before = {'train': Grid()}
        start: dict[str, Any] = {'start_from': 'train'}
    else:
        config = dataclasses.replace(
            base.get_config('full'), model=None, preprocessing=None, start_from='vit:B/16-in21k'
        )
        near = base.fine_tuning('full', 'pets,0.01')
        far = near | {'data': 'tfds:eurosat/rgb', 'eval_split': 'train[90%:]'}
        tasks, before, start = {'near': near, 'far': far}, {}, {}
    rate = tasks['near']['schedule'].learning_rate / 10
    trained = TRAINED | {'small-rate': {'schedule.learning_rate': rate}}
    tune = Grid(axes={'target': tasks, 'data': SHARES[size], 'trained': trained}, **start)
    return Study(
        title='What to train of a pre-trained network',
        base=config,
        grids=before | {'tune': tune},
        seeds=(0, 1, 2),
        draw=Drawing(x='trained'),
    )
