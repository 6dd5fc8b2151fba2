"""The experiment of tests that start programs: tests/tiny.py as a file for --config."""

from tests import tiny
from vit_jax.models import Regularization
from vit_jax.training.duration import Duration


def get_config():
    config = tiny.experiment(
        total=Duration(steps=60),
        ema_decay=0.9,
        regularization=Regularization(dropout=0.1),
        checkpoint_every_steps=10,
        log_every_steps=5,
        eval_every_steps=1000,  # only at the end
        eval_batch_size=8,
    )
    return config
