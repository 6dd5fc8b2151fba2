"""AugReg's question at a laptop's scale: does augmentation help a ViT trained from scratch?

Paper: "How to train your ViT?". 2,500 images of CIFAR-10, 120 epochs, a ViT of 0.8 M parameters,
all 10,000 test images; without augmentation but shifts and flips (`none`), with one layer of
RandAugment and MixUp at the level light2 (`mild`), or at one of AugReg's seven levels.
Result: docs/training.md. Cost: 8 minutes on one CPU core.
Command: python -m vit_jax.train --config=configs/pretrain/cifar10_augreg.py:mild \
             --config.data=DATA --workdir=DIR
"""

import dataclasses

from vit_jax.config import TrainConfig
from vit_jax.configs.pretrain import cifar10
from vit_jax.data.augmentation import AUGREG, augreg
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import OptimizerConfig

ARGUMENTS = 'none', 'mild', *(level for level in AUGREG if level != 'none')


def get_config(level: str = 'mild') -> TrainConfig:
    """The experiment at one level; --config.data names the folder."""
    # Shifts replace the Inception crop, so that the images stay on the device.
    augmentation = augreg('light2' if level == 'mild' else level)
    augmentation = dataclasses.replace(augmentation, crop=None, shift_pixels=4)
    if level == 'mild':
        augmentation.randaugment.layers = 1
    return dataclasses.replace(
        cifar10.get_config(),
        train_split='train[:5%]',
        model=dataclasses.replace(cifar10.MODEL, patch_size=(8, 8)),
        augmentation=augmentation,
        total=Duration(steps=4700),
        optimizer=OptimizerConfig(weight_decay=0.1, clip_norm=1.0),
        eval_every_steps=None,
        checkpoint_every_steps=None,
        fewshot=None,
    )
