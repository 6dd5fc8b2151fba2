"""Processes beside this one that read images into memory which they share with it."""

import contextlib
import dataclasses
import math
import mmap
import os
import pathlib
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence

import cloudpickle
import numpy as np

import vit_jax
from vit_jax.base import UInt8, UserError
from vit_jax.data.reading import ExampleRef, Fill, Filled, ImageReader

_ENDS_WITHIN = 10.0  # seconds, when told to


class Unsendable(UserError):
    """A source that no other process can have."""


class Gone(UserError):
    """A process has ended that was to read images."""


class ReadingProcesses:
    """So many processes, each of which reads a few rows of a batch at a time, as `reader` would.

    They end with this object, and with this process, also when that is killed. Raises Unsendable
    where they cannot have the source, or read something else from it.
    """

    rows = 16  # that one reads at a time: asking for them costs less than 2 % of reading them

    def __init__(self, reader: ImageReader, count: int):
        if os.name != 'posix':
            raise Unsendable('there are none on this system')
        try:
            sent = cloudpickle.dumps(dataclasses.replace(reader, on_skipped=None))
        except Exception as error:  # of many kinds
            text = f'these data are read by what cannot be sent to another process ({error})'
            raise Unsendable(' '.join(text.split())) from error
        self.count = count
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        workers: list[_Worker] = []
        weakref.finalize(self, _end, workers)
        try:
            for _ in range(count):
                workers.append(_Worker(reader, self.rows))
        except OSError as error:  # no more files, processes or memory
            _end(workers)
            text = f'{error.strerror} after {len(workers)} of them; take fewer'
            raise Unsendable(text) from error
        for worker in workers:
            worker.tell(sent)
            self._idle.put(worker)
        expected = _first(reader, reader.fill)
        for worker in workers:
            if _first(reader, worker.fill) != expected:
                raise Unsendable('another process reads something else from these data')

    def fill(
        self, refs: Sequence[ExampleRef | None], images: UInt8[np.ndarray, 'r h w 3']
    ) -> Filled:
        """What `reader.fill` does. Raises UserError too where a process is gone."""
        worker = self._idle.get()
        try:
            return worker.fill(refs, images)
        finally:
            self._idle.put(worker)


class _Worker:
    """One process, and the memory in which it leaves pixels."""

    def __init__(self, reader: ImageReader, rows: int):
        shape = rows, *reader.size, 3
        with contextlib.ExitStack() as stack:
            descriptor = _shared_memory(stack)
            os.ftruncate(descriptor, math.prod(shape))
            memory = mmap.mmap(descriptor, math.prod(shape))
            self._images = np.frombuffer(memory, np.uint8).reshape(shape)
            # Not by `multiprocessing`: it would import the program again, and with that jax.
            self.process = subprocess.Popen(
                [sys.executable, '-m', 'vit_jax.data.reading_worker', str(descriptor)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[descriptor],
                # A user's own functions may import jax: it shall not take an accelerator.
                env=os.environ | {'PYTHONPATH': _import_path(), 'JAX_PLATFORMS': 'cpu'},
            )

    def fill(
        self, refs: Sequence[ExampleRef | None], images: UInt8[np.ndarray, 'r h w 3']
    ) -> Filled:
        assert self.process.stdout is not None
        self.tell(pickle.dumps(refs))
        try:
            filled, error, fault = pickle.load(self.process.stdout)
        except (EOFError, pickle.UnpicklingError) as cause:
            raise Gone(self._gone()) from cause
        if fault is not None:
            raise RuntimeError(fault)
        if error is not None:
            raise UserError(error)
        images[:] = self._images[: len(refs)]
        return filled

    def tell(self, text: bytes) -> None:
        """Sends what was pickled."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(text)
            self.process.stdin.flush()
        except BrokenPipeError as cause:
            raise Gone(self._gone()) from cause

    def _gone(self) -> str:
        try:
            status = self.process.wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            status = 0
        how = f'was ended by {signal.Signals(-status).name}' if status < 0 else f'ended ({status})'
        memory = ', as where memory ran out' if status == -signal.SIGKILL else ''
        advice = '--config.loader.processes=0 reads in threads, a smaller number needs less memory'
        return f'a process that reads images {how}{memory}: {advice}'


def _first(reader: ImageReader, fill: Fill) -> tuple[str, bytes, bytes]:
    """What is read of the first example, or what is wrong with it."""
    images = np.zeros((1, *reader.size, 3), np.uint8)
    try:
        labels, _, left_out = fill([ExampleRef(0)], images)
    except RuntimeError as fault:
        raise Unsendable(f'another process cannot read these data: {fault}') from fault
    except Gone:
        raise
    except UserError as error:
        return str(error), b'', b''
    return ' '.join(left_out), images.tobytes(), labels.tobytes()


def _shared_memory(stack: contextlib.ExitStack) -> int:
    """A file without a name, which is gone with the last process that has it."""
    if hasattr(os, 'memfd_create'):  # on Linux: in memory alone, whatever /dev/shm may hold
        descriptor = os.memfd_create('vit_jax images')
        stack.callback(os.close, descriptor)
        return descriptor
    return stack.enter_context(tempfile.TemporaryFile()).fileno()


def _import_path() -> str:
    """Where a process finds what this one imports."""
    root = str(pathlib.Path(vit_jax.__file__).parent.parent)
    return os.pathsep.join([root, *filter(None, sys.path)])


def _end(workers: Sequence[_Worker]) -> None:
    """Lets their processes end, by closing what they read, and waits until they have."""
    processes = [worker.process for worker in workers]
    for process in processes:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
    for process in processes:
        try:
            process.wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
