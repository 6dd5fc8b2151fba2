"""A small ViT on scikit-learn's digits: the whole road in a minute, with nothing to download.

Result: 98 % test accuracy (360 images). Cost: about 1 minute on 2 CPU cores.
Command: python -m vit_jax.train --config=configs/quickstart.py --workdir=/tmp/vit/quickstart
"""

from vit_jax.config import TrainConfig
from vit_jax.data.augment import Augmentation
from vit_jax.evaluation.fewshot import FewshotConfig
from vit_jax.models import ViTConfig
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig


def get_config() -> TrainConfig:
    """The experiment."""
    return TrainConfig(
        data='digits',
        model=ViTConfig(
            image_size=(16, 16), patch_size=(4, 4), width=64, depth=4, mlp_dim=256, num_heads=4
        ),
        augmentation=Augmentation(shift_pixels=2),
        total_steps=800,
        batch_size=128,
        optimizer=OptimizerConfig(weight_decay=0.1, clip_norm=1.0),
        schedule=ScheduleConfig(learning_rate=2e-3, warmup_steps=80),
        eval_every_steps=200,
        checkpoint_every_steps=200,
        fewshot=FewshotConfig(shots=(1, 5, 10), every_steps=200),
    )
