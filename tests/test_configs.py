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

DEVICES = 8
RUNS = [name for name in golden.NAMES if name not in golden.STUDIES]


@pytest.mark.parametrize('path', golden.FILES, ids=lambda path: path.stem)
def test_a_config_says_how_it_is_run(path):
    header = ast.get_docstring(ast.parse(path.read_text()))
    assert f'--config={path.relative_to(golden.ROOT)}' in header


def test_a_changed_value_is_seen():
    """python -m tests.golden NAME shows the change; python -m tests.golden accepts it."""
    assert golden.hashes() == golden.HASHES.read_text().splitlines()


def test_each_configuration_is_valid_and_survives_json():
    for name in RUNS:
        config = golden.config(name)
        config.start_from = config.start_from or 'some/checkpoint'
        config = records.validate_copy(config, where=name)
        assert records.from_dict(TrainConfig, records.to_dict(config), where=name) == config


def file_of(name):
    return name.partition(':')[0]


TRAINED = [name for name in RUNS if not name.startswith('configs/fewshot/')]
FIRST = {file_of(name): name for name in reversed(TRAINED)}  # the first one of each file
QUICK = 'configs/quickstart.py', 'configs/pretrain/vit.py'
assert {*QUICK} <= {*FIRST}


@pytest.mark.parametrize(
    'file', [f if f in QUICK else pytest.param(f, marks=pytest.mark.gate) for f in sorted(FIRST)]
)
def test_the_first_update_of_the_first_configuration_of_a_file_is_traced(file):
    trace_updates(FIRST[file], most=1)


@pytest.mark.nightly
@pytest.mark.parametrize('file', sorted(FIRST))
def test_the_updates_of_each_program_of_a_file_are_traced(file):
    seen = set()
    for name in TRAINED:
        if file_of(name) == file and built(name).functions not in seen:
            seen.add(built(name).functions)
            print(name)  # if the test fails, pytest shows this name
            trace_updates(name)


def built(name):
    """The experiment of a configuration, for eight devices."""
    config = golden.config(name)
    config.start_from = config.start_from or 'some/checkpoint'
    config = golden.small(records.validate_copy(config, where=name))
    images = golden.num_images(config.data)
    return build_experiment(
        with_dummy_data(config, num_classes=1000, num_images=images),
        devices=jax.devices(),  # as if of another machine: this one may have too little memory
    )


def trace_updates(name, most=None):
    """Traces the first state and the variants of the update, or the first ones."""
    experiment = built(name)
    config, functions = experiment.config, experiment.functions
    state = jax.eval_shape(functions.init, experiment.values)
    size = experiment.model.config.image_size
    batch = abstract_batch(experiment.mesh, config.batch_size, size)
    for kind in config.step_variants[:most]:
        after, metrics = jax.eval_shape(functions.update(kind), state, batch, experiment.values)
        assert tree_names.named_leaves(after) == tree_names.named_leaves(state), name
        assert metrics.sums['loss'].shape == (), name


def test_the_study_of_vtab_runs_the_configurations_of_its_tasks():
    """With the numbers of the ViT paper's table 9, whose means the paper states."""
    found = golden.module(golden.ROOT / 'configs/studies/vtab.py')
    means = {n: round(sum(row) / len(row), 1) for n, row in found.PUBLISHED.items() if row}
    assert means == {'L/16-in21k': 72.7, 'L/16-jft': 76.3, 'H/14-jft': 77.6}
    study = dataclasses.replace(found.get_config('L/16-in21k'), seeds=(0,))
    runs = {run.values['task']: run.config for run in planned_runs.plan_runs(study)}
    assert list(runs) == list(TASKS)
    for task, config in runs.items():
        alone = golden.config(f'configs/finetune/vtab.py:{task}')
        assert config == dataclasses.replace(alone, start_from='vit:L/16-in21k')
