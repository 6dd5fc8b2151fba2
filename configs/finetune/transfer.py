"""Fine-tunes any checkpoint on any images: the transfer of section 4.1, at a laptop's scale.

Paper: table 4 (SGD with momentum 0.9, cosine decay, clipping at 1, no weight decay); its batch is
512 and its runs have 500 to 20,000 steps. Higher resolution is `--config.image_size=HEIGHT,WIDTH`.
Command: python -m vit_jax.finetune --config=configs/finetune/transfer.py --workdir=DIR \
             --config.start_from=CHECKPOINT --config.data=DATA
"""

from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import Augmentation
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig


def get_config() -> TrainConfig:
    """The experiment; the command line says from what and on what."""
    return TrainConfig(
        data='digits',
        augmentation=Augmentation(shift_pixels=2),
        total=Duration(steps=300),
        batch_size=128,
        optimizer=OptimizerConfig(kind='sgd', clip_norm=1.0),
        schedule=ScheduleConfig(learning_rate=0.03, warmup=Duration(steps=30)),
        eval_every_steps=100,
        checkpoint_every_steps=100,
    )
