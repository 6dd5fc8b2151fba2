"""What a store of objects has instead of renaming, appending and locking."""

import argparse
import importlib.util
import json
import logging
import re
import threading
import time

import pytest
from etils import epath

from tests.servers import gcs
from vit_jax.base import (
    UnusableDisk,
    UserError,
    appending,
    atomic_write,
    held_objects,
    records,
    storage,
    write_json,
)
from vit_jax.cli import app
from vit_jax.data.sources.opening import make_opener
from vit_jax.evaluation.probing import FewshotConfig


@pytest.fixture
def hurried(monkeypatch):
    """A lease of a quarter of a second."""
    for name, seconds in {'LEASE': 0.25, 'HEARTBEAT': 0.06, 'UPLOAD': 0.05}.items():
        monkeypatch.setattr(held_objects, name, seconds)


@pytest.fixture
def lock(bucket):
    return storage.folder('gs://bucket/run') / '.lock'


def wait_until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


STORES = 's3://bucket/run', 'hdfs://host/run', 'gs://bucket', 'gs:///run', 'gs:/bucket/run'


@pytest.mark.parametrize('path', [*STORES, *(f'gs://bucket/a{sign}b' for sign in '?#[]*\n')])
def test_what_is_no_folder_on_a_bucket_is_rejected_with_what_to_do(path):
    shown = path.partition('?')[0]
    with pytest.raises(UserError, match=f'^{re.escape(shown)}: expected .* FSx for Lustre'):
        storage.folder(path)


def test_without_its_client_a_store_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(UserError, match=r"gs://bucket/run: .* pip install 'vit_jax\[gs\]'"):
        storage.folder('gs://bucket/run')


@pytest.mark.parametrize('data', ['gs://bucket/data', 's3://bucket/data/train.csv'])
def test_images_on_a_store_are_refused_with_what_to_do(data):
    with pytest.raises(UserError, match=f'{data}.*rsync.*gcsfuse'):
        make_opener()(data, 'train')


def test_a_file_on_a_store_is_written_whole_or_not_at_all(bucket):
    path = storage.folder('gs://bucket/run/') / 'config.json'
    write_json(path, {'a': 1})
    assert json.loads(bucket.text('run/config.json')) == {'a': 1}
    with pytest.raises(RuntimeError), atomic_write(path) as partial:
        partial.write_text('half')
        raise RuntimeError
    assert json.loads(path.read_text()) == {'a': 1} and bucket.names() == ['run/config.json']


def test_what_others_write_there_is_seen_at_once(bucket):
    folder = storage.folder('gs://bucket/run')
    write_json(folder / 'a', {})
    assert [path.name for path in folder.iterdir()] == ['a']
    bucket.put('run/b', b'', {})
    assert (folder / 'b').exists() and {path.name for path in folder.glob('*')} == {'a', 'b'}


def test_what_cannot_be_written_is_one_sentence_with_its_path(bucket):
    bucket.fault = lambda method, path: 403
    with pytest.raises(UnusableDisk, match='^gs://bucket/run/config.json: Forbidden[^\n]*$'):
        write_json(storage.folder('gs://bucket/run') / 'config.json', {})


def test_of_what_is_removed_while_it_is_read_one_sentence_is_said(bucket, caplog, monkeypatch):
    for name in 'fsspec', 'gcsfs':  # as they are at first
        monkeypatch.setattr(logging.getLogger(name), 'level', logging.NOTSET)
        logging.getLogger().manager._clear_cache()
    bucket.put('run/data', bytes(2**24), {})
    path = storage.folder('gs://bucket/run') / 'data'
    with pytest.raises(UnusableDisk, match='^gs://bucket/run/data: [^\n]*$'):
        with storage.usable(path), path.open('rb') as file:
            file.read(10)
            bucket.objects.clear()
            while file.read(2**20):
                pass
    assert not [one for one in caplog.records if one.name.startswith(('fsspec', 'gcsfs'))]


def test_an_address_is_shown_without_what_may_be_a_secret():
    for path in 's3://b/run?sig=secret', 'https://me:secret@h/run', 'https:/h/run?secret':
        with pytest.raises(UserError) as refused:
            storage.folder(path)
        assert 'secret' not in str(refused.value)
    with pytest.raises(UnusableDisk, match='^gs://b: of https://h/x of gs://b$'):
        with storage.usable('gs://b'):
            raise RuntimeError('of https://me:secret@h/x?secret of gs://b')


