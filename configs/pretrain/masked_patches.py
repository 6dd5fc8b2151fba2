"""Pre-trains a ViT-B/16 without labels: half of its patches are corrupted, and predicted.

Paper: "An Image is Worth 16x16 Words", section 4.6 and appendix B.1.2: Adam, batch 4096, learning
rate 2e-4, 10,000 steps of warm-up, cosine decay, 1 M steps of JFT-300M (14 epochs); the mean color
of a patch in 3 bits a channel. Weight decay is that of section 4.1; Inception crops and flips are
our choice. JFT is not public: `imagenet21k` and `imagenet`, where the gain was similar, have as
many steps. Two other targets, found a little worse: --config.objective.target=colours_4x4 and
=pixels; --config.objective.fraction=0.15 was slightly worse than 0.5.
Result: 79.9 % on ImageNet after fine-tuning, 2 % above training from scratch and 4 % below
supervised pre-training; little is gained after 100,000 steps. Not run here.
Cost: 430 exaFLOPs, as of a B/16 that is trained for as many steps; not run here.
Command: python -m vit_jax.train --config=configs/pretrain/masked_patches.py:imagenet21k \
             --workdir=DIR --config.data=DATA
"""

import dataclasses

from vit_jax.config import TrainConfig
from vit_jax.configs.pretrain import vit
from vit_jax.models import variant
from vit_jax.training.duration import Duration
from vit_jax.training.losses import LossConfig
from vit_jax.training.masked_patches import MaskedPatches
from vit_jax.training.optimizer import ScheduleConfig

ARGUMENTS = tuple(vit.DATA)


def get_config(name: str = 'jft') -> TrainConfig:
    """The experiment on one data set: the row `jft,B/16` of vit.py with another objective."""
    data, eval_split = vit.DATA[name][:2]
    return dataclasses.replace(
        vit.get_config('jft,B/16'),
        data=data,
        eval_split=eval_split,
        model=variant('B/16'),
        total=Duration(steps=1_000_000),
        objective=MaskedPatches(),
        loss=LossConfig(),
        schedule=ScheduleConfig(learning_rate=2e-4, warmup=Duration(steps=10_000)),
    )
