"""Reads ranges of the bytes of files, on a disk or in a bucket.

A range is read alone (`RangeReader.read`), or many are requested at once, before they are needed
(`RangeReader.request`).
"""

import abc
import contextlib
import io
import threading
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import numpy as np

from vit_jax.base.array_types import Int
from vit_jax.base.errors import TransientError

# The size of most requests: smaller ones cost more in total, larger ones arrive later.
BLOCK_BYTES = 2**22
_GAP = 2**18  # ranges that are closer are read together
_AHEAD = 8  # blocks that are requested ahead in a file that is read from start to end
_REQUESTS = 64  # at a time


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

    def read(self, number: int, start: int, length: int) -> memoryview:
        """Returns `length` bytes of file `number` from `start`.

        If a requested range contains them, they come from it; otherwise, a new request is made.
        """
        for ranges in self._requested:
            if place := ranges.places.get((number, start)):
                reply, offset = place
                return reply.wait()[offset : offset + length]
        return self.fetch(number, start, start + length)

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
        self._size = reader.sizes[number]
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
