"""Several data sets, several probes, and features that are kept."""

import dataclasses
import json
import re

import numpy as np
import pytest

import vit_jax
from tests import networks, tiny
from vit_jax.base import UserError
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.data.loading import ImageReader
from vit_jax.data.sources.arrays import array_source
from vit_jax.evaluation import probing
from vit_jax.evaluation.episodes import EpisodesConfig
from vit_jax.evaluation.linear_probe import LinearProbeConfig
from vit_jax.evaluation.probes import LogisticConfig
from vit_jax.evaluation.probing import FewshotConfig, ProbeSet
from vit_jax.experiment import probing_run

LOGISTIC = LogisticConfig(l2=(1.0, 100.0))
EPISODES = EpisodesConfig(shots=(1,), queries=2, episodes=20)


def make_reader(source):
    return ImageReader(source, Preprocessing().crop, (8, 8), exif_rotation=False)


def labeled(images, labels, name='data'):
    return dataclasses.replace(array_source(images, labels, 'abc', name=name), data=name)


def pixels_of(reader, indices):
    """Two pixels of each image as its features."""
    rows = [reader.source.read(int(i))[0][0, :2] for i in indices]
    return np.array(rows).astype(np.float32)


def evaluate(source, features_of=pixels_of, test=None, **values):
    one = probing.Probe(make_reader(source), make_reader(test or source))
    probes = probing.Probes(FewshotConfig(**{'seeds': (0,)} | values), {'data': one}, {})
    return probing.evaluate(features_of, probes, Preprocessing())


@pytest.mark.gate
def test_every_set_has_its_result_and_one_that_is_missing_is_named(tmp_path, caplog):
    sets = {
        'first': ProbeSet(train_split='train[:300]', test_split='test[:50]'),
        'second': ProbeSet(data='digits', train_split='train[300:800]'),
        'gone': ProbeSet(data='/no/where'),
    }
    vit_jax.save(networks.loaded(tiny.model()), tmp_path / 'x.npz')
    config = tiny.experiment(model=None, total=None, start_from=str(tmp_path / 'x.npz'))
    config.fewshot = FewshotConfig(
        sets=sets,
        shots=(2,),
        neighbors=(5, 10),
        logistic=LOGISTIC,
        linear_probe=LinearProbeConfig(blocks=(1, 3), steps=5, batch_size=16),
        episodes=EPISODES,
    )
    result, path = probing_run.probe(config, str(tmp_path / 'run'))
    assert json.loads(path.read_text()) == json.loads(json.dumps(result))
    assert result['sets']['first']['test_images'] == 50
    assert result['missing'].keys() == {'gone'} and caplog.text.count('gone') == 1
    kinds = '2_shot', '5_way_1_shot', 'knn_5', 'knn_10', 'logistic', 'linear_probe'
    numbers = probing.name_accuracies(result)
    assert {*numbers} == {f'{name}/{k}_accuracy' for name in ('first', 'second') for k in kinds}
    first = result['sets']['first']
    assert numbers['first/knn_5_accuracy'] == first['knn']['accuracy'][5]
    assert first['linear_probe']['validation_images'] == 30
    assert f'({first["linear_probe"]["chosen"]})' in probing.summarize(result)
    assert ', 5-way 1-shot ' in probing.summarize(result)
    config.fewshot.sets = {'gone': sets['gone']}
    with pytest.raises(FileNotFoundError, match='/no/where'):
        probing_run.probe(config, str(tmp_path / 'gone'))


def test_shots_that_a_class_does_not_have_are_left_out_and_named():
    """Of 9 and 12 images a class: no 25 shots, in one line."""
    labels = np.repeat([0, 1], [9, 12])
    images = np.broadcast_to((100 * labels)[:, None, None], (21, 8, 8)).astype(np.uint8)
    source = array_source(images, labels, ['few', 'many'], name='data')
    result = evaluate(source, shots=(1, 9, 10, 25), l2=64.0)
    found = result['sets']['data']
    assert list(found['mean']) == ['1', '9'] and found['l2'] == 64
    assert re.search("'few' .* 9 .* 10-shot is skipped, 25-shot is", probing.summarize(result))
    assert {*probing.name_accuracies(result)} == {'1_shot_accuracy', '9_shot_accuracy'}
    (found,) = evaluate(source, shots=(12, 10))['sets'].values()
    assert [*found['mean']] == ['10'] and '10-shot' in found['notes'][0]
    (found,) = evaluate(source, neighbors=(4, 21, 22), shots=(1,))['sets'].values()
    assert [*found['knn']['accuracy']] == [4, 21] and 'knn 22 is skipped' in found['notes'][0]
    (found,) = evaluate(source, neighbors=(22,), shots=(1,))['sets'].values()
    assert not found['knn']['accuracy'] and 'knn 22 is skipped' in found['notes'][0]


RNG = np.random.default_rng(0)
IMAGES, LABELS = RNG.integers(0, 256, (60, 8, 8), np.uint8), np.repeat([0, 1, 2], 20)


@pytest.mark.gate
def test_options_reach_the_probes_and_a_fit_that_was_stopped_is_noted():
    source, drawn = labeled(IMAGES, LABELS), dataclasses.replace(EPISODES, classifier='ridge')
    drawn = dataclasses.replace(drawn, ways=3, shots=(5,))
    found = [
        evaluate(source, shots=(1,), l2=l2, episodes=drawn)['sets']['data']['episodes']['accuracy']
        for l2 in (1e-3, 1024.0)
    ]
    assert found[0] != found[1]
    for iterations, count in (2, 1), (500, 0):
        logistic = LogisticConfig(l2=(1.0,), max_iterations=iterations)
        (result,) = evaluate(source, shots=(1,), logistic=logistic)['sets'].values()
        assert len(result['notes']) == count and result['logistic']['converged'] == (count == 0)


@pytest.mark.gate
def test_images_that_cannot_be_read_are_left_out_of_all_probes():
    broken, whole = [3, 40], np.delete(np.arange(60), [3, 40])
    source, rest = (labeled(IMAGES[i], LABELS[i]) for i in (np.arange(60), whole))

    def features_of(reader, indices):
        features = pixels_of(reader, indices)
        features[np.isin(indices, broken) & (len(reader.source) == 60)] = np.nan
        return features

    options = {'neighbors': (5,), 'logistic': LOGISTIC, 'shots': (1000,)}
    (found,) = evaluate(source, features_of, **options)['sets'].values()
    (expected,) = evaluate(rest, **options)['sets'].values()
    for part in 'test_images', 'knn', 'logistic', 'mean':
        assert found[part] == expected[part]
    assert [note.split()[:3] for note in found['notes'][:2]] == [['2', 'of', '60']] * 2
    (drawn,) = found['train_images'].values()
    assert len(drawn) == 58 and not {'data[3]', 'data[40]'} & {*drawn}


def test_probes_need_one_class_an_image():
    several = labeled(IMAGES[:3], np.eye(3, dtype=int))
    with pytest.raises(UserError, match='data'):
        probing.open_probes(FewshotConfig(), 'data', lambda data, split: several, make_reader)
