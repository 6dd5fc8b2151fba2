"""Splits a configuration into structure and values.

Values are numbers that the compiled programs take as arguments. Runs that differ only in values
share their programs. A field is one of three things:

- A value, if it is in `VALUES` or `DERIVED`. That a field of `VALUES` is 0 or None is part of the
  structure: the program omits its operation.
- On the host, if it is in `ON_HOST`. The compiled functions do not read it.
- Structure otherwise. Another value of the field is another program.
"""

from typing import Any, NamedTuple

import numpy as np

from vit_jax.base import Record, records
from vit_jax.config import TrainConfig
from vit_jax.training.duration import TrainLength
from vit_jax.training.optimizer import OPTIONS, make_schedule, tabulate
from vit_jax.training.param_groups import ParamGroups
from vit_jax.training.sharpness import make_radius

# Fields whose numbers are in `Values`.
VALUES = (
    'augmentation.color_jitter',
    'augmentation.cutmix',
    'augmentation.erasing',
    'augmentation.mixup',
    'distillation.task_weight',
    'distillation.temperature',
    'ema_decay',
    'loss.label_smoothing',
    'objective.masked',
    'objective.replaced',
    'optimizer.b1',
    'optimizer.b2',
    'optimizer.clip_norm',
    'optimizer.epsilon',
    'optimizer.head_weight_decay',
    'optimizer.momentum',
    'optimizer.sharpness.alpha',
    'optimizer.sharpness.rho',
    'optimizer.weight_decay',
    'regularization.dropout',
    'regularization.stochastic_depth',
    'seed',
)
_COMPUTED = 'ema_decay', 'optimizer.sharpness.rho'  # in `ema_rate` and `radii`, not in `numbers`
# The arrays of `Values` are computed from these fields, which are not part of the structure.
DERIVED = (
    'optimizer.layer_decay',
    'optimizer.lr_multipliers',
    'optimizer.sharpness.rho_min',
    'schedule',
    'total',
)
# Fields that select and read images, control the loop, or measure. The outputs that `metrics` need
# are in the task.
ON_HOST = (
    'augmentation.crop',
    'checkpoint_every_steps',
    'classes',
    'data',
    'distillation.digest',
    'distillation.teacher',  # its architecture is in the structure
    'eval_batch_size',
    'eval_every_steps',
    'eval_split',
    'evals',
    'fewshot',
    'held_out',
    'hints',
    'init_head',
    'keep_best',
    'keep_checkpoints',
    'loader',
    'log_every_steps',
    'max_skipped_steps',
    'mesh.max_replicated_fraction',
    'metrics',
    'patch_dropout_until',
    'patience',
    'preprocessing.crop',
    'preprocessing.exif_rotation',
    'reuse_head',
    'spike_deviations',
    'start_from',
    'tensorboard',
    'train_split',
    'writers',
)

ARGUMENT = 'not known before the program runs'  # stands for a value in a structure


class Values(NamedTuple):
    """Arguments of the compiled programs that do not change during a run."""

    numbers: dict[str, Any]  # by the path of the field; without numbers that are off
    learning_rates: Any  # of each step (see `tabulate`)
    radii: Any | None  # norm of SAM's perturbation at each step; None: no SAM
    lr_factors: Any | None  # see `ParamGroups`
    ema_rate: Any | None  # 1 - `ema_decay`, computed on the host in float64


def make_values(config: TrainConfig, length: TrainLength, groups: ParamGroups) -> Values:
    """Returns the values of a checked configuration, on the host.

    Raises UserError if the training is too long, or `rho_min` has no effect.
    """
    schedule = make_schedule(config.schedule, length)
    steps = length.total_steps
    radii = None
    sam = config.optimizer.sharpness
    if sam is not None and sam.rho > 0:
        radius = make_radius(sam, schedule, peak=config.schedule.learning_rate, total_steps=steps)
        radii = tabulate(radius, steps)
    numbers = _find_numbers(config)
    return Values(
        numbers={path: number for path, number in numbers.items() if path not in _COMPUTED},
        learning_rates=tabulate(schedule, steps),
        radii=radii,
        lr_factors=groups.lr_factors,
        ema_rate=None if config.ema_decay is None else np.float32(1 - config.ema_decay),
    )


def insert_values(structure: TrainConfig, values: Values) -> TrainConfig:
    """Returns a copy of a structure with the numbers of `values`, which may be traced."""
    return records.replaced(structure, values.numbers)


def remove_values(config: TrainConfig) -> TrainConfig:
    """Returns the structure: a copy with `ARGUMENT` in place of all values and all host fields.

    Arithmetic with `ARGUMENT` raises an error, so no value gets into a program by mistake.
    """
    paths = [path for path in (*DERIVED, *ON_HOST) if _find(config, path)[0] is not None]
    blank: dict[str, Any] = dict.fromkeys([*_find_numbers(config), *paths], ARGUMENT)
    zeros = [pattern for pattern, factor in config.optimizer.lr_multipliers if factor == 0]
    frozen = *config.optimizer.frozen, *zeros
    return records.replaced(config, blank | {'optimizer.frozen': frozen})


def _find_numbers(config: TrainConfig) -> dict[str, Any]:
    """Returns the numbers of `VALUES` that are not off, by path."""
    numbers: dict[str, Any] = {}
    kind = config.optimizer.kind
    defaults = OPTIONS[kind] if isinstance(kind, str) else {}
    for path in VALUES:
        record, name = _find(config, path)
        if record is None:
            continue
        if record is config.distillation and config.distillation.teacher is None:
            continue
        number = getattr(record, name)
        if record is config.optimizer and number is None:
            number = defaults.get(name)
        if not records.is_off(number):
            numbers[path] = np.float32(number)
    return numbers | {'seed': np.uint32(config.seed)}  # 0 is a seed like others


def _find(config: TrainConfig, path: str) -> tuple[Record | None, str]:
    """Returns the record that has the field with this path, and the name of the field.

    The record is None if it is absent or a function, or if it is an objective of another class.
    """
    *parents, name = path.split('.')
    record: Any = config
    for parent in parents:
        record = getattr(record, parent)
        if not isinstance(record, Record):
            return None, name
    if record is config.objective and name not in records.field_types(type(record)):
        return None, name
    return record, name


def contains_function(value: Any) -> bool:
    """Returns whether a value is a function, or a record, tuple or dict that contains one."""
    if isinstance(value, Record):
        return contains_function(tuple(vars(value).values()))
    if isinstance(value, dict):
        return contains_function(tuple(value.values()))
    if isinstance(value, tuple):
        return any(map(contains_function, value))
    return callable(value)
