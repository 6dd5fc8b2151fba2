"""Lists the files of a bucket (gs://BUCKET/NAME), and reads ranges of their bytes.

A range is read alone (`RangeReader.read`), or many are requested at once, before they are needed
(`RangeReader.request`). Each reply is compared with the generation of its file in the listing, so
that a file that is replaced during a run is detected.
"""

import contextlib
import datetime
import importlib.util
import io
import os
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple, cast

import numpy as np

from vit_jax.base.array_types import Int
from vit_jax.base.errors import StorageError, TransientError, UserError, format_error
from vit_jax.base.storage import bucket_and_name, split_url, usable

# The size of most requests: smaller ones cost more in total, larger ones arrive later.
BLOCK_BYTES = 2**22
_GAP = 2**18  # ranges that are closer are read together
_AHEAD = 8  # blocks that are requested ahead in a file that is read from start to end
_REQUESTS = 64  # at a time
# How obstore repeats a request that fails for a passing reason.
_RETRIES: dict[str, Any] = {
    'max_retries': 8,
    'retry_timeout': datetime.timedelta(minutes=3),
    'backoff': {
        'init_backoff': datetime.timedelta(seconds=1),
        'max_backoff': datetime.timedelta(seconds=32),
        'base': 2,
    },
}
_TIMEOUT = 120.0  # seconds for one reply


class BucketFile(NamedTuple):
    """A file of a bucket; its generation changes when it is replaced."""

    url: str
    size: int
    generation: int


def list_files(prefix: str) -> list[BucketFile]:
    """Lists the files of a bucket whose URLs start with `prefix`, sorted by name.

    Raises StorageError, for example if the bucket does not exist or credentials are missing.
    """
    for package in 'gcsfs', 'obstore':
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{prefix}: {package} is not installed; run pip install 'vit_jax[gs]'")
    with _listable(prefix):
        bucket, name = bucket_and_name(prefix)
        fields = 'items(name,size,generation),nextPageToken'
        blobs = bucket.list_blobs(prefix=name, fields=fields)
        files = [
            BucketFile(f'gs://{bucket.name}/{blob.name}', int(blob.size), int(blob.generation))
            for blob in blobs
            if not blob.name.endswith('/')  # represents a folder
        ]
    return sorted(files)


@contextlib.contextmanager
def _listable(prefix: str) -> Iterator[None]:
    """Converts errors of the listing of a bucket: TransientError if the bucket is unavailable."""
    with usable(prefix):
        try:
            yield
        except Exception as error:
            code = getattr(error, 'code', None)
            if isinstance(code, int) and (code == 429 or code >= 500):
                raise TransientError(f'{prefix}: {format_error(error)}') from error
            raise


def read_bucket_file(file: BucketFile) -> bytes:
    """Reads a small file completely."""
    return bytes(RangeReader([file]).read(0, 0, file.size))


class _Reply:
    """The bytes of one range, which arrive in the background."""

    def __init__(self, reader: 'RangeReader', number: int, start: int, stop: int):
        self.start = start
        self.stop = stop
        self._future = reader.pool.submit(reader.fetch, number, start, stop)

    @property
    def has_arrived(self) -> bool:
        return self._future.done()

    def cancel(self) -> None:
        self._future.cancel()

    def wait(self) -> memoryview:
        """Returns the bytes.

        Raises:
          TransientError: If they cannot be read because the network or the bucket fails.
          StorageError: If this is not permitted.
        """
        try:
            return self._future.result()
        except futures.CancelledError as error:  # codespell:ignore
            raise TransientError('a request to the bucket was stopped') from error


