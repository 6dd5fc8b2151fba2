"""Compares masked-patch pre-training, supervised pre-training and training from scratch.

Paper: "An Image is Worth 16x16 Words", section 4.6: B/16 pre-trained on masked patches reaches
79.9 % on ImageNet, 2 % more than from scratch and 4 % less than with supervised pre-training. Each
model is fine-tuned on a part of the labels; `supervised` was pre-trained with the labels of all
images. In `full`, all models are finally fine-tuned at 384 pixels, also models from scratch.
Result: docs/studies.md has the results of `small`.
Cost: `small` has 3 training runs of 6 minutes on one CPU core, and 21 of 3 minutes.
Command: python -m vit_jax.study --config=configs/studies/self_supervision.py:small \
             --config.base.data=DATA --workdir=DIR
"""

from typing import Any

from vit_jax.configs.finetune import vit as finetuning
from vit_jax.configs.pretrain import masked_patches
from vit_jax.configs.pretrain import vit as pretraining
from vit_jax.configs.studies import base
from vit_jax.studies.config import Grid, PlotConfig, Study
from vit_jax.training.duration import Duration
from vit_jax.training.objectives import MaskedPatches

SHARES = {'small': ('10%', '100%'), 'full': ('1%', '10%', '100%')}
ARGUMENTS = 'small', 'full'


def get_config(size: str = 'small') -> Study:
    """Returns a study of two kinds of pre-training before fine-tuning, and of no pre-training."""
    scratch: dict[str, Any] = {'objective': None}
    tune_changes = dict(scratch)
    if size == 'small':
        config = base.get_config('small')
        masked = {'objective': MaskedPatches(), 'total': Duration(steps=5000)}
    else:
        config = masked_patches.get_config('imagenet')
        masked = {}
        kept = 'data', 'train_split', 'eval_split', 'seed', 'start_from', 'compute'
        supervised = pretraining.get_config('imagenet,B/16')
        supervised.schedule.warmup = Duration(fraction=0.1)  # 9,400 steps for all images
        scratch |= {name: value for name, value in vars(supervised).items() if name not in kept}
        finetuned = vars(finetuning.get_config('imagenet,0.03'))
        tune_changes |= {k: v for k, v in finetuned.items() if k not in (*kept, 'model')}
    labels = {share: {'train_split': f'train[:{share}]'} for share in SHARES[size]}
    pretrainings = {'masked': masked, 'supervised': scratch}
    grids = {
        'pretrain': Grid(axes={'pretraining': pretrainings}, measures=()),
        'tune': Grid(start_from='pretrain', changes=tune_changes, axes={'labels': labels}),
    }
    if size == 'small':
        grids['scratch'] = Grid(changes=scratch, axes={'labels': labels})
    else:
        grids['tune'].published = {'masked-100%': 0.799}
        for share, split in labels.items():  # trained and fine-tuned on the same share
            grid_name = f'scratch-{share.removesuffix("%")}'
            grids[grid_name] = Grid(changes=scratch | split, measures=())
            grids[f'{grid_name}-tuned'] = Grid(
                start_from=grid_name,
                changes=tune_changes,
                axes={'labels': {share: split}},
                published={'100%': 0.7791} if share == '100%' else {},  # table 5
            )
    return Study(
        title='Pre-training without labels',
        base=config,
        grids=grids,
        seeds=(0, 1, 2),
        draw=PlotConfig(x='labels', logarithmic=True),
    )
