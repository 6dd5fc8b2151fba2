"""Every file in configs/: its header, its values, and one traced update; nothing is computed."""

import ast
import dataclasses

import jax
import pytest

from tests import golden
from vit_jax.base import records, tree_names
from vit_jax.config import TrainConfig
from vit_jax.data.loading import abstract_batch
from vit_jax.data.sources.vtab import TASKS
from vit_jax.experiment.build import build_experiment
from vit_jax.planning.memory_plan import with_dummy_data
from vit_jax.studies import planned_runs

RUNS = [name for name in golden.NAMES if isinstance(golden.config(name), TrainConfig)]
IMAGES = {'JFT-300M': 303_000_000, 'tfds:imagenet21k': 12_743_321}  # else ImageNet's


@pytest.mark.parametrize('path', golden.FILES, ids=lambda path: path.stem)
def test_a_config_says_how_it_is_run(path):
    header = ast.get_docstring(ast.parse(path.read_text()))
    assert f'--config={path.relative_to(golden.ROOT)}' in header


def test_a_changed_value_is_seen():
    """python -m tests.golden NAME shows the change; python -m tests.golden accepts it."""
    assert golden.hashes() == golden.HASHES.read_text().splitlines()


QUICK = 'configs/quickstart.py', 'configs/pretrain/vit.py:jft,B/16'
OTHERS = [pytest.param(name, marks=pytest.mark.full) for name in RUNS if name not in QUICK]


@pytest.mark.parametrize('name', [*QUICK, *OTHERS])
def test_a_config_fits_together(name):
    """Its first state and one update are traced, for eight devices."""
    config = golden.config(name)
    config.start_from = config.start_from or 'some/checkpoint'
    config = records.validated(config, where='config')
    assert records.from_dict(TrainConfig, records.to_dict(config), where='c') == config
    if config.total is None:
        return
    config = golden.small(config)
    images = IMAGES.get(config.data, 1_281_167)
    experiment = build_experiment(
        with_dummy_data(config, num_classes=1000, num_images=images),
        devices=jax.devices(),  # as if of another machine: this one may have too little memory
    )
    state = jax.eval_shape(experiment.init)
    size = experiment.model.config.image_size
    batch = abstract_batch(experiment.mesh, config.batch_size, size)
    for update in experiment.updates.values():
        after, metrics = jax.eval_shape(update, state, batch)
        assert tree_names.named_leaves(after) == tree_names.named_leaves(state)
        assert metrics.sums['loss'].shape == ()


@pytest.mark.full
def test_the_study_of_vtab_runs_its_tasks_beside_the_papers_table_9():
    found = golden.module(golden.ROOT / 'configs/studies/vtab.py')
    means = {n: round(sum(row) / len(row), 1) for n, row in found.PUBLISHED.items() if row}
    assert means == {'L/16-in21k': 72.7, 'L/16-jft': 76.3, 'H/14-jft': 77.6}
    rows = (golden.ROOT / 'docs/vtab.md').read_text().splitlines()
    for number, (task, facts) in enumerate(TASKS.items()):
        parts, accuracies = (row for row in rows if row.startswith(f'| {task} |'))
        assert parts.startswith(f'| {task} | {facts.data} {facts.version} ')
        published = ' | '.join(f'{found.PUBLISHED[n][number]}' for n in means)
        assert accuracies == f'| {task} | {published} |'
    study = dataclasses.replace(found.get_config('L/16-in21k'), seeds=(0,))
    runs = {run.values['task']: run.config for run in planned_runs.plan_runs(study)}
    assert list(runs) == list(TASKS)
    for task, config in runs.items():
        alone = golden.config(f'configs/finetune/vtab.py:{task}')
        assert config == dataclasses.replace(alone, start_from='vit:L/16-in21k')
