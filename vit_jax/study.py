"""Trains the runs of a study and draws what they show: python -m vit_jax.study --config=FILE.

    python -m vit_jax.study --config=configs/studies/pooling.py:small --workdir=DIR

A study is experiments that differ in the values of some axes. Those that are not complete are
trained, one after the other, each in a work directory of its own, DIR/GRID/VALUE-VALUE-seedN, by
python -m vit_jax.train; what that prints is in output.txt there. The same command goes on where an
earlier one was stopped. A run that fails is named, and the others go on. DIR/results.md and .csv
have means and deviations over the seeds, DIR/results.png the picture.
"""

import argparse
import contextlib
import ctypes
import importlib.util
import os
import pathlib
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO, NamedTuple

from rich.console import Console
from rich.markup import escape

from vit_jax.base import UserError, atomic_write, counted, records, require, usable
from vit_jax.base.storage import is_remote
from vit_jax.cli import app
from vit_jax.distributed.processes import INTERRUPTED, REQUEUE
from vit_jax.experiment import reporter, workdirs
from vit_jax.studies import history, planned_runs, results
from vit_jax.studies.config import Study
from vit_jax.studies.planned_runs import PlannedRun

OUTPUT, RESULTS = 'output.txt', 'results'
# Popen's preexec_fn would do the same, but jax warns about forks.
_TRAIN = 'from vit_jax import study; study.train_as_child()'
_PR_SET_PDEATHSIG = 1
_FREED_SECONDS = 30.0  # until a training whose study was killed has saved, and is gone


class Outcome(NamedTuple):
    """What came of a run: the exit code of its training, and what is said of it."""

    code: int
    said: str


def main(arguments: argparse.Namespace) -> int:
    """Trains what is left, or lists it; 1 where a run failed, 130 or 75 where it was stopped."""
    study, folder = arguments.config, pathlib.Path(arguments.workdir).absolute()
    remote = is_remote(arguments.workdir)
    require(not remote, f'--workdir={arguments.workdir}: expected a folder on a disk')
    with usable(folder):
        is_file = folder.exists() and not folder.is_dir()
        require(not is_file, f'--workdir={arguments.workdir}: expected a folder, but it is a file')
    runs = planned_runs.planned(study)
    chosen = [run for run in runs if re.search(arguments.only, run.name)]
    if not chosen:
        names = ', '.join(run.name for run in runs[:3])
        raise UserError(f'--only={arguments.only}: none of {len(runs)} runs, such as {names}')
    with contextlib.ExitStack() as stack:
        with usable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if not arguments.list:
                stack.enter_context(workdirs.locked(folder))
            planned_runs.agree(folder, runs)
        if arguments.list:
            _list(folder, study, chosen)
            return 0
        began, count = time.monotonic(), counted(len(chosen), 'run')
        print(f'{study.title}: {count}, {_complete(folder, chosen):,} complete', flush=True)
        failed, stopped = _train(folder, study, chosen)
        spent = reporter.duration(time.monotonic() - began)
        print(f'{_complete(folder, chosen):,} of {count} complete, after {spent}', flush=True)
        done, lost = results.reached(folder, study, runs)
        _tell(folder, study, results.rows(study, runs, done))
    for sentence in lost:
        print(f'warning: {sentence}', flush=True)
    if failed:
        print(f'failed: {", ".join(failed)}', flush=True)
    return stopped or int(bool(failed or lost))


def _complete(folder: pathlib.Path, runs: Sequence[PlannedRun]) -> int:
    return sum(planned_runs.is_complete(folder, run) for run in runs)


def _train(
    folder: pathlib.Path, study: Study, chosen: Sequence[PlannedRun]
) -> tuple[list[str], int]:
    """Trains those that are not complete; the names of those that failed, and 0 or why it ended."""
    failed: list[str] = []
    for number, run in enumerate(chosen, 1):
        if planned_runs.is_complete(folder, run):
            continue
        label = f'{number} of {len(chosen)}  {run.name}'
        if holder := _holder(folder / run.name):
            print(f'{label}  is being trained by {holder}: left to it', flush=True)
            continue
        print(f'{label}  starts', flush=True)
        try:
            outcome = _trained(folder, study, run, label=label)
        except UserError as error:
            outcome = Outcome(1, f'cannot start: {error}')
        print(f'{label}  {outcome.said}', flush=True)
        if outcome.code in (INTERRUPTED, REQUEUE):
            return failed, outcome.code
        failed += [run.name] if outcome.code else []
    return failed, 0


def _holder(workdir: pathlib.Path) -> str | None:
    """Who else trains there, for longer than a training needs to end that lost its study."""
    until = time.monotonic() + _FREED_SECONDS
    while (holder := workdirs.holder(workdir)) and time.monotonic() < until:
        time.sleep(0.5)
    return holder


def _list(folder: pathlib.Path, study: Study, chosen: Sequence[PlannedRun]) -> None:
    """Prints the command of each run that can start; of the others, what they wait for."""
    for run in chosen:
        if planned_runs.is_complete(folder, run):
            continue
        if run.after is not None and not planned_runs.is_complete(folder, run.after):
            print(f'# {run.name} starts from {run.after.name}: list it again after that')
            continue
        with usable(folder):
            command = ['python', '-m', 'vit_jax.train', *_flags(folder, study, run)]
            print(shlex.join(command))


def _flags(folder: pathlib.Path, study: Study, run: PlannedRun) -> list[str]:
    """The flags of the program that trains a run. Writes its configuration."""
    config = planned_runs.write_run_config(folder, study, run)
    return [f'--config={config}', f'--workdir={folder / run.name}']


