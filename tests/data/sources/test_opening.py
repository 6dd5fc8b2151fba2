import json
import os
import pathlib
import shutil

import cv2
import numpy as np
import pytest
from sklearn.datasets import load_digits

from vit_jax.base.errors import MissingFile, UserError
from vit_jax.data import loading
from vit_jax.data.image_preprocessing import Resize
from vit_jax.data.sources import folders, opening
from vit_jax.data.sources.arrays import array_source
from vit_jax.data.sources.base import relative_names

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


def test_a_folder_gives_every_image_with_the_class_of_its_folder(root):
    source = opening.make_opener()(str(root), 'train')
    assert source.class_names == ('cat', 'dog')
    assert sorted(source.labels) == [0] * 6 + [1] * 6
    for i in range(len(source)):
        name = source.class_names[source.labels[i]]
        assert f'/{name}/' in source.name_of(i)
        stored = pathlib.Path(source.name_of(i)).read_bytes()
        assert source.read(i) == (stored, source.labels[i])


@pytest.mark.parametrize('data', ['cats/all', '/photos/cats/all'])
def test_a_name_does_not_tell_by_which_path_the_data_was_given(data):
    names = [f'{data}/cats/x.jpg', f'{data}/cats/cats/x.jpg']
    assert relative_names(names, data) == ['cats/x.jpg', 'cats/cats/x.jpg']


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


def test_parts_of_other_classes_are_not_joined():
    def own(split):
        images, labels = np.zeros((4, 2, 2), np.uint8), np.zeros(4, int)
        return array_source(images, labels, ['a', split], name=split)

    with pytest.raises(UserError, match=r"split 'train\+test' of .* different classes"):
        opening.make_opener()(own, 'train+test')


def test_images_of_some_classes_alone_get_the_numbers_of_their_order(root):
    write_image(root / 'train' / 'emu' / '0.png')
    write_image(root / 'test' / 'emu' / '0.png')
    opened, both = opening.make_opener(), ('emu', 'dog')
    every, some = opened(str(root), 'train'), opened(str(root), 'train', classes=both)
    assert some.class_names == both and sorted(some.labels) == [0] + [1] * 6
    assert some.read(2)[1] == some.labels[2]
    names = [name for name in described(every) if '/cat/' not in name]
    assert described(some) == names
    with pytest.raises(UserError, match="classes: .* has no class 'dgo'; did you mean 'dog'"):
        opened(str(root), 'train', classes=('dgo', 'cat'))
    cat = int(np.argmin(every.labels))
    with pytest.raises(UserError, match="no image has one of the classes 'dog'"):
        opened(str(root), f'train[{cat}:{cat + 1}]', classes=('dog',))


@pytest.mark.parametrize(
    'split', ['train[', 'train[10]', 'train[:a%]', '', 'train+', 'train[:2]+[2:]', 'train++test']
)
def test_a_split_that_is_none_is_explained(split):
    with pytest.raises(ValueError, match='expected a name, or'):
        opening.make_opener()('digits', split)


def test_an_empty_slice_is_an_error():
    with pytest.raises(ValueError, match=r"'train\[5000:\]' of digits is empty: train has 1,438"):
        opening.make_opener()('digits', 'train[5000:]')


def test_what_is_not_there_is_named(root, tmp_path):
    with pytest.raises(MissingFile, match='where.npz.*no such file'):
        opening.make_opener()('/no/where.npz', 'train')
    with pytest.raises(MissingFile, match="data='/no/where'"):
        opening.make_opener()('/no/where', 'train')
    (tmp_path / 'file').touch()
    (tmp_path / 'd.csv').mkdir()
    for name, why in ('file', 'is no folder; expected a folder'), ('d.csv', 'd.csv: a folder'):
        with pytest.raises(ValueError, match=why):
            opening.make_opener()(str(tmp_path / name), 'train')
    advice = (
        "--config.train_split='train\\[:90%\\]' --config.eval_split='train\\[90%:\\]'; in vit.*$"
    )
    shutil.rmtree(root / 'test')
    with pytest.raises(ValueError, match=f"no split 'test'; known: train; .*: {advice}"):
        opening.make_opener()(str(root), 'test')
    with pytest.raises(ValueError, match="no split 'trian'; did you mean 'train'"):
        opening.make_opener()('digits', 'trian')
    empty = tmp_path / 'empty'
    empty.mkdir()
    with pytest.raises(ValueError, match='empty: no folders of classes; expected .*empty/CLASS'):
        opening.make_opener()(str(empty), 'train')


