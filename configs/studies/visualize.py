"""Trains small models on CIFAR-10 for `visualize`.

Paper: Raghu et al. 2021, "Do Vision Transformers See Like Convolutional Neural Networks?". `cls` is
a ViT with a class token, `gap` a ViT with mean pooling, and `resnet` a ResNet with as
many blocks.
Result: 53 to 65 % test accuracy; docs/visualize.md has the figures.
Cost: Each training takes 12 minutes on one CPU core.
Command: python -m vit_jax.train --config=configs/studies/visualize.py:cls --config.data=DATA \
             --workdir=DIR
    --config.model.blocks_without_skips='(2,)' removes the skip connections of a block, and
    --config.train_split='train[:10%]' trains on a tenth of the images for as many steps.
"""

import dataclasses

from vit_jax.config import TrainConfig
from vit_jax.configs.studies import base
from vit_jax.models import Backbone, ModelConfig, ResNetConfig
from vit_jax.training.duration import Duration

ARGUMENTS = 'cls', 'gap', 'resnet'


def get_config(model: str = 'cls') -> TrainConfig:
    """Returns the experiment of one model; --config.data sets the folder."""
    models: dict[str, ModelConfig] = {
        'cls': dataclasses.replace(base.SMALL_VIT, patch_size=(4, 4), pool='cls'),
        'gap': dataclasses.replace(base.SMALL_VIT, patch_size=(4, 4)),
        'resnet': ResNetConfig(image_size=(32, 32), backbone=Backbone(blocks=(2, 2, 2), width=32)),
    }
    config = base.get_config('small')
    config.model = models[model]
    config.schedule.warmup = Duration(steps=300)
    config.checkpoint_every_steps = 500
    return config
