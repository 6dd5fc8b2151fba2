"""Collects the measures of a study's runs, and formats them as tables and as lines of a plot."""

import csv
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.base import Float, Path
from vit_jax.checkpoints.transfer import with_patch_size
from vit_jax.evaluation.statistics import sample_deviation
from vit_jax.models import count_multiply_adds
from vit_jax.studies import history
from vit_jax.studies.config import COMPUTE, Grid, PlotConfig, Study
from vit_jax.studies.planned_runs import PlannedRun, find_best_step, read_last_step
from vit_jax.training.metrics import Metric, find_metric, resolve_metrics

Measures = dict[str, float]  # by KIND/NAME


class Row(NamedTuple):
    """The measures of one experiment, or of a mean over experiments."""

    grid: str
    values: dict[str, str]  # AXIS: VALUE
    num_runs: int  # number of planned runs
    numbers: dict[str, dict[int, float]]  # by measure and seed
    published: float | None  # published value of the first measure
    mean: str | None = None  # name of a mean over values of the last axis; None: one experiment


class Line(NamedTuple):
    """Means and standard deviations along x."""

    name: str
    x: Float[np.ndarray, 'n']
    mean: Float[np.ndarray, 'n']
    deviation: Float[np.ndarray, 'n']


def read_measures(folder: Path, study: Study, runs: Sequence[PlannedRun]) -> dict[str, Measures]:
    """Reads the measures of the complete runs by run name, at the last step or the best step."""
    measured = {}
    for run in runs:
        grid, last = study.grids[run.grid], read_last_step(folder, run)
        if last is None:
            continue
        trained = history.read_history(folder / run.name, run.name)
        step = find_best_step(trained, grid.best) if grid.best else last
        by_step = {measure: trained.numbers.get(measure, {}) for measure in grid.measures}
        measured[run.name] = {m: xs[step] for m, xs in by_step.items() if step in xs}
        if COMPUTE in grid.measures:
            measured[run.name][COMPUTE] = _count_operations(folder, run.root)
    return measured


def _count_operations(folder: Path, run: PlannedRun) -> float:
    """Returns the floating-point operations of a training run, as in table 6 of the ViT paper.

    Counts 6 per multiply-add of the forward pass, image and step, because a backward pass costs two
    forward passes. Returns NaN if the model comes from a checkpoint, or if steps differ, as with
    random patch sizes (`TrainConfig.step_variants`).
    """
    steps = read_last_step(folder, run)
    config = run.config
    kind, *others = config.step_variants
    if config.model is None or steps is None or others:
        return float('nan')
    model = with_patch_size(config.model, kind.patch_size)
    per_image = count_multiply_adds(model, regularization=config.regularization)
    return 6.0 * per_image * config.batch_size * steps


def make_rows(
    study: Study, runs: Sequence[PlannedRun], measured: Mapping[str, Measures]
) -> list[Row]:
    """Returns a row per experiment, and per mean of a grid."""
    rows: list[Row] = []
    for name, grid in study.grids.items():
        experiments = dict[tuple[str, ...], list[PlannedRun]]()
        for run in runs:
            if run.grid == name:
                experiments.setdefault(tuple(run.values.values()), []).append(run)
        grid_rows = []
        for values, seeds in experiments.items():
            by_seed = {run.seed: measured.get(run.name, {}) for run in seeds}
            numbers = {
                measure: {seed: each[measure] for seed, each in by_seed.items() if measure in each}
                for measure in grid.measures
            }
            published = grid.published.get('-'.join(values))
            grid_rows.append(Row(name, seeds[0].values, len(seeds), numbers, published))
        rows += [*grid_rows, *_make_mean_rows(grid, grid_rows)]
    return rows


def _make_mean_rows(grid: Grid, rows: Sequence[Row]) -> list[Row]:
    """Averages rows over values of the last axis, for the seeds that all these rows have."""
    means = []
    for mean, averaged in grid.means.items():
        others = dict.fromkeys(tuple(row.values.values())[:-1] for row in rows)
        for first in others:
            group = [r for r in rows if tuple(r.values.values()) in {(*first, v) for v in averaged}]
            numbers = {m: _by_seed([row.numbers[m] for row in group]) for m in grid.measures}
            published = [row.published for row in group if row.published is not None]
            average = float(np.mean(published)) if len(published) == len(group) else None
            values = dict(zip(rows[0].values, (*first, mean), strict=True))
            means.append(Row(rows[0].grid, values, rows[0].num_runs, numbers, average, mean))
    return means


def _by_seed(numbers: Sequence[Mapping[int, float]]) -> dict[int, float]:
    seeds = set.intersection(*({*each} for each in numbers))
    return {seed: float(np.mean([each[seed] for each in numbers])) for seed in sorted(seeds)}


