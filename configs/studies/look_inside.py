"""Small networks on CIFAR-10 to look into: docs/visualize.md has what they show.

cls: ViT with a class token; gap: with the mean of its tokens; resnet: a ResNet of as many layers.
Command: python -m vit_jax.train --config=configs/studies/look_inside.py:cls --config.data=DATA \
             --workdir=DIR
    --config.model.blocks_without_skips='(2,)' leaves out the skip connections of a block,
    --config.train_split='train[:10%]' learns from a tenth of the images, in as many steps.
"""

import dataclasses

from vit_jax.config import TrainConfig
from vit_jax.configs.studies import base
from vit_jax.models import Backbone, ModelConfig, ResNetConfig
from vit_jax.training.duration import Duration

ARGUMENTS = 'cls', 'gap', 'resnet'


def get_config(network: str = 'cls') -> TrainConfig:
    """The experiment of one of these networks; --config.data names the folder."""
    networks: dict[str, ModelConfig] = {
        'cls': dataclasses.replace(base.SMALL_VIT, patch_size=(4, 4), pool='cls'),
        'gap': dataclasses.replace(base.SMALL_VIT, patch_size=(4, 4)),
        'resnet': ResNetConfig(image_size=(32, 32), backbone=Backbone(blocks=(2, 2, 2), width=32)),
    }
    config = base.get_config('small')
    config.model = networks[network]
    config.schedule.warmup = Duration(steps=300)
    config.checkpoint_every_steps = 500
    return config
