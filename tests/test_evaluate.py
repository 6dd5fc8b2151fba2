"""A checkpoint held against labeled images, without training."""

import csv
import dataclasses
import json
import re
import shutil

import cv2
import numpy as np
import pytest
import scipy.special
from PIL import Image
from sklearn import metrics

import vit_jax
from tests import tiny
from tests.networks import loaded
from vit_jax import evaluate
from vit_jax.base import UserError
from vit_jax.checkpoints.card import Card
from vit_jax.data import imagenet_classes
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.data.sources.arrays import array_source
from vit_jax.data.sources.opening import HeldOut, make_opener
from vit_jax.evaluation import head
from vit_jax.experiment import training_run
from vit_jax.pretrained import LoadedModel

NAMES = tuple('0123456789')
IMAGES = np.zeros((4, 8, 8), np.uint8)


def run(*arguments):
    return evaluate.main(evaluate.make_parser().parse_args([str(a) for a in arguments]))


def saved(tmp_path, network, name='network'):
    vit_jax.save(network, tmp_path / name, 'vit_jax')
    return tmp_path / name


def result(folder):
    return json.loads((folder / 'evaluation.json').read_text())


@pytest.mark.gate
def test_every_number_is_the_one_that_the_logits_give(tmp_path):
    """Of a network whose classes are those of the data in another order, in two extra classes."""
    names = ('x', *NAMES[::-1], 'y')
    network = loaded(tiny.model(num_classes=12), class_names=names)
    path, out = saved(tmp_path, network), tmp_path / 'out'
    assert run(path, '--data=digits', '--split=test[:50]', '--out', out) == 0
    source = make_opener()('digits', 'test[:50]')
    images = np.stack([network.preprocess(source.read(i)[0]) for i in range(50)])
    logits = network.logits(images)
    labels = np.array([names.index(NAMES[label]) for label in source.labels])
    predicted = logits.argmax(axis=1)
    found, expected = result(out), metrics.accuracy_score(labels, predicted)
    assert found['metrics']['accuracy'] == pytest.approx(expected)
    assert found['metrics']['top5_accuracy'] == pytest.approx(
        metrics.top_k_accuracy_score(labels, logits, k=5, labels=range(12))
    )
    with np.load(out / 'confusion.npz') as file:
        np.testing.assert_array_equal(
            file['confusion'], metrics.confusion_matrix(labels, predicted)
        )
        assert {*file['class_names']} == {names[i] for i in {*labels, *predicted}}
    recall = metrics.recall_score(
        labels, predicted, average=None, labels=range(12), zero_division=np.nan
    )
    precision = metrics.precision_score(
        labels, predicted, average=None, labels=range(12), zero_division=np.nan
    )
    for one in found['classes']:
        number = names.index(one['class'])
        assert one['images'] == (labels == number).sum()
        assert one['recall'] == pytest.approx(recall[number])
        assert (one['precision'] is None) == np.isnan(precision[number])
        assert one['precision'] in (None, pytest.approx(precision[number]))
    taken = found['confusions'][0]
    true, wrong = names.index(taken['class']), names.index(taken['predicted'])
    assert taken['images'] == ((labels == true) & (predicted == wrong)).sum() > 0
    counts = [one['images'] for one in found['confusions']]
    assert sum(counts) == (labels != predicted).sum()
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]


def logits_of(network, count):
    source = make_opener()('digits', f'test[:{count}]')
    images = np.stack([network.preprocess(source.read(i)[0]) for i in range(count)])
    return network.logits(images), source.labels


