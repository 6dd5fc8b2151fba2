"""ImageNet's test sets, in folders as their authors distribute them, with a few small images."""

import dataclasses
import functools
import json
import pathlib

import cv2
import numpy as np
import pytest

from tests import tiny
from tests.networks import loaded
from vit_jax.base import MissingFile, UserError
from vit_jax.data import imagenet_classes
from vit_jax.data.image_preprocessing import CentralCrop
from vit_jax.data.sources.base import renumber_classes
from vit_jax.evaluation import head, imagenet_suite

IDS, NAMES = imagenet_classes.ids(), imagenet_classes.names()
SETS = {one.name: one for one in imagenet_suite.TEST_SETS}
# Errors of ResNet-50 in percent of AlexNet's; their mean is 76.7 (Hendrycks and Dietterich 2019).
RESNET50 = dict(
    zip(
        (name for name in SETS if name.startswith('c/')),
        (80, 82, 83, 75, 89, 78, 80, 78, 75, 66, 57, 71, 85, 77, 77),
        strict=True,
    )
)


@pytest.fixture(scope='module')
def network():
    """A model that tells images apart: its head is random, and centered for random images."""
    rng = np.random.default_rng(0)
    made = loaded(tiny.model(num_classes=1000), class_names=NAMES)
    colors = rng.uniform(-1, 1, (64, 1, 1, 3)).astype(np.float32)
    features = made.features(np.broadcast_to(colors, (64, *made.config.image_size, 3)))
    kernel = rng.normal(size=(features.shape[1], 1000)).astype(np.float32)
    head_params = {'kernel': kernel, 'bias': -features.mean(axis=0) @ kernel}
    return made.with_params(made.params | {'head': head_params})


