"""Reports the progress of a run on the screen, in metrics.jsonl, events.jsonl and TensorBoard.

metrics.jsonl has one line of metrics per kind and step, without duplicates after a restart:

    {"kind": "train", "step": 50, "time": "2026-11-22T06:25:00+00:00", "run": 1, "seconds": 9.8}

A run starts again when it is resumed; `run` counts its starts, from 1. `time` is in UTC, by the
clock of the host. `seconds` is the time since this start was ready for its first step.

In events.jsonl, `time` is Unix time, and `seconds` the wall time of this start so far by activity:

    {"run": 2, "event": "saving", "step": 300, "time": 1795329000.1, "seconds": {"step": 50.2}}
"""

import collections
import datetime
import json
import logging
import math
import time
from typing import Any, NamedTuple

from rich.console import Console

from vit_jax.base import Path, errors, files, plural, records, storage, usable, write_text
from vit_jax.base.bucket_lease import GrowingObject
from vit_jax.config import Writer
from vit_jax.data import loading
from vit_jax.distributed import meshes
from vit_jax.distributed.processes import Job
from vit_jax.experiment.build import Experiment
from vit_jax.experiment.workdirs import EVENTS, METRICS
from vit_jax.models import ViTConfig, count_params
from vit_jax.training.loop import Clock
from vit_jax.training.losses import StepMetrics
from vit_jax.training.metrics import find_metric

_TENSORBOARD = 'tensorboard'
_LINE_KEYS = 'kind', 'step', 'time', 'run', 'seconds'  # other keys of metrics.jsonl


def make_console(job: Job) -> Console:
    """Returns a console that prints on process 0 only."""
    quiet = job.index != 0
    return Console(quiet=quiet, highlight=False, markup=False, emoji=False, soft_wrap=True)


class HostTime(NamedTuple):
    """What a start has done so far."""

    steps: int
    busy: float  # seconds of steps, with waits for data and devices
    waited: float  # seconds in which the host waited for devices

    def since(self, earlier: 'HostTime') -> 'HostTime':
        """Returns what was done since an earlier time."""
        return HostTime(
            steps=self.steps - earlier.steps,
            busy=self.busy - earlier.busy,
            waited=self.waited - earlier.waited,
        )


