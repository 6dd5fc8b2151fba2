"""Plans the runs of a study in order, and finds the complete ones.

In the directory of the study, GRID/VALUE-VALUE-seedN is the work directory of a run and
GRID/VALUE-VALUE-seedN.json its configuration.
"""

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from vit_jax.base import Path, plural, records, require, usable
from vit_jax.checkpoints import digests
from vit_jax.checkpoints.store import FOLDER
from vit_jax.config import MAY_CHANGE_ON_RESUME, TrainConfig, config_differences, write_config
from vit_jax.experiment import reporter, workdirs
from vit_jax.experiment.values import remove_values
from vit_jax.studies import history
from vit_jax.studies.config import COMPUTE, Grid, Study
from vit_jax.training.metrics import METRICS, find_metric, resolve_metrics


class PlannedRun(NamedTuple):
    """One experiment of a study, with one seed."""

    name: str  # GRID/VALUE-VALUE-seedN
    grid: str
    values: dict[str, str]  # AXIS: VALUE
    seed: int
    config: TrainConfig  # `start_from` is not set to the checkpoint of `parent`
    parent: 'PlannedRun | None'  # the run whose checkpoint this one starts from

    @property
    def root(self) -> 'PlannedRun':
        """The first run in the chain of parents of this run."""
        return self if self.parent is None else self.parent.root


def plan_runs(study: Study) -> list[PlannedRun]:
    """Returns all runs, seed by seed, each after the run that it starts from.

    Raises UserError for an unknown field, an invalid value, two runs with one name, or a measure
    that no run writes.
    """
    runs: dict[str, PlannedRun] = {}
    for seed in study.seeds:
        by_grid: dict[str, list[PlannedRun]] = {}
        for name, grid in study.grids.items():
            by_grid[name] = []
            for start in [None] if grid.start_from is None else by_grid[grid.start_from]:
                by_grid[name] += _plan_grid(study, name, start, seed)
            for run in by_grid[name]:
                _check_measures(grid, run)
                key = run.name.casefold()  # some file systems ignore case
                require(key not in runs, f'{run.name}: got two runs with this name')
                runs[key] = run
            combinations = {'-'.join(run.values.values()) for run in by_grid[name]}
            unknown = grid.published.keys() - combinations
            require(not unknown, f'grids.{name}.published: got {unknown}; expected {combinations}')
    return [*runs.values()]


def _plan_grid(
    study: Study, name: str, start: PlannedRun | None, seed: int
) -> Iterator[PlannedRun]:
    grid = study.grids[name]
    where = f'grids.{name}'
    reset = {} if start is None else {'model': None}  # use the checkpoint's model
    base = records.with_values(study.base, reset | grid.changes, where=f'{where}.changes')
    for combination in itertools.product(*grid.axes.values()):
        values = dict(zip(grid.axes, combination, strict=True))
        config = base
        for axis, value in values.items():
            changes = grid.axes[axis][value]
            config = records.with_values(config, changes, where=f'{where}.axes.{axis}.{value}')
        config.seed = seed
        if start is not None:
            values = start.values | values
        yield PlannedRun(
            name=f'{name}/{"-".join([*values.values(), f"seed{seed}"])}',
            grid=name,
            values=values,
            seed=seed,
            config=config,
            parent=start,
        )


def _check_measures(grid: Grid, run: PlannedRun) -> None:
    kinds = ['train', *run.config.evaluations]
    if run.config.fewshot:
        kinds.append('fewshot')
    measures = [*grid.measures]
    if grid.best:
        measures.append(grid.best)
    known = {*METRICS, *(metric.name for metric in resolve_metrics(run.config.metrics))}
    for measure in measures:
        where = f'grids.{run.grid}: measure {measure!r}'
        kind, _, name = measure.partition('/')
        expected = ', '.join(f'{kind}/...' for kind in kinds)
        require(measure == COMPUTE or kind in kinds, f'{where}: expected {expected}, compute')
        if kind in run.config.evaluations:
            nearest = records.closest(name, known)
            require(name in known, f'{where}: no metric {name!r}; {nearest}')


