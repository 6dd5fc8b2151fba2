"""Compares augmentation levels for several amounts of data and model sizes.

Paper: "How to train your ViT?": augmentation helps more with less data and with larger models. The
best level of each model is in configs/pretrain/augreg.py.
Result: not run here yet.
Cost: `small` has 36 training runs of 3 to 6 minutes on one CPU core.
Command: python -m vit_jax.study --config=configs/studies/augreg.py:small \
             --config.base.data=DATA --workdir=DIR
"""

import dataclasses
from typing import Any

from vit_jax.configs.pretrain import augreg
from vit_jax.configs.studies import base
from vit_jax.data.augmentation import AUGREG_LEVELS, Augmentation
from vit_jax.data.augmentation import augreg as augmentation
from vit_jax.studies.config import Grid, PlotConfig, Study

ARGUMENTS = 'small', 'full'


def get_config(size: str = 'small') -> Study:
    """Returns a grid of models, data and levels."""
    config = base.get_config(size)
    levels: dict[str, Augmentation] = {
        level: augmentation(level) for level in (AUGREG_LEVELS if size == 'full' else SMALL)
    }
    models: dict[str, dict[str, Any]]
    if size == 'full':
        config = augreg.get_config('i1k,B/16')
        models = {
            name.replace('/', ''): {'model': augreg.get_config(f'i1k,{name}').model}
            for name in ('Ti/16', 'S/32', 'S/16', 'B/32', 'B/16', 'L/16')
        }
        i21k = augreg.DATA['i21k']
        data = {
            'i1k': {},
            'i21k': {
                'data': i21k.data,
                'eval_split': i21k.eval_split,
                'model.head_bias': i21k.head_bias,
            },
        }
    else:
        # Shifts replace the Inception crop, so that the images stay on the device.
        levels = {
            name: dataclasses.replace(level, crop=None, shift_pixels=2)
            for name, level in levels.items()
        }
        models = {'narrow': {}, 'wide': {'model.width': 128, 'model.mlp_dim': 256}}
        data = {share: {'train_split': f'train[:{share}]'} for share in ('5%', '100%')}
    grid = Grid(
        axes={
            'network': models,
            'data': data,
            'level': {name: {'augmentation': level} for name, level in levels.items()},
        }
    )
    return Study(
        title='Augmentation, data, networks',
        base=config,
        grids={'train': grid},
        seeds=(0, 1, 2) if size == 'small' else (0,),
        draw=PlotConfig(x='level'),
    )


SMALL = 'none', 'light2', 'strong2'
