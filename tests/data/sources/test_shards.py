"""Tar shards in the layout of WebDataset, made here as public sets are."""

import io
import json
import os
import re
import tarfile
from concurrent import futures

import cv2
import numpy as np
import pytest

from vit_jax.base import TransientError, UserError
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.data.loading import make_reader
from vit_jax.data.sampling import Examples
from vit_jax.data.sources import indexing, opening, shards

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 6, 5, 3), np.uint8)
JPEGS = [cv2.imencode('.jpg', pixels)[1].tobytes() for pixels in PIXELS]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))


def write(path, members, kind=tarfile.PAX_FORMAT):
    """A tar file of (name, content), also of repeated names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, 'w', format=kind) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def samples(numbers, prefix=''):
    for number in numbers:
        yield f'{prefix}{number:04}.cls', str(number % 3).encode()
        yield f'{prefix}{number:04}.jpg', JPEGS[number]
        yield f'{prefix}{number:04}.json', b'{}'


def read(source):
    return [source.read(number) for number in range(len(source))]


def expected(numbers):
    return [(JPEGS[number], number % 3) for number in numbers]


def open_source(data, split='train', **options):
    return opening.make_opener(**options)(str(data), split)


LAYOUTS = {
    'one name': ['a-train-{00..02}.tar', ['a-train-00.tar', 'a-train-01.tar', 'a-train-02.tar']],
    'two ranges': ['{0..0}/train{0..2}.tar', ['0/train0.tar', '0/train1.tar', '0/train2.tar']],
    'a folder': ['.', ['x-train-00.tar', 'x-train-01.tar', 'x-train-02.tar', 'x-validation.tar']],
    'a folder per split': ['.', ['train/0.tar', 'train/1.tar', 'train/2.tar', 'test/0.tar']],
}


@pytest.mark.parametrize('layout', LAYOUTS)
def test_the_shards_of_a_split_are_read_in_order(layout, tmp_path):
    data, paths = LAYOUTS[layout]
    parts = [range(5), range(5, 7), range(7, 12), range(3)]
    for path, numbers in zip(paths, parts, strict=False):
        write(tmp_path / 'set' / path, samples(numbers))
    (tmp_path / 'set' / 'nshards.txt').write_text('3')
    source = open_source(tmp_path / 'set' / data)
    assert read(source) == expected(range(12))
    assert source.class_names == ('0', '1', '2')
    assert source.name_of(6).endswith(f'{paths[1]}:0006.jpg')
    if len(paths) == 4:
        assert read(open_source(tmp_path / 'set' / data, 'test')) == expected(range(3))


def test_a_folder_of_classes_next_to_a_tar_file_is_no_set_of_shards(tmp_path):
    (tmp_path / 'cat').mkdir()
    write(tmp_path / 'backup.tar', samples(range(2)))
    assert not shards.KIND.recognizes(str(tmp_path))


@pytest.mark.parametrize('kind', [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize('prefix', ['', 'n01440764/', './a/b.c/', 'x' * 90 + '/' + 'y' * 90])
def test_every_form_of_names_is_read(kind, prefix, tmp_path):
    write(tmp_path / 'train.tar', samples(range(12), prefix), kind)
    source = open_source(tmp_path / 'train.tar')
    assert read(source) == expected(range(12))
    assert source.name_of(3) == f'{tmp_path}/train.tar:{prefix}0003.jpg'


def test_what_is_no_image_or_class_is_skipped(tmp_path):
    members = [('__index__', b'x'), ('README', b'x'), ('a.txt', b'no image')]
    members += [
        ('0.JPG', JPEGS[0]),
        ('0.CLS', b' 2\n'),
        ('0.seg.png', b'mask'),
        ('0.txt', b'caption'),
    ]
    write(tmp_path / 'train.tar', members)
    source = open_source(tmp_path / 'train.tar')
    assert read(source) == [(JPEGS[0], 2)]


def test_images_without_classes_are_read_where_none_are_needed(tmp_path):
    write(
        tmp_path / 'train.tar', [(name, x) for name, x in samples(range(12)) if 'cls' not in name]
    )
    with pytest.raises(UserError, match='no classes'):
        open_source(tmp_path / 'train.tar')
    source = open_source(tmp_path / 'train.tar', needs_classes=False)
    assert [image for image, _ in read(source)] == JPEGS


FAULTS = {
    'the same kind twice': ([('a.jpg', b''), ('a.jpg', b'')], 'train.tar: two files a.jpg'),
    'two images': ([('a.jpg', b''), ('a.png', b'')], 'a has several images: jpg, png'),
    'no number': (
        [('a.jpg', b''), ('a.cls', b'cat')],
        "a.cls: got b'cat'; expected a class number",
    ),
    'not all have a class': (
        [('a.jpg', b''), ('a.cls', b'1'), ('b.jpg', b'')],
        'b.jpg: has no class, unlike 1 sample',
    ),
    'no images': ([('a.txt', b'')], 'no images in 1 shard'),
}


@pytest.mark.parametrize('fault', FAULTS)
def test_a_sample_that_cannot_be_used_is_named(fault, tmp_path):
    members, message = FAULTS[fault]
    write(tmp_path / 'train.tar', members)
    with pytest.raises(UserError, match=re.escape(message)):
        open_source(tmp_path / 'train.tar')


@pytest.mark.parametrize('share', [0.3, 0.7, 0.9, 0.99])
def test_a_shard_that_is_cut_off_is_named(share, tmp_path):
    write(tmp_path / 'train.tar', samples(range(12)))
    whole = (tmp_path / 'train.tar').read_bytes().rstrip(b'\0')
    (tmp_path / 'train.tar').write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match='train.tar'):
        open_source(tmp_path / 'train.tar')


def test_a_shard_that_is_cut_off_between_two_files_is_named(tmp_path):
    write(tmp_path / 'train.tar', samples(range(12)))
    with tarfile.open(tmp_path / 'train.tar') as tar:
        *_, last = tar.getmembers()
    whole = (tmp_path / 'train.tar').read_bytes()
    (tmp_path / 'train.tar').write_bytes(whole[: last.offset])
    with pytest.raises(UserError, match='train.tar: .*damaged or cut off at byte'):
        open_source(tmp_path / 'train.tar')


def test_a_compressed_copy_of_a_shard_is_ignored(tmp_path):
    write(tmp_path / 'train.tar', samples(range(3)))
    (tmp_path / 'train.tar.gz').write_bytes(b'')
    assert read(open_source(tmp_path)) == expected(range(3))


def test_a_shard_that_belongs_to_no_split_is_named(tmp_path):
    for name in 'train.tar', 'other.tar':
        write(tmp_path / name, samples(range(3)))
    with pytest.raises(UserError, match='other.tar: .*train, .*val'):
        open_source(tmp_path)


@pytest.mark.parametrize('name', ['train.tar.gz', 'train.tgz', 'train-{0..3}.tar.gz'])
def test_compressed_archives_are_rejected_with_the_reason(name, tmp_path):
    with pytest.raises(UserError, match='compressed archive'):
        open_source(tmp_path / name)


def test_missing_shards_are_counted_and_named(tmp_path):
    write(tmp_path / 'train-1.tar', samples(range(12)))
    with pytest.raises(UserError, match='2 shards of 3 missing, such as .*train-0.tar'):
        open_source(tmp_path / 'train-{0..2}.tar')


def test_shards_are_scanned_once_and_again_if_they_change(tmp_path, monkeypatch):
    scanned = []
    scan = shards._scan
    monkeypatch.setattr(shards, '_scan', lambda *shard: scanned.append(shard) or scan(*shard))
    write(tmp_path / 'train.tar', samples(range(12)))
    for _ in range(2):
        source = open_source(tmp_path / 'train.tar')
        assert read(source) == expected(range(12))
    assert len(scanned) == 1
    write(tmp_path / 'train.tar', samples(range(5)))
    reader = make_reader(source, Preprocessing(), (4, 4), on_unreadable='skip')
    with futures.ThreadPoolExecutor(1) as pool, pytest.raises(TransientError, match='replaced'):
        reader.examples(Examples.of(0), pool)
    assert read(open_source(tmp_path / 'train.tar')) == expected(range(5))
    assert len(scanned) == 2


def test_sets_with_equal_shards_but_for_their_contents_have_their_own_indexes(tmp_path):
    for name, numbers in ('a', range(5)), ('b', range(5, 10)):
        path = tmp_path / name / 'train.tar'
        write(path, samples(numbers))
        os.utime(path, (0, 0))
        assert read(open_source(path.parent)) == expected(numbers)
    sizes = {path.stat().st_size for path in tmp_path.glob('?/train.tar')}
    assert len(sizes) == 1


def test_without_a_cache_shards_are_scanned_at_each_start(tmp_path, monkeypatch):
    (tmp_path / 'file').write_bytes(b'')
    monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'file'))
    write(tmp_path / 'train.tar', samples(range(12)))
    assert read(open_source(tmp_path / 'train.tar')) == expected(range(12))


def test_class_names_are_those_of_the_file_next_to_the_shards(tmp_path):
    write(tmp_path / 'train.tar', samples(range(12)))
    (tmp_path / 'classnames.txt').write_text('cat\ndog\nemu\n')
    assert open_source(tmp_path / 'train.tar').class_names == ('cat', 'dog', 'emu')
    (tmp_path / 'classnames.txt').write_text('cat\ndog\n')
    with pytest.raises(UserError, match='has 2 classes; .* class number 2'):
        open_source(tmp_path / 'train.tar')


@pytest.mark.parametrize('classes', ['json', 'both'])
def test_class_numbers_are_read_from_json(classes, tmp_path):
    """A .cls has priority."""
    members = []
    for number in range(6):
        described = json.dumps({'label': number % 3, 'width': 5}).encode()
        members += [(f'{number}.jpg', JPEGS[number]), (f'{number}.json', described)]
        if classes == 'both':
            members.append((f'{number}.cls', b'1'))
    write(tmp_path / 'train.tar', members)
    found = [label for _, label in read(open_source(tmp_path / 'train.tar'))]
    assert found == [0, 1, 2, 0, 1, 2] if classes == 'json' else [1] * 6


@pytest.mark.parametrize(
    'text',
    [
        b'{"label": "cat"}',
        b'{"label": -1}',
        b'{"label": 1e9}',
        b'{"label": 10000000000}',
        b'[0]',
        b'{',
        b'{"a": 0}',
    ],
)
def test_json_without_a_class_number_has_no_class(text, tmp_path):
    write(tmp_path / 'train.tar', [('a.jpg', JPEGS[0]), ('a.json', text)])
    source = open_source(tmp_path / 'train.tar', needs_classes=False)
    assert source.class_names == () and len(source) == 1


PATTERNS = (
    'train-*.tar',
    'train-{0,1}.tar',
    '{train,val}-{0..1}.tar',
    'a.tar::b.tar',
    'pipe:cat a.tar',
)


@pytest.mark.parametrize('pattern', PATTERNS)
def test_patterns_of_other_programs_are_rejected_with_a_range(pattern, tmp_path):
    with pytest.raises(UserError, match=r'expected the folder of the shards.*\{0000\.\.1023\}'):
        open_source(pattern)


def test_names_with_another_dot_are_explained(tmp_path):
    write(tmp_path / 'train.tar', [('photo_1.v1.jpg', JPEGS[0]), ('photo_1.v1.cls', b'0')])
    with pytest.raises(UserError, match='no images in 1 shard; expected .* first dot'):
        open_source(tmp_path / 'train.tar')


def test_classes_without_names_are_numbered_up_to_the_highest(tmp_path):
    write(tmp_path / 'train.tar', [('a.jpg', JPEGS[0]), ('a.cls', b'3')])
    assert open_source(tmp_path / 'train.tar').class_names == ('0', '1', '2', '3')


def test_hosts_share_the_reading_of_shards_unless_they_have_their_own(monkeypatch):
    """Copies of shards on several hosts have other times of change."""
    said = []
    monkeypatch.setattr(indexing, 'gather_texts', lambda name, text: [*said, text])
    for names, missing, expected in (
        (['a', 'b', 'c'], [2], [2]),
        (['a', 'b', 'c'], [0, 2], [0, 2]),
        (['a', 'b', 'c'], [], [0, 2]),
        (['a', 'b', 'other'], [1], None),
    ):
        assert indexing._find_common_work(names, missing) == expected
        said.append(json.dumps([indexing._hash_texts(*names), missing]))
