"""Measures the time from a fault to the last exit: python -m benchmarks.fault_tolerance > RESULT.

It takes minutes. Two processes train over loopback unless a row states another number. With
--inject_faults, each guarantee is tested many times instead (fault_injection.py), and the exit code
is 1 if one is broken.
"""

import argparse
import os
import pathlib
import signal
import sys
import tempfile
import time
from importlib import metadata

os.environ |= {'JAX_PLATFORMS': 'cpu', 'NPROC': '32', 'JAX_CPU_ENABLE_ASYNC_DISPATCH': '0'}
ROOT = pathlib.Path(__file__).parent.parent
os.environ['XLA_FLAGS'] = (
    '--xla_force_host_platform_device_count=1 '
    '--xla_cpu_enable_concurrency_optimized_scheduler=false'
)
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(ROOT / '.cache' / 'jax'))
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.2'

import numpy as np  # noqa: E402

from benchmarks import fault_injection  # noqa: E402
from tests.hosts import hosts  # noqa: E402
from vit_jax.base import plural  # noqa: E402
from vit_jax.checkpoints.store import Checkpoints  # noqa: E402
from vit_jax.experiment.reporter import read_events, sum_seconds  # noqa: E402

PHASES = {
    # `train` is first: a start that ends before its first step writes no event log.
    'train': ('slow:100', 'reported'),
    'start': ('slow:0', 'starting'),
    'compile': ('slow_compile:5', 'compiling'),
    'evaluate': ('slow:100', 'evaluating test'),
    'save': ('slow:100', 'saving'),
}


def start_training(folder, faults, count=2, flags=(), **more):  # type: ignore[no-untyped-def]
    """Starts the processes of a small training, with faults."""
    command = ['tests.faulty', faults, '--config=tests/tiny_config.py']
    return hosts(folder, [*command, f'--workdir={folder}/run', *flags], count, **more)


def report(name: str, value: str) -> None:
    """Prints one measurement."""
    print(f'{name:<64}{value}', flush=True)


def measure_sigterm(count: int) -> None:
    """Sends SIGTERM to the last process in each phase, then resumes to the end."""
    folder, processes = pathlib.Path(tempfile.mkdtemp()), plural(count, 'process')
    began = time.time()
    for phase, (faults, event) in PHASES.items():
        with start_training(folder, faults, count, ['--config.eval_every_steps=30']) as started:
            started[0].wait_for(event)
            sent = time.time()
            started[-1].signal(signal.SIGTERM)
            codes = [host.wait() for host in started]
            after = time.time() - sent
        report(f'SIGTERM, {phase}, {processes}: exit {codes[0]} after', f'{after:.1f} s')
    with start_training(folder, 'slow:0', count, ['--config.eval_every_steps=30']) as started:
        resumed = time.time()
        started[0].wait_for('reported', step=45)
        report(f'{processes}: start to the report of step 45', f'{time.time() - resumed:.1f} s')
        for host in started:
            host.wait()
    wall = time.time() - began
    spent = sum_seconds(read_events(folder / 'run/events.jsonl'))
    report(
        f'wall time of these {len(PHASES) + 1} starts that the event log explains',
        f'{sum(spent.values()) / wall:.1%}',
    )
    report('  by activity', ', '.join(f'{name} {seconds:.1f} s' for name, seconds in spent.items()))


def measure_fault(
    name: str, faults: str, step: int, flags: tuple[str, ...] = (), stop: bool = False
) -> None:
    """Prints the time from the report of a step, or from SIGSTOP, to the last exit."""
    folder = pathlib.Path(tempfile.mkdtemp())
    with start_training(folder, faults, 2, flags) as started:
        started[0].wait_for('reported', step=step)
        began = time.time()
        if stop:
            started[1].signal(signal.SIGSTOP)
        codes = [host.wait() for host in (started[:1] if stop else started)]
        report(name, f'{time.time() - began:.1f} s, exit {codes[0]}')


def measure_save() -> None:
    """Prints how long the loop waits for an asynchronous save of 1 GiB, in three saves."""
    folder = pathlib.Path(tempfile.mkdtemp())
    checkpoints = Checkpoints(folder, keep=1)
    import jax

    arrays = {
        f'{n}': jax.numpy.asarray(np.random.default_rng(n).random(2**24, np.float32))
        for n in range(16)
    }
    seconds = []
    for step in range(3):
        began = time.time()
        checkpoints.save(step, arrays, {'step': np.zeros(())}, {}, {})
        seconds.append(time.time() - began)
        checkpoints.wait()
    checkpoints.close()
    report(
        'asynchronous save of 1 GiB, one process: the loop waits',
        f'{min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f} ms',
    )


def measure_all() -> None:
    """Prints all measurements."""
    with hosts(pathlib.Path(tempfile.mkdtemp()), ['vit_jax.doctor']) as (host,):
        host.wait()  # loads the libraries, so that they do not count below
    measure_save()
    for count in 1, 2:
        measure_sigterm(count)
    measure_fault('a process raises at step 15: all exited after', 'slow:100,fail:15:1', 10)
    measure_fault(
        'a process hangs, watchdog 5 s: all exited after',
        'hang:15:1',
        15,
        ('--watchdog_seconds=5',),
    )
    measure_fault(
        'a process is stopped, heartbeat 5 s: the other exited after',
        'slow:100',
        5,
        ('--heartbeat_seconds=5',),
        stop=True,
    )
    began = time.time()
    folder = pathlib.Path(tempfile.mkdtemp())
    with start_training(folder, 'other_packages:0:1', 2) as started:
        for host in started:
            host.wait()
    report('different packages: rejected after', f'{time.time() - began:.1f} s from the start')


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        '--inject_faults', action='store_true', help='test each guarantee many times instead'
    )
    parser.add_argument('--only', type=lambda text: text.split(','), default=[], metavar='ROW,...')
    parser.add_argument('--kills', type=int, default=20, metavar='N', help='kills in row `kills`')
    arguments = parser.parse_args()
    versions = ', '.join(f'{n} {metadata.version(n)}' for n in ('jax', 'orbax-checkpoint'))
    print(f'{os.cpu_count()} CPU cores, {versions}\n')
    if arguments.inject_faults:
        sys.exit(fault_injection.run(arguments.only, arguments.kills))
    measure_all()
