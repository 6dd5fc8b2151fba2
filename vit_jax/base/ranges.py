"""Reads ranges of the bytes of files, on a disk or in a bucket.

A range is read alone (`RangeReader.read`), or many are requested at once, before they are needed
(`RangeReader.request`).
"""

import abc
import contextlib
import io
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import numpy as np

from vit_jax.base.array_types import Int
from vit_jax.base.errors import TransientError

# The size of most requests: smaller ones cost more in total, larger ones arrive later.
BLOCK_BYTES = 2**22
_GAP = 2**18  # ranges that are closer are read together
_TOGETHER = 8  # blocks that are requested together in a file that is read from start to end
_SMALL_BYTES = 2**16  # of a block in a file of which small parts are read
_REQUESTS = 64  # at a time


class _Reply:
    """The bytes of one range, which arrive in the background."""

    def __init__(self, reader: 'RangeReader', number: int, start: int, stop: int):
        self.start = start
        self.stop = stop
        self.users = 0  # the `Ranges` that need it
        self._future = reader.pool.submit(reader.fetch, number, start, stop)
        self._decoded: dict[int, Any] = {}
        self._lock = threading.Lock()

    @property
    def has_arrived(self) -> bool:
        return self._future.done()

    @property
    def is_canceled(self) -> bool:
        return self._future.cancelled()  # codespell:ignore

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

    def decode(self, offset: int, length: int, decode: Callable[[memoryview], Any]) -> Any:
        """Returns the result of `decode` for a part of the bytes; decodes each part once."""
        with self._lock:
            if offset not in self._decoded:
                self._decoded[offset] = decode(self.wait()[offset : offset + length])
                if length == self.stop - self.start:  # the bytes are no longer needed
                    self._future = futures.Future()
                    self._future.set_result(memoryview(b''))
            return self._decoded[offset]


class Ranges(contextlib.AbstractContextManager['Ranges']):
    """Ranges that are requested together. Used as a context manager, it releases their bytes."""

    def __init__(self, reader: 'RangeReader', places: dict[tuple[int, int], tuple[_Reply, int]]):
        self._reader = reader
        self.places = places
        self.replies = [*{id(reply): reply for reply, _ in places.values()}.values()]

    @property
    def num_bytes(self) -> int:
        return sum(reply.stop - reply.start for reply in self.replies)

    @property
    def bytes_received(self) -> int:
        return sum(reply.stop - reply.start for reply in self.replies if reply.has_arrived)

    def wait(self) -> None:
        """Waits for all bytes."""
        for reply in self.replies:
            reply.wait()

    def cancel(self) -> None:
        """Cancels the requests without a reply. Reading their bytes raises TransientError.

        Requests that another `Ranges` shares are not canceled.
        """
        self._reader.cancel(self)

    def release(self) -> None:
        """Drops the bytes, and cancels requests as `cancel`."""
        self._reader.cancel(self)
        self._reader.forget(self)

    def __exit__(self, *_: object) -> None:
        self.release()


