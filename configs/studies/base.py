"""Defines the base experiments of the studies: B/16 on ImageNet-21k, or a small ViT on CIFAR-10.

Paper: `full` is a row of the ViT paper's table 3, with the linear 5-shot accuracy on ImageNet that
appendix D compares. `small` runs on a laptop and has 16 tokens per image.
Result: docs/studies.md has the results of the studies.
Cost: `small` takes 3 minutes on one CPU core.
Command: python -m vit_jax.train --config=configs/studies/base.py:small --config.data=DATA \
             --workdir=DIR
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.config import TrainConfig
from vit_jax.configs.finetune import transfer
from vit_jax.configs.finetune import vit as finetuning
from vit_jax.configs.pretrain import vit as pretraining
from vit_jax.data.augmentation import Augmentation
from vit_jax.evaluation.probing import FewshotConfig, ProbeSet
from vit_jax.models import Backbone, ModelConfig, ResNetConfig, ViTConfig
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig

ARGUMENTS = 'small', 'full'
# The metric that compares models.
MEASURES = {'small': 'test/accuracy', 'full': 'fewshot/5_shot_accuracy'}
SMALL_VIT = ViTConfig(
    image_size=(32, 32),
    patch_size=(8, 8),
    width=64,
    depth=6,
    mlp_dim=128,
    num_heads=4,
    pool='gap',
)
# Similar numbers of multiply-adds: ViT 3.5 M, hybrid 4.4 M, ResNet 4.0 M.
SMALL: dict[str, ModelConfig] = {
    'vit': SMALL_VIT,
    'hybrid': ViTConfig(
        image_size=(32, 32),
        patch_size=(2, 2),
        backbone=Backbone(blocks=(1,), width=32),
        width=64,
        depth=3,
        mlp_dim=128,
        num_heads=4,
        pool='gap',
    ),
    'resnet': ResNetConfig(image_size=(32, 32), backbone=Backbone(blocks=(1, 1), width=32)),
}


def get_config(size: str = 'small') -> TrainConfig:
    """Returns the experiment of a size; --config.data sets the folder of CIFAR-10."""
    if size == 'full':
        config = pretraining.get_config('imagenet21k,B/16')
        imagenet = ProbeSet(data='tfds:imagenet2012', test_split='validation')
        config.fewshot = FewshotConfig(sets={'imagenet': imagenet}, shots=(5,))
        return config
    return TrainConfig(
        data='cifar10',
        model=SMALL_VIT,
        augmentation=Augmentation(shift_pixels=2, flip=True),
        total=Duration(steps=2500),
        batch_size=64,
        eval_batch_size=512,
        optimizer=OptimizerConfig(weight_decay=0.05, clip_norm=1.0),
        schedule=ScheduleConfig(learning_rate=1e-3, warmup=Duration(steps=250)),
    )


def fields(config: TrainConfig, *names: str) -> dict[str, Any]:
    """Returns the values of some fields, to use as a value of an axis."""
    return {name: getattr(config, name) for name in names}


def rows(*names: str) -> dict[str, dict[str, Any]]:
    """Returns the changes for the models of rows of configs/pretrain/vit.py, by run name."""
    changes = 'model', 'total', 'schedule'
    return {name_of(row): fields(pretraining.get_config(f'jft,{row}'), *changes) for row in names}


def name_of(row: str) -> str:
    """Returns the run name of a row: L16-7 for L/16,7."""
    return row.replace('/', '').replace(',', '-')


def published(accuracies: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns published accuracies by run name, from percentages by row in the order of TASKS."""
    return {
        f'{name_of(row)}-{task}': percent / 100
        for row, values in accuracies.items()
        for task, percent in zip(TASKS, values, strict=True)
    }


def fine_tuning(size: str, task: str = 'digits') -> dict[str, Any]:
    """Returns the changes for fine-tuning on a row of configs/finetune/vit.py, or on `digits`."""
    config = transfer.get_config() if size == 'small' else finetuning.get_config(task)
    data_fields = 'data', 'eval_split', 'image_size', 'augmentation', 'total', 'batch_size'
    training_fields = 'loss', 'optimizer', 'schedule', 'regularization', 'ema_decay', 'fewshot'
    return fields(config, *data_fields, *training_fields)


# The tasks of table 6 at one of the paper's learning rates, by run name.
TASKS = {
    task: fine_tuning('full', f'{task},{rate}')
    for task, rate in {
        'imagenet': '0.03',
        'cifar10': '0.01',
        'cifar100': '0.01',
        'pets': '0.01',
        'flowers': '0.01',
    }.items()
}
