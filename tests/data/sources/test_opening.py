import os
import pathlib
import re

import cv2
import numpy as np
import pytest
from sklearn.datasets import load_digits

from vit_jax.base.errors import UserError
from vit_jax.data import loading
from vit_jax.data.image_preprocessing import Resize
from vit_jax.data.sources import base, folders, opening
from vit_jax.data.sources.arrays import array_source
from vit_jax.data.sources.base import sort_class_names

RNG = np.random.default_rng(0)


def write_image(path: pathlib.Path, value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), np.full((8, 8, 3), value, np.uint8))


def described(source):
    return [source.name_of(i) for i in range(len(source))]


@pytest.fixture
def root(tmp_path):
    for split, count in ('train', 6), ('test', 2):
        for label, name in enumerate(['cat', 'dog']):
            for i in range(count):
                write_image(tmp_path / split / name / f'{i}.png', 100 * label + i)
    return tmp_path


def test_digits_are_those_of_scikit_learn_and_every_fifth_is_for_testing():
    images, labels = load_digits(return_X_y=True)
    is_test = np.arange(len(labels)) % 5 == 4
    for split, chosen in ('train', ~is_test), ('test', is_test):
        source = opening.make_opener()('digits', split)
        assert source.class_names == tuple('0123456789')
        np.testing.assert_array_equal(source.labels, labels[chosen])
        read = np.stack([source.read(i)[0] for i in range(len(source))])
        expected = np.rint(images[chosen].reshape(-1, 8, 8) * (255 / 16))
        np.testing.assert_array_equal(read, expected.astype(np.uint8), strict=True)


def test_slices_of_a_split_are_disjoint_complete_and_fair(root):
    def names(split):
        return described(opening.make_opener()(str(root), split))

    first, rest = names('train[:75%]'), names('train[75%:]')
    assert len(first) == 9 and first + rest == names('train')
    assert names('train[2:4]') == names('train')[2:4]
    labels = opening.make_opener()(str(root), 'train[:50%]').labels
    assert 0 < labels.sum() < 6  # not the first class alone


def test_parts_of_splits_are_joined_in_their_order(root):
    def of_function(split):
        return opening.make_opener()('digits', split)

    for data in str(root), 'digits', of_function:
        opened = opening.make_opener()
        both = opened(data, 'test[1:4] + train[:25%]+test[:1]')
        parts = [opened(data, split) for split in ('test[1:4]', 'train[:25%]', 'test[:1]')]
        assert len(both) == sum(map(len, parts)) == 4 + len(parts[1])
        assert described(both) == [name for part in parts for name in described(part)]
        labels = np.concatenate([part.labels for part in parts])
        np.testing.assert_array_equal(both.labels, labels)
        order = [len(both) - 1, 0, 3, 2]
        np.testing.assert_array_equal(both.read_labels(order), labels[order])
        sizes = np.concatenate([part.read_sizes(range(len(part))) for part in parts])
        np.testing.assert_array_equal(both.read_sizes(order), sizes[order])
        (one, label), (same, _) = both.read(3), parts[1].read(0)
        assert np.array_equal(one, same) and label == labels[3]


def other_classes(split):
    return array_source(np.zeros((4, 2, 2), np.uint8), np.zeros(4, int), ['a', split], name=split)


@pytest.mark.parametrize(
    'data, split, name',
    [
        *(('digits', s, 'split') for s in ('train[', 'train[10]', '', 'train+', 'train[:2]+[2:]')),
        ('digits', 'train[5000:]', 'train'),
        ('digits', 'trian', 'train'),
        (other_classes, 'train+test', 'classes'),
        (__file__, 'train', 'test_opening.py'),
    ],
)
def test_data_and_splits_that_do_not_exist_are_named(data, split, name):
    with pytest.raises(UserError, match=name):
        opening.make_opener()(data, split)


@pytest.mark.parametrize(
    'names',
    [
        ('cat', 'Cat'),
        ('caf\u00e9', 'cafe\u0301'),
        ('cat', 'cat\u200b'),
        ('a b', 'a  b'),
        ('1', '01'),
        ('1', '1.0'),
        ('true', '1'),
        ('\uff11', '1'),
        ('.5', '0.50'),
        ('\u00bd', '1/2'),
        ('1e3', '1000'),
        ('cat', 'cat\ufe0f'),
        ('cat', '\u3164cat'),
    ],
)
def test_classes_whose_names_look_alike_are_named(names, root, tmp_path, caplog):
    base.warn_once.cache_clear()
    images = (root / 'train').rglob('*.png')
    lines = [f'{path},{name}' for path, name in zip(images, [*names, 'dog'], strict=False)]
    (tmp_path / 't.csv').write_text('\n'.join(['path,label', *lines]))
    source = opening.make_opener()(str(tmp_path / 't.csv'), 'all')
    assert len(source.class_names) == 3
    (warning,) = caplog.messages
    assert all(ascii(name) in warning for name in names) and 'dog' not in warning


