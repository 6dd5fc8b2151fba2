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
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from vit_jax.base import Path, atomic_write, counted, read_json_lines, records, usable
from vit_jax.distributed.processes import Job
from vit_jax.evaluation import probing
from vit_jax.experiment import workdirs
from vit_jax.experiment.build import Experiment
from vit_jax.experiment.goodput import Ledger, Lines
from vit_jax.models import ViTConfig, multiply_adds, parameter_count
from vit_jax.training.losses import StepMetrics

# A spike is a loss so many standard deviations, and this share, above the mean of the steps before.
_WINDOW, _SIGMAS, _SHARE, _LEAST = 128, 6.0, 0.2, 32


# Operations per second of one device, as jax counts devices and names their kinds: bfloat16, dense,
# accumulated in float32, from the makers' data sheets. A device of TPU v2, v3, 7x is half a chip.
_PEAKS = {
    'TPU v2': 23e12,
    'TPU v3': 61.5e12,
    'TPU v4': 275e12,
    'TPU v5 lite': 197e12,
    'TPU v5e': 197e12,
    'TPU v5': 459e12,  # v5p
    'TPU v5p': 459e12,
    'TPU v6 lite': 918e12,
    'TPU v6e': 918e12,
    'TPU7x': 1153.5e12,
    'NVIDIA A10': 125e12,
    'NVIDIA A100': 312e12,
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
    """Returns the operations per second of a kind of device (`jax.Device.device_kind`), if known.

    A name in the table may be followed by the memory, as in `NVIDIA A100-SXM4-80GB`. A part of a
    device (MIG) is another device.
    """
    if ' MIG ' in device_kind:
        return None
    for name, peak in _PEAKS.items():
        rest = device_kind.removeprefix(name)
        if rest != device_kind and not rest[:1].isalnum() and (rest[:1] != ' ' or 'GB' in rest):
            return peak
    return None


def images_at_peak(experiment: Experiment) -> float | None:
    """Returns the images per second that the devices would train at their peak; None if unknown.

    The backward pass costs two forward ones, a multiply-add is two operations (table 6).
    """
    mesh = experiment.mesh
    peak = peak_of(mesh.devices.flat[0].device_kind)
    if peak is None:
        return None
    last_block = experiment.resolved.compute.last_block
    assert last_block != 'auto'  # `resolve_compute` chose
    return mesh.size * peak / (6 * multiply_adds(experiment.model.config, last_block=last_block))


def console_of(job: Job) -> Console:
    """Returns the screen, on which only process 0 prints."""
    quiet = job.index != 0
    return Console(quiet=quiet, highlight=False, markup=False, emoji=False, soft_wrap=True)


class Reporter:
    """Collects the metrics of steps and reports them every `log_every_steps`.

    On a terminal a progress bar follows every step; elsewhere each report is a line.
    """

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        *,
        steps: range,
        progress: dict[str, Any],
        ledger: Ledger,
        console: Console,
        images_at_peak: float | None = None,
    ):
        """Opens the files of a run in `folder`.

        Args:
          experiment: What is trained.
          folder: The work directory.
          steps: The steps of this start.
          progress: The reporter's `progress` when the checkpoint was saved, {} at the beginning.
          ledger: The ledger of this start.
          console: Where lines are printed; files are written unless it is quiet.
          images_at_peak: Images per second that the devices would train at their peak, if known.
        """
        config, length = experiment.config, experiment.length
        self.console, self._steps = console, steps
        self._ledger, self._began = ledger, time.monotonic()
        self._log_every_steps = length.log_interval(config.log_every_steps)
        self._batch_size, self._images_at_peak = config.batch_size, images_at_peak
        self._recent = [StepMetrics(**metrics) for metrics in progress.get('recent', [])]
        self._losses = collections.deque[float](progress.get('losses', []), maxlen=_WINDOW)
        self._busy_before = self._busy_seconds()
        self.skipped = progress.get('skipped', 0)
        self.evaluated: list[str] = []  # evaluations with a line at the first step
        path, self._board = folder / workdirs.METRICS, None
        if not console.quiet:
            with usable(path):
                evaluations = [*experiment.evals, 'fewshot']
                # A complete run is evaluated again.
                lines = _cut(path, steps.start, rewritten=[] if steps else evaluations)
            now = [line['kind'] for line in lines if line['step'] == steps.start]
            self.evaluated = [kind for kind in now if kind in evaluations]
            if config.tensorboard:
                from tensorboardX import SummaryWriter

                with usable(board := folder / 'tensorboard'):
                    self._board = SummaryWriter(str(board), purge_step=steps.start)
        self._lines = Lines(None if console.quiet else path)
        self._bar = Progress(
            TextColumn('{task.completed}/{task.total}'),
            BarColumn(bar_width=30),
            TextColumn('{task.fields[numbers]}'),
            TextColumn('left'),
            TimeRemainingColumn(),
            console=console,
            disable=console.quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task(
            '', total=steps.stop, completed=steps.start, numbers='starting'
        )

    def __enter__(self) -> 'Reporter':
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        self._lines.close()
        if self._board is not None:
            with usable('tensorboard'):
                self._board.close()

    def flush(self) -> None:
        """Returns when all lines of the file are where they are kept, on a bucket too."""
        self._lines.flush()

    @property
    def progress(self) -> dict[str, Any]:
        """What the reports of a run that resumes here start with, as JSON values."""
        recent = [metrics._asdict() for metrics in self._recent]
        return {'recent': recent, 'losses': list(self._losses), 'skipped': self.skipped}

    def step(self, step: int, metrics: StepMetrics) -> bool:
        """Takes the metrics of one step, in order. Returns whether they were reported."""
        self._recent.append(metrics)
        self.skipped += self._batch_size - round(metrics.num_examples)
        self._look_for_spikes(step, metrics)
        is_due = step % self._log_every_steps == 0 or step == self._steps.stop
        if is_due:
            self._report(step)
        self._bar.update(self._task, completed=step)
        return is_due

    def _look_for_spikes(self, step: int, metrics: StepMetrics) -> None:
        """Reports an update that was skipped, and a loss far above the steps before."""
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
        self._bar.update(self._task, numbers=text)
        if not self.console.is_terminal:
            pace = (time.monotonic() - self._began) / max(1, step - self._steps.start)
            left = duration(pace * (self._steps.stop - step))
            self.console.print(f'step {step}/{self._steps.stop}  {text}  left {left}')

    def _busy_seconds(self) -> float:
        seconds = self._ledger.clock.seconds
        return sum(seconds.get(name, 0.0) for name in ('data wait', 'step'))

    def _write(self, kind: str, step: int, numbers: dict[str, Any]) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
        line = {'kind': kind, 'step': step, 'time': now, 'run': self._ledger.run}
        line['seconds'] = round(time.monotonic() - self._began, 3)
        self._lines.write(line | {name: _as_json(value) for name, value in numbers.items()})
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(f'{kind}/{name}', float(value), step)


def _cut(path: Path, step: int, *, rewritten: list[str]) -> list[dict[str, Any]]:
    """Cuts a metrics file down to the lines that a run from this step does not write again."""
    before = (line for line in read_json_lines(path, kind=str, step=int) if line['step'] <= step)
    lines = [line for line in before if line['step'] < step or line['kind'] not in rewritten]
    with atomic_write(path) as partial:
        partial.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return lines


def _as_json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
        f'compute {experiment.resolved}',
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
