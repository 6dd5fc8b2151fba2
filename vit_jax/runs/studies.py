"""The runs of a study: which there are, which are done, and what their numbers say together.

A study's directory holds `study.json`, the configuration of every run, and GRID/VALUE-VALUE-seedN
for each, the work directory of its training.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.base import Path, UserError, records, write_json
from vit_jax.checkpoints import digests
from vit_jax.checkpoints.store import FOLDER
from vit_jax.config import Grid, Study, TrainConfig, differing
from vit_jax.models import multiply_adds
from vit_jax.runs import goodput, history, workdirs

STUDY = 'study.json'
COMPUTE = 'compute'  # the measure: exaFLOPs of the training that all began with


class PlannedRun(NamedTuple):
    """One experiment of a study, with one seed."""

    name: str  # GRID/VALUE-VALUE-seedN, its folder in that of the study
    grid: str
    values: dict[str, str]  # of the axes, by their names
    seed: int
    config: TrainConfig  # but for the checkpoint that it starts from
    after: 'PlannedRun | None'  # the run whose checkpoint that is

    @property
    def first(self) -> 'PlannedRun':
        """The run that this one goes back to: itself, where it starts from none."""
        return self if self.after is None else self.after.first


class Row(NamedTuple):
    """What the runs of one experiment reached, those of all seeds together."""

    grid: str
    values: dict[str, str]
    planned: int  # runs
    numbers: dict[str, dict[int, float]]  # of each measure, by the seed of the runs that have it
    published: float | None  # of the first measure


def planned(study: Study) -> list[PlannedRun]:
    """All runs, those of the first seed first, each behind the one that it starts from.

    Raises UserError for an axis that names a field that does not exist, and for two runs whose
    folders would have one name.
    """
    runs: list[PlannedRun] = []
    for seed in study.seeds:
        of_grid: dict[str, list[PlannedRun]] = {}
        for name, grid in study.grids.items():
            starts = [None] if grid.start_from is None else of_grid[grid.start_from]
            of_grid[name] = [
                run for start in starts for run in _of_grid(study, name, grid, start, seed)
            ]
            runs += of_grid[name]
    names: dict[str, PlannedRun] = {}
    for run in runs:
        other = names.setdefault(run.name.casefold(), run)  # as disks are that tell no cases apart
        if other is not run:
            both = f'{_in_words(other.values)}; {_in_words(run.values)}'
            raise UserError(f'two runs would be named {run.name}: {both}')
    return runs


def _of_grid(
    study: Study, name: str, grid: Grid, start: PlannedRun | None, seed: int
) -> Iterable[PlannedRun]:
    before = {} if start is None else start.values
    if twice := [axis for axis in grid.axes if axis in before]:
        raise UserError(f'grids.{name}.axes: {start and start.grid} has an axis {twice[0]!r} too')
    fresh: dict[str, Any] = {} if start is None else {'model': None}  # that of the checkpoint
    base = records.with_values(study.base, fresh | grid.changes, where=f'grids.{name}.changes')
    for chosen in itertools.product(*grid.axes.values()):
        values, config = dict(zip(grid.axes, chosen, strict=True)), base
        for axis, value in values.items():
            where = f'grids.{name}.axes.{axis}.{value}'
            config = records.with_values(config, grid.axes[axis][value], where=where)
        config.seed = seed
        values = before | values
        folder = f'{name}/{"-".join([*values.values(), f"seed{seed}"])}'
        yield PlannedRun(folder, name, values, seed, config, start)


def _in_words(values: Mapping[str, str]) -> str:
    return ', '.join(f'{axis}={value}' for axis, value in values.items())


def agree(folder: Path, runs: Sequence[PlannedRun]) -> None:
    """Writes down which runs there are.

    Raises UserError where the directory is that of a study with other runs, or with other values
    of what they learn; further runs may be added.
    """
    path = folder / STUDY
    found = {run.name: records.to_dict(run.config) for run in runs}
    if path.exists():
        try:
            kept = json.loads(path.read_bytes())['runs']
            gone = [name for name in kept if name not in found]
            both = {name: workdirs.upgraded(kept[name]) for name in kept if name in found}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f'{path}: cannot be read as a list of runs: {error}') from error
        advice = 'take another --workdir'
        if gone:
            raise UserError(f'{folder} is the directory of a study with a run {gone[0]}: {advice}')
        changed = {name: differing(values, found[name]) for name, values in both.items()}
        if lines := [f'{name}: {line}' for name, each in changed.items() for line in each]:
            text = f'{folder} is the directory of a study with other values: {lines[0]}'
            more = f' and {len(lines) - 1:,} more' if len(lines) > 1 else ''
            raise UserError(f'{text}{more}; {advice}')
    write_json(path, {'runs': found})


def is_complete(folder: Path, run: PlannedRun) -> bool:
    """Has the run come to its end?"""
    lines = goodput.read(folder / run.name / workdirs.LEDGER)
    return bool(lines) and lines[-1].get('event') == 'complete'


def write_config(folder: Path, study: Study, run: PlannedRun) -> Path:
    """Writes the configuration of a run into its work directory, for `train --config=`.

    Raises UserError where the run that it starts from is not complete.
    """
    values = records.to_dict(run.config)
    if run.after is not None:
        records.require(is_complete(folder, run.after), f'{run.after.name} is not complete')
        best = study.grids[run.after.grid].best
        values['start_from'] = str(_checkpoint(folder / run.after.name, best))
    path = folder / run.name / workdirs.CONFIG
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, values)
    return path


def _checkpoint(folder: Path, best: str | None) -> Path:
    """The newest checkpoint of a work directory, or the one of the step that was best."""
    steps = digests.steps(folder / FOLDER)
    if best is None or not steps:
        return folder
    step = _best_step(history.read(folder, folder.name), best)
    if step not in steps:
        kept = 'checkpoint_every_steps=eval_every_steps and a higher keep_checkpoints keep it'
        raise UserError(f'{folder}: step {step} was best, but has no checkpoint ({kept})')
    return folder / FOLDER / str(step)


def _best_step(run: history.History, best: str) -> int | None:
    kind, _, number = best.partition('/')
    lines = [line for line in run.of_kind(kind) if number in line]
    return max(lines, key=lambda line: line[number])['step'] if lines else None


def rows(folder: Path, study: Study, runs: Sequence[PlannedRun]) -> list[Row]:
    """What was reached by now: a row for each experiment, of its runs that are complete."""
    found: list[Row] = []
    for name, grid in study.grids.items():
        own = [run for run in runs if run.grid == name]
        for values in {tuple(run.values.values()): run.values for run in own}.values():
            same = [run for run in own if run.values == values]
            done = {r.seed: reached(folder, grid, r) for r in same if is_complete(folder, r)}
            numbers = {
                measure: {seed: each[measure] for seed, each in done.items() if measure in each}
                for measure in grid.measures
            }
            published = grid.published.get('-'.join(values.values()))
            found.append(Row(name, values, len(same), numbers, published))
    return found


def reached(folder: Path, grid: Grid, run: PlannedRun) -> dict[str, float]:
    """The measures of a run, of its last step or its best one."""
    told, found = history.read(folder / run.name, run.name), {}
    step = None if grid.best is None else _best_step(told, grid.best)
    for measure in grid.measures:
        if measure == COMPUTE:
            found[measure] = _exaflops(folder, run.first)
            continue
        kind, _, number = measure.partition('/')
        lines = [line for line in told.of_kind(kind) if number in line]
        lines = [line for line in lines if grid.best is None or line['step'] == step]
        if lines:
            found[measure] = float(lines[-1][number])
    return found


def _exaflops(folder: Path, run: PlannedRun) -> float:
    """What a training computed: six operations for each multiply-add of the forward pass, image
    and step (table 6: the backward pass costs two forward ones).
    """
    if run.config.model is None:  # that of a checkpoint
        return float('nan')
    steps = max(line['step'] for line in history.read(folder / run.name, run.name).lines)
    return 6 * multiply_adds(run.config.model) * run.config.batch_size * steps / 1e18


def means(study: Study, found: Sequence[Row]) -> list[Row]:
    """The means that grids ask for, over those of some values of the last axis that have numbers.

    Where others have none, the name of the mean says how many it is of.
    """
    averaged = []
    for name, grid in study.grids.items():
        own = [row for row in found if row.grid == name]
        *_, last = [*own[0].values] if grid.means else ['']
        others = {tuple([*r.values.values()][:-1]): r.values for r in own}.values()
        for values, (label, of) in itertools.product(others, grid.means.items()):
            group = [r for r in own if r.values in [values | {last: value} for value in of]]
            there = [row for row in group if any(row.numbers.values())] or group
            if len(there) < len(of):
                label = f'{label} ({len(there)} of {len(of)})'
            numbers = {name: _means(row.numbers[name] for row in there) for name in grid.measures}
            told = [row.published for row in there if row.published is not None]
            mean = float(np.mean(told)) if len(told) == len(there) else None
            averaged.append(Row(name, values | {last: label}, there[0].planned, numbers, mean))
    return averaged


def _means(numbers: Iterable[dict[int, float]]) -> dict[int, float]:
    """By seed, of those that all have."""
    each = [*numbers]
    seeds = [seed for seed in each[0] if all(seed in one for one in each)]
    return {seed: float(np.mean([one[seed] for one in each])) for seed in seeds}
