"""Whole runs: trained, killed, resumed, fine-tuned, probed."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import time
import types

import chex
import cv2
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tensorboardX.proto import event_pb2

import vit_jax
from tests import networks, tiny
from vit_jax.base import records
from vit_jax.base.errors import UserError
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.store import load_card, load_params
from vit_jax.config import EvalConfig
from vit_jax.data import loading, sampling
from vit_jax.data.augmentation import Augmentation, RandAugment
from vit_jax.data.image_preprocessing import InceptionCrop
from vit_jax.data.sources.folders import unlabeled_source
from vit_jax.data.sources.opening import make_opener
from vit_jax.data.sources.tfds import read_tfrecords
from vit_jax.distributed.meshes import MeshConfig
from vit_jax.distributed.processes import Interrupted
from vit_jax.evaluation import head, probes, probing
from vit_jax.evaluation.episodes import EpisodesConfig
from vit_jax.evaluation.evaluator import batches_on_all_devices
from vit_jax.evaluation.probing import FewshotConfig, ProbeSet
from vit_jax.experiment import probing_run, training_run
from vit_jax.experiment.build import build_experiment
from vit_jax.experiment.reporter import read_events
from vit_jax.models import Regularization
from vit_jax.studies import history
from vit_jax.training import loop
from vit_jax.training.duration import Duration
from vit_jax.training.loop import NotFiniteError
from vit_jax.training.losses import LossConfig
from vit_jax.training.metrics import Metric
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig

FEWSHOT = FewshotConfig(
    shots=(1, 2), seeds=(0, 1), sets={'digits': ProbeSet(test_split='test[:50]')}
)


def lines(folder):
    return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp('trained')
    config = tiny.experiment(fewshot=FEWSHOT, eval_every_steps=5, tensorboard=True)
    return training_run.train(config, str(folder))


@pytest.mark.gate
def test_a_run_leaves_its_numbers_its_configuration_and_a_card(trained):
    folder = trained.folder
    assert [(line['kind'], line['step']) for line in lines(folder)] == [
        ('train', 5),
        ('test', 5),
        ('train', 10),
        ('test', 10),
        ('fewshot', 10),
    ]
    assert lines(folder)[3]['count'] == 50
    assert lines(folder)[3]['accuracy'] == trained.evals['test']['accuracy']
    assert json.loads((folder / 'config.json').read_text())['total']['steps'] == 10
    assert list((folder / 'tensorboard').iterdir())
    values, path = load_card(str(folder))
    card = records.from_dict(Card, values, where='card')
    assert path == trained.checkpoint and card.step == 10
    assert card.class_names == tuple('0123456789') and card.grid == (2, 2)
    assert card.model == tiny.model()
    chex.assert_trees_all_equal(
        load_params(str(folder)), jax.tree.map(np.asarray, trained.state.params)
    )


@pytest.mark.gate
def test_the_few_shot_file_holds_the_whole_protocol(trained):
    whole = json.loads((trained.folder / 'fewshot.json').read_text())
    assert list(whole['sets']) == ['digits'] and whole['missing'] == {}
    result = whole['sets']['digits']
    assert result['layer'] == 'pre_logits' and result['l2'] == 1024.0
    assert result['seeds'] == [0, 1] and result['shots'] == [1, 2]
    assert result['preprocessing']['crop'] == {'kind': 'Resize', 'resize': 'bilinear'}
    drawn = result['train_images']['seed 1, 2 shots']
    assert len(set(drawn)) == 20 and all(name.startswith('digits/train[') for name in drawn)
    two = [result['accuracy'][f'seed {seed}, 2 shots'] for seed in (0, 1)]
    assert result['mean']['2'] == pytest.approx(np.mean(two))
    assert result['deviation']['2'] == pytest.approx(np.std(two, ddof=1))


@pytest.mark.gate
def test_probing_the_checkpoint_alone_gives_what_the_run_gave(trained, tmp_path):
    config = tiny.experiment(
        model=None, total=None, start_from=str(trained.folder), fewshot=FEWSHOT
    )
    result, path = probing_run.probe(config, str(tmp_path))
    found = json.loads(path.read_text())['sets']['digits']
    assert found['accuracy'] == trained.fewshot['sets']['digits']['accuracy']


def crash_at(number):
    def crash(heartbeat):
        if heartbeat == number:
            raise RuntimeError('the power is out')

    return tiny.WatchedJob(crash)


def without_speed(folder):
    """The lines of the metrics file, but for what differs at each run."""
    unlike = 'time', 'run', 'seconds', 'images_per_second'
    return [{k: v for k, v in line.items() if k not in unlike} for line in lines(folder)]


@pytest.mark.parametrize(
    'heartbeats',
    [
        # During the evaluation at step 5, and at step 8.
        pytest.param((6, 14), marks=pytest.mark.gate),
        # During the evaluation at step 5, during the same one after the restart, during the
        # few-shot evaluation, and at step 8.
        pytest.param((6, 1, 5, 14), marks=pytest.mark.nightly),
    ],
)
def test_ten_steps_are_five_and_crashes_and_five(heartbeats, tmp_path):
    config = tiny.experiment(
        checkpoint_every_steps=5,
        eval_every_steps=5,
        fewshot=dataclasses.replace(FEWSHOT, every_steps=5),
        log_every_steps=4,
        ema_decay=0.9,
        regularization=Regularization(dropout=0.1, stochastic_depth=0.1),
        augmentation=Augmentation(
            crop=InceptionCrop(),
            flip=True,
            mixup=0.5,
            cutmix=0.5,
            erasing=0.3,
            randaugment=RandAugment(layers=1),
        ),
        loader=loading.LoaderConfig(repeats=2, balance=0.5),
    )
    whole = training_run.train(config, str(tmp_path / 'whole'))
    for heartbeat in heartbeats:
        with pytest.raises(RuntimeError, match='the power'):
            training_run.train(config, str(tmp_path / 'parts'), job=crash_at(heartbeat))
    parts = training_run.train(config, str(tmp_path / 'parts'))
    chex.assert_trees_all_equal(parts.state, whole.state)
    assert without_speed(tmp_path / 'parts') == without_speed(tmp_path / 'whole')
    assert [(line['kind'], line['step']) for line in lines(tmp_path / 'parts')] == [
        *[('train', 4), ('test', 5), ('fewshot', 5)],
        *[('train', 8), ('train', 10), ('test', 10), ('fewshot', 10)],
    ]


@pytest.mark.gate
def test_the_first_steps_do_not_depend_on_the_length_of_the_run(tmp_path):
    """Batches and draws depend on seed and step alone; the schedule is constant."""

    def losses(steps):
        config = tiny.experiment(
            total=Duration(steps=steps),
            schedule=ScheduleConfig(kind='constant', learning_rate=1e-3),
            regularization=Regularization(dropout=0.1, patch_dropout=0.25),
            augmentation=Augmentation(mixup=0.2),
            log_every_steps=1,
        )
        folder = training_run.train(config, str(tmp_path / str(steps))).folder
        return [line['loss'] for line in lines(folder) if line['kind'] == 'train']

    assert losses(5)[:3] == losses(3)


DEEPER, MUON = tiny.model(num_classes=None, depth=4), OptimizerConfig(kind='muon')


@pytest.mark.parametrize(
    'changes, accept, name',
    [
        pytest.param({'seed': 3}, False, r'seed: 0 -> 3', marks=pytest.mark.gate),
        pytest.param({'total': Duration(steps=7)}, True, 'config.total', marks=pytest.mark.gate),
        pytest.param({'model': DEEPER}, True, 'config.model.depth: 3 -> 4', marks=pytest.mark.gate),
        pytest.param(
            {'ema_decay': 0.5}, True, 'config.ema_decay: None -> 0.5\\n', marks=pytest.mark.nightly
        ),
        pytest.param({'optimizer': MUON}, True, 'config.optimizer.kind', marks=pytest.mark.nightly),
    ],
)
def test_a_resume_that_does_not_fit_is_rejected_and_changes_nothing(trained, changes, accept, name):
    config = tiny.experiment(fewshot=FEWSHOT, eval_every_steps=5, tensorboard=True, **changes)
    before = (trained.folder / 'config.json').read_text()
    with pytest.raises(ValueError, match=name):
        training_run.train(config, str(trained.folder), accept_changes=accept)
    assert (trained.folder / 'config.json').read_text() == before


def board(folder):
    """The points that TensorBoard shows: a start replaces all points from its first step on."""
    points = dict[tuple[str, int], float]()
    for path in sorted((folder / 'tensorboard').iterdir()):
        checksums, read = read_tfrecords([path])
        for event in (event_pb2.Event.FromString(read(i)) for i in range(len(checksums))):
            if event.session_log.status == event_pb2.SessionLog.START:
                points = {key: x for key, x in points.items() if key[1] < event.step}
            points |= {(v.tag, event.step): v.simple_value for v in event.summary.value}
    return points


@pytest.mark.gate
def test_a_longer_run_keeps_every_line_of_the_steps_that_it_does_not_train_again(
    trained, tmp_path, capsys
):
    folder = pathlib.Path(shutil.copytree(trained.folder, tmp_path / 'run'))
    before, points, fewshot = lines(folder), board(folder), (folder / 'fewshot.json').read_text()
    options = {'fewshot': FEWSHOT, 'tensorboard': True, 'seed': 3}
    longer = tiny.experiment(**options, eval_every_steps=7, total=Duration(steps=12))
    result = training_run.train(longer, str(folder), accept_changes=True)
    assert lines(folder)[: len(before)] == before
    assert [(line['kind'], line['step']) for line in lines(folder)[len(before) :]] == [
        *(('train', 12), ('test', 12), ('fewshot', 12)),
    ]
    after = board(folder)
    assert {key: after[key] for key in points} == points and ('test/accuracy', 12) in after
    assert (folder / 'fewshot-10.json').read_text() == fewshot
    assert json.loads((folder / 'fewshot.json').read_text())['step'] == 12
    printed = capsys.readouterr().out
    (changed,) = (event for event in read_events(folder / 'events.jsonl') if 'changes' in event)
    assert changed['step'] == 10 and len(changed['changes']) == 2
    for change in 'seed: 0 -> 3', 'total.steps: 10 -> 12':
        assert change in changed['changes'] and f'from step 10: config.{change}' in printed
    assert [change for _, change in history.read_history(folder, '').changes] == changed['changes']
    again = training_run.train(longer, str(folder))  # complete: nothing is evaluated again
    assert (again.evals, again.fewshot) == (result.evals, result.fewshot)
    last = [event for event in read_events(folder / 'events.jsonl') if event['run'] == 3]
    assert last and not [event for event in last if 'evaluating' in event['event']]
    assert board(folder) == after


def test_what_few_shot_needs_is_looked_for_before_training(tmp_path):
    config = tiny.experiment(fewshot=FewshotConfig(sets={'x': ProbeSet(data='/no/where')}))
    with pytest.raises(FileNotFoundError, match='/no/where'):
        training_run.train(config, str(tmp_path))


@pytest.mark.gate
def test_an_interrupt_in_python_saves_as_the_program_does(tmp_path):
    earlier = signal.getsignal(signal.SIGINT)
    strike = tiny.WatchedJob(lambda beat: beat == 4 and os.kill(os.getpid(), signal.SIGINT))
    config = tiny.experiment(total=Duration(steps=8))
    with pytest.raises(Interrupted, match=r'stopped at step (\d); saved in') as stopped:
        training_run.train(config, str(tmp_path), job=strike)
    assert signal.getsignal(signal.SIGINT) is earlier
    step = int(re.search(r'step (\d)', str(stopped.value))[1])
    assert 0 < step < 8 and (tmp_path / 'checkpoints' / str(step)).is_dir()
    assert int(training_run.train(config, str(tmp_path)).state.step) == 8


@pytest.mark.nightly
def test_a_run_without_jit_trains_evaluates_and_saves(tmp_path):
    """Flax draws other initial parameters then, so the numbers differ."""
    config = tiny.experiment(total=Duration(steps=2), batch_size=8, eval_split='test[:8]')
    with jax.disable_jit():
        result = training_run.train(config, str(tmp_path))
    assert np.isfinite(result.evals['test']['loss'])
    assert [line['step'] for line in lines(tmp_path)] == [2, 2] and result.checkpoint.exists()


@pytest.mark.parametrize(
    'decay, steps, text',
    [
        (0.9999, 150, '98.5% initial parameters; set --config.ema_decay=0.98 or none'),
        (0.9999, 29_000, '5.5% initial .* --config.ema_decay=0.99989 or none'),
        (0.9, 1, '90.0% initial .* --config.ema_decay=0.04 or none'),
        (0.9999, 30_000, None),
        (0.0, 1, None),
        (None, 1, None),
    ],
)
def test_an_average_over_too_few_steps_is_announced(decay, steps, text, caplog):
    training_run.warn_of_short_average(decay, steps)
    assert [bool(re.search(text, line)) for line in caplog.messages] == ([True] if text else [])
    if text:
        better = float(re.search('ema_decay=([0-9.]*) or', caplog.text)[1])
        assert better**steps <= 0.05
        training_run.warn_of_short_average(better, steps)
        assert len(caplog.messages) == 1


@pytest.mark.gate
def test_nothing_is_compiled_after_the_first_evaluation(tmp_path):
    compiled, counts = [], []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: compiled.append(event) if 'backend_compile' in event else None
    )
    job = tiny.WatchedJob(lambda heartbeat: counts.append(len(compiled)))
    every = {'eval_every_steps': 2, 'checkpoint_every_steps': 2}  # orbax compiles slices, once
    model = tiny.model(num_classes=None, layer_norm_epsilon=3e-6)  # of no other test
    config = tiny.experiment(model=model, total=Duration(steps=12), fewshot=FEWSHOT, **every)
    config.fewshot.every_steps = 2
    training_run.train(config, str(tmp_path), job=job)
    assert counts[0] > 0  # the first step of 12
    half = len(counts) // 2
    assert counts[half] == counts[-1]  # after two evaluations of 50 images and of few-shot


@pytest.mark.gate
def test_a_loss_that_is_no_number_stops_the_run_and_names_the_last_good_checkpoint(tmp_path):
    config = tiny.experiment(
        optimizer=OptimizerConfig(kind='sgd'),
        schedule=ScheduleConfig(kind='linear', learning_rate=1e25, warmup=Duration(steps=4)),
        checkpoint_every_steps=1,
    )
    with pytest.raises(NotFiniteError, match=r'/checkpoints/\d'):
        training_run.train(config, str(tmp_path))
    params = load_params(str(tmp_path))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    assert history.read_history(tmp_path, '').event == 'diverged'  # which the report says


@pytest.mark.gate
def test_poisoned_batches_are_skipped_and_counted_and_training_goes_on(tmp_path):
    """Three updates with a gradient that is not finite, through the whole program."""
    order = sampling.shuffle(1438, seed=0)
    first = order(16 * np.array([3, 4, 7])).index  # examples of these batches

    def poisoned(key, batch):
        poison = jnp.isin(batch['example'][0], first)
        return batch | {'images': jnp.where(poison, jnp.nan, batch['images'].astype(float))}

    config = tiny.experiment(checkpoint_every_steps=5, max_skipped_steps=3, augmentation=poisoned)
    result = training_run.train(config, str(tmp_path))
    skipped = [line for line in lines(tmp_path) if line['kind'] == 'skipped']
    assert [line['step'] for line in skipped] == [4, 5, 8]
    assert [line['skipped'] for line in lines(tmp_path) if line['kind'] == 'train'] == [2, 1]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.state.params))
    config.max_skipped_steps = 2
    with pytest.raises(NotFiniteError, match='step 5: .*nan.*learning_rate.* none$'):
        training_run.train(config, str(tmp_path / 'again'))


@pytest.mark.gate
def test_loss_spikes_are_skipped_and_a_resumed_run_skips_the_same(tmp_path):
    """In two batches, the targets and thus the loss are ten times as large."""
    order = sampling.shuffle(1438, seed=0)
    first = order(16 * np.array([75, 85])).index

    def spiked(key, batch):
        factor = jnp.where(jnp.isin(batch['example'][0], first), 10.0, 1.0)
        return batch | {'labels': factor * jax.nn.one_hot(batch['labels'], 10)}

    def fail(tick):
        if tick == 74:
            raise RuntimeError('the host is gone')

    config = tiny.experiment(
        total=Duration(steps=90),
        checkpoint_every_steps=10,
        log_every_steps=30,
        augmentation=spiked,
        spike_deviations=6.0,
    )
    whole = training_run.train(config, str(tmp_path / 'whole'))
    skipped = [line for line in lines(tmp_path / 'whole') if line['kind'] == 'skipped']
    assert [line['step'] for line in skipped] == [76, 86]
    assert all(float(line['loss']) > 10 for line in skipped)
    with pytest.raises(RuntimeError, match='host'):
        training_run.train(config, str(tmp_path / 'run'), job=tiny.WatchedJob(fail))
    again = training_run.train(config, str(tmp_path / 'run'))
    assert [line['step'] for line in lines(tmp_path / 'run') if line['kind'] == 'skipped'] == [
        76,
        86,
    ]
    chex.assert_trees_all_equal(again.state.params, whole.state.params)


@pytest.mark.gate
def test_fine_tuning_begins_with_the_body_of_the_checkpoint(trained, tmp_path, capsys):
    config = tiny.experiment(
        model=None,
        image_size=(8, 16),
        start_from=str(trained.folder),
        optimizer=OptimizerConfig(kind='sgd'),
        total=Duration(steps=1),
        schedule=ScheduleConfig(warmup=Duration(steps=1)),  # the first step has rate 0
    )
    result = training_run.train(config, str(tmp_path))
    said = capsys.readouterr().out
    assert '22 of 22' in said and '10 classes' in said
    assert re.search('pos_embedding: .*2x2 to 2x4', said)
    old, new = load_params(str(trained.folder)), result.state.params
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, new['encoder']), old['encoder'])
    assert not new['head']['kernel'].any()
    card = records.from_dict(Card, load_card(str(tmp_path))[0], where='card')
    assert card.grid == (2, 4) and card.model.image_size == (8, 16)


@pytest.mark.gate
def test_predictions_at_step_0_are_those_of_the_probe(tmp_path, capsys):
    """LP-FT with a head from 200 images. The learning rate is 0."""
    start, workdir = str(tmp_path / 'start'), str(tmp_path / 'run')
    vit_jax.save(networks.loaded(tiny.model(num_classes=None)), start, 'vit_jax')
    config = tiny.experiment(
        model=None,
        start_from=start,
        init_head='logistic',
        train_split='train[:200]',
        augmentation=Augmentation(crop=InceptionCrop(), flip=True),
        ema_decay=0.5,
        mesh=MeshConfig(fsdp=2, fsdp_min_mb=0.0, max_replicated_fraction=1.0),
        schedule=ScheduleConfig(learning_rate=0.0),
    )
    result = training_run.train(config, workdir)
    state, metrics = jax.device_get(result.state), lines(result.folder)
    evaluated = {line['step']: line['accuracy'] for line in metrics if line['kind'] == 'test'}
    assert evaluated[0] == result.evals['test']['accuracy']
    assert 'head: logistic regression on 200 images' in capsys.readouterr().out
    body, source = vit_jax.load(start), make_opener()('digits', 'train[:200]')
    images = np.stack([body.preprocess(source.read(i)[0]) for i in range(200)])
    train = probes.Labeled(body.features(images), source.labels)
    probe, _ = probes.fit_best_logistic(train, probes.LogisticConfig())
    found = vit_jax.load(workdir).logits(images)
    scores = (train.features - probe.mean) @ probe.weights + probe.bias
    # Measured: logits of a fit that stopped at its tolerance differ by 0.043 from the optimum's.
    np.testing.assert_allclose(found, scores, rtol=0, atol=0.1)
    assert (found.argmax(axis=1) == probe.predict(train.features)).mean() >= 0.99
    chex.assert_trees_all_close(state.ema_params['head'], state.params['head'], rtol=1e-6)
    training_run.train(config, workdir)  # resumes
    assert 'head:' not in capsys.readouterr().out


def test_a_head_that_cannot_be_a_probe_is_rejected():
    reader = build_experiment(tiny.experiment(train_split='train[:9]')).train_reader
    for changes in {'pool': 'none'}, {'pool': 'cls_dist'}, {'head': nn.Dense}:
        with pytest.raises(UserError, match='config.init_head'):
            probing.check_init_head(tiny.model(**changes), reader.source, has_start=True)
    for changes in {'model': tiny.model()}, {'start_from': 'x', 'reuse_head': True}:
        with pytest.raises(UserError, match='init_head'):
            build_experiment(tiny.experiment(init_head='logistic', **changes))
    with pytest.raises(UserError, match="class '[0-9]'"):  # nine images cannot have ten classes
        probing.fit_head(lambda _, indices: np.ones((len(indices), 3)), reader)


@pytest.fixture
def photos(tmp_path):
    root = tmp_path / 'photos'
    rng = np.random.default_rng(0)
    for split, count in ('train', 8), ('test', 3):
        for name in 'cat', 'dog':
            for i in range(count):
                path = root / split / name / f'{i}.jpg'
                path.parent.mkdir(parents=True, exist_ok=True)
                cv2.imwrite(str(path), rng.integers(0, 256, (9 + i, 12, 3), np.uint8))
    return root


def folder_config(root, **changes):
    return tiny.experiment(data=str(root), eval_split='test', total=Duration(steps=3), **changes)


@pytest.mark.gate
@pytest.mark.parametrize('placement', ['device', 'host'])
def test_an_unreadable_image_stops_training_unless_it_may_be_skipped(photos, tmp_path, placement):
    broken = photos / 'train' / 'cat' / '3.jpg'
    broken.write_bytes(broken.read_bytes()[:50])
    config = folder_config(photos)
    config.loader.placement = placement
    with pytest.raises(ValueError, match=str(broken)):
        training_run.train(config, str(tmp_path / 'run'))
    config.loader.on_unreadable = 'skip'
    result = training_run.train(config, str(tmp_path / 'run'))
    # Each of 3 steps of 16 draws sees each of 16 images once.
    assert result.reporter.skipped_images == 3


def test_some_classes_are_trained_on_and_all_are_probed():
    fewshot = FewshotConfig(episodes=EpisodesConfig(classes=('9', '8', '3'), ways=2))
    experiment = build_experiment(tiny.experiment(classes=('8', '2', '7'), fewshot=fewshot))
    assert experiment.model.config.num_classes == 3
    for reader in [experiment.train_reader, *experiment.eval_readers.values()]:
        assert reader.source.class_names == ('8', '2', '7')
        assert set(reader.source.labels) == {0, 1, 2}
    assert set(experiment.probes.by_name['digits'].test.source.labels) == set(range(10))


@pytest.mark.gate
def test_what_is_kept_on_the_devices_is_read_before_anything_is_compiled(
    photos, tmp_path, monkeypatch
):
    def never(experiment):
        raise AssertionError('compiled')

    monkeypatch.setattr(training_run, 'abstract_state', never)
    for split in 'test', 'train':
        broken = photos / split / 'dog' / '1.jpg'
        broken.write_bytes(b'')
        with pytest.raises(ValueError, match=str(broken)):
            training_run.train(folder_config(photos), str(tmp_path / 'run'))


@pytest.mark.gate
@pytest.mark.parametrize('placement', ['host', 'device'])
def test_an_evaluation_that_may_skip_is_that_of_what_can_be_read(
    photos, tmp_path, placement, capsys, caplog
):
    broken = photos / 'test' / 'dog' / '1.jpg'
    config = folder_config(photos, eval_batch_size=8)
    config.loader.placement = placement
    broken.write_bytes(b'')
    config.loader.on_unreadable = 'skip'
    result = training_run.train(config, str(tmp_path / 'skips'))
    assert 'on 5 images, 1 ' in capsys.readouterr().out and str(broken) in caplog.text
    broken.unlink()
    without = training_run.train(config, str(tmp_path / 'without'))
    found, expected = lines(result.folder)[-1], lines(without.folder)[-1]
    assert found['count'] == expected['count'] == 5 and found.pop('unreadable') == 1
    assert 'unreadable' not in expected
    np.testing.assert_allclose(found['loss'], expected['loss'], rtol=1e-6)
    assert found['accuracy'] == expected['accuracy']


@pytest.mark.parametrize(
    'program, flag',
    [
        ('train', 'config.batch_size=64'),
        ('evaluations', 'config.eval_batch_size=64'),
        ('fewshot', 'config.eval_batch_size=64'),
        ('predict', '--batch_size=64'),
    ],
)
def test_a_batch_whose_images_do_not_fit_into_memory_is_rejected(
    tmp_path, monkeypatch, program, flag
):
    """Its pixels would, but one is read while another is used, and a CPU has numbers too."""
    memory = types.SimpleNamespace(total=64 * 8 * 8 * 3 * 5)
    monkeypatch.setattr(loading.psutil, 'virtual_memory', lambda: memory)
    size = {'batch_size': 64} if program == 'train' else {'eval_batch_size': 64}
    with pytest.raises(UserError, match=flag):
        if program == 'predict':
            loaded, source = networks.loaded(tiny.model()), make_opener()('digits', 'test')
            batches_on_all_devices(head.make_model_reader(loaded, source), 64)
        elif program == 'fewshot':
            vit_jax.save(networks.loaded(tiny.model()), tmp_path / 'x.npz')
            start = {'start_from': str(tmp_path / 'x.npz'), 'model': None, 'fewshot': FEWSHOT}
            probing_run.probe(tiny.experiment(**start, **size), str(tmp_path / 'run'))
        else:
            build_experiment(tiny.experiment(**size))


def test_with_accumulation_the_numbers_of_one_part_have_to_fit(monkeypatch):
    """Two copies of the pixels, and float32 numbers of one half: four copies."""
    memory = types.SimpleNamespace(total=64 * 8 * 8 * 3 * 5)
    monkeypatch.setattr(loading.psutil, 'virtual_memory', lambda: memory)
    build_experiment(tiny.experiment(batch_size=64, eval_batch_size=16, accumulation_steps=2))


def test_a_batch_of_few_images_to_predict_is_no_larger_than_they_are(photos):
    loaded = networks.loaded(tiny.model())
    reader = head.make_model_reader(loaded, unlabeled_source([str(photos)]))
    for size, rows in (8, 8), (10**6, 32):
        batches = batches_on_all_devices(reader, size).read(reader)
        assert len(next(batches)['images']) == rows


def test_a_run_that_lies_among_the_images_is_to_be_moved(photos):
    """Advice to remove it would cost a model."""
    for folder in photos / 'train', photos / 'train/run':
        (folder / 'checkpoints').mkdir(parents=True, exist_ok=True)
        (folder / 'events.jsonl').touch()
        with pytest.raises(UserError, match=f'{folder}.*move') as error:
            build_experiment(folder_config(photos / 'train'))
        assert 'remove' not in str(error.value)
        shutil.rmtree(folder / 'checkpoints')
        (folder / 'events.jsonl').unlink()


HALF = {'regularization': Regularization(patch_dropout=0.5)}
TOO_FEW_BLOCKS = tiny.assigned(OptimizerConfig(), trained_blocks=-1)


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'total': None}, 'config.total'),
        ({'total': Duration(steps=0)}, 'total.steps=0'),
        ({'model': None}, 'config.model'),
        ({'model': tiny.model(num_classes=7)}, 'num_classes=7'),
        ({'image_size': (3, 8)}, 'patch_size='),
        ({'batch_size': 21}, 'batch_size=21'),
        ({'batch_size': 8 * 10**10}, 'config.batch_size=80000000000'),
        ({'eval_batch_size': 8 * 10**10}, 'config.eval_batch_size=80000000000'),
        ({'accumulation_steps': 3}, 'batch_size=16 .* x 3'),
        ({'ema_decay': 1.5}, 'config.ema_decay=1.5'),
        ({'loader': loading.LoaderConfig(repeats=9)}, 'config.loader.repeats=9'),
        ({'loader': loading.LoaderConfig(repeats=7)}, 'config.loader.repeats=7.* 6'),
        (
            {'loader': loading.LoaderConfig(repeats=6), 'augmentation': Augmentation(mixup=0.1)},
            'config.loader.repeats=6.*MixUp',
        ),
        (HALF | {'patch_dropout_until': Duration(steps=0)}, 'config.patch_dropout_until'),
        (HALF | {'patch_dropout_until': Duration(steps=10)}, 'config.patch_dropout_until'),
        ({'init_head': 'logistic', 'loss': LossConfig(kind='sigmoid')}, 'config.init_head'),
        ({'seed': 'x'}, "config.seed='x'"),
        ({'keep_checkpoints': 0}, 'config.keep_checkpoints=0'),
        ({'evals': {'train': EvalConfig()}}, "config.evals: 'train'"),
        (
            {'schedule': ScheduleConfig(learning_rate=1e-3, warmup=Duration(steps=20))},
            'config.schedule.warmup',
        ),
        ({'classes': ('3', 'x')}, "classes: .*'x'"),
        ({'classes': ('3', '3')}, 'config.classes='),
        ({'optimizer': TOO_FEW_BLOCKS}, 'config.optimizer.trained_blocks=-1'),
        ({'augmentation': tiny.assigned(Augmentation(), mixup=-0.1)}, 'augmentation.mixup=-0.1'),
    ],
)
def test_values_that_do_not_fit_are_named_before_anything_is_written(changes, message, tmp_path):
    workdir = tmp_path / 'run'
    with pytest.raises(ValueError, match=message):
        training_run.train(tiny.assigned(tiny.experiment(), **changes), str(workdir))
    assert not workdir.exists()


def test_few_shot_alone_needs_a_checkpoint_and_a_protocol(tmp_path):
    with pytest.raises(ValueError, match='config.start_from'):
        probing_run.probe(tiny.experiment(fewshot=FEWSHOT), str(tmp_path))
    with pytest.raises(ValueError, match='config.fewshot'):
        probing_run.probe(tiny.experiment(start_from='x'), str(tmp_path))


@pytest.fixture
def several(tmp_path):
    """Images that may show a bright left half, a bright top, both or neither."""
    rng = np.random.default_rng(0)
    lines = []
    for i in range(240):
        left, top = rng.integers(0, 2, 2)
        image = rng.integers(0, 80, (8, 8, 3))
        image[:, :4, 0] += 150 * left
        image[:4, :, 1] += 150 * top
        cv2.imwrite(str(tmp_path / f'{i}.png'), image.astype(np.uint8)[..., ::-1])
        names = ['left'] * int(left) + ['top'] * int(top)
        lines.append(json.dumps({'path': f'{i}.png', 'labels': names}))
    (tmp_path / 'table.jsonl').write_text('\n'.join(lines))
    return str(tmp_path / 'table.jsonl')


@pytest.mark.gate
def test_images_of_several_classes_are_learned_and_measured(several, tmp_path):
    config = tiny.experiment(
        data=several,
        eval_split='test',
        total=Duration(epochs=20.0),
        loss=LossConfig(kind='sigmoid'),
        augmentation=Augmentation(mixup=0.2),
        optimizer=OptimizerConfig(),
        schedule=ScheduleConfig(learning_rate=3e-3, warmup=Duration(fraction=0.1)),
        model=tiny.model(num_classes=None, pool='gap'),
        metrics=(Metric(name='share', of_set=share_of_positives, labels='several'),),
    )
    result = training_run.train(config, str(tmp_path / 'run'))
    assert 0 < result.evals['test']['share'] < 1
    # By chance: the share of a class, 0.5.
    assert result.evals['test']['mean_average_precision'] > 0.95
    assert lines(result.folder)[-1]['mean_average_precision'] > 0.95
    config.loss.kind = 'softmax'
    with pytest.raises(ValueError, match='softmax'):
        training_run.train(config, str(tmp_path / 'other'))


def share_of_positives(logits, labels):
    return (logits > 0).mean()


def left_to_right(key, batch):
    return batch | {'images': batch['images'][:, :, ::-1]}


def focal(logits, targets):
    return optax.sigmoid_focal_loss(logits, targets).sum(axis=-1)


def two_layers(num_classes):
    return nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(num_classes)])


@pytest.mark.gate
def test_data_augmentation_loss_and_head_may_be_functions_of_ones_own(trained, tmp_path):
    """They are used, named in config.json, and what needs none of them uses the checkpoint."""
    read = []
    config = tiny.experiment(
        data=tiny.watched(read.append),
        augmentation=left_to_right,
        loss=focal,
        model=tiny.model(num_classes=None, head=two_layers),
        writers=(left_to_right,),
    )
    result = training_run.train(config, str(tmp_path / 'own'))
    assert read and not np.array_equal(
        result.state.params['embedding']['kernel'], trained.state.params['embedding']['kernel']
    )
    values = json.loads((tmp_path / 'own' / 'config.json').read_text())
    assert values['loss'] == {'function': f'{__name__}:focal'}
    assert values['writers'] == [values['augmentation']]
    assert values['augmentation'] == {'function': f'{__name__}:left_to_right'}
    assert values['model']['head'] == {'function': f'{__name__}:two_layers'}
    assert values['data']['function'].endswith('open_split')
    again = training_run.train(config, str(tmp_path / 'own'))  # a resume knows them by name
    assert again.evals == result.evals
    alone = tiny.experiment(
        model=None, start_from=str(tmp_path / 'own'), fewshot=FEWSHOT, total=Duration(steps=1)
    )
    assert 'digits' in probing_run.probe(alone, str(tmp_path / 'probe'))[0]['sets']
    with pytest.raises(UserError, match='two_layers'):
        vit_jax.load(str(tmp_path / 'own')).logits(np.zeros((1, 8, 8, 3), np.float32))


@pytest.mark.gate
def test_several_evaluations_in_one_run_each_with_its_own_labels(photos, tmp_path):
    """The second is on relabeled images: one has no label, and another has two."""
    names = [f'{name}/{i}.jpg' for name in ('cat', 'dog') for i in range(3)]
    labels = dict(zip(names, [[0], [0, 1], [], [1], [1], [0]], strict=True))
    (tmp_path / 'real.json').write_text(json.dumps(labels))
    config = tiny.experiment(
        data=str(photos),
        eval_split='test',
        total=Duration(steps=4),
        evals={
            'val': EvalConfig(every_steps=2),
            'real': EvalConfig(labels=str(tmp_path / 'real.json')),
            'seen': EvalConfig(split='train'),
        },
    )
    result = training_run.train(config, str(tmp_path / 'run'))
    assert list(result.evals) == ['val', 'real', 'seen']
    card = records.from_dict(Card, load_card(str(result.folder))[0], where='card')
    assert card.class_names == ('cat', 'dog') and card.model.num_classes == 2
    found = [(line['kind'], line['step'], line['count']) for line in lines(result.folder)]
    assert ('val', 2, 6) in found and ('val', 4, 6) in found
    assert ('real', 4, 5) in found and ('seen', 4, 16) in found
    assert np.isfinite(result.evals['real']['loss'])


def test_waiting_for_a_device_is_no_wait_for_data(monkeypatch, tmp_path):
    """Gathering a batch from the devices takes 1,000 seconds by a clock of the test."""
    late = 0.0
    gather = loading._gather

    def gather_late(*arguments):
        nonlocal late
        late += 1000.0
        return gather(*arguments)

    monkeypatch.setattr(loading, '_gather', gather_late)
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + late)
    monkeypatch.setattr(loop, 'time', clock)
    loader = loading.LoaderConfig(placement='device')
    config = tiny.experiment(loader=loader, total=Duration(steps=2))
    seconds = training_run.train(config, str(tmp_path / 'run')).reporter.clock.seconds
    assert seconds['data wait'] < 1000 and seconds['step'] >= 2000
