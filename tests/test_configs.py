"""Every file in configs/: its header, its values, and one traced update; nothing is computed."""

import ast
import dataclasses
import pathlib

import jax
import pytest

from tests import golden, tiny
from vit_jax.base import records, tree_names
from vit_jax.config import TrainConfig
from vit_jax.data.loading import abstract_batch
from vit_jax.data.sources.vtab import TASKS
from vit_jax.experiment.build import build_experiment
from vit_jax.models import ViTConfig
from vit_jax.planning.memory_plan import without_data
from vit_jax.studies import planned_runs

ROOT = pathlib.Path(__file__).parent.parent
RUNS = [
    (path, argument)
    for path in golden.FILES
    for argument in golden.arguments(path)
    if isinstance(golden.config(path, argument), TrainConfig)  # others: tests/studies/
]
IMAGES = {'JFT-300M': 303_000_000, 'tfds:imagenet21k': 12_743_321}  # else ImageNet's


def name(path):
    return str(path.relative_to(ROOT)) if isinstance(path, pathlib.Path) else path


@pytest.mark.parametrize('path', golden.FILES, ids=name)
def test_a_config_says_where_it_is_from_and_how_it_is_run(path):
    header = ast.get_docstring(ast.parse(path.read_text()))
    assert f'--config={path.relative_to(ROOT)}' in header
    if path.parent.name in ('pretrain', 'finetune') and path.stem not in ('cifar10', 'transfer'):
        assert all(word in header for word in ('Paper:', 'Result', 'Cost'))


@pytest.mark.parametrize('path', golden.FILES, ids=name)
def test_a_changed_default_is_seen(path):
    message = 'look at what changed; if it was meant: python -m tests.golden'
    assert golden.golden(path).read_text() == golden.text(path), message


def test_no_golden_text_outlives_its_config():
    assert set(golden.TEXTS.glob('*.txt')) == {golden.golden(path) for path in golden.FILES}


QUICK = ('configs/quickstart.py', None), ('configs/pretrain/vit.py', 'jft,B/16')


def some_alone(path, argument):
    """Two of them in the quick run: the others differ in values, which the golden texts have."""
    others = (name(path), argument) not in QUICK
    return pytest.param(path, argument, marks=[pytest.mark.full] * others)


@pytest.mark.parametrize('path, argument', [some_alone(*run) for run in RUNS], ids=name)
def test_a_config_fits_together(path, argument):
    """Its first state and one update are traced, for eight devices."""
    config = golden.config(path, argument)
    config.start_from = config.start_from or 'some/checkpoint'
    config = records.checked(config, where='config')
    assert records.from_dict(TrainConfig, records.to_dict(config), where='c') == config
    if config.total is None:
        return
    if config.model is None:
        patch = 14 if config.image_size == (518, 518) else 16
        size = config.image_size or (32, 32)
        config.model = tiny.model(num_classes=None, image_size=size, patch_size=(patch, patch))
    if (backbone := config.model.backbone) is not None:  # units of a stage are alike
        blocks = (1,) * len(backbone.blocks)
        config.model.backbone = dataclasses.replace(backbone, blocks=blocks)
    images = IMAGES.get(config.data, 1_281_167)
    experiment = build_experiment(
        without_data(config, num_classes=1000, num_images=images),
        devices=jax.devices(),  # as if of another machine: this one may have too little memory
    )
    state = jax.eval_shape(experiment.init)
    size = experiment.model.config.image_size
    batch = abstract_batch(experiment.mesh, config.batch_size, size)
    after, metrics = jax.eval_shape(experiment.update, state, batch)
    assert tree_names.named_leaves(after) == tree_names.named_leaves(state)
    assert metrics.sums['loss'].shape == ()


def test_every_row_of_table_3_is_there():
    path = ROOT / 'configs/pretrain/vit.py'
    rows = {'jft': 16, 'imagenet21k': 6, 'imagenet': 4}
    counts = dict.fromkeys(rows, 0)
    for row in golden.arguments(path):
        config = golden.config(path, row)
        counts[row.split(',')[0]] += 1
        assert config.batch_size == 4096 and config.schedule.warmup.steps == 10_000
        assert config.optimizer.kind == 'adamw' and config.model.image_size == (224, 224)
        if isinstance(config.model, ViTConfig):
            assert config.model.representation_size == config.model.width
    assert counts == rows


@pytest.mark.parametrize('num_images', [20, 226, 344, 1_000])
def test_a_small_folder_is_not_trained_in_silence(num_images):
    config = golden.config(ROOT / 'configs/finetune/folder.py', None)
    config.model = tiny.model(num_classes=None)
    length = build_experiment(without_data(config, num_classes=6, num_images=num_images)).length
    intervals = (
        length.log_interval(config.log_every_steps),
        length.interval(config.eval_every_steps),
    )
    one = config.batch_size  # an epoch is rounded to steps
    assert max(intervals) * one <= max(num_images, one) + one / 2


@pytest.mark.full
def test_the_study_of_vtab_runs_its_tasks_beside_the_papers_table_9():
    found = golden.module(ROOT / 'configs/studies/vtab.py')
    means = {n: round(sum(row) / len(row), 1) for n, row in found.PUBLISHED.items() if row}
    assert means == {'L/16-in21k': 72.7, 'L/16-jft': 76.3, 'H/14-jft': 77.6}
    rows = (ROOT / 'docs/vtab.md').read_text().splitlines()
    for number, (task, facts) in enumerate(TASKS.items()):
        parts, accuracies = (row for row in rows if row.startswith(f'| {task} |'))
        assert parts.startswith(f'| {task} | {facts.data} {facts.version} ')
        published = ' | '.join(f'{found.PUBLISHED[n][number]}' for n in means)
        assert accuracies == f'| {task} | {published} |'
    study = dataclasses.replace(found.get_config('L/16-in21k'), seeds=(0,))
    runs = {run.values['task']: run.config for run in planned_runs.planned(study)}
    assert list(runs) == list(TASKS)
    for task, config in runs.items():
        alone = golden.config(ROOT / 'configs/finetune/vtab.py', task)
        assert config == dataclasses.replace(alone, start_from='vit:L/16-in21k')
