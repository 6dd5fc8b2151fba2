"""Masked patches, labels, or nothing: what is pre-training without labels worth?

Paper: "An Image is Worth 16x16 Words", section 4.6: B/16 that predicted masked patches reaches 79.9
% on ImageNet, 2 % more than from scratch, 4 % less than with supervised pre-training. Here each
network is fine-tuned on a part of the labels; `supervised` has learned from the labels of all
images.
Result: docs/studies.md. Cost of `small`: 3 trainings of 6 minutes on one CPU core, 21 of 3.
Command: python -m vit_jax.study --config=configs/studies/self_supervision.py:small \
             --config.base.data=DATA --workdir=DIR
"""

from typing import Any

from vit_jax.config import Drawing, Grid, Study
from vit_jax.configs.finetune import vit as finetuning
from vit_jax.configs.pretrain import masked_patches
from vit_jax.configs.pretrain import vit as pretraining
from vit_jax.configs.studies import base
from vit_jax.training.duration import Duration
from vit_jax.training.masked_patches import MaskedPatches

SHARES = {'small': ('10%', '100%'), 'full': ('1%', '10%', '100%')}
ARGUMENTS = 'small', 'full'


def get_config(size: str = 'small') -> Study:
    """Two ways to pre-train, then all are trained with labels, and one is from the beginning."""
    scratch: dict[str, Any] = {'objective': None}
    tuned = dict(scratch)
    if size == 'small':
        config = base.get_config('small')
        masked = {'objective': MaskedPatches(), 'total': Duration(steps=5000)}
    else:
        config, masked = masked_patches.get_config('imagenet'), {}
        own = 'data', 'eval_split', 'model', 'seed', 'start_from', 'compute'
        for changes, one in (
            (scratch, pretraining.get_config('imagenet,B/16')),
            (tuned, finetuning.get_config('imagenet,0.03')),
        ):
            changes |= {name: value for name, value in vars(one).items() if name not in own}
    labels = {share: {'train_split': f'train[:{share}]'} for share in SHARES[size]}
    return Study(
        title='Pre-training without labels',
        base=config,
        grids={
            'pretrain': Grid(
                axes={'pretraining': {'masked': masked, 'supervised': scratch}}, measures=()
            ),
            'tune': Grid(start_from='pretrain', changes=tuned, axes={'labels': labels}),
            'scratch': Grid(changes=scratch, axes={'labels': labels}),
        },
        seeds=(0, 1, 2),
        draw=Drawing(x='labels', logarithmic=True),
    )
