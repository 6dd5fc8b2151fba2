"""How many images does a Vision Transformer need before it overtakes a ResNet?

Paper: "An Image is Worth 16x16 Words", section 4.3, figures 3 and 4: on 9 M images of JFT B/32 is
far below R50x1, on 90 M and more above it, and so are L/16 and R152x2; no regularisation is
changed, and the network is that of the step of best accuracy on held-out images. JFT is not public:
`full` has parts of ImageNet-21k. Its splits are random and nested in each other.
Result: docs/studies.md. Cost of `small`: 36 trainings of 3 to 6 minutes on one CPU core, and as
many fine-tunings.
Command: python -m vit_jax.study --config=configs/studies/data.py:small \
             --config.base.data=DATA --workdir=DIR
"""

import dataclasses
from typing import Any

from vit_jax.config import Drawing, EvalConfig, FewshotConfig, Grid, Study
from vit_jax.configs.pretrain import vit
from vit_jax.configs.studies import base

SHARES = {'small': ('2%', '10%', '30%', '98%'), 'full': ('3%', '10%', '30%', '98%')}
ARGUMENTS = 'small', 'full'


def _networks(size: str) -> dict[str, Any]:
    """Those of figure 4, b/32 with half of B/32's sizes, and a hybrid."""
    if size == 'small':
        return base.SMALL
    rows = 'L/16,7', 'L/32', 'B/32', 'R50+B/32', 'R50x1', 'R152x2'
    found: dict[str, Any] = {
        row.partition(',')[0].replace('/', ''): vit.get_config(f'jft,{row}').model for row in rows
    }
    half = {'width': 384, 'mlp_dim': 1536, 'num_heads': 6, 'representation_size': 384}
    return found | {'half-B32': dataclasses.replace(found['B32'], **half)}


def get_config(size: str = 'small') -> Study:
    """Networks by shares of the data; then each is fine-tuned."""
    study_base = base.get_config(size)
    every = 250 if size == 'small' else 5_000
    fewshot = study_base.fewshot or FewshotConfig(shots=(5,))
    test = study_base.eval_split
    study_base = dataclasses.replace(
        study_base,
        eval_split='test',
        evals={'held_out': EvalConfig(split='train[98%:]'), 'test': EvalConfig(split=test)},
        eval_every_steps=every,
        checkpoint_every_steps=every,
        keep_checkpoints=1000,
        fewshot=dataclasses.replace(fewshot, every_steps=every),
    )
    tasks: dict[str, Any] = base.TASKS
    if size == 'small':
        tasks = {'digits': base.fine_tuning('small')}
    few = 'fewshot/5_shot_accuracy'
    return Study(
        title='Pre-training data and networks',
        base=study_base,
        grids={
            'train': Grid(
                axes={
                    'network': {name: {'model': m} for name, m in _networks(size).items()},
                    'data': {share: {'train_split': f'train[:{share}]'} for share in SHARES[size]},
                },
                best='held_out/accuracy',
                measures=('test/accuracy', few),
            ),
            'tune': Grid(
                start_from='train',
                changes={'train_split': 'train', 'evals': {}, 'keep_checkpoints': 1},
                axes={'task': tasks},
            ),
        },
        seeds=(0, 1, 2),
        draw=Drawing(x='data', y=few, logarithmic=True),
    )
