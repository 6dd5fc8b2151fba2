"""The smallest models and experiments that still have every part."""

import dataclasses
import functools
import itertools

import cv2
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import TrainConfig
from vit_jax.data.sources.opening import make_opener
from vit_jax.distributed import sharding_rules
from vit_jax.distributed.processes import Job
from vit_jax.experiment import training_run
from vit_jax.experiment.build import build_experiment
from vit_jax.models import ViTConfig, abstract_params, build
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
        'eval_split': 'test[:50]',
    }
    return TrainConfig(**(values | changes))


def watched(on_read, data='digits'):
    """The data as a function of the split, which calls `on_read` with the index of each image."""
    opened = make_opener()

    def open_split(split):
        source = opened(data, split)

        def read(index):
            on_read(index)
            return source.read(index)

        return dataclasses.replace(source, read=read)

    return open_split


class WatchedJob(Job):
    """A job of one process that calls `on_tick` with the number of each tick.

    There is one before each step and before each batch of an evaluation.
    """

    def __init__(self, on_tick):
        super().__init__()
        self._on_tick, self._ticks_seen = on_tick, itertools.count(1)

    def tick(self):
        super().tick()
        self._on_tick(next(self._ticks_seen))


def compiled(config: TrainConfig, devices=None):
    """The built experiment, its first state on the devices, and its compiled update.

    The update takes the teacher of the experiment unless another one is given.
    """
    experiment = build_experiment(config, devices=devices)
    state = training_run.abstract_state(experiment)
    shardings = sharding_rules.get_shardings(state)
    init = jax.jit(experiment.functions.init, out_shardings=shardings)
    update = training_run.lower_update(experiment, state).compile()
    return experiment, init(experiment.values), functools.partial(_run_update, update, experiment)


def _run_update(update, experiment, state, batch, frozen=None):
    frozen = experiment.frozen if frozen is None else frozen
    return update(state, batch, experiment.values, frozen, jnp.inf)


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


def built(config: ViTConfig, **options):
    """A model, and parameters of it that are drawn."""
    model = build(config, **options)
    return model, random_params(abstract_params(config))


def assigned(config, **changes):
    """As the command line does it: without a look at the types."""
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def draw_photos(folder, shapes, *, ending='png'):
    """Writes an image of random pixels for each shape (height, width), by number; the folder."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for number, shape in enumerate(shapes):
        pixels = rng.integers(0, 256, (*shape, 3), np.uint8)
        cv2.imwrite(str(folder / f'{number}.{ending}'), pixels)
    return folder
