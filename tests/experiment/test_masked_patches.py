"""A run that predicts masked patches, and what is done with its checkpoint."""

import dataclasses
import json

import chex
import jax
import numpy as np
import pytest

import vit_jax
from tests import tiny
from vit_jax.base import records
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.store import load_card, load_params
from vit_jax.config import EvalConfig
from vit_jax.evaluation.probing import FewshotConfig, ProbeSet
from vit_jax.experiment import probing_run, training_run
from vit_jax.experiment.build import build_experiment
from vit_jax.models import build
from vit_jax.training.duration import Duration
from vit_jax.training.losses import LossConfig
from vit_jax.training.objectives import MaskedPatches
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig

FEWSHOT = FewshotConfig(shots=(1,), seeds=(0,), sets={'digits': ProbeSet(test_split='test[:50]')})
MODEL = tiny.model(num_classes=None, patch_size=(2, 2), pool='gap')


def experiment(**changes):
    values = {'model': MODEL, 'objective': MaskedPatches(), 'optimizer': OptimizerConfig()}
    return tiny.experiment(**(values | changes))


def lines(folder):
    return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp('masked')
    config = experiment(
        total=Duration(steps=60),
        schedule=ScheduleConfig(learning_rate=1e-2, warmup=Duration(steps=5)),
        eval_every_steps=20,
        fewshot=FEWSHOT,
    )
    return training_run.train(config, str(folder))


@pytest.mark.gate
def test_the_objective_is_learned_and_measured_under_the_names_of_classification(trained):
    found = lines(trained.folder)
    losses = [line['loss'] for line in found if line['kind'] == 'test']
    assert losses[-1] < losses[0] < np.log(512)
    last = next(line for line in reversed(found) if line['kind'] == 'test')
    assert last['count'] == 50 and 0 < last['accuracy'] <= last['top5_accuracy'] <= 1
    card = records.from_dict(Card, load_card(str(trained.folder))[0], where='card')
    assert card.model == dataclasses.replace(MODEL, patch_outputs=512)
    assert card.class_names == () and card.loss is None
    assert {'loss', 'accuracy', 'top5_accuracy'} <= found[0].keys()
    assert trained.fewshot['sets']['digits']['mean']['1'] > 0.1


def stepped(devices=None, **changes):
    config = experiment(**changes)
    decided, state, update = tiny.compiled(config, devices=devices)
    rng = np.random.default_rng(0)
    batch = {
        'images': rng.integers(0, 256, (16, 8, 8, 3), np.uint8),
        'labels': np.zeros(16, np.int32),
        'mask': np.arange(16) != 3,
        'epoch': np.arange(16, dtype=np.int32) // 8,
        'example': np.arange(16, dtype=np.int32),
    }
    state, metrics = update(state, batch)
    return state.params, metrics.sums


@pytest.mark.nightly
def test_parts_of_a_batch_and_other_devices_corrupt_the_same_patches():
    rate = {
        'optimizer': OptimizerConfig(kind='sgd'),
        'schedule': ScheduleConfig(kind='constant', learning_rate=0.1),
    }
    params, sums = stepped(**rate)
    for changes in {'accumulation_steps': 2}, {'devices': jax.devices()[:1]}:
        others, again = stepped(**rate, **changes)
        chex.assert_trees_all_close(sums, again, rtol=1e-5)
        chex.assert_trees_all_close(params, others, rtol=1e-5, atol=1e-6)


@pytest.mark.gate
def test_it_is_fine_tuned_and_probed_like_any_other(trained, tmp_path, capsys):
    config = tiny.experiment(
        model=None,
        start_from=str(trained.folder),
        total=Duration(steps=1),
        schedule=ScheduleConfig(warmup=Duration(steps=1)),  # the first step has rate 0
    )
    tuned = training_run.train(config, str(tmp_path / 'tuned'))
    said = capsys.readouterr().out
    assert '21 of 21' in said and 'mask token' in said and '10 classes' in said
    old, new = load_params(str(trained.folder)), jax.tree.map(np.asarray, tuned.state.params)
    assert new.keys() == old.keys() - {'masked'} | {'head'}
    chex.assert_trees_all_equal(new['encoder'], old['encoder'])
    probe = tiny.experiment(model=None, total=None, start_from=str(trained.folder), fewshot=FEWSHOT)
    result, _ = probing_run.probe(probe, str(tmp_path / 'probe'))
    own = trained.fewshot['sets']['digits']['accuracy']
    assert result['sets']['digits']['accuracy'] == own


@pytest.mark.gate
def test_its_checkpoint_is_used_as_one_without_a_head(trained, tmp_path):
    loaded = vit_jax.load(str(trained.folder))
    assert 'patch_outputs=512, no head' in str(loaded)
    images = tiny.images()
    with pytest.raises(ValueError, match='head'):
        loaded.logits(images)
    expected = loaded.features(images)
    notes = vit_jax.save(loaded, tmp_path / 'vit.npz', format='google')
    assert any('mask token' in note for note in notes)
    elsewhere = vit_jax.load(tmp_path / 'vit.npz', num_heads=2)
    np.testing.assert_allclose(elsewhere.features(images), expected, rtol=1e-6)
    vit_jax.save(loaded, tmp_path / 'ours', format='vit_jax')
    assert vit_jax.load(tmp_path / 'ours') == loaded
    with_head = vit_jax.load(str(trained.folder), num_classes=3)
    assert build(with_head.config).apply(with_head.params, images).shape == (2, 3)


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'loss': LossConfig(kind='sigmoid')}, 'config.loss'),
        (
            {'evals': {'real': EvalConfig(labels='real.json')}, 'eval_split': 'test'},
            'config.evals.real.labels',
        ),
        ({'model': tiny.model()}, 'config.model.num_classes=10'),
    ],
)
def test_what_does_not_go_together_is_said(changes, message):
    with pytest.raises(ValueError, match=message):
        build_experiment(tiny.assigned(experiment(), **changes))
