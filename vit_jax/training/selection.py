"""Selects the best evaluation of a run by one metric, and ends training without improvement."""

import dataclasses
import math
from typing import Any


def lower_is_better(metric: str) -> bool:
    """Returns whether lower values are better: of a loss. `metric` is NAME or KIND/NAME."""
    return metric.rpartition('/')[2] == 'loss'


@dataclasses.dataclass
class Selection:
    """The best evaluation so far by one metric, and the later evaluations.

    Checkpoints contain it as JSON values. A run that resumes at the step of an evaluation evaluates
    again, so recording a step twice has no effect.
    """

    evaluation: str  # name of the evaluation
    metric: str  # name of its metric, such as accuracy
    split: str  # the evaluated split, such as train[90%:]
    patience: int | None = None  # evaluations without improvement that end training; None: no end
    step: int | None = None  # step of the best evaluation; None: no value was finite
    value: float = 0.0  # the best value
    since: list[int] = dataclasses.field(default_factory=list)  # steps of the later evaluations

    def record(self, step: int, value: float) -> bool:
        """Records the value at a step. Returns whether it is the best; NaN and infinity never are.

        Of equal values, the first is the best.
        """
        sign = -1 if lower_is_better(self.metric) else 1
        is_better = self.step is None or sign * value > sign * self.value
        if math.isfinite(value) and is_better:
            self.step, self.value, self.since = step, value, []
        elif step not in (self.step, *self.since):
            self.since.append(step)
        return step == self.step

    @property
    def is_exhausted(self) -> bool:
        """Whether `patience` evaluations in a row did not improve on the best one."""
        return self.patience is not None and len(self.since) >= self.patience

    def resume(self, saved: dict[str, Any]) -> None:
        """Continues a saved selection, unless it is by another metric or split."""
        if all(saved[name] == getattr(self, name) for name in ('evaluation', 'metric', 'split')):
            self.step, self.value, self.since = saved['step'], saved['value'], saved['since']

    def __str__(self) -> str:
        value = f'{self.value:.4f}' if lower_is_better(self.metric) else f'{self.value:.2%}'
        name = f'{self.evaluation} {self.metric.replace("_", " ")}'
        return f'{name} {value} (validation, on {self.split})'