class RangeReader(abc.ABC):
    """Reads ranges of the bytes of files, by the number of the file, from any thread."""

    def __init__(self, sizes: Sequence[int]):
        self.sizes = sizes
        self.pool = futures.ThreadPoolExecutor(_REQUESTS)
        self._lock = threading.Lock()
        self._requested: tuple[Ranges, ...] = ()  # replaced as a whole, and read without the lock

    @abc.abstractmethod
    def fetch(self, number: int, start: int, stop: int) -> memoryview:
        """Reads a range, without Python's lock.

        Raises:
          TransientError: If the same command may succeed later.
          StorageError: If reading is not permitted.
        """

    def read(
        self,
        number: int,
        start: int,
        length: int,
        decode: Callable[[memoryview], Any] | None = None,
    ) -> Any:
        """Returns `length` bytes of file `number` from `start`, or what `decode` makes of them.

        If a requested range contains them, they come from it, and are decoded once. Otherwise, a
        new request is made.
        """
        for ranges in self._requested:
            if place := ranges.places.get((number, start)):
                reply, offset = place
                if decode is not None:
                    return reply.decode(offset, length, decode)
                return reply.wait()[offset : offset + length]
        contents = self.fetch(number, start, start + length)
        return contents if decode is None else decode(contents)

    def request(
        self,
        numbers: Int[np.ndarray, 'n'],
        starts: Int[np.ndarray, 'n'],
        lengths: Int[np.ndarray, 'n'],
    ) -> Ranges:
        """Requests ranges, and returns at once.

        Neighbors are requested together. Ranges that are already requested are shared.

        Args:
          numbers: The numbers of the files.
          starts: The first byte of each range in its file.
          lengths: The lengths of the ranges.
        """
        order = np.lexsort((starts, numbers))
        file, start, stop = numbers[order], starts[order], (starts + lengths)[order]
        is_new = np.ones(len(order), bool)
        is_new[1:] = (file[1:] != file[:-1]) | (start[1:] != start[:-1])
        keys = [*zip(file[is_new].tolist(), start[is_new].tolist(), strict=True)]
        with self._lock:
            places = {
                key: ranges.places[key]
                for ranges in self._requested
                for key in keys
                if key in ranges.places and not ranges.places[key][0].is_canceled
            }
            if places:
                is_new[is_new] = [key not in places for key in keys]
            places |= self._begin_all(file[is_new], start[is_new], stop[is_new])
            ranges = Ranges(self, places)
            for reply in ranges.replies:
                reply.users += 1
            self._requested = (*self._requested, ranges)
        return ranges

    def _begin_all(
        self, file: Int[np.ndarray, 'n'], start: Int[np.ndarray, 'n'], stop: Int[np.ndarray, 'n']
    ) -> dict[tuple[int, int], tuple[_Reply, int]]:
        """Requests sorted ranges; returns the reply and the place in it by file and start."""
        is_first = np.ones(len(file), bool)
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
        numbers = np.cumsum(is_first) - 1
        offsets = start - start[firsts][numbers] if len(firsts) else start
        keys = zip(file.tolist(), start.tolist(), strict=True)
        places = zip([replies[n] for n in numbers.tolist()], offsets.tolist(), strict=True)
        return dict(zip(keys, places, strict=True))

    def cancel(self, ranges: Ranges) -> None:
        """Cancels requests that have no reply yet, unless other ranges share them."""
        with self._lock:  # otherwise, `request` could share them at the same time
            for reply in ranges.replies:
                if reply.users == 1:
                    reply.cancel()

    def forget(self, ranges: Ranges) -> None:
        """Stops reading from these ranges."""
        with self._lock:
            if ranges in self._requested:
                self._requested = tuple(one for one in self._requested if one is not ranges)
                for reply in ranges.replies:
                    reply.users -= 1

    def open(self, number: int, *, in_parts: bool = False) -> io.BufferedIOBase:
        """Opens a file for reading from start to end, in blocks that are requested ahead.

        With `in_parts`, opens it for reading small parts, in small blocks.
        """
        size, together = (_SMALL_BYTES, 1) if in_parts else (BLOCK_BYTES, _TOGETHER)
        blocks = _Blocks(self, number, size, together)
        raw: Any = FileOfParts(self.sizes[number], blocks.read)
        return io.BufferedReader(raw, 2**16)

    def begin(self, number: int, start: int, stop: int) -> _Reply:
        """Requests a range, and returns at once."""
        return _Reply(self, number, start, stop)


class FileOfParts(io.RawIOBase):
    """A file whose bytes come from a function.

    Args:
      size: The size of the file.
      read_part: Takes a position and a length. Returns one byte or more from this position.
    """

    def __init__(self, size: int, read_part: Callable[[int, int], memoryview]):
        self._size = size
        self._read_part = read_part
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self._position >= self._size:
            return 0
        part = self._read_part(self._position, len(buffer))
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)


class _Blocks:
    """The blocks of a file; the next ones are requested together with one that is read."""

    def __init__(self, reader: RangeReader, number: int, block_bytes: int, together: int):
        self._reader = reader
        self._number = number
        self._size = reader.sizes[number]
        self._block_bytes = block_bytes
        self._together = together
        self._replies: dict[int, _Reply] = {}

    def read(self, position: int, length: int) -> memoryview:
        block, offset = divmod(position, self._block_bytes)
        for number in range(block, block + self._together):
            start = number * self._block_bytes
            if number not in self._replies and start < self._size:
                stop = min(start + self._block_bytes, self._size)
                self._replies[number] = self._reader.begin(self._number, start, stop)
        for number in [number for number in self._replies if number < block]:
            del self._replies[number]
        return self._replies[block].wait()[offset : offset + length]
