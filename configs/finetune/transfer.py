"""Fine-tunes a small checkpoint on small images, on a laptop.

Paper: "An Image is Worth 16x16 Words", section 4.1 and table 4: SGD with momentum 0.9, cosine
decay, gradients clipped at 1, no weight decay. The paper uses batches of 512 and 500 to 20,000
steps. Set another resolution with --config.image_size=HEIGHT,WIDTH.
Result: The quickstart's checkpoint reaches 98.9 % on the digits at 24 x 16 pixels.
Cost: 300 steps of the quickstart's model take 22 seconds on 2 idle CPU cores.
Command: python -m vit_jax.finetune --config=configs/finetune/transfer.py --workdir=DIR \
             --config.start_from=CHECKPOINT --config.data=DATA
"""

from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import Augmentation
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig


def get_config() -> TrainConfig:
    """Returns the experiment; the command line sets checkpoint and data."""
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
