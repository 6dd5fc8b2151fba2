"""Which runs a study has, in which order, and what their numbers are together."""

import dataclasses
import json
import re

import numpy as np
import pytest

from tests import golden, tiny
from vit_jax.base import records
from vit_jax.base.errors import UserError
from vit_jax.config import EvalConfig, TrainConfig, write_config
from vit_jax.experiment.build import build_experiment
from vit_jax.models import count_multiply_adds
from vit_jax.planning.memory_plan import with_dummy_data
from vit_jax.studies import planned_runs, results
from vit_jax.studies.config import Grid, PlotConfig, Study
from vit_jax.studies.planned_runs import plan_runs

DEPTHS = {'1': {'model.depth': 1}, '2': {'model.depth': 2}}
POOLS = {'gap': {'model.pool': 'gap'}, 'cls': {}}
TASKS = {'a': {}, 'b': {'loss.label_smoothing': 0.1}, 'c': {'data': 'elsewhere'}}


def study(**changes):
    grids = {'train': Grid(axes={'depth': DEPTHS, 'pool': POOLS})}
    return Study(**({'title': 'T', 'base': tiny.experiment(), 'grids': grids} | changes))


def two_grids(*, base=None, **first):
    tune = Grid(start_from='train', axes={'task': TASKS}, means={'near': ('a', 'b')})
    grids = {'train': Grid(axes={'depth': DEPTHS}, **first), 'tune': tune}
    return study(base=base or tiny.experiment(), grids=grids, seeds=(0, 1))