def test_a_class_missing_in_one_split_is_named(root):
    write_image(root / 'train' / 'emu' / '0.png')
    for split in 'train', 'test':
        with pytest.raises(ValueError, match="class 'emu' is in train/ but not in test/"):
            opening.make_opener()(str(root), split)


def test_classes_of_one_split_in_another_spelling_are_named(root):
    for old, new in {'cat': 'Cat', 'dog': 'Dog '}.items():
        (root / 'test' / old).rename(root / 'test' / new)
    for split in 'train', 'test':
        with pytest.raises(UserError) as refused:
            opening.make_opener()(str(root), split)
        assert all(f'class {n!r} is in te' in str(refused.value) for n in ('Cat', 'Dog '))


def test_a_class_without_images_is_named(root):
    for split in 'train', 'test':
        (root / split / 'emu').mkdir()
        (root / split / 'fox').mkdir()
    with pytest.raises(ValueError) as refused:
        opening.make_opener()(str(root), 'train')
    for name in 'emu', 'fox':
        assert f'{root}/train/{name}: no images in this folder' in str(refused.value)
    (root / 'train' / 'emu' / 'notes.txt').write_text('none yet')
    with pytest.raises(ValueError, match='1 file of other endings, such as .*notes.txt: add'):
        opening.make_opener()(str(root), 'train')


def test_files_that_are_no_images_by_their_ending_are_left_out_with_a_warning(root, caplog):
    (root / 'train' / 'cat' / 'notes.txt').write_text('a cat')
    assert len(opening.make_opener()(str(root), 'train')) == 12
    assert 'left out 1 file of other endings' in caplog.text


def test_a_photo_counts_under_every_ending_of_a_format_that_is_read(root, caplog):
    endings = '.jfif .jpe .pgm .pnm .j2k .JPG .HEIC'.split()  # the last is read with pillow-heif
    for ending in endings:
        (root / 'test' / 'cat' / f'x{ending}').touch()
    found = folders.image_files(root / 'test' / 'cat')
    assert {f'{root}/test/cat/x{ending}' for ending in endings} < {*found}
    assert not caplog.text


def test_what_begins_with_a_dot_is_left_out_everywhere(root):
    write_image(root / 'train' / 'cat' / '.thumbnails' / '0.png')
    write_image(root / 'train' / 'cat' / '._0.png')
    write_image(root / 'train' / '.cache' / '0.png')
    write_image(root / '.val' / 'cat' / '0.png')
    assert len(opening.make_opener()(str(root), 'train')) == 12
    assert len(folders.unlabelled([str(root)])) == 12 + 4
    hidden = root / '.val'  # but for what is asked for
    assert described(folders.unlabelled([str(hidden)])) == [str(hidden / 'cat' / '0.png')]


def test_a_link_to_no_file_is_an_image_that_cannot_be_read(root):
    link = root / 'train' / 'cat' / 'lost.png'
    link.symlink_to(root / 'nowhere.png')
    (root / 'train' / 'cat' / 'found.png').symlink_to(root / 'train' / 'cat' / '0.png')
    (root / 'train' / 'dog' / 'more').symlink_to(root / 'train' / 'cat')  # followed
    source = opening.make_opener()(str(root), 'train')
    assert len(source) == 12 + 2 + 8 and str(link) in described(source)
    reader = loading.ImageReader(source, Resize(), (8, 8), exif_rotation=True)
    with pytest.raises(ValueError, match=f'^{link}: No such file or directory$'):
        reader.example(loading.ExampleRef(described(source).index(str(link))))


def test_arrays_of_a_file(tmp_path):
    path = str(tmp_path / 'set.npz')
    images, labels = RNG.integers(0, 256, (5, 4, 4), np.uint8), np.array([0, 1, 2, 1, 0])
    np.savez(path, train_images=images, train_labels=labels, class_names=['a', 'b', 'c'])
    source = opening.make_opener()(path, 'train')
    assert source.class_names == ('a', 'b', 'c') and source.labels.tolist() == labels.tolist()
    np.testing.assert_array_equal(source.read(3)[0], images[3])
    sizes = source.read_sizes(range(5))
    images[3, 0, 0] ^= 1
    changed = array_source(images, labels, 'abc', name='x').read_sizes(range(5))
    assert (sizes != changed).tolist() == [False, False, False, True, False]
    with pytest.raises(ValueError, match="no split 'test'; known: train"):
        opening.make_opener()(path, 'test')


