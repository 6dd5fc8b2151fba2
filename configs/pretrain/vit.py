"""Pre-trains the models of the ViT paper: every row of its table 3.

Paper: "An Image is Worth 16x16 Words", table 3 and appendix B.1: batches of 4096, 10,000 steps of
warm-up, Adam, 224 pixels. The paper does not state the loss. The authors reported sigmoid for JFT
and ImageNet-21k; softmax for ImageNet, Inception crops and flips are our choice.
Result: Tables 5 and 6 have these ImageNet accuracies after fine-tuning at 384 pixels. From JFT:
B/32 80.7, B/16 84.2, L/32 84.4, L/16 86.3 (7 epochs) and 87.1 (14), H/14 88.1 %; R50x1 77.5, R152x2
85.0, R50+B/16 85.6, R50+L/16 86.6 and 87.1 %. From ImageNet-21k: B/32 81.3, B/16 84.0, L/32 81.0,
L/16 85.2 %. From ImageNet: B/32 73.4, B/16 77.9, L/32 71.2, L/16 76.5 %.
Cost: Table 6 has these exaFLOPs: B/16 224, L/16 783 (7 epochs), H/14 4262, R50x1 50, R50+L/16 859.
Table 2 has these TPUv3-core-days: L/16 230 from ImageNet-21k and 680 from JFT, H/14 2500.
Command: python -m vit_jax.train --config=configs/pretrain/vit.py:imagenet,B/16 --workdir=DIR \
             --config.data=DATA
"""

from typing import NamedTuple

from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import Augmentation
from vit_jax.data.image_preprocessing import CentralCrop, InceptionCrop, Preprocessing
from vit_jax.models import Compute, Regularization, ViTConfig, variant
from vit_jax.training.duration import Duration
from vit_jax.training.losses import LossConfig, LossKind
from vit_jax.training.optimizer import Decay, OptimizerConfig, ScheduleConfig


class PretrainingData(NamedTuple):
    """A data set, and the values of table 3 that depend on it."""

    data: str
    eval_split: str
    loss: LossKind
    head_bias: float  # initial bias of the head
    clip_norm: float | None
    decay: Decay
    weight_decay: float
    dropout: float


class Row(NamedTuple):
    """A row of table 3."""

    epochs: int
    learning_rate: float


DATA = {
    'jft': PretrainingData(
        data='JFT-300M',
        eval_split='test',
        loss='sigmoid',
        head_bias=-10.0,
        clip_norm=None,
        decay='linear',
        weight_decay=0.1,
        dropout=0.0,
    ),
    'imagenet21k': PretrainingData(
        data='tfds:imagenet21k',
        eval_split='test',
        loss='sigmoid',
        head_bias=-10.0,
        clip_norm=None,
        decay='linear',
        weight_decay=0.03,
        dropout=0.1,
    ),
    'imagenet': PretrainingData(
        data='tfds:imagenet2012',
        eval_split='validation',
        loss='softmax',
        head_bias=0.0,
        clip_norm=1.0,
        decay='cosine',
        weight_decay=0.3,
        dropout=0.1,
    ),
}
# By data and model; the key has the epochs if the paper has two runs.
ROWS = {
    'jft,B/16': Row(epochs=7, learning_rate=8e-4),
    'jft,B/32': Row(epochs=7, learning_rate=8e-4),
    'jft,L/32': Row(epochs=7, learning_rate=6e-4),
    'jft,L/16,7': Row(epochs=7, learning_rate=4e-4),
    'jft,L/16,14': Row(epochs=14, learning_rate=4e-4),
    'jft,H/14': Row(epochs=14, learning_rate=3e-4),
    'jft,R50x1': Row(epochs=7, learning_rate=1e-3),
    'jft,R50x2': Row(epochs=7, learning_rate=1e-3),
    'jft,R101x1': Row(epochs=7, learning_rate=8e-4),
    'jft,R152x1': Row(epochs=7, learning_rate=6e-4),
    'jft,R152x2': Row(epochs=7, learning_rate=6e-4),
    'jft,R50+B/16': Row(epochs=7, learning_rate=8e-4),
    'jft,R50+B/32': Row(epochs=7, learning_rate=8e-4),
    'jft,R50+L/32': Row(epochs=7, learning_rate=2e-4),
    'jft,R50+L/16,7': Row(epochs=7, learning_rate=4e-4),
    'jft,R50+L/16,14': Row(epochs=14, learning_rate=4e-4),
    'imagenet21k,B/16': Row(epochs=90, learning_rate=1e-3),
    'imagenet21k,B/32': Row(epochs=90, learning_rate=1e-3),
    'imagenet21k,L/16,30': Row(epochs=30, learning_rate=1e-3),
    'imagenet21k,L/16,90': Row(epochs=90, learning_rate=1e-3),
    'imagenet21k,L/32,30': Row(epochs=30, learning_rate=1e-3),
    'imagenet21k,L/32,90': Row(epochs=90, learning_rate=1e-3),
    'imagenet,B/16': Row(epochs=300, learning_rate=3e-3),
    'imagenet,B/32': Row(epochs=300, learning_rate=3e-3),
    'imagenet,L/16': Row(epochs=300, learning_rate=3e-3),
    'imagenet,L/32': Row(epochs=300, learning_rate=3e-3),
}
ARGUMENTS = tuple(ROWS)


def get_config(row: str = 'imagenet,B/16') -> TrainConfig:
    """Returns the experiment of one row."""
    data_name, model_name, *_ = row.split(',')
    data = DATA[data_name]
    model = variant(model_name, head_bias=data.head_bias)
    if isinstance(model, ViTConfig):
        model.representation_size = model.width
    return TrainConfig(
        data=data.data,
        eval_split=data.eval_split,
        model=model,
        preprocessing=Preprocessing(crop=CentralCrop()),
        augmentation=Augmentation(crop=InceptionCrop(), flip=True),
        total=Duration(epochs=float(ROWS[row].epochs)),
        batch_size=4096,
        loss=LossConfig(kind=data.loss),
        optimizer=OptimizerConfig(weight_decay=data.weight_decay, clip_norm=data.clip_norm),
        schedule=ScheduleConfig(
            kind=data.decay,
            learning_rate=ROWS[row].learning_rate,
            warmup=Duration(steps=10_000),
        ),
        regularization=Regularization(dropout=data.dropout),
        eval_every_steps=10_000,
        checkpoint_every_steps=5_000,
        compute=Compute(dtype='bfloat16'),
    )
