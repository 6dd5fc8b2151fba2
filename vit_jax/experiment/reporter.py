"""What a run reports: lines on the screen, and two files of JSON lines.

metrics.jsonl has each number once, however often the run was killed:

    {"kind": "train", "step": 50, "time": "2026-11-22T06:25:00+00:00", "run": 1, "seconds": 9.8}

`time` is by the clock of the host, in UTC; `run` is the number of the start in the work directory,
from 1; `seconds` have passed since that start was ready for its first step.

ledger.jsonl has an event a line: what happens now, at which step, and where the wall time of the
experiment went until then, by name, over all its starts:

    {"run": 2, "event": "saving", "step": 300, "time": 1760.1, "seconds": {"step": 50.2}}

A restart continues from the line of the checkpoint that it restores. The time since that line is
lost. Goodput is the share of the total time that is not lost.
"""

import collections
import datetime
import json
import math
import re
import statistics
import time
from typing import Any

from rich.console import Console

from vit_jax.base import Path, counted, read_json_lines, records, storage, usable
from vit_jax.base.held_objects import GrowingObject
from vit_jax.distributed.processes import Job
from vit_jax.evaluation import probing
from vit_jax.experiment.build import Experiment
from vit_jax.experiment.workdirs import LEDGER, METRICS
from vit_jax.models import ViTConfig, multiply_adds, parameter_count
from vit_jax.training.loop import Clock
from vit_jax.training.losses import StepMetrics

LOST = 'lost by restart'
_BOARD = 'tensorboard'
# A spike is a loss so many standard deviations, and this share, above the mean of the steps before.
_WINDOW, _SIGMAS, _SHARE, _LEAST = 128, 6.0, 0.2, 32


def console_of(job: Job) -> Console:
    """Returns the screen, on which only process 0 prints."""
    quiet = job.index != 0
    return Console(quiet=quiet, highlight=False, markup=False, emoji=False, soft_wrap=True)


