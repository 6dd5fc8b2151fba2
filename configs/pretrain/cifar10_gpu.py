"""Pre-trains a ViT or a hybrid on CIFAR-10 in a few minutes on one GPU.

Paper: "Escaping the Big Data Paradigm with Compact Transformers": ViT-Lite-7/4, which has the shape
of `vit`, reaches 91.38 to 93.57 % and CCT-7/3x1 reaches 96.53 % in 300 epochs. The hybrid enlarges
the images to 96 pixels, which gives 24 x 24 positions in the first stage and 144 tokens.
Result: not measured yet. The goals are 93.6 % (vit, 3.7 M parameters) and 96.5 % (hybrid).
On a CPU, `vit` with width 64, depth 4 and ema_decay 0.98 reached 56.0 % on train[90%:] after a
twentieth of the epochs, and 59.3 % at twice the learning rate. `hybrid` with 48 pixels and the
widths and depths of cifar10_hybrid.py reached 58.9 % after a twentieth of its epochs.
Cost: The goals are 5 minutes (vit) and 6 minutes (hybrid) on one H100 or H200.
Command: python -m vit_jax.train --config=configs/pretrain/cifar10_gpu.py:vit --workdir=DIR \
             --config.data=DATA
"""

import dataclasses

from vit_jax.config import TrainConfig
from vit_jax.configs.pretrain import cifar10
from vit_jax.data.augmentation import Augmentation, RandAugment
from vit_jax.data.loading import LoaderConfig
from vit_jax.models import Backbone
from vit_jax.training.duration import Duration
from vit_jax.training.losses import LossConfig
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig

ARGUMENTS = 'vit', 'hybrid'
EPOCHS = {'vit': 250.0, 'hybrid': 150.0}
VIT = dataclasses.replace(cifar10.MODEL, width=256, depth=7, mlp_dim=512)
MODELS = {
    'vit': VIT,
    'hybrid': dataclasses.replace(
        VIT,
        image_size=(96, 96),
        patch_size=(1, 1),
        backbone=Backbone(blocks=(2, 2), width=64),
        depth=6,
    ),
}


def get_config(name: str = 'vit') -> TrainConfig:
    """Returns the experiment of a model; --config.data sets the folder."""
    model = dataclasses.replace(MODELS[name])
    return dataclasses.replace(
        cifar10.base_config(),
        model=model,
        augmentation=Augmentation(
            shift_pixels=model.image_size[0] // 8,
            flip=True,
            randaugment=RandAugment(layers=2, magnitude=9.0),
            mixup=0.2,
            cutmix=1.0,
        ),
        total=Duration(epochs=EPOCHS[name]),
        batch_size=1024,
        eval_batch_size=2048,
        loss=LossConfig(label_smoothing=0.1),
        optimizer=OptimizerConfig(kind='muon', weight_decay=0.1, clip_norm=1.0),
        schedule=ScheduleConfig(learning_rate=4e-3, warmup=Duration(fraction=0.05)),
        ema_decay=0.999,
        eval_every_steps=2000,
        checkpoint_every_steps=None,
        fewshot=None,
        loader=LoaderConfig(placement='device'),
    )
