"""The training loop.

`fit` runs the update for each step, and meanwhile reads the metrics of the previous step. Its
`actions` evaluate or save the state at intervals. `Clock` measures where the time goes.
`profile_steps` profiles some steps with jax's profiler.
"""

import contextlib
import itertools
import logging
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from math import inf, isfinite
from statistics import fmean, stdev
from typing import NamedTuple

import jax
from rich.console import Console

from vit_jax.base import Batch, Path, errors, plural, storage
from vit_jax.distributed.processes import Interrupted
from vit_jax.training.losses import StepMetrics
from vit_jax.training.update import TrainState

LOSS_WINDOW = 128  # number of recent losses that `limit_loss` uses


class NotFiniteError(ArithmeticError):
    """Parameters are NaN or infinite, or too many updates in a row were skipped."""


class TrainingStopped(Exception):
    """Training was interrupted; `state` is the state after the last step."""

    def __init__(self, state: TrainState):
        super().__init__('training was interrupted')
        self.state = state


class PeriodicAction(NamedTuple):
    """An action on the state that runs every `steps` steps, and after the last step."""

    steps: int | None  # None: only after the last step
    run: Callable[[int, TrainState], bool | None]  # returns True to stop the training

    def is_due(self, step: int, total_steps: int) -> bool:
        """Returns whether the action runs after this step."""
        return step == total_steps or (self.steps is not None and step % self.steps == 0)


def run_actions(
    actions: Sequence[PeriodicAction], state: TrainState, step: int, total_steps: int
) -> int:
    """Runs the actions that are due after a step, in order.

    Returns:
      The last step of the training: `step` if an action stops it, otherwise `total_steps`. Later
      actions in the list then run as after the last step.
    """
    for action in actions:
        if action.is_due(step, total_steps) and action.run(step, state):
            total_steps = step
    return total_steps


class Clock:
    """Measures wall time by name. `with clock('step'):` adds the block's time to `seconds['step']`.

    Nested blocks count for the innermost name only. `start` is the time outside all blocks, mostly
    before the first step, plus the `seconds_before` that passed before the clock was made.
    """

    def __init__(self, seconds_before: float = 0.0) -> None:
        self.seconds: dict[str, float] = {'start': seconds_before}
        self.device_wait = 0.0  # the part of `step` in which the host waited for devices
        self._running: list[str] = []
        self._since = time.monotonic()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.record_elapsed()
        self._running.append(name)
        try:
            yield
        finally:
            self.record_elapsed()
            self._running.pop()

    def record_elapsed(self) -> None:
        """Adds the time up to now to `seconds`."""
        now = time.monotonic()
        name = self._running[-1] if self._running else 'start'
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


def limit_loss(losses: Sequence[float], *, deviations: float | None) -> float:
    """Returns the mean of recent losses plus `deviations` standard deviations.

    A step with a higher loss is a spike. The limit is infinite until half of the window is filled,
    and if `deviations` is None.
    """
    if deviations is None:
        return inf
    finite = [loss for loss in losses[-LOSS_WINDOW:] if isfinite(loss)]
    is_filled = len(finite) >= LOSS_WINDOW // 2
    return fmean(finite) + deviations * stdev(finite) if is_filled else inf


def require_progress(step: int, metrics: StepMetrics, skipped: int, max_skipped: int) -> None:
    """Raises NotFiniteError if parameters are not finite or too many updates were skipped."""
    has_too_many_skipped = skipped >= max_skipped
    if isfinite(metrics.scalars['parameter_norm']) and not has_too_many_skipped:
        return
    numbers = metrics.means | metrics.scalars
    not_finite = [f'{name} is {n}' for name, n in numbers.items() if not isfinite(n)]
    reason = ', '.join(not_finite) or f'loss is {numbers["loss"]:.4g}, a spike'
    if has_too_many_skipped:
        reason += (
            f'; {plural(skipped, "update")} in a row skipped; use a lower '
            '--config.schedule.learning_rate or --config.optimizer.clip_norm'
        )
    raise NotFiniteError(f'step {step}: {reason}')


