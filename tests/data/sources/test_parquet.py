"""Parquet files in the layouts of the Hugging Face Hub."""

import itertools
import json

import cv2
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.servers import web
from vit_jax.base import UserError, buckets
from vit_jax.base import hub as base_hub
from vit_jax.data import loading
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.data.loading import LoaderConfig
from vit_jax.data.sources import base, opening

PIXELS = np.random.default_rng(0).integers(0, 256, (200, 6, 5, 3), np.uint8)
IMAGES = [cv2.imencode('.jpg', pixels)[1].tobytes() for pixels in PIXELS]
NAMES = ['cat', 'dog', 'emu']
CLASS = {'_type': 'ClassLabel', 'names': NAMES}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))


def structs(numbers):
    return [{'bytes': IMAGES[i], 'path': f'{i}.jpg'} for i in numbers]


def write(path, columns, features=None, **options):
    """Writes columns, with the types of the Hub."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    if features is not None:
        described = {'huggingface': json.dumps({'info': {'features': features}})}
        table = table.replace_schema_metadata(described)
    parquet.write_table(table, path, **options)


def write_split(path, numbers, **options):
    columns = {'image': structs(numbers), 'label': [i % 3 for i in numbers]}
    write(path, columns, {'image': {'_type': 'Image'}, 'label': CLASS}, **options)


def open_split(data, split='train', **options):
    return opening.make_opener()(str(data), split, **options)


def read(source):
    return [(bytes(image), label) for image, label in map(source.read, range(len(source)))]


def expected(numbers):
    return [(IMAGES[i], i % 3) for i in numbers]


LAYOUTS = {
    'data folder': ['data/train-00000-of-00002.parquet', 'data/train-00001-of-00002.parquet'],
    'flat': ['train-00000-of-00002.parquet', 'train-00001-of-00002.parquet'],
    'hashes': ['data/train-00000-of-00002-ab12.parquet', 'data/train-00001-of-00002-cd3.parquet'],
    'split folders': ['train/0000.parquet', 'train/0001.parquet'],
    'README': ['x/a.parquet', 'x/b.parquet'],
}
README = """---
configs:
- config_name: default
  data_files:
  - split: test
    path: x/t*
  - split: train
    path:
    - x/a.parquet
    - x/b*
