"""Collects the measures of a study's runs, and formats them as tables and as lines of a plot."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.base import Float, Path
from vit_jax.checkpoints.transfer import with_patch_size
from vit_jax.evaluation.statistics import sample_deviation
from vit_jax.studies import history
from vit_jax.studies.config import COMPUTE, Grid, PlotConfig, Study
from vit_jax.studies.planned_runs import PlannedRun, find_best_step, read_last_step
from vit_jax.tasks.making import make_task
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
        grid = study.grids[run.grid]
        last_step = read_last_step(folder, run)
        if last_step is None:
            continue
        recorded = history.read_history(folder / run.name, run.name)
        step = find_best_step(recorded, grid.best) if grid.best else last_step
        measures = {}
        for measure in grid.measures:
            by_step = recorded.numbers.get(measure, {})
            if step in by_step:
                measures[measure] = by_step[step]
        if COMPUTE in grid.measures:
            measures[COMPUTE] = _count_operations(folder, run.root)
        measured[run.name] = measures
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
    task = make_task(config, num_classes=0)
    per_image = task.count_multiply_adds(config, model, config.regularization)
    return 6.0 * per_image * config.batch_size * steps


def make_rows(
    study: Study, runs: Sequence[PlannedRun], measured: Mapping[str, Measures]
) -> list[Row]:
    """Returns a row per experiment, and per mean of a grid."""
    rows: list[Row] = []
    for name, grid in study.grids.items():
        experiments: dict[tuple[str, ...], list[PlannedRun]] = {}
        for run in runs:
            if run.grid == name:
                experiments.setdefault(tuple(run.values.values()), []).append(run)
        grid_rows = []
        for values, runs_of_experiment in experiments.items():
            grid_rows.append(
                Row(
                    grid=name,
                    values=runs_of_experiment[0].values,
                    num_runs=len(runs_of_experiment),
                    numbers={
                        measure: _measured_by_seed(runs_of_experiment, measured, measure)
                        for measure in grid.measures
                    },
                    published=grid.published.get('-'.join(values)),
                )
            )
        rows += [*grid_rows, *_make_mean_rows(grid, grid_rows)]
    return rows


def _measured_by_seed(
    runs: Sequence[PlannedRun], measured: Mapping[str, Measures], measure: str
) -> dict[int, float]:
    """Returns a measure of the runs that have it, by seed."""
    by_seed = {}
    for run in runs:
        measures = measured.get(run.name, {})
        if measure in measures:
            by_seed[run.seed] = measures[measure]
    return by_seed


def _make_mean_rows(grid: Grid, rows: Sequence[Row]) -> list[Row]:
    """Averages rows over values of the last axis, for the seeds that all these rows have."""
    mean_rows = []
    values_of_other_axes = dict.fromkeys(tuple(row.values.values())[:-1] for row in rows)
    for mean, averaged in grid.means.items():
        for other_values in values_of_other_axes:
            combinations = {(*other_values, value) for value in averaged}
            group = [row for row in rows if tuple(row.values.values()) in combinations]
            published = [row.published for row in group if row.published is not None]
            mean_rows.append(
                Row(
                    grid=rows[0].grid,
                    values=dict(zip(rows[0].values, (*other_values, mean), strict=True)),
                    num_runs=rows[0].num_runs,
                    numbers={
                        measure: _average_by_seed([row.numbers[measure] for row in group])
                        for measure in grid.measures
                    },
                    published=float(np.mean(published)) if len(published) == len(group) else None,
                    mean=mean,
                )
            )
    return mean_rows


def _average_by_seed(numbers: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Averages the numbers of several rows for each seed that all of them have."""
    seeds = set.intersection(*({*by_seed} for by_seed in numbers))
    return {seed: float(np.mean([by_seed[seed] for by_seed in numbers])) for seed in sorted(seeds)}


def text_of(measure: str, value: float, own: Sequence[Metric] = ()) -> str:
    """Formats a measure for tables; `own` are metrics of the user."""
    if measure == COMPUTE:
        is_large = value >= 1e15  # table 6 of the ViT paper is in exaFLOPs
        return f'{value / 1e18:.4g} exaFLOP' if is_large else f'{value / 1e12:.4g} TFLOP'
    return find_metric(measure, own).format(value)


