"""Pre-trains a ViT-B/16 without labels by predicting corrupted patches.

Paper: "An Image is Worth 16x16 Words", section 4.6 and appendix B.1.2: Adam, batches of 4096,
learning rate 2e-4, 10,000 steps of warm-up, cosine decay, 1 M steps of JFT-300M (14 epochs). Half
of the patches are corrupted, and their mean color in 3 bits per channel is predicted. The weight
decay is from section 4.1; Inception crops and flips are our choice. JFT is not public:
`imagenet21k` and `imagenet`, where the gain was similar, train for as many steps. In the paper two
other targets (--config.objective.target=colors_4x4 and =pixels) and a smaller share of corrupted
patches (--config.objective.fraction=0.15) were slightly worse.
Result: The paper reaches 79.9 % on ImageNet after fine-tuning: 2 % above training from scratch and
4 % below supervised pre-training. It gains little after 100,000 steps. Not run here.
Cost: 430 exaFLOPs, like a B/16 that is trained for as many steps.
Command: python -m vit_jax.train --config=configs/pretrain/masked_patches.py:imagenet21k \
             --workdir=DIR --config.data=DATA
"""

import dataclasses

from vit_jax.config import TrainConfig
from vit_jax.configs.pretrain import vit
from vit_jax.models import variant
from vit_jax.training.duration import Duration
from vit_jax.training.losses import LossConfig
from vit_jax.training.objectives import MaskedPatches
from vit_jax.training.optimizer import ScheduleConfig

ARGUMENTS = tuple(vit.DATA)


def get_config(name: str = 'jft') -> TrainConfig:
    """Returns the row `jft,B/16` of vit.py with the given data set and this objective."""
    data = vit.DATA[name]
    return dataclasses.replace(
        vit.get_config('jft,B/16'),
        data=data.data,
        eval_split=data.eval_split,
        model=variant('B/16'),
        total=Duration(steps=1_000_000),
        objective=MaskedPatches(),
        loss=LossConfig(),
        schedule=ScheduleConfig(learning_rate=2e-4, warmup=Duration(steps=10_000)),
    )
