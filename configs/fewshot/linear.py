"""Evaluates any checkpoint on any images with 1, 5, 10 and 25 labels per class.

Paper: "An Image is Worth 16x16 Words", section 4.1: few-shot accuracy with a linear classifier in
closed form. The details match big_vision's `fewshot_lsr`.
Result: docs/training.md has the accuracies that were measured here.
Cost: The evaluation is one forward pass of the training and test images.
Command: python -m vit_jax.fewshot --config=configs/fewshot/linear.py --workdir=DIR \
             --config.start_from=CHECKPOINT --config.data=DATA
"""

from vit_jax.config import TrainConfig
from vit_jax.evaluation.probing import FewshotConfig


def get_config() -> TrainConfig:
    """Returns the experiment; the command line sets checkpoint and data."""
    return TrainConfig(data='digits', fewshot=FewshotConfig(), batch_size=256)
