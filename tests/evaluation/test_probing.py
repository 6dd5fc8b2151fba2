"""Several data sets, several probes, and features that are kept."""

import dataclasses
import json

import numpy as np
import pytest

from tests import tiny
from vit_jax.data.image_preprocessing import CentralCrop, Preprocessing
from vit_jax.data.loading import ImageReader
from vit_jax.data.sources import opening
from vit_jax.data.sources.arrays import array_source
from vit_jax.data.sources.base import select
from vit_jax.evaluation import features, probing
from vit_jax.evaluation.episodes import EpisodesConfig
from vit_jax.evaluation.probes import LogisticConfig
from vit_jax.evaluation.probing import FewshotConfig, ProbeSet
from vit_jax.experiment import probing_run, training_run

LOGISTIC = LogisticConfig(l2=(1.0, 100.0))
EPISODES = EpisodesConfig(shots=(1,), queries=2, episodes=20)


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp('trained')
    training_run.train(tiny.experiment(), str(folder))
    return str(folder)


def config(checkpoint, **changes):
    values = {'shots': (2,), 'seeds': (0,)} | changes
    return tiny.experiment(
        model=None, total=None, start_from=checkpoint, fewshot=FewshotConfig(**values)
    )


@pytest.mark.full
def test_every_set_has_its_result_and_one_that_is_missing_is_named(checkpoint, tmp_path, caplog):
    sets = {
        'first': ProbeSet(train_split='train[:300]', test_split='test[:50]'),
        'second': ProbeSet(data='digits', train_split='train[300:800]'),
        'gone': ProbeSet(data='/no/where'),
    }
    result, path = probing_run.probe(
        config(checkpoint, sets=sets, neighbours=5, logistic=LOGISTIC, episodes=EPISODES),
        str(tmp_path),
    )
    assert json.loads(path.read_text()) == json.loads(json.dumps(result))
    assert list(result['sets']) == ['first', 'second']
    assert result['sets']['first']['test_images'] == 50
    assert (
        caplog.text.count('left out: gone: data=') == 1
        and 'no such folder' in result['missing']['gone']
    )
    said = probing.summary(result)
    assert said.startswith('first: 2-shot') and '; second: 2-shot' in said
    kinds = '2_shot', '5_way_1_shot', 'knn', 'logistic'
    numbers = probing.numbers(result)
    assert {*numbers} == {
        f'{name}/{kind}_accuracy' for name in sets if name != 'gone' for kind in kinds
    }
    nearest = result['sets']['first']['nearest_neighbours']
    assert numbers['first/knn_accuracy'] == nearest['accuracy']
    assert ', 5-way 1-shot ' in said
    second = result['sets']['second']
    assert second['nearest_neighbours']['accuracy'] > 0.5 < second['logistic']['accuracy']


def test_shots_that_a_class_does_not_have_are_left_out_and_said():
    """Of 9 and 12 images a class: no 25 shots, in one line; features are read off the pixels."""
    labels = np.repeat([0, 1], [9, 12])
    images = np.broadcast_to((100 * labels)[:, None, None], (21, 8, 8)).astype(np.uint8)
    source = array_source(images, labels, ['few', 'many'], name='data')
    reader = ImageReader(source, Preprocessing().crop, (8, 8), exif_rotation=False)
    one = probing.Probe(reader, reader)
    config = FewshotConfig(shots=(1, 9, 10, 25), seeds=(0,), l2=(1.0, 1024.0))

    def evaluate(config):
        sets = probing.Probes(config, {'data': one}, {})
        return probing.evaluate(
            lambda reader, indices: images[indices, 0, :2].astype(np.float32), sets, Preprocessing()
        )

    result = evaluate(config)
    found = result['sets']['data']
    assert list(found['mean']) == ['1', '9'] and found['l2'] == [1.0, 1024.0]
    assert found['l2_chosen'].keys() == found['accuracy'].keys()
    assert {*found['l2_chosen'].values()} <= {1.0, 1024.0}
    said = probing.summary(result)
    assert said.endswith(
        "9-shot 100.00% +- 0.00%, class 'few' has 9 images, too few for 10-shot, 25-shot"
    )
    assert set(probing.numbers(result)) == {'1_shot_accuracy', '9_shot_accuracy'}
    for shots, note in {
        (12, 10): "class 'few' has 9 images, all used for 10-shot, too few for 12-shot",
        (10,): "class 'few' has 9 images, all used for 10-shot",
    }.items():
        found = evaluate(FewshotConfig(shots=shots, seeds=(0,)))['sets']['data']
        assert [*found['mean']] == ['10'] and found['notes'] == [note]


