"""Pre-trains S/16, B/16 or L/16 on ImageNet as DeiT III, and fine-tunes B and L at 224 pixels.

Paper: "DeiT III: Revenge of the ViT" (arXiv:2204.07118), table 1 and the commands of its
repository: LAMB, batches of 2048, 800 epochs, binary cross-entropy, LayerScale, the same stochastic
depth in all blocks, 3-Augment, repeated augmentation, MixUp 0.8, CutMix 1. S trains at 224 pixels.
B and L train at 192, and then for 20 epochs at 224 with AdamW and RandAugment. Differences: the
repository decays learning rates to 1e-5, draws one weight of MixUp and CutMix per batch, and crops
bicubically. This recipe decays them to 0, draws a weight per example, and crops bilinearly.
Result: The paper reaches 81.4 % (S), 83.8 % (B) and 84.9 % (L) on the validation images at 224
pixels. It was not run here.
Cost: 28 exaFLOPs (S), 79 exaFLOPs (B) and 276 exaFLOPs (L), without fine-tuning.
Command: python -m vit_jax.train --config=configs/pretrain/deit3.py:B/16 --workdir=DIR \
             --config.data=DATA
         python -m vit_jax.finetune --config=configs/pretrain/deit3.py:B/16,224 --workdir=DIR2 \
             --config.data=DATA --config.start_from=DIR
"""

from typing import Any, NamedTuple

from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import Augmentation, RandAugment
from vit_jax.data.image_preprocessing import CentralCrop, InceptionCrop, Preprocessing
from vit_jax.data.loading import LoaderConfig
from vit_jax.models import Compute, Regularization, variant
from vit_jax.training.duration import Duration
from vit_jax.training.losses import LossConfig
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig


class Pretraining(NamedTuple):
    """The values of a model."""

    side: int  # of the images, in pixels
    learning_rate: float
    stochastic_depth: float


MODELS = {
    'S/16': Pretraining(side=224, learning_rate=4e-3, stochastic_depth=0.05),
    'B/16': Pretraining(side=192, learning_rate=3e-3, stochastic_depth=0.2),
    'L/16': Pretraining(side=192, learning_rate=3e-3, stochastic_depth=0.45),
}
ARGUMENTS = (*MODELS, 'B/16,224', 'L/16,224')
CROP = InceptionCrop(area=(0.08, 1.0))


def get_config(run: str = 'B/16') -> TrainConfig:
    """Returns the pre-training of a model, or its fine-tuning if an image size follows."""
    name, *size = run.split(',')
    values = MODELS[name]
    regularization = Regularization(
        stochastic_depth=values.stochastic_depth, stochastic_depth_kind='constant'
    )
    common: dict[str, Any] = {
        'data': 'tfds:imagenet2012',
        'eval_split': 'validation',
        'regularization': regularization,
        'eval_every_steps': 10_000,
        'checkpoint_every_steps': 5_000,
        'compute': Compute(dtype='bfloat16'),
    }
    if size:
        return TrainConfig(
            **common,
            image_size=(int(size[0]), int(size[0])),
            reuse_head=True,
            augmentation=Augmentation(
                crop=CROP,
                flip=True,
                randaugment=RandAugment(layers=2, magnitude=9.0),
                mixup=0.8,
                cutmix=1.0,
            ),
            total=Duration(epochs=20.0),
            batch_size=512,
            loss=LossConfig(label_smoothing=0.1),
            optimizer=OptimizerConfig(weight_decay=0.1),
            schedule=ScheduleConfig(learning_rate=1e-5, warmup=Duration(epochs=5.0)),
        )
    model = variant(
        name,
        image_size=(values.side, values.side),
        gelu='exact',
        layer_scale=1e-4,
        position_resize='bicubic',
    )
    return TrainConfig(
        **common,
        model=model,
        preprocessing=Preprocessing(
            crop=CentralCrop(scale=1.0, resize='bicubic_antialias'),
            mean=(123.675, 116.28, 103.53),
            std=(58.395, 57.12, 57.375),
        ),
        augmentation=Augmentation(
            crop=CROP, flip=True, three_augment=True, color_jitter=0.3, mixup=0.8, cutmix=1.0
        ),
        loader=LoaderConfig(repeats=3),
        total=Duration(epochs=800.0),
        batch_size=2048,
        loss=LossConfig(kind='sigmoid', binary_targets=True),
        optimizer=OptimizerConfig(kind='lamb', weight_decay=0.05, epsilon=1e-8),
        schedule=ScheduleConfig(learning_rate=values.learning_rate, warmup=Duration(epochs=5.0)),
    )
