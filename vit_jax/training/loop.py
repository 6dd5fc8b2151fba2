"""The loop: batches go in, the state goes round, numbers come out one step late."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from vit_jax.training.update import Metrics, TrainState
from vit_jax.typing import Batch


class NotFinite(ArithmeticError):
    """The loss, the gradient or the parameters are no longer numbers."""


class Every(NamedTuple):
    """Something to do with the state every so many steps, and once after the last one."""

    steps: int | None  # None: after the last step only
    run: Callable[[int, TrainState], None]

    def is_due(self, step: int, total_steps: int) -> bool:
        """After `step` updates of `total_steps`?"""
        return step == total_steps or (self.steps is not None and step % self.steps == 0)


class Clock:
    """Where the wall time goes: seconds by name. Within an inner name the outer one rests."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._since = time.monotonic()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """The time within belongs to `name`."""
        self._settle()
        self._running.append(name)
        try:
            yield
        finally:
            self._settle()
            self._running.pop()

    def _settle(self) -> None:
        now = time.monotonic()
        name = self._running[-1] if self._running else 'start'
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


def fit(
    update: Callable[[TrainState, Batch], tuple[TrainState, Metrics]],
    state: TrainState,
    batches: Iterator[Batch],
    *,
    steps: range,
    on_metrics: Callable[[int, dict[str, float]], None],
    observers: Sequence[Every],
    clock: Clock,
) -> TrainState:
    """The state after the given steps; step n takes the state after n updates to n + 1.

    Metrics of a step are read while the next one runs, so the device never waits for the host,
    and before anything observes the state. Raises NotFinite, before any observer sees it, when
    a metric is not a finite number.
    """
    pending: tuple[int, Metrics] | None = None

    def read() -> None:
        nonlocal pending
        if pending is None:
            return
        step, metrics = pending
        pending = None
        numbers = {name: float(value) for name, value in jax.device_get(metrics).items()}
        _check_finite(step, numbers)
        on_metrics(step, numbers)

    for step in steps:
        with clock('data wait'):
            batch = next(batches)
        with clock('step'):
            state, metrics = update(state, batch)
            read()
            pending = step + 1, metrics
        due = [observer for observer in observers if observer.is_due(step + 1, steps.stop)]
        if due:
            with clock('step'):
                read()
        for observer in due:
            observer.run(step + 1, state)
    return state


def _check_finite(step: int, numbers: dict[str, Any]) -> None:
    broken = [f'{name} is {value}' for name, value in numbers.items() if not math.isfinite(value)]
    if broken:
        raise NotFinite(f'step {step}: {", ".join(broken)}')
