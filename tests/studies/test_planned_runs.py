"""Which runs a study has, in which order, and what their numbers are together."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest

from tests import golden, tiny
from vit_jax.base import records
from vit_jax.base.errors import UserError
from vit_jax.config import EvalConfig, TrainConfig
from vit_jax.evaluation.probing import FewshotConfig
from vit_jax.experiment.build import build_experiment
from vit_jax.models import build, multiply_adds
from vit_jax.planning.memory_plan import without_data
from vit_jax.studies import planned_runs, results
from vit_jax.studies.config import Drawing, Grid, Study

DEPTHS = {'1': {'model.depth': 1}, '2': {'model.depth': 2}}
POOLS = {'gap': {'model.pool': 'gap'}, 'cls': {}}
TASKS = {'a': {}, 'b': {'loss.label_smoothing': 0.1}, 'c': {'data': 'elsewhere'}}


def study(**changes):
    values = {
        'title': 'depth',
        'base': tiny.experiment(),
        'grids': {'train': Grid(axes={'depth': DEPTHS, 'pool': POOLS})},
    }
    return Study(**(values | changes))


def two_grids(*, base=None, **first):
    tune = Grid(start_from='train', axes={'task': TASKS}, means={'near': ('a', 'b')})
    grids = {'train': Grid(axes={'depth': DEPTHS}, **first), 'tune': tune}
    return study(base=base or tiny.experiment(), grids=grids, seeds=(0, 1))


def run_of(folder, *lines, step=10, config=None):
    """What a complete training leaves behind."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [{'kind': 'test', 'step': step, 'run': 1, 'seconds': 1.0} | line for line in lines]
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in texts))
    last = {'run': 1, 'event': 'complete', 'step': step, 'time': 1.0, 'seconds': {'step': 2.0}}
    (folder / 'ledger.jsonl').write_text(json.dumps(last) + '\n')


def test_a_grid_has_every_combination_with_the_values_of_its_axes():
    runs = planned_runs.planned(study(seeds=(3, 4)))
    pairs = [f'{depth}-{pool}' for depth in DEPTHS for pool in POOLS]
    assert [run.name for run in runs] == [f'train/{p}-seed{s}' for s in (3, 4) for p in pairs]
    assert [(r.config.model.depth, r.config.model.pool) for r in runs[:4]] == [
        (1, 'gap'),
        (1, 'cls'),
        (2, 'gap'),
        (2, 'cls'),
    ]
    assert [run.config.seed for run in runs] == [3] * 4 + [4] * 4


def test_the_base_is_left_as_it_is():
    shared = tiny.model(num_classes=None)  # as two values of an axis may share one
    axes = {'depth': {'5': {'model': shared, 'model.depth': 5}}, 'pool': POOLS}
    for one in study(), study(grids={'train': Grid(axes=axes)}):
        before = records.to_dict(one)
        planned_runs.planned(one)
        assert records.to_dict(one) == before
    assert shared == tiny.model(num_classes=None)


def test_what_follows_has_the_values_and_the_seed_of_the_run_it_starts_from():
    runs = planned_runs.planned(two_grids())
    names = [run.name for run in runs]
    for run in runs:
        if run.grid == 'tune':
            assert run.after is not None and names.index(run.after.name) < names.index(run.name)
            assert run.values == run.after.values | {'task': run.values['task']}
            assert run.seed == run.after.seed
            assert run.config.model is None  # that of the checkpoint
    assert [run.name for run in runs if run.grid == 'tune'][:2] == [
        'tune/1-a-seed0',
        'tune/1-b-seed0',
    ]


@pytest.mark.parametrize(
    'axes, said',
    [
        ({'depth': {'1': {'model.depht': 1}}}, "model.depht: no such field; did you mean 'depth'"),
        ({'depth': {'1': {'model.depth': 0}}}, 'depth=0: expected at least 1'),
        ({'depth': {'1': {'model.depth': 'one'}}}, "depth='one': expected int"),
        ({'rate': {'1': {'total.steps.x': 1}}}, "config.total.steps=10 has no field 'x'"),
        ({'a': {'b-c': {}, 'b': {}}, 'd': {'e': {}, 'c-e': {}}}, 'two runs would be named'),
        ({'a': {'x': {}, 'X': {}}}, 'two runs would be named train/X-seed0: a=x; a=X'),
    ],
)
def test_a_study_that_cannot_be_is_one_sentence(axes, said):
    with pytest.raises(UserError) as error:
        planned_runs.planned(study(grids={'train': Grid(axes=axes)}))
    assert said.replace('config.total', 'grids.train.axes.rate.1.total') in str(error.value)


