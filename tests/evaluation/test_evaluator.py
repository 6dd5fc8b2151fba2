"""The evaluator: each image counts once, and training and `evaluate` report the same numbers."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from tests import tiny
from vit_jax.base import UserError
from vit_jax.config import EvalConfig, TrainConfig
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.data.loading import make_reader
from vit_jax.data.sources.arrays import array_source
from vit_jax.data.sources.opening import make_opener
from vit_jax.evaluation import features, head
from vit_jax.evaluation.evaluator import (
    batches_on_all_devices,
    find_eval_interval,
    make_evaluator,
)
from vit_jax.experiment import training_run
from vit_jax.training.duration import Duration, make_train_length
from vit_jax.training.losses import (
    LossConfig,
    make_loss,
    make_targets,
    sum_examples,
    with_scaled_targets,
)

VALUES = np.arange(1, 51, dtype=np.uint8)  # the pixels of each image
IMAGES = np.broadcast_to(VALUES[:, None, None], (50, 8, 8))
SOURCE = array_source(IMAGES, np.arange(50) % 3, 'abc', name='data')


def reader_of(source, **options):
    return make_reader(source, Preprocessing(), (8, 8), **options)


def pixel_sums(params, batch):
    pixels = batch['images'][:, 0, 0, 0].astype(jnp.float32)
    values = {'pixel': params['scale'] * pixels, 'label': batch['labels'].astype(jnp.float32)}
    return sum_examples(values, batch['mask'], {'pixels': pixels})


def with_unreadable(source, *broken):
    def read(index):
        if index in broken:
            raise FileNotFoundError(2, 'No such file or directory')
        return source.read(index)

    return dataclasses.replace(source, read=read)


def with_loads(reader, change):
    """An evaluator of `pixel_sums` whose loader changes what it has loaded."""
    batches = batches_on_all_devices(reader, 8)
    loader = batches.make_loader(reader)
    changed = dataclasses.replace(loader, load=lambda refs: change(loader.load(refs)))
    return make_evaluator(pixel_sums, batches._replace(make_loader=lambda _: changed))


@pytest.mark.parametrize('count', [1, 7, 50])
def test_means_are_over_images_whatever_the_batches(count):
    reader = reader_of(SOURCE)
    measure = make_evaluator(pixel_sums, batches_on_all_devices(reader, 8))
    indices = np.random.default_rng(0).permutation(50)[:count]
    found = measure.evaluate({'scale': 2.0}, reader, indices)
    assert found.metrics['pixel'] == pytest.approx(2 * VALUES[indices].mean())
    assert found.metrics['label'] == pytest.approx(SOURCE.labels[indices].mean())
    np.testing.assert_array_equal(found.outputs['pixels'], VALUES[indices])
    assert found.num_images == count and found.readable.all()


def test_unreadable_images_are_left_out_if_the_reader_skips_them():
    reader = reader_of(with_unreadable(SOURCE, 3, 49), on_unreadable='skip')
    measure = make_evaluator(pixel_sums, batches_on_all_devices(reader, 8))
    found = measure.evaluate({'scale': 1.0}, reader)
    assert found.metrics['pixel'] == pytest.approx(np.delete(VALUES, [3, 49]).mean())
    assert np.flatnonzero(~found.readable).tolist() == [3, 49] and found.num_images == 48
    reader = reader_of(with_unreadable(SOURCE, *range(50)), on_unreadable='skip')
    measure = make_evaluator(pixel_sums, batches_on_all_devices(reader, 8))
    with pytest.raises(UserError, match='50 images'):
        measure.evaluate({'scale': 1.0}, reader)


def test_an_image_that_is_lost_or_counted_twice_is_an_error():
    reader = reader_of(SOURCE)
    lost = with_loads(
        reader, lambda batch: batch | {'mask': batch['mask'] & (batch['example'] > 0)}
    )
    with pytest.raises(AssertionError, match='49 .* 50'):
        lost.evaluate({'scale': 1.0}, reader)
    for on_unreadable in 'error', 'skip':
        reader = reader_of(SOURCE, on_unreadable=on_unreadable)
        twice = with_loads(reader, lambda batch: batch | {'mask': np.ones_like(batch['mask'])})
        with pytest.raises(AssertionError, match='of 50'):
            twice.evaluate({'scale': 1.0}, reader)


def test_evaluators_of_equal_shapes_compute_their_own_function():
    reader = reader_of(SOURCE)
    batches = batches_on_all_devices(reader, 8)

    def doubled(params, batch):
        return pixel_sums({'scale': 2 * params['scale']}, batch)

    params = {'scale': jax.ShapeDtypeStruct((), jnp.float32)}
    one, two = (make_evaluator(f, batches).compile(params, reader) for f in (pixel_sums, doubled))
    params = {'scale': jnp.float32(1)}
    mean = one.evaluate(params, reader).metrics['pixel']
    assert two.evaluate(params, reader).metrics['pixel'] == pytest.approx(2 * mean)


def log_softmax(logits):
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@pytest.mark.gate
def test_training_and_evaluate_report_what_the_logits_give(tmp_path):
    """Of one evaluation with the labels of the data, and one that has other labels."""
    opened = make_opener()
    labels = opened('digits', 'test').labels
    real = {f'digits/test[{i}]': [int(y), int(y + 1) % 10] for i, y in enumerate(labels)}
    (tmp_path / 'real.json').write_text(json.dumps(real))
    config = tiny.experiment(
        model=tiny.model(num_classes=None, depth=1),
        total=Duration(steps=3),
        eval_split=TrainConfig.eval_split,
        evals={
            'own': EvalConfig(split='test[:50]'),
            'real': EvalConfig(split='test[:50]', labels=str(tmp_path / 'real.json')),
        },
    )
    reported = training_run.train(config, str(tmp_path / 'run')).evals
    trained = vit_jax.load(tmp_path / 'run')
    source = opened('digits', 'test[:50]')
    logits = trained.logits(np.stack([trained.preprocess(source.read(i)[0]) for i in range(50)]))
    targets = {'own': np.eye(10)[labels[:50]]}
    targets['real'] = np.eye(10)[labels[:50]] + np.eye(10)[(labels[:50] + 1) % 10]
    for name, right in targets.items():
        shares = right / right.sum(axis=1, keepdims=True)
        expected = {
            'accuracy': right[np.arange(50), logits.argmax(axis=1)].mean(),
            'loss': -(shares * log_softmax(logits)).sum(axis=1).mean(),
        }
        path = None if name == 'own' else str(tmp_path / 'real.json')
        reader = head.make_model_reader(trained, opened('digits', 'test[:50]', path))
        measured = head.evaluate_head(trained, reader, batch_size=16, relabeled=name == 'real')
        for means in reported[name], measured.metrics:
            assert means['accuracy'] == pytest.approx(expected['accuracy'])
            assert means['loss'] == pytest.approx(expected['loss'], rel=1e-6)
        assert reported[name] == measured.metrics
    assert reported['own']['loss'] != reported['real']['loss']


@pytest.mark.gate
def test_features_are_those_of_the_model_and_nan_if_unreadable():
    network = vit_jax.load('tests/reference/families/siglip_hf_linear', image_size=(8, 8))
    reader = make_reader(
        with_unreadable(SOURCE, 9), network.preprocessing, (8, 8), on_unreadable='skip'
    )
    extract = features.make_feature_evaluator(
        network.model, network.preprocessing, batches_on_all_devices(reader, 8)
    )
    indices = np.array([4, 9, 2])
    found = features.make_feature_function(extract, network.params)(reader, indices)
    images = np.stack([network.preprocess(SOURCE.read(i)[0]) for i in (4, 2)])
    np.testing.assert_allclose(found[[0, 2]], network.features(images), rtol=1e-5, atol=1e-5)
    assert np.isnan(found[1]).all()
    broken = jax.tree.map(lambda leaf: np.full_like(leaf, np.inf), network.params)
    with pytest.raises(UserError, match=r'data\[4\]'):
        features.make_feature_function(extract, broken)(reader, indices)


def test_evaluations_are_about_ten_and_of_at_most_a_fifth_as_many_images_as_are_trained_on():
    length = make_train_length(Duration(steps=300), batch_size=32, num_images=1000)
    found = [find_eval_interval(length, None, images) for images in (48, 480, 50_000)]
    assert found == [30, 75, 300]  # 10 * 48 and 4 * 480 are below 1,920; then only at the end
    assert find_eval_interval(length, 7, 50_000) == 7
    uneven = make_train_length(Duration(steps=25), batch_size=480, num_images=480)
    assert find_eval_interval(uneven, None, 48) == 3  # nine evaluations; 2 would be thirteen


def test_where_any_class_is_right_an_image_without_one_is_still_a_number():
    logits = jnp.array([[2.0, -1.0, 0.5], [0.0, 0.0, 0.0]])
    labels = jnp.array([[1, 1, 0], [0, 0, 0]])
    found = with_scaled_targets(make_loss(LossConfig()))(logits, make_targets(labels, 3))
    logs = logits[0] - np.log(np.exp(logits[0]).sum())
    np.testing.assert_allclose(found, [-(logs[0] + logs[1]) / 2, 0], rtol=1e-6)
