"""Pre-trains ViT-22B: attention and MLP in parallel, norms of queries and keys.

Paper: "Scaling Vision Transformers to 22 Billion Parameters" (arXiv:2302.05442), sections 2 and
4.1: 177,000 steps of 65,536 images, 1 / sqrt(steps) with a cool-down, a decay of the head far above
the body's. Of "Scaling Vision Transformers" (3.2, which it follows): Adafactor, the head's bias.
Result: the paper's 89.5 % on ImageNet with a linear probe of the frozen network, from 4 billion
images of JFT, which are not public: --config.data is any data of many classes.
Cost: 177,000 x 65,536 x 3 x 11.2 TFLOPs = 390,000 exaFLOPs.
Command: python -m vit_jax.train --config=configs/pretrain/vit_22b.py --workdir=DIR \
             --config.data=DATA --config.mesh.fsdp=64 --config.mesh.tensor=8
"""

from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import Augmentation
from vit_jax.data.image_preprocessing import CentralCrop, InceptionCrop, Preprocessing
from vit_jax.models import Compute, variant
from vit_jax.training.duration import Duration
from vit_jax.training.losses import LossConfig
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig


def get_config() -> TrainConfig:
    """The experiment."""
    return TrainConfig(
        data='JFT-4B',
        model=variant('22B/14', head_bias=-10.0),
        preprocessing=Preprocessing(crop=CentralCrop()),
        augmentation=Augmentation(crop=InceptionCrop(), flip=True),
        total=Duration(steps=177_000),
        batch_size=65_536,
        eval_batch_size=4096,
        loss=LossConfig(kind='sigmoid'),
        optimizer=OptimizerConfig(
            kind='adafactor',
            weight_decay=0.03,
            head_weight_decay=3.0,
            clip_norm=1.0,
            moment_dtype='bfloat16',
        ),
        schedule=ScheduleConfig(
            kind='rsqrt',
            learning_rate=1e-3,
            warmup=Duration(steps=10_000),
            cooldown=Duration(steps=30_000),
        ),
        eval_every_steps=20_000,
        checkpoint_every_steps=2_500,
        compute=Compute(dtype='bfloat16', remat='block'),
    )
