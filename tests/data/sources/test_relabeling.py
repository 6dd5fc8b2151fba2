"""Labels of a file in place of the data's own."""

import json

import numpy as np
import pytest

from vit_jax.base.errors import UserError
from vit_jax.data.sources import opening
from vit_jax.data.sources.arrays import array_source
from vit_jax.data.sources.base import replace_labels

FILES = {
    'cat/ILSVRC2012_val_00000003.JPEG': [0, 2],
    'cat/ILSVRC2012_val_00000001.JPEG': [],
    'dog/ILSVRC2012_val_00000002.JPEG': [1],
    'emu/ILSVRC2012_val_00000004.JPEG': [2],
}


@pytest.fixture
def root(tmp_path):
    for name in FILES:
        (tmp_path / 'data' / 'val' / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / 'data' / 'val' / name).write_bytes(name.encode())
    return tmp_path / 'data'


def written(root, entries):
    path = root.parent / 'labels.json'
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return str(path)


FORMS = {
    'list by sorted file name': [[], [1], [0, 2], [2]],
    'paths': FILES,
    'paths from further up': {f'val/{name}': entry for name, entry in FILES.items()},
    'file names': {name[4:]: entry for name, entry in FILES.items()},
    'file names without ending': {name[4:-5]: entry for name, entry in FILES.items()},
}


@pytest.mark.parametrize('form', FORMS)
def test_every_image_has_the_classes_of_its_entry(root, form):
    source = opening.make_opener()(str(root), 'val')
    new = replace_labels(source, written(root, FORMS[form]))
    assert new.multi_label and new.class_names == source.class_names == ('cat', 'dog', 'emu')
    for i in range(4):
        stored, row = new.read(i)
        assert stored == source.read(i)[0] and new.name_of(i) == source.name_of(i)
        assert np.flatnonzero(row).tolist() == FILES[stored.decode()]
        np.testing.assert_array_equal(new.labels[i], row)


def test_images_without_a_class_are_left_out_after_the_slice(root, caplog):
    opened, path = opening.make_opener(), written(root, FORMS['list by sorted file name'])
    for split in 'val', 'val[:50%]', 'val[50%:]':
        own, new = opened(str(root), split), opened(str(root), split, path)
        named = [own.name_of(i) for i in range(len(own))]
        assert [new.name_of(i) for i in range(len(new))] == [
            name for name in named if not name.endswith('1.JPEG')
        ]
    # Of the whole, and of the half that holds it.
    assert [message.split()[0] for message in caplog.messages if '1.JPEG' in message] == ['1'] * 2
    with pytest.raises(UserError, match='4 images'):
        opening.make_opener()(str(root), 'val', written(root, [[]] * 4))


@pytest.mark.parametrize(
    'entries, name',
    [
        ('[1', 'labels.json'),
        ('3', 'labels.json'),
        ([[0]] * 3, 'labels.json'),
        ([[0], [3], [1], [1]], '00000002'),
        ([[0], [-1], [1], [1]], '00000002'),
        ([[0], 1, [1], [1]], '00000002'),
        (FILES | {'cat/ILSVRC2012_val_00000003.JPEG': ['cat']}, '00000003'),
        ({'dog/ILSVRC2012_val_00000002': [1]}, '/val/'),
        ({}, '/val/'),
    ],
)
def test_an_entry_that_is_wrong_or_missing_is_named(root, entries, name):
    with pytest.raises(UserError, match=name):
        opening.make_opener()(str(root), 'val', written(root, entries))


def test_an_entry_is_never_given_to_two_images(root):
    (root / 'val' / 'emu' / 'ILSVRC2012_val_00000003.JPEG').write_bytes(b'')
    for entries in FORMS['file names'], [[0]] * 5:
        with pytest.raises(UserError, match='ILSVRC2012_val_00000003'):
            opening.make_opener()(str(root), 'val', written(root, entries))


def test_a_list_needs_names_of_files(tmp_path):
    source = array_source(np.zeros((2, 4, 4), np.uint8), np.zeros(2, int), ['a'], name='x/test')
    with pytest.raises(UserError, match=r'x/test\[0\]'):
        replace_labels(source, written(tmp_path / 'x', [[0], [0]]))
    new = replace_labels(source, written(tmp_path / 'x', {'test[1]': [], 'test[0]': [0]}))
    assert new.labels.tolist() == [[1], [0]]
    for labels in 'none.json', 'real':
        with pytest.raises(UserError, match=labels):
            opening.make_opener()(lambda split: source, 'val', labels)
