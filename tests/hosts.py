"""Several processes of a program on this machine, as hosts of one job; none outlives its test.

They are forked from a server that has loaded the libraries and started nothing of jax, which saves
each some seconds of importing.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import pathlib
import re
import runpy
import signal
import socket
import sys
import time
from multiprocessing import forkserver

import numpy as np
import psutil

from vit_jax.base import storage
from vit_jax.base.tree_names import named_leaves
from vit_jax.checkpoints.store import load_params
from vit_jax.experiment import workdirs
from vit_jax.experiment.reporter import read_events

ROOT = pathlib.Path(__file__).parent.parent
KILL_AFTER = 800  # seconds: far more than needed, but less than the limit of a test
POLL = 0.02  # seconds between two looks, which cost less than a millisecond
PR_SET_PDEATHSIG = 1  # of Linux
_BEFORE = {'starting': 'data    ', 'compiling': 'compile for'}  # said before there is an event log

context = multiprocessing.get_context('forkserver')
context.set_forkserver_preload(['vit_jax.train', 'tests.tiny', 'cv2'])


def free_port():
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]


def environment(devices=1):
    """Of a process with so many CPU devices; tests/conftest.py says why these flags."""
    flags = re.sub(r'(?<=device_count=)\d+', str(devices), os.environ['XLA_FLAGS'])
    return os.environ | {'XLA_FLAGS': flags, 'PYTHONPATH': str(ROOT)}


def _become(module, arguments, path, env, folder):
    """`python -m module arguments` in a folder, with what it says in a file."""
    # The fork server exits when all copies of this end of a pipe are closed. This copy is closed
    # here, and the exit of the server then kills this process.
    os.close(forkserver._forkserver._forkserver_alive_fd)
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(folder)
    os.environ.update(env)
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, 'w', buffering=1, closefd=False)
    sys.stderr = open(2, 'w', buffering=1, closefd=False)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name='__main__', alter_sys=True)


class Host:
    """One process, and what it says."""

    def __init__(self, module, arguments, path, env, folder=ROOT, pipe=None):
        """Starts the process.

        Args:
          module: The program.
          arguments: Its arguments.
          path: The file for its output.
          env: Its environment.
          folder: Its working directory.
          pipe: A named pipe that gets the output instead of the file.
        """
        self.path = path
        workdir = next((a for a in arguments if a.startswith('--workdir=')), '=nowhere')
        self.events = storage.resolve_folder(workdir.partition('=')[2]) / workdirs.EVENTS
        self._earlier = len(read_events(self.events))
        place = str(pipe or path), env, str(folder)
        self.process = context.Process(
            target=_become, args=(module, arguments, *place), daemon=True
        )
        self.process.start()

    @property
    def text(self):
        return self.path.read_text(errors='replace') if self.path.exists() else ''

    def wait_for(self, event, step=None, seconds=KILL_AFTER):
        """Returns when the run's event log has the event; fails where the process ends before.

        Events of earlier starts in the same work directory do not count.
        """
        if event in _BEFORE:
            return self.wait_for_text(_BEFORE[event], seconds)

        def happened():
            lines = read_events(self.events)[self._earlier :]
            return any(x['event'] == event and step in (None, x['step']) for x in lines)

        self.wait_until(happened, event, seconds)

    def wait_for_text(self, text, seconds=KILL_AFTER):
        """Returns when the process has said so; fails where it ends before."""
        self.wait_until(lambda: text in self.text, text, seconds)

    def wait_until(self, happened, what, seconds=KILL_AFTER):
        """Returns when `happened()` is true; fails if the process exits before."""
        deadline = time.monotonic() + seconds
        while True:
            code = self.process.exitcode  # before the look: what the process did last counts
            if happened():
                return
            assert code is None, f'ended without {what!r}:\n{self.text}'
            assert time.monotonic() < deadline, f'no {what!r}:\n{self.text}'
            time.sleep(POLL)

    def signal(self, number=signal.SIGTERM):
        with contextlib.suppress(ProcessLookupError):  # gone, which `wait` will say
            os.kill(self.process.pid, number)

    def suspend(self):
        """Returns when all threads of the process have stopped."""
        self.signal(signal.SIGSTOP)
        process = psutil.Process(self.process.pid)
        self.wait_until(lambda: process.status() == psutil.STATUS_STOPPED, 'stopping')

    def wait(self, seconds=KILL_AFTER):
        """The exit code."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f'still there after {seconds} s:\n{self.text}'
        return self.process.exitcode


@contextlib.contextmanager
def hosts(folder, command, count=1, *, devices=1, each=lambda index: (), pipe=None):
    """`python -m COMMAND` in `count` processes that know of each other; killed at the end."""
    address = f'--coordinator_address=127.0.0.1:{free_port()}'
    module, *arguments = command
    started = []
    try:
        for index in range(count):
            place = [address, f'--num_processes={count}', f'--process_id={index}']
            all_of_them = [*arguments, *(place if count > 1 else []), *each(index)]
            path = folder / f'{time.monotonic_ns()}-{index}.log'
            env = environment(devices)
            started.append(Host(module, all_of_them, path, env, pipe=pipe))
        yield started
    finally:
        for host in started:
            if host.process.exitcode is None:
                children = []
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                    children = psutil.Process(host.process.pid).children(recursive=True)
                host.process.kill()
                host.process.join()
                for child in children:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()


def result(folder):
    """The final parameters of FOLDER/run, by name, and what was measured on the way."""
    text = (storage.resolve_folder(folder) / 'run/metrics.jsonl').read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    clocked = 'time', 'run', 'seconds', 'images_per_second', 'skipped'
    clocked += 'slowest_host_seconds', 'slowest_host_ratio'
    measured = [{k: v for k, v in line.items() if k not in clocked} for line in lines]
    return named_leaves(load_params(f'{folder}/run')), measured


def assert_same(found, expected):
    """Compares two results: parameters bit for bit, and the whole lists of measured numbers."""
    assert found[0].keys() == expected[0].keys()
    for name, leaf in found[0].items():
        np.testing.assert_array_equal(leaf, expected[0][name], name)
    assert found[1] == expected[1]
