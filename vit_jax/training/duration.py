"""How long something lasts while training: in steps, epochs, examples, or as a fraction."""

import dataclasses
from typing import Any, Literal, NamedTuple

from vit_jax.base import UserError, counted, records

UNITS = 'steps', 'epochs', 'examples', 'fraction'
Interval = int | Literal['epoch']  # every so many steps, or once an epoch

# Numbers are logged every 50 steps; a shorter training logs once an epoch, at most 20 times.
_LOG_STEPS, _LOG_LINES = 50, 20


@dataclasses.dataclass(kw_only=True)
class Duration(records.Record):
    """How long, in exactly one unit: Duration(steps=500), Duration(epochs=90), ...

    An epoch is as many examples as there are training images, a fraction is of all steps.
    """

    steps: int | None = None  # updates, of a batch each
    epochs: float | None = None  # times the number of training images
    examples: int | None = None  # images, however often each
    fraction: float | None = None  # of all steps, 0 to 1; not of `total` itself

    def __post_init__(self) -> None:
        given = {unit: value for unit, value in vars(self).items() if value is not None}
        if len(given) != 1:
            text = f'a duration has one of {", ".join(UNITS)}'
            raise UserError(f'Duration: {text}; got {", ".join(given) or "none"}')
        super().__post_init__()

    def check(self) -> None:
        records.require_between(self, 'steps', 'epochs', 'examples', low=0)
        records.require_between(self, 'fraction', low=0, high=1)

    def override(self, name: str, value: Any) -> None:
        """Replaces the unit: `--config.total.epochs=3` where a file has steps=500."""
        for unit in UNITS:
            setattr(self, unit, value if unit == name else None)

    def __str__(self) -> str:
        unit = next(unit for unit in UNITS if getattr(self, unit) is not None)
        return f'{unit}={getattr(self, unit)}'


class TrainLength(NamedTuple):
    """How long a training is; turns a Duration into steps."""

    batch_size: int
    num_images: int  # in an epoch
    total_steps: int

    def steps(self, duration: Duration) -> int:
        """The duration in steps, rounded."""
        if duration.fraction is not None:
            return round(duration.fraction * self.total_steps)
        if duration.epochs is not None:
            return round(duration.epochs * self.num_images / self.batch_size)
        if duration.examples is not None:
            return round(duration.examples / self.batch_size)
        assert duration.steps is not None
        return duration.steps

    def interval(self, every: Interval | None) -> int | None:
        """The interval in steps, at least one."""
        if every != 'epoch':
            return every
        return max(1, self.steps(Duration(epochs=1.0)))

    def log_interval(self, every: Interval | None) -> int:
        """The interval in steps of the logged numbers; the default depends on the length."""
        rarely = max(self.interval('epoch') or 1, self.total_steps // _LOG_LINES)
        return self.interval(every) or min(_LOG_STEPS, rarely)

    @property
    def epochs(self) -> float:
        """How often each image is seen."""
        return self.total_steps * self.batch_size / self.num_images


def make_train_length(total: Duration, *, batch_size: int, num_images: int) -> TrainLength:
    """The length of a training. UserError for a fraction, and for less than one step."""
    if total.fraction is not None:
        raise UserError(f'total.fraction={total.fraction}: of what? give steps, epochs or examples')
    steps = TrainLength(batch_size, num_images, total_steps=0).steps(total)
    per_step = f'batch_size={batch_size} ({counted(num_images, "image")})'
    way_out = 'expected a smaller --config.batch_size, or a longer --config.total'
    records.require(steps >= 1, f'total.{total}: less than one step of {per_step}; {way_out}')
    return TrainLength(batch_size, num_images, steps)