class Reporter:
    """Collects the metrics of steps and reports their means every `log_every_steps`."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        *,
        steps: range,
        progress: dict[str, Any],
        clock: Clock,
        job: Job,
    ):
        """Opens the files of a run in `folder`.

        Args:
          experiment: The experiment.
          folder: The work directory.
          steps: The steps of this start.
          progress: `Reporter.progress` from the restored checkpoint; {} for a new run.
          clock: Measures the time of this start by activity.
          job: This process. Process 0 prints, writes the files and calls the writers.
        """
        config = experiment.config
        length = experiment.length
        self.console = make_console(job)
        self.clock = clock
        self._steps = steps
        self._job = job
        self._log_every_steps = length.log_interval_steps(config.log_every_steps)
        self._batch_size = config.batch_size
        self._shown = experiment.shown
        self.first_step = steps.start
        self._recent = [StepMetrics(**metrics) for metrics in progress.get('recent', [])]
        self._num_restored = len(self._recent)  # steps of an earlier start
        self.losses = [*progress.get('losses', [])]  # see `fit`
        self._slow = collections.Counter[str]()  # how often the others waited for a process
        # Number of unreadable training images that were skipped, with repetitions, over all starts.
        self.skipped_images = progress.get('skipped', 0)
        self.earlier_seconds: dict[str, float] = {}  # seconds of earlier starts by activity
        self._folder = folder
        self._files = dict[str, Any]()  # open files by name
        self._run = 1  # number of this start
        # Metrics that an earlier start wrote at the first step, by kind of evaluation.
        self.recorded: dict[str, dict[str, Any]] = {}
        self.ends: set[int] = set()  # steps at which earlier starts completed the run
        self._writers = () if self.console.quiet else config.writers
        self._failed_writers: list[Writer] = []
        if not self.console.quiet:
            self._open_files(experiment, folder)
        self._busy_before = self._busy_seconds()
        self._began = time.monotonic()
        self._compared = HostTime(0, self._busy_before, clock.device_wait)

    def _open_files(self, experiment: Experiment, folder: Path) -> None:
        """Opens the files. Removes the metrics of steps that this start trains again."""
        first = self._steps.start
        lines = files.read_json_lines(folder / METRICS, kind=str, step=int)
        lines = [line for line in lines if line['step'] <= first and first > 0]
        at_first = [line for line in lines if line['step'] == first]
        self.recorded = {line['kind']: _extract_metrics(line) for line in at_first}
        events = read_events(folder / EVENTS)
        self.ends = {event['step'] for event in events if event['event'] == 'complete'}
        self._run = 1 + max((event['run'] for event in events), default=0)
        self.earlier_seconds = sum_seconds(events)
        for name, values in {METRICS: lines, EVENTS: events}.items():
            path = folder / name
            with usable(path):
                write_text(path, ''.join(json.dumps(value) + '\n' for value in values))
                remote = storage.is_remote(path)
                self._files[name] = GrowingObject(path) if remote else path.open('a', buffering=1)
        if experiment.config.tensorboard:
            from tensorboardX import SummaryWriter

            path = folder / _TENSORBOARD
            with usable(path):
                self._files[_TENSORBOARD] = SummaryWriter(str(path), purge_step=first)
                for line in at_first:  # `purge_step` removes them too
                    self._add_to_tensorboard(line['kind'], first, _extract_metrics(line))

    def close(self) -> None:
        """Closes the files. On a bucket, logs a warning if the last lines cannot be written."""
        for name, file in self._files.items():
            with usable(self._folder / name):
                file.close()

    def flush(self) -> None:
        """Writes all lines to the disk or bucket before it returns."""
        for name, file in self._files.items():
            with usable(self._folder / name):
                file.flush()

    def _append(self, name: str, values: dict[str, Any]) -> None:
        """Appends a line to a file. Raises UserError if the file is not writable or was removed."""
        if name in self._files:
            path = self._folder / name
            storage.require_exists(path)
            with usable(path):
                self._files[name].write(json.dumps(values) + '\n')

    @property
    def progress(self) -> dict[str, Any]:
        """State of the reporter for the next checkpoint, as JSON values."""
        recent = [metrics._asdict() for metrics in self._recent]
        return {'recent': recent, 'skipped': self.skipped_images, 'losses': [*self.losses]}

    def record_event(self, event: str, step: int | None, **more: Any) -> None:
        """Writes an event to the event log.

        Args:
          event: What happens, such as `saving`.
          step: The step of the current state, if any.
          **more: Other keys of the line, as JSON values.
        """
        self.clock.record_elapsed()
        values = {'run': self._run, 'event': event, 'step': step, 'time': round(time.time(), 4)}
        values['seconds'] = {name: round(number, 4) for name, number in self.clock.seconds.items()}
        self._append(EVENTS, values | more)

    def record_step(self, step: int, metrics: StepMetrics) -> bool:
        """Adds the metrics of the next step. Returns whether a report was due and written."""
        self._recent.append(metrics)
        self.skipped_images += self._batch_size - round(metrics.num_examples)
        if metrics.scalars['skipped']:
            loss, norm = str(metrics.means['loss']), str(metrics.scalars['gradient_norm'])
            text = f'update skipped: loss {loss}, gradient_norm {norm}'
            self.record_metrics('skipped', step, {'loss': loss, 'gradient_norm': norm}, text)
        is_due = step % self._log_every_steps == 0 or step == self._steps.stop
        if is_due:
            self._report(step)
        return is_due

    def record_metrics(self, kind: str, step: int, numbers: dict[str, Any], text: str) -> None:
        """Prints `text`, and writes `numbers` to metrics.jsonl."""
        self.console.print(f'step {step}: {text}')
        self._write(kind, step, numbers)

    def _report(self, step: int) -> None:
        """Reports means over the steps since the last report, without skipped updates."""
        used = [m for m in self._recent if not m.scalars['skipped']]
        last = (used or self._recent)[-1]
        examples = sum(m.num_examples for m in used) or math.nan  # nan: no examples, no mean
        skipped = len(self._recent) - len(used)
        numbers = last.scalars | {'count': last.num_examples, 'skipped': skipped}
        numbers |= {name: sum(m.sums[name] for m in used) / examples for name in last.sums}
        self.clock.record_elapsed()
        timed = self._recent[self._num_restored :]
        busy = self._busy_seconds()
        images = sum(m.num_examples for m in timed)
        speed = numbers['images_per_second'] = images / max(1e-9, busy - self._busy_before)
        numbers |= self._compare_processes(step)
        self._recent = []
        self._num_restored = 0
        self._busy_before = busy
        shown = [find_metric('loss'), *self._shown]
        by_name = {metric.name: metric for metric in shown if metric.name in numbers}
        texts = [metric.describe(numbers[name]) for name, metric in by_name.items()]
        text = '  '.join([*texts, f'{speed:,.0f} images/s'])
        self._write('train', step, numbers)
        self.record_event('reported', step)
        pace = (time.monotonic() - self._began) / max(1, step - self._steps.start)
        left = format_duration(pace * (self._steps.stop - step))
        self.console.print(f'step {step}/{self._steps.stop}  {text}  {left} left')

    def _compare_processes(self, step: int) -> dict[str, float]:
        """Returns the slowest process's seconds per step before the previous comparison.

        A comparison spans at least ten steps, so single evaluations and saves do not matter. Logs a
        warning the second time that the others waited for the same process.
        """
        now = HostTime(step - self._steps.start, self._busy_seconds(), self.clock.device_wait)
        done = now.since(self._compared)
        if done.steps < 10:
            return {}
        self._compared = now
        pace = self._job.compare_pace(step, (done.busy - done.waited) / done.steps)
        if pace is None:
            return {}
        if pace.slowest > max(0.8 * done.busy / done.steps, 2 * pace.median):
            self._slow[pace.name] += 1
            if self._slow[pace.name] == 2:
                text = '%s is slow: %.3g s per step without device waits; median process: %.3g s'
                logging.warning(text, pace.name, pace.slowest, pace.median)
        ratio = pace.slowest / max(pace.median, 1e-9)
        return {'slowest_host_seconds': pace.slowest, 'slowest_host_ratio': ratio}

    def _busy_seconds(self) -> float:
        """Returns the wall time of steps, with waits for data but without saves and evaluations."""
        return sum(self.clock.seconds.get(name, 0.0) for name in ('data wait', 'step'))

    def _write(self, kind: str, step: int, numbers: dict[str, Any]) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
        passed = round(time.monotonic() - self._began, 3)
        values = {'kind': kind, 'step': step, 'time': now, 'run': self._run, 'seconds': passed}
        values |= {name: _to_json(value) for name, value in numbers.items()}
        self._append(METRICS, values)
        self._call_writers(values)
        self._add_to_tensorboard(kind, step, numbers)

    def _add_to_tensorboard(self, kind: str, step: int, numbers: dict[str, Any]) -> None:
        if (board := self._files.get(_TENSORBOARD)) is not None:
            for name, value in numbers.items():
                board.add_scalar(f'{kind}/{name}', float(value), step)

    def _call_writers(self, values: dict[str, Any]) -> None:
        """Calls `config.writers`. Logs a warning at the first error of each; the run continues."""
        for writer in self._writers:
            try:
                writer(dict(values))
            except (Exception, SystemExit) as error:
                if writer not in self._failed_writers:
                    self._failed_writers.append(writer)
                    text = errors.format_error(error)
                    logging.warning('config.writers: %s: %s', records.text_of(writer), text)


def _extract_metrics(line: dict[str, Any]) -> dict[str, Any]:
    """Returns the metrics in a line of metrics.jsonl, with NaN for null."""
    return {n: math.nan if x is None else x for n, x in line.items() if n not in _LINE_KEYS}


def _to_json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_events(path: Path) -> list[dict[str, Any]]:
    """Reads the events of a run, oldest first; [] if there is no file."""
    return files.read_json_lines(
        path, run=int, event=str, step=int | None, time=float, seconds=dict
    )


def sum_seconds(events: list[dict[str, Any]]) -> dict[str, float]:
    """Sums the wall time of all starts by activity, from the last event of each start."""
    totals = collections.Counter[str]()
    for seconds in {event['run']: event['seconds'] for event in events}.values():
        totals.update(seconds)
    return dict(totals)


def describe_run(experiment: Experiment) -> str:
    """Describes data, length, model, compute options and param groups of a run, in lines."""
    config = experiment.config
    model = experiment.model.config
    length = experiment.length
    source = experiment.train_reader.source
    multiply_adds = experiment.task.count_multiply_adds(config, model)
    tokens = f'{model.sequence_summary}, ' if isinstance(model, ViTConfig) else ''
    evals = ', '.join(f'{len(r.source):,} {name}' for name, r in experiment.eval_readers.items())
    images = plural(length.batch_size, 'image')
    lines = [
        f'data    {records.text_of(config.data)}: {len(source):,} training and '
        f'{evals} images, {plural(len(source.class_names), "class")}',
        f'length  {plural(length.total_steps, "step")} of {images}, {length.epochs:,.1f} epochs; '
        f'warm-up {plural(length.to_steps(config.schedule.warmup), "step")}',
        f'model   {count_params(model):,} parameters, {tokens}'
        f'{multiply_adds / 1e6:,.1f} M multiply-adds per image',
        f'compute {experiment.compute}',
    ]
    if source.places is not None:
        sharding = meshes.batch_sharding(experiment.mesh)
        memory = loading.check_window_memory(source, config.loader, config.batch_size, sharding)
        lines.insert(1, f'order   {memory}; the first batch waits for most images of a window')
    lines += experiment.task.describe(config)
    return '\n'.join([*lines, *experiment.param_group_report])


def format_duration(seconds: float) -> str:
    """Formats seconds as hours, minutes and seconds, such as 1:02:03."""
    return str(datetime.timedelta(seconds=round(seconds)))


def format_seconds(seconds: dict[str, float]) -> str:
    """Formats wall time and its parts, such as `0:01:02: start 3.0 s, compile 10.2 s, ...`."""
    parts = ', '.join(f'{name} {s:.1f} s' for name, s in seconds.items() if s >= 0.05)
    return f'{format_duration(sum(seconds.values()))}: {parts}'
