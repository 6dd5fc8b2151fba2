"""What predict says of an image: which classes, in which form, and to whom."""

import csv
import io
import json
import os
import signal
import subprocess
import sys

import cv2
import numpy as np
import pytest

import vit_jax
from tests import tiny
from tests.networks import loaded
from vit_jax import predict
from vit_jax.base import UserError

NAMES = ['a', 'b, "c"', 'd']


SHARES = [('b, "c"', 0.5), ('a', 0.25), ('d', 0.125)]


def test_the_most_probable_classes_are_named_best_first():
    shares = np.array([0.25, 0.5, 0.125], np.float32)
    assert predict.most_probable(shares, NAMES, 5) == SHARES
    assert predict.most_probable(shares, NAMES, 1) == SHARES[:1]


def written(path, classes, form):
    file = io.StringIO()
    predict.write_classes(file, path, classes, form)
    return file.getvalue().removesuffix('\n')


def test_every_form_says_the_same():
    path = 'my photos/a, "b"\n.jpg'
    line = json.loads(written(path, SHARES, 'jsonl'))
    assert line['path'] == path
    assert [(one['class'], one['probability']) for one in line['classes']] == SHARES
    rows = list(csv.reader(io.StringIO(written(path, SHARES, 'csv'), newline='')))
    assert {row[0] for row in rows} == {path}
    assert [(row[1], float(row[2])) for row in rows] == SHARES
    assert written('x', SHARES, 'text') == 'x  b, "c" 50.0%, a 25.0%, d 12.5%'


def test_of_names_with_synonyms_people_are_told_the_first_where_it_is_of_one_class():
    names = ['tabby, tabby cat', 'crane', 'maillot', 'maillot, tank suit', 'tench']
    told = ['tabby', 'crane', 'maillot', 'maillot, tank suit', 'tench']
    assert predict.shorten_names(names) == told


def test_an_image_without_a_likely_class_is_not_lost():
    text = written('x', [], 'text')
    assert text.startswith('x  ') and text.endswith(' 50%')
    assert written('x', [], 'csv') == 'x,,'
    assert json.loads(written('x', [], 'jsonl')) == {'path': 'x', 'classes': []}


def test_a_name_cannot_write_on_the_screen():
    name, classes = 'a\x1b[2J\nb.jpg', [('cat\n\x9b', 0.5)]
    assert written(name, classes, 'text') == r'a\x1b[2J\nb.jpg  cat\n\x9b 50.0%'


@pytest.mark.parametrize(
    'flags, said',
    [
        (['--out=x.json'], 'x.json'),
        (['--out=there.csv'], '--overwrite'),
        (['--features=there.npz'], '--overwrite'),
        (['--features=folder.npz'], 'folder.npz'),
    ],
)
def test_a_file_that_is_there_or_has_no_known_ending_is_not_written(
    flags, said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in 'there.csv', 'there.npz':
        (tmp_path / name).write_text('mine')
    (tmp_path / 'folder.npz').mkdir()
    with pytest.raises(UserError, match=said):
        predict.main(predict.make_parser().parse_args(['no network', 'no photo', *flags]))
    assert (tmp_path / 'there.csv').read_text() == (tmp_path / 'there.npz').read_text() == 'mine'
    with pytest.raises(UserError, match='no photo'):
        replaced = [flag for flag in flags if 'there' in flag] + ['--overwrite']
        predict.main(predict.make_parser().parse_args(['no network', 'no photo', *replaced]))


def test_a_table_says_its_encoding_to_excel(tmp_path):
    for form in 'csv', 'text':
        with predict.open_output(str(tmp_path / form), form) as file:
            print('Straßenbahn', os.fsdecode(b'caf\xe9'), file=file)
        mark = b'\xef\xbb\xbf' * (form == 'csv')
        assert (tmp_path / form).read_bytes() == mark + 'Straßenbahn caf'.encode() + b'\xe9\n'


@pytest.mark.gate
def test_a_reader_that_has_seen_enough_ends_it_quietly_and_a_file_is_written_whole(tmp_path):
    vit_jax.save(loaded(tiny.model(), loss='sigmoid'), tmp_path / 'net', 'vit_jax')
    (tmp_path / 'photos').mkdir()
    for index in range(3):
        image = np.full((8, 8, 3), 80 * index, np.uint8)
        cv2.imwrite(str(tmp_path / 'photos' / f'{index}.png'), image)
    (tmp_path / 'photos' / '1.png').write_bytes(b'no image')
    command = [sys.executable, '-m', 'vit_jax.predict', tmp_path / 'net', tmp_path / 'photos']
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing) as closed:
        ended = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 128 + signal.SIGPIPE
    assert 'Error' not in ended.stderr and 'Broken' not in ended.stderr
    out = tmp_path / 'out.csv'
    asked = ['--format=csv', '--top=2', f'--out={out}']
    ended = subprocess.run([*command, *asked], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, '')
    assert '1 of 3 images' in ended.stderr
    with out.open(newline='', encoding='utf-8-sig') as file:
        rows = list(csv.DictReader(file))
    assert [row['path'][-5:] for row in rows] == ['0.png', '0.png', '2.png', '2.png']
    network = vit_jax.load(tmp_path / 'net')
    best = np.sort(
        network.probabilities(network.preprocess(np.zeros((8, 8, 3), np.uint8))[None])[0]
    )
    shares = [float(row['probability']) for row in rows[:2]]
    np.testing.assert_allclose(shares, best[:-3:-1], rtol=1e-5)
    assert [path.name for path in tmp_path.glob('out*')] == ['out.csv']


def test_two_outputs_are_two_files(tmp_path):
    (tmp_path / 'link').symlink_to('x.csv')
    for other in 'x.csv', './x.csv', 'link':
        with pytest.raises(UserError, match='x.csv.*expected distinct files'):
            predict.require_new([str(tmp_path / 'x.csv'), str(tmp_path / other)], overwrite=True)
    predict.require_new(['/dev/null', '/dev/null', None], overwrite=False)


def test_class_names_may_contain_separators_of_unicode(tmp_path):
    (path := tmp_path / 'names').write_text('a\u2028b\r\nc\x0cd\n\n')
    assert predict.read_lines(str(path)) == ['a\u2028b', 'c\x0cd']
    path.write_bytes('a\nb'.encode('utf-16'))
    with pytest.raises(UserError, match=f'{path}: .*expected class names in UTF-8'):
        predict.read_lines(str(path))
