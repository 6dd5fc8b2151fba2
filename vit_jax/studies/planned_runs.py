"""The runs of a study: which there are, and which are done.

A study's directory holds `study.json`, the configuration of every run, and GRID/VALUE-VALUE-seedN
for each, the work directory of its training.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.base import Path, UserError, records, require_regular, write_json
from vit_jax.checkpoints import digests
from vit_jax.checkpoints.store import FOLDER
from vit_jax.config import UNMEASURED, TrainConfig, differing, write_config
from vit_jax.experiment import reporter, workdirs
from vit_jax.studies import history
from vit_jax.studies.config import COMPUTE, Grid, Study

STUDY = 'study.json'


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


def planned(study: Study) -> list[PlannedRun]:
    """All runs, those of the first seed first, each behind the one that it starts from.

    Raises UserError for an axis that names a field that does not exist, for two runs whose folders
    would have one name, for a measure that none of them writes, and for a published value of none.
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
    for name, grid in study.grids.items():
        _check_measures(name, grid, [run for run in runs if run.grid == name])
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


def _check_measures(name: str, grid: Grid, runs: Sequence[PlannedRun]) -> None:
    for run in runs:
        kinds = ['train', *run.config.evaluations, *(['fewshot'] if run.config.fewshot else [])]
        for measure in (*grid.measures, *([grid.best] if grid.best else [])):
            known = measure == COMPUTE or measure.partition('/')[0] in kinds
            there = ', '.join(f'{kind}/...' for kind in kinds)
            records.require(known, f'grids.{name}: {measure!r}: {run.name} has {there}')
    combinations = dict.fromkeys('-'.join(run.values.values()) for run in runs)
    unknown = [key for key in grid.published if key not in combinations]
    there = ', '.join([*combinations][:3])
    records.require(
        not unknown, f'grids.{name}.published: {unknown[:1]} is none of the runs, such as {there}'
    )


def _in_words(values: Mapping[str, str]) -> str:
    return ', '.join(f'{axis}={value}' for axis, value in values.items())


def agree(folder: Path, runs: Sequence[PlannedRun]) -> None:
    """Writes down which runs there are, and keeps those that have begun.

    Raises UserError where a run has begun with other values of what it learns or is measured by,
    and where runs have begun of which none is one of these.
    """
    path = folder / STUDY
    found = {run.name: records.to_dict(run.config) for run in runs}
    begun = {name: values for name, values in _kept(path).items() if _has_begun(folder / name)}
    both = [name for name in begun if name in found]
    advice = 'take another --workdir'
    if begun and not both:
        other = next(iter(begun))
        raise UserError(f'{folder} is the directory of another study, with a run {other}: {advice}')
    changed = {name: differing(begun[name], found[name], free=UNMEASURED) for name in both}
    if lines := [f'{name}: {line}' for name, each in changed.items() for line in each]:
        text = f'{folder}: a run of this study has begun with other values: {lines[0]}'
        more = f' and {len(lines) - 1:,} more' if len(lines) > 1 else ''
        anew = 'remove the folder of the run, and of those that start from it, to train it anew'
        raise UserError(f'{text}{more}; {advice}, or {anew}')
    write_json(path, {'runs': begun | found})


def _kept(path: Path) -> dict[str, dict[str, Any]]:
    """The configurations of the runs that were written down, by name."""
    if not path.exists():
        return {}
    require_regular(path)
    try:
        kept = json.loads(path.read_bytes())['runs']
        return {name: dict(values) for name, values in kept.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        advice = 'take it away, if the runs beside it are those of this study'
        raise UserError(f'{path}: cannot be read as a list of runs ({error}): {advice}') from error


def _has_begun(folder: Path) -> bool:
    return (folder / workdirs.LEDGER).exists()


def is_complete(folder: Path, run: PlannedRun) -> bool:
    """Has the run come to its end?"""
    return last_step(folder, run) is not None


def last_step(folder: Path, run: PlannedRun) -> int | None:
    """The step at which a run has come to its end; None where it has not."""
    events = reporter.read_ledger(folder / run.name / workdirs.LEDGER)
    return events[-1]['step'] if events and events[-1]['event'] == 'complete' else None


def write_run_config(folder: Path, study: Study, run: PlannedRun) -> Path:
    """Writes the configuration of a run into its work directory, for `train --config=`.

    Raises UserError where the run that it starts from is not complete.
    """
    values = records.to_dict(run.config)
    if run.after is not None:
        records.require(is_complete(folder, run.after), f'{run.after.name} is not complete')
        best = study.grids[run.after.grid].best
        values['start_from'] = str(_checkpoint(folder / run.after.name, best))
    path = folder / run.name / workdirs.CONFIG
    if values['compute']['dtype'] == 'auto':
        values['compute']['dtype'] = workdirs.recorded_dtype(str(path.parent))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_config(path, values)
    return path


def _checkpoint(folder: Path, best: str | None) -> Path:
    """The newest checkpoint of a work directory, or the one of the step that was best."""
    steps = digests.steps(folder / FOLDER)
    if best is None or not steps:
        return folder
    step = best_step(history.read(folder, folder.name), best)
    if step not in steps:
        kept = 'checkpoint_every_steps=eval_every_steps and a higher keep_checkpoints keep it'
        raise UserError(f'{folder}: step {step} was best, but has no checkpoint ({kept})')
    return folder / FOLDER / str(step)


def best_step(run: history.History, best: str) -> int | None:
    """The step at which the number NAME/NUMBER was highest; None where there is none."""
    kind, _, number = best.partition('/')
    lines = [line for line in run.of_kind(kind) if number in line]
    return max(lines, key=lambda line: line[number])['step'] if lines else None
