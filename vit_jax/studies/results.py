"""What the runs of a study say together: numbers by experiment, tables, the lines of a picture."""

import csv
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.base import Float, Path, UserError
from vit_jax.experiment import history
from vit_jax.models import multiply_adds
from vit_jax.studies.config import COMPUTE, Drawing, Study
from vit_jax.studies.planned_runs import PlannedRun, best_step, last_step

Measures = dict[str, float]  # by name: `test/accuracy`


class Row(NamedTuple):
    """What the runs of one experiment reached, those of all seeds together."""

    grid: str
    values: dict[str, str]
    planned: int  # runs
    numbers: dict[str, dict[int, float]]  # of each measure, by the seed of the runs that have it
    published: float | None  # of the first measure
    mean: str | None = None  # where it is one over several experiments: of this name


class Line(NamedTuple):
    """Means and standard deviations along x, and what they are called."""

    name: str
    x: Float[np.ndarray, 'n']
    mean: Float[np.ndarray, 'n']
    deviation: Float[np.ndarray, 'n']


class Lines(NamedTuple):
    """The lines of a picture, and the names of places on its x axis; None: it has numbers."""

    lines: list[Line]
    places: dict[str, float] | None
    joined: bool  # something lies between the places


def rows(study: Study, runs: Sequence[PlannedRun], done: Mapping[str, Measures]) -> list[Row]:
    """What was reached by now: a row for each experiment, of its runs that are `done`, by name."""
    found: list[Row] = []
    for name, grid in study.grids.items():
        own = [run for run in runs if run.grid == name]
        for values in {tuple(run.values.values()): run.values for run in own}.values():
            same = [run for run in own if run.values == values]
            by_seed = {run.seed: done.get(run.name, {}) for run in same}
            numbers = {
                measure: {seed: each[measure] for seed, each in by_seed.items() if measure in each}
                for measure in grid.measures
            }
            published = grid.published.get('-'.join(values.values()))
            found.append(Row(name, values, len(same), numbers, published))
    return found


def reached(
    folder: Path, study: Study, runs: Sequence[PlannedRun]
) -> tuple[dict[str, Measures], list[str]]:
    """The measures of each run that is complete, by its name; a sentence for each that lacks some.

    They are of its last step, or of the best one where the grid has `best`.
    """
    found, lost = dict[str, Measures](), list[str]()
    for run in runs:
        if (last := last_step(folder, run)) is None:
            continue
        found[run.name] = _measures(folder, study, run, last)
        if absent := [n for n in study.grids[run.grid].measures if n not in found[run.name]]:
            path = folder / run.name / 'metrics.jsonl'
            lost.append(f'{run.name}: no {", ".join(absent)} of step {last:,} in {path}')
    return found, lost


def _measures(folder: Path, study: Study, run: PlannedRun, last: int) -> Measures:
    """Those of the grid that a run has, whose last step is `last`."""
    grid = study.grids[run.grid]
    try:
        told = history.read(folder / run.name, run.name)
    except UserError:  # it was taken away
        return {}
    step = last if grid.best is None else best_step(told, grid.best)
    found = Measures()
    for measure in grid.measures:
        kind, _, number = measure.partition('/')
        at = [line for line in told.of_kind(kind) if line['step'] == step and number in line]
        if measure == COMPUTE:
            found[measure] = _operations(folder, run.first)
        elif at:
            found[measure] = float(at[-1][number])
    return found


def _operations(folder: Path, run: PlannedRun) -> float:
    """The floating-point operations of a training: six for each multiply-add of the forward pass,
    image and step (table 6: the backward pass costs two forward ones).
    """
    steps = last_step(folder, run)
    if run.config.model is None or steps is None:  # that of a checkpoint
        return float('nan')
    return 6.0 * multiply_adds(run.config.model) * run.config.batch_size * steps


def means(study: Study, found: Sequence[Row]) -> list[Row]:
    """The means that grids ask for, over those of some values of the last axis that have numbers.

    Where others have none, what stands in the place of the value says how many it is of.
    """
    averaged = []
    for name, grid in study.grids.items():
        own = [row for row in found if row.grid == name]
        *_, last = [*own[0].values] if grid.means else ['']
        others = {tuple([*r.values.values()][:-1]): r.values for r in own}.values()
        for values, (mean, of) in itertools.product(others, grid.means.items()):
            group = [r for r in own if r.values in [values | {last: value} for value in of]]
            there = [row for row in group if any(row.numbers.values())] or group
            some = '' if len(there) == len(of) else f' ({len(there)} of {len(of)})'
            numbers = {m: _by_seed([row.numbers[m] for row in there]) for m in grid.measures}
            told = [row.published for row in there if row.published is not None]
            published = float(np.mean(told)) if len(told) == len(there) else None
            place = values | {last: mean + some}
            averaged.append(Row(name, place, there[0].planned, numbers, published, mean))
    return averaged