def fit(
    update: Callable[..., tuple[TrainState, StepMetrics]],
    state: TrainState,
    batches: Iterator[Batch],
    *,
    steps: range,
    on_metrics: Callable[[int, StepMetrics], None],
    actions: Sequence[PeriodicAction],
    clock: Clock,
    max_skipped_steps: int = 1,
    spike_deviations: float | None = None,
    losses: list[float] | None = None,
) -> TrainState:
    """Runs `update` for each of `steps`, with one batch each, and returns the last state.

    Metrics of a step are read while the next one runs, so that the device rarely waits for them.

    Args:
      update: Maps (step, state, batch, loss limit) to (state, metrics); see `make_update`.
      state: The state before the first of `steps`.
      batches: Yields a batch per step.
      steps: Numbers of the steps to run.
      on_metrics: Called with the number of updates so far and the metrics as floats, before any
        action gets the state.
      actions: Actions that evaluate or save the state, or end the training.
      clock: Measures `step` and `data wait`.
      max_skipped_steps: Number of skipped updates in a row that end the training.
      spike_deviations: Sets the loss limit of each step (see `limit_loss`); None: no limit.
      losses: Losses of the steps before `steps`; newer ones are appended.

    Raises:
      NotFiniteError: If parameters are not finite, or `max_skipped_steps` updates in a row were
        skipped.
      TrainingStopped: If `batches` or an action raises Interrupted.
    """
    pending: tuple[int, StepMetrics] | None = None
    skipped = 0
    if losses is None:
        losses = []

    @clock('step')
    def read_pending() -> None:
        nonlocal pending, skipped
        if pending is None:
            return
        step, metrics = pending
        pending = None
        since = time.monotonic()
        metrics = jax.tree.map(float, jax.device_get(metrics))
        clock.device_wait += time.monotonic() - since
        losses.append(metrics.means['loss'])
        del losses[: -LOSS_WINDOW - 1]
        on_metrics(step, metrics)
        skipped = skipped + 1 if metrics.scalars['skipped'] else 0
        require_progress(step, metrics, skipped, max_skipped_steps)

    try:
        for step in steps:
            with clock('data wait'):
                batch = next(batches)
            with clock('step'), jax.profiler.StepTraceAnnotation('train', step_num=step + 1):
                # The newest loss is not used: it is known only directly after an action or restart.
                limit = limit_loss(losses if pending else losses[:-1], deviations=spike_deviations)
                state, metrics = update(step, state, batch, limit)
                read_pending()
                pending = step + 1, metrics
            if any(action.is_due(step + 1, steps.stop) for action in actions):
                read_pending()
                last_step = run_actions(actions, state, step + 1, steps.stop)
                if last_step == step + 1:
                    break
    except Interrupted:
        read_pending()
        raise TrainingStopped(state) from None
    read_pending()
    return state


def profile_steps(
    batches: Iterator[Batch], steps: range, profile: range, folder: Path, console: Console
) -> Generator[Batch, None, None]:
    """Yields the batches of `steps`, and profiles the steps in `profile`."""
    first = max(profile.start, steps.start)
    yield from itertools.islice(batches, first - steps.start)
    if first in profile:
        with contextlib.ExitStack() as stack:
            with _warn_of_errors(folder):
                local = stack.enter_context(tempfile.TemporaryDirectory())
                jax.profiler.start_trace(local, create_perfetto_trace=True)
                stack.callback(_write_profile, local, folder, console)  # also if the run fails
            yield from itertools.islice(batches, profile.stop - first)
            jax.block_until_ready(jax.live_arrays())
    yield from batches


def _write_profile(local: str, folder: Path, console: Console) -> None:
    """Stops the profiler and copies its files from a local folder, as it cannot write to buckets.

    The `xprof` plugin of TensorBoard shows them; ui.perfetto.dev shows perfetto_trace.json.gz.
    """
    with _warn_of_errors(folder):
        jax.profiler.stop_trace()
        for file in storage.resolve_folder(local).rglob('*.*'):  # folder names have no dots
            path = folder / file.relative_to(local)
            storage.make_folder(path.parent)
            path.write_bytes(file.read_bytes())
        console.print(f'profile in {folder}: view with tensorboard --logdir={folder} or Perfetto')


@contextlib.contextmanager
def _warn_of_errors(folder: Path) -> Iterator[None]:
    """Turns errors of the profiler into warnings, so that they do not stop the training."""
    try:
        yield
    except Exception as error:
        logging.warning('%s: cannot write the profile: %s', folder, errors.format_error(error))