def _trained(folder: pathlib.Path, study: Study, run: PlannedRun, *, label: str) -> Outcome:
    """Trains a run in a process of its own."""
    with usable(folder):
        words, output = _flags(folder, study, run), folder / run.name / OUTPUT
        with output.open('ab') as file:
            began = file.tell()
            command = [sys.executable, '-c', _TRAIN, str(os.getpid()), *words]
            code = _finished(command, file, folder / run.name, label)
    if code in (INTERRUPTED, REQUEUE):
        return Outcome(code, 'stopped; the same command goes on')
    if code < 0:
        name = signal.Signals(-code).name
        return Outcome(code, f'killed by {name}, as by a system that has no memory left ({output})')
    if code:
        told = output.read_bytes()[began:].decode(errors='replace').splitlines()
        errors = [line for line in told if line.startswith('error: ')] or told or ['no word']
        reason = errors[-1].removeprefix('error: ').replace('--config.', '--config.base.')
        return Outcome(code, f'failed with code {code}: {reason} ({output})')
    found, _ = results.reached(folder, study, [run])
    measured = found.get(run.name, {})
    numbers = ', '.join(f'{name} {results.written(name, x)}' for name, x in measured.items())
    seconds = sum(history.read(folder / run.name, run.name).seconds.values())
    return Outcome(0, f'{numbers}  in {reporter.duration(seconds)}')


def train_as_child() -> None:
    """Trains, as `vit_jax.train` does, until the process with the id sys.argv[1] is gone.

    On Linux the kernel sends SIGTERM then, so that the training of a killed study saves and exits.
    """
    parent = int(sys.argv.pop(1))
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            return
    runpy.run_module('vit_jax.train', run_name='__main__', alter_sys=True)


def _finished(command: Sequence[str], output: IO[bytes], workdir: pathlib.Path, label: str) -> int:
    """Waits for a process, and hands on what asks this one to stop: the training saves, and ends.

    On a terminal its name and last step are shown meanwhile.
    """
    asked: list[int] = []
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C reaches it once, by us
            )
        )

        def hand_on(number: int, _: object) -> None:
            asked.append(number)
            process.send_signal(number)

        for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
            stack.callback(signal.signal, number, signal.signal(number, hand_on))
        status = stack.enter_context(Console(stderr=True).status(escape(label)))
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=1)
                break
            status.update(escape(f'{label}  {_progress(workdir)}'))
    if asked and code:
        return INTERRUPTED if asked[0] == signal.SIGINT else REQUEUE
    return code


def _progress(workdir: pathlib.Path) -> str:
    """The newest numbers of a training."""
    with contextlib.suppress(UserError):
        lines = history.read(workdir, '').of_kind('train')
        if lines:
            return f'step {lines[-1]["step"]:,}, loss {lines[-1].get("loss", 0):.3f}'
    return 'starting'


def _tell(folder: pathlib.Path, study: Study, found: Sequence[results.Row]) -> None:
    """Prints and writes the tables, and draws the picture, of what was found by now."""
    if not any(numbers for row in found for numbers in row.numbers.values()):
        return
    rows = [*found, *results.means(study, found)]
    text = results.text(study, rows)
    print(f'\n{text}')
    texts = {'md': text, 'csv': results.comma_separated(rows)}
    with usable(folder):
        for ending, content in texts.items():
            with atomic_write(folder / f'{RESULTS}.{ending}') as partial:
                # Excel reads UTF-8 only with the mark.
                encoding = 'utf-8-sig' if ending == 'csv' else 'utf-8'
                partial.write_text(content, encoding=encoding)
        if png := _picture(study, rows):
            with atomic_write(folder / f'{RESULTS}.png') as partial:
                partial.write_bytes(png)
    written = [*texts, *(['png'] if png else [])]
    print('written: ' + ', '.join(str(folder / f'{RESULTS}.{ending}') for ending in written))


def _picture(study: Study, rows: Sequence[results.Row]) -> bytes | None:
    """The picture; None, said, where there is nothing to draw, or nothing to draw with."""
    if study.draw is None:
        return None
    draw, (lines, places, joined) = study.draw, results.lines(study, study.draw, rows)
    if not lines:
        print(f'no picture yet: nothing has {draw.y} over {draw.x}')
        return None
    if importlib.util.find_spec('matplotlib') is None:
        print("no picture: it needs pip install 'vit_jax[plots]'")
        return None
    from vit_jax.figures import curves, style  # matplotlib is an extra

    seeds = {len(row.numbers.get(draw.y, ())) for row in rows} - {0}  # of an experiment
    fewest, most = min(seeds), max(seeds)
    of = f'{most}' if fewest == most else f'{fewest} to {most}'
    spread = f', mean ± deviation of {of} seeds' if most > 1 else ''
    computed = places is None
    several = len({line.name for line in lines}) > 1 or len(study.grids) == 1
    figure = curves.measured(
        study.title if several else f'{study.title}: {lines[0].name}',
        [curves.Measured(**line._asdict()) for line in lines],
        x='floating-point operations of training' if computed else draw.x,
        y=draw.y + spread,
        ticks={place: name for name, place in (places or {}).items()},
        unit='FLOP' if computed else '',
        joined=joined,
        percent=results.is_share(draw.y),
        logarithmic=draw.logarithmic,
    )
    return style.png(figure)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the program."""
    parser = app.new_parser('study', __doc__)
    app.add_config(parser, Study)
    text = 'print the command of each run that is left, for the queue of a cluster, and train none'
    parser.add_argument('--list', action='store_true', help=text)
    text = 'only runs in whose names, GRID/VALUE-VALUE-seedN, this regular expression is found'
    parser.add_argument('--only', type=_pattern, default='', metavar='REGEX', help=text)
    return parser


def _pattern(text: str) -> str:
    try:
        records.require_pattern(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


if __name__ == '__main__':
    app.run(main, make_parser(), on_devices=False)
