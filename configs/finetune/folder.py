"""Fine-tunes any checkpoint on your own images: a folder, a table, arrays or a TFDS data set.

Paper: "An Image is Worth 16x16 Words", table 4: SGD with momentum, cosine decay, gradients clipped
at 1. The length is in epochs, so that it fits any number of images. Inception crops and flips are
our choice.
Result: The last line of the output has the accuracy on your images.
Cost: 20 epochs of B/16 at 224 pixels are 2 TFLOPs per image.
Command: python -m vit_jax.finetune --config=configs/finetune/folder.py --config.data=DATA \
             --config.start_from=CHECKPOINT --workdir=DIR
"""

from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import Augmentation
from vit_jax.data.image_preprocessing import InceptionCrop
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig


def get_config() -> TrainConfig:
    """Returns the experiment; the command line sets checkpoint and data."""
    return TrainConfig(
        data='DATA',
        reuse_head=True,
        augmentation=Augmentation(crop=InceptionCrop(area=(0.25, 1.0)), flip=True),
        total=Duration(epochs=20.0),
        batch_size=64,
        optimizer=OptimizerConfig(kind='sgd', clip_norm=1.0),
        schedule=ScheduleConfig(learning_rate=0.01, warmup=Duration(fraction=0.1)),
        eval_every_steps='epoch',
        checkpoint_every_steps=200,
    )
