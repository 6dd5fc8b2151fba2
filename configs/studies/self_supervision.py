"""Compares pre-training without labels, supervised pre-training and training from scratch.

Paper: "An Image is Worth 16x16 Words", section 4.6: B/16 pre-trained on masked patches reaches
79.9 % on ImageNet, 2 % more than from scratch and 4 % less than with supervised pre-training.
"Masked Autoencoders Are Scalable Vision Learners": 83.6 %, and 82.3 % from scratch. Each model is
fine-tuned on a part of the labels; `supervised` was pre-trained with the labels of all images. In
`full`, all models are finally fine-tuned at 384 pixels, also models from scratch. In `small`, each
pre-training has as many CPU seconds.
Result: docs/studies.md has the results of `small`.
Cost: `small` has 9 training runs of 8 minutes on one CPU core, and 24 of 2 minutes.
Command: python -m vit_jax.study --config=configs/studies/self_supervision.py:small \
             --config.base.data=DATA --workdir=DIR
"""

import dataclasses
from typing import Any

from vit_jax.configs.finetune import vit as finetuning
from vit_jax.configs.pretrain import mae, masked_patches
from vit_jax.configs.pretrain import vit as pretraining
from vit_jax.configs.studies import base
from vit_jax.evaluation.probing import FewshotConfig
from vit_jax.studies.config import Grid, PlotConfig, Study
from vit_jax.training.duration import Duration
from vit_jax.training.objectives import MaskedAutoencoder, MaskedPatches

SHARES = {'small': ('1%', '10%'), 'full': ('1%', '10%', '100%')}
ARGUMENTS = 'small', 'full'
# Steps of 64 images that take 8 minutes on one CPU core.
_STEPS = {'mae': 2150, 'masked': 1300, 'supervised': 1600}


def get_config(size: str = 'small') -> Study:
    """Returns a study of kinds of pre-training before fine-tuning, and of no pre-training."""
    return _small() if size == 'small' else _full()


def _small() -> Study:
    config = base.get_config('small')
    # 64 tokens; a masked autoencoder encodes 16 of them.
    config.model = dataclasses.replace(base.SMALL_VIT, patch_size=(4, 4), positions='sincos2d')
    config.schedule.warmup = Duration(fraction=0.1)
    config.fewshot = FewshotConfig()
    objectives = {
        'mae': MaskedAutoencoder(decoder_depth=2, decoder_width=64, decoder_heads=4),
        'masked': MaskedPatches(),
        'supervised': None,
    }
    pretrainings = {
        name: {'objective': objective, 'total': Duration(steps=_STEPS[name])}
        for name, objective in objectives.items()
    }
    labels = {share: {'train_split': f'train[:{share}]'} for share in SHARES['small']}
    tuned = {'objective': None, 'total': Duration(steps=300), 'fewshot': None}
    shots = 'fewshot/5_shot_accuracy', 'fewshot/25_shot_accuracy'
    return Study(
        title='Pre-training without labels',
        base=config,
        grids={
            'pretrain': Grid(axes={'pretraining': pretrainings}, measures=shots),
            'tune': Grid(start_from='pretrain', changes=tuned, axes={'labels': labels}),
            'scratch': Grid(changes=tuned, axes={'labels': labels}),
        },
        seeds=(0, 1, 2),
        draw=PlotConfig(x='labels', logarithmic=True),
    )


def _full() -> Study:
    config = masked_patches.get_config('imagenet')
    kept = 'data', 'train_split', 'eval_split', 'seed', 'start_from', 'compute'
    supervised = pretraining.get_config('imagenet,B/16')
    supervised.schedule.warmup = Duration(fraction=0.1)  # 9,400 steps for all images
    scratch: dict[str, Any] = {
        name: value for name, value in vars(supervised).items() if name not in kept
    }
    autoencoder = {
        name: value for name, value in vars(mae.get_config()).items() if name not in kept
    }
    finetuned = vars(finetuning.get_config('imagenet,0.03'))
    tuned = {k: v for k, v in finetuned.items() if k not in (*kept, 'model')}
    labels = {share: {'train_split': f'train[:{share}]'} for share in SHARES['full']}
    pretrainings = {'masked': {}, 'mae': autoencoder, 'supervised': scratch}
    grids = {
        'pretrain': Grid(axes={'pretraining': pretrainings}, measures=()),
        'tune': Grid(
            start_from='pretrain',
            changes={'objective': None} | tuned,
            axes={'labels': labels},
            published={'masked-100%': 0.799},
        ),
    }
    for share, split in labels.items():  # trained and fine-tuned on the same share
        grid_name = f'scratch-{share[:-1]}'  # percent
        grids[grid_name] = Grid(changes={'objective': None} | scratch | split, measures=())
        grids[f'{grid_name}-tuned'] = Grid(
            start_from=grid_name,
            changes={'objective': None} | tuned,
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
