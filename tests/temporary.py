"""A pytest plugin: each test run has one temporary folder, which is removed when the run ends.

All processes that tests start inherit the folder as TMPDIR. The folder of a killed run is removed
by the next run: nobody holds its lock any more. With --basetemp=DIR, what tests write to `tmp_path`
stays in DIR.
"""

import os
import pathlib
import shutil
import tempfile

import filelock

PREFIX, LOCK = 'vit_jax_tests-', '.lock'


def pytest_configure(config):
    if hasattr(config, 'workerinput'):  # a worker has the folder of the process that started it
        return
    _remove_abandoned(pathlib.Path(tempfile.gettempdir()))
    before = os.environ.get('TMPDIR')
    folder = pathlib.Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = filelock.FileLock(folder / LOCK)
    lock.acquire()
    _set_temporary_folder(str(folder))

    def remove():
        _set_temporary_folder(before)
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)

    config.add_cleanup(remove)


def _set_temporary_folder(folder):
    if folder is None:
        os.environ.pop('TMPDIR', None)
    else:
        os.environ['TMPDIR'] = folder
    tempfile.tempdir = None  # read again from the environment


def _remove_abandoned(parent):
    for lock in parent.glob(f'{PREFIX}*/{LOCK}'):
        try:
            with filelock.FileLock(lock, timeout=0):
                shutil.rmtree(lock.parent, ignore_errors=True)
        except (filelock.Timeout, OSError):  # of a run that is still there, or of another user
            continue