def test_the_other_spelling_of_a_class_in_another_split_is_shown(tmp_path):
    for split, name in ('train', 'caf\u00e9'), ('test', 'cafe\u0301'):
        for folder in name, 'dog':
            write_image(tmp_path / split / folder / '0.png')
    with pytest.raises(UserError) as rejected:
        opening.make_opener()(str(tmp_path), 'train')
    assert ascii('caf\u00e9') in str(rejected.value) and ascii('cafe\u0301') in str(rejected.value)


def test_every_fault_of_the_folders_is_named(root):
    write_image(root / 'train' / 'emu' / '0.png')
    (root / 'test' / 'cat').rename(root / 'test' / 'Cat')
    for split in 'train', 'test':
        (root / split / 'fox').mkdir()
        (root / split / 'fox' / 'notes.txt').write_text('none yet')
        with pytest.raises(UserError) as rejected:
            opening.make_opener()(str(root), split)
        for name in 'emu', 'cat', 'Cat', f'{split}/fox', 'notes.txt':
            assert name in str(rejected.value)
    with pytest.raises(UserError, match='empty'):
        (root / 'empty').mkdir()
        opening.make_opener()(str(root / 'empty'), 'train')


def test_only_tasks_without_labels_open_images_without_classes(tmp_path):
    write_image(tmp_path / 'photos' / '0.png')
    (tmp_path / 't.csv').write_text('path,labels\nphotos/0.png,\n')

    def of_function(split):
        return folders.unlabeled_source([str(tmp_path / 'photos')])

    for data in str(tmp_path / 'photos'), str(tmp_path / 't.csv'), of_function:
        with pytest.raises(UserError, match='all: the images have no classes'):
            opening.make_opener()(data, 'all')
        assert opening.make_opener(needs_classes=False)(data, 'all').class_names == ()


def test_what_would_be_read_as_images_is_no_output_folder(root, tmp_path):
    classes = root / 'train'
    (tmp_path / 'link').symlink_to(classes)
    (root / 'run/checkpoints/5').mkdir(parents=True)  # of a run that is resumed
    inside = [('train/run', root), ('train', root), ('test/a/run', root), ('run', classes)]
    inside += [('', classes), ('a/b', classes), ('link/run', classes), ('link/run', root)]
    for name, data in inside:
        folder = classes / name if data == classes and 'link' not in name else root / name
        with pytest.raises(UserError, match=re.escape(f'{folder}: inside the image folder {data}')):
            opening.require_outside(str(folder), 'digits', str(data))
    outside = [root / 'run', root.parent / 'run', root / 'models', classes / '.runs/1']
    for folder in [*map(str, outside), 'gs://bucket/run']:
        opening.require_outside(folder, str(root), None, lambda split: None)
    opening.require_outside(str(classes / '.runs/1'), str(classes), 'digits')


def test_images_of_some_classes_alone_get_the_numbers_of_their_order(root):
    write_image(root / 'train' / 'emu' / '0.png')
    write_image(root / 'test' / 'emu' / '0.png')
    opened, both = opening.make_opener(), ('emu', 'dog')
    every, some = opened(str(root), 'train'), opened(str(root), 'train', classes=both)
    assert some.class_names == both and sorted(some.labels) == [0] + [1] * 6
    assert some.read(2)[1] == some.labels[2]
    names = [name for name in described(every) if '/cat/' not in name]
    assert described(some) == names
    with pytest.raises(UserError, match='dgo'):
        opened(str(root), 'train', classes=('dgo', 'cat'))
    cat = int(np.argmin(every.labels))
    with pytest.raises(UserError, match='dog'):
        opened(str(root), f'train[{cat}:{cat + 1}]', classes=('dog',))


