import json

import numpy as np
import pytest

from vit_jax.base import UserError
from vit_jax.data.sources import opening


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


def test_labels_of_a_csv_are_separated_by_semicolons(images, tmp_path):
    path = write(tmp_path / 't.csv', ['path,labels', f'{images[0]},sea; sky', f'{images[1]},'])
    source = opening.open_splits(path)['train']
    assert source().class_names == ('sea', 'sky')


def test_numbers_are_classes_in_their_order(images, tmp_path):
    lines = ['path,label'] + [f'{p},{(10, 9, 2)[i % 3]}' for i, p in enumerate(images)]
    source = opening.make_opener()(write(tmp_path / 't.csv', lines), 'train')
    assert source.class_names == ('2', '9', '10')


@pytest.mark.parametrize(
    'name, lines, message',
    [
        ('t.csv', ['image,label', 'a,b'], 't.csv, line 1: it has image, label'),
        ('t.csv', ['path,label,labels', 'a,b,c'], 'line 1: it has path, label, labels'),
        ('t.csv', ['path,label', 'a.jpg,cat', 'b.jpg'], 't.csv, line 3: it has path;'),
        ('t.csv', ['path,label', 'a.jpg,'], 't.csv, line 2: an empty'),
        ('t.csv', ['path,label'], 't.csv: no lines'),
        ('t.csv', ['path,label', 'a.jpg,cat, tabby'], 'line 2: more fields than columns'),
        (
            't.csv',
            ['path,label', 'a.jpg,cat', 'b.jpg,cat', 'a.jpg,dog'],
            "line 4: a.jpg is 'dog', on line 2 'cat'",
        ),
        ('t.csv', ['path,label,split', 'a,b,train', 'c,d,'], 'line 3: .* `split`'),
        ('t.jsonl', ['{"path": "a", "label": "b"}', '{'], 't.jsonl, line 2: not JSON'),
        ('t.csv', ['path,label', f'a,{"b" * 131_073}'], 'line 2: field larger'),
        ('t.csv', [''], 't.csv, line 1: it has nothing'),
        ('t.jsonl', ['[' * 100_000], 't.jsonl, line 1: not JSON'),
        ('t.jsonl', ['[1]'], 't.jsonl, line 1: expected an object'),
        ('t.jsonl', ['{"path": "a"}'], 'line 1: it has path;'),
        ('t.jsonl', [r'{"path": "a\u0000", "label": "b"}'], 'line 1: path=.*: no file can have'),
        ('t.jsonl', [r'{"path": "\ud800", "label": "b"}'], 'line 1: path=.*: no file can have'),
        ('t.jsonl', ['{"path": "a", "labels": "b"}'], "labels='b': expected a list"),
        (
            't.jsonl',
            ['{"path": "a", "label": "b"}', '{"path": "a", "labels": ["b"]}'],
            'line 2: .* `labels`',
        ),
    ],
)
def test_what_is_wrong_with_a_table_is_named(name, lines, message, tmp_path):
    with pytest.raises(UserError, match=message):
        opening.make_opener()(write(tmp_path / name, lines), 'train')


@pytest.mark.parametrize(
    'name, good, faults',
    [
        ('t.csv', 'a.jpg,cat', {'b.jpg': 'it has path; expected', ',cat': 'an empty path or'}),
        (
            't.jsonl',
            '{"path": "a", "label": "b"}',
            {
                '{': 'not JSON',
                '[1]': 'expected an object',
                '{"path": "a"}': 'it has path; expected',
            },
        ),
    ],
)
def test_all_that_is_wrong_with_a_table_is_said_in_one_go(name, good, faults, tmp_path):
    head = ['path,label'] if name == 't.csv' else [good]
    path = write(tmp_path / name, [*head, *faults, good])
    with pytest.raises(UserError) as refused:
        opening.make_opener()(path, 'train')
    for number, (line, text) in enumerate(
        zip(str(refused.value).split('\n'), faults.values(), strict=True), 2
    ):
        assert f'{path}, line {number}: {text}' in line
    write(tmp_path / name, [*head, *[*faults][:1] * 1_012, good])
    with pytest.raises(UserError) as refused:
        opening.make_opener()(path, 'train')
    said = str(refused.value).split('\n')
    assert len(said) == 11 and said[-1] == '  and 1,002 more'


