"""Laws of several processes: they start, stop after one step, fail, hang, and exit together.

Each test starts a program that sums over all devices in every step (tests/steps.py). Jobs that
mostly wait run at the same time.
"""

import contextlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.hosts import hosts
from tests.steps import LONG_SECONDS, STEPS
from vit_jax.distributed.processes import EXIT_INTERRUPTED, REQUEUE, Job


def running(folder, *faults, count=2, flags=(), **more):
    return hosts(folder, ['tests.steps', ','.join(faults) or 'ms:50', *flags], count, **more)


def codes(started):
    return [host.wait() for host in started]


def last_line(host):
    return host.text.splitlines()[-1]


def listening_addresses(host):
    connections = psutil.Process(host.process.pid).net_connections()
    found = [c.laddr.ip for c in connections if c.status == 'LISTEN']
    return {address.removeprefix('::ffff:') for address in found}


def test_a_job_within_another_program_is_alone():
    job = Job()
    assert (job.index, job.count) == (0, 1)
    job.require_equal('anything', {'a': 1})
    assert job.broadcast_text('anything', lambda: 'text') == 'text'
    assert list(job.tick_each([1, 2, 3])) == [1, 2, 3]


@pytest.mark.parametrize(
    'count, signals, code',
    [
        pytest.param(1, [signal.SIGINT], EXIT_INTERRUPTED, marks=pytest.mark.gate),
        pytest.param(2, [signal.SIGHUP], REQUEUE, marks=pytest.mark.gate),
        pytest.param(
            4, [signal.SIGHUP, signal.SIGTERM, signal.SIGHUP], REQUEUE, marks=pytest.mark.nightly
        ),
    ],
)
def test_signals_to_some_processes_stop_all_after_the_same_step(count, signals, code, tmp_path):
    """With the coordinator on loopback everything listens there only."""
    with running(tmp_path, count=count) as started:
        started[0].wait_for_text('step 5\n')
        assert count == 1 or set.union(*map(listening_addresses, started)) == {'127.0.0.1'}
        for host, number in zip(started[::-1], signals, strict=False):
            host.signal(number)
        assert codes(started) == [code] * count
    saved = [line for host in started for line in host.text.splitlines() if 'saved' in line]
    assert len(saved) == count and len({*saved}) == 1
    assert 5 <= int(saved[0].split()[-1]) < STEPS - 1  # not because the run was complete


@pytest.mark.gate
def test_a_second_ctrl_c_ends_all_although_one_process_does_not_answer(tmp_path):
    with running(tmp_path, 'ms:1000000', count=3) as started:  # a step that never ends
        started[0].wait_for_text('step 0\n')
        started[1].suspend()
        started[0].signal(signal.SIGINT)
        started[2].wait_for_text('Ctrl-C')
        assert started[0].process.exitcode is None
        started[0].signal(signal.SIGINT)
        assert codes([started[0], started[2]]) == [EXIT_INTERRUPTED] * 2
        started[1].signal(signal.SIGCONT)
        assert started[1].wait() in (EXIT_INTERRUPTED, REQUEUE)
    assert 'stopped by a second Ctrl-C' in last_line(started[2])


# Faults, flags, and exit codes of the processes. --watchdog_seconds is 40 times as long as a step,
# so that no step before the fault exceeds it on a busy machine.
HANGS = [
    # Before the first step the limit is --start_seconds. One process starts in about 0.6 s.
    (['hang:-1'], ['--start_seconds=6', '--watchdog_seconds=1'], [REQUEUE]),
    (['interrupt:5'], ['--watchdog_seconds=2'], [EXIT_INTERRUPTED]),
    (['hang:5:1', 'lock:5:2'], ['--watchdog_seconds=2'], [REQUEUE, REQUEUE, 1]),
]


@pytest.mark.gate
def test_the_watchdog_kills_hung_and_suspended_processes_and_each_step_resets_it(tmp_path):
    """With stacks; also a process that keeps the interpreter's lock, and one after Ctrl-C.

    The first steps may take longer, because they compile.
    """
    seconds, ms = LONG_SECONDS / 2, 50  # of the watchdog, and of each step but the first
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(running(tmp_path, *faults, count=len(expected), flags=flags))
            for faults, flags, expected in HANGS
        ]
        flags = [f'--watchdog_seconds={seconds}']
        (host,) = stack.enter_context(running(tmp_path, 'long:0', count=1, flags=flags))
        host.wait_for_text(f'step {int(2 * seconds / ms * 1000)}\n')  # twice the watchdog's time
        host.suspend()
        time.sleep(1.5 * seconds)  # this is the fault
        host.signal(signal.SIGCONT)
        assert host.wait() == REQUEUE
        assert [codes(started) for started in jobs] == [expected for *_, expected in HANGS]
    for started in [host], *jobs:
        assert '--watchdog_seconds' in started[0].text
    for started in jobs:
        assert any('in hang' in host.text for host in started)
    assert 'in hold_lock' in jobs[-1][2].text


