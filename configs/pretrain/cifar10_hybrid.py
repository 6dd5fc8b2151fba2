"""Pre-trains a small hybrid (convolutions before a ViT) on CIFAR-10 on two CPU cores.

Paper: "An Image is Worth 16x16 Words", section 4.4, figure 5: hybrids are better than ViTs at small
computational budgets. Images are enlarged to 48 pixels, which gives 12 x 12 positions in the first
stage and 36 tokens.
Result: The model reaches 86.2 % test accuracy (10,000 images), with seed 0.
Cost: The training takes 46 minutes on 2 CPU cores, with one jax device per core.
Command: XLA_FLAGS=--xla_force_host_platform_device_count=2 GLIBC_TUNABLES=glibc.malloc.hugetlb=1 \
             python -m vit_jax.train --config=configs/pretrain/cifar10_hybrid.py --workdir=DIR \
             --config.data=DATA
"""

import dataclasses

from vit_jax.config import TrainConfig
from vit_jax.configs.pretrain import cifar10
from vit_jax.data.augmentation import Augmentation
from vit_jax.models import Backbone, ViTConfig
from vit_jax.training.duration import Duration
from vit_jax.training.losses import LossConfig
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig


def get_config() -> TrainConfig:
    """Returns the experiment; --config.data sets the folder."""
    return dataclasses.replace(
        cifar10.base_config(),
        model=ViTConfig(
            image_size=(48, 48),
            patch_size=(1, 1),
            backbone=Backbone(blocks=(2, 2), width=32),
            width=96,
            depth=3,
            mlp_dim=192,
            num_heads=3,
            pool='gap',
            positions='sincos2d',
        ),
        augmentation=Augmentation(shift_pixels=5, flip=True, erasing=0.1),
        total=Duration(steps=10_000),
        batch_size=128,
        loss=LossConfig(label_smoothing=0.1),
        optimizer=OptimizerConfig(kind='muon', weight_decay=0.1, clip_norm=1.0),
        schedule=ScheduleConfig(learning_rate=6e-3, warmup=Duration(steps=500)),
        eval_every_steps=2500,
        checkpoint_every_steps=2500,
    )
