"""Laws of several processes: they start, stop after one step, fail, hang, and exit together.

Each test starts a program that sums over all devices in every step (tests/steps.py).
"""

import signal
import time

import psutil
import pytest

from tests.hosts import hosts
from vit_jax.distributed.processes import EXIT_INTERRUPTED, REQUEUE, Job


def running(folder, *faults, count=2, flags=(), **more):
    return hosts(folder, ['tests.steps', ','.join(faults) or 'ms:50', *flags], count, **more)


def codes(started, seconds=60):
    return [host.wait(seconds) for host in started]


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


@pytest.mark.full
@pytest.mark.parametrize(
    'count, signals, code',
    [
        (1, [signal.SIGINT], EXIT_INTERRUPTED),
        (2, [signal.SIGTERM], REQUEUE),
        (4, [signal.SIGHUP, signal.SIGTERM, signal.SIGHUP], REQUEUE),
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
    assert 5 <= int(saved[0].split()[-1]) < 100


@pytest.mark.full
def test_a_second_ctrl_c_ends_all_although_one_process_does_not_answer(tmp_path):
    with running(tmp_path, 'ms:8000', count=3) as started:
        started[0].wait_for_text('step 0\n')
        started[1].signal(signal.SIGSTOP)
        started[0].signal(signal.SIGINT)
        started[2].wait_for_text('Ctrl-C')
        assert started[0].process.exitcode is None
        started[0].signal(signal.SIGINT)
        assert codes([started[0], started[2]], seconds=5) == [EXIT_INTERRUPTED] * 2
        started[1].signal(signal.SIGCONT)
        assert started[1].wait(20) in (EXIT_INTERRUPTED, REQUEUE)


@pytest.mark.full
@pytest.mark.parametrize(
    'faults, signals, expected',
    [
        (['hang:5'], [signal.SIGINT], [EXIT_INTERRUPTED]),
        (['hang:-1:1'], [], [REQUEUE, REQUEUE]),  # before the processes agree
        (['hang:5:1', 'lock:5:2'], [], [REQUEUE, REQUEUE, 1]),  # 2 keeps the interpreter's lock
    ],
)
def test_a_hang_ends_all_in_bounded_time_with_stacks(faults, signals, expected, tmp_path):
    flags = ['--watchdog_seconds=3', '--start_seconds=3']
    with running(tmp_path, *faults, count=len(expected), flags=flags) as started:
        for number in signals:
            started[0].wait_for_text('step 4\n')
            time.sleep(1)
            started[0].signal(number)
        assert codes(started, 40) == expected
    assert '--watchdog_seconds' in started[0].text
    text = ''.join(host.text for host in started)
    assert 'in hang' in text and ('in <lambda>' in text) == (len(expected) == 3)


@pytest.mark.full
@pytest.mark.parametrize('where, index', [('together:1', 1), ('alone:1', 0)])
def test_where_a_process_is_killed_the_others_ask_for_a_restart(where, index, tmp_path):
    """In a sum of all devices, or while each computes alone."""
    with running(tmp_path, f'die:5:{index}', where, flags=['--heartbeat_seconds=5']) as started:
        assert started[index].wait() == -signal.SIGKILL
        other = started[1 - index]
        assert other.wait(15) == REQUEUE
    assert 'is gone' in last_line(other) and 'Traceback' not in other.text


@pytest.mark.full
def test_a_suspended_process_is_gone_for_the_others(tmp_path):
    with running(tmp_path, flags=['--heartbeat_seconds=4']) as started:
        started[0].wait_for_text('step 5\n')
        started[0].signal(signal.SIGSTOP)
        assert started[1].wait(40) == REQUEUE
    assert 'is gone' in last_line(started[1])


@pytest.mark.full
@pytest.mark.parametrize(
    'fault, seeds, code, reason',
    [
        ('fail:5:1', (0, 0), REQUEUE, 'the disk is on fire'),
        ('ms:50', (0, 1), 1, 'seed: 0 -> 1'),  # an error in the input would occur again
    ],
)
def test_a_process_that_fails_tells_the_others_why(fault, seeds, code, reason, tmp_path):
    """Facts that differ are found before any device is used."""
    with running(tmp_path, fault, each=lambda index: [f'--seed={seeds[index]}']) as started:
        assert codes(started, 30) == [code] * 2
    assert all(reason in host.text for host in started)
    assert 'process 1 ' in started[0].text
    assert code == REQUEUE or 'step' not in started[0].text


@pytest.mark.full
def test_each_step_resets_the_watchdog_and_a_longer_suspension_ends_the_run(tmp_path):
    """The first step may take longer, because it compiles."""
    flags = ['--watchdog_seconds=3', '--start_seconds=9']
    with running(tmp_path, 'long:0', count=1, flags=flags) as (host,):
        host.wait_for_text('step 70\n')
        for seconds in 1, 5:
            assert host.process.exitcode is None
            host.signal(signal.SIGSTOP)
            time.sleep(seconds)
            host.signal(signal.SIGCONT)
            time.sleep(1)
        assert host.wait(10) == REQUEUE
    assert '--watchdog_seconds' in host.text


@pytest.mark.full
def test_a_signal_that_the_program_handles_itself_stops_nothing(tmp_path):
    with running(tmp_path, 'usr1:5', 'steps:40', count=1) as (host,):
        assert host.wait(60) == 0
    assert 'step 39\n' in host.text


@pytest.mark.full
def test_a_signal_before_connecting_ends_all(tmp_path):
    with running(tmp_path, each=lambda index: ['--late'] * index) as started:
        started[1].wait_for_text('connecting to')
        started[1].signal(signal.SIGTERM)
        assert codes(started, 40) == [REQUEUE] * 2
    assert all('SIGTERM' in host.text for host in started)


@pytest.mark.full
def test_processes_that_cannot_connect_ask_for_a_restart(tmp_path):
    """One does not come, and jax aborts; or jax raises an error."""
    with running(tmp_path, count=3, flags=['--start_seconds=4']) as started:
        started[2].process.kill()
        assert codes(started[:2]) == [REQUEUE] * 2
    assert all('is gone, late' in last_line(host) for host in started[:2])
    with running(tmp_path, each=lambda _: ['--unreachable']) as started:
        assert codes(started) == [REQUEUE] * 2
    assert all('UNAVAILABLE' in last_line(host) for host in started)


@pytest.mark.full
def test_two_processes_of_one_number_are_an_error(tmp_path):
    """One of them may still find its place; the other one is rejected, or ends all."""
    places = [['--num_processes=2', f'--process_id={index}'] for index in (0, 1, 1)]
    with running(
        tmp_path, count=3, each=places.__getitem__, flags=['--start_seconds=5']
    ) as started:
        assert REQUEUE in codes(started)
    assert '--process_id' in ''.join(host.text for host in started)
