"""Durations and intervals of training, in steps, epochs, examples, or as a fraction."""

import dataclasses
from typing import Any, Literal, NamedTuple

from vit_jax.base import UserError, plural, records

UNITS = 'steps', 'epochs', 'examples', 'fraction'
Interval = int | Literal['epoch']  # a number of steps, or once per epoch

# Default: metrics are logged every 50 steps, and about 20 times in runs of less than 1,000 steps.
_LOG_STEPS = 50
_LOG_LINES = 20


@dataclasses.dataclass(kw_only=True)
class Duration(records.Record):
    """A duration in exactly one unit, such as Duration(steps=500) or Duration(epochs=90)."""

    steps: int | None = None  # number of updates, each with one batch
    epochs: float | None = None  # number of passes over the training images
    examples: int | None = None  # number of examples, repeated images included
    fraction: float | None = None  # fraction of all steps, from 0 to 1; not allowed in `total`

    def validate(self, where: str) -> None:
        given = [unit for unit in UNITS if getattr(self, unit) is not None]
        if len(given) != 1:
            text = f'expected exactly one of {", ".join(UNITS)}; got {", ".join(given) or "none"}'
            raise UserError(f'{where}: {text}')
        super().validate(where)

    def check(self) -> None:
        records.require_between(self, 'steps', 'epochs', 'examples', low=0)
        records.require_between(self, 'fraction', low=0, high=1)

    def override(self, name: str, value: Any) -> None:
        """Sets a unit and clears the others: `--config.total.epochs=3` replaces steps=500."""
        for unit in UNITS:
            setattr(self, unit, value if unit == name else None)

    def __str__(self) -> str:
        unit = next(unit for unit in UNITS if getattr(self, unit) is not None)
        return f'{unit}={getattr(self, unit)}'


class TrainLength(NamedTuple):
    """The length of a training run, which converts durations to steps."""

    batch_size: int
    num_images: int  # training images
    total_steps: int

    def to_steps(self, duration: Duration) -> int:
        """Converts a duration to steps, rounded."""
        if duration.fraction is not None:
            return round(duration.fraction * self.total_steps)
        if duration.epochs is not None:
            return round(duration.epochs * self.num_images / self.batch_size)
        if duration.examples is not None:
            return round(duration.examples / self.batch_size)
        assert duration.steps is not None
        return duration.steps

    def interval_steps(self, every: Interval | None) -> int | None:
        """Converts an interval to steps, at least one; None stays None."""
        if every != 'epoch':
            return every
        return max(1, self.to_steps(Duration(epochs=1.0)))

    def log_interval_steps(self, every: Interval | None) -> int:
        """Converts the logging interval to steps; None: a default that depends on the length."""
        default = max(1, min(_LOG_STEPS, self.total_steps // _LOG_LINES))
        return self.interval_steps(every) or default

    @property
    def epochs(self) -> float:
        """Number of passes over the training images."""
        return self.total_steps * self.batch_size / self.num_images


def make_train_length(total: Duration, *, batch_size: int, num_images: int) -> TrainLength:
    """Makes the length of a training run.

    Raises:
      UserError: If `total` is a fraction, or less than one step.
    """
    if total.fraction is not None:
        raise UserError(f'config.total.{total}: expected steps, epochs or examples')
    records.require(total.steps != 0, 'config.total.steps=0: expected 1 or more')
    steps = TrainLength(batch_size, num_images, total_steps=0).to_steps(total)
    if steps < 1:
        images = plural(num_images, 'training image')
        raise UserError(
            f'config.total.{total}: less than one step of batch_size={batch_size} ({images}); '
            'set a smaller --config.batch_size or a longer --config.total'
        )
    return TrainLength(batch_size, num_images, steps)