@pytest.mark.parametrize(
    'images, labels, message',
    [
        (np.zeros((2, 4, 4)), [0, 1], 'images are float64'),
        (np.zeros((2, 4, 4, 2), np.uint8), [0, 1], r'uint8\[2, 4, 4, 2\], expected'),
        (np.zeros((2, 4, 4), np.uint8), [0], r'labels are int64\[1\]'),
        (np.zeros((2, 4, 4), np.uint8), [0, 2], 'label 2 of image 1 is out of range: .* 0 to 1'),
        (np.zeros((2, 4, 4), np.uint8), [-1, 0], 'label -1 of image 0 is out of range'),
    ],
)
def test_arrays_that_are_no_labelled_images_are_refused(images, labels, message):
    with pytest.raises(ValueError, match=message):
        array_source(images, np.array(labels), ['a', 'b'], name='x')


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
    assert caplog.text.count(f'{len(test)} of 17 images are held out') == 1
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


def test_a_class_too_small_to_hold_out_of_is_named(flat):
    write_image(flat / 'fox' / '0.png')
    write_image(flat / 'gnu' / '0.png')
    for name in 'fox', 'gnu':
        with pytest.raises(
            ValueError, match=f"(?s){name}/0.png: of class '{name}' this is the only"
        ):
            opening.make_opener()(str(flat), 'train')
    for fraction in 0.0, 1.0, float('nan'):
        with pytest.raises(ValueError, match='HeldOut.fraction=.*: expected more than 0'):
            opening.HeldOut(fraction=fraction)


def test_split_names_are_never_taken_for_classes(tmp_path):
    for split in 'train', 'test':
        write_image(tmp_path / split / '0.png')
    with pytest.raises(ValueError, match='train: no folders of classes; expected .*train/CLASS'):
        opening.make_opener()(str(tmp_path), 'train')


def test_an_opener_looks_through_a_folder_once(root):
    opened = opening.make_opener()
    whole = described(opened(str(root), 'train'))
    write_image(root / 'train' / 'cat' / 'late.png')
    parts = (opened(str(root), split) for split in ('train[:50%]', 'train[50%:]'))
    assert [name for part in parts for name in described(part)] == whole
    assert len(opening.make_opener()(str(root), 'train')) == 13


def test_arrays_may_be_multi_label(tmp_path):
    path, labels = str(tmp_path / 'set.npz'), np.array([[0, 1, 1], [0, 0, 0]])
    np.savez(path, train_images=np.zeros((2, 4, 4), np.uint8), train_labels=labels)
    source = opening.make_opener()(path, 'train')
    assert source.multi_label and source.label_shape == (3,)
    np.testing.assert_array_equal(source.labels, labels)
    with pytest.raises(ValueError, match='label 2 of image 1 is out of range: there are 0 or 1'):
        array_source(np.zeros((2, 4, 4), np.uint8), labels * 0 + [[0], [2]], 'abc', name='x')


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
    with pytest.raises(UserError, match='my data has no val'):
        opened(my_data, 'val')
    with pytest.raises(UserError, match=r"'test\[4:\]' of .*test_opening:my_data is empty"):
        opened(my_data, 'test[4:]')
    with pytest.raises(UserError, match=r"test_opening:no_data\('train'\) is no Source: \[\]"):
        opened(no_data, 'train')


def test_data_of_a_mistyped_name_are_guessed_by_what_lies_beside_it(tmp_path):
    (tmp_path / 'photos').mkdir()
    (tmp_path / 'birds.csv').write_text('')
    for wrong, meant in {'phtos': 'photos', 'brids.csv': 'birds.csv'}.items():
        with pytest.raises(FileNotFoundError, match=f"did you mean '{tmp_path}/{meant}'\\?$"):
            opening.open_splits(str(tmp_path / wrong))


def test_names_that_are_no_unicode_are_held_out_too(tmp_path):
    for name in b'bad\xff', b'good':
        folder = os.path.join(os.fsencode(tmp_path), name)
        os.mkdir(folder)
        for i in range(3):
            open(os.path.join(folder, b'%d.png' % i), 'w').close()
    train, test = (opening.make_opener()(str(tmp_path), name) for name in ('train', 'test'))
    assert len(train) + len(test) == 6 and train.class_names == ('bad\udcff', 'good')


def test_a_link_to_itself_is_a_file_that_cannot_be_read(root):
    for link in root / 'loop', root / 'train' / 'loop', root / 'train' / 'cat' / 'self.png':
        link.symlink_to(link.name)
    assert len(opening.make_opener()(str(root), 'train')) == 12 + 1
    assert len(folders.unlabelled([str(root)])) == 16 + 1


def test_a_pipe_is_an_image_that_cannot_be_read(root):
    os.mkfifo(pipe := root / 'train' / 'cat' / 'pipe.png')
    source = opening.make_opener()(str(root), 'train')
    with pytest.raises(UserError, match='not a regular file'):
        source.read(described(source).index(str(pipe)))
    with pytest.raises(UserError, match='pipe.png: neither a regular file nor a folder'):
        folders.unlabelled([str(pipe)])


