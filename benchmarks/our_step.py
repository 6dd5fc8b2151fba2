"""Builds the train step of `vit_jax.train` for a configuration, with random images."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax.config import TrainConfig
from vit_jax.distributed import meshes, sharding_rules
from vit_jax.experiment import training_run
from vit_jax.experiment.build import Experiment, build_experiment
from vit_jax.models import ModelConfig
from vit_jax.planning import ahead_of_time, memory_plan
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import OptimizerConfig


class Step(NamedTuple):
    """A train step that is traced but not compiled."""

    experiment: Experiment
    lowered: Any
    make_inputs: Callable[[], tuple[Any, ...]]  # state, batch, and other arguments; on the devices


def make_config(model: ModelConfig, batch_size: int, **changes: Any) -> TrainConfig:
    """Returns a pre-training with AdamW and the default options of `compute`."""
    return TrainConfig(
        data='photos',
        model=model,
        total=Duration(steps=10_000),
        batch_size=batch_size,
        optimizer=OptimizerConfig(weight_decay=0.1, clip_norm=1.0),
        **changes,
    )


def trace_step(
    config: TrainConfig, *, num_classes: int, devices: Sequence[jax.Device] | None = None
) -> Step:
    """Traces the step of a configuration. Reads no data.

    Args:
      config: The experiment.
      num_classes: Number of classes to train for.
      devices: Devices to compile for, which need not be attached; by default all attached ones.

    Returns:
      The step for these devices.
    """
    config = memory_plan.with_dummy_data(config, num_classes=num_classes, num_images=10**6)
    experiment = build_experiment(config, devices=devices)
    state = training_run.abstract_state(experiment)
    if devices is None:
        lowered = training_run.lower_update(experiment, state)
    else:
        with ahead_of_time.assume_cudnn():
            lowered = training_run.lower_update(experiment, state)

    def make_inputs() -> tuple[Any, ...]:
        rng = np.random.default_rng(0)
        order = np.arange(config.batch_size, dtype=np.int32)
        shape = config.batch_size, *experiment.model.config.image_size, 3
        batch = {
            'images': rng.integers(0, 256, shape, dtype=np.uint8),
            'labels': rng.integers(0, num_classes, config.batch_size).astype(np.int32),
            'mask': np.ones(config.batch_size, bool),
            'epoch': 0 * order,
            'example': order,
        }
        shardings = sharding_rules.get_shardings(state)
        init = meshes.jit(experiment.functions.init, experiment.mesh, out_shardings=shardings)
        initial = jax.block_until_ready(init(experiment.values))
        placed = jax.device_put(batch, meshes.batch_sharding(experiment.mesh))
        return initial, placed, experiment.values, experiment.frozen, math.inf

    return Step(experiment, lowered, make_inputs)