@pytest.mark.parametrize(
    'values, said',
    [
        ({'seeds': (1, 1)}, 'each once'),
        ({'grids': {}}, 'at least one'),
        ({'grids': {'a/b': Grid()}}, "'a/b': expected 1 to 64 letters"),
        ({'grids': {'..': Grid()}}, "'..': expected 1 to 64 letters"),
        ({'base': tiny.experiment(seed=5)}, 'base.seed=5: the seeds of all runs are `seeds`'),
        ({'draw': Drawing(x='width')}, "draw.x='width': the grids have depth, pool"),
        ({'draw': Drawing(x='compute')}, "draw.x='compute': the grids have depth, pool"),
        ({'draw': Drawing(x='depth', y='test/loss')}, 'the grids have test/accuracy'),
        ({'draw': Drawing(x='depth', mean='all')}, "draw.mean='all': no grid has it"),
        ({'grids': {'a': Grid(start_from='b'), 'b': Grid()}}, 'expected an earlier one: none'),
    ],
)
def test_records_of_a_study_check_themselves(values, said):
    with pytest.raises(UserError, match=said):
        study(**values)
    with pytest.raises(UserError, match='letters, digits'):
        Grid(axes={'a': {'b c': {}}})
    with pytest.raises(UserError, match='expected 1 to 64 letters'):
        Grid(axes={'a': {65 * 'b': {}}})
    with pytest.raises(UserError, match="'b' overwrites all that ..a.. changes"):
        Grid(axes={'a': DEPTHS, 'b': {'3': {'model.depth': 3}}})
    with pytest.raises(UserError, match='no value of the last axis'):
        Grid(axes={'a': {'b': {}}}, means={'all': ('c',)})


@pytest.mark.parametrize(
    'values, said',
    [
        (
            {'measures': ('tset/accuracy',)},
            "'tset/accuracy': train/1-seed0 has train/..., test/...",
        ),
        ({'best': 'held_out/accuracy'}, "'held_out/accuracy': train/1-seed0 has train/..., test/"),
        ({'measures': ('fewshot/5_shot_accuracy',)}, 'has train/..., test/...'),
        ({'published': {'3': 0.5}}, "published: ['3'] is none of the runs, such as 1, 2"),
    ],
)
def test_what_no_run_will_have_is_said_before_any_begins(values, said):
    base = tiny.experiment(fewshot=None)
    one = study(base=base, grids={'train': Grid(axes={'depth': DEPTHS}, **values)})
    with pytest.raises(UserError) as error:
        planned_runs.planned(one)
    assert said in str(error.value)


def begin(folder, name):
    (folder / name).mkdir(parents=True)
    (folder / name / 'ledger.jsonl').touch()


def test_a_study_may_grow_and_shrink_but_what_has_begun_may_not_change(tmp_path):
    first = study()
    planned_runs.agree(tmp_path, planned_runs.planned(first))
    changed = planned_runs.planned(study(base=tiny.experiment(batch_size=32)))
    planned_runs.agree(tmp_path, changed)  # none has begun
    planned_runs.agree(tmp_path, planned_runs.planned(first))
    begin(tmp_path, 'train/1-gap-seed0')
    before = (tmp_path / planned_runs.STUDY).read_bytes()
    said = 'begun with other values: train/1-gap-seed0: batch_size: 16 -> 32'
    with pytest.raises(UserError, match=said):
        planned_runs.agree(tmp_path, changed)
    with pytest.raises(UserError, match='begun with other values: .*: eval_split'):
        planned_runs.agree(
            tmp_path, planned_runs.planned(study(base=tiny.experiment(eval_split='train')))
        )
    other = study(grids={'pre': Grid()})
    with pytest.raises(UserError, match='of another study, with a run train/1-gap-seed0'):
        planned_runs.agree(tmp_path, planned_runs.planned(other))
    assert (tmp_path / planned_runs.STUDY).read_bytes() == before
    planned_runs.agree(
        tmp_path, planned_runs.planned(study(base=tiny.experiment(log_every_steps=1)))
    )
    begin(tmp_path, 'train/1-gap-seed1')
    planned_runs.agree(tmp_path, planned_runs.planned(study(seeds=(0, 1))))
    planned_runs.agree(tmp_path, planned_runs.planned(first))  # the other seed is kept in mind
    other = study(base=tiny.experiment(batch_size=32), seeds=(1,))
    with pytest.raises(UserError, match='1-gap-seed1: batch_size'):
        planned_runs.agree(tmp_path, planned_runs.planned(other))


def test_a_run_whose_folder_is_removed_may_begin_with_other_values(tmp_path):
    changed = planned_runs.planned(study(base=tiny.experiment(batch_size=32)))
    planned_runs.agree(tmp_path, planned_runs.planned(study()))
    begin(tmp_path, 'train/1-gap-seed0')
    with pytest.raises(UserError, match='batch_size: .*another --workdir, or remove the folder of'):
        planned_runs.agree(tmp_path, changed)
    shutil.rmtree(tmp_path / 'train/1-gap-seed0')
    planned_runs.agree(tmp_path, changed)
    begin(tmp_path, 'train/1-gap-seed0')
    planned_runs.agree(tmp_path, changed)


