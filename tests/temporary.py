"""A pytest plugin that gives each test run one temporary folder and removes it when the run exits.

All processes that tests start inherit the folder as TMPDIR. The folder of a killed run is removed
by the next run, because nobody holds its lock any more.
"""

import multiprocessing.util
import os
import pathlib
import shutil
import tempfile

import filelock

PREFIX, LOCK = 'vj-', '.pytest-lock'  # short, because the path of a socket has at most 104 bytes


def pytest_configure(config):
    if hasattr(config, 'workerinput'):  # a worker has the folder of the process that started it
        return
    _remove_abandoned(pathlib.Path(tempfile.gettempdir()))
    folder = tempfile.mkdtemp(prefix=PREFIX)
    lock = filelock.FileLock(folder + LOCK)
    lock.acquire()
    os.makedirs(folder, exist_ok=True)  # another run may have removed it before the lock was held
    os.environ['TMPDIR'] = folder
    tempfile.tempdir = None  # read again from the environment

    def remove():
        _remove(folder)
        lock.release()

    # multiprocessing removes its own folder at priority -100. Finalizers with a lower priority run
    # later.
    multiprocessing.util.Finalize(None, remove, exitpriority=-200)


def _remove(folder):
    """Removes a folder and its lock, which this process holds."""
    shutil.rmtree(folder, ignore_errors=True)
    if not os.path.exists(folder):  # if it still exists, the next run tries again
        pathlib.Path(folder + LOCK).unlink(missing_ok=True)


def _remove_abandoned(parent):
    for lock in map(str, parent.glob(f'{PREFIX}*{LOCK}')):
        try:
            with filelock.FileLock(lock, timeout=0):
                _remove(lock.removesuffix(LOCK))
        except (filelock.Timeout, OSError):  # of a run that is still there, or of another user
            continue
