"""Images in a bucket: the order of batches, and which bytes are requested for them."""

import collections
import datetime
import functools
import importlib.util
import itertools
import re
import threading
import time
from concurrent import futures

import cv2
import numpy as np
import pytest

from tests.data.sources.test_shards import write
from tests.servers.web import wait_until
from vit_jax.base import StorageError, TransientError, UserError, buckets, ranges
from vit_jax.data import inspection, loading
from vit_jax.data.image_preprocessing import InceptionCrop, Preprocessing
from vit_jax.data.loading import LoaderConfig
from vit_jax.data.sampling import Examples
from vit_jax.data.sources import base, opening

N = 150
COUNTS = 40, 60, 50  # in three shards
PIXELS = np.random.default_rng(0).integers(0, 256, (N, 6, 5, 3), np.uint8)
JPEGS = [cv2.imencode('.jpg', pixels)[1].tobytes() for pixels in PIXELS]
DATA = 'gs://bucket/set'
S3_DATA = 's3://bucket/set'


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    for module in ranges, base:
        monkeypatch.setattr(module, 'BLOCK_BYTES', 2**14)  # has about seven images
    monkeypatch.setattr(ranges, '_GAP', 2**11)


@pytest.fixture
def shards(bucket, tmp_path):
    """DATA in the bucket, and on the disk the same."""
    numbers = iter(range(N))
    for shard, count in enumerate(COUNTS):
        members = []
        for i in itertools.islice(numbers, count):
            members += [(f'{i:04}.cls', str(i % 7).encode()), (f'{i:04}.jpg', JPEGS[i])]
        path = tmp_path / 'set' / f'train-{shard:02}.tar'
        write(path, members)
        bucket.put(f'set/{path.name}', path.read_bytes(), {})
    return tmp_path / 'set'


def open_split(data=DATA, split='train', **options):
    return opening.make_opener(**options)(str(data), split)


def gb(images):
    """Returns the size of a window with this number of images, rounded up a little."""
    return float((images + 0.1) * np.mean([*map(len, JPEGS)]) / 2**30)


def make_loader(source, *, random=False, seed=0, **options):
    crop = InceptionCrop() if random else Preprocessing().crop
    reader = loading.ImageReader(source, crop, (4, 4), exif_rotation=True, seed=seed)
    options = {'placement': 'host', 'shuffle_gb': gb(64), 'threads': 2} | options
    return loading.make_loader(reader, LoaderConfig(**options))


def load(loader, steps, rows=None, batch_size=16):
    sampler = loading.training_sampler(loader.source, loader.config, batch_size=batch_size, seed=3)
    return [*loading.host_batches(loader, sampler, steps=steps, batch_size=batch_size, rows=rows)]


def assert_equal(batches, others, rows=slice(None)):
    for batch, other in zip(batches, others, strict=True):
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name][rows])


def read(source):
    return [source.read(i) for i in range(len(source))]


PATHS = DATA, f'{DATA}/', f'{DATA}/train-{{00..02}}.tar', S3_DATA, f'{S3_DATA}/train-{{00..02}}.tar'


@pytest.mark.parametrize('data', PATHS)
def test_shards_in_a_bucket_have_the_images_of_shards_on_a_disk(data, shards):
    remote = open_split(data)
    assert read(remote) == read(open_split(shards)) == [(JPEGS[i], i % 7) for i in range(N)]
    folder = S3_DATA if data.startswith('s3') else DATA
    assert remote.name_of(41) == f'{folder}/train-01.tar:0041.jpg'


@pytest.mark.parametrize('repeats', [1, 3])
def test_batches_do_not_depend_on_processes_and_starts(repeats, shards):
    make = functools.partial(make_loader, open_split(), random=True, seed=3, repeats=repeats)
    whole = load(make(), range(40))
    for start, processes in (0, 2), (17, 4), (38, 1):
        for rows in np.split(np.arange(16), processes):
            assert_equal(load(make(), range(start, 40), rows), whole[start:], rows)


def test_each_image_is_used_once_in_an_epoch(shards):
    used = collections.Counter()
    for batch in load(make_loader(open_split()), range(40)):
        used.update(zip(batch['epoch'].tolist(), batch['example'].tolist(), strict=True))
        assert [*batch['labels']] == [*(batch['example'] % 7)]
    assert max(used.values()) == 1
    assert {use for use in used if use[0] < 4} == {(e, i) for e in range(4) for i in range(N)}


