"""The index next to shards: python -m vit_jax.index."""

import pytest

from tests.data.sources.test_shards import expected, read, samples, write
from vit_jax import index
from vit_jax.base import StorageError, UserError
from vit_jax.data.sources import opening


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))


@pytest.fixture
def folder(tmp_path):
    for split, numbers in ('train', range(8)), ('test', range(8, 12)):
        write(tmp_path / 'set' / f'{split}-0.tar', samples(numbers))
    return tmp_path / 'set'


@pytest.fixture(params=['gs', 's3'])
def data(folder, bucket, request):
    for path in folder.iterdir():
        bucket.put(f'set/{path.name}', path.read_bytes(), {})
    return f'{request.param}://bucket/set'


def write_index(data, *flags):
    assert index.main(index.make_parser().parse_args([f'--data={data}', *flags])) == 0


def open_split(data, split='train'):
    return opening.make_opener()(str(data), split)


def forget_cache(tmp_path, monkeypatch):
    monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'other'))


def test_with_an_index_next_to_it_a_bucket_is_not_read(
    data, bucket, capsys, tmp_path, monkeypatch, caplog
):
    write_index(data)
    assert capsys.readouterr().out.splitlines() == [
        'test: 4 images; wrote 1 file to _vit_jax_index',
        'train: 8 images; wrote 1 file to _vit_jax_index',
    ]
    forget_cache(tmp_path, monkeypatch)
    bucket.sent.clear()
    caplog.clear()
    source = open_split(data)
    assert {name.split('/')[1] for name, *_ in bucket.sent} == {'_vit_jax_index'}
    assert read(source) == expected(range(8)) and not caplog.messages
    write_index(data, '--splits', 'test')
    assert 'the index is complete in' in capsys.readouterr().out


def test_a_shard_that_is_replaced_needs_a_new_index(data, bucket, folder, tmp_path, monkeypatch):
    write_index(data)
    forget_cache(tmp_path, monkeypatch)
    write(folder / 'train-0.tar', samples(range(2, 7)))
    bucket.put('set/train-0.tar', (folder / 'train-0.tar').read_bytes(), {})
    assert read(open_split(data)) == expected(range(2, 7))
    write_index(data)
    assert len(bucket.names('set/_vit_jax_index')) == 3


def test_an_index_on_a_disk_is_found_and_holds_for_shards_that_moved(
    folder, tmp_path, monkeypatch, caplog
):
    write_index(folder)
    forget_cache(tmp_path, monkeypatch)
    caplog.clear()
    moved = folder.rename(tmp_path / 'moved')
    assert read(open_split(moved)) == expected(range(8))
    assert read(open_split(f'{moved}/train-{{0..0}}.tar')) == expected(range(8))
    assert not caplog.messages


def test_wrong_arguments_are_named(data, bucket, tmp_path):
    with pytest.raises(UserError, match='--splits=val: expected some of test, train'):
        write_index(data, '--splits', 'val')
    with pytest.raises(UserError, match='--data=digits: needs no index'):
        write_index('digits')
    bucket.fault = lambda method, path: 403 if method == 'PUT' else None
    with pytest.raises(StorageError, match=f'{data}/_vit_jax_index'):
        write_index(data)