def test_lines_are_added_in_the_background_and_all_are_there_when_flushed(bucket, hurried):
    path = storage.folder('gs://bucket/run') / 'metrics.jsonl'
    path.write_text('before\n')
    file = appending(path)
    file.write('first\n')
    wait_until(lambda: bucket.text('run/metrics.jsonl') == 'before\nfirst\n')
    file.write('second\n')
    file.flush()
    assert bucket.text('run/metrics.jsonl') == 'before\nfirst\nsecond\n'
    bucket.fault = lambda method, path: 403
    file.write('third\n')
    with pytest.raises(UnusableDisk, match='^gs://bucket/run/metrics.jsonl: 403 [^\n]*$'):
        file.flush()
    bucket.fault = lambda method, path: None
    file.close()
    assert bucket.text('run/metrics.jsonl').endswith('second\nthird\n')


def test_a_run_that_was_taken_over_writes_over_nothing(bucket, hurried, caplog):
    path = storage.folder('gs://bucket/run') / 'metrics.jsonl'
    first = appending(path)
    first.write('first\n')
    first.flush()
    second = appending(path)
    first.write('of a run that was away\n')
    with pytest.raises(UserError, match='^gs://bucket/run/metrics.jsonl: another run writes it'):
        first.flush()
    first.close()  # where something else has gone wrong that is what is told
    assert 'metrics.jsonl: another run writes it' in caplog.text
    second.write('second\n')
    second.close()
    assert bucket.text('run/metrics.jsonl') == 'first\nsecond\n'


def test_what_is_held_is_refused_and_what_was_released_is_free_at_once(lock, hurried, bucket):
    held_objects.LEASE = 1000.0  # a sign of life ends the wait
    first = held_objects.Lease(lock, 'run 1')
    with pytest.raises(UserError, match='workdir gs://bucket/run is in use by run 1'):
        held_objects.Lease(lock, 'run 2')
    first.check()
    first.release()
    assert bucket.names() == []
    held_objects.Lease(lock, 'run 3').release()


def test_what_is_released_while_it_is_waited_for_is_taken_at_once(lock, hurried, bucket):
    held_objects.LEASE = 1000.0
    lock.write_text('run 1')
    threading.Timer(0.1, bucket.remove, ('run/.lock', {})).start()
    lease = held_objects.Lease(lock, 'run 2')
    assert bucket.text('run/.lock') == 'run 2'
    lease.release()


def test_of_those_that_wait_for_a_dead_run_exactly_one_takes_over(lock, hurried, bucket):
    lock.write_text('a dead run')
    taken, refused, together = [], [], threading.Barrier(4)

    def start(name):
        together.wait()
        try:
            taken.append(held_objects.Lease(lock, name))
        except UserError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start, args=(f'run {n}',)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1 and len(refused) == 3
    assert all(line.endswith(f' {bucket.text("run/.lock")}') for line in refused)
    taken[0].check()
    taken[0].release()


def is_lost(lease):
    try:
        lease.check()
    except UserError:
        return True


@pytest.mark.parametrize('removed', [False, True])
def test_a_lease_that_was_lost_is_said_and_not_released(removed, lock, hurried, bucket):
    lease = held_objects.Lease(lock, 'run 1')
    lock.unlink() if removed else lock.write_text('run 2')
    wait_until(lambda: is_lost(lease))
    other = 'nobody: its lock was removed' if removed else 'run 2'
    with pytest.raises(UserError, match=f'workdir gs://bucket/run was lost to {other}'):
        lease.check()
    lease.release()
    assert removed or bucket.text('run/.lock') == 'run 2'


def test_a_renewal_whose_answer_was_lost_is_no_loss(lock, hurried, bucket):
    """The client repeats it, and is refused by its own first one."""
    lease, put, lost = held_objects.Lease(lock, 'run 1'), bucket.put, []

    def failing(*arguments):
        put(*arguments)
        lost.append(arguments)
        bucket.put = put
        raise ConnectionError

    bucket.put = failing
    wait_until(lambda: lost)
    generation = bucket.objects['run/.lock'].generation
    wait_until(lambda: bucket.objects['run/.lock'].generation > generation)
    lease.check()
    lease.release()


def test_lines_whose_answer_was_lost_are_no_other_run(bucket):
    """The client has given up, and more lines have come since."""
    path, put = storage.folder('gs://bucket/run') / 'metrics.jsonl', bucket.put
    file = appending(path)

    def failing(*arguments):
        put(*arguments)
        raise gcs.Refused(403, 'forbidden')

    bucket.put = failing
    for line in 'first\n', 'second\n':
        file.write(line)
        with pytest.raises(UnusableDisk):
            file.flush()
    bucket.put = put
    file.write('third\n')
    file.flush()
    assert bucket.text('run/metrics.jsonl') == 'first\nsecond\nthird\n'