@pytest.mark.gate
def test_predictions_and_mistakes_are_those_of_the_logits(tmp_path):
    network = loaded(tiny.model(), class_names=NAMES)
    path, rows = saved(tmp_path, network), {}
    for ending in 'csv', 'jsonl':
        file = tmp_path / f'found.{ending}'
        mistakes = f'--mistakes={tmp_path / ending}'
        run(path, '--data=digits', '--split=test[:50]', f'--predictions={file}', mistakes)
        with file.open(encoding='utf-8-sig') as lines:
            found = csv.DictReader(lines) if ending == 'csv' else map(json.loads, lines)
            rows[ending] = [*found]
    logits, labels = logits_of(network, 50)
    assert [one['label'] for one in rows['csv']] == [NAMES[label] for label in labels]
    assert [NAMES.index(one['predicted']) for one in rows['csv']] == logits.argmax(axis=1).tolist()
    found = [one['probability'] for one in rows['jsonl']]
    np.testing.assert_allclose(found, scipy.special.softmax(logits, axis=1).max(axis=1), rtol=1e-5)
    assert [one['correct'] for one in rows['jsonl']] == (labels == logits.argmax(axis=1)).tolist()
    assert [{k: str(x) for k, x in one.items()} for one in rows['jsonl']] == rows['csv']

    with (tmp_path / 'csv' / 'mistakes.csv').open(encoding='utf-8-sig') as lines:
        wrong = [*csv.DictReader(lines)]
    expected = [one for one in rows['csv'] if one['correct'] == 'False']
    expected.sort(key=lambda one: -float(one['probability']))
    assert wrong == expected
    sheet = np.asarray(Image.open(tmp_path / 'csv' / 'mistakes.png'))
    digit = make_opener()('digits', 'test').read(int(wrong[0]['path'][len('digits/test[') : -1]))[0]
    np.testing.assert_array_equal(sheet[8:200:24, 8:200:24, 0], digit)  # 8 pixels enlarged to 192


@pytest.mark.gate
def test_an_existing_file_is_replaced_only_on_request(tmp_path):
    path = saved(tmp_path, loaded(tiny.model(), class_names=NAMES))
    arguments = path, '--data=digits', '--split=test[:3]'
    both = f'--out={tmp_path / "out"}', f'--mistakes={tmp_path / "mistakes"}'
    run(*arguments, *both)
    files = [*tmp_path.glob('out/*'), *tmp_path.glob('mistakes/*')]
    assert len(files) == 6
    for file in files:  # also if it is the only one
        only = tmp_path / f'only {file.name}' / file.name
        only.parent.mkdir()
        only.touch()
        with pytest.raises(UserError, match=f'{file.name}.*--overwrite'):
            run(*arguments, f'--{file.parent.name}={only.parent}')
    run(*arguments, *both, '--overwrite')
    with pytest.raises(UserError, match='--predictions and --mistakes'):
        run(*arguments, f'--mistakes={tmp_path}', f'--predictions={tmp_path / "mistakes.csv"}')


@pytest.mark.gate
def test_only_data_classes_are_predicted_on_request(tmp_path):
    """Images of the classes 2 and 5 alone; the network prefers other classes."""
    network = loaded(tiny.model(), class_names=NAMES)
    logits, labels = logits_of(network, 50)
    assert not np.isin(logits.argmax(axis=1), (2, 5)).all()
    source = make_opener()('digits', 'test[:50]', classes=('2', '5'))
    source = head.match_classes(source, network, by_order=False)
    reader = head.make_model_reader(network, source)
    kept = np.isin(labels, (2, 5))
    for only, columns in (True, [2, 5]), (False, range(10)):
        report = head.evaluate_head(network, reader, batch_size=8, only_data_classes=only)
        chosen = np.array(columns)[logits[kept][:, columns].argmax(axis=1)]
        assert [int(one.predicted) for one in report.predictions] == chosen.tolist()
        part = logits[kept][:, columns]
        right = logits[kept][range(kept.sum()), labels[kept]]
        loss = (scipy.special.logsumexp(part, axis=1) - right).mean()
        assert report.metrics['loss'] == pytest.approx(loss, rel=1e-5)


def test_outputs_that_are_not_finite_are_an_error():
    network = loaded(tiny.model(), class_names=NAMES)
    network.params['head']['bias'] = np.full(10, np.inf, np.float32)
    reader = head.make_model_reader(network, make_opener()('digits', 'test[:3]'))
    with pytest.raises(UserError, match='3 of 3 images .*not finite'):
        head.evaluate_head(network, reader, batch_size=8)


@pytest.mark.gate
def test_other_labels_count_any_that_is_right(tmp_path):
    network = loaded(tiny.model(), class_names=NAMES)
    path, out = saved(tmp_path, network), tmp_path / 'out'
    labels = make_opener()('digits', 'test').labels
    names = [f'digits/test[{i}]' for i in range(len(labels))]
    real = {name: [int(y), int(y + 1) % 10] for name, y in zip(names, labels, strict=True)}
    (tmp_path / 'real.json').write_text(json.dumps(real | {names[0]: []}))
    asked = '--data=digits', '--split=test[:50]', f'--labels={tmp_path / "real.json"}'
    assert run(path, *asked, '--out', out) == 0
    source = make_opener()('digits', 'test[:50]')
    images = np.stack([network.preprocess(source.read(i)[0]) for i in range(1, 50)])
    difference = network.logits(images).argmax(axis=1) - labels[1:50]
    found = result(out)
    assert found['metrics']['accuracy'] == pytest.approx(np.isin(difference, (0, 1, -9)).mean())
    assert 'mean_average_precision' not in found['metrics'] and 'confusions' not in found


