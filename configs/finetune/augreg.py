"""Fine-tunes an AugReg checkpoint in few steps at 384 pixels, without dropout.

Paper: "How to train your ViT?" fine-tunes with SGD with momentum, cosine decay and Inception crops,
without further augmentation. The values match vision_transformer's augreg configuration, with 500
steps of 512 images.
Result: B/16 from ImageNet-21k reaches 98.6 % on CIFAR-10 and 89 % on CIFAR-100 in 500 steps, and
84.6 % on ImageNet in 20,000 (vision_transformer's README, for a checkpoint older than AugReg).
Cost: 500 steps of B/16 at 384 pixels are 0.09 exaFLOPs.
Command: python -m vit_jax.finetune --config=configs/finetune/augreg.py:cifar10 --workdir=DIR \
             --config.start_from=augreg:B/16-in21k
"""

from typing import NamedTuple

from vit_jax.config import TrainConfig
from vit_jax.configs.finetune import vit
from vit_jax.data.augmentation import Augmentation
from vit_jax.data.image_preprocessing import InceptionCrop


class Row(NamedTuple):
    """A data set and the length of its fine-tuning."""

    data: str
    eval_split: str = 'test'
    steps: int = 500
    warmup: int = 100  # steps


ROWS = {
    'cifar10': Row(data='tfds:cifar10'),
    'cifar100': Row(data='tfds:cifar100'),
    'pets': Row(data='tfds:oxford_iiit_pet'),
    'flowers': Row(data='tfds:oxford_flowers102'),
    'imagenet': Row(data='tfds:imagenet2012', eval_split='validation', steps=20_000, warmup=500),
}
ARGUMENTS = tuple(ROWS)


def get_config(name: str = 'cifar10') -> TrainConfig:
    """Returns the experiment for one data set."""
    row = ROWS[name]
    config = vit.transfer(
        row.data, row.eval_split, steps=row.steps, warmup=row.warmup, learning_rate=0.03
    )
    config.augmentation = Augmentation(crop=InceptionCrop(), flip=True)
    return config
