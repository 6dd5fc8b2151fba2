"""What a run says: a progress bar or lines on the screen, one JSON object a line in a file:

    {"kind": "train", "step": 50, "time": "2026-11-22T06:25:00+00:00", "run": 1, "seconds": 9.8}

`time` is by the clock of the host, in UTC; `run` is the number of the start in the work directory,
from 1; `seconds` have passed since that start was ready for its first step.
"""

import collections
import datetime
import json
import math
import statistics
import time
from collections.abc import Collection
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from vit_jax.base import (
    Path,
    appending,
    atomic_write,
    counted,
    read_json_lines,
    records,
    usable,
)
from vit_jax.base.storage import reaching
from vit_jax.distributed.processes import Job
from vit_jax.evaluation import probing
from vit_jax.experiment import workdirs
from vit_jax.experiment.build import Experiment
from vit_jax.models import ViTConfig, multiply_adds, parameter_count
from vit_jax.training.loop import Clock
from vit_jax.training.metrics import StepMetrics

# A spike is a loss so many standard deviations, and this share, above the mean of the steps before.
_WINDOW, _SIGMAS, _SHARE, _LEAST = 128, 6.0, 0.2, 32


def console_of(job: Job) -> Console:
    """The screen: nothing is printed by other processes than the first."""
    quiet = job.index != 0
    return Console(quiet=quiet, highlight=False, markup=False, emoji=False, soft_wrap=True)


