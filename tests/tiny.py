"""The smallest models and experiments that still have every part."""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import TrainConfig
from vit_jax.models import ViTConfig
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig

CLASSES = 10


def model(**changes) -> ViTConfig:
    values = {
        'image_size': (8, 8),
        'patch_size': (4, 4),
        'width': 16,
        'depth': 3,
        'mlp_dim': 32,
        'num_heads': 2,
        'num_classes': CLASSES,
    }
    return ViTConfig(**(values | changes))


def experiment(**changes) -> TrainConfig:
    values = {
        'data': 'digits',
        'model': model(num_classes=None),
        'total': Duration(steps=10),
        'batch_size': 16,
        'optimizer': OptimizerConfig(weight_decay=0.1, clip_norm=1.0),
        'schedule': ScheduleConfig(learning_rate=1e-3, warmup=Duration(steps=2)),
        'log_every_steps': 5,
        'test_split': 'test[:50]',
    }
    return TrainConfig(**(values | changes))


def images(batch: int = 2, config: ViTConfig | None = None) -> jax.Array:
    config = config or model()
    shape = batch, *config.image_size, config.channels
    return jax.random.normal(jax.random.key(7), shape, jnp.float32)


def random_params(params, *, scale: float = 0.3):
    """Parameters of the same shapes without any zeros, so that nothing is hidden by a zero head."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * scale, leaf.dtype), params
    )


def assigned(config: TrainConfig, **changes) -> TrainConfig:
    """As the command line does it: without a look at the types."""
    for name, value in changes.items():
        setattr(config, name, value)
    return config