def write_class(folder, name, door):
    """One image of a class, in data of some kind; returns what names the data."""
    if door in ('classes', 'splits'):
        within = folder if door == 'classes' else folder / 'train'
        (within / name).mkdir(parents=True, exist_ok=True)
        (within / name / 'a.jpg').touch()
        return str(folder)
    (folder / 'a.jpg').touch()
    file = folder / f'table.{door}'
    path = f'x/../{len(file.read_text()) if file.exists() else 0}/../a.jpg'  # each image once
    (folder / path.split('/')[2]).mkdir(exist_ok=True)
    (folder / 'x').mkdir(exist_ok=True)
    with file.open('a') as lines:
        if door == 'jsonl':
            lines.write(json.dumps({'path': path, 'label': name}) + '\n')
        else:
            lines.write(('path,label\n' if not lines.tell() else '') + f'{path},"{name}"\n')
    return str(file)


DOORS = 'classes', 'splits', 'csv', 'jsonl'
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
@pytest.mark.parametrize('door', DOORS)
def test_classes_have_one_order_in_all_data(door, names, tmp_path):
    for name in reversed(names):
        data = write_class(tmp_path, name, door)
    split = {'splits': 'train'}.get(door, 'all')
    assert list(opening.make_opener()(data, split).class_names) == names


LAYOUTS = {
    'CLASS/ITEM': ['cat/item1/a.jpg', 'cat/item2/a.jpg', 'dog/item1/a.jpg', 'dog/item2/a.jpg'],
    'CLASS/YEAR/MONTH': ['cat/2024/01/a.jpg', 'cat/2025/a.jpg', 'dog/2024/a.jpg', 'dog/b.jpg'],
    'wrapper/CLASS': [f'images/{c}/{i}.jpg' for c in ('cat', 'dog') for i in '12'],
    'two wrappers': [f'set/images/{c}/{i}.jpg' for c in ('cat', 'dog') for i in '12'],
    'some directly': ['cat/a.jpg', 'cat/deep/b.jpg', 'dog/deep/a.jpg', 'dog/deeper/b.jpg'],
    'systems': ['cat/a.jpg', 'cat/b.jpg', 'dog/a.jpg', 'dog/b.jpg', '__MACOSX/cat/a.jpg'],
    'thumbnails': ['cat/a.jpg', 'cat/@eaDir/a.jpg', 'cat/b.jpg', 'dog/a.jpg', 'dog/b.jpg'],
    'Split/CLASS': [f'{s}/{c}/1.jpg' for s in ('Train', 'Test') for c in ('cat', 'dog')],
    'wrapper/split': [f'set/{s}/{c}/1.jpg' for s in ('train', 'val') for c in ('cat', 'dog')],
    'split/CLASS/ITEM': [f'{s}/{c}/x/1.jpg' for s in ('train', 'test') for c in ('cat', 'dog')],
}


@pytest.mark.parametrize('files', LAYOUTS.values(), ids=LAYOUTS)
def test_images_are_found_below_their_classes(files, tmp_path):
    for file in files:
        write_image(tmp_path / file)
    opened = opening.make_opener()
    splits = [opened(str(tmp_path), split) for split in ('train', 'test')]
    assert all(split.class_names == ('cat', 'dog') for split in splits)
    assert sum(map(len, splits)) == 4


@pytest.mark.parametrize('loose', ['a.jpg', 'train/a.jpg', 'test/a.jpg', 'more/a.jpg'])
def test_images_outside_of_classes_are_counted(loose, root, caplog):
    write_image(root / loose)
    assert [len(opening.make_opener()(str(root), split)) for split in ('train', 'test')] == [12, 4]
    assert (
        f'{(root / loose).parent}: 1 image in no folder of a class left out, such as a.jpg'
        in caplog.text
    )


def test_links_are_followed_but_each_folder_is_read_once(root, caplog):
    (root / 'elsewhere').mkdir()
    write_image(root / 'elsewhere' / 'deep' / 'a.jpg')
    (root / 'train' / 'cat' / 'more').symlink_to(root / 'elsewhere')
    (root / 'train' / 'cat' / 'again').symlink_to(root / 'elsewhere')
    (root / 'train' / 'cat' / 'self').symlink_to(root / 'train' / 'cat')
    (root / 'elsewhere' / 'deep' / 'up').symlink_to('..')
    assert len(opening.make_opener()(str(root), 'train')) == 13
    assert caplog.text.count('left out, as it was read by another path') == 3


