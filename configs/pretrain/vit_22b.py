"""Pre-trains ViT-22B: parallel attention and MLP, QK normalization.

Paper: "Scaling Vision Transformers to 22 Billion Parameters" (arXiv:2302.05442), sections 2 and
4.1: 177,000 steps of 65,536 images, 1 / sqrt(steps) with a cool-down, a much larger weight decay
for the head than for the body. Adafactor and the bias of the head follow "Scaling Vision
Transformers" (section 3.2).
Result: The paper reaches 89.5 % on ImageNet with a linear probe of the frozen model. It was trained
on 4 billion images of JFT, which are not public: set --config.data to any data with many classes.
Cost: 177,000 x 65,536 x 3 x 11.2 TFLOPs = 390,000 exaFLOPs.
Command: python -m vit_jax.train --config=configs/pretrain/vit_22b.py --workdir=DIR \
             --config.data=DATA --config.mesh.fsdp=64 --config.mesh.tensor=8
"""

from vit_jax.config import TrainConfig
from vit_jax.configs.pretrain import scaling_vit
from vit_jax.models import variant
from vit_jax.training.duration import Duration


def get_config() -> TrainConfig:
    """Returns the recipe of "Scaling Vision Transformers" with another model and length."""
    config = scaling_vit.get_config()
    config.data = 'JFT-4B'
    config.model = variant('22B/14', head_bias=-10.0)
    config.total = Duration(steps=177_000)
    config.batch_size = 65_536
    config.schedule.learning_rate = 1e-3
    config.schedule.cooldown = Duration(steps=30_000)
    config.compute.remat = 'block'
    return config