def network_with(classes, names=()):
    model = tiny.model(num_classes=classes)
    card = Card(model=model, grid=model.grid, preprocessing=Preprocessing(), class_names=names)
    return LoadedModel(card, params={})


def data_of(names):
    return array_source(IMAGES, np.arange(4) % len(names), names, name='data')


def test_classes_are_matched_by_name_and_unknown_ones_are_left_out(caplog):
    network = network_with(3, ('c', 'b', 'a'))
    found = head.match_classes(data_of(['a', 'b', 'x']), network, by_order=False)
    assert found.class_names == ('c', 'b', 'a') and found.labels.tolist() == [2, 1, 2]
    assert [found.read(i)[1] for i in range(3)] == [2, 1, 2]
    assert '1 of 3 ' in caplog.text and "'x'" in caplog.text
    rows = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]])
    several = array_source(IMAGES, rows, ['a', 'b', 'x'], name='data')
    found = head.match_classes(several, network, by_order=False)
    assert found.labels.tolist() == [[0, 0, 1], [0, 0, 0], [0, 1, 0], [0, 1, 1]]


def test_without_names_classes_are_matched_by_number_or_not_at_all():
    data, named = data_of(['a', 'b', 'c']), network_with(3, ('one', 'two', 'three'))
    assert head.match_classes(data, network_with(3), by_order=False) is data
    assert head.match_classes(data, named, by_order=True) is data
    for network, name in (
        (named, '--by_order'),
        (network_with(7), '7 outputs'),
        (network_with(3, ('a', 'b', 'a')), "'a'"),
    ):
        with pytest.raises(UserError, match=name):
            head.match_classes(data, network, by_order=False)


def test_wordnet_ids_are_those_of_the_network_whose_names_are_imagenets():
    ids, names = imagenet_classes.ids(), imagenet_classes.names()
    some = [ids[517], ids[3], ids[134]]  # two of them are called crane
    found = head.match_classes(data_of(some), network_with(1000, names), by_order=False)
    assert found.labels.tolist() == [517, 3, 134, 517]
    with pytest.raises(UserError, match='n01440764'):
        head.match_classes(data_of(ids[:1]), network_with(2, ('a', 'b')), by_order=False)


@pytest.mark.gate
def test_a_run_is_measured_on_what_it_held_out_and_training_images_are_counted(tmp_path, capsys):
    data = tmp_path / 'data'
    for label in range(3):
        (data / str(label)).mkdir(parents=True)
        for i in range(10):
            image = np.full((8, 8, 3), 80 * label + i, np.uint8)
            cv2.imwrite(str(data / str(label) / f'{i}.png'), image)
    first = tiny.experiment(
        data=str(data),
        model=tiny.model(num_classes=None, depth=1),
        held_out=HeldOut(fraction=0.3, seed=1),
        batch_size=8,
    )
    reported = training_run.train(first, str(tmp_path / 'first')).evals['test']
    second = dataclasses.replace(first, held_out=HeldOut(), start_from=str(tmp_path / 'first'))
    training_run.train(second, str(tmp_path / 'second'))
    copy = shutil.copytree(data, tmp_path / 'copy')

    def measured(network, data, *flags):
        where = [f'--data={data}'] if data else []
        run(tmp_path / network, *where, f'--out={tmp_path / "out"}', '--overwrite', *flags)
        return result(tmp_path / 'out')

    for place in data, copy, None:  # None: the data of the run
        found = measured('first', place)
        assert found['metrics'] == pytest.approx(reported, rel=1e-6)  # sums of other batches
        assert found['images'] == 9 and found['trained_on'] == 0
    assert measured('first', copy, '--split=all')['trained_on'] == 21
    assert re.search(' 21 of .* 30 ', capsys.readouterr().out)
    assert measured('first', data, '--split=train')['trained_on'] == 21
    assert measured('second', data, '--split=all')['trained_on'] > 27  # by one run or the other
