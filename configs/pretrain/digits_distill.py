"""Distills the model of the quickstart into one of a quarter of its width.

Paper: "Knowledge distillation: A good teacher is patient and consistent": the student learns the
teacher's probabilities for the same augmented images, without labels, with MixUp.
Result: not run yet.
Cost: not measured yet.
Command: python -m vit_jax.train --config=configs/pretrain/digits_distill.py:/tmp/vit/quickstart \
             --workdir=DIR
"""

import dataclasses

from vit_jax.config import TrainConfig
from vit_jax.configs import quickstart
from vit_jax.data.augmentation import Augmentation
from vit_jax.models import ViTConfig
from vit_jax.training.distillation import Distillation
from vit_jax.training.losses import LossConfig


def get_config(teacher: str = '/tmp/vit/quickstart') -> TrainConfig:
    """Returns the experiment with a teacher, such as the work directory of the quickstart."""
    config = quickstart.get_config()
    assert isinstance(config.model, ViTConfig)
    config.model = dataclasses.replace(config.model, width=16, mlp_dim=64, num_heads=1)
    config.augmentation = Augmentation(shift_pixels=1, mixup=1.0)
    config.batch_size = 64
    config.loss = LossConfig()
    config.distillation = Distillation(teacher=teacher, task_weight=0.0)
    config.fewshot = None
    return config