def test_a_list_of_runs_that_is_damaged_is_named_with_what_to_do(tmp_path):
    (tmp_path / planned_runs.STUDY).write_text('[]')
    with pytest.raises(UserError, match='cannot be read as a list of runs .* take it away'):
        planned_runs.agree(tmp_path, planned_runs.planned(study()))


def test_rows_have_the_numbers_of_complete_runs_by_seed(tmp_path):
    grid = Grid(
        axes={'depth': DEPTHS},
        measures=('test/accuracy', 'fewshot/5_shot_accuracy'),
        published={'1': 0.5},
    )
    base = tiny.experiment(fewshot=FewshotConfig())
    one = study(base=base, grids={'train': grid}, seeds=(0, 1))
    runs = planned_runs.planned(one)
    shots = {'kind': 'fewshot', '5_shot_accuracy': 0.25}
    run_of(tmp_path / 'train/1-seed0', {'accuracy': 0.5, 'step': 5}, {'accuracy': 0.75}, shots)
    run_of(tmp_path / 'train/1-seed1', {'accuracy': 0.25})
    run_of(tmp_path / 'train/2-seed0', {'accuracy': 0.9})
    (tmp_path / 'train/2-seed0/ledger.jsonl').write_text('')  # not complete
    done, (said,) = results.reached(tmp_path, one, runs)
    first, second = results.rows(one, runs, done)
    assert first.numbers == {
        'test/accuracy': {0: 0.75, 1: 0.25},
        'fewshot/5_shot_accuracy': {0: 0.25},
    }
    assert (first.values, first.planned, first.published) == ({'depth': '1'}, 2, 0.5)
    assert second.numbers == {'test/accuracy': {}, 'fewshot/5_shot_accuracy': {}}
    metrics = tmp_path / 'train/1-seed1/metrics.jsonl'
    assert said == f'train/1-seed1: no fewshot/5_shot_accuracy of step 10 in {metrics}'


def test_an_earlier_evaluation_is_not_taken_for_the_last_that_is_lost(tmp_path):
    one = study(grids={'train': Grid(axes={'depth': DEPTHS})})
    runs = planned_runs.planned(one)
    run_of(tmp_path / 'train/1-seed0', {'accuracy': 0.5, 'step': 5})
    run_of(tmp_path / 'train/2-seed0', {'accuracy': 0.5})
    (tmp_path / 'train/2-seed0/metrics.jsonl').unlink()
    done, lost = results.reached(tmp_path, one, runs)
    numbers = [row.numbers for row in results.rows(one, runs, done)]
    assert numbers == [{'test/accuracy': {}}] * 2 and len(lost) == 2


def test_numbers_and_checkpoint_are_of_the_step_that_was_best(tmp_path):
    evals = {name: EvalConfig() for name in ('test', 'held')}
    one = two_grids(base=tiny.experiment(evals=evals, eval_split='test'), best='held/accuracy')
    runs = {run.name: run for run in planned_runs.planned(one)}
    folder = tmp_path / 'train/1-seed0'
    lines = [
        {'kind': kind, 'step': step, 'accuracy': accuracy}
        for step, *both in [(5, 0.5, 0.1), (10, 0.75, 0.2), (15, 0.7, 0.9)]
        for kind, accuracy in zip(('held', 'test'), both, strict=True)
    ]
    run_of(folder, *lines)
    done, _ = results.reached(tmp_path, one, [*runs.values()])
    assert done == {'train/1-seed0': {'test/accuracy': 0.2}}
    (folder / 'checkpoints/15').mkdir(parents=True)
    with pytest.raises(UserError, match='step 10 was best, but has no checkpoint'):
        planned_runs.write_run_config(tmp_path, one, runs['tune/1-a-seed0'])
    (folder / 'checkpoints/10').mkdir()
    path = planned_runs.write_run_config(tmp_path, one, runs['tune/1-a-seed0'])
    assert json.loads(path.read_text())['start_from'] == str(folder / 'checkpoints/10')


def rows_of(folder, one, runs):
    done, _ = results.reached(folder, one, runs)
    return results.rows(one, runs, done)


def test_means_are_over_the_seeds_that_all_have(tmp_path):
    one = two_grids()
    runs = planned_runs.planned(one)
    for seed, task, accuracy in [(0, 'a', 0.5), (0, 'b', 0.7), (1, 'a', 0.1), (0, 'c', 0.9)]:
        run_of(tmp_path / f'tune/1-{task}-seed{seed}', {'accuracy': accuracy})
    near = results.means(one, rows_of(tmp_path, one, runs))
    assert [row.values for row in near] == [{'depth': d, 'task': 'near'} for d in '12']

    np.testing.assert_allclose(near[0].numbers['test/accuracy'][0], 0.6)
    assert near[0].numbers['test/accuracy'].keys() == {0}
    assert near[1].numbers == {'test/accuracy': {}}


