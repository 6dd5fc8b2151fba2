import json
import re

import numpy as np
import pytest

from vit_jax.base import UserError
from vit_jax.data.sources import base, opening


def write(path, lines):
    path.write_text('\n'.join(lines) + '\n')
    return str(path)


@pytest.fixture
def images(tmp_path):
    (tmp_path / 'images').mkdir()
    for i in range(6):
        (tmp_path / 'images' / f'{i}.jpg').write_bytes(bytes([i]))
    return [f'images/{i}.jpg' for i in range(6)]


def by_path(source):
    return {
        source.name_of(i).rpartition('/')[2]: (source.read(i)[0], np.asarray(source.read(i)[1]))
        for i in range(len(source))
    }


def test_lines_of_a_csv_are_images_with_classes_and_splits(images, tmp_path):
    splits = ['train', 'train', 'train', 'val', 'val', 'train']
    lines = ['author,path,label,split'] + [
        f'me,{path},{"emu" if i % 2 else "cat"},{split}'
        for i, (path, split) in enumerate(zip(images, splits, strict=True))
    ]
    path = write(tmp_path / 'table.csv', lines)
    train, test = (opening.make_opener()(path, split) for split in ('train', 'test'))
    assert train.class_names == test.class_names == ('cat', 'emu')
    found = by_path(train)
    assert found['5.jpg'] == (b'\5', 1) and found['2.jpg'] == (b'\2', 0) and len(found) == 4
    assert sorted(by_path(test)) == ['3.jpg', '4.jpg']
    assert sorted(train.labels) == [0, 0, 1, 1]


def test_labels_of_a_jsonl_are_rows_over_the_classes(images, tmp_path):
    labels = [['sea', 'sky'], [], ['sky'], ['dog', 'sea'], ['sky'], ['dog']]
    path = write(
        tmp_path / 'table.jsonl',
        [json.dumps({'path': p, 'labels': c}) for p, c in zip(images, labels, strict=True)],
    )
    opened = opening.make_opener(opening.HeldOut(fraction=0.5))
    source, held = opened(path, 'train'), opened(path, 'test')
    assert source.multi_label and source.class_names == ('dog', 'sea', 'sky')
    found = by_path(source) | by_path(held)
    assert len(source) + len(held) == len(found) == 6 and len(source) and len(held)
    rows = [found[f'{i}.jpg'][1].tolist() for i in range(6)]
    assert rows == [[0, 1, 1], [0, 0, 0], [0, 0, 1], [1, 1, 0], [0, 0, 1], [1, 0, 0]]


def test_numbers_are_classes_in_their_order(images, tmp_path):
    lines = ['path,label'] + [f'{p},{(10, 9, 2)[i % 3]}' for i, p in enumerate(images)]
    source = opening.make_opener()(write(tmp_path / 't.csv', lines), 'train')
    assert source.class_names == ('2', '9', '10')


@pytest.mark.parametrize('delimiter', [',', ';', '\t'])
@pytest.mark.parametrize('columns', [['path', 'label', 'split'], ['Path', 'LABEL', 'Split']])
def test_tables_are_as_spreadsheets_write_them(delimiter, columns, images, tmp_path):
    rows = [columns, [images[0], 'a', 'Train'], [images[1], 'b', 'TEST'], [images[2], 'a', 'train']]
    path = write(tmp_path / 't.csv', [delimiter.join(row) for row in rows])
    splits = opening.open_splits(path)
    assert {name: len(split()) for name, split in splits.items()} == {'train': 2, 'test': 1}


def test_white_space_and_other_columns_are_ignored(images, tmp_path):
    rows = zip(images, 'abbaab', [' train', 'train '] * 3, strict=True)
    lines = [f'{p}, {c} ,{s},x,' for p, c, s in rows]
    path = write(tmp_path / 't.csv', ['path, label ,split ,more,', *lines])
    source = opening.make_opener()(path, 'train')
    assert source.class_names == ('a', 'b') and len(source) == 6
    lines = [json.dumps({'path': p, 'labels': ['sea ', 'sea'], 'more': None}) for p in images]
    source = opening.open_splits(write(tmp_path / 't.jsonl', lines))['train']()
    assert source.class_names == ('sea',)
    path = write(tmp_path / 't.csv', ['path,labels', f'{images[0]},sea; sky', f'{images[1]},'])
    assert opening.open_splits(path)['train']().class_names == ('sea', 'sky')


