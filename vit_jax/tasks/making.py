"""Chooses the task of a configuration."""

import dataclasses

from vit_jax.config import TrainConfig
from vit_jax.tasks.autoencoding import Autoencoding
from vit_jax.tasks.base import Task
from vit_jax.tasks.distillation import DistilledClassification
from vit_jax.tasks.masked_patches import MaskedPatchPrediction
from vit_jax.tasks.several_labels import SeveralLabels
from vit_jax.tasks.single_label import SingleLabel
from vit_jax.training.objectives import MaskedAutoencoder, MaskedPatches

# The task of each type of `config.objective`.
_OF_OBJECTIVES: dict[type, type[Task]] = {
    MaskedPatches: MaskedPatchPrediction,
    MaskedAutoencoder: Autoencoding,
}


def needs_classes(config: TrainConfig) -> bool:
    """Returns whether the task of a configuration needs data with classes."""
    return config.objective is None or _OF_OBJECTIVES[type(config.objective)].needs_classes


def make_task(config: TrainConfig, *, num_classes: int, multi_label: bool = False) -> Task:
    """Makes the task of a configuration.

    Args:
      config: The configuration.
      num_classes: Number of classes of the training images.
      multi_label: Whether the training images may have several classes.
    """
    task = _choose_task(config, num_classes, multi_label)
    outputs = dict.fromkeys(name for metric in task.metrics(config) for name in metric.outputs)
    return dataclasses.replace(task, outputs=tuple(outputs))


def _choose_task(config: TrainConfig, num_classes: int, multi_label: bool) -> Task:
    if config.objective is not None:
        return _OF_OBJECTIVES[type(config.objective)](num_classes=num_classes)
    kind = SeveralLabels if multi_label else SingleLabel
    labels = kind(num_classes=num_classes, multi_label=multi_label)
    if config.distillation.teacher is None:
        return labels
    return DistilledClassification(num_classes=num_classes, multi_label=multi_label, labels=labels)
