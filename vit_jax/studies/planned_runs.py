"""Plans the runs of a study in order, and tells which are complete.

In the directory of the study, GRID/VALUE-VALUE-seedN is the work directory of a run and
GRID/VALUE-VALUE-seedN.json its configuration.
"""

import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from vit_jax.base import Path, UserError, plural, records, require, usable
from vit_jax.checkpoints import digests
from vit_jax.checkpoints.store import FOLDER
from vit_jax.config import MAY_CHANGE_ON_RESUME, TrainConfig, config_differences, write_config
from vit_jax.experiment import reporter, workdirs
from vit_jax.experiment.values import remove_values
from vit_jax.studies import history
from vit_jax.studies.config import COMPUTE, Grid, Study
from vit_jax.training.metrics import find_metric


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
    runs = dict[str, PlannedRun]()
    for seed in study.seeds:
        by_grid = dict[str | None, list[PlannedRun]]()
        for name, grid in study.grids.items():
            starts = [None] if grid.start_from is None else by_grid[grid.start_from]
            by_grid[name] = [r for start in starts for r in _of_grid(study, name, start, seed)]
            for run in by_grid[name]:
                _check_measures(grid, run)
                key = run.name.casefold()  # some file systems ignore case
                require(key not in runs, f'{run.name}: got two runs with this name')
                runs[key] = run
            combinations = {'-'.join(run.values.values()) for run in by_grid[name]}
            unknown = grid.published.keys() - combinations
            require(not unknown, f'grids.{name}.published: got {unknown}; expected {combinations}')
    return [*runs.values()]


def _of_grid(study: Study, name: str, start: PlannedRun | None, seed: int) -> Iterator[PlannedRun]:
    grid, where = study.grids[name], f'grids.{name}'
    reset = {} if start is None else {'model': None}  # use the checkpoint's model
    base = records.with_values(study.base, reset | grid.changes, where=f'{where}.changes')
    for chosen in itertools.product(*grid.axes.values()):
        values, config = dict(zip(grid.axes, chosen, strict=True)), base
        for axis, value in values.items():
            changes = grid.axes[axis][value]
            config = records.with_values(config, changes, where=f'{where}.axes.{axis}.{value}')
        config.seed = seed
        values = ({} if start is None else start.values) | values
        folder = f'{name}/{"-".join([*values.values(), f"seed{seed}"])}'
        yield PlannedRun(folder, name, values, seed, config, start)


def _check_measures(grid: Grid, run: PlannedRun) -> None:
    kinds = ['train', *run.config.evaluations, *(['fewshot'] if run.config.fewshot else [])]
    for measure in (*grid.measures, *([grid.best] if grid.best else [])):
        is_known = measure == COMPUTE or measure.partition('/')[0] in kinds
        expected = ', '.join(f'{kind}/...' for kind in kinds)
        require(is_known, f'grids.{run.grid}: measure {measure!r}: expected {expected}, compute')


def describe_programs(runs: Sequence[PlannedRun]) -> str:
    """Returns a line with the number of runs and of the programs that they need."""
    steps, evaluations = set[Hashable](), set[Hashable]()
    for run in runs:
        config, structure = run.config, _structure_key(run)
        steps |= {(structure, kind) for kind in config.step_variants}
        for one in config.evaluations.values():
            batch = one.data or config.data, one.labels, config.eval_batch_size or config.batch_size
            evaluations.add((structure, one.patch_size, batch))
        if config.fewshot is not None:
            evaluations.add((structure, 'few-shot'))
    programs = f'{plural(len(steps), "training step")}, {plural(len(evaluations), "evaluation")}'
    return f'{plural(len(runs), "run")} to train; programs to compile: {programs}'


def _structure_key(run: PlannedRun) -> Hashable:
    """Returns a key of what the programs of a run depend on.

    It includes the data, which determine the number of classes.
    """
    config, optimizer = run.config, run.config.optimizer
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
            may_differ = {*MAY_CHANGE_ON_RESUME} - {
                'evals',
                'eval_split',
                'fewshot',
            }  # these change the measures
            may_differ -= {'keep_best', 'patience'}  # these change the last step
            may_differ |= {'start_from'} if run.parent else set()
            may_differ |= {'compute.dtype'} if run.config.compute.dtype == 'auto' else set()
            changes = config_differences(
                recorded, records.to_dict(run.config), ignored=[*may_differ]
            )
            advice = 'use another --workdir, or delete the folder of this run to train it again'
            require(not changes, f'{folder / run.name}: {"; ".join(changes)}; {advice}')


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
    step, path = find_best_step(history.read_history(workdir, workdir.name), best), workdir / FOLDER
    if step not in digests.list_steps(path):
        advice = f'set keep_best={best}'
        raise UserError(f'{workdir}: step {step} is best, but has no checkpoint; {advice}')
    return path / str(step)


def find_best_step(run: history.History, best: str) -> int | None:
    """Returns the step with the best value of KIND/NAME; None if no step has a value."""
    by_step = {step: x for step, x in run.numbers.get(best, {}).items() if x == x}  # without NaN
    choose = min if find_metric(best, run.own_metrics).lower_is_better else max
    return choose(by_step, key=by_step.__getitem__, default=None)