def test_images_on_the_device_are_in_the_order_of_images_that_are_read(shards):
    on_host, on_device = (make_loader(open_split(), placement=p) for p in ('host', 'device'))
    found = loading.training_batches(on_device, steps=range(12), batch_size=16, seed=3)
    assert_equal(load(on_host, range(12)), [*found])


@pytest.mark.parametrize('rows', [np.arange(4), np.arange(1, 3)])
def test_a_process_requests_its_records_once_in_a_window(rows, shards, bucket):
    """The bytes of a record are its image, its class and the headers of both."""
    loader = make_loader(open_split(), shuffle_gb=gb(144))
    bucket.sent.clear()
    batches = load(loader, range(72), rows, batch_size=4)  # two windows of 144 images
    needed = sum(len(JPEGS[i]) for batch in batches for i in batch['example'])
    count = len(rows) * len(batches)
    padding = 256  # on average, to blocks of 512 bytes
    requested = sum(stop - start for _, start, stop in bucket.sent)
    assert needed <= requested <= needed + count * (3 * 512 + padding)
    assert len(bucket.sent) < count / 3


def test_a_resumed_run_requests_the_rest_of_its_window(shards, bucket):
    loader = make_loader(open_split())
    bucket.sent.clear()
    (batch,) = load(loader, range(3, 4))
    size = sum(stop - start for _, start, stop in bucket.sent)
    assert size <= sum(len(JPEGS[i]) + 4 * 512 for i in batch['example'])


PARTS = {
    'a slice': ('train[10%:40%]', range(15, 60)),
    'a sum': ('train[:10]+train[140:]', [*range(10), *range(140, 150)]),
}


@pytest.mark.parametrize('part', PARTS)
def test_a_part_has_its_images_in_training_and_in_evaluation(part, shards, bucket):
    split, numbers = PARTS[part]
    source = open_split(split=split)
    assert read(source) == [(JPEGS[i], i % 7) for i in numbers]
    loader = make_loader(source)
    labels = [label for batch in load(loader, range(20)) for label in batch['labels']]
    epochs = len(labels) // len(source)
    counts = collections.Counter(i % 7 for i in numbers)
    found = collections.Counter(labels[: epochs * len(source)])
    assert set(found) == set(counts)
    found = loading.sequential_batches(loader, np.arange(len(source)), batch_size=16)
    labels = [label for batch in found for label in np.array(batch['labels'])[batch['mask']]]
    assert labels == [i % 7 for i in numbers]


def test_kept_classes_are_read_alone(shards, bucket):
    source = opening.make_opener()(DATA, 'train', classes=('3',))
    bucket.sent.clear()
    batches = load(make_loader(source), range(3))
    assert {*np.concatenate([batch['labels'] for batch in batches])} == {0}
    assert {stop - start for _, start, stop in bucket.sent} <= {
        len(JPEGS[i]) for i in range(3, N, 7)
    }


def test_sequential_batches_of_hosts_request_only_their_rows(shards, bucket):
    loader = make_loader(open_split())
    bucket.sent.clear()
    sampler = loading.sampling.in_order(np.arange(N))
    rows = np.arange(8, 16)
    found = loading.host_batches(loader, sampler, steps=range(10), batch_size=16, rows=rows)
    numbers = [int(i) for batch in found for i in batch['example'][batch['mask']]]
    assert numbers == [i for i in range(N) if i % 16 >= 8]
    requested = sum(stop - start for _, start, stop in bucket.sent)
    assert requested <= sum(len(JPEGS[i]) + 4 * 512 for i in numbers)


def test_an_inspection_reads_all_in_large_parts(shards, bucket):
    reader = loading.make_reader(open_split(), Preprocessing(), (4, 4))
    bucket.sent.clear()
    with futures.ThreadPoolExecutor(2) as pool:
        report = inspection.scan(reader, pool, lambda n: None, images_by_name={})
    assert report.images == N and not report.unreadable
    assert len(bucket.sent) < N / 3
    assert max(stop - start for _, start, stop in bucket.sent) < 2**14 + max(map(len, JPEGS))


def test_ranges_of_two_files_are_requested_apart(bucket):
    """Even if one starts where the other ends, as if they were neighbors."""
    contents = {
        f'set/{name}': bytes(range(start, start + 20)) for name, start in (('a', 0), ('b', 20))
    }
    for name, content in contents.items():
        bucket.put(name, content, {})
    files, _ = buckets.list_folder(DATA)
    reader = buckets.BucketReader(files)
    with reader.request(np.array([0, 1, 0]), np.array([5, 10, 0]), np.array([5, 5, 5])) as parts:
        parts.wait()
        found = [bytes(reader.read(*place)) for place in ((0, 0, 5), (0, 5, 5), (1, 10, 5))]
    assert found == [bytes(range(first, first + 5)) for first in (0, 5, 30)]
    assert sorted(bucket.sent) == [('set/a', 0, 10), ('set/b', 10, 15)]