IMAGES = RNG.integers(0, 256, (12, 4, 4, 3), np.uint8)
LABELS = np.arange(12) % 3
ARRAYS = {'train_images': IMAGES, 'train_labels': LABELS}


@pytest.mark.parametrize('shape', [(12,), (12, 1)])
@pytest.mark.parametrize('names', [{}, {'class_names': ['a', 'b', 'c']}])
def test_labels_may_be_a_column(shape, names, tmp_path):
    for classes in 2, 3:
        labels = (LABELS % classes).reshape(shape)
        np.savez(tmp_path / 'a.npz', train_images=IMAGES, train_labels=labels, **names)
        source = opening.open_splits(str(tmp_path / 'a.npz'))['train']()
        assert not source.multi_label and source.labels.tolist() == (LABELS % classes).tolist()
        assert len(source.class_names) == (len(*names.values()) if names else classes)


def damaged_files(folder):
    """Files of arrays that cannot be used, by what is wrong with them."""
    np.savez(folder / 'whole.npz', **ARRAYS)
    whole = (folder / 'whole.npz').read_bytes()
    flipped = bytearray(whole)
    flipped[200] ^= 255
    found = {'cut': whole[:-200], 'half': whole[: len(whole) // 2], 'empty': b'', 'web': b'<html>'}
    found |= {'zip of nothing': b'PK\5\6' + bytes(18), 'flipped': bytes(flipped)}
    for name, data in found.items():
        (folder / f'{name}.npz').write_bytes(data)
    with (folder / 'npy.npz').open('wb') as file:
        np.save(file, IMAGES)
    changes = {
        'words': {'train_labels': np.array(list('abc'))[LABELS]},
        'objects': {'train_labels': LABELS.astype(object)},
        'names': {'class_names': np.array(['a', 'b', 'c'], object)},
        'nan': {'train_labels': np.where(LABELS == 0, np.nan, 1)},
        'halves': {'train_labels': LABELS / 2},
        'nothing': {'train_images': IMAGES[:0], 'train_labels': LABELS[:0]},
        'ids': {'train_labels': LABELS + 10**9},
        'negative': {'train_labels': LABELS - 1},
        'flat': {'train_images': IMAGES.reshape(12, -1)},
        'alone': {'train_labels': np.array(1)},
    }
    for name, changed in changes.items():
        np.savez(folder / f'{name}.npz', **ARRAYS | changed)
    return [*found, 'npy', *changes]


def test_a_file_of_arrays_that_cannot_be_used_is_named(tmp_path):
    for name in damaged_files(tmp_path):
        with pytest.raises(UserError, match=f'{name}.npz') as refused:
            opening.make_opener()(str(tmp_path / f'{name}.npz'), 'train')
        assert '\n' not in str(refused.value)


def test_capitalized_folders_are_splits_only_among_splits(tmp_path):
    for name in 'Train', 'Bus', 'Car':
        for i in range(3):
            write_image(tmp_path / name / f'{i}.png')
    assert opening.make_opener()(str(tmp_path), 'train').class_names == ('Bus', 'Car', 'Train')


@pytest.mark.parametrize(
    'names', ['Training Testing', 'train testing', 'train val', 'train validation', 'train valid']
)
def test_splits_may_have_other_names(names, root):
    for old, new in zip(('train', 'test'), names.split(), strict=True):
        (root / old).rename(root / new)
    assert [len(opening.make_opener()(str(root), split)) for split in ('train', 'test')] == [12, 4]


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


def test_a_link_to_a_folder_renames_no_image_and_changes_no_slice(root):
    def slices():
        opened = opening.make_opener()
        return [described(opened(str(root), f'train{part}')) for part in ('[:60%]', '[60%:]')]

    (root / 'train' / 'cat').rename(root / 'zzz')
    (root / 'train' / 'cat').mkdir()
    (root / 'zzz').rename(root / 'train' / 'cat' / 'zzz')
    before = slices()
    (root / 'train' / 'cat' / 'best').symlink_to('zzz')
    assert slices() == before


def test_class_names_of_arrays_may_be_bytes(tmp_path):
    names = np.array([b'x', b'y ', b'z'])
    np.savez(tmp_path / 'a.npz', **ARRAYS, class_names=names)
    source = opening.open_splits(str(tmp_path / 'a.npz'))['train']()
    assert source.class_names == ('x', 'y', 'z')
    np.savez(tmp_path / 'a.npz', **ARRAYS, class_names=names[:, None])
    with pytest.raises(UserError, match='a.npz: class_names are'):
        opening.open_splits(str(tmp_path / 'a.npz'))