class Reporter:
    """Collects the metrics of steps and reports them every `log_every_steps`."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        *,
        steps: range,
        progress: dict[str, Any],
        clock: Clock,
        console: Console,
    ):
        """Opens the files of a run in `folder`.

        Args:
          experiment: What is trained.
          folder: The work directory.
          steps: The steps of this start.
          progress: The reporter's `progress` when the checkpoint was saved, {} without one.
          clock: Counts the time of this start.
          console: Where lines are printed; files are written unless it is quiet.
        """
        config, length = experiment.config, experiment.length
        self.console, self.clock, self._steps = console, clock, steps
        self._log_every_steps = length.log_interval(config.log_every_steps)
        self._batch_size, self._images_at_peak = config.batch_size, images_at_peak(experiment)
        self._recent = [StepMetrics(**metrics) for metrics in progress.get('recent', [])]
        self._losses = collections.deque[float](progress.get('losses', []), maxlen=_WINDOW)
        self.skipped = progress.get('skipped', 0)
        self.at_first_step: list[str] = []  # kinds of the lines in metrics.jsonl at that step
        self.earlier: dict[str, float] = {}  # seconds of earlier starts by name
        self._folder, self._files = folder, dict[str, Any]()  # the open ones by name
        self._run = 1  # the number of this start
        if not console.quiet:
            self._open_files(experiment, folder)
        self._busy_before, self._began = self._busy_seconds(), time.monotonic()

    def _open_files(self, experiment: Experiment, folder: Path) -> None:
        """Opens the files; removes the lines of metrics.jsonl that this start writes again."""
        first = self._steps.start
        # A complete run is evaluated again.
        rewritten = [] if self._steps else [*experiment.evals, 'fewshot']
        lines = [
            line
            for line in read_json_lines(folder / METRICS, kind=str, step=int)
            if line['step'] < first or (line['step'] == first and line['kind'] not in rewritten)
        ]
        self.at_first_step = [line['kind'] for line in lines if line['step'] == first]
        events = read_ledger(folder / LEDGER)
        self._run = 1 + max((event['run'] for event in events), default=0)
        self.clock.settle()
        began = time.time() - sum(self.clock.seconds.values())
        self.earlier = seconds_before(events, first, began)
        for name, values in {METRICS: lines, LEDGER: events}.items():
            with usable(path := folder / name):
                with storage.atomic_write(path) as partial:
                    partial.write_text(''.join(json.dumps(value) + '\n' for value in values))
                is_remote = storage.is_remote(path)
                self._files[name] = (
                    GrowingObject(path) if is_remote else path.open('a', buffering=1)
                )
        if experiment.config.tensorboard:
            from tensorboardX import SummaryWriter

            with usable(path := folder / _BOARD):
                self._files[_BOARD] = SummaryWriter(str(path), purge_step=first)

    def close(self) -> None:
        """Closes the files; on a bucket it warns of lines that cannot be written by now."""
        for name, file in self._files.items():
            with usable(self._folder / name):
                file.close()

    def flush(self) -> None:
        """Returns when all lines of the files are where they are kept, on a bucket too."""
        for name, file in self._files.items():
            with usable(self._folder / name):
                file.flush()

    def _append(self, name: str, values: dict[str, Any]) -> None:
        """Adds a line to a file. Raises UserError if it cannot be written, or was removed."""
        if name in self._files:
            path = self._folder / name
            storage.require_kept(path)
            with usable(path):
                self._files[name].write(json.dumps(values) + '\n')

    @property
    def progress(self) -> dict[str, Any]:
        """What the reporter of a run that resumes here starts with, as JSON values."""
        recent = [metrics._asdict() for metrics in self._recent]
        return {'recent': recent, 'losses': list(self._losses), 'skipped': self.skipped}

    def record_event(self, event: str, step: int | None) -> None:
        """Writes a line to the ledger, while the state is that of `step`; None: of no step."""
        self.clock.settle()
        seconds = collections.Counter(self.earlier)
        seconds.update(self.clock.seconds)
        values = {'run': self._run, 'event': event, 'step': step, 'time': round(time.time(), 4)}
        values['seconds'] = {name: round(number, 4) for name, number in seconds.items()}
        self._append(LEDGER, values)

    def step(self, step: int, metrics: StepMetrics) -> bool:
        """Takes the metrics of one step, in order. Returns whether they were reported."""
        self._recent.append(metrics)
        self.skipped += self._batch_size - round(metrics.num_examples)
        self._look_for_spikes(step, metrics)
        is_due = step % self._log_every_steps == 0 or step == self._steps.stop
        if is_due:
            self._report(step)
        return is_due

    def _look_for_spikes(self, step: int, metrics: StepMetrics) -> None:
        """Records an update that was skipped, and a loss far above the steps before."""
        loss, before = metrics.means['loss'], self._losses
        if metrics.scalars['skipped']:
            norm = str(metrics.scalars['gradient_norm'])
            numbers: dict[str, Any] = {'loss': str(loss), 'gradient_norm': norm}
            text = f'update skipped: loss {loss}, gradient_norm {norm}'
            return self.record('skipped', step, numbers, text)
        if len(before) >= _LEAST:
            mean, deviation = statistics.fmean(before), statistics.pstdev(before)
            if loss > mean + max(_SIGMAS * deviation, _SHARE * abs(mean)):
                numbers = {'loss': loss, 'mean_before': mean, 'deviation_before': deviation}
                self.record('spike', step, numbers, f'loss {loss:.4f}, after {mean:.4f} on average')
        before.append(loss)

    def record(self, kind: str, step: int, numbers: dict[str, Any], text: str) -> None:
        """Keeps a result: a line on the screen and one in the file."""
        self.console.print(f'step {step}: {text}')
        self._write(kind, step, numbers)

    def _report(self, step: int) -> None:
        """Reports means over the steps since the last report whose updates were not skipped."""
        used = [m for m in self._recent if not m.scalars['skipped']]
        last = (used or self._recent)[-1]
        examples = sum(m.num_examples for m in used) or math.nan  # no mean of no examples
        numbers = last.scalars | {'count': last.num_examples}
        numbers['skipped'] = len(self._recent) - len(used)
        numbers |= {name: sum(m.sums[name] for m in used) / examples for name in last.sums}
        busy, images = self._busy_seconds(), sum(m.num_examples for m in self._recent)
        speed = numbers['images_per_second'] = images / max(1e-9, busy - self._busy_before)
        self._recent, self._busy_before = [], busy
        text = f'loss {numbers["loss"]:.4f}'
        text += f'  accuracy {numbers["accuracy"]:.1%}' if 'accuracy' in numbers else ''
        text += f'  {speed:,.0f} images/s'
        if self._images_at_peak is not None:
            numbers['mfu'] = speed / self._images_at_peak
            text += f', MFU {numbers["mfu"]:.1%}'
        self._write('train', step, numbers)
        self.record_event('reported', step)
        pace = (time.monotonic() - self._began) / max(1, step - self._steps.start)
        left = duration(pace * (self._steps.stop - step))
        self.console.print(f'step {step}/{self._steps.stop}  {text}  left {left}')

    def _busy_seconds(self) -> float:
        return sum(self.clock.seconds.get(name, 0.0) for name in ('data wait', 'step'))

    def _write(self, kind: str, step: int, numbers: dict[str, Any]) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
        values = {'kind': kind, 'step': step, 'time': now, 'run': self._run}
        values['seconds'] = round(time.monotonic() - self._began, 3)
        self._append(METRICS, values | {name: _as_json(value) for name, value in numbers.items()})
        if (board := self._files.get(_BOARD)) is not None:
            for name, value in numbers.items():
                board.add_scalar(f'{kind}/{name}', float(value), step)


def _as_json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Returns the events of a run, oldest first; [] if there is no file."""
    return read_json_lines(path, run=int, event=str, step=int | None, time=float, seconds=dict)