def text_of(measure: str, value: float, own: Sequence[Metric] = ()) -> str:
    """Formats a measure for tables; `own` are metrics of the user."""
    if measure == COMPUTE:
        large = value >= 1e15  # table 6 of the ViT paper is in exaFLOPs
        return f'{value / 1e18:.4g} exaFLOP' if large else f'{value / 1e12:.4g} TFLOP'
    return find_metric(measure, own).format(value)


def format_tables(study: Study, rows: Sequence[Row]) -> str:
    """Formats the title and a table per grid in Markdown."""
    own = resolve_metrics(study.base.metrics)
    texts = [f'# {study.title}', '']
    for name, grid in study.grids.items():
        grid_rows = [row for row in rows if row.grid == name]
        if grid.measures:
            texts += [f'## {name}', '', *format_table(grid_rows, grid.measures, own), '']
    return '\n'.join(texts)


def format_table(
    rows: Sequence[Row], measures: Sequence[str], own: Sequence[Metric] = ()
) -> list[str]:
    """Returns the lines of a Markdown table: axis values, mean and deviation of each measure.

    `own` are metrics of the user.
    """
    has_published = ['published'] if any(row.published is not None for row in rows) else []
    columns = [*rows[0].values, *measures, *has_published, 'seeds']
    lines = [columns, ['---'] * len(columns)]
    for row in rows:
        cells = [*row.values.values()]
        for measure in measures:
            numbers = [*row.numbers[measure].values()]
            cell = text_of(measure, float(np.mean(numbers)), own) if numbers else ''
            deviation = sample_deviation(numbers) if measure != COMPUTE else None
            cell += '' if deviation is None else f' ± {text_of(measure, deviation, own)}'
            cells.append(cell)
        if has_published:
            cells.append('' if row.published is None else text_of(measures[0], row.published, own))
        lines.append([*cells, f'{max(map(len, row.numbers.values()))} of {row.num_runs}'])
    return [f'| {" | ".join(cells)} |' for cells in lines]


def format_csv(runs: Sequence[PlannedRun], measured: Mapping[str, Measures]) -> str:
    """Formats CSV with a line per complete run: axis values, seed, measures."""
    complete = [run for run in runs if run.name in measured]
    axes = dict.fromkeys(axis for run in complete for axis in run.values)
    measures = dict.fromkeys(measure for run in complete for measure in measured[run.name])
    file = io.StringIO()
    names = ['grid', *axes, 'seed', *measures]
    writer = csv.DictWriter(file, names, restval='', lineterminator='\n')
    writer.writeheader()
    for run in complete:
        writer.writerow({'grid': run.grid, 'seed': run.seed} | run.values | measured[run.name])
    return file.getvalue()


def make_lines(
    study: Study, drawing: PlotConfig, rows: Sequence[Row]
) -> tuple[list[Line], dict[str, float], bool]:
    """Returns the lines of a plot, its x positions by axis value, and whether to join the points.

    There are no x positions by value if x is `compute`. Points are not joined if the values of the
    axis are not numbers.
    """
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        has_x = COMPUTE in row.numbers if drawing.x == COMPUTE else drawing.x in row.values
        if row.mean == drawing.mean and has_x and row.numbers.get(drawing.y):
            grouped.setdefault(_line_name(study, drawing, row), []).append(row)
    drawn = list(itertools.chain(*grouped.values()))
    places, joined = dict[str, float](), True
    if drawing.x != COMPUTE:
        places, joined = _axis_positions(row.values[drawing.x] for row in drawn)
    lines = []
    for name, group in grouped.items():
        x = [
            places[row.values[drawing.x]] if places else np.mean([*row.numbers[COMPUTE].values()])
            for row in group
        ]
        y = [[*row.numbers[drawing.y].values()] for row in group]
        columns = (
            x,
            [np.mean(numbers) for numbers in y],
            [sample_deviation(numbers) or 0.0 for numbers in y],
        )
        lines.append(Line(name, *(np.array(column, float) for column in columns)))
    return lines, places, joined


def _line_name(study: Study, drawing: PlotConfig, row: Row) -> str:
    """Returns the name of the plotted line to which a row belongs."""
    axes = [*row.values][:-1] if row.mean else [*row.values]  # means are over the last axis
    others = [f'{axis} {row.values[axis]}' for axis in axes if axis != drawing.x]
    several = len(study.grids) > 1
    if drawing.x == COMPUTE:
        others = [] if several else others[:1]
    return ', '.join([row.grid, *others] if several or not others else others)


def _axis_positions(names: Iterable[str]) -> tuple[dict[str, float], bool]:
    """Maps axis values to x positions, and returns whether these are the values as numbers."""
    names = dict.fromkeys(names)
    try:
        return {name: float(name.removesuffix('%')) for name in names}, True
    except ValueError:
        return {name: float(place) for place, name in enumerate(names)}, False
