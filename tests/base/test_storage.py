"""What a bucket has in place of renaming, appending and locking."""

import importlib.util
import json
import re
import threading
import time

import pytest

from tests.servers import gcs
from tests.servers.web import wait_until
from vit_jax.base import StorageError, UserError, atomic_write, bucket_lease, storage, write_json
from vit_jax.base.bucket_lease import GrowingObject, Lease


@pytest.fixture
def hurried(monkeypatch):
    """Leases are for a second, and renewed four times in it."""
    monkeypatch.setattr(bucket_lease, 'LEASE', 1.0)


@pytest.fixture
def lock(bucket):
    return storage.resolve_folder('gs://bucket/run') / '.lock'


@pytest.fixture
def metrics(bucket):
    return storage.resolve_folder('gs://bucket/run') / 'metrics.jsonl'


def lose_answers(bucket, error):
    """Makes each upload succeed on the server and fail for the client; returns how to undo it."""
    put = bucket.put

    def failing(*arguments):
        put(*arguments)
        raise error

    bucket.put = failing
    return lambda: setattr(bucket, 'put', put)


STORES = 's3://bucket/run', 'hdfs://host/run', 'gs://bucket', 'gs:///run'


@pytest.mark.parametrize('path', [*STORES, *(f'gs://bucket/a{sign}b' for sign in '?#[]*\n')])
def test_a_folder_on_another_store_or_of_an_unusable_name_is_rejected(path):
    with pytest.raises(UserError, match=re.escape(path.partition('?')[0])):
        storage.resolve_folder(path)


