"""A small ViT that learns from CIFAR-10 without its labels, on two CPU cores.

Paper: "An Image is Worth 16x16 Words", section 4.6: half of the patches are corrupted, and their
mean color is predicted. The model and its images equal those in pretrain/cifar10.py.
Result: not run yet at this size. A smaller one for 1,500 steps (--config.model.width=64
--config.model.mlp_dim=128 --config.model.depth=4 --config.total.steps=1500
--config.schedule.learning_rate=0.002) names 40.2 % of the corrupted patches' colors (10,000 test
images), of which the most frequent is 6 %; few-shot 1, 5, 10, 25: 15.8, 19.2, 21.2, 24.0 %.
Cost: of the smaller one 19 minutes of steps on a share of 2 CPU cores.
Command: python -m vit_jax.train --config=configs/pretrain/cifar10_masked.py --workdir=DIR \
             --config.data=DATA
"""

from vit_jax.config import TrainConfig
from vit_jax.configs.pretrain import cifar10
from vit_jax.training.duration import Duration
from vit_jax.training.masked_patches import MaskedPatches


def get_config() -> TrainConfig:
    """The experiment; --config.data names the folder."""
    config = cifar10.get_config()
    config.objective = MaskedPatches()
    config.total = Duration(steps=4000)
    return config
