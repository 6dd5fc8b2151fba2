"""Pre-trains a small ViT on CIFAR-10 without labels, on two CPU cores.

Paper: "An Image is Worth 16x16 Words", section 4.6: half of the patches are corrupted, and their
mean color is predicted. The model and its images equal those in pretrain/cifar10.py.
Result: not run yet at this size. A smaller model (--config.model.width=64
--config.model.mlp_dim=128 --config.model.depth=4 --config.total.steps=1500
--config.schedule.learning_rate=0.002) predicts the colors of 40.2 % of the corrupted patches
(10,000 test images; the most frequent color has 6 %). Its few-shot accuracies with 1, 5, 10 and 25
labels per class are 15.8, 19.2, 21.2 and 24.0 %.
Cost: The smaller model took 19 minutes of steps on a share of 2 CPU cores.
Command: python -m vit_jax.train --config=configs/pretrain/cifar10_masked.py --workdir=DIR \
             --config.data=DATA
"""

from vit_jax.config import TrainConfig
from vit_jax.configs.pretrain import cifar10
from vit_jax.training.duration import Duration
from vit_jax.training.objectives import MaskedPatches


def get_config() -> TrainConfig:
    """Returns the experiment; --config.data sets the folder."""
    config = cifar10.base_config()
    config.objective = MaskedPatches()
    config.total = Duration(steps=4000)
    return config
