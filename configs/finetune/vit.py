"""Fine-tunes a checkpoint as in the ViT paper: the rows of table 4, and the ViTs of table 2.

Paper: "An Image is Worth 16x16 Words", table 4: SGD with momentum 0.9, cosine decay, batches of
512, no weight decay, gradients clipped at 1, 384 pixels. The paper selects the best of the listed
learning rates on held-out images (2 % of CIFAR, 10 % of Pets and Flowers, 1 % of ImageNet):
--config.train_split=train[:98%] --config.eval_split=train[98%:]. `imagenet512` and `imagenet518`
are the models of table 2: L/16 at 512 and H/14 at 518 pixels, with Polyak averaging. VTAB's row is
in vtab.py.
Result: Table 5 has these accuracies for B/16 and L/16 from ImageNet-21k: ImageNet 84.0 and 85.2 %,
CIFAR-10 99.0 and 99.2 %, CIFAR-100 91.7 and 93.4 %, Pets 94.4 and 94.7 %, Flowers 99.4 and 99.6 %.
Table 2 has 85.3 % for L/16 from ImageNet-21k, 87.8 % for L/16 and 88.6 % for H/14 from JFT.
Cost: 20,000 steps of B/16 at 384 pixels are 3.4 exaFLOPs.
Command: python -m vit_jax.finetune --config=configs/finetune/vit.py:cifar10,0.01 --workdir=DIR \
             --config.start_from=vit:B/16-in21k
"""

from typing import NamedTuple

from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import Augmentation
from vit_jax.data.image_preprocessing import RandomCrop
from vit_jax.models import Compute
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig


class Row(NamedTuple):
    """A row of table 4, or a model of table 2."""

    data: str
    eval_split: str = 'test'
    steps: int = 500
    warmup: int = 100  # steps
    learning_rates: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03)
    side: int = 384  # of the images, in pixels
    ema_decay: float | None = None  # decay of the Polyak average


_IMAGENET = Row(
    data='tfds:imagenet2012',
    eval_split='validation',
    steps=20_000,
    warmup=500,
    learning_rates=(0.003, 0.01, 0.03, 0.06),
)
ROWS = {
    'imagenet': _IMAGENET,
    'imagenet512': _IMAGENET._replace(side=512, ema_decay=0.9999),
    'imagenet518': _IMAGENET._replace(side=518, ema_decay=0.9999),
    'cifar100': Row(data='tfds:cifar100', steps=10_000, warmup=500),
    'cifar10': Row(data='tfds:cifar10', steps=10_000, warmup=500),
    'pets': Row(data='tfds:oxford_iiit_pet'),
    'flowers': Row(data='tfds:oxford_flowers102'),
}
ARGUMENTS = tuple(f'{name},{rate:g}' for name, row in ROWS.items() for rate in row.learning_rates)


def transfer(
    data: str, eval_split: str, *, steps: int, warmup: int, learning_rate: float, side: int = 384
) -> TrainConfig:
    """Returns the recipe of table 4, which augreg.py and vtab.py share."""
    return TrainConfig(
        data=data,
        eval_split=eval_split,
        image_size=(side, side),
        augmentation=Augmentation(crop=RandomCrop(), flip=True),
        total=Duration(steps=steps),
        batch_size=512,
        optimizer=OptimizerConfig(kind='sgd', clip_norm=1.0, moment_dtype='bfloat16'),
        schedule=ScheduleConfig(learning_rate=learning_rate, warmup=Duration(steps=warmup)),
        eval_every_steps=max(100, steps // 10),
        checkpoint_every_steps=max(100, steps // 10),
        compute=Compute(dtype='bfloat16'),
    )


def get_config(run: str = 'imagenet,0.03') -> TrainConfig:
    """Returns the experiment of one row at one learning rate."""
    name, rate = run.split(',')
    row = ROWS[name]
    config = transfer(
        row.data,
        row.eval_split,
        steps=row.steps,
        warmup=row.warmup,
        learning_rate=float(rate),
        side=row.side,
    )
    config.ema_decay = row.ema_decay
    return config
