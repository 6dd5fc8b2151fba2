"""What studies begin with: B/16 on ImageNet-21k, or a small network on CIFAR-10.

`full` is the row of the ViT paper's table 3 that everybody can repeat, with the linear 5-shot accuracy
on ImageNet that the paper's appendix D compares by. `small` is for a laptop core: 16 tokens an image.
Command: python -m vit_jax.train --config=configs/studies/base.py:small --config.data=DATA \
             --workdir=DIR
"""

from vit_jax.config import FewshotConfig, ProbeSet, TrainConfig
from vit_jax.configs.pretrain import vit
from vit_jax.data.augmentation import Augmentation
from vit_jax.models import ViTConfig
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig

ARGUMENTS = 'small', 'full'


def get_config(size: str = 'small') -> TrainConfig:
    """The experiment of a size; --config.data names the folder of CIFAR-10."""
    if size == 'full':
        config = vit.get_config('imagenet21k,B/16')
        imagenet = ProbeSet(data='tfds:imagenet2012', test_split='validation')
        config.fewshot = FewshotConfig(sets={'imagenet': imagenet}, shots=(5,))
        return config
    return TrainConfig(
        data='cifar10',
        model=ViTConfig(
            image_size=(32, 32),
            patch_size=(8, 8),
            width=64,
            depth=6,
            mlp_dim=128,
            num_heads=4,
            pool='gap',
        ),
        augmentation=Augmentation(shift_pixels=2, flip=True),
        total=Duration(steps=2500),
        batch_size=64,
        eval_batch_size=512,
        optimizer=OptimizerConfig(weight_decay=0.05, clip_norm=1.0),
        schedule=ScheduleConfig(learning_rate=1e-3, warmup=Duration(steps=250)),
    )
