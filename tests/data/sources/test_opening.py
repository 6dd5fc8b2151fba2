import pathlib

import cv2
import numpy as np
import pytest

from vit_jax.data.sources import opening
from vit_jax.data.sources.arrays import arrays

RNG = np.random.default_rng(0)


def write_image(path: pathlib.Path, value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), np.full((8, 8, 3), value, np.uint8))


@pytest.fixture
def root(tmp_path):
    for split, count in ('train', 6), ('test', 2):
        for label, name in enumerate(['cat', 'dog']):
            for i in range(count):
                write_image(tmp_path / split / name / f'{i}.png', 100 * label + i)
    return tmp_path


def test_digits_are_all_there_once():
    train, test = (opening.open_source('digits', split) for split in ('train', 'test'))
    assert len(train) + len(test) == 1797 and len(test) == 359
    assert train.class_names == tuple('0123456789')
    assert train.read(0)[0].dtype == np.uint8
    assert max(train.read(i)[0].max() for i in range(100)) == 255
    assert set(np.unique(test.labels)) == set(range(10))


def test_a_folder_gives_every_image_with_the_class_of_its_folder(root):
    source = opening.open_source(str(root), 'train')
    assert source.class_names == ('cat', 'dog')
    assert sorted(source.labels) == [0] * 6 + [1] * 6
    for i in range(len(source)):
        name = source.class_names[source.labels[i]]
        assert f'/{name}/' in source.name_of(i)
        stored = pathlib.Path(source.name_of(i)).read_bytes()
        assert source.read(i) == (stored, source.labels[i])


def test_slices_of_a_split_are_disjoint_complete_and_fair(root):
    def names(split):
        source = opening.open_source(str(root), split)
        return [source.name_of(i) for i in range(len(source))]

    first, rest = names('train[:75%]'), names('train[75%:]')
    assert len(first) == 9 and first + rest == names('train')
    assert names('train[2:4]') == names('train')[2:4]
    labels = opening.open_source(str(root), 'train[:50%]').labels
    assert 0 < labels.sum() < 6  # not the first class alone


@pytest.mark.parametrize('split', ['train[', 'train[10]', 'train[:a%]', 'tr ain'])
def test_a_split_that_is_none_is_explained(split):
    with pytest.raises(ValueError, match='expected a name, or'):
        opening.open_source('digits', split)


def test_an_empty_slice_is_an_error():
    with pytest.raises(ValueError, match=r"'train\[5000:\]' of digits is empty: train has 1438"):
        opening.open_source('digits', 'train[5000:]')


def test_what_is_not_there_is_named(root, tmp_path):
    with pytest.raises(FileNotFoundError, match="data='/no/where'"):
        opening.open_source('/no/where', 'train')
    with pytest.raises(ValueError, match="no split 'val'; known: test, train"):
        opening.open_source(str(root), 'val')
    with pytest.raises(ValueError, match="no split 'trian'; did you mean 'train'"):
        opening.open_source('digits', 'trian')
    empty = tmp_path / 'empty'
    empty.mkdir()
    with pytest.raises(ValueError, match='no images found: expected .*train/CLASS'):
        opening.open_source(str(empty), 'train')


def test_a_class_missing_in_one_split_is_named(root):
    write_image(root / 'train' / 'emu' / '0.png')
    for split in 'train', 'test':
        with pytest.raises(ValueError, match="class 'emu' is in train/ but not in test/"):
            opening.open_source(str(root), split)


def test_a_class_without_images_is_named(root):
    for split in 'train', 'test':
        (root / split / 'emu').mkdir()
    with pytest.raises(ValueError, match='emu: no images in this folder'):
        opening.open_source(str(root), 'train')
    (root / 'train' / 'emu' / 'notes.txt').write_text('none yet')
    with pytest.raises(ValueError, match='1 files have other endings, such as notes.txt'):
        opening.open_source(str(root), 'train')


def test_files_that_are_no_images_by_their_ending_are_left_out_aloud(root, caplog):
    (root / 'train' / 'cat' / 'notes.txt').write_text('a cat')
    assert len(opening.open_source(str(root), 'train')) == 12
    assert '1 files are not images by their ending' in caplog.text


