"""Pre-trains with augmentation and regularization: the default runs of AugReg.

Paper: "How to train your ViT?": batches of 4096, 300 epochs, sigmoid loss, 10,000 steps of warm-up.
Each model has the augmentation level of big_vision's configurations (vit_i1k, vit_i21k). The
paper's weight decay of 1e-4 at a learning rate of 1e-3 is 0.1 here, because weight decay is
multiplied by the learning rate. Add dropout and stochastic depth with
--config.regularization.dropout=0.1 --config.regularization.stochastic_depth=0.1.
Result: B/16, trained only on ImageNet, reaches about 79 % at 224 pixels (big_vision's authors).
Cost: B/16 on ImageNet takes 300 x 1.28 M x 3 x 35 GFLOPs = 40 exaFLOPs.
Command: python -m vit_jax.train --config=configs/pretrain/augreg.py:i1k,B/16 --workdir=DIR \
             --config.data=DATA
    augreg.py:i1k,B/16,light1 selects another level.
"""

from typing import NamedTuple

from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import augreg
from vit_jax.data.image_preprocessing import CentralCrop, Preprocessing
from vit_jax.models import Compute, ViTConfig, variant
from vit_jax.training.duration import Duration
from vit_jax.training.losses import LossConfig
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig

LEVELS = {
    'i1k,Ti/16': 'light1',
    'i1k,S/32': 'medium1',
    'i1k,S/16': 'medium2',
    'i1k,B/32': 'medium2',
    'i1k,B/16': 'medium2',
    'i1k,L/16': 'medium2',
    'i21k,Ti/16': 'none',
    'i21k,S/32': 'none',
    'i21k,S/16': 'light1',
    'i21k,B/32': 'light2',
    'i21k,B/16': 'light2',
    'i21k,L/16': 'medium2',
}


class PretrainingData(NamedTuple):
    """A data set, and the initial bias of the head."""

    data: str
    eval_split: str
    head_bias: float


DATA = {
    'i1k': PretrainingData(data='tfds:imagenet2012', eval_split='validation', head_bias=-6.9),
    'i21k': PretrainingData(data='tfds:imagenet21k', eval_split='test', head_bias=-10.0),
}
ARGUMENTS = tuple(LEVELS)


def get_config(run: str = 'i1k,B/16') -> TrainConfig:
    """Returns the experiment of one model, at its default level or the given level."""
    data_name, model_name, *level = run.split(',')
    data = DATA[data_name]
    model = variant(model_name, head_bias=data.head_bias)
    if isinstance(model, ViTConfig):
        model.representation_size = model.width
    return TrainConfig(
        data=data.data,
        eval_split=data.eval_split,
        model=model,
        preprocessing=Preprocessing(crop=CentralCrop()),
        augmentation=augreg(level[0] if level else LEVELS[run]),
        total=Duration(epochs=300.0),
        batch_size=4096,
        loss=LossConfig(kind='sigmoid'),
        optimizer=OptimizerConfig(weight_decay=0.1, clip_norm=1.0, moment_dtype='bfloat16'),
        schedule=ScheduleConfig(learning_rate=1e-3, warmup=Duration(steps=10_000)),
        eval_every_steps=10_000,
        checkpoint_every_steps=5_000,
        compute=Compute(dtype='bfloat16'),
    )