def test_episodes_have_the_l2_of_the_configuration():
    rng, labels = np.random.default_rng(0), np.repeat([0, 1, 2], 20)
    features = rng.normal(size=(60, 9)).astype(np.float32)
    source = array_source(np.zeros((60, 8, 8), np.uint8), labels, 'abc', name='data')
    reader = ImageReader(source, Preprocessing().crop, (8, 8), exif_rotation=False)
    one = probing.Probe(reader, reader)
    drawn = dataclasses.replace(EPISODES, ways=3, shots=(5,), classifier='ridge')

    def found(l2):
        fewshot = FewshotConfig(shots=(1,), seeds=(0,), l2=l2, episodes=drawn)
        sets = probing.Probes(fewshot, {'data': one}, {})
        result = probing.evaluate(lambda _, indices: features[indices], sets, Preprocessing())
        return result['sets']['data']['episodes']['accuracy']

    assert found(1e-3) != found(1024.0)


def test_the_outline_counts_the_classes_of_episodes_that_are_trained_on():
    labels = np.repeat([0, 1, 2, 3], [3, 3, 3, 2])  # too few of d
    source = array_source(np.zeros((11, 8, 8), np.uint8), labels, 'abcd', name='data')
    source = dataclasses.replace(source, data='data')
    reader = ImageReader(source, Preprocessing().crop, (8, 8), exif_rotation=False)
    one = {'data': probing.Probe(reader, reader)}

    def said(trained, *classes):
        drawn = dataclasses.replace(EPISODES, ways=2, classes=classes)
        fewshot = FewshotConfig(episodes=drawn)
        return probing.episodes_outline(probing.Probes(fewshot, one, {}), trained)

    line = 'episodes of data draw from 2 classes; training includes 1 of them'
    assert said('xab', 'a', 'c') == [line]
    assert said('abd')[0].endswith('3 classes; training includes 2 of them')
    assert said('') == ['episodes of data draw from 3 classes']


@pytest.mark.full
def test_where_no_set_is_there_it_is_an_error(checkpoint, tmp_path):
    sets = {'one': ProbeSet(data='/no/where'), 'other': ProbeSet(data='/not/here')}
    with pytest.raises(FileNotFoundError, match="data='/not/here'"):
        probing_run.probe(config(checkpoint, sets=sets), str(tmp_path))