class Reporter:
    """Collects the metrics of the steps and reports them every `log_every_steps`.

    On a terminal a progress bar follows every step; elsewhere each report is a line.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: range,
        log_every_steps: int,
        batch_size: int,
        clock: Clock,
        tensorboard: bool,
        console: Console,
        progress: dict[str, Any],
        evaluations: Collection[str],
        run: int,
        images_at_peak: float | None = None,
    ):
        """`images_at_peak`: images a second that the devices could train at their peak."""
        self.folder, self.console, is_main_process = folder, console, not console.quiet
        self._steps, self._log_every_steps, self._batch_size = steps, log_every_steps, batch_size
        self._clock, self._began, self._run = clock, time.monotonic(), run
        self._images_at_peak = images_at_peak
        self._recent = [StepMetrics(**metrics) for metrics in progress.get('recent', [])]
        self._losses = collections.deque[float](progress.get('losses', []), maxlen=_WINDOW)
        self._busy_before = self._busy_seconds()
        self.skipped = progress.get('skipped', 0)
        self.evaluated: list[str] = []  # kinds of evaluations with a line at the first step
        self._file = self._board = None
        if is_main_process:
            with usable(folder / workdirs.METRICS):
                again = () if steps else evaluations  # a complete run is evaluated anew
                lines = _cut(folder / workdirs.METRICS, steps.start, again)
                now = (line['kind'] for line in lines if line['step'] == steps.start)
                self.evaluated = [kind for kind in now if kind in evaluations]
                self._file = appending(folder / workdirs.METRICS)
            if tensorboard:
                from tensorboardX import SummaryWriter

                with reaching(board := folder / 'tensorboard'):
                    self._board = SummaryWriter(str(board), purge_step=steps.start)
        self._bar = Progress(
            TextColumn('{task.completed}/{task.total}'),
            BarColumn(bar_width=30),
            TextColumn('{task.fields[numbers]}'),
            TextColumn('left'),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal or not is_main_process,
        )
        self._task = self._bar.add_task(
            '', total=steps.stop, completed=steps.start, numbers='starting'
        )

    def __enter__(self) -> 'Reporter':
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        with usable(self.folder / workdirs.METRICS):  # what could not be written is tried again
            for sink in (self._file, self._board):
                if sink is not None:
                    sink.close()

    def flush(self) -> None:
        """Returns when all lines of the file are where they are kept, on a store too."""
        if self._file is not None:
            with usable(self._file.name):
                self._file.flush()

    @property
    def progress(self) -> dict[str, Any]:
        """What the reports of a run begin with that goes on from here, as JSON values."""
        recent = [metrics._asdict() for metrics in self._recent]
        return {'recent': recent, 'losses': list(self._losses), 'skipped': self.skipped}

    def step(self, step: int, metrics: StepMetrics) -> bool:
        """The metrics of one step, in order. Was it one to report at?"""
        self._recent.append(metrics)
        self.skipped += self._batch_size - round(metrics.num_examples)
        self._look_for_spikes(step, metrics)
        due = step % self._log_every_steps == 0 or step == self._steps.stop
        if due:
            self._report(step)
        self._bar.update(self._task, completed=step)
        return due

    def _look_for_spikes(self, step: int, metrics: StepMetrics) -> None:
        """Says that an update was skipped, or that the loss is far above the steps before."""
        loss, before = metrics.means['loss'], self._losses
        if metrics.scalars['skipped']:
            told = {'loss': str(loss), 'gradient_norm': str(metrics.scalars['gradient_norm'])}
            text = ', '.join(f'{name} {value}' for name, value in told.items())
            self.record('skipped', step, told, f'update skipped: {text}')
            return
        if len(before) >= _LEAST:
            mean, deviation = statistics.fmean(before), statistics.pstdev(before)
            if loss > mean + max(_SIGMAS * deviation, _SHARE * abs(mean)):
                numbers = {'loss': loss, 'mean_before': mean, 'deviation_before': deviation}
                self.record('spike', step, numbers, f'loss {loss:.4f}, after {mean:.4f} on average')
        before.append(loss)

    def record(self, kind: str, step: int, numbers: dict[str, Any], text: str) -> None:
        """A result to keep: a line on the screen and one in the file."""
        self.console.print(f'step {step}: {text}')
        self._write(kind, step, numbers)

    def _report(self, step: int) -> None:
        whole = [m for m in self._recent if not m.scalars['skipped']]
        last = (whole or self._recent)[-1]
        skipped = len(self._recent) - len(whole)
        numbers = last.scalars | {'count': last.num_examples, 'skipped': skipped}
        examples = sum(m.num_examples for m in whole)
        for name in last.sums:  # no mean of no examples
            numbers[name] = sum(m.sums[name] for m in whole) / (examples or math.nan)
        busy = self._busy_seconds()
        images = sum(m.num_examples for m in self._recent)
        numbers['images_per_second'] = images / max(1e-9, busy - self._busy_before)
        self._recent, self._busy_before = [], busy
        speed = f'{numbers["images_per_second"]:,.0f} images/s'
        if self._images_at_peak is not None:
            numbers['mfu'] = numbers['images_per_second'] / self._images_at_peak
            speed += f', MFU {numbers["mfu"]:.1%}'
        self._write('train', step, numbers)
        accuracy = f'  accuracy {numbers["accuracy"]:.1%}' if 'accuracy' in numbers else ''
        text = f'loss {numbers["loss"]:.4f}{accuracy}  {speed}'
        self._bar.update(self._task, numbers=text)
        if not self.console.is_terminal:
            pace = (time.monotonic() - self._began) / max(1, step - self._steps.start)
            left = duration(pace * (self._steps.stop - step))
            self.console.print(f'step {step}/{self._steps.stop}  {text}  left {left}')

    def _busy_seconds(self) -> float:
        return sum(self._clock.seconds.get(name, 0.0) for name in ('data wait', 'step'))

    def _write(self, kind: str, step: int, numbers: dict[str, Any]) -> None:
        if self._file is not None:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
            seconds = round(time.monotonic() - self._began, 3)
            line = {'kind': kind, 'step': step, 'time': now, 'run': self._run, 'seconds': seconds}
            line |= {name: None if _is_no_json(value) else value for name, value in numbers.items()}
            with usable(self._file.name):
                self._file.write(json.dumps(line) + '\n')
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(f'{kind}/{name}', float(value), step)


def _cut(path: Path, step: int, again: Collection[str]) -> list[dict[str, Any]]:
    """Cuts a metrics file down to the lines that a run from this step will not write again."""
    before = (line for line in read_json_lines(path, kind=str, step=int) if line['step'] <= step)
    lines = [line for line in before if line['step'] < step or line['kind'] not in again]
    with atomic_write(path) as partial:
        partial.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return lines


def _is_no_json(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def outline(experiment: Experiment) -> str:
    """What is about to be done, and what the rules over parameters matched."""
    config, model, length = experiment.config, experiment.model.config, experiment.length
    tokens = f'{model.sequence}, ' if isinstance(model, ViTConfig) else ''
    tested = ', '.join(f'{len(one.source):,} {name}' for name, one in experiment.evals.items())
    images, warmup = counted(length.batch_size, 'image'), length.steps(config.schedule.warmup)
    if length.batch_size > length.num_images:
        images += f' (--config.batch_size), more than the {length.num_images:,} training images'
    lines = [
        f'data    {records.text_of(config.data)}: {len(experiment.train.source):,} training and '
        f'{tested} images, {counted(len(experiment.train.source.class_names), "class")}',
        f'length  {counted(length.total_steps, "step")} of {images}, '
        f'{length.epochs:,.1f} epochs; warm-up {counted(warmup, "step")}',
        f'model   {parameter_count(model):,} parameters, {tokens}'
        f'{multiply_adds(model) / 1e6:,.1f} M multiply-adds an image',
        f'compute {experiment.resolved}',
    ]
    if (objective := config.objective) is not None and isinstance(model, ViTConfig):
        lines.append(f'predict {objective.outline(math.prod(model.grid))}')
    if experiment.probes is not None:
        lines += probing.episodes_outline(experiment.probes, experiment.train.source.class_names)
    return '\n'.join([*lines, *experiment.report])


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as 1:02:03."""
    return str(datetime.timedelta(seconds=round(seconds)))


def spent(seconds: dict[str, float]) -> str:
    """The wall time and its parts, as `0:01:02: start 3 s, compile 10 s, ...`."""
    parts = ', '.join(f'{name} {s:.1f} s' for name, s in seconds.items() if s >= 0.05)
    return f'{duration(sum(seconds.values()))}: {parts}'


def eval_summary(evals: dict[str, dict[str, float]]) -> str:
    """The results of evaluations in one line."""
    parts = []
    for name, numbers in evals.items():
        precision = numbers.get('mean_average_precision')
        more = '' if precision is None else f', mean average precision {precision:.2%}'
        loss = f'loss {numbers["loss"]:.4f}'  # of what is not right or wrong
        found = f'accuracy {numbers["accuracy"]:.2%}' if 'accuracy' in numbers else loss
        parts.append(f'{name} {found}{more}')
    return '; '.join(parts)
