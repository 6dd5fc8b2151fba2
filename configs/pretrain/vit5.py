"""Pre-trains ViT-5 of the sizes S, B or L on ImageNet, and fine-tunes B and L at 224 pixels.

Paper: "ViT-5: Vision Transformers for the Mid-2020s" (arXiv:2602.08071) and the commands of its
repository: RMSNorm, also of queries and keys, no bias of queries, keys and values, LayerScale,
learned positions and RoPE, and four registers with their own RoPE. The recipe is DeiT III's with
other stochastic depth. B and L train at 192 pixels, and then for 20 epochs at 224, from the moving
average of parameters. Differences: the repository decays learning rates to 1e-5 and draws one
weight of MixUp and CutMix per batch; this recipe decays them to 0 and draws one per example.
Result: The paper reaches 82.2 % (S), 84.2 % (B) and 84.9 % (L) on the validation images at 224
pixels. It was not run here.
Cost: 29 exaFLOPs (S), 81 exaFLOPs (B) and 142 exaFLOPs (L), without fine-tuning.
Command: python -m vit_jax.train --config=configs/pretrain/vit5.py:B/16 --workdir=DIR \
             --config.data=DATA
         python -m vit_jax.finetune --config=configs/pretrain/vit5.py:B/16,224 --workdir=DIR2 \
             --config.data=DATA --config.start_from=DIR
"""

from typing import Any

from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import Augmentation, RandAugment
from vit_jax.data.image_preprocessing import CentralCrop, InceptionCrop, Preprocessing
from vit_jax.data.loading import LoaderConfig
from vit_jax.models import Compute, Regularization, variant
from vit_jax.training.duration import Duration
from vit_jax.training.losses import LossConfig
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig

# Image size, epochs, learning rate, stochastic depth, and stochastic depth of the fine-tuning.
MODELS = {
    'S/16': (224, 800.0, 4e-3, 0.05, 0.05),
    'B/16': (192, 800.0, 3e-3, 0.2, 0.25),
    'L/16': (192, 400.0, 3e-3, 0.35, 0.5),
}
ARGUMENTS = (*MODELS, 'B/16,224', 'L/16,224')
CROP = InceptionCrop(area=(0.08, 1.0))


def get_config(run: str = 'B/16') -> TrainConfig:
    """Returns the pre-training of a model, or its fine-tuning if an image size follows."""
    name, *size = run.split(',')
    side, epochs, learning_rate, depth, late_depth = MODELS[name]
    regularization = Regularization(
        stochastic_depth=late_depth if size else depth, stochastic_depth_kind='constant'
    )
    common: dict[str, Any] = {
        'data': 'tfds:imagenet2012',
        'eval_split': 'validation',
        'regularization': regularization,
        'ema_decay': 0.99996,
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
        image_size=(side, side),
        positions='learned_rope',
        position_resize='bicubic',
        registers=4,
        norm='rms',
        qk_norm=True,
        qkv_bias=False,
        gelu='exact',
        layer_scale=1e-4,
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
        total=Duration(epochs=epochs),
        batch_size=2048,
        loss=LossConfig(kind='sigmoid', binary_targets=True),
        optimizer=OptimizerConfig(kind='lamb', weight_decay=0.05, epsilon=1e-8),
        schedule=ScheduleConfig(learning_rate=learning_rate, warmup=Duration(epochs=5.0)),
    )
