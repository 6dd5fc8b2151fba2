"""Trains a small ViT on 2,500 images of CIFAR-10, with or without augmentation.

Paper: "How to train your ViT?" asks whether augmentation helps a ViT that is trained from scratch.
The model has 0.8 M parameters and trains for 120 epochs; all 10,000 test images are used. `none`
has only shifts and flips, `mild` one layer of RandAugment and MixUp of the level light2. The other
names are AugReg's levels.
Result: 43.55 % with `none` and 45.69 % with `mild`, means of 3 seeds (docs/training.md).
Cost: The training takes 8 to 9 minutes on one CPU core.
Command: python -m vit_jax.train --config=configs/pretrain/cifar10_augreg.py:mild \
             --config.data=DATA --workdir=DIR
"""

import dataclasses

from vit_jax.config import TrainConfig
from vit_jax.configs.pretrain import cifar10
from vit_jax.data.augmentation import AUGREG_LEVELS, augreg
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import OptimizerConfig

ARGUMENTS = 'none', 'mild', *(level for level in AUGREG_LEVELS if level != 'none')


def get_config(level: str = 'mild') -> TrainConfig:
    """Returns the experiment at one level; --config.data sets the folder."""
    # Shifts replace the Inception crop, so that the images stay on the device.
    augmentation = augreg('light2' if level == 'mild' else level)
    augmentation = dataclasses.replace(augmentation, crop=None, shift_pixels=4)
    if level == 'mild':
        augmentation.randaugment.layers = 1
    return dataclasses.replace(
        cifar10.base_config(),
        train_split='train[:5%]',
        model=dataclasses.replace(cifar10.MODEL, patch_size=(8, 8)),
        augmentation=augmentation,
        total=Duration(steps=4700),
        optimizer=OptimizerConfig(weight_decay=0.1, clip_norm=1.0),
        eval_every_steps=4700,  # only at the end
        checkpoint_every_steps=None,
        fewshot=None,
    )
