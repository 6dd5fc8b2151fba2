"""Lists the files of a bucket (gs://BUCKET/NAME or s3://BUCKET/NAME), and reads their bytes.

A range of bytes is read alone (`RangeReader.read`), or many are requested at once, before they are
needed (`RangeReader.request`). Each reply is compared with the version of its file in the listing,
so that a file that is replaced during a run is detected.
"""

import contextlib
import datetime
import importlib.util
import io
import os
import re
import threading
from collections.abc import Sequence
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np

from vit_jax.base.array_types import Int
from vit_jax.base.errors import (
    MissingFile,
    StorageError,
    TransientError,
    UserError,
    format_error,
)
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
    """A file of a bucket; its version changes when it is replaced."""

    url: str
    size: int
    version: str


def list_folder(url: str) -> tuple[list[BucketFile], list[str]]:
    """Lists the files in a folder of a bucket, and the URLs of its subfolders, both sorted.

    Raises StorageError, for example if the bucket does not exist or credentials are missing.
    """
    _require_packages(url)
    with usable(url):
        files, folders = (_list_s3 if _is_s3(url) else _list_gs)(url.rstrip('/'))
    return sorted(files), sorted(folders)


def _require_packages(url: str) -> None:
    extra, packages = ('s3', ['obstore']) if _is_s3(url) else ('gs', ['gcsfs', 'obstore'])
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"{url}: {package} is not installed; run pip install 'vit_jax[{extra}]'"
            )


def _is_s3(url: str) -> bool:
    return url.startswith('s3://')


def _list_gs(url: str) -> tuple[list[BucketFile], list[str]]:
    """Lists a folder with Google's client, because obstore lists no generations."""
    bucket, name = bucket_and_name(url)
    listing = bucket.list_blobs(
        prefix=f'{name}/' if name else '',
        delimiter='/',
        fields='items(name,size,generation),prefixes,nextPageToken',
    )
    try:
        files = [
            BucketFile(f'gs://{bucket.name}/{blob.name}', int(blob.size), str(blob.generation))
            for blob in listing
            if not blob.name.endswith('/')  # represents a folder
        ]
    except Exception as error:
        code = getattr(error, 'code', None)
        if isinstance(code, int) and (code == 429 or code >= 500):
            raise TransientError(f'{url}: {format_error(error)}') from error
        raise
    return files, [f'gs://{bucket.name}/{folder.rstrip("/")}' for folder in listing.prefixes]


def _list_s3(url: str) -> tuple[list[BucketFile], list[str]]:
    bucket, name = split_url(url)
    try:
        listing = _open_store(url).list_with_delimiter(name or None)
    except Exception as error:
        raise StorageError(
            f'{url}: {_describe(error)}; AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION, '
            'or AWS_SKIP_SIGNATURE=true for public data, give access'
        ) from error
    files = [
        BucketFile(f's3://{bucket}/{found["path"]}', found['size'], str(found['e_tag']))
        for found in listing['objects']
        if found['path'] != name  # represents the folder
    ]
    return files, [f's3://{bucket}/{folder}' for folder in listing['common_prefixes']]


def read_bucket_file(url: str) -> bytes | None:
    """Reads a small file completely; returns None if it does not exist."""
    _, name = split_url(url)
    try:
        contents, _ = _get(_open_store(url), name, url)
    except MissingFile:
        return None
    return bytes(contents)


def write_bucket_file(url: str, contents: bytes) -> None:
    """Writes a small file. Raises StorageError."""
    _, name = split_url(url)
    try:
        _open_store(url).put(name, contents)
    except Exception as error:
        raise StorageError(f'{url}: {_describe(error)}') from error


def _get(store: Any, name: str, where: str, **options: Any) -> tuple[memoryview, dict[str, Any]]:
    """Reads a file, or a range, without Python's lock. Returns its bytes and its metadata.

    A request that fails for a passing reason is repeated.

    Args:
      store: The bucket.
      name: The name of the file in the bucket.
      where: What is read, for messages.
      **options: Options of the request.

    Raises:
      MissingFile: If the file does not exist.
      StorageError: If reading is not permitted.
      TransientError: For all other reasons.
    """
    import obstore.exceptions as failures

    try:
        reply = store.get(name, options=options)
        return memoryview(reply.bytes()), reply.meta
    except FileNotFoundError as error:
        raise MissingFile(f'{where}: does not exist') from error
    except (failures.PermissionDeniedError, failures.UnauthenticatedError) as error:
        raise StorageError(f'{where}: {_describe(error)}') from error
    except Exception as error:  # obstore has many types
        raise TransientError(f'{where}: {_describe(error)}') from error


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
    """Opens a bucket, or the server that STORAGE_EMULATOR_HOST or AWS_ENDPOINT_URL names."""
    from obstore.store import GCSStore, S3Store

    bucket, _ = split_url(url)
    server = os.environ.get('AWS_ENDPOINT_URL' if _is_s3(url) else 'STORAGE_EMULATOR_HOST', '')
    options: Any = {
        'retry_config': _RETRIES,
        'client_options': {
            'timeout': datetime.timedelta(seconds=_TIMEOUT),
            'allow_http': server.startswith('http://'),
        },
    }
    with usable(url):
        if _is_s3(url):
            return S3Store(bucket, **options)
        if server:
            options['config'] = {'base_url': server}
            options['credential_provider'] = lambda: {'token': 'none', 'expires_at': None}
        return GCSStore(bucket, **options)


def _describe(error: Exception) -> str:
    """Returns the reason in an error of obstore, without XML and details for programmers."""
    text = re.split(r'\s+Debug source:', str(error))[0]
    text = re.sub(r'<\?xml.*<Message>(.*)</Message>.*', r'\1', text, flags=re.DOTALL)
    return ' '.join(text.split())


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
        file = self.files[number]
        if start == stop:
            return memoryview(b'')
        _, name = split_url(file.url)
        where = f'{file.url}: bytes {start:,} to {stop:,}'
        try:
            contents, state = _get(self._store, name, where, range=(start, stop))
        except MissingFile as error:
            raise TransientError(f'{file.url}: was deleted') from error
        if str(state['e_tag' if _is_s3(file.url) else 'version']) != file.version:
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