@pytest.mark.full
def test_kept_features_give_the_same_results_and_are_checked(checkpoint, tmp_path, caplog):
    options, read = {'neighbours': 5, 'logistic': LOGISTIC}, []
    plain, _ = probing_run.probe(config(checkpoint, **options), str(tmp_path / 'plain'))
    options['feature_cache'] = str(tmp_path / 'cache')
    first, _ = probing_run.probe(config(checkpoint, **options), str(tmp_path / 'first'))
    again = config(checkpoint, **options)
    again.data = tiny.watched(read.append)
    second, _ = probing_run.probe(again, str(tmp_path / 'second'))
    assert first['sets'] == plain['sets'] and len(read) == 1438 + 359  # the bytes are compared
    (found,) = second['sets'].values()
    assert found['accuracy'] == plain['sets']['digits']['accuracy']
    kept = sorted((tmp_path / 'cache').glob('*.npz'))
    assert len(kept) == 2
    for damage in b'', kept[0].read_bytes()[:-500], bytes(len(kept[0].read_bytes())):
        kept[0].write_bytes(damage)
        third, _ = probing_run.probe(config(checkpoint, **options), str(tmp_path / 'third'))
        assert third['sets'] == plain['sets']
    data = bytearray(kept[0].read_bytes())
    data[len(data) // 2] ^= 1
    kept[0].write_bytes(data)
    third, _ = probing_run.probe(config(checkpoint, **options), str(tmp_path / 'third'))
    assert third['sets'] == plain['sets'] and caplog.text.count('computed anew') == 4


def test_features_of_a_damaged_file_are_computed_anew_wherever_it_is_damaged(tmp_path, caplog):
    source = array_source(np.zeros((2, 8, 8), np.uint8), np.arange(2), ['a', 'b'], name='x')
    reader = ImageReader(source, CentralCrop(), (8, 8), exif_rotation=False)
    numbers = np.random.default_rng(0).random((2, 9))
    kept = features.cached(lambda *_: numbers, tmp_path, 'network')
    kept(reader, np.arange(2))
    (path,) = tmp_path.glob('*.npz')
    np.savez_compressed(path, features=numbers)
    whole = path.read_bytes()
    for place in range(0, len(whole), 19):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        np.testing.assert_array_equal(kept(reader, np.arange(2)), numbers)
    assert 'zip' in caplog.text.lower() and 'Error -3 while decompressing' in caplog.text


@pytest.mark.full
def test_features_are_not_those_of_another_network_preparation_or_data(checkpoint, tmp_path):
    read = []
    cache = str(tmp_path / 'cache')

    def kept(**changes):
        changed = tiny.assigned(config(checkpoint, feature_cache=cache), **changes)
        changed.data = tiny.watched(read.append, changed.data)
        read.clear()
        probing_run.probe(changed, str(tmp_path / f'run{len(list(tmp_path.iterdir()))}'))
        return len(read) - everything  # the bytes that are compared

    everything = 1438 + 359
    assert kept() == everything and kept() == 0
    assert (
        kept(fewshot=FewshotConfig(shots=(2,), seeds=(0,), crop=CentralCrop(), feature_cache=cache))
        == everything
    )
    assert kept(image_size=(8, 16)) == everything
    other = str(tmp_path / 'other')
    training_run.train(tiny.experiment(seed=1), other)
    assert kept(start_from=other) == everything
    assert kept(data=_digits(tmp_path)) == everything and kept(data=_digits(tmp_path)) == 0
    assert kept(data=_digits(tmp_path, change=1)) == 1438  # one image changed under its name


def _digits(folder, change=0):
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = np.rint(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    pixels[700] ^= change
    arrays = {'train_images': pixels[:1438], 'train_labels': labels[:1438]}
    arrays |= {'test_images': pixels[1438:], 'test_labels': labels[1438:]}
    np.savez(folder / 'digits.npz', **arrays)
    return str(folder / 'digits.npz')


def test_the_crop_of_the_evaluation_is_told(checkpoint, tmp_path):
    squeezed = config(checkpoint)
    squeezed.fewshot.crop = CentralCrop(keep_aspect=False)
    result, _ = probing_run.probe(squeezed, str(tmp_path))
    crop = result['sets']['digits']['preprocessing']['crop']
    assert crop['kind'] == 'CentralCrop' and crop['keep_aspect'] is False


def test_probes_need_one_class_an_image(checkpoint, tmp_path):
    path = str(tmp_path / 'several.npz')
    images, labels = np.zeros((4, 8, 8), np.uint8), np.eye(4, 3, dtype=int)
    np.savez(path, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    with pytest.raises(ValueError, match='an image may have several classes; probes need one'):
        changed = tiny.assigned(config(checkpoint), data=path)
        probing_run.probe(changed, str(tmp_path / 'run'))


def some_unreadable(names, *, leave_out=False):
    """The digits, some images of which cannot be read, or are not there."""
    opened = opening.make_opener()

    def open_split(split):
        source = opened('digits', split)
        broken = [i for i in range(len(source)) if source.name_of(i) in names]
        if leave_out:
            return select(source, np.setdiff1d(np.arange(len(source)), broken))

        def read(index):
            if index in broken:
                raise FileNotFoundError(2, 'No such file or directory')
            return source.read(index)

        return dataclasses.replace(source, read=read)

    return open_split


@pytest.mark.full
def test_images_that_cannot_be_read_are_left_out_of_all_probes(checkpoint, tmp_path):
    names = 'digits/train[3]', 'digits/train[40]', 'digits/test[7]'
    options = {'neighbours': 5, 'logistic': LOGISTIC, 'feature_cache': str(tmp_path / 'cache')}
    broken = config(checkpoint, **options)
    broken.data = some_unreadable(names)
    with pytest.raises(ValueError, match=r'digits/test\[7\]: .*No such file'):
        probing_run.probe(broken, str(tmp_path / 'error'))
    broken.loader.on_unreadable = 'skip'
    results = [probing_run.probe(broken, str(tmp_path / f'{i}'))[0] for i in range(2)]
    without = config(checkpoint, **options)
    without.data = some_unreadable(names, leave_out=True)
    expected, _ = probing_run.probe(without, str(tmp_path / 'without'))
    (expected,) = expected['sets'].values()
    for result in results:  # the second from the cache
        (found,) = result['sets'].values()
        assert found['test_images'] == expected['test_images'] == 358
        for part in 'nearest_neighbours', 'logistic':
            assert found[part] == expected[part]
        assert found['notes'] == [
            '1 of 359 images cannot be read, left out: digits/test[7]',
            '2 of 1438 images cannot be read, left out: digits/train[3]',
        ]
    broken.fewshot = FewshotConfig(shots=(1000,), seeds=(0,))  # all of each class
    few, _ = probing_run.probe(broken, str(tmp_path / 'all'))
    (found,) = few['sets'].values()
    (drawn,) = found['train_images'].values()
    assert len(drawn) == 1436 and not {*names} & {*drawn}
