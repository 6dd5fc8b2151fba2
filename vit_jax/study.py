"""Trains the runs of a study and draws what they show: python -m vit_jax.study --config=FILE.

    python -m vit_jax.study --config=configs/studies/FILE.py:small --config.base.data=DATA \
        --workdir=DIR

A study is experiments that differ in the values of some axes. Those that are not complete are
trained, one after the other, each in a work directory of its own, DIR/GRID/VALUE-VALUE-seedN, by
python -m vit_jax.train; what that prints is in output.txt there. The same command goes on where an
earlier one was stopped. A run that fails is named, and the others go on. DIR/results.md and .csv
have means and deviations over the seeds, DIR/results.png the picture.
"""

import argparse
import contextlib
import csv
import importlib.util
import io
import pathlib
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any

import numpy as np
from rich.console import Console

from vit_jax.base import UserError, atomic_write, counted, require, usable
from vit_jax.base.storage import is_remote
from vit_jax.command_line import app
from vit_jax.config import Drawing, Study
from vit_jax.parallel.processes import INTERRUPTED, REQUEUE
from vit_jax.runs import history, reporting, studies
from vit_jax.runs.studies import PlannedRun, Row

OUTPUT, RESULTS = 'output.txt', 'results'


def main(arguments: argparse.Namespace) -> int:
    """Trains what is left, or lists it; 1 where a run failed, 130 or 75 where it was stopped."""
    study, folder = arguments.config, pathlib.Path(arguments.workdir).absolute()
    remote = is_remote(arguments.workdir)
    require(not remote, f'--workdir={arguments.workdir}: expected a folder on a disk')
    runs = studies.planned(study)
    chosen = [run for run in runs if re.search(arguments.only, run.name)]
    if not chosen:
        names = ', '.join(run.name for run in runs[:3])
        raise UserError(f'--only={arguments.only}: none of {len(runs)} runs, such as {names}')
    with usable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        studies.agree(folder, runs)
    left = [run for run in chosen if not studies.is_complete(folder, run)]
    if arguments.list:
        _list(folder, study, left)
        return 0
    done = len(chosen) - len(left)
    print(f'{study.title}: {counted(len(chosen), "run")}, {done:,} complete', flush=True)
    failed, stopped = [], 0
    for number, run in enumerate(left, done + 1):
        print(f'{number} of {len(chosen)}  {run.name}', end='  ', flush=True)
        try:
            code = _trained(folder, study, run, arguments.compiled)
        except UserError as error:
            code = 1
            print(f'cannot start: {error}', flush=True)
        if code in (INTERRUPTED, REQUEUE):
            stopped = code
            print('stopped; the same command goes on')
            break
        failed += [run.name] if code else []
    _tell(folder, study, runs)
    if failed:
        print(f'failed: {", ".join(failed)}', flush=True)
    return stopped or int(bool(failed))


def _list(folder: pathlib.Path, study: Study, left: Sequence[PlannedRun]) -> None:
    """Prints the command of each run that can start; of the others, what they wait for."""
    for run in left:
        if run.after is not None and not studies.is_complete(folder, run.after):
            print(f'# {run.name} starts from {run.after.name}: list it again after that')
            continue
        with usable(folder):
            print(shlex.join(['python', *_command(folder, study, run)]))


def _command(folder: pathlib.Path, study: Study, run: PlannedRun) -> list[str]:
    """What trains a run, behind the name of the interpreter. Writes its configuration."""
    config = studies.write_config(folder, study, run)
    return ['-m', 'vit_jax.train', f'--config={config}', f'--workdir={folder / run.name}']


