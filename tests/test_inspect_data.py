"""What is seen of images before training."""

import argparse
import json

import cv2
import numpy as np
import pytest

from tests import tiny
from vit_jax import inspect_data, prepare
from vit_jax.command_line import app
from vit_jax.data.augmentation import Augmentation
from vit_jax.data.sources.opening import HeldOut


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
    assert len(defects) == 1 and 'cat/3.jpg: not a whole image' in defects[0]
    assert defects[0] in said
    misnamed = [line for split in found.values() for line in split['misnamed']]
    assert len(misnamed) == 1 and misnamed[0].endswith('dog/1.jpg: PNG')
    assert max(split['height'][2] for split in found.values()) == 18
    assert 'classes      2: cat, dog' in said and 'pictures  ' in said
    sheet = cv2.imread(str(tmp_path / 'out' / 'data.png'))
    rows, columns = min(8, sum(found['train']['classes'].values())), 1 + 7
    assert sheet.shape == (24 + rows * (96 + 4), 170 + columns * (96 + 4), 3)


def test_the_first_column_is_what_evaluation_sees(photos, tmp_path):
    config = tiny.experiment(data=str(photos), augmentation=Augmentation(erasing=0.9))
    look(config, tmp_path / 'out')
    sheet = cv2.imread(str(tmp_path / 'out' / 'data.png'))
    rows = sheet[24:].reshape(8, 100, *sheet.shape[1:])[:, 2:-2]
    tiles = rows[:, :, 170:].reshape(8, 96, 8, 100, 3)[:, :, :, 2:-2]
    same = (tiles[:, :, :1] == tiles).all(axis=(1, 3, 4))
    assert same[:, 0].all() and same[:, 1:].mean() < 0.6


def test_what_cannot_be_looked_at_is_explained(tmp_path):
    (tmp_path / 'photos' / 'cat').mkdir(parents=True)
    for i in range(3):
        (tmp_path / 'photos' / 'cat' / f'{i}.jpg').write_bytes(b'x')
    config = tiny.experiment(data=str(tmp_path / 'photos'))
    with pytest.raises(ValueError, match='none of 2 training images can be read'):
        look(config, tmp_path / 'out')


def test_preparing_says_what_is_missing(monkeypatch, capsys):
    import sys

    monkeypatch.setitem(sys.modules, 'tensorflow', None)
    monkeypatch.setattr(sys, 'argv', ['prepare', 'cifar10'])
    with pytest.raises(SystemExit) as ended:
        app.run(prepare.main, prepare._parser())
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith('error: preparing needs TensorFlow: pip install')
