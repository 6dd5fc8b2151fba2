"""Probes any checkpoint on any images with 1, 5, 10 and 25 labels a class.

Paper: section 4.1, "few-shot" accuracy, in closed form; details as big_vision's `fewshot_lsr`.
Command: python -m vit_jax.fewshot --config=configs/fewshot/linear.py --workdir=DIR \
             --config.start_from=CHECKPOINT --config.data=DATA
"""

from vit_jax.config import TrainConfig
from vit_jax.evaluation.probing import FewshotConfig


def get_config() -> TrainConfig:
    """The experiment; the command line says of what and on what."""
    return TrainConfig(data='digits', fewshot=FewshotConfig(), batch_size=256)
