"""Splits a configuration into structure and values.

Values are numbers that the compiled programs take as arguments. Runs that differ only in values
share their programs. A field is one of three things:

- A value, if it is in `VALUES` or `COMBINED`. A value that is 0 or None is structure, because then
  its operation is left out.
- On the host, if it is in `ON_HOST`. No program depends on it.
- Structure otherwise. Another value of the field is another program.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np

from vit_jax.base import Record, records
from vit_jax.config import TrainConfig
from vit_jax.training.duration import TrainLength
from vit_jax.training.optimizer import make_schedule, tabulate
from vit_jax.training.param_groups import ParamGroups
from vit_jax.training.sharpness import make_radius

# Fields whose numbers are in `Values.numbers`.
VALUES = (
    'seed',
    'ema_decay',
    'loss.label_smoothing',
    *(f'distillation.{name}' for name in ('task_weight', 'temperature')),
    *(f'augmentation.{name}' for name in ('color_jitter', 'erasing', 'mixup', 'cutmix')),
    *(f'regularization.{name}' for name in ('dropout', 'stochastic_depth')),
    *(f'objective.{name}' for name in ('masked', 'replaced')),
    *(f'optimizer.{name}' for name in ('weight_decay', 'head_weight_decay', 'clip_norm')),
    *(f'optimizer.{name}' for name in ('b1', 'b2', 'epsilon', 'momentum')),
    'optimizer.sharpness.alpha',
)
# Fields from which the other arrays of `Values` are computed.
_RADIUS = 'optimizer.sharpness.rho', 'optimizer.sharpness.rho_min'
COMBINED = 'schedule', 'total', *_RADIUS, 'optimizer.layer_decay', 'optimizer.lr_multipliers'
# Fields that no program depends on. They select and read images, control the loop, or measure.
_DATA = 'data', 'train_split', 'eval_split', 'held_out', 'classes', 'loader', 'augmentation.crop'
_READ = 'preprocessing.crop', 'preprocessing.exif_rotation'
_START = 'start_from', 'reuse_head', 'init_head', 'hints'
_TEACHER = 'distillation.teacher', 'distillation.digest'  # its architecture is in the structure
_LOOP = 'patch_dropout_until', 'spike_deviations', 'max_skipped_steps', 'patience'
_EVERY = tuple(f'{name}_every_steps' for name in ('log', 'eval', 'checkpoint'))
_FILES = 'keep_checkpoints', 'keep_best', 'tensorboard', 'writers'
_MEASURED = 'evals', 'eval_batch_size', 'fewshot', 'mesh.max_replicated_fraction'
ON_HOST = *_DATA, *_READ, *_START, *_TEACHER, *_LOOP, *_EVERY, *_FILES, *_MEASURED

ARGUMENT = 'not known before the program runs'  # stands for a value in a structure


class Values(NamedTuple):
    """Arguments of the compiled programs that do not change during a run."""

    numbers: dict[str, Any]  # by the path of the field; numbers that are off are left out
    learning_rates: Any  # of each step (see `tabulate`)
    radii: Any | None  # norm of SAM's perturbation at each step; None: no SAM
    lr_factors: Any | None  # see `ParamGroups`


def make_values(config: TrainConfig, length: TrainLength, groups: ParamGroups) -> Values:
    """Returns the values of a checked configuration, on the host."""
    schedule, steps = make_schedule(config.schedule, length), length.total_steps
    radii, sam = None, config.optimizer.sharpness
    if sam is not None and sam.rho > 0:
        radius = make_radius(sam, schedule, peak=config.schedule.learning_rate, total_steps=steps)
        radii = tabulate(radius, steps)
    return Values(_find_numbers(config), tabulate(schedule, steps), radii, groups.lr_factors)


def insert_values(structure: TrainConfig, values: Values) -> TrainConfig:
    """Returns a copy of a structure with the numbers of `values`, which may be traced."""
    return records.replaced(structure, values.numbers)


def remove_values(config: TrainConfig) -> TrainConfig:
    """Returns the structure: a copy in which `ARGUMENT` replaces values and fields on the host.

    Arithmetic with `ARGUMENT` fails, so no program can contain a value by mistake.
    """
    blank = dict.fromkeys(_find_numbers(config), ARGUMENT)
    for path in (*COMBINED, *ON_HOST):
        record, name = _find(config, path)
        if record and (path in ON_HOST or not records.is_off(getattr(record, name))):
            blank[path] = ARGUMENT
    zeros = [pattern for pattern, factor in config.optimizer.lr_multipliers if factor == 0]
    frozen = *config.optimizer.frozen, *zeros
    return records.replaced(config, blank | {'optimizer.frozen': frozen})


def _find_numbers(config: TrainConfig) -> dict[str, Any]:
    """Returns the numbers of `VALUES` that are not off, by path."""
    numbers: dict[str, Any] = {}
    for path in VALUES:
        record, name = _find(config, path)
        is_taught = config.distillation.teacher is not None or record is not config.distillation
        if record and is_taught and not records.is_off(number := getattr(record, name)):
            numbers[path] = np.float32(number)
    return numbers | {'seed': np.uint32(config.seed)}  # 0 is a seed like others


def _find(config: TrainConfig, path: str) -> tuple[Record | None, str]:
    """Returns the record that has the field with this path, and the name of the field.

    The record is None if it is absent, or a function instead.
    """
    *parents, name = path.split('.')
    record: Any = config
    for parent in parents:
        record = getattr(record, parent)
        if not isinstance(record, Record):
            return None, name
    return record, name


def make_key(structure: Any) -> Hashable:
    """Returns a key of records, tuples and dicts, which is equal for equal structures.

    Functions are equal only if they are the same object.
    """
    if isinstance(structure, Record):
        return type(structure), *(make_key(each) for each in vars(structure).values())
    if isinstance(structure, dict):
        return tuple((name, make_key(each)) for name, each in structure.items())
    if isinstance(structure, tuple):
        return tuple(map(make_key, structure))
    return _Same(structure) if callable(structure) else structure


class _Same(NamedTuple):
    """A function, compared by identity."""

    function: Any

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Same) and self.function is other.function

    def __hash__(self) -> int:
        return id(self.function)