def format_tables(study: Study, rows: Sequence[Row]) -> str:
    """Formats the title and a table per grid in Markdown."""
    lines = [f'# {study.title}', '']
    for name, grid in study.grids.items():
        grid_rows = [row for row in rows if row.grid == name]
        own = resolve_metrics(grid.changes.get('metrics', study.base.metrics))
        if grid.measures:
            lines += [f'## {name}', '', *format_table(grid_rows, grid.measures, own), '']
    return '\n'.join(lines)


def format_table(
    rows: Sequence[Row], measures: Sequence[str], own: Sequence[Metric] = ()
) -> list[str]:
    """Returns the lines of a Markdown table: axis values, mean and deviation of each measure.

    `own` are metrics of the user.
    """
    has_published = any(row.published is not None for row in rows)
    columns = [*rows[0].values, *measures, *(['published'] if has_published else []), 'seeds']
    lines = [columns, ['---'] * len(columns)]
    for row in rows:
        cells = [*row.values.values()]
        for measure in measures:
            numbers = [*row.numbers[measure].values()]
            cell = text_of(measure, float(np.mean(numbers)), own) if numbers else ''
            deviation = sample_deviation(numbers) if measure != COMPUTE else None
            if deviation is not None:
                cell += f' ± {text_of(measure, deviation, own)}'
            cells.append(cell)
        if has_published:
            cells.append('' if row.published is None else text_of(measures[0], row.published, own))
        num_seeds = max(len(by_seed) for by_seed in row.numbers.values())
        lines.append([*cells, f'{num_seeds} of {row.num_runs}'])
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


class PlotLines(NamedTuple):
    """The lines of a plot."""

    lines: list[Line]
    positions: dict[str, float]  # x positions by axis value; empty if x is `compute`
    are_joined: bool  # False if the values of the axis are not numbers: the points are not joined


def make_lines(study: Study, drawing: PlotConfig, rows: Sequence[Row]) -> PlotLines:
    """Makes the lines of a plot, one for each grid and combination of the other axes."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        has_x = COMPUTE in row.numbers if drawing.x == COMPUTE else drawing.x in row.values
        if row.mean == drawing.mean and has_x and row.numbers.get(drawing.y):
            grouped.setdefault(_line_name(study, drawing, row), []).append(row)
    positions: dict[str, float] = {}
    are_joined = True
    if drawing.x != COMPUTE:
        positions, are_joined = _axis_positions(
            row.values[drawing.x] for group in grouped.values() for row in group
        )

    def x_of(row: Row) -> float:
        if drawing.x == COMPUTE:
            return float(np.mean([*row.numbers[COMPUTE].values()]))
        return positions[row.values[drawing.x]]

    lines = []
    for name, group in grouped.items():
        numbers = [[*row.numbers[drawing.y].values()] for row in group]
        lines.append(
            Line(
                name=name,
                x=np.array([x_of(row) for row in group], float),
                mean=np.array([np.mean(of_row) for of_row in numbers], float),
                deviation=np.array([sample_deviation(of_row) or 0.0 for of_row in numbers], float),
            )
        )
    return PlotLines(lines=lines, positions=positions, are_joined=are_joined)


def _line_name(study: Study, drawing: PlotConfig, row: Row) -> str:
    """Returns the name of the plotted line to which a row belongs."""
    axes = [*row.values][:-1] if row.mean else [*row.values]  # means are over the last axis
    others = [f'{axis} {row.values[axis]}' for axis in axes if axis != drawing.x]
    has_several_grids = len(study.grids) > 1
    if drawing.x == COMPUTE:
        others = [] if has_several_grids else others[:1]
    return ', '.join([row.grid, *others] if has_several_grids or not others else others)


def _axis_positions(names: Iterable[str]) -> tuple[dict[str, float], bool]:
    """Maps axis values to x positions, and returns whether these are the values as numbers."""
    names = dict.fromkeys(names)
    try:
        return {name: float(name.removesuffix('%')) for name in names}, True
    except ValueError:
        return {name: float(position) for position, name in enumerate(names)}, False