---
# A set
"""


@pytest.mark.parametrize('layout', LAYOUTS)
def test_the_files_of_a_split_are_read_in_order(layout, tmp_path):
    first, second = LAYOUTS[layout]
    write_split(tmp_path / first, range(7), row_group_size=3)
    write_split(tmp_path / second, range(7, 12))
    write_split(tmp_path / first.replace('train', 'test').replace('/a', '/t'), range(20, 25))
    (tmp_path / 'README.md').write_text(README if layout == 'README' else '# A set')
    source = open_split(tmp_path)
    assert source.class_names == tuple(NAMES)
    assert read(source) == expected(range(12))
    assert source.name_of(8) == f'{tmp_path / second}[1]'
    assert read(open_split(tmp_path, 'test')) == expected(range(20, 25))
    assert read(open_split(tmp_path, 'train[2:9]')) == expected(range(2, 9))


@pytest.mark.parametrize('compression', ['none', 'snappy', 'gzip', 'zstd', 'brotli', 'lz4'])
@pytest.mark.parametrize('version', ['1.0', '2.0'])
def test_every_compression_is_read(compression, version, tmp_path):
    options = {'compression': compression, 'data_page_version': version}
    write_split(tmp_path / 'train.parquet', range(40), data_page_size=900, **options)
    assert read(open_split(tmp_path)) == expected(range(40))


def test_a_split_may_have_any_name(tmp_path):
    write_split(tmp_path / 'data' / 'train_small-00000-of-00001.parquet', range(5))
    assert read(open_split(tmp_path, 'train_small')) == expected(range(5))


def test_a_single_file_is_a_set(tmp_path):
    write_split(tmp_path / 'train.parquet', range(5))
    assert read(open_split(tmp_path / 'train.parquet')) == expected(range(5))


def test_columns_without_types_of_the_hub_are_found_by_their_own(tmp_path):
    columns = {'id': ['a', 'b'], 'picture': IMAGES[:2], 'label': [4, 2]}
    write(tmp_path / 'train.parquet', columns)
    source = open_split(tmp_path)
    assert read(source) == [(IMAGES[0], 4), (IMAGES[1], 2)]
    assert source.class_names == ('0', '1', '2', '3', '4')


def test_several_labels_are_rows(tmp_path):
    columns = {'image': structs(range(3)), 'labels': [[0, 2], [], [1]]}
    listed = {'_type': 'Sequence', 'feature': CLASS}
    for features in listed, {'_type': 'List', 'feature': CLASS}, [CLASS]:
        write(tmp_path / 'train.parquet', columns, {'labels': features})
        source = open_split(tmp_path)
        assert source.labels.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
        assert source.read(2)[1].tolist() == [0, 1, 0]


def test_images_without_labels_have_no_classes(tmp_path):
    write(tmp_path / 'train.parquet', {'image': structs(range(3)), 'caption': ['a', 'b', 'c']})
    source = opening.open_stored_splits(str(tmp_path))['train']()
    assert source.class_names == () and bytes(source.read(2)[0]) == IMAGES[2]


def test_a_label_column_is_chosen(tmp_path):
    columns = {'image': structs(range(3)), 'fine': [0, 1, 2], 'coarse': [1, 1, 0]}
    write(tmp_path / 'train.parquet', columns, {'fine': CLASS, 'coarse': CLASS})
    for column in 'fine', 'coarse':
        splits = opening.open_stored_splits(str(tmp_path), label_column=column)
        assert splits['train']().labels.tolist() == columns[column]
    with pytest.raises(UserError, match="no label column 'corse'.*'coarse'"):
        opening.open_stored_splits(str(tmp_path), label_column='corse')['train']()


FAULTS = {
    'two image columns': ({'left': structs([0]), 'right': structs([0])}, 'columns left, right'),
    'no image': ({'label': [0]}, 'columns label; expected one image column'),
    'no bytes': ({'image': [{'bytes': None, 'path': 'a.jpg'}] * 2, 'label': [0, 1]}, 'only a path'),
    'no label': (
        {'image': structs([0, 1]), 'label': [1, None]},
        r'train.parquet\[1\]: has no label',
    ),
    'unlabeled': ({'image': structs([0]), 'label': [-1]}, 'labels from -1 .* is it unlabeled'),
}


@pytest.mark.parametrize('fault', FAULTS)
def test_a_file_that_cannot_be_used_is_named(fault, tmp_path):
    columns, message = FAULTS[fault]
    if fault == 'no bytes':
        kind = pa.struct({'bytes': pa.binary(), 'path': pa.string()})
        columns = columns | {'image': pa.array(columns['image'], kind)}
    write(tmp_path / 'train.parquet', columns)
    with pytest.raises(UserError, match=f'{tmp_path}.*{message}'):
        reader = loading.make_reader(open_split(tmp_path), Preprocessing(), (4, 4))
        reader.example(0)


def test_damaged_pages_are_noticed_where_they_have_checksums(tmp_path):
    path = tmp_path / 'train.parquet'
    write_split(path, range(20), write_page_checksum=True, compression='none')
    stored = bytearray(path.read_bytes())
    stored[stored.index(IMAGES[3]) + 50] ^= 1
    path.write_bytes(stored)
    with pytest.raises(UserError, match='row group at byte 4.*CRC'):
        loading.make_reader(open_split(tmp_path), Preprocessing(), (4, 4)).example(3)


def load(source, steps, rows):
    config = LoaderConfig(placement='host', shuffle_gb=40 * len(IMAGES[0]) / 2**30, threads=2)
    reader = loading.make_reader(source, Preprocessing(), (4, 4))
    loader = loading.make_loader(reader, config)
    sampler = loading.training_sampler(source, config, batch_size=8, seed=3)
    return [*loading.host_batches(loader, sampler, steps=steps, batch_size=8, rows=rows)]


@pytest.mark.parametrize('place', ['disk', 'bucket'])
@pytest.mark.parametrize('rows_in_group', [4, 30])
def test_batches_of_row_groups_do_not_depend_on_processes_and_starts(
    rows_in_group, place, tmp_path, bucket
):
    for number in range(2):
        numbers = range(100 * number, 100 * number + 100)
        path = tmp_path / f'train-{number}.parquet'
        write_split(path, numbers, row_group_size=rows_in_group)
        bucket.put(f'set/{path.name}', path.read_bytes(), {})
    source = open_split('gs://bucket/set' if place == 'bucket' else tmp_path)
    whole = load(source, range(50), np.arange(8))
    used = {
        pair for b in whole for pair in zip(b['epoch'].tolist(), b['example'].tolist(), strict=True)
    }
    assert used >= {(0, i) for i in range(200)} and len(used) == 50 * 8
    for batch in whole:
        assert batch['labels'].tolist() == (batch['example'] % 3).tolist()
    for start, rows in (0, np.arange(4)), (17, np.arange(4, 8)), (33, np.arange(2, 4)):
        for one, other in zip(load(source, range(start, 50), rows), whole[start:], strict=True):
            np.testing.assert_array_equal(one['images'], other['images'][rows])


def test_a_row_group_is_requested_once_for_neighboring_batches(tmp_path, bucket):
    write_split(tmp_path / 'train.parquet', range(200), row_group_size=50)
    bucket.put('set/train.parquet', (tmp_path / 'train.parquet').read_bytes(), {})
    source = open_split('gs://bucket/set')
    source.read(0)  # also reads the footer
    bucket.sent.clear()
    loader = loading.make_loader(
        loading.make_reader(source, Preprocessing(), (4, 4)), LoaderConfig(placement='host')
    )
    found = loading.sequential_batches(loader, np.arange(200), batch_size=8)
    labels = [label for batch in found for label in np.array(batch['labels'])]
    assert labels == [i % 3 for i in range(200)]
    assert sum(stop - start for _, start, stop in bucket.sent) <= 1.05 * source.places.num_bytes


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with the data set owner/name, and a reader of its names."""
    from huggingface_hub import constants

    for name, numbers in ('train', range(40)), ('test', range(40, 50)):
        write_split(tmp_path / 'set' / f'{name}-00000-of-00001.parquet', numbers, row_group_size=15)
    files = {path.name: path.read_bytes() for path in (tmp_path / 'set').iterdir()}
    answers = web.repository('owner/name', {'main': files}, 'datasets')
    with web.serving(answers | web.repository('owner/model', {'main': {}})) as server:
        monkeypatch.setattr(constants, 'ENDPOINT', server.url)
        monkeypatch.setattr('huggingface_hub.hf_api.ENDPOINT', server.url, raising=False)
        monkeypatch.setenv('HF_ENDPOINT', server.url)
        monkeypatch.setenv('HF_TOKEN', 'secret')
        server.files = files
        base_hub._describe.cache_clear()
        yield server


