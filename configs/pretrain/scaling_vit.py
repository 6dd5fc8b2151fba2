"""Pre-trains a ViT with attention pooling, Adafactor and a schedule without a fixed end.

Paper: "Scaling Vision Transformers": attention pooling, no tanh layer, a much larger weight decay
for the head than for the body, momentum in bfloat16. The learning rate is proportional to
1/sqrt(steps) and ends with a cool-down, which can start at any step for a shorter run. The values
match big_vision's train_vit_g: 1 M steps of 16,384 images.
Result: The paper's G/14 reaches 90.45 % on ImageNet after fine-tuning and 84.86 % with 10 shots
(abstract). It was trained on JFT-3B, which is not public: set --config.data to any data with many
classes.
Cost: g/14 takes 1 M x 16,384 x 3 x 0.53 TFLOPs = 26,000 exaFLOPs.
Command: python -m vit_jax.train --config=configs/pretrain/scaling_vit.py:B/16 --workdir=DIR \
             --config.data=DATA --config.mesh.fsdp=8
"""

from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import Augmentation
from vit_jax.data.image_preprocessing import CentralCrop, InceptionCrop, Preprocessing
from vit_jax.models import Compute, variant
from vit_jax.training.duration import Duration
from vit_jax.training.losses import LossConfig
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig

ARGUMENTS = 'g/14', 'G/14', 'L/16', 'B/16', 'B/32'


def get_config(model: str = 'g/14') -> TrainConfig:
    """Returns the experiment of one model."""
    return TrainConfig(
        data='JFT-3B',
        model=variant(model, pool='map', head_bias=-10.0),
        preprocessing=Preprocessing(crop=CentralCrop()),
        augmentation=Augmentation(crop=InceptionCrop(), flip=True),
        total=Duration(steps=1_000_000),
        batch_size=16_384,
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
            learning_rate=8e-4,
            warmup=Duration(steps=10_000),
            cooldown=Duration(steps=50_000),
        ),
        eval_every_steps=20_000,
        checkpoint_every_steps=2_500,
        compute=Compute(dtype='bfloat16', remat='dots'),
    )