FAULTS = {  # the wrong lines of each table, by their numbers
    'columns.csv': ('image,label', [1]),
    'twice.csv': ('path,label,label\na,b,c', [1]),
    'case.csv': ('path,Label,label \na,b,c', [1]),
    'splits.csv': ('path,label,split,SPLIT\na,b,c,d', [1]),
    'paths.csv': ('path,label, Path\na,b,c', [1]),
    'keys.jsonl': (
        '{"path": "a", "label": "b"}\n{"path": "a", "label": "b", "label": "c"}\n' + '[' * 10**5,
        [2, 3],
    ),
    'quotes.csv': ('path,label\na,cat\n"b,cat\nc,cat\nd",dog', [5]),
    'types.jsonl': (
        '{"path": "a", "label": "b", "split": 0}\n{"path": ["b"], "label": "b", "split": 1}\n'
        '{"path": true, "label": "b", "split": 1}\n{"path": "c", "label": "b", "split": 1}',
        [2, 3],
    ),
    'multi.jsonl': (
        '{"path": "a", "labels": ["b"]}\n{"path": "a", "labels": ["c"]}',
        [2],
    ),
    'paths.jsonl': (
        '{"path": "im/a", "label": "b"}\n{"path": "./im/a", "label": "c"}\n'
        '{"path": "im//a", "label": "b"}\n{"path": "im/../im/a", "label": "c"}',
        [2, 4],
    ),
    'both.csv': ('path,label,labels\na,b,c', [1]),
    'nothing.csv': ('', [1]),
    'lines.csv': ('path,label\na,cat\nb\nc,\n,cat\nd,cat, tabby\na,dog', [3, 4, 5, 6, 7]),
    'header.csv': ('Path,label\na,cat\nPath, label\nb,dog', [3]),
    'split.csv': ('path,label,split\na,cat,train\nb,,train\nc,cat\na,dog,test', [3, 4, 5]),
    'long.csv': (f'path,label\na,{"b" * 131_073}', [2]),
    'lines.jsonl': (
        '{"path": "a", "label": "b"}\n{\n[1]\n{"path": "a"}\n{"path": "a", "labels": "b"}\n'
        '{"path": "c", "labels": ["b"]}',
        [2, 3, 4, 5, 6],
    ),
}


@pytest.mark.parametrize('name', FAULTS)
def test_every_wrong_line_of_a_table_is_named(name, tmp_path):
    text, wrong = FAULTS[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=name) as rejected:
        opening.make_opener()(str(tmp_path / name), 'train')
    named = re.findall(f'{name}, line (\\d+):', str(rejected.value))
    assert [int(number) for number in named] == wrong


WARNINGS = {  # what the warning about a table names
    'path,label,split\na,cat,train\nb,cat,test\n./a,cat,test': r'1 image .*\./a.*line 2.*line 4',
    'path;labels\na;"cat, dog"\nb;cat': "line 2.*'cat, dog'.*semicolons",
    'path,label,split\na,cat,train\na,cat,test\na,cat,test': '1 image ',
    'path,label,Splitt\na,cat,train\nb,cat,test': "t.csv: .*'Splitt'.*'split'",
    'path,label,split\na,cat,train\na,cat,train\nb,cat,test': None,
    'path,label,tilt\na,cat,1\nb,cat,2': None,
    'path,labels\na,"tench, Tinca;cat"\nb,cat': None,
}


@pytest.mark.parametrize('text', WARNINGS)
def test_what_is_rarely_intended_causes_a_warning(text, tmp_path, caplog):
    (tmp_path / 't.csv').write_text(text)
    base.warn_once.cache_clear()
    opening.open_splits(str(tmp_path / 't.csv'))
    assert re.search(WARNINGS[text] or '^$', caplog.text)


@pytest.mark.parametrize('name', ['t.csv', 't.jsonl'])
def test_a_table_without_lines_or_not_in_utf8_is_named(name, tmp_path):
    for text in 'Öl,blau'.encode('latin-1'), b'path,label' if name == 't.csv' else b'':
        (tmp_path / name).write_bytes(text)
        with pytest.raises(UserError, match=name):
            opening.make_opener()(str(tmp_path / name), 'train')
