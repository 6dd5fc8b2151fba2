"""What is seen of images before training."""

import argparse
import json
import shutil

import cv2
import numpy as np
import pytest
from PIL import Image

from tests import tiny
from vit_jax import inspect_data, prepare
from vit_jax.cli import app
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


def test_the_split_of_training_comes_first(photos, tmp_path):
    splits = {'a_test': 'cat', 'train': 'dog', 'train_extra': 'dog'}
    for split, name in splits.items():
        shutil.copytree(photos / name, tmp_path / 'data' / split / 'animal')
    for split, expected in {
        'train': ['train', 'a_test', 'train_extra'],
        'train_extra[:50%]': ['train_extra', 'a_test', 'train'],
        'train[:2] + train_extra': ['train', 'train_extra', 'a_test'],
    }.items():
        config = tiny.experiment(
            data=str(tmp_path / 'data'), train_split=split, eval_split='a_test'
        )
        look(config, tmp_path / 'out')
        found = json.loads((tmp_path / 'out' / 'data.json').read_text())['splits']
        assert list(found) == expected


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
    assert look(config, tmp_path / 'out') == 1
    problems = json.loads((tmp_path / 'out' / 'data.json').read_text())['problems']
    assert problems[0].startswith('3 images cannot be')
    assert problems[1:] == ['none of 2 training images can be read']


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


def test_every_problem_of_a_folder_is_listed_in_one_go(photos, tmp_path, capsys, monkeypatch):
    image_decoding.formats_by_ending()  # registers HEIF, where it is installed
    monkeypatch.delitem(Image.OPEN, 'HEIF', raising=False)
    (photos / 'ant').mkdir()
    (photos / 'bee').mkdir()
    (photos / 'bee' / 'Thumbs.db').write_text('')
    for name in 'eel', 'fox':
        (photos / name).mkdir()
        (photos / name / 'only.jpg').write_bytes((photos / 'cat' / '1.jpg').read_bytes())
    (photos / 'dog' / 'lost.jpg').symlink_to('nowhere')
    (photos / 'dog' / 'IMG.HEIC').write_bytes(b'\0\0\0\x18ftypheic' + bytes(20))
    (photos / 'dog' / '.hidden').mkdir()
    (photos / 'dog' / '.hidden' / 'x.jpg').write_bytes(b'')
    for ending in '.jp2', '.ppm':
        stored = cv2.imencode(ending, np.zeros((64, 64, 3), np.uint8))[1].tobytes()
        (photos / 'dog' / f'right{ending}').write_bytes(stored)
    assert look(tiny.experiment(data=str(photos)), tmp_path / 'out') == 1
    said = capsys.readouterr().out
    found = json.loads((tmp_path / 'out' / 'data.json').read_text())
    empty = 'no images in this folder: add images, or move it out of the data'
    expected = [
        f'{photos}/ant: {empty}',
        f'{photos}/bee: no images in this folder; 1 file of other endings, such as '
        f'{photos}/bee/Thumbs.db: '
        'add images, or move it out of the data',
    ]
    assert found['problems'] == expected and all(f'  {line}\n' in said for line in expected)
    assert found['splits'] == {}
    shutil.rmtree(photos / 'ant')
    shutil.rmtree(photos / 'bee')
    assert look(tiny.experiment(data=str(photos)), tmp_path / 'out') == 1
    found = json.loads((tmp_path / 'out' / 'data.json').read_text())
    for name, problem in zip(('eel', 'fox'), found['problems'], strict=False):
        assert problem.startswith(f"{photos}/{name}/only.jpg: of class '{name}' this is the only")
    for name in 'eel', 'fox':
        shutil.copy(photos / name / 'only.jpg', photos / name / 'other.jpg')
    assert look(tiny.experiment(data=str(photos)), tmp_path / 'out') == 1
    found = json.loads((tmp_path / 'out' / 'data.json').read_text())
    assert found['problems'] == [
        '3 images cannot be read: repair or remove, or leave out by '
        '--config.loader.on_unreadable=skip'
    ]
    lists = ('unreadable', 'misnamed', 'duplicates', 'contradictory')
    split = {name: sum((one[name] for one in found['splits'].values()), []) for name in lists}
    damaged, *others = sorted(split['unreadable'])
    assert damaged.startswith(f'{photos}/cat/3.jpg: not a whole image')
    assert others == [
        f'{photos}/dog/IMG.HEIC: a HEIC photo: {image_decoding.HEIC_REMEDY}',
        f'{photos}/dog/lost.jpg: No such file or directory',
    ]
    assert split['misnamed'] == [f'{photos}/dog/1.jpg: PNG']
    assert len(split['contradictory'] + split['duplicates']) == 4


def test_every_problem_of_a_table_is_listed_in_one_go(photos, tmp_path):
    lines = ['path,label', 'photos/cat/1.jpg,cat', 'photos/cat/2.jpg,', 'photos/nope.jpg,cat']
    (tmp_path / 't.csv').write_text('\n'.join([*lines, 'photos/cat/1.jpg,dog']))
    assert look(tiny.experiment(data=str(tmp_path / 't.csv')), tmp_path / 'out') == 1
    found = json.loads((tmp_path / 'out' / 'data.json').read_text())
    assert 'line 3: an empty' in found['problems'][0] and 'line 5: ' in found['problems'][1]
    assert len(found['problems']) == 2


def test_classes_that_are_not_in_all_splits_are_listed(photos, tmp_path):
    for split in 'train', 'test':
        shutil.copytree(photos, tmp_path / 'splits' / split)
    shutil.rmtree(tmp_path / 'splits' / 'test' / 'dog')
    (tmp_path / 'splits' / 'train' / 'emu').mkdir()
    config = tiny.experiment(data=str(tmp_path / 'splits'))
    config.loader.on_unreadable = 'skip'
    assert look(config, tmp_path / 'out') == 1
    root = tmp_path / 'splits'
    assert sorted(json.loads((tmp_path / 'out' / 'data.json').read_text())['problems']) == [
        f'{root}/train/emu: no images in this folder: add images, or move it out of the data',
        f"{root}: class 'dog' is in train/ but not in test/",
        f"{root}: class 'emu' is in train/ but not in test/",
    ]


@pytest.mark.full
def test_a_training_of_less_than_one_step_is_a_problem(photos, tmp_path, capsys):
    (photos / 'cat' / '3.jpg').unlink()
    config = tiny.experiment(data=str(photos), batch_size=1000)
    config.total = Duration(epochs=1.0)
    assert look(config, tmp_path / 'out') == 1
    assert 'less than one step' in capsys.readouterr().out


def test_what_training_may_skip_is_no_reason_to_refuse_it(photos, tmp_path):
    config = tiny.experiment(data=str(photos), eval_split='test')
    assert look(config, tmp_path / 'out') == 1
    config.loader.on_unreadable = 'skip'
    assert look(config, tmp_path / 'out') == 0
    config.eval_split = 'tset'
    assert look(config, tmp_path / 'out') == 1
    assert "no split 'tset'" in (tmp_path / 'out' / 'data.json').read_text()


def test_preparing_says_what_is_missing(monkeypatch, capsys):
    import sys

    monkeypatch.setitem(sys.modules, 'tensorflow', None)
    monkeypatch.setattr(sys, 'argv', ['prepare', 'cifar10'])
    with pytest.raises(SystemExit) as ended:
        app.run(prepare.main, prepare.make_parser())
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith('error: preparing needs TensorFlow: pip install')