def test_a_request_that_is_shared_is_not_canceled():
    """Such as one of training and of an evaluation that ends."""
    is_free = threading.Event()

    class Reader(ranges.RangeReader):
        def fetch(self, number, start, stop):
            is_free.wait()
            return memoryview(bytes(range(start, stop)))

    reader = Reader([100])
    reader.pool = futures.ThreadPoolExecutor(1)  # requests wait for the first one
    at = [np.array([value]) for value in (0, 50, 3)]
    first = reader.request(np.array([0]), np.array([0]), np.array([3]))
    ended, kept = reader.request(*at), reader.request(*at)
    ended.cancel()
    ended.release()
    alone = reader.request(np.array([0]), np.array([90]), np.array([2]))
    alone.cancel()
    again = reader.request(np.array([0]), np.array([90]), np.array([2]))
    is_free.set()
    for one in first, kept, again:
        one.wait()
    assert bytes(reader.read(0, 50, 3)) == bytes(range(50, 53))
    with pytest.raises(TransientError, match='was stopped'):
        alone.wait()


@pytest.mark.parametrize('scheme', ['gs', 's3'])
def test_a_folder_has_its_files_and_subfolders_alone(scheme, bucket):
    """Some programs create empty objects that represent folders."""
    for name in 'other/a', 'set/', 'set/b', 'set/a', 'set/x/', 'set/x/c', 'set/y z/d', 'set2/a':
        bucket.put(name, name.encode() * (name[-1] != '/'), {})
    files, folders = buckets.list_folder(f'{scheme}://bucket/set/')
    root = f'{scheme}://bucket'
    assert [(file.url, file.size) for file in files] == [(f'{root}/set/a', 5), (f'{root}/set/b', 5)]
    assert folders == [f'{root}/set/x', f'{root}/set/y z']
    assert buckets.list_folder(root)[1] == [f'{root}/{name}' for name in ('other', 'set', 'set2')]


def test_classes_of_a_bucket_cannot_be_balanced(shards):
    loader = make_loader(open_split(), balance=0.5)
    with pytest.raises(UserError, match='balance=0.5.*because images are read in blocks'):
        load(loader, range(1))


@pytest.fixture
def hurried(monkeypatch):
    """Requests are repeated without long pauses."""
    pause = datetime.timedelta(milliseconds=1)
    backoff = {'init_backoff': pause, 'max_backoff': pause, 'base': 2}
    retries = {'max_retries': 20, 'retry_timeout': datetime.timedelta(seconds=20)}
    monkeypatch.setattr(buckets, '_RETRIES', retries | {'backoff': backoff})


def every_other(answer):
    """Gives half of the requests for bytes this answer."""
    numbers = itertools.count()
    return lambda method, path: (
        answer if path.startswith('/bucket/') and next(numbers) % 2 else None
    )


@pytest.mark.parametrize('status', [429, 500, 503])
def test_images_are_read_in_spite_of_passing_errors(status, shards, bucket, hurried):
    bucket.fault = every_other(status)
    assert read(open_split()) == [(JPEGS[i], i % 7) for i in range(N)]


