"""What is seen of images before training."""

import argparse
import json
import shutil

import cv2
import numpy as np
import pytest
from PIL import Image

from tests import tiny
from vit_jax import inspect_data
from vit_jax.data import image_decoding
from vit_jax.data.augmentation import Augmentation
from vit_jax.data.sources.opening import HeldOut
from vit_jax.training.duration import Duration


def look(config, folder):
    return inspect_data.main(argparse.Namespace(config=config, workdir=str(folder)))


RNG = np.random.default_rng(0)


@pytest.fixture
def photos(tmp_path):
    for name, count in ('cat', 9), ('dog', 4):
        (tmp_path / 'photos' / name).mkdir(parents=True)
        for i in range(count):
            image = RNG.integers(0, 256, (10 + i, 20, 3), np.uint8)
            cv2.imwrite(str(tmp_path / 'photos' / name / f'{i}.jpg'), image)
    (tmp_path / 'photos' / 'cat' / '3.jpg').write_bytes(b'no cat')
    png = cv2.imencode('.png', RNG.integers(0, 256, (8, 8, 3), np.uint8))[1].tobytes()
    (tmp_path / 'photos' / 'dog' / '1.jpg').write_bytes(png)
    return tmp_path / 'photos'


@pytest.mark.gate
def test_counts_defects_and_a_picture(photos, tmp_path, capsys):
    config = tiny.experiment(
        data=str(photos), held_out=HeldOut(fraction=0.25), augmentation=Augmentation(mixup=0.5)
    )
    look(config, tmp_path / 'out')
    said = capsys.readouterr().out
    found = json.loads((tmp_path / 'out' / 'data.json').read_text())['splits']
    assert list(found) == ['train', 'test']
    together = {
        name: sum(split['classes'][name] for split in found.values()) for name in ('cat', 'dog')
    }
    assert together == {'cat': 8, 'dog': 4}
    defects = [line for split in found.values() for line in split['unreadable']]
    assert len(defects) == 1 and 'cat/3.jpg: ' in defects[0]
    assert defects[0] in said
    assert sum(split['formats'].get('PNG', 0) for split in found.values()) == 1  # dog/1.jpg
    assert max(split['height'][2] for split in found.values()) == 18
    sheet = cv2.imread(str(tmp_path / 'out' / 'data.png'))
    rows, columns = min(8, sum(found['train']['classes'].values())), 1 + 7
    assert sheet.shape == (8 + rows * (192 + 2 * 15 + 8), 8 + columns * (192 + 8), 3)


def test_the_first_column_is_what_evaluation_sees(photos, tmp_path):
    config = tiny.experiment(data=str(photos), augmentation=Augmentation(erasing=0.9))
    look(config, tmp_path / 'out')
    sheet = cv2.imread(str(tmp_path / 'out' / 'data.png'))
    tiles = sheet[8:, 8:].reshape(8, 230, 8, 200, 3)[:, :192, :, :192]
    same = (tiles[:, :, :1] == tiles).all(axis=(1, 3, 4))
    assert same[:, 0].all() and same[:, 1:].mean() < 0.6


def test_a_test_image_that_is_a_training_image_is_listed_by_its_bytes(photos, tmp_path):
    root = tmp_path / 'splits'
    for split in 'train', 'test':
        shutil.copytree(photos, root / split, ignore=shutil.ignore_patterns('3.jpg'))
    (root / 'test/cat/new.png').write_bytes(cv2.imencode('.png', np.zeros((8, 8, 3)))[1].tobytes())
    (root / 'test/cat/2.jpg').rename(root / 'test/cat/other.jpg')
    assert look(tiny.experiment(data=str(root), eval_split='test'), tmp_path / 'out') == 0
    splits = json.loads((tmp_path / 'out/data.json').read_text())['splits']
    assert splits['train']['duplicates'] == [] and len(splits['test']['duplicates']) == 11
    assert f'{root}/test/cat/other.jpg = {root}/train/cat/2.jpg' in splits['test']['duplicates']