def write_image(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(value)
    cv2.imwrite(str(path), rng.integers(0, 255, (20, 20, 3), np.uint8))


def run(name, model, root):
    names = imagenet_suite.get_class_names(model)
    source = renumber_classes(SETS[name].open(root), names)
    report = imagenet_suite.evaluate(SETS[name], model, source, batch_size=32)
    return report.metrics | {'images': report.num_images}


def accuracy_by_hand(network, paths, labels, allowed, cut=0):
    """Top-1 accuracy with the other logits removed; `labels` are lists of class numbers."""
    images = [cv2.imread(str(p))[..., ::-1] for p in paths]
    images = [image[cut : len(image) - cut, cut : len(image) - cut] for image in images]
    logits = network.logits(np.stack([network.preprocess(np.array(image)) for image in images]))
    best = np.array(allowed)[logits[:, allowed].argmax(axis=1)]
    return np.mean([one in right for one, right in zip(best, labels, strict=True)])


@pytest.mark.gate
@pytest.mark.parametrize('name, folder', [('a', 'imagenet-a'), ('r', 'imagenet-r')])
def test_only_the_classes_of_a_and_r_are_predicted(network, tmp_path, name, folder):
    """With timm's lists of the 200 class numbers: the argmax of the logits of these classes."""
    numbers = json.loads(pathlib.Path('tests/fixtures/imagenet_subsets.json').read_text())[name]
    assert len(numbers) == 200
    paths = [tmp_path / folder / IDS[n] / 'x.png' for n in numbers]
    for number, path in zip(numbers, paths, strict=True):
        write_image(path, number)
    found = run(name, network, tmp_path)
    source = SETS[name].open(tmp_path)
    present = ~head.find_absent_classes(head.match_classes(source, network, by_order=False))
    assert np.flatnonzero(present).tolist() == sorted(numbers)
    labels = [[n] for n in numbers]
    assert found['accuracy'] == accuracy_by_hand(network, paths, labels, numbers)
    assert found['images'] == 200


@pytest.mark.gate
def test_objectnet_accepts_any_counterpart_and_crops_the_frame(network, tmp_path):
    root = tmp_path / 'objectnet-1.0'
    (root / 'mappings').mkdir(parents=True)
    labels = {'alarm_clock': 'Alarm clock', 'jeans': 'Jeans', 'milk': 'Milk'}
    synonyms = {'Alarm clock': 'analog clock; digital clock', 'Jeans': 'jean, blue jean, denim'}
    (root / 'mappings' / 'folder_to_objectnet_label.json').write_text(json.dumps(labels))
    (root / 'mappings' / 'objectnet_to_imagenet_1k.json').write_text(json.dumps(synonyms))
    paths = [root / 'images' / name / f'{i}.png' for name in labels for i in range(16)]
    rng = np.random.default_rng(0)
    for path in paths:  # a photo in one color with a red frame
        path.parent.mkdir(parents=True, exist_ok=True)
        inside = np.broadcast_to(rng.integers(0, 255, 3, np.uint8), (8, 8, 3))
        framed = [np.pad(inside[..., c], 2, constant_values=255 * (c == 2)) for c in range(3)]
        cv2.imwrite(str(path), np.stack(framed, axis=-1))
    clocks, jeans = [409, 530], [608]  # class numbers of the counterparts
    right = [clocks] * 16 + [jeans] * 16
    by_hand = functools.partial(accuracy_by_hand, network, paths[:32], allowed=clocks + jeans)
    found = run('objectnet', network, tmp_path)
    assert found['accuracy'] == by_hand(labels=right, cut=2) and found['images'] == 32
    absent = head.find_absent_classes(SETS['objectnet'].open(tmp_path))
    assert np.flatnonzero(~absent).tolist() == clocks + jeans
    assert by_hand(labels=right, cut=2) != by_hand(labels=right, cut=0)
    assert by_hand(labels=right, cut=2) != by_hand(labels=[one[:1] for one in right], cut=2)


@pytest.mark.parametrize(
    'name, folder', [('a', 'imagenet-a'), ('v2', 'imagenetv2-matched-frequency-format-val')]
)
def test_images_without_class_folders_are_no_test_set(name, folder, tmp_path):
    write_image(tmp_path / folder / 'x.png', 0)
    with pytest.raises(UserError, match=f'{folder}: no class folders'):
        SETS[name].open(tmp_path)


def test_v2_folders_are_class_numbers(tmp_path):
    folder = tmp_path / 'imagenetv2-matched-frequency-format-val'
    for number in 3, 12, 999:
        write_image(folder / str(number) / 'x.png', number)
    source = SETS['v2'].open(tmp_path)
    assert [source.class_names[label] for label in source.labels] == [
        IDS[int(pathlib.Path(name).parent.name)] for name in source.read_names(range(len(source)))
    ]


@pytest.mark.gate
def test_corrupted_images_are_resized_whole_and_all_severities_count(network, tmp_path):
    """The class is what the model sees in the whole image; in its center it sees another."""
    center = dataclasses.replace(network.preprocessing, crop=CentralCrop(scale=2.0))
    card = dataclasses.replace(network.card, preprocessing=center)
    cropping = dataclasses.replace(network, card=card)
    photos = np.random.default_rng(0).integers(0, 255, (64, 20, 20, 3), np.uint8)
    photos[:, 5:15, 5:15] = 0
    whole, part = (
        one.logits(np.stack([*map(one.preprocess, photos)])).argmax(axis=1)
        for one in (network, cropping)
    )
    chosen = int((whole != part).argmax())
    label, pixels = whole[chosen], photos[chosen]
    assert label != part[chosen]
    paths = [tmp_path / f'imagenet-c/fog/{level}/{IDS[label]}/x.png' for level in range(1, 6)]
    for path in paths:
        path.parent.mkdir(parents=True)
        cv2.imwrite(str(path), pixels[..., ::-1])
    found = run('c/fog', cropping, tmp_path)
    assert found['images'] == 5 and found['accuracy'] == 1
    paths[0].unlink()
    with pytest.raises(UserError, match='fog/1'):
        run('c/fog', network, tmp_path)


def test_the_mean_corruption_error_is_relative_to_alexnet():
    errors = {name: SETS[name].alexnet_error for name in RESNET50}
    alexnet = {name: {'accuracy': 1 - error} for name, error in errors.items()}
    assert imagenet_suite.mean_corruption_error(alexnet) == pytest.approx(1)
    ratios = {n: {'accuracy': 1 - RESNET50[n] / 100 * errors[n]} for n in RESNET50}
    assert imagenet_suite.mean_corruption_error(ratios) == pytest.approx(0.767, abs=0.005)
    del ratios['c/fog']
    assert imagenet_suite.mean_corruption_error(ratios) is None


def test_missing_sets_are_named_and_other_models_rejected(network, tmp_path):
    for name, one in SETS.items():
        with pytest.raises(MissingFile, match=str(tmp_path)):
            one.open(tmp_path)
        assert 'curl' in one.command, name
    write_image(tmp_path / 'sketch' / IDS[7] / 'x.png', 0)
    for names in IDS, ():  # ImageNet's classes by their ids, or in their order
        model = dataclasses.replace(
            network, card=dataclasses.replace(network.card, class_names=names)
        )
        found = run('sketch', model, tmp_path)
        assert found['images'] == 1
    for names in ('a', 'b'), ():
        with pytest.raises(UserError, match="ImageNet's 1,000"):
            run('sketch', loaded(tiny.model(num_classes=2), class_names=names), tmp_path)