def seconds_before(events: list[dict[str, Any]], step: int, began: float) -> dict[str, float]:
    """Returns where the time of earlier starts went, for a start at `began` that resumes at `step`.

    What was done after that step, and the time until `began`, is lost, unless the run was complete
    and is started again at leisure.
    """
    kept = [event for event in events if event['step'] is not None and event['step'] <= step]
    if not kept:
        return {}
    seconds = dict(kept[-1]['seconds'])
    if kept[-1]['event'] != 'complete':
        lost = began - kept[-1]['time']  # below 0 if the clocks of two hosts differ
        seconds[LOST] = seconds.get(LOST, 0.0) + max(0.0, lost)
    return seconds


def outline(experiment: Experiment) -> str:
    """Describes what a run is about to do, and what the rules over parameters matched."""
    config, model, length = experiment.config, experiment.model.config, experiment.length
    source = experiment.train.source
    tokens = f'{model.sequence}, ' if isinstance(model, ViTConfig) else ''
    tested = ', '.join(f'{len(one.source):,} {name}' for name, one in experiment.evals.items())
    images = counted(length.batch_size, 'image')
    if length.batch_size > length.num_images:
        images += f' (--config.batch_size), more than the {length.num_images:,} training images'
    lines = [
        f'data    {records.text_of(config.data)}: {len(source):,} training and '
        f'{tested} images, {counted(len(source.class_names), "class")}',
        f'length  {counted(length.total_steps, "step")} of {images}, {length.epochs:,.1f} epochs; '
        f'warm-up {counted(length.steps(config.schedule.warmup), "step")}',
        f'model   {parameter_count(model):,} parameters, {tokens}'
        f'{multiply_adds(model) / 1e6:,.1f} M multiply-adds an image',
        f'compute {experiment.compute}',
    ]
    if config.objective is not None and isinstance(model, ViTConfig):
        lines.append(f'predict {config.objective.outline(math.prod(model.grid))}')
    if experiment.probes is not None:
        lines += probing.episodes_outline(experiment.probes, source.class_names)
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
        loss = f'loss {numbers["loss"]:.4f}'  # masked patches may have no accuracy
        text = f'accuracy {numbers["accuracy"]:.2%}' if 'accuracy' in numbers else loss
        precision = numbers.get('mean_average_precision')
        text += '' if precision is None else f', mean average precision {precision:.2%}'
        parts.append(f'{name} {text}')
    return '; '.join(parts)


# Operations per second of one device, as jax counts devices and names their kinds: bfloat16, dense,
# accumulated in float32, from the makers' data sheets. A device of TPU v2, v3, 7x is half a chip;
# a part of a GPU (MIG) is another device.
_PEAKS = {
    'TPU v2': 23e12,
    'TPU v3': 61.5e12,
    'TPU v4': 275e12,
    'TPU v5( lite|e)': 197e12,
    'TPU v5p?': 459e12,
    'TPU v6( lite|e)': 918e12,
    'TPU7x': 1153.5e12,
    'NVIDIA A10': 125e12,
    r'NVIDIA A100(-\S+| \d+GB PCIe)': 312e12,
    'NVIDIA L4': 121e12,
    'NVIDIA L40S': 362e12,
    'NVIDIA GeForce RTX 3090': 71e12,
    'NVIDIA GeForce RTX 4090': 165e12,
    'NVIDIA H100 PCIe': 756e12,
    'NVIDIA H100 NVL': 835e12,
    'NVIDIA H100 80GB HBM3': 989e12,
    'NVIDIA H200': 989e12,
    'NVIDIA B200': 2250e12,
}


def peak_of(device_kind: str) -> float | None:
    """Returns the operations per second of a device by `jax.Device.device_kind`, if known."""
    return next((peak for kind, peak in _PEAKS.items() if re.fullmatch(kind, device_kind)), None)


def images_at_peak(experiment: Experiment) -> float | None:
    """Returns the images per second that the devices would train at their peak; None if unknown.

    The backward pass costs two forward ones, a multiply-add is two operations (table 6).
    """
    mesh = experiment.mesh
    peak = peak_of(mesh.devices.flat[0].device_kind)
    if peak is None:
        return None
    last_block = experiment.compute.last_block
    assert last_block != 'auto'  # `resolve_compute` chose
    return mesh.size * peak / (6 * multiply_adds(experiment.model.config, last_block=last_block))
