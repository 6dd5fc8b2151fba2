"""Pre-trains S/16 on ImageNet with a simple recipe, in 90, 150 or 300 epochs.

Paper: "Better plain ViT baselines for ImageNet-1k", table 1: batches of 1024, mean pooling, sin-cos
position embeddings, RandAugment (2, 10), MixUp 0.2, no dropout, a tanh layer before the head. The
paper's weight decay of 1e-4 is 0.1 here, because weight decay is multiplied by the learning rate.
Result: The paper reaches 76.5, 78.5 and 80.0 % validation accuracy after 90, 150 and 300 epochs.
Cost: 90 epochs took 6 to 7 hours on a TPUv3-8.
Command: python -m vit_jax.train --config=configs/pretrain/better_plain_vit.py:90 --workdir=DIR \
             --config.data=DATA
"""

from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import Augmentation, RandAugment
from vit_jax.data.image_preprocessing import CentralCrop, InceptionCrop, Preprocessing
from vit_jax.models import Compute, variant
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig

ARGUMENTS = '90', '150', '300'


def get_config(epochs: str = '90') -> TrainConfig:
    """Returns the experiment with a number of epochs."""
    return TrainConfig(
        data='tfds:imagenet2012',
        train_split='train[:99%]',
        eval_split='validation',
        model=variant('S/16', pool='gap', positions='sincos2d', representation_size=384),
        preprocessing=Preprocessing(crop=CentralCrop()),
        augmentation=Augmentation(
            crop=InceptionCrop(),
            flip=True,
            randaugment=RandAugment(layers=2, magnitude=10.0, contrast='pixel_count'),
            mixup=0.2,
        ),
        total=Duration(epochs=float(epochs)),
        batch_size=1024,
        optimizer=OptimizerConfig(weight_decay=0.1, clip_norm=1.0, moment_dtype='bfloat16'),
        schedule=ScheduleConfig(learning_rate=1e-3, warmup=Duration(steps=10_000)),
        eval_every_steps=5_000,
        checkpoint_every_steps=2_500,
        compute=Compute(dtype='bfloat16'),
    )