def test_what_begins_with_a_dot_is_left_out_everywhere(root):
    write_image(root / 'train' / 'cat' / '.thumbnails' / '0.png')
    write_image(root / 'train' / 'cat' / '._0.png')
    write_image(root / 'train' / '.cache' / '0.png')
    write_image(root / '.val' / 'cat' / '0.png')
    assert len(opening.make_opener()(str(root), 'train')) == 12
    assert len(folders.unlabeled_source([str(root)])) == 12 + 4
    hidden = root / '.val'  # but for what is asked for
    assert described(folders.unlabeled_source([str(hidden)])) == [str(hidden / 'cat' / '0.png')]


def test_a_link_to_no_file_is_an_image_that_cannot_be_read(root):
    link = root / 'train' / 'cat' / 'lost.png'
    link.symlink_to(root / 'nowhere.png')
    (root / 'train' / 'cat' / 'found.png').symlink_to(root / 'train' / 'cat' / '0.png')
    (root / 'train' / 'dog' / 'more').symlink_to(root / 'train' / 'cat')  # followed
    source = opening.make_opener()(str(root), 'train')
    assert len(source) == 12 + 2 + 8 and str(link) in described(source)
    reader = loading.ImageReader(source, Resize(), (8, 8), exif_rotation=True)
    with pytest.raises(ValueError, match=f'^{link}: '):
        reader.example(described(source).index(str(link)))


@pytest.fixture
def flat(tmp_path):
    for name, count in ('cat', 10), ('dog', 5), ('emu', 2):
        for i in range(count):
            write_image(tmp_path / name / f'{i}.png', i)
    return tmp_path


def test_a_folder_without_splits_holds_out_a_share_of_every_class(flat, caplog):
    held_out = opening.HeldOut(fraction=0.2)
    train, test = (opening.make_opener(held_out)(str(flat), s) for s in ('train', 'test'))
    assert train.class_names == test.class_names == ('cat', 'dog', 'emu')
    assert set(test.labels) == set(train.labels) == {0, 1, 2}
    assert not set(described(train)) & set(described(test)) and len(train) + len(test) == 17
    assert caplog.text.count(f'{len(test)} of 17') == 1
    whole = opening.make_opener(held_out)(str(flat), 'all')
    assert {*described(whole)} == {*described(train), *described(test)} and len(whole) == 17
    again = opening.make_opener(held_out)(str(flat), 'test')
    assert described(again) == described(test)
    other = opening.make_opener(opening.HeldOut(fraction=0.2, seed=1))(str(flat), 'test')
    assert described(other) != described(test)


def table_of(folder, counts):
    """A table of so many images of each class, which are empty files."""
    for name, count in counts.items():
        (folder / name).mkdir(exist_ok=True)
        for i in range(count):
            (folder / name / f'{i}.jpg').touch()
    lines = [f'{name}/{i}.jpg,{name}' for name, count in counts.items() for i in range(count)]
    (folder / 'table.csv').write_text('\n'.join(['path,label', *lines]))
    return str(folder / 'table.csv')


@pytest.mark.gate
def test_what_is_held_out_is_so_by_its_name_whatever_comes_goes_or_moves(tmp_path):
    """Photos are added, others removed, and all moved elsewhere: no test image is trained on."""

    def split(folder, counts):
        folder.mkdir(exist_ok=True)
        opened = opening.make_opener()
        sides = (opened(table_of(folder, counts), name) for name in ('train', 'test'))
        return [{name.removeprefix(f'{folder}/') for name in described(side)} for side in sides]

    train, test = split(tmp_path / 'a', {'cat': 1000, 'dog': 300})
    later, later_test = split(tmp_path / 'b', {'ant': 200, 'cat': 1500, 'dog': 200})
    assert not test & later and not train & later_test
    assert len(test) == pytest.approx(130, abs=5 * np.sqrt(130))  # 5 deviations


@pytest.mark.parametrize('fraction', [0.01, 0.1, 0.3, 0.9])
def test_the_held_out_part_of_small_classes_is_balanced(fraction, tmp_path):
    counts = {f'class {n}': n for n in (2, 3, 5, 9, 10, 41, 100)}
    opened = opening.make_opener(opening.HeldOut(fraction=fraction, seed=3))
    test = opened(table_of(tmp_path, counts), 'test')
    found = dict(zip(test.class_names, np.bincount(test.labels).tolist(), strict=True))
    assert found == {k: min(max(1, round(fraction * n)), n - 1) for k, n in counts.items()}


def my_data(split):
    """One's own data, as a configuration may hold it."""
    if split not in ('train', 'test'):
        raise UserError(f'my data has no {split}')
    labels = np.arange(10 if split == 'train' else 4) % 2
    images = np.ones((len(labels), 4, 4), np.uint8) * labels[:, None, None].astype(np.uint8)
    return array_source(images, labels, ['a', 'b'], name=f'mine/{split}')


