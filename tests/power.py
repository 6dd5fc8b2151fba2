"""Power failures: what of a folder would still be there, by what was synced up to a moment.

Only `fsync` of a file keeps its bytes, and only that of a folder its names; all else the system
writes when it likes, in any order (POSIX). So `os.fsync` alone is replaced, whatever program or
library wrote the files; the interpreter reports operations on names (PEP 578).
"""

import contextlib
import os
import pathlib
import sys
import threading
from unittest import mock

import numpy as np

from tests.checkpoints.crashing import where

NAMING = 'os.rename', 'os.mkdir', 'os.rmdir', 'os.remove'


class Disk:
    """The folder as it is on the disk for sure, and as it is in memory.

    Both are tables of contents by inode: bytes of a file, {name: inode} of a folder.
    """

    def __init__(self, root):
        self.root, self._held, self._fsync = root, set(), os.fsync
        self.synced = self.memory()

    def fsync(self, descriptor):
        self._fsync(descriptor)
        path = pathlib.Path(f'/proc/self/fd/{descriptor}')
        for known in [path, *path.iterdir()] if path.is_dir() else [path]:
            self._hold(known)
        self.synced[path.stat().st_ino] = _content(path)

    def _hold(self, path):
        """As long as it is open, no other file gets its inode."""
        inode = path.stat().st_ino
        if inode not in self._held:
            os.open(path, os.O_PATH)
            self._held.add(inode)

    def memory(self):
        """What every process sees now."""
        found = {}
        for path in self.root, *self.root.rglob('*'):
            with contextlib.suppress(FileNotFoundError):  # another thread goes on
                found[path.stat().st_ino] = _content(path)
        return found

    def failure(self, place, choose):
        """Writes to `place` what is there after a failure now.

        `choose` takes what is synced and what is in memory, None where there is nothing.
        """
        self._write(place, self.root.stat().st_ino, choose, self.memory())

    def _write(self, place, inode, choose, memory):
        synced, now = self.synced.get(inode), memory.get(inode)
        if isinstance(synced, dict) or isinstance(now, dict):
            place.mkdir()
            synced, now = synced or {}, now or {}
            for name in sorted({*synced, *now}):
                chosen = choose(synced.get(name), now.get(name))
                if chosen is not None:
                    self._write(place / name, chosen, choose, memory)
        else:
            place.write_bytes(choose(synced or b'', now or b''))


def _content(path):
    if not path.is_dir():
        return path.read_bytes()
    return {child.name: child.lstat().st_ino for child in path.iterdir()}


def _unsynced_is_lost(synced, now):
    return synced


def _names_are_kept(synced, now):
    """As by a journal of names: the files are there, and empty."""
    return synced if isinstance(now, bytes) else now


@contextlib.contextmanager
def failures(disk, folder):
    """Within, writes to folder/0, folder/1, ... what a failure at each operation on names leaves.

    Everything unsynced is lost; the names are kept and the bytes are not; and of each name and each
    file the one or the other by chance. Gives the list of these places, as it grows.
    """
    places, rng, lock, ended = [], np.random.default_rng(0), threading.RLock(), threading.Event()

    def by_chance(synced, now):
        return (synced, now)[rng.integers(2)]

    def fail():
        for choose in _unsynced_is_lost, _names_are_kept, by_chance:
            places.append(folder / str(len(places)))
            disk.failure(places[-1], choose)

    def fail_before(path):
        """In the folder: at the name of a checkpoint and at its items, not at their files."""
        if path.startswith(str(disk.root)) and path.partition('/checkpoints/')[2].count('/') < 2:
            with lock:
                fail()

    def hook(event, arguments):
        if event in NAMING and not ended.is_set():
            fail_before(where(event, arguments))

    def fsync(descriptor):
        fail_before(os.readlink(f'/proc/self/fd/{descriptor}'))
        disk.fsync(descriptor)

    sys.addaudithook(hook)  # the interpreter keeps it
    with mock.patch.object(os, 'fsync', fsync):
        yield places
        ended.set()
    fail()  # when all has been done
