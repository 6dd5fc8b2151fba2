"""Several processes of a program on this machine, as hosts of one job; none outlives its test."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent
KILL_AFTER = 180  # seconds, whatever happens


def free_port():
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]


def environment(devices=1):
    """Of a process with so many CPU devices; tests/conftest.py says why these flags."""
    flags = (
        f'--xla_force_host_platform_device_count={devices} '
        '--xla_cpu_enable_concurrency_optimized_scheduler=false'
    )
    return os.environ | {'XLA_FLAGS': flags, 'PYTHONPATH': str(ROOT), 'PYTHONUNBUFFERED': '1'}


class Host:
    """One process, and what it says."""

    def __init__(self, command, path, env):
        self.path = path
        self._file = path.open('wb')
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=self._file, stderr=subprocess.STDOUT
        )

    @property
    def text(self):
        return self.path.read_text(errors='replace')

    def wait_for(self, word, seconds=KILL_AFTER):
        """Returns when the word was said; fails where the process ends before."""
        deadline = time.monotonic() + seconds
        while word not in self.text:
            assert self.process.poll() is None, f'ended without {word!r}:\n{self.text}'
            assert time.monotonic() < deadline, f'no {word!r}:\n{self.text}'
            time.sleep(0.02)

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def wait(self, seconds=KILL_AFTER):
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f'still there after {seconds} s:\n{self.text}') from None


@contextlib.contextmanager
def hosts(folder, command, count=1, *, devices=1, env=None, each=lambda index: ()):
    """`python COMMAND` in so many processes that know of each other; killed at the end."""
    address = f'--coordinator_address=127.0.0.1:{free_port()}'
    started = []
    try:
        for index in range(count):
            place = [address, f'--num_processes={count}', f'--process_id={index}']
            full = [sys.executable, *command, *(place if count > 1 else []), *each(index)]
            path = folder / f'{time.monotonic_ns()}-{index}.log'
            started.append(Host(full, path, environment(devices) | (env or {})))
        yield started
    finally:
        for host in started:
            if host.process.poll() is None:
                host.process.kill()
                host.process.wait()