def test_a_file_is_not_taken_for_a_folder(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(StorageError, match=f'{tmp_path}/file: not a folder'):
        storage.make_folder(tmp_path / 'file')


def test_a_bucket_needs_its_client(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(UserError, match=r'gs://bucket/run: .*vit_jax\[gs\]'):
        storage.resolve_folder('gs://bucket/run')


def test_a_file_on_a_bucket_is_written_whole_or_not_at_all(bucket):
    folder = storage.resolve_folder('gs://bucket/run/')
    path = folder / 'config.json'
    write_json(path, {'a': 1})
    assert json.loads(bucket.text('run/config.json')) == {'a': 1}
    with pytest.raises(RuntimeError), atomic_write(path) as partial:
        partial.write(b'half')
        raise RuntimeError
    assert json.loads(path.read_text()) == {'a': 1} and bucket.names() == ['run/config.json']
    bucket.put('run/other', b'', {})  # by another host
    assert {path.name for path in folder.iterdir()} == {'config.json', 'other'}
    bucket.fault = lambda method, path: 403
    with pytest.raises(StorageError, match='^gs://bucket/run/config.json: [^\n]*$'):
        write_json(path, {})


def test_an_error_shows_no_secret_of_a_url():
    with pytest.raises(UserError) as rejected:
        storage.resolve_folder('s3://me:secret@bucket/run?sig=secret')
    assert 'secret' not in str(rejected.value)
    with pytest.raises(StorageError, match='^gs://b: of https://h/x of gs://b$'):
        with storage.usable('gs://b'):
            raise RuntimeError('of https://me:secret@h/x?secret of gs://b')


def test_lines_are_added_in_the_background_and_all_are_there_when_flushed(
    bucket, metrics, monkeypatch
):
    monkeypatch.setattr(bucket_lease, 'UPLOAD', 0.05)
    metrics.write_text('before\n')
    file = GrowingObject(metrics)
    file.write('first\n')
    wait_until(lambda: bucket.text('run/metrics.jsonl') == 'before\nfirst\n')
    file.write('second\n')
    file.flush()
    assert bucket.text('run/metrics.jsonl') == 'before\nfirst\nsecond\n'
    bucket.fault = lambda method, path: 403
    file.write('third\n')
    with pytest.raises(StorageError, match='gs://bucket/run/metrics.jsonl'):
        file.flush()
    bucket.fault = lambda method, path: None
    file.close()
    assert bucket.text('run/metrics.jsonl').endswith('second\nthird\n')


def test_lines_whose_answer_was_lost_are_written_once(bucket, metrics):
    file = GrowingObject(metrics)
    undo = lose_answers(bucket, gcs.Refused(403, 'forbidden'))
    for line in 'first\n', 'second\n':
        file.write(line)
        with pytest.raises(StorageError):
            file.flush()
    undo()
    file.write('third\n')
    file.flush()
    assert bucket.text('run/metrics.jsonl') == 'first\nsecond\nthird\n'


@pytest.mark.parametrize('is_answered', [True, False])
def test_a_run_that_was_taken_over_overwrites_nothing(is_answered, bucket, metrics, caplog):
    """If the answer was lost, the successor starts with the same text: only the writer differs."""
    first = GrowingObject(metrics)
    first.write('first\n')
    if is_answered:
        first.flush()
    else:
        undo = lose_answers(bucket, gcs.Refused(403, 'forbidden'))
        with pytest.raises(StorageError):
            first.flush()
        undo()
    second = GrowingObject(metrics)
    first.write('line of a suspended run\n')
    with pytest.raises(UserError, match='metrics.jsonl'):
        first.flush()
    first.close()  # does not hide the error that made the run close it
    assert 'metrics.jsonl' in caplog.text
    second.write('second\n')
    second.close()
    assert bucket.text('run/metrics.jsonl') == 'first\nsecond\n'


def test_a_held_lease_is_rejected_and_a_released_one_is_free_at_once(lock, hurried, bucket):
    first = Lease(lock, 'run 1')
    for _ in range(5):  # a lease is renewed four times before it expires
        before = bucket.objects['run/.lock'].generation
        wait_until(lambda before=before: bucket.objects['run/.lock'].generation > before)
    with pytest.raises(UserError, match='gs://bucket/run .* run 1;'):
        Lease(lock, 'run 2')  # a renewal ends the wait
    first.check()
    first.release()
    assert bucket.names() == []
    lock.write_text('run 3')
    threading.Timer(0.1, bucket.remove, ('run/.lock', {})).start()
    Lease(lock, 'run 4').release()


def test_exactly_one_of_several_runs_takes_over_from_a_dead_one(lock, hurried, bucket):
    lock.write_text('a dead run')
    leases, errors, together = [], [], threading.Barrier(4)

    def start(name):
        together.wait()
        try:
            leases.append(Lease(lock, name))
        except UserError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=start, args=(f'run {n}',)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(leases) == 1 and len(errors) == 3
    assert all(f' {bucket.text("run/.lock")}' in line for line in errors)
    leases[0].check()
    leases[0].release()


def is_lost(lease):
    try:
        lease.check()
    except UserError:
        return True


@pytest.mark.parametrize('holder', ['nobody', 'run 2'])
def test_a_lost_lease_is_reported_and_not_released(holder, lock, hurried, bucket):
    lease = Lease(lock, 'run 1')
    lock.unlink() if holder == 'nobody' else lock.write_text(holder)
    wait_until(lambda: is_lost(lease))
    with pytest.raises(UserError, match=f'gs://bucket/run .* {holder}'):
        lease.check()
    lease.release()
    assert holder == 'nobody' or bucket.text('run/.lock') == holder


def test_a_renewal_whose_answer_was_lost_loses_nothing(lock, hurried, bucket):
    """The client repeats the write, which the first one makes fail."""
    lease = Lease(lock, 'run 1')
    generation = bucket.objects['run/.lock'].generation
    undo = lose_answers(bucket, ConnectionError())
    wait_until(lambda: bucket.objects['run/.lock'].generation > generation)
    undo()
    generation = bucket.objects['run/.lock'].generation
    wait_until(lambda: bucket.objects['run/.lock'].generation > generation)
    lease.check()
    lease.release()


def test_a_check_renews_the_lease_only_after_a_long_time(lock, bucket, monkeypatch):
    lease = Lease(lock, 'run 1')
    generation = bucket.objects['run/.lock'].generation
    bucket.fault = lambda method, path: 403  # an outage
    lease.check()
    monkeypatch.setattr(time, 'time', lambda now=time.time: now() + bucket_lease.LEASE)
    with pytest.raises(StorageError, match='gs://bucket/run/.lock'):
        lease.check()
    bucket.fault = lambda method, path: None
    assert bucket.objects['run/.lock'].generation == generation
    lease.check()
    assert bucket.objects['run/.lock'].generation > generation
    lease.release()


# The requests that need each permission; Google's answer names it.
NEEDED = {
    'create': ('POST', '/upload/'),
    'get': ('GET', '/download/|alt=media'),
    'list': ('GET', r'/o\?'),
    'delete': ('DELETE', '/o/'),
}


@pytest.mark.parametrize('permission', NEEDED)
def test_a_missing_permission_is_found_and_nothing_is_left(permission, bucket):
    storage.require_writable_bucket(storage.resolve_folder('gs://bucket/run'))
    assert bucket.names() == []
    method, path = NEEDED[permission]
    bucket.fault = lambda m, p: 403 if m == method and re.search(path, p) else None
    with pytest.raises(StorageError, match='^gs://bucket/run: 403 [^\n]*$'):
        storage.require_writable_bucket(storage.resolve_folder('gs://bucket/run'))
    with pytest.raises(StorageError, match='^gs://other/run: '):
        storage.require_writable_bucket(storage.resolve_folder('gs://other/run'))