def test_compute_is_that_of_table_6_of_the_first_training(tmp_path):
    grids = {
        'train': Grid(axes={'depth': DEPTHS}, measures=('compute',)),
        'tune': Grid(start_from='train', measures=('compute',), changes={'batch_size': 4}),
    }
    one = study(grids=grids)
    runs = planned_runs.planned(one)
    for run in runs:
        run_of(tmp_path / run.name, {'accuracy': 0.5}, step=10 if run.grid == 'train' else 3)
    rows = rows_of(tmp_path, one, runs)
    for row, depth in zip(rows, (1, 2, 1, 2), strict=True):
        expected = 6 * multiply_adds(tiny.model(depth=depth, num_classes=None)) * 16 * 10
        np.testing.assert_allclose(row.numbers['compute'][0], expected)


STUDIES = [
    (path, argument)
    for path in golden.FILES
    for argument in golden.arguments(path)
    if isinstance(golden.config(path, argument), Study)
]


def test_a_mean_of_some_says_of_how_many_and_has_their_published_values(tmp_path):
    tune = Grid(
        axes={'task': TASKS}, means={'all': ('a', 'b', 'c')}, published={'a': 0.5, 'c': 0.9}
    )
    one = study(grids={'tune': tune})
    for task, accuracy in {'a': 0.25, 'c': 0.75}.items():
        run_of(tmp_path / f'tune/{task}-seed0', {'accuracy': accuracy})
    (row,) = results.means(one, rows_of(tmp_path, one, planned_runs.planned(one)))
    assert row.values == {'task': 'all (2 of 3)'}
    assert row.numbers == {'test/accuracy': {0: 0.5}}
    np.testing.assert_allclose(row.published, 0.7)


IMAGES = {  # of training, as TFDS tells; JFT's as the paper does
    'tfds:imagenet21k': 14_197_122,
    'tfds:imagenet2012': 1_281_167,
    'JFT-300M': 303_000_000,
    'tfds:cifar10': 50_000,
    'tfds:cifar100': 50_000,
    'tfds:oxford_iiit_pet': 3_680,
    'tfds:oxford_flowers102': 1_020,
    'tfds:eurosat/rgb': 27_000,
    'cifar10': 50_000,
    'digits': 1_438,
}


def distinct_runs(path, argument):
    """The runs of the first seed that differ, each with the network that it will have."""
    one = dataclasses.replace(golden.config(path, argument), seeds=(0,))
    found = {}
    for run in planned_runs.planned(one):
        config = dataclasses.replace(run.config, model=run.config.model or run.first.config.model)
        if config.model is None:  # of a published checkpoint
            patch = 14 if config.image_size == (518, 518) else 16
            size = config.image_size or (32, 32)
            config.model = tiny.model(image_size=size, patch_size=(patch, patch))
        found.setdefault(repr((config, run.first.config.model)), (run, config))
    return found.values()


@pytest.mark.parametrize('path, argument', STUDIES, ids=lambda x: getattr(x, 'stem', x))
def test_the_network_of_each_run_of_a_study_here_is_built(path, argument):
    for _, config in distinct_runs(path, argument):
        build(config.model, regularization=config.regularization, compute=config.compute)


@pytest.mark.full
@pytest.mark.parametrize('path, argument', STUDIES, ids=lambda x: getattr(x, 'stem', x))
def test_each_run_of_a_study_here_can_start(path, argument):
    """Also on a share of the data, whose epochs are shorter. Nothing is computed.

    A run is left out if its network and all its other values occur in runs before it.
    """
    seen = set()
    for run, config in distinct_runs(path, argument):
        parts = {repr(config.model), repr(dataclasses.replace(config, model=None))}
        if parts <= seen:
            continue
        seen |= parts
        values = records.to_dict(run.config)
        assert (
            records.from_dict(TrainConfig, json.loads(json.dumps(values)), where='c') == run.config
        )
        if config.total is None:
            continue  # evaluated alone
        shares = re.findall(r':(\d+)%', config.train_split)
        images = 1_000 if config.data.startswith('vtab:') else IMAGES[config.data]
        images = round(images * min(map(int, shares or ['100'])) / 100)
        config.model = dataclasses.replace(config.model, num_classes=None)
        if (backbone := config.model.backbone) is not None:  # units of a stage are alike
            blocks = (1,) * len(backbone.blocks)
            config.model.backbone = dataclasses.replace(backbone, blocks=blocks)
        build_experiment(without_data(config, num_classes=10, num_images=images))
