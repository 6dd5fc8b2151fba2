"""Saves, and dies at every file operation, one after another: python -m tests.checkpoints.crashing.

FOLDER/1 is left as by a process that was killed at the first operation of its third save, FOLDER/2
at the second, and so on; how many there are is printed.
"""

import os
import pathlib
import signal
import sys

import numpy as np

from vit_jax.checkpoints.store import Checkpoints

KINDS = 'os.rename', 'os.mkdir', 'os.rmdir', 'os.remove', 'os.truncate', 'shutil.rmtree'


def where(event, arguments):
    """The path of an operation; those within `rmtree` name a file in an open directory."""
    path, within = str(arguments[0]), arguments[-1]
    if event in ('os.remove', 'os.rmdir') and isinstance(within, int) and within >= 0:
        return f'{os.readlink(f"/proc/self/fd/{within}")}/{path}'
    return path


def save(folder, last):
    """Three saves, of which two are kept; the process dies at one file operation of the third."""
    begun, calls = False, 0

    def hook(event, arguments):
        nonlocal calls
        writes = event == 'open' and isinstance(arguments[1], str) and set('wax+') & {*arguments[1]}
        if begun and (event in KINDS or writes) and str(folder) in where(event, arguments):
            calls += 1
            if calls == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    checkpoints = Checkpoints(folder, keep=2)
    for step in range(1, 4):
        begun = step == 3
        array = np.full(100, step, np.float32)
        checkpoints.save(step, {'a': array}, {'b': array}, {'step': step}, {})
        checkpoints.wait()
    checkpoints.close()


if __name__ == '__main__':
    folder, last, killed = pathlib.Path(sys.argv[1]), 0, True
    while killed:
        last += 1
        child = os.fork()  # nothing of jax runs yet: the libraries are only loaded
        if not child:
            save(folder / str(last), last)
            os._exit(0)
        killed = os.waitpid(child, 0)[1] == signal.SIGKILL
    print(last - 1)