def test_a_process_that_was_stopped_for_long_looks_before_it_writes(lock, bucket, monkeypatch):
    lease = held_objects.Lease(lock, 'run 1')
    lease.check()
    lock.write_text('run 2')
    monkeypatch.setattr(time, 'time', lambda now=time.time: now() + held_objects.LEASE)
    with pytest.raises(UserError, match='workdir gs://bucket/run was lost to run 2'):
        lease.check()
    lease.release()
    assert bucket.text('run/.lock') == 'run 2'


def test_checks_write_nothing_while_the_lease_is_renewed(lock, bucket, monkeypatch):
    lease = held_objects.Lease(lock, 'run 1')
    generation = bucket.objects['run/.lock'].generation
    bucket.fault = lambda method, path: 403  # an outage
    for _ in range(20):
        lease.check()
    monkeypatch.setattr(time, 'time', lambda now=time.time: now() + held_objects.LEASE)
    with pytest.raises(UnusableDisk, match='^gs://bucket/run/.lock: 403'):
        lease.check()
    bucket.fault = lambda method, path: None
    assert bucket.objects['run/.lock'].generation == generation
    lease.check()
    assert bucket.objects['run/.lock'].generation > generation
    lease.release()


def test_what_a_successor_has_written_again_is_not_taken_back(monkeypatch, bucket):
    """It is the same text: only its writer differs."""
    path, put = storage.folder('gs://bucket/run') / 'metrics.jsonl', bucket.put
    file = appending(path)

    def failing(*arguments):
        put(*arguments)
        raise gcs.Refused(403, 'forbidden')

    monkeypatch.setattr(bucket, 'put', failing)
    file.write('first\n')
    with pytest.raises(UnusableDisk):
        file.flush()
    monkeypatch.setattr(bucket, 'put', put)
    second = appending(path)
    with pytest.raises(UserError, match='another run writes it'):
        file.flush()
    second.write('second\n')
    second.flush()
    assert bucket.text('run/metrics.jsonl') == 'first\nsecond\n'


# The requests of a permission; Google's answer names it.
NEEDED = {
    'create': ('POST', '/upload/'),
    'get': ('GET', '/download/|alt=media'),
    'list': ('GET', r'/o\?'),
    'delete': ('DELETE', '/o/'),
}


@pytest.mark.parametrize('permission', NEEDED)
def test_a_permission_that_is_missing_is_rejected_in_one_line(permission, bucket):
    method, path = NEEDED[permission]
    bucket.fault = lambda m, p: 403 if m == method and re.search(path, p) else None
    with pytest.raises(UnusableDisk, match='^gs://bucket/run: 403 [^\n]*$'):
        storage.require_usable(storage.folder('gs://bucket/run'))


def test_a_bucket_where_nothing_is_missing_is_left_as_it_was(bucket):
    storage.require_usable(storage.folder('gs://bucket/run'))
    assert bucket.names() == [] and {method for method, _ in bucket.asked} > {'GET', 'DELETE'}


def test_a_bucket_that_is_not_there_is_said(bucket):
    with pytest.raises(UnusableDisk, match='^gs://other/run: 404 [^\n]*bucket does not exist'):
        storage.require_usable(storage.folder('gs://other/run'))


def test_what_can_only_be_on_a_disk_is_refused_on_a_store():
    with pytest.raises(UserError, match="feature_cache='gs://bucket/cache': expected a folder on"):
        records.checked(FewshotConfig(feature_cache='gs://bucket/cache'), where='fewshot')
    with pytest.raises(argparse.ArgumentTypeError, match="'gs://bucket/x': expected a path on a"):
        app.local_path('gs://bucket/x')


def test_a_store_is_not_reached_through_tensorflow_whoever_used_epath_first(monkeypatch):
    pytest.importorskip('gcsfs')
    find = importlib.util.find_spec
    with_tensorflow = {'tensorflow': find('json')}
    monkeypatch.setattr(
        importlib.util, 'find_spec', lambda name: with_tensorflow.get(name) or find(name)
    )
    monkeypatch.setenv('EPATH_USE_TF', 'true')
    epath.gpath._is_tf_installed.cache_clear()
    path = epath.Path('gs://bucket/run')
    assert path._backend is epath.backend.tf_backend  # as in a notebook that has read TFDS
    assert storage.folder('gs://bucket/run')._backend is epath.backend.fsspec_backend
