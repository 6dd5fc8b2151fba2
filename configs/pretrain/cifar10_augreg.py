"""AugReg's question at a laptop's scale: does augmentation help a ViT trained from scratch?

Paper: "How to train your ViT?" (RandAugment and MixUp at one of seven levels). 5,000 images of
CIFAR-10, 60 epochs, a ViT of 0.8 M parameters; all 10,000 test images.
Command: python -m vit_jax.train --config=configs/pretrain/cifar10_augreg.py:light2 \
             --config.data=FOLDER --workdir=DIR
"""

import dataclasses

from vit_jax.config import TrainConfig
from vit_jax.data.augment import AUGREG, augreg
from vit_jax.models import Compute, ViTConfig
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig

ARGUMENTS = tuple(AUGREG)


def get_config(level: str = 'light2') -> TrainConfig:
    """The experiment at one level; --config.data names the folder."""
    return TrainConfig(
        data='cifar10',
        train_split='train[:10%]',
        model=ViTConfig(
            image_size=(32, 32),
            patch_size=(8, 8),
            width=128,
            depth=6,
            mlp_dim=256,
            num_heads=4,
            pool='gap',
            positions='sincos2d',
        ),
        # Shifts in place of the Inception crop: then the images lie on the device.
        augmentation=dataclasses.replace(augreg(level), crop=None, shift_pixels=4),
        total=Duration(steps=4700),
        batch_size=64,
        eval_batch_size=512,
        optimizer=OptimizerConfig(weight_decay=0.1, clip_norm=1.0),
        schedule=ScheduleConfig(learning_rate=1e-3, warmup=Duration(steps=300)),
        compute=Compute(remat='dots'),  # on CPUs faster than keeping everything
    )