def _by_seed(numbers: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """The mean for each seed that all have."""
    seeds = [seed for seed in numbers[0] if all(seed in each for each in numbers)]
    return {seed: float(np.mean([each[seed] for each in numbers])) for seed in seeds}


def is_share(measure: str) -> bool:
    """Is it written in percent?"""
    return 'accuracy' in measure or 'precision' in measure


def written(measure: str, value: float) -> str:
    """A number as tables have it."""
    if measure == COMPUTE:
        large = value >= 1e15  # exaFLOPs are the unit of the ViT paper's table 6
        return f'{value / 1e18:.4g} exaFLOP' if large else f'{value / 1e12:.4g} TFLOP'
    return f'{value:.2%}' if is_share(measure) else f'{value:.4g}'


def _mean(measure: str, numbers: Sequence[float]) -> str:
    if not numbers:
        return ''
    if wrong := int(np.sum(~np.isfinite(numbers))):
        return f'{wrong} of {len(numbers)} not finite'
    varies = len(numbers) > 1 and measure != COMPUTE
    deviation = f' ± {written(measure, _deviation(numbers))}' if varies else ''
    return written(measure, float(np.mean(numbers))) + deviation


def _deviation(numbers: Sequence[float]) -> float:
    """The sample standard deviation; 0 of one."""
    return float(np.std(numbers, ddof=1)) if len(numbers) > 1 else 0.0


def text(study: Study, rows: Sequence[Row]) -> str:
    """The title, and a table for each grid."""
    texts = [f'# {study.title}', '']
    for name, grid in study.grids.items():
        if grid.measures:
            own = [row for row in rows if row.grid == name]
            begun = any(numbers for row in own for numbers in row.numbers.values())
            told = table(own, grid.measures) if begun else ['No run of it is complete.']
            texts += [f'## {name}', '', *told, '']
    return '\n'.join(texts)


def table(rows: Sequence[Row], measures: Sequence[str]) -> list[str]:
    """A table in Markdown: the values of the axes, mean and deviation of each measure."""
    told = any(row.published is not None for row in rows)
    columns = [*rows[0].values, *measures, *(['published'] if told else []), 'seeds']
    lines = [columns, ['---'] * len(columns)]
    for row in rows:
        cells = [_mean(name, [*row.numbers[name].values()]) for name in measures]
        done = max(len(row.numbers[name]) for name in measures)
        seeds = f'{done}' if done == row.planned else f'{done} of {row.planned}'
        paper = '' if row.published is None else written(measures[0], row.published)
        lines.append([*row.values.values(), *cells, *([paper] if told else []), seeds])
    return [f'| {" | ".join(cells)} |' for cells in lines]


def comma_separated(rows: Sequence[Row]) -> str:
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


def lines(study: Study, drawing: Drawing, rows: Sequence[Row]) -> Lines:
    """What `drawing` says, of all rows with those of means; no line where none has the numbers."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        known = row.numbers.get(COMPUTE) if drawing.x == COMPUTE else drawing.x in row.values
        if row.mean == drawing.mean and known and row.numbers.get(drawing.y):
            grouped.setdefault(_label(study, drawing, row), []).append(row)
    places, joined = None, True
    if drawing.x != COMPUTE:
        names = dict.fromkeys(row.values[drawing.x] for own in grouped.values() for row in own)
        numbers = _as_numbers(names)
        places = numbers or {name: float(place) for place, name in enumerate(names)}
        joined = numbers is not None

    def x(row: Row) -> float:
        if places is None:
            return float(np.mean([*row.numbers[COMPUTE].values()]))
        return places[row.values[drawing.x]]

    drawn = []
    for label, own in grouped.items():
        found = [[*row.numbers[drawing.y].values()] for row in own]
        columns = map(x, own), map(np.mean, found), map(_deviation, found)
        drawn.append(Line(label, *(np.array([*column], float) for column in columns)))
    return Lines(drawn, places, joined)


def _label(study: Study, drawing: Drawing, row: Row) -> str:
    """Which line of the picture a row is of."""
    others = [f'{axis} {value}' for axis, value in row.values.items() if axis != drawing.x]
    if row.mean is not None:  # the last axis is averaged over
        others = others[:-1]
    several = len(study.grids) > 1
    if drawing.x == COMPUTE:
        others = [] if several else others[:1]
    return ', '.join([row.grid, *others] if several or not others else others)


def _as_numbers(names: Iterable[str]) -> dict[str, float] | None:
    """The values of an axis as numbers; None where they are not."""
    try:
        return {name: float(name.removesuffix('%')) for name in names}
    except ValueError:
        return None