def no_data(split):
    return []


def test_a_function_is_data():
    opened = opening.make_opener()
    train, part = opened(my_data, 'train'), opened(my_data, 'train[7:]')
    assert len(train) == 10 and described(part) == [f'mine/train[{i}]' for i in (7, 8, 9)]
    assert part.labels.tolist() == [1, 0, 1] and (part.read(0)[0] == 1).all()
    assert opened(my_data, 'train') is train
    with pytest.raises(UserError, match='no val$'):
        opened(my_data, 'val')
    with pytest.raises(UserError, match=r'test_opening:my_data.*test\[4:\]'):
        opened(my_data, 'test[4:]')
    with pytest.raises(UserError, match='test_opening:no_data'):
        opened(no_data, 'train')


ORDERS = [
    [*map(str, range(12))],
    ['1', '2', '10', '100'],
    ['-1', '0', '1', '+2'],
    ['8', '9', '9.5', '10'],
    ['01', '2', '10'],
    ['٢', '١٠'],
    [str(10**30), str(10**31)],
    ['7', '9' * 200],
    ['1', '10', '2', 'x'],
    ['class_1', 'class_10', 'class_2'],
    ['1e5', '20', 'inf'],
    ['n01440764', 'n01443537'],
]


@pytest.mark.parametrize('names', ORDERS, ids=lambda names: names[0][:9])
def test_classes_are_in_the_order_of_numbers_if_all_are_numbers(names):
    assert sort_class_names(reversed(names)) == names


LAYOUTS = {
    'CLASS/ITEM': ['cat/item1/a.jpg', 'cat/item2/a.jpg', 'dog/item1/a.jpg', 'dog/item2/a.jpg'],
    'CLASS/YEAR/MONTH': ['cat/2024/01/a.jpg', 'cat/2025/a.jpg', 'dog/2024/a.jpg', 'dog/b.jpg'],
    'some directly': ['cat/a.jpg', 'cat/deep/b.jpg', 'dog/deep/a.jpg', 'dog/deeper/b.jpg'],
    'systems': ['cat/a.jpg', 'cat/b.jpg', 'dog/a.jpg', 'dog/b.jpg', '__MACOSX/cat/a.jpg'],
    'thumbnails': ['cat/a.jpg', 'cat/@eaDir/a.jpg', 'cat/b.jpg', 'dog/a.jpg', 'dog/b.jpg'],
    'Split/CLASS': [f'{s}/{c}/1.jpg' for s in ('Train', 'Test') for c in ('cat', 'dog')],
    'split/CLASS/ITEM': [f'{s}/{c}/x/1.jpg' for s in ('train', 'valid') for c in ('cat', 'dog')],
}


@pytest.mark.parametrize('files', LAYOUTS.values(), ids=LAYOUTS)
def test_images_are_found_below_their_classes(files, tmp_path):
    for file in files:
        write_image(tmp_path / file)
    opened = opening.make_opener()
    splits = [opened(str(tmp_path), split) for split in ('train', 'test')]
    assert all(split.class_names == ('cat', 'dog') for split in splits)
    assert sum(map(len, splits)) == 4


@pytest.mark.parametrize('loose', ['a.jpg', 'train/a.jpg', 'test/a.jpg'])
def test_images_outside_of_classes_are_counted(loose, root, caplog):
    write_image(root / loose)
    assert [len(opening.make_opener()(str(root), split)) for split in ('train', 'test')] == [12, 4]
    assert f'{(root / loose).parent}: 1 ' in caplog.text and 'a.jpg' in caplog.text


def test_links_are_followed_but_each_folder_is_read_once(root, caplog):
    (root / 'elsewhere').mkdir()
    write_image(root / 'elsewhere' / 'deep' / 'a.jpg')
    (root / 'train' / 'cat' / 'more').symlink_to(root / 'elsewhere')
    (root / 'train' / 'cat' / 'again').symlink_to(root / 'elsewhere')
    (root / 'train' / 'cat' / 'self').symlink_to(root / 'train' / 'cat')
    (root / 'elsewhere' / 'deep' / 'up').symlink_to('..')
    assert len(opening.make_opener()(str(root), 'train')) == 13
    assert caplog.text.count('skipped') == 3