def describe_programs(runs: Sequence[PlannedRun]) -> str:
    """Returns a line with the number of runs and of the programs that they need."""
    steps: set[Hashable] = set()
    evaluations: set[Hashable] = set()
    for run in runs:
        config = run.config
        structure = _structure_key(run)
        steps |= {(structure, kind) for kind in config.step_variants}
        for evaluation in config.evaluations.values():
            data = evaluation.data or config.data
            batch_size = config.eval_batch_size or config.batch_size
            evaluations.add((structure, evaluation.patch_size, data, evaluation.labels, batch_size))
        if config.fewshot is not None:
            evaluations.add((structure, 'few-shot'))
    programs = f'{plural(len(steps), "training step")}, {plural(len(evaluations), "evaluation")}'
    return f'{plural(len(runs), "run")} to train; programs to compile: {programs}'


def _structure_key(run: PlannedRun) -> Hashable:
    """Returns a key of what the programs of a run depend on.

    It includes the data, which determine the number of classes.
    """
    config = run.config
    optimizer = config.optimizer
    start = config.start_from if run.parent is None else _structure_key(run.parent)
    has_factors = optimizer.layer_decay is not None or len(optimizer.lr_multipliers) > 0
    return repr(remove_values(config)), repr(config.data), config.classes, start, has_factors


def read_last_step(folder: Path, run: PlannedRun) -> int | None:
    """Returns the last step of a complete run; None if the run is not complete."""
    events = reporter.read_events(folder / run.name / workdirs.EVENTS)
    return events[-1]['step'] if events and events[-1]['event'] == 'complete' else None


def is_complete(folder: Path, run: PlannedRun) -> bool:
    """Returns whether a run is complete."""
    return read_last_step(folder, run) is not None


def require_same_values(folder: Path, runs: Sequence[PlannedRun]) -> None:
    """Raises UserError if a complete run was trained or evaluated with other values than planned.

    For incomplete runs, `train` does this check.
    """
    for run in runs:
        if is_complete(folder, run):
            recorded = history.read_history(folder / run.name, run.name).config
            measured = {'evals', 'eval_split', 'fewshot', 'metrics'}
            last_step = {'keep_best', 'patience'}  # these change it
            may_differ = {*MAY_CHANGE_ON_RESUME} - measured - last_step
            if run.parent:
                may_differ.add('start_from')
            if run.config.compute.dtype == 'auto':
                may_differ.add('compute.dtype')
            planned = records.to_dict(run.config)
            changes = config_differences(recorded, planned, ignored=[*may_differ])
            require(
                not changes,
                f'{folder / run.name}: {"; ".join(changes)}; use another --workdir, '
                'or delete the folder of this run to train it again',
            )


def write_run_config(folder: Path, study: Study, run: PlannedRun) -> Path:
    """Writes the configuration of a run, and returns its path.

    Raises UserError if the run that it starts from is not complete.
    """
    values = records.to_dict(run.config)
    if run.parent is not None:
        require(is_complete(folder, run.parent), f'{run.parent.name} is incomplete')
        best = study.grids[run.parent.grid].best
        values['start_from'] = str(_find_checkpoint(folder / run.parent.name, best))
    path = folder / f'{run.name}.json'
    with usable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_config(path, values)
    return path


def _find_checkpoint(workdir: Path, best: str | None) -> Path:
    """Returns the newest checkpoint of a work directory, or the one with the best measure."""
    if best is None:
        return workdir
    step = find_best_step(history.read_history(workdir, workdir.name), best)
    checkpoints = workdir / FOLDER
    require(
        step in digests.list_steps(checkpoints),
        f'{workdir}: step {step} is best, but has no checkpoint; set keep_best={best}',
    )
    return checkpoints / str(step)


def find_best_step(run: history.History, best: str) -> int | None:
    """Returns the step with the best value of KIND/NAME; None if no step has a value.

    Does not compare values that the selection of the run does not compare.
    """
    kind, _, name = best.partition('/')
    by_step = {
        line['step']: line[name]
        for line in run.lines
        if line['kind'] == kind and line.get('run', 0) >= run.first_selecting
        if isinstance(line.get(name), int | float) and math.isfinite(line[name])
    }
    choose = min if find_metric(best, run.own_metrics).lower_is_better else max
    return choose(by_step, key=by_step.__getitem__, default=None)