def test_arrays_of_a_file(tmp_path):
    path = str(tmp_path / 'set.npz')
    images, labels = RNG.integers(0, 256, (5, 4, 4), np.uint8), np.array([0, 1, 2, 1, 0])
    np.savez(path, train_images=images, train_labels=labels, class_names=['a', 'b', 'c'])
    source = opening.open_source(path, 'train')
    assert source.class_names == ('a', 'b', 'c') and source.labels.tolist() == labels.tolist()
    np.testing.assert_array_equal(source.read(3)[0], images[3])
    with pytest.raises(ValueError, match="no split 'test'; known: train"):
        opening.open_source(path, 'test')


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
        arrays(images, np.array(labels), ['a', 'b'], name='x')


@pytest.fixture
def flat(tmp_path):
    for name, count in ('cat', 10), ('dog', 5), ('emu', 2):
        for i in range(count):
            write_image(tmp_path / name / f'{i}.png', i)
    return tmp_path


def described(source):
    return [source.name_of(i) for i in range(len(source))]


def test_a_folder_without_splits_holds_out_a_share_of_every_class(flat, caplog):
    held_out = opening.HeldOut(fraction=0.2)
    train, test = (opening.open_source(str(flat), s, held_out) for s in ('train', 'test'))
    assert train.class_names == test.class_names == ('cat', 'dog', 'emu')
    assert np.bincount(test.labels).tolist() == [2, 1, 1]
    assert not set(described(train)) & set(described(test)) and len(train) + len(test) == 17
    assert '0.2 of each class are held out' in caplog.text
    again = opening.open_source(str(flat), 'test', held_out)
    assert described(again) == described(test)
    other = opening.open_source(str(flat), 'test', opening.HeldOut(fraction=0.2, seed=1))
    assert described(other) != described(test)


def test_a_class_too_small_to_hold_out_of_is_named(flat):
    write_image(flat / 'fox' / '0.png')
    with pytest.raises(ValueError, match='fox/0.png: its class has one image'):
        opening.open_source(str(flat), 'train')
    with pytest.raises(ValueError, match='held_out.fraction=1.0: expected more than 0'):
        opening.open_source(str(flat), 'train', opening.HeldOut(fraction=1.0))


def test_split_names_are_never_taken_for_classes(tmp_path):
    for split in 'train', 'test':
        write_image(tmp_path / split / '0.png')
    with pytest.raises(ValueError, match=r'/ holds no folders.*it holds images, but no classes'):
        opening.open_source(str(tmp_path), 'train')


@pytest.mark.parametrize('name', ['val', 'validation', 'valid'])
def test_images_for_testing_may_have_another_name(root, name):
    (root / 'test').rename(root / name)
    assert len(opening.open_source(str(root), 'test')) == 4
    assert len(opening.open_source(str(root), 'test[:2]')) == 2


def test_a_folder_is_looked_through_once(root, monkeypatch):
    looked = []
    find = pathlib.Path.rglob
    monkeypatch.setattr(pathlib.Path, 'rglob', lambda p, x: looked.append(p) or find(p, x))
    opened = opening.make_opener()
    for split in 'train', 'train[:50%]', 'train[50%:]', 'test':
        opened(str(root), split)
    assert len(looked) == len(set(looked)) == 4


def test_arrays_may_have_several_labels_an_image(tmp_path):
    path, labels = str(tmp_path / 'set.npz'), np.array([[0, 1, 1], [0, 0, 0]])
    np.savez(path, train_images=np.zeros((2, 4, 4), np.uint8), train_labels=labels)
    source = opening.open_source(path, 'train')
    assert source.multi_label and source.label_shape == (3,)
    np.testing.assert_array_equal(source.labels, labels)
    with pytest.raises(ValueError, match='label 2 of image 1 is out of range: there are 0 or 1'):
        arrays(np.zeros((2, 4, 4), np.uint8), labels * 0 + [[0], [2]], 'abc', name='x')