def _trained(folder: pathlib.Path, study: Study, run: PlannedRun, compiled: str | None) -> int:
    """Trains a run in a process of its own, and says what came of it; its exit code."""
    with usable(folder):
        words = _command(folder, study, run) + ([f'--compiled={compiled}'] if compiled else [])
        output = folder / run.name / OUTPUT
        with output.open('ab') as file:
            began = file.tell()
            code = _finished([sys.executable, *words], file, folder / run.name)
    told = output.read_bytes()[began:].decode(errors='replace').splitlines()
    if code in (INTERRUPTED, REQUEUE):
        return code
    if code:
        errors = [line for line in told if line.startswith('error: ')] or told or ['no word']
        reason = errors[-1].removeprefix('error: ')
        print(f'failed with code {code}: {reason} ({output})', flush=True)
        return code
    ledger = history.read(folder / run.name, run.name)
    found = studies.reached(folder, study.grids[run.grid], run)
    numbers = ', '.join(f'{name} {_number(name, value)}' for name, value in found.items())
    print(f'{numbers}  in {reporting.duration(sum(ledger.seconds.values()))}', flush=True)
    return 0


def _finished(command: Sequence[str], output: IO[bytes], workdir: pathlib.Path) -> int:
    """Waits for a process, and hands on what asks this one to stop: the training saves, and ends.

    On a terminal the last step is shown meanwhile.
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
        status = stack.enter_context(Console(stderr=True).status('starting'))
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=1)
                break
            status.update(_progress(workdir))
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


def _tell(folder: pathlib.Path, study: Study, runs: Sequence[PlannedRun]) -> None:
    """Prints and writes the tables, and draws the picture, of what is complete by now."""
    rows = studies.rows(folder, study, runs)
    if not any(numbers for row in rows for numbers in row.numbers.values()):
        return
    averaged = studies.means(study, rows)
    texts = [f'# {study.title}', '']
    for name, grid in study.grids.items():
        own = [row for row in rows + averaged if row.grid == name]
        if grid.measures:
            texts += [f'## {name}', '', *_table(own, grid.measures), '']
    text = '\n'.join(texts)
    written = [f'{RESULTS}.md', f'{RESULTS}.csv']
    with usable(folder):
        with atomic_write(folder / f'{RESULTS}.md') as partial:
            partial.write_text(text, encoding='utf-8')
        with atomic_write(folder / f'{RESULTS}.csv') as partial:
            partial.write_text(_csv(rows + averaged), encoding='utf-8')
        if study.draw is not None and importlib.util.find_spec('matplotlib') is not None:
            from vit_jax.figures import style  # matplotlib is an extra

            png = style.png(_picture(study, study.draw, rows, averaged))
            with atomic_write(folder / f'{RESULTS}.png') as partial:
                partial.write_bytes(png)
            written.append(f'{RESULTS}.png')
    print(f'\n{text}\nwritten: {", ".join(str(folder / name) for name in written)}')


def _table(rows: Sequence[Row], measures: Sequence[str]) -> list[str]:
    """A table in Markdown: the values of the axes, mean and deviation of each measure."""
    told = any(row.published is not None for row in rows)
    columns = [*rows[0].values, *measures, *(['published'] if told else []), 'seeds']
    lines = [columns, ['---'] * len(columns)]
    for row in rows:
        cells = [_mean(name, [*row.numbers[name].values()]) for name in measures]
        done = max(len(row.numbers[name]) for name in measures)
        seeds = f'{done}' if done == row.planned else f'{done} of {row.planned}'
        paper = '' if row.published is None else _number(measures[0], row.published)
        lines.append([*row.values.values(), *cells, *([paper] if told else []), seeds])
    return [f'| {" | ".join(cells)} |' for cells in lines]


def _mean(measure: str, numbers: Sequence[float]) -> str:
    if not numbers:
        return ''
    deviation = f' ± {_number(measure, _deviation(numbers))}' if len(numbers) > 1 else ''
    return _number(measure, float(np.mean(numbers))) + deviation


def _deviation(numbers: Sequence[float]) -> float:
    """Of the runs that these are a sample of; 0 of one."""
    return float(np.std(numbers, ddof=1)) if len(numbers) > 1 else 0.0


def _number(measure: str, value: float) -> str:
    return f'{value:.2%}' if 'accuracy' in measure or 'precision' in measure else f'{value:.4g}'


def _csv(rows: Sequence[Row]) -> str:
    """A line for each experiment and measure; a deviation is empty where there is one run."""
    axes = list(dict.fromkeys(axis for row in rows for axis in row.values))
    names = ['grid', *axes, 'measure', 'mean', 'deviation', 'runs', 'planned', 'published']
    file = io.StringIO()
    writer = csv.DictWriter(file, names, restval='', lineterminator='\n')
    writer.writeheader()
    for row in rows:
        for place, (measure, numbers) in enumerate(row.numbers.items()):
            if not numbers:
                continue
            found = [*numbers.values()]
            line = {'grid': row.grid, **row.values, 'measure': measure, 'planned': row.planned}
            line |= {'mean': f'{np.mean(found):.6g}', 'runs': len(found)}
            if len(found) > 1:
                line['deviation'] = f'{_deviation(found):.6g}'
            if place == 0 and row.published is not None:
                line['published'] = row.published
            writer.writerow(line)
    return file.getvalue()


def _picture(
    study: Study, drawing: Drawing, rows: Sequence[Row], averaged: Sequence[Row] = ()
) -> Any:
    """The measure of all grids that have it, in lines as `Drawing` says."""
    from vit_jax.figures import curves

    by_compute, several = drawing.x == studies.COMPUTE, len(study.grids) > 1
    if drawing.mean is not None:
        rows = [r for r in averaged if [*r.values.values()][-1].split(' ')[0] == drawing.mean]
    lines: dict[str, list[Row]] = {}
    for row in rows:
        has_x = row.numbers.get(studies.COMPUTE) if by_compute else drawing.x in row.values
        if not row.numbers.get(drawing.y) or not has_x:
            continue
        others = [value for axis, value in row.values.items() if axis != drawing.x]
        if by_compute:
            others = [] if several else others[:1]
        label = ', '.join([row.grid, *others] if several else others)
        lines.setdefault(label or row.grid, []).append(row)
    every = (row for own in lines.values() for row in own)
    names = list(dict.fromkeys(row.values.get(drawing.x, '') for row in every))
    numbers = _as_numbers(names)
    places = numbers or dict(zip(names, map(float, range(len(names))), strict=True))

    def x(row: Row) -> float:
        if not by_compute:
            return places[row.values[drawing.x]]
        return float(np.mean([*row.numbers[studies.COMPUTE].values()]))

    drawn = []
    for label, own in lines.items():
        found = [[*row.numbers[drawing.y].values()] for row in own]
        means, deviations = map(np.mean, found), map(_deviation, found)
        arrays = (np.array([*values], float) for values in (map(x, own), means, deviations))
        drawn.append(curves.Measured(label, *arrays))
    return curves.measured(
        study.title,
        drawn,
        x='exaFLOPs of training' if by_compute else drawing.x,
        y=drawing.y,
        ticks=None if by_compute else {place: name for name, place in places.items()},
        joined=by_compute or numbers is not None,
        percent='accuracy' in drawing.y,
        logarithmic=drawing.logarithmic,
    )


def _as_numbers(names: Sequence[str]) -> dict[str, float] | None:
    """The values of an axis as numbers; None where they are not."""
    try:
        return {name: float(name.removesuffix('%')) for name in names}
    except ValueError:
        return None


def _parser() -> argparse.ArgumentParser:
    parser = app.new_parser('study', __doc__)
    app.add_config(parser, Study)
    text = 'print the command of each run that is left, for the queue of a cluster, and train none'
    parser.add_argument('--list', action='store_true', help=text)
    text = 'runs whose names match this regular expression alone'
    parser.add_argument('--only', type=_pattern, default='', metavar='REGEX', help=text)
    return parser


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f'{text!r} is no regular expression: {error}') from error
    return text


if __name__ == '__main__':
    app.run(main, _parser())
