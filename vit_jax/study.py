"""Trains the runs of a study and tabulates their results: python -m vit_jax.study --config=FILE.

    python -m vit_jax.study --config=configs/studies/pooling.py:small --workdir=DIR

A study has one or more grids of experiments, repeated with several seeds. Its incomplete runs train
one after the other, as vit_jax.train would, each in its own work directory,
DIR/GRID/VALUE-VALUE-seedN. Runs that differ only in values, such as the seed or the learning rate,
share their compiled programs.
Run the same command again to resume a study that was stopped. Several hosts that share DIR can run
it at the same time; each trains runs that no other host is training. If a run fails, the study
reports it and continues with the next one. DIR/results.md has means and standard deviations over
seeds, DIR/results.csv the results of each run, DIR/results.png the plot.
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from vit_jax import train
from vit_jax.base import UserError, make_folder, plural, records, require, write_bytes
from vit_jax.base.storage import is_remote
from vit_jax.cli import app, output
from vit_jax.distributed.processes import EXIT_INTERRUPTED, REQUEUE
from vit_jax.experiment import workdirs
from vit_jax.studies import planned_runs, results
from vit_jax.studies.config import Study
from vit_jax.studies.planned_runs import PlannedRun
from vit_jax.studies.results import Measures, Row
from vit_jax.training.metrics import find_metric, resolve_metrics

_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
# Without a traceback; the imports take seconds.
# SIGINT is blocked from the start of the process until this code runs, which prints no traceback.
_EXIT_ON_SIGINT = (
    'import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); '
    'signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])'
)


def main(arguments: argparse.Namespace) -> int:
    """Trains or lists the incomplete runs. Returns 0 if the selected runs are complete."""
    study = arguments.config
    require(
        not is_remote(arguments.workdir),
        f'--workdir={arguments.workdir}: expected a local directory',
    )
    folder = pathlib.Path(arguments.workdir).absolute()
    runs = planned_runs.plan_runs(study)
    records.require_pattern(arguments.only)
    chosen = [run for run in runs if re.search(arguments.only, run.name)]
    require(bool(chosen), f'--only={arguments.only}: matches no run; example: {runs[0].name}')
    make_folder(folder)
    planned_runs.require_same_values(folder, runs)
    if arguments.list:
        _print_commands(folder, study, chosen)
        return 0
    code = _train(folder, study, chosen)
    _write_results(folder, study, runs)
    incomplete = [run.name for run in chosen if not planned_runs.is_complete(folder, run)]
    if incomplete:
        print(f'incomplete: {", ".join(incomplete)}')
        return code or 1
    return code


def _print_commands(folder: pathlib.Path, study: Study, chosen: Sequence[PlannedRun]) -> None:
    """Prints the command of each run that can start, and for others the reason as a comment."""
    for run in chosen:
        if not planned_runs.is_complete(folder, run):
            try:
                command = 'python', '-m', 'vit_jax.train', *_prepare(folder, study, run)
                print(shlex.join(command))
            except UserError as error:
                print(f'# {run.name}: {error}')


def _prepare(folder: pathlib.Path, study: Study, run: PlannedRun) -> list[str]:
    """Writes the configuration of a run, and returns the arguments of vit_jax.train."""
    config = planned_runs.write_run_config(folder, study, run)
    return [f'--config={config}', f'--workdir={folder / run.name}']


def _train(folder: pathlib.Path, study: Study, chosen: Sequence[PlannedRun]) -> int:
    """Trains the incomplete runs. Returns 0, or the exit code after a signal."""
    incomplete = [run for run in chosen if not planned_runs.is_complete(folder, run)]
    if incomplete:
        print(planned_runs.describe_programs(incomplete), flush=True)
    else:
        print(f'nothing to train: {plural(len(chosen), "run")} complete', flush=True)
    with _Trainer.open() as trainer:
        for number, run in enumerate(chosen, 1):
            if trainer.received:
                break
            if planned_runs.is_complete(folder, run):
                continue
            label = f'{number} of {len(chosen)}  {run.name}'
            holder = workdirs.find_holder(folder / run.name)
            if holder:
                print(f'{label}  is being trained by {holder}', flush=True)
                continue
            try:
                words = _prepare(folder, study, run)
            except UserError as error:
                print(f'{label}  cannot start: {error}', flush=True)
                continue
            print(f'{label}  starts', flush=True)
            code = trainer.train([*words, '--distributed=off'])
            if code and not trainer.received:
                if code in (EXIT_INTERRUPTED, REQUEUE):
                    return code
                print(f'{label}  failed with exit code {code}', flush=True)
            _warn_of_missing_measures(study, [run], results.read_measures(folder, study, [run]))
        if trainer.received:
            return EXIT_INTERRUPTED if trainer.received[0] == signal.SIGINT else REQUEUE
    return 0


class _Trainer:
    """Trains runs one after the other in a child process, so that they share compiled programs.

    Signals are forwarded to the child, which saves and exits. The child has its own session, so
    Ctrl-C reaches it only once. If the child exits, the next run starts a new one.
    """

    def __init__(self) -> None:
        self.received: list[int] = []  # signals
        self._process: subprocess.Popen[str] | None = None
        self._codes: TextIO | None = None  # receives the exit codes of complete runs

    @classmethod
    @contextlib.contextmanager
    def open(cls) -> Iterator['_Trainer']:
        """Yields a trainer; ends its process on exit."""
        trainer = cls()
        previous_handlers = {}
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                previous_handlers[number] = signal.signal(number, trainer._forward)
        try:
            yield trainer
        finally:
            trainer._end()
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)

    def train(self, words: list[str]) -> int:
        """Trains with these arguments of vit_jax.train. Returns the exit code."""
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._start()
        if self.received:  # perhaps before there was a process
            return EXIT_INTERRUPTED
        assert self._process is not None and self._process.stdin is not None and self._codes
        with contextlib.suppress(BrokenPipeError):  # the process has exited
            print(json.dumps(words), file=self._process.stdin, flush=True)
        code = self._codes.readline()
        return int(code) if code else self._process.wait()

    def _start(self) -> None:
        reading, writing = os.pipe()
        code = f'{_EXIT_ON_SIGINT}; from vit_jax import study; study.train_in_turn({writing})'
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self._process = subprocess.Popen(
                [sys.executable, '-c', code],
                stdin=subprocess.PIPE,
                pass_fds=[writing],
                start_new_session=True,
                text=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        os.close(writing)
        self._codes = open(reading)

    def _end(self) -> None:
        if self._process is not None and self._codes is not None:
            self._process.communicate()
            self._codes.close()

    def _forward(self, number: int, _: object) -> None:
        self.received.append(number)
        if self._process is not None:
            self._process.send_signal(number)


def train_in_turn(descriptor: int) -> None:
    """Trains with each list of arguments on stdin; writes the exit codes to the descriptor."""
    output.set_up()
    started = None  # the first run includes the imports in its time
    for line in sys.stdin:
        code = app.run_with_job(train.main, train.make_parser(), json.loads(line), started)
        wakeup = signal.set_wakeup_fd(-1)
        if wakeup >= 0:  # -1: the arguments were wrong
            os.close(wakeup)
        for number in _SIGNALS:  # between two runs, there is nothing to save
            signal.signal(number, signal.SIG_DFL)
        gc.collect()  # so that the arrays of this run leave the devices
        print(end='', flush=True)
        os.write(descriptor, f'{code}\n'.encode())
        started = time.time()


def _write_results(folder: pathlib.Path, study: Study, runs: Sequence[PlannedRun]) -> None:
    """Prints the tables of the complete runs; writes results.md, results.csv and results.png."""
    measured = results.read_measures(folder, study, runs)
    if not measured:
        return
    _warn_of_missing_measures(study, runs, measured)
    rows = results.make_rows(study, runs, measured)
    tables = results.format_tables(study, rows)
    print(f'\n{tables}')
    contents = {
        'md': tables.encode(),
        'csv': results.format_csv(runs, measured).encode(),
        'png': _picture(study, rows),
    }
    for ending, content in contents.items():
        if content is not None:
            path = folder / f'results.{ending}'
            write_bytes(path, content)
            print(f'written: {path}')


def _warn_of_missing_measures(
    study: Study, runs: Sequence[PlannedRun], measured: Mapping[str, Measures]
) -> None:
    for run in runs:
        missing = {*study.grids[run.grid].measures} - {*measured.get(run.name, {})}
        if missing and run.name in measured:
            names = ', '.join(sorted(missing))
            print(f'warning: {run.name}: {workdirs.METRICS} has no {names} at the last/best step')


def _picture(study: Study, rows: Sequence[Row]) -> bytes | None:
    """Returns the plot as PNG; None if there is nothing to draw, or no matplotlib."""
    draw = study.draw
    if draw is None:
        return None
    lines, places, joined = results.make_lines(study, draw, rows)
    if not lines:
        return None
    if importlib.util.find_spec('matplotlib') is None:
        print("results.png needs matplotlib: pip install 'vit_jax[plots]'")
        return None
    from vit_jax.figures import curves, style  # matplotlib is an extra

    y_label = draw.y
    if any(line.deviation.any() for line in lines):
        y_label += ', mean ± standard deviation over seeds'
    metric = find_metric(draw.y, resolve_metrics(study.base.metrics))
    return style.png(
        curves.draw_means,
        study.title,
        [curves.MeanCurve(**line._asdict()) for line in lines],
        x=draw.x if places else 'training FLOPs',
        y=y_label,
        ticks={place: name for name, place in places.items()},
        unit='' if places else 'FLOP',
        joined=joined,
        percent=metric.unit == 'percent',
        logarithmic=draw.logarithmic,
    )


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of the program."""
    parser = app.new_parser('study', __doc__)
    app.add_config_flags(parser, Study)
    parser.add_argument(
        '--list',
        action='store_true',
        help='print the training command of each incomplete run, for a cluster; trains nothing',
    )
    parser.add_argument(
        '--only',
        default='',
        metavar='REGEX',
        help='select runs (GRID/VALUE-VALUE-seedN) by a regular expression; default: all',
    )
    return parser


if __name__ == '__main__':
    app.run(main, make_parser(), on_devices=False)