@pytest.mark.parametrize('kind', ['lines', 'paths', 'links'])
def test_a_file_that_is_there_twice_is_on_one_side(kind, tmp_path):
    for name in 'cat', 'dog':
        for i in range(12):
            write_image(tmp_path / name / f'{i}.png', i)
        if kind == 'links':
            (tmp_path / name / 'best').mkdir()
            for i in range(12):
                (tmp_path / name / 'best' / f'{i}.png').symlink_to(f'../{i}.png')
    data = tmp_path
    if kind != 'links':
        again = {'lines': '', 'paths': '../cat/'}[kind]
        paths = [(f'cat/{i}.png', f'cat/{again}{i}.png') for i in range(12)]
        lines = [f'{path},cat' for pair in paths for path in pair]
        lines += [f'dog/{i}.png,dog' for i in range(12)]
        data = tmp_path / 't.csv'
        data.write_text('\n'.join(['path,label', *lines]))
    opened = opening.make_opener(opening.HeldOut(fraction=0.3))
    train, test = ({*map(os.path.realpath, described(opened(str(data), s)))} for s in SPLITS)
    assert not train & test and len(train | test) == 24


SPLITS = 'train', 'test'
LINKS = {
    'to a folder': {'cat/best': 'zzz', 'dog/a': 'zzz'},
    'to images': {f'cat/{i}.png': f'zzz/{i}.png' for i in range(8)},
    'to images of another class': {f'ant/{i}.png': f'../cat/zzz/{i}.png' for i in range(8)},
    'to a class': {'ant': 'cat'},
}


@pytest.mark.parametrize('links', LINKS.values(), ids=LINKS)
def test_an_image_is_on_the_same_side_whatever_links_lead_to_it(links, tmp_path):
    for name in 'cat', 'dog':
        for i in range(12):
            write_image(tmp_path / name / 'zzz' / f'{i}.png')

    def held_out():
        return {*map(os.path.realpath, described(opening.make_opener()(str(tmp_path), 'test')))}

    before = held_out()
    for name, target in links.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(target)
    assert held_out() == before


IMAGES = RNG.integers(0, 256, (12, 4, 4, 3), np.uint8)
LABELS = np.arange(12) % 3
ARRAYS = {'train_images': IMAGES, 'train_labels': LABELS}


@pytest.mark.parametrize(
    'labels, names, class_names',
    [
        (LABELS, {}, ('0', '1', '2')),
        (LABELS[:, None], {'class_names': [b'x', b'y ', b'z']}, ('x', 'y', 'z')),
        (np.eye(3, dtype=int)[LABELS], {'class_names': ['a', 'b', 'c']}, ('a', 'b', 'c')),
    ],
)
def test_a_file_of_arrays_is_data(labels, names, class_names, tmp_path):
    np.savez(tmp_path / 'a.npz', train_images=IMAGES, train_labels=labels, **names)
    source = opening.make_opener()(str(tmp_path / 'a.npz'), 'train')
    assert source.class_names == class_names
    assert source.multi_label == (labels.shape == (12, 3))
    np.testing.assert_array_equal(source.labels, labels.reshape(source.labels.shape))


def test_arrays_without_splits_hold_out_a_share_of_every_class(tmp_path):
    np.savez(tmp_path / 'a.npz', all_images=IMAGES, all_labels=LABELS)
    opened = opening.make_opener()
    train, test = (opened(str(tmp_path / 'a.npz'), split) for split in ('train', 'test'))
    assert sorted(test.labels) == [0, 1, 2] and len(train) == 9
    assert not {*described(train)} & {*described(test)}


CHANGES = {
    'train_labels': [
        np.array(list('abc'))[LABELS],
        LABELS.astype(object),
        LABELS / 2,
        LABELS + 10**9,
        LABELS - 1,
        np.eye(3, dtype=int)[LABELS] * 2,
    ],
    'train_images': [IMAGES[:0], IMAGES.reshape(12, -1), IMAGES * 1.0],
    'class_names': [np.array(['a', 'b', 'c'], object), np.array([['a', 'b', 'c']])],
}


def test_a_file_of_arrays_that_cannot_be_used_is_named(tmp_path):
    path = tmp_path / 'a.npz'
    np.savez(path, **ARRAYS)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[200] ^= 255
    files = [whole[:-200], b'', b'<html>', bytes(flipped)]
    files += [{name: value} for name, values in CHANGES.items() for value in values]
    for damaged in files:
        if isinstance(damaged, dict):
            np.savez(path, **ARRAYS | damaged)
        else:
            path.write_bytes(damaged)
        with pytest.raises(UserError, match='a.npz'):
            opening.make_opener()(str(path), 'train')