class Ranges(contextlib.AbstractContextManager['Ranges']):
    """Ranges that are requested together. Used as a context manager, it releases their bytes."""

    def __init__(self, reader: 'RangeReader', replies: list[_Reply]):
        self._reader = reader
        self._replies = replies
        self.places: dict[tuple[int, int], tuple[_Reply, int]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(reply.stop - reply.start for reply in self._replies)

    @property
    def bytes_received(self) -> int:
        return sum(reply.stop - reply.start for reply in self._replies if reply.has_arrived)

    def wait(self) -> None:
        """Waits for all bytes."""
        for reply in self._replies:
            reply.wait()

    def cancel(self) -> None:
        """Cancels the requests without a reply. Reading their bytes raises TransientError."""
        for reply in self._replies:
            reply.cancel()

    def release(self) -> None:
        """Cancels the requests without a reply, and drops all bytes."""
        self._reader.forget(self)
        self.cancel()

    def __exit__(self, *_: object) -> None:
        self.release()


def _open_store(url: str) -> Any:
    """Opens a bucket, or the server that takes its place in STORAGE_EMULATOR_HOST."""
    from obstore.store import GCSStore

    bucket, _ = split_url(url)
    config: Any = {}
    options: Any = {'timeout': datetime.timedelta(seconds=_TIMEOUT)}
    if server := os.environ.get('STORAGE_EMULATOR_HOST'):
        config = {'base_url': server, 'skip_signature': True}
        options['allow_http'] = True
    with usable(url):
        return GCSStore(
            bucket, config=config, client_options=options, retry_config=cast(Any, _RETRIES)
        )


def _describe(error: Exception) -> str:
    """Returns the reason in an error of obstore, without its representation for programmers."""
    return ' '.join(re.split(r'\s+Debug source:', str(error))[0].split())


class RangeReader:
    """Reads ranges of the bytes of files in one bucket, from any thread."""

    def __init__(self, files: Sequence[BucketFile]):
        self.files = files
        self.pool = futures.ThreadPoolExecutor(_REQUESTS)
        self._store = _open_store(files[0].url)
        self._lock = threading.Lock()
        self._requested: tuple[Ranges, ...] = ()  # replaced as a whole, and read without the lock

    def read(self, number: int, start: int, length: int) -> memoryview:
        """Returns `length` bytes of file `number` from `start`.

        If a requested range contains them, they come from it; otherwise, a new request is made.
        """
        for ranges in self._requested:
            if place := ranges.places.get((number, start)):
                reply, offset = place
                return reply.wait()[offset : offset + length]
        return self.fetch(number, start, start + length)

    def fetch(self, number: int, start: int, stop: int) -> memoryview:
        """Requests a range, and waits for its bytes, without Python's lock."""
        import obstore.exceptions as failures

        file = self.files[number]
        if start == stop:
            return memoryview(b'')
        _, name = split_url(file.url)
        where = f'{file.url}: bytes {start:,} to {stop:,}'
        attempts = 0
        while True:
            try:
                reply = self._store.get(name, options={'range': (start, stop)})
            except FileNotFoundError as error:
                raise TransientError(f'{file.url}: was deleted') from error
            except (failures.PermissionDeniedError, failures.UnauthenticatedError) as error:
                raise StorageError(f'{where}: {_describe(error)}') from error
            except Exception as error:  # obstore has many types
                raise TransientError(f'{where}: {_describe(error)}') from error
            attempts += 1
            try:
                contents = memoryview(reply.bytes())
                break
            except Exception as error:  # it is cut off, for which obstore does not repeat requests
                if attempts > _RETRIES['max_retries']:
                    raise TransientError(f'{where}: {_describe(error)}') from error
        if reply.meta['version'] != str(file.generation):
            raise TransientError(f'{file.url}: was replaced; run the same command again')
        if len(contents) != stop - start:
            raise TransientError(f'{where}: got {len(contents):,} bytes')
        return contents

    def request(
        self,
        numbers: Int[np.ndarray, 'n'],
        starts: Int[np.ndarray, 'n'],
        lengths: Int[np.ndarray, 'n'],
    ) -> Ranges:
        """Requests ranges, neighbors together, and returns at once.

        Args:
          numbers: The numbers of the files.
          starts: The first byte of each range in its file.
          lengths: The lengths of the ranges.
        """
        order = np.lexsort((starts, numbers))
        file, start = numbers[order], starts[order]
        stop = start + lengths[order]
        is_first = np.ones(len(order), bool)
        is_first[1:] = (
            (file[1:] != file[:-1])
            | (start[1:] // BLOCK_BYTES != start[:-1] // BLOCK_BYTES)
            | (start[1:] - stop[:-1] > _GAP)
        )
        firsts = np.flatnonzero(is_first)
        stops = np.maximum.reduceat(stop, firsts) if len(firsts) else stop
        replies = [
            self.begin(*range_)
            for range_ in zip(
                file[firsts].tolist(), start[firsts].tolist(), stops.tolist(), strict=True
            )
        ]
        ranges = Ranges(self, replies)
        number_of = (np.cumsum(is_first) - 1).tolist()
        offsets = (start - start[firsts][number_of]).tolist() if len(firsts) else []
        for key, number, offset in zip(
            zip(file.tolist(), start.tolist(), strict=True), number_of, offsets, strict=True
        ):
            ranges.places[key] = replies[number], offset
        with self._lock:
            self._requested = (*self._requested, ranges)
        return ranges

    def forget(self, ranges: Ranges) -> None:
        """Stops reading from these ranges."""
        with self._lock:
            self._requested = tuple(one for one in self._requested if one is not ranges)

    def open(self, number: int) -> io.BufferedIOBase:
        """Opens a file for reading from start to end; blocks are requested ahead."""
        raw: Any = _RawFile(self, number)
        return io.BufferedReader(raw, 2**16)

    def begin(self, number: int, start: int, stop: int) -> _Reply:
        """Requests a range, and returns at once."""
        return _Reply(self, number, start, stop)


class _RawFile(io.RawIOBase):
    """A file that is read in blocks, which are requested ahead."""

    def __init__(self, reader: RangeReader, number: int):
        self._reader = reader
        self._number = number
        self._size = reader.files[number].size
        self._position = 0
        self._blocks: dict[int, _Reply] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        block, offset = divmod(self._position, BLOCK_BYTES)
        for number in range(block, block + _AHEAD):
            start = number * BLOCK_BYTES
            if number not in self._blocks and start < self._size:
                stop = min(start + BLOCK_BYTES, self._size)
                self._blocks[number] = self._reader.begin(self._number, start, stop)
        for number in [number for number in self._blocks if number < block]:
            del self._blocks[number]
        if block not in self._blocks:
            return 0
        part = self._blocks[block].wait()[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)