def complete(folder, run, *lines, step=10):
    """Writes what a complete training leaves behind: its lines are of the last step."""
    workdir = folder / run.name
    workdir.mkdir(parents=True)
    write_config(workdir / 'config.json', records.to_dict(run.config))
    lines = [{'kind': 'test', 'step': step} | line for line in lines]
    (workdir / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    last = {'run': 1, 'event': 'complete', 'step': step, 'time': 1.0, 'seconds': {}}
    (workdir / 'events.jsonl').write_text(json.dumps(last) + '\n')
    return workdir


def rows_of(folder, one):
    runs = plan_runs(one)
    return results.make_rows(one, runs, results.read_measures(folder, one, runs))


def test_a_grid_has_every_combination_with_the_values_of_its_axes():
    one = study(seeds=(3, 4))
    before = records.to_dict(one)
    runs = plan_runs(one)
    pairs = [(depth, pool) for depth in DEPTHS for pool in POOLS]
    assert [run.name for run in runs] == [
        f'train/{d}-{p}-seed{s}' for s in (3, 4) for d, p in pairs
    ]
    found = [(str(run.config.model.depth), run.config.model.pool) for run in runs]
    assert found == 2 * pairs
    assert [run.config.seed for run in runs] == [3] * 4 + [4] * 4
    assert records.to_dict(one) == before


def test_a_later_grid_has_the_values_and_the_seed_of_the_run_it_starts_from():
    runs = plan_runs(two_grids())
    names = [run.name for run in runs]
    tuned = [run for run in runs if run.grid == 'tune']
    assert [run.name for run in tuned[:2]] == ['tune/1-a-seed0', 'tune/1-b-seed0']
    for run in tuned:
        assert names.index(run.parent.name) < names.index(run.name)
        assert run.values == run.parent.values | {'task': run.values['task']}
        assert run.seed == run.parent.seed
        assert run.config.model is None  # that of the checkpoint


@pytest.mark.parametrize(
    'values, name',
    [
        ({'axes': {'depth': {'1': {'depht': 1}}}}, 'depht'),
        ({'axes': {'depth': {'1': {'model.depth': 0}}}}, 'depth=0'),
        ({'axes': {'a': {'b-c': {}, 'b': {}}, 'd': {'e': {}, 'c-e': {}}}}, 'b-c-e-seed0'),
        ({'axes': {'a': {'x': {}, 'X': {}}}}, 'train/X-seed0'),
        ({'axes': {'a': {'b c': {}}}}, 'b c'),
        ({'axes': {'a': {}}}, 'axes.a'),
        ({'axes': {'a': {'b': {}}}, 'means': {'all': ('c',)}}, 'means.all'),
        ({'measures': ('tset/accuracy',)}, 'tset/accuracy'),
        ({'measures': ('fewshot/5_shot_accuracy',)}, 'fewshot/5_shot_accuracy'),
        ({'best': 'held_out/accuracy'}, 'held_out/accuracy'),
        ({'best': 'test/acuracy'}, "did you mean 'accuracy'"),
        ({'measures': ('test/acuracy',)}, "did you mean 'accuracy'"),
        ({'published': {'3': 0.5}}, 'published'),
    ],
)
def test_a_grid_that_cannot_run_is_rejected_by_name(values, name):
    with pytest.raises(UserError, match=name):
        plan_runs(study(base=tiny.experiment(fewshot=None), grids={'train': Grid(**values)}))


@pytest.mark.parametrize(
    'values, name',
    [
        ({'seeds': (1, 1)}, 'seeds'),
        ({'grids': {}}, 'grids'),
        ({'grids': {'..': Grid()}}, 'grids'),
        ({'base': tiny.experiment(seed=5)}, 'base.seed=5'),
        ({'draw': PlotConfig(x='width')}, "draw.x='width'"),
        ({'draw': PlotConfig(x='depth', y='test/loss')}, "draw.y='test/loss'"),
        ({'draw': PlotConfig(x='depth', mean='all')}, "draw.mean='all'"),
        ({'grids': {'a': Grid(start_from='b'), 'b': Grid()}}, "start_from='b'"),
    ],
)
def test_a_study_checks_itself(values, name):
    with pytest.raises(UserError, match=name):
        study(**values)


def test_a_complete_run_keeps_its_values(tmp_path):
    runs = plan_runs(study())
    complete(tmp_path, runs[0])
    planned_runs.require_same_values(tmp_path, runs)
    for free in plan_runs(study(base=tiny.experiment(log_every_steps=1), seeds=(0, 1))):
        planned_runs.require_same_values(tmp_path, [free])
    for changes in {'batch_size': 32}, {'eval_split': 'train'}, {'keep_best': 'test/loss'}:
        with pytest.raises(UserError, match=f'train/1-gap-seed0: {[*changes][0]}'):
            changed = plan_runs(study(base=tiny.experiment(**changes)))
            planned_runs.require_same_values(tmp_path, changed)


def test_rows_have_the_numbers_of_the_last_step_of_complete_runs(tmp_path):
    grid = Grid(axes={'depth': DEPTHS}, measures=('test/accuracy', 'test/loss'))
    grid.published = {'1': 0.5}
    one = study(grids={'train': grid}, seeds=(0, 1))
    first, second, third, _ = plan_runs(one)
    complete(tmp_path, first, {'accuracy': 0.5, 'step': 5}, {'accuracy': 0.75, 'loss': 2.0})
    lost = complete(tmp_path, second, {'accuracy': 0.9}) / 'events.jsonl'
    lost.write_text('')  # it is not complete
    complete(tmp_path, third, {'accuracy': 0.25, 'step': 5})  # the last evaluation is lost
    rows = rows_of(tmp_path, one)
    assert rows[0].numbers == {'test/accuracy': {0: 0.75}, 'test/loss': {0: 2.0}}
    assert (rows[0].values, rows[0].num_runs, rows[0].published) == ({'depth': '1'}, 2, 0.5)
    assert rows[1].numbers == {'test/accuracy': {}, 'test/loss': {}}


def test_numbers_and_checkpoint_are_of_the_best_step(tmp_path):
    evals = {name: EvalConfig() for name in ('test', 'held')}
    one = two_grids(base=tiny.experiment(evals=evals, eval_split='test'), best='held/accuracy')
    runs = {run.name: run for run in plan_runs(one)}
    lines = [
        {'kind': kind, 'step': step, 'accuracy': accuracy}
        for step, *both in [(5, 0.5, 0.1), (10, 0.75, 0.2), (15, 0.7, 0.9)]
        for kind, accuracy in zip(('held', 'test'), both, strict=True)
    ]
    folder = complete(tmp_path, runs['train/1-seed0'], *lines)
    measured = results.read_measures(tmp_path, one, [*runs.values()])
    assert measured == {'train/1-seed0': {'test/accuracy': 0.2}}
    (folder / 'checkpoints/15').mkdir(parents=True)
    with pytest.raises(UserError, match='step 10'):
        planned_runs.write_run_config(tmp_path, one, runs['tune/1-a-seed0'])
    (folder / 'checkpoints/10').mkdir()
    path = planned_runs.write_run_config(tmp_path, one, runs['tune/1-a-seed0'])
    assert json.loads(path.read_text())['start_from'] == str(folder / 'checkpoints/10')


def test_means_are_over_the_seeds_that_all_have(tmp_path):
    one = two_grids()
    one.grids['tune'].published = {'1-a': 0.5, '1-b': 0.9, '2-a': 0.1}
    accuracies = {'1-a-seed0': 0.5, '1-b-seed0': 0.7, '1-a-seed1': 0.1, '1-c-seed0': 0.9}
    for run in plan_runs(one):
        if accuracy := accuracies.get(run.name.removeprefix('tune/')):
            complete(tmp_path, run, {'accuracy': accuracy})
    first, second = (row for row in rows_of(tmp_path, one) if row.mean == 'near')
    assert [first.values, second.values] == [{'depth': d, 'task': 'near'} for d in '12']
    assert first.numbers == {'test/accuracy': {0: pytest.approx(0.6)}}
    assert second.numbers == {'test/accuracy': {}}
    assert first.published == pytest.approx(0.7) and second.published is None


@pytest.mark.gate
def test_compute_is_that_of_table_6_for_the_first_training(tmp_path):
    grids = {
        'train': Grid(axes={'depth': DEPTHS}, measures=('compute',)),
        'tune': Grid(start_from='train', measures=('compute',), changes={'batch_size': 4}),
    }
    one = study(grids=grids)
    for run in plan_runs(one):
        complete(tmp_path, run, step=10 if run.grid == 'train' else 3)
    for row, depth in zip(rows_of(tmp_path, one), (1, 2, 1, 2), strict=True):
        expected = 6 * count_multiply_adds(tiny.model(depth=depth, num_classes=None)) * 16 * 10
        np.testing.assert_allclose(row.numbers['compute'][0], expected)


def build_run(run):
    """Builds the run as for training, also on a share of the data. Nothing is computed."""
    config = golden.small(dataclasses.replace(run.config, model=model_of(run)))
    values = json.loads(json.dumps(records.to_dict(run.config)))
    assert records.from_dict(TrainConfig, values, where='c') == run.config
    shares = re.findall(r':(\d+)%', config.train_split)
    images = golden.num_images(config.data)
    images = round(images * min(map(int, shares or ['100'])) / 100)
    config.model.num_classes = None
    build_experiment(with_dummy_data(config, num_classes=10, num_images=images))


def model_of(run):
    return run.config.model or run.root.config.model


def runs_of_one_seed(name):
    return plan_runs(dataclasses.replace(golden.config(name), seeds=(0,)))


@pytest.mark.gate
@pytest.mark.parametrize('name', golden.STUDIES)
def test_the_first_run_of_a_study_can_start(name):
    """And all its runs are valid: `plan_runs` validates them."""
    build_run(runs_of_one_seed(name)[0])


@pytest.mark.nightly
@pytest.mark.parametrize('name', golden.STUDIES)
def test_each_run_of_a_study_can_start(name):
    """A run is left out if its model and all its other values occur in runs before it."""
    seen = set()
    for run in runs_of_one_seed(name):
        parts = {repr(model_of(run)), repr(dataclasses.replace(run.config, model=None))}
        if not parts <= seen:
            seen |= parts
            build_run(run)