@pytest.mark.nightly
def test_a_hang_before_the_processes_agree_ends_all(tmp_path):
    # --start_seconds is several times as long as two processes take to connect.
    flags = ['--start_seconds=15', '--watchdog_seconds=1']
    with running(tmp_path, 'hang:-1:1', flags=flags) as (first, second):
        assert codes([first, second]) == [REQUEUE] * 2
    assert '--watchdog_seconds' in first.text and 'in hang' in second.text


@pytest.mark.gate
def test_if_a_process_is_missing_killed_or_suspended_the_others_ask_for_a_restart(tmp_path):
    """Killed in a sum of all devices, or while each computes alone."""
    # Seconds: the third process never starts, so no process needs them.
    flags = ['--num_processes=3', '--start_seconds=2']
    with (
        running(tmp_path, each=lambda _: flags) as missing,  # jax aborts
        running(tmp_path, each=lambda _: ['--unreachable']) as unreachable,  # jax raises an error
        running(tmp_path, 'die:5:1', 'together:1') as in_sum,
        running(tmp_path, 'die:5:0', 'alone:1') as alone,
        # Seconds: a busy machine answers in a fraction of one.
        running(tmp_path, flags=['--heartbeat_seconds=4']) as suspended,
    ):
        suspended[0].wait_for_text('step 5\n')
        suspended[0].suspend()
        assert codes(missing) == codes(unreachable) == [REQUEUE] * 2
        assert codes(in_sum) == [REQUEUE, -signal.SIGKILL]
        assert codes(alone) == [-signal.SIGKILL, REQUEUE]
        assert suspended[1].wait() == REQUEUE
    for other in *missing, in_sum[0], alone[1], suspended[1]:
        assert 'is gone' in last_line(other) and 'Traceback' not in other.text
    assert {last_line(host).partition('--')[2] for host in missing} == {'process_id'}
    assert all('UNAVAILABLE' in last_line(host) for host in unreachable)


@pytest.mark.gate
def test_all_processes_print_the_error_of_one(tmp_path):
    """Facts that differ are found before any device is used, and would differ again."""
    seeds = {index: [f'--seed={index}'] for index in (0, 1)}
    with (
        running(tmp_path, 'fail:5:1') as failing,
        running(tmp_path, each=seeds.get) as differing,
    ):
        assert codes(failing) == [REQUEUE] * 2 and codes(differing) == [1] * 2
    assert all('the disk is on fire' in host.text for host in failing)
    assert all('seed: 0 -> 1' in host.text for host in differing)
    assert all('process 1 ' in started[0].text for started in (failing, differing))
    assert 'step' not in differing[0].text


@pytest.mark.gate
def test_a_signal_that_the_program_handles_itself_stops_nothing(tmp_path):
    with running(tmp_path, 'usr1:5', 'steps:10', count=1) as (host,):
        assert host.wait() == 0
    assert 'step 9\n' in host.text


@pytest.mark.gate
def test_a_signal_before_connecting_ends_all(tmp_path):
    with running(tmp_path, each=lambda index: ['--late'] * index) as started:
        started[1].wait_for_text('not connecting')
        started[1].signal(signal.SIGTERM)
        assert codes(started) == [REQUEUE] * 2
    assert all('SIGTERM' in host.text for host in started)


@pytest.mark.nightly
def test_two_processes_of_one_number_are_an_error(tmp_path):
    """One of them may still find its place; the other one is rejected, or ends all."""
    places = [['--num_processes=2', f'--process_id={index}'] for index in (0, 1, 1)]
    flags = ['--start_seconds=5']  # ten times as long as two processes take to connect
    with running(tmp_path, count=3, each=places.__getitem__, flags=flags) as started:
        assert REQUEUE in codes(started)
    assert '--process_id' in ''.join(host.text for host in started)


def test_the_time_of_a_start_counts_from_the_first_line_of_the_package():
    """A shell replaces itself by its last command, which has the shell's time of creation."""
    code = 'from vit_jax.distributed.processes import Job; print(Job().started)'
    command = f'date +%s.%N; exec {sys.executable} -c "{code}"'
    done = subprocess.run(['bash', '-c', command], capture_output=True, text=True, check=True)
    typed, started = map(float, done.stdout.split())
    assert typed < started
