"""Small networks on CIFAR-10 to look into: docs/look_inside.md has what they show.

cls: ViT with a class token; gap: with the mean of its tokens; resnet: a ResNet of as many layers.
Command: python -m vit_jax.train --config=configs/studies/look_inside.py:cls --config.data=DATA \
             --workdir=DIR
    --config.model.blocks_without_skips='(2,)' leaves out the skip connections of a block,
    --config.train_split='train[:10%]' learns from a tenth of the images, in as many steps.
"""

from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import Augmentation
from vit_jax.models import Backbone, ModelConfig, Pool, ResNetConfig, ViTConfig
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig

ARGUMENTS = 'cls', 'gap', 'resnet'


def _vit(pool: Pool) -> ViTConfig:
    return ViTConfig(
        image_size=(32, 32),
        patch_size=(4, 4),
        width=64,
        depth=6,
        mlp_dim=128,
        num_heads=4,
        pool=pool,
    )


def get_config(network: str = 'cls') -> TrainConfig:
    """The experiment of one of these networks; --config.data names the folder."""
    networks: dict[str, ModelConfig] = {
        'cls': _vit('cls'),
        'gap': _vit('gap'),
        'resnet': ResNetConfig(image_size=(32, 32), backbone=Backbone(blocks=(2, 2, 2), width=32)),
    }
    return TrainConfig(
        data='cifar10',
        model=networks[network],
        augmentation=Augmentation(shift_pixels=2, flip=True),
        total=Duration(steps=2500),
        batch_size=64,
        eval_batch_size=512,
        optimizer=OptimizerConfig(weight_decay=0.05, clip_norm=1.0),
        schedule=ScheduleConfig(learning_rate=1e-3, warmup=Duration(steps=300)),
        checkpoint_every_steps=500,
    )
