"""Pre-trains a small ViT on scikit-learn's digits, without a download.

Paper: "An Image is Worth 16x16 Words", section 3.1, at a small scale.
Result: 98 to 99 % test accuracy (359 images; seeds 0, 1, 2).
Cost: The training takes about 1 minute on 2 CPU cores.
Command: python -m vit_jax.train --config=configs/quickstart.py --workdir=/tmp/vit/quickstart
"""

from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import Augmentation
from vit_jax.evaluation.probing import FewshotConfig
from vit_jax.models import ViTConfig
from vit_jax.training.duration import Duration
from vit_jax.training.losses import LossConfig
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig


def get_config() -> TrainConfig:
    """Returns the experiment."""
    return TrainConfig(
        data='digits',
        model=ViTConfig(
            image_size=(16, 16),
            patch_size=(4, 4),
            width=64,
            depth=4,
            mlp_dim=256,
            num_heads=4,
            pool='gap',
        ),
        augmentation=Augmentation(shift_pixels=1),
        total=Duration(steps=1200),
        batch_size=128,
        loss=LossConfig(label_smoothing=0.1),
        optimizer=OptimizerConfig(weight_decay=0.1, clip_norm=1.0),
        schedule=ScheduleConfig(learning_rate=2e-3, warmup=Duration(steps=100)),
        ema_decay=0.99,
        eval_every_steps=300,
        checkpoint_every_steps=300,
        fewshot=FewshotConfig(shots=(1, 5, 10), every_steps=300),
    )