def test_answers_that_are_cut_off_are_requested_again(shards, bucket, hurried):
    source = open_split()
    numbers = itertools.count()
    bucket.change = lambda name, body: body[: len(body) // 2] if next(numbers) % 3 else body
    assert read(source) == [(JPEGS[i], i % 7) for i in range(N)]


def replace(bucket):
    bucket.put('set/train-01.tar', bucket.objects['set/train-01.tar'].data, {})


def delay(bucket):
    bucket.change = lambda name, body: time.sleep(1) or body


FAULTS = {
    'is unavailable': (lambda b: setattr(b, 'fault', lambda *_: 503), r'bytes [\d,]+ to .*503'),
    'was deleted': (lambda b: b.remove('set/train-01.tar', {}), 'was deleted'),
    'was replaced': (replace, 'was replaced'),
    'does not answer': (delay, 'HTTP error: error sending request'),
}


def test_a_bucket_that_may_not_be_read_stops_a_run_that_skips_images(shards, bucket):
    """With the exit code of an error that the same command would repeat."""
    loader = make_loader(open_split(split='train[50:60]'), on_unreadable='skip')
    bucket.fault = lambda *_: 403
    with pytest.raises(StorageError, match=f'^{DATA}/train-01.tar: bytes .*as the test wants it'):
        load(loader, range(3))


@pytest.mark.parametrize('data', [DATA, S3_DATA])
@pytest.mark.parametrize('fault', FAULTS)
def test_a_shard_that_cannot_be_read_stops_a_run_that_skips_images(
    fault, data, shards, bucket, hurried, monkeypatch
):
    monkeypatch.setattr(buckets, '_TIMEOUT', 0.3)
    monkeypatch.setitem(buckets._RETRIES, 'max_retries', 2)
    loader = make_loader(open_split(data, split='train[50:60]'), on_unreadable='skip')
    make, message = FAULTS[fault]
    make(bucket)
    with pytest.raises(TransientError, match=f'^{data}/train-01.tar: .*{message}'):
        load(loader, range(3))


def flip(name, body):
    """Changes the last byte of an image."""
    return body[:-1] + bytes([body[-1] ^ 1])


def test_a_damaged_image_is_named_or_skipped(shards, bucket):
    source = open_split()
    source.read(5)  # undamaged: only this image is not verified again
    bucket.change = flip
    with pytest.raises(UserError, match='train-00.tar:0003.jpg: damaged: its checksum'):
        loading.make_reader(source, Preprocessing(), (4, 4)).example(3)
    reader = loading.make_reader(source, Preprocessing(), (4, 4), on_unreadable='skip')
    with futures.ThreadPoolExecutor(1) as pool:
        batch = reader.examples(Examples.of(np.arange(5)), pool)
    assert not batch['mask'].any()


@pytest.mark.parametrize('data', [DATA, S3_DATA])
def test_an_index_is_made_once_and_again_for_a_shard_that_was_replaced(data, shards, bucket):
    open_split(data)
    bucket.sent.clear()
    open_split(data)
    assert not bucket.sent
    replace(bucket)
    open_split(data)
    assert {name for name, *_ in bucket.sent} == {'set/train-01.tar'}


WRONG = {
    'gs://bucket/none': 'neither shards',
    'gs://bucket/set/train-{00..03}.tar': '1 shard of 4 missing, such as .*train-03.tar',
    'gs://bucket/set/trian-{00..03}.tar': 'none of its 4 shards exists, such as .*trian-00.tar',
    'gs://other/set': 'bucket does not exist',
    's3://bucket/none': 'neither shards',
    's3://other/set': 'NoSuchBucket.*AWS_ACCESS_KEY_ID',
    'https://bucket/set': 'expected a folder or file on a disk, or in a bucket .*gs://',
}


@pytest.mark.parametrize('data', WRONG)
def test_data_that_does_not_exist_is_named(data, shards):
    with pytest.raises(UserError, match=f'{re.escape(data)}.*{WRONG[data]}'):
        open_split(data)


@pytest.mark.parametrize(('status', 'kind'), [(401, StorageError), (501, TransientError)])
def test_a_bucket_that_cannot_be_listed_is_named(status, kind, shards, bucket):
    """With the exit code of an error that a job repeats, if the bucket fails."""
    bucket.fault = lambda *_: status
    with pytest.raises(kind, match=f'^{DATA}'):
        open_split()


@pytest.mark.parametrize(('images', 'windows'), [(160, 2), (64, 4)])
def test_the_memory_of_windows_is_bounded(images, windows, shards, monkeypatch):
    """Of windows with fewer than eight batches, more are in memory."""
    source = open_split()
    memory = collections.namedtuple('Memory', 'total')
    sharding = loading.batch_sharding(loading.make_mesh(loading.MeshConfig()))
    config = LoaderConfig(shuffle_gb=gb(images))
    needed = loading.check_window_memory(source, config, 16, sharding).host_bytes
    shuffled = min(images, N // 16 * 16)
    assert needed == pytest.approx(windows * shuffled * np.mean([*map(len, JPEGS)]), abs=2)
    monkeypatch.setattr(loading.psutil, 'virtual_memory', lambda: memory(2 * needed - 2))
    with pytest.raises(
        UserError, match=r'shuffle_gb=.* windows need 0 MiB on this host.*; expected'
    ):
        loading.check_window_memory(source, config, 16, sharding)
    monkeypatch.setattr(loading.psutil, 'virtual_memory', lambda: memory(2 * needed))
    loading.check_window_memory(source, config, 16, sharding)


@pytest.mark.parametrize(('order', 'warns'), [('sorted', True), ('random', False)])
def test_images_that_are_sorted_by_class_need_large_windows(order, warns, bucket, tmp_path):
    labels = np.repeat(np.arange(10), 30)
    if order == 'random':
        labels = np.random.default_rng(0).permutation(labels)
    members = []
    for i, label in enumerate(labels):
        members += [(f'{i}.jpg', JPEGS[0]), (f'{i}.cls', str(label).encode())]
    write(tmp_path / 'train-0.tar', members)
    bucket.put('set/train-0.tar', (tmp_path / 'train-0.tar').read_bytes(), {})
    source = open_split()
    small, large = (n * len(JPEGS[0]) / 2**30 for n in (16.1, 200))
    found = inspection.check_order(source, LoaderConfig(shuffle_gb=small), 16)
    assert bool(found) == warns
    if warns:
        assert '30 neighbors' in found and 'a window has 16 blocks' in found
    assert inspection.check_order(source, LoaderConfig(shuffle_gb=large), 16) is None


def test_a_bucket_needs_its_client(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, 'find_spec', lambda n: None if n == 'obstore' else find(n))
    with pytest.raises(UserError, match=r"^gs://bucket/set.*pip install 'vit_jax\[gs\]'"):
        open_split()


def test_the_first_window_is_reported_while_it_is_read(shards, bucket, caplog, monkeypatch):
    monkeypatch.setattr(loading, '_SECONDS_BETWEEN_LINES', 0)
    loader = make_loader(open_split())
    arrived = threading.Event()
    bucket.change = lambda name, body: arrived.wait() and body
    with futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(load, loader, range(1))
        wait_until(lambda: 'reading the first window of images: 0 of 0 MB' in caplog.text)
        arrived.set()
        assert len(first.result()) == 1


def test_an_index_reads_each_block_once(shards, bucket):
    open_split()
    read_blocks = [part for part in bucket.sent if part[0].endswith('.tar')]
    assert len(read_blocks) == len({*read_blocks}) > 3 * len(COUNTS)
    size = sum(len(bucket.objects[name].data) for name in bucket.names())
    assert sum(stop - start for _, start, stop in read_blocks) == size


def test_a_block_is_in_one_shard_and_an_eighth_of_a_lane_in_a_window_at_most(shards):
    source = open_split()
    windows = loading.make_windows(source, LoaderConfig(shuffle_gb=gb(128)), 4)
    firsts = loading.find_blocks(source, windows)
    assert windows.size == 32 and max(np.diff([*firsts, N])) == 4
    assert {*np.cumsum([0, *COUNTS[:-1]])} <= {*firsts}
    whole = source.places.find_blocks(N)  # blocks of BLOCK_BYTES
    starts = source.places.start
    spans = starts[np.append(whole[1:], N) - 1] - starts[whole]
    assert max(spans) < 2**14 and np.median(spans) > 2**13


def test_another_layout_of_equal_images_is_another_set(shards, bucket, tmp_path):
    """The order of a bucket depends on it, and a run that is resumed compares sizes."""
    before = open_split()
    stored = read(before)
    members = [('0.json', b'{}')]
    for i in range(40):
        members += [(f'{i:04}.cls', str(i % 7).encode()), (f'{i:04}.jpg', JPEGS[i])]
    write(tmp_path / 'train-00.tar', members)
    bucket.put('set/train-00.tar', (tmp_path / 'train-00.tar').read_bytes(), {})
    after = open_split()
    assert read(after) == stored
    sizes = [source.read_sizes(range(N)) for source in (before, after)]
    assert (sizes[0] != sizes[1]).tolist() == [i < 40 for i in range(N)]


def test_a_window_that_was_released_is_not_requested_again(shards):
    """A thread that requests windows ahead may be late."""
    source = open_split()
    requested = []

    def request(examples):
        requested.append(examples.index.tolist())
        return source.places.request(examples.index)

    windows = loading._RequestedWindows(
        request, lambda steps: Examples.of(np.array(steps)), range(2, 9), steps_per_window=3
    )
    windows.request(2)
    assert windows.release(2) == [3, 6]
    for step in 0, 2, 3, 5, 6, 9:
        windows.request(step)
    assert requested == [[2], [3, 4, 5], [6, 7, 8]]
    assert [windows.release(step) for step in (3, 4, 5)] == [[], [], [9]]
    windows.close([])
    assert not source.places.reader._requested