def test_a_data_set_of_the_hub_is_read_at_one_commit(hub):
    source = open_split('hf:owner/name')
    assert read(source) == expected(range(40))
    commit = web.commit_of(hub.files)
    assert source.name_of(3) == f'hf://owner/name@{commit}/train-00000-of-00001.parquet[3]'
    assert read(open_split(f'hf:owner/name@{commit}', 'test')) == expected(range(40, 50))
    relative = base.make_names_relative([source.name_of(3)], 'hf:owner/name')
    assert relative == ['train-00000-of-00001.parquet[3]']  # equal in other commits
    read_files = {path for _, path in hub.requests if 'resolve' in path}
    assert all(f'/datasets/owner/name/resolve/{commit}/' in path for path in read_files)


def test_what_is_no_data_set_of_the_hub_is_named(hub):
    for name, message in (
        ('hf:owner/model', 'no such data set, or no access.*start_from'),
        ('hf:owner/name@other', 'other'),
        ('hf:name', 'expected hf:OWNER/NAME'),
    ):
        with pytest.raises(UserError, match=f'^{name}: .*{message}'):
            open_split(name)


def test_a_hub_that_limits_requests_is_asked_again(hub, monkeypatch, caplog):
    monkeypatch.setattr(buckets, '_WAIT', 0.01)
    monkeypatch.setitem(buckets._RETRIES, 'max_retries', 0)
    source = open_split('hf:owner/name')
    source.read(0)
    (path,) = (path for path in hub.answers if path.endswith('main/train-00000-of-00001.parquet'))
    path = path.replace('/main/', f'/{web.commit_of(hub.files)}/')
    numbers = itertools.count()
    hub.answers = Changing(hub.answers, path, lambda: next(numbers) % 2 == 0)
    assert bytes(source.read(20)[0]) == IMAGES[20]
    assert 'waits for' in caplog.text


class Changing(dict):
    """Answers that limit the requests of a path at times."""

    def __init__(self, answers, path, is_limited):
        super().__init__(answers)
        self._path = path
        self._is_limited = is_limited

    def get(self, path, default):
        if path == self._path and self._is_limited():
            return web.Answer(status=429)
        return super().get(path, default)


def test_a_hub_that_redirects_is_followed(hub):
    """As the Hub does to the servers that have large files."""
    for path in [*hub.answers]:
        if 'resolve' in path:
            hub.answers[f'/cdn{path}'] = hub.answers[path]
            hub.answers[path] = web.Answer(headers={'Location': f'/cdn{path}'}, status=302)
    assert read(open_split('hf:owner/name')) == expected(range(40))