@pytest.mark.parametrize('more', [5, ['x'], None, ''])
def test_other_columns_of_any_name_and_value_are_ignored(more, tmp_path):
    line = json.dumps({'path': 'a', 'label': 'b', '(more)': more, '': more, 'None': more})
    assert [*opening.open_splits(write(tmp_path / 't.jsonl', [line]))] == ['train', 'test', 'all']
    assert opening.open_splits(write(tmp_path / 't.csv', ['path,label,', 'a,b,x,,']))


@pytest.mark.parametrize('name', ['t.csv', 't.jsonl'])
def test_a_table_that_is_not_utf8_is_named(name, tmp_path):
    (tmp_path / name).write_bytes(b'path,label\n\n' + 'Öl,blau'.encode('latin-1'))
    with pytest.raises(UserError, match=f'{name}: .* expected a table in UTF-8'):
        opening.make_opener()(str(tmp_path / name), 'train')


def test_a_table_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match='none.csv.*: no such file'):
        opening.make_opener()(str(tmp_path / 'none.csv'), 'train')


def test_white_space_around_a_name_is_no_part_of_it(images, tmp_path):
    rows = zip(images, 'abbaab', [' train', 'train '] * 3, strict=True)
    lines = [f'{p}, {c} ,{s}' for p, c, s in rows]
    path = write(tmp_path / 't.csv', ['path, label ,split ', *lines])
    source = opening.make_opener()(path, 'train')
    assert source.class_names == ('a', 'b') and len(source) == 6
    lines = [json.dumps({'path': path, 'labels': ['sea ', 'sea']}) for path in images]
    source = opening.open_splits(write(tmp_path / 't.jsonl', lines))['train']()
    assert source.class_names == ('sea',)


def test_names_that_look_mistyped_are_said(images, tmp_path, caplog):
    splits = ['train', 'trian', 'trian', 'test', 'fold 1', 'fold 1']
    lines = [f'{p},a,{s}' for p, s in zip(images, splits, strict=True)]
    path = write(tmp_path / 't.csv', ['path,label,split', *lines])
    for _ in range(2):
        assert len(opening.make_opener()(path, 'fold 1')) == 2
    assert "'trian' (2 lines), 'fold 1' (2 lines)" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize('delimiter', [',', ';', '\t'])
@pytest.mark.parametrize('columns', [['path', 'label', 'split'], ['Path', 'LABEL', 'Split']])
def test_tables_are_as_spreadsheets_write_them(delimiter, columns, images, tmp_path):
    rows = [columns, [images[0], 'a', 'Train'], [images[1], 'b', 'TEST'], [images[2], 'a', 'train']]
    path = write(tmp_path / 't.csv', [delimiter.join(row) for row in rows])
    splits = opening.open_splits(path)
    assert {name: len(split()) for name, split in splits.items()} == {'train': 2, 'test': 1}


def test_labels_that_look_the_same_are_said(images, tmp_path, caplog):
    labels = ['cat', 'Cat', 'dog'] * 2
    lines = ['path,label', *(f'{p},{c}' for p, c in zip(images, labels, strict=True))]
    opening.make_opener()(write(tmp_path / 't.csv', lines), 'all')
    assert "look the same: 'Cat', 'cat';" in caplog.text


def test_a_column_that_is_there_twice_is_named(tmp_path):
    with pytest.raises(UserError, match="several columns 'label'"):
        opening.open_splits(write(tmp_path / 't.csv', ['path,label,Label,label']))


def test_labels_of_a_regression_are_named(tmp_path):
    lines = ['path,label', *(f'{i}.jpg,{i / 7:.3f}' for i in range(30))]
    with pytest.raises(UserError, match='regression is not supported'):
        opening.open_splits(write(tmp_path / 't.csv', lines))


def test_lines_that_do_not_agree_are_said_with_the_others(tmp_path):
    lines = ['path,label,split', 'a,cat,train', 'b,,train', 'c,cat', 'a,dog,test', 'd,cat,test,x']
    with pytest.raises(UserError) as refused:
        opening.open_splits(write(tmp_path / 't.csv', lines))
    said = str(refused.value)
    assert all(f'line {number}: ' in said for number in (3, 4, 5, 6)) and 'line 2:' not in said