@pytest.mark.parametrize(
    'train, test, count, total', [('train', 'train[50%:]', 5, 5), ('train[:8]', 'train[4:]', 4, 7)]
)
def test_slices_that_overlap_are_counted(photos, tmp_path, capsys, train, test, count, total):
    (photos / 'cat/3.jpg').unlink()
    (photos / 'dog/0.jpg').rename(tmp_path / 'x.jpg')
    shutil.copytree(photos, tmp_path / 'data/train')
    for tested, line in {
        test: [f'{count} of {total} {test} images are also training images'],
        'train[8:]': [],
    }.items():
        trained = train if line else 'train[:8]'
        config = tiny.experiment(
            data=str(tmp_path / 'data'), train_split=trained, eval_split=tested
        )
        assert look(config, tmp_path / 'out') == 0
        printed = capsys.readouterr().out
        assert json.loads((tmp_path / 'out/data.json').read_text())['shared'] == line
        assert printed.count('also training images') == len(line)


def test_images_that_the_run_does_not_read_do_not_stop_it(tmp_path):
    """For example, in a split without labels."""
    for split in 'train', 'val', 'test':
        for name in 'cat', 'dog':
            path = tmp_path / 'set' / split / name / 'a.png'
            path.parent.mkdir(parents=True)
            Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(path)
    (tmp_path / 'set' / 'test' / 'cat' / 'a.png').write_bytes(b'damaged')
    for split, code in ('test', 1), ('val', 0):
        config = tiny.experiment(data=str(tmp_path / 'set'), eval_split=split)
        assert look(config, tmp_path / split) == code


def test_every_problem_is_listed_in_one_go(photos, tmp_path, monkeypatch):
    def problems(**changes):
        assert look(tiny.experiment(**{'data': str(photos)} | changes), tmp_path / 'out') == 1
        return json.loads((tmp_path / 'out' / 'data.json').read_text())['problems']

    image_decoding.formats_by_extension()  # registers HEIF, where it is installed
    monkeypatch.delitem(Image.OPEN, 'HEIF', raising=False)
    (photos / 'ant').mkdir()
    (photos / 'bee').mkdir()
    for name in 'eel', 'fox':
        (photos / name).mkdir()
        shutil.copy(photos / 'cat' / '1.jpg', photos / name / 'only.jpg')
    (photos / 'dog' / 'IMG.HEIC').write_bytes(b'\0\0\0\x18ftypheic' + bytes(20))
    (photos / 'dog' / 'lost.jpg').symlink_to('nowhere')
    named = 'ant', 'bee'
    assert all(f'{photos}/{name}:' in line for name, line in zip(named, problems(), strict=True))
    for name in named:
        (photos / name).rmdir()
    named = 'eel', 'fox'
    assert all(f'/{name}/only.jpg:' in line for name, line in zip(named, problems(), strict=True))
    for name in named:
        shutil.copy(photos / name / 'only.jpg', photos / name / 'other.jpg')
    assert ['3 images ' in line for line in problems()] == [True]
    splits = json.loads((tmp_path / 'out' / 'data.json').read_text())['splits'].values()
    lists = 'unreadable', 'duplicates', 'contradictory'
    found = {name: [line for split in splits for line in split[name]] for name in lists}
    files = 'cat/3.jpg', 'dog/IMG.HEIC', 'dog/lost.jpg'
    for file, line in zip(files, sorted(found['unreadable']), strict=True):
        assert line.startswith(f'{photos}/{file}: ')
    assert len(found['contradictory'] + found['duplicates']) == 4
    lines = ['path,label', 'photos/cat/1.jpg,cat', 'photos/cat/2.jpg,', 'photos/cat/1.jpg,dog']
    (tmp_path / 't.csv').write_text('\n'.join(lines))
    wrong = problems(data=str(tmp_path / 't.csv'))
    assert all(f'line {n}: ' in line for n, line in zip((3, 4), wrong, strict=True))
    shutil.rmtree(photos / 'cat')
    assert "'dog'" in problems(data=str(photos), classes=('dog',))[0]
    step = problems(batch_size=1000, total=Duration(epochs=1.0))
    assert any('total.epochs=1.0' in line for line in step)
