"""What several processes do together: they start, stop after one step, fail, hang, and exit.

Each test starts a program that sums over all devices in every step (tests/steps.py).
"""

import signal
import time

import psutil
import pytest

from tests.hosts import hosts
from vit_jax.distributed.processes import INTERRUPTED, REQUEUE, Job

LAST = -1


def running(folder, *faults, count=2, flags=(), **more):
    return hosts(folder, ['tests.steps', ','.join(faults) or 'ms:50', *flags], count, **more)


def codes(started, seconds=60):
    return [host.wait(seconds) for host in started]


def last_step(host):
    (line,) = (line for line in host.text.splitlines() if line.startswith('saved after step'))
    return int(line.split()[-1])


def test_a_job_within_another_program_is_alone():
    job = Job()
    assert (job.index, job.count) == (0, 1)
    job.require_same('anything', {'a': 1})
    assert job.from_process_0('anything', lambda: 'text') == 'text'
    assert list(job.tick_each([1, 2, 3])) == [1, 2, 3]


@pytest.mark.full
@pytest.mark.parametrize('count', [1, 2, 4])
@pytest.mark.parametrize(
    'number, code',
    [(signal.SIGTERM, REQUEUE), (signal.SIGHUP, REQUEUE), (signal.SIGINT, INTERRUPTED)],
)
def test_a_signal_to_any_process_stops_all_after_the_same_step(number, code, count, tmp_path):
    with running(tmp_path, count=count) as started:
        started[0].wait_for_text('step 5\n')
        started[LAST].signal(number)
        assert codes(started) == [code] * count
    (step,) = {last_step(host) for host in started}
    assert step < 100 and f'stopped after step {step}' in started[0].text


@pytest.mark.full
def test_signals_to_several_processes_are_one(tmp_path):
    with running(tmp_path, count=4) as started:
        started[0].wait_for_text('step 5\n')
        for host in started:
            host.signal(signal.SIGTERM)
            host.signal(signal.SIGHUP)
        assert codes(started) == [REQUEUE] * 4
    assert len({last_step(host) for host in started}) == 1


@pytest.mark.full
@pytest.mark.parametrize('count', [1, 2, 4])
def test_a_second_ctrl_c_ends_all(count, tmp_path):
    with running(tmp_path, 'ms:8000', count=count) as started:
        started[0].wait_for_text('step 0\n')
        started[LAST].signal(signal.SIGINT)
        started[LAST].wait_for_text('Ctrl-C again exits at once')
        time.sleep(1)
        assert all(host.process.exitcode is None for host in started)
        began = time.monotonic()
        started[LAST].signal(signal.SIGINT)
        assert codes(started) == [INTERRUPTED] * count
        assert time.monotonic() - began < 5
    assert all('Ctrl-C again: nothing is saved' in host.text for host in started)


@pytest.mark.full
def test_a_second_ctrl_c_is_heard_while_another_process_does_not_answer(tmp_path):
    with running(tmp_path, 'ms:200', count=2) as started:
        started[0].wait_for_text('step 1\n')
        started[1].signal(signal.SIGSTOP)
        started[0].signal(signal.SIGINT)
        started[0].wait_for_text('Ctrl-C again exits at once')
        time.sleep(1)
        began = time.monotonic()
        started[0].signal(signal.SIGINT)
        assert started[0].wait() == INTERRUPTED
        assert time.monotonic() - began < 5
        started[1].signal(signal.SIGCONT)


@pytest.mark.full
@pytest.mark.parametrize('count', [1, 2])
def test_a_step_that_never_ends_ends_in_bounded_time_after_a_signal(count, tmp_path):
    flags = ['--watchdog_seconds=3', '--start_seconds=3']
    with running(tmp_path, f'hang:5:{count - 1}', count=count, flags=flags) as started:
        started[0].wait_for_text('step 4\n')
        time.sleep(1)
        started[0].signal(signal.SIGINT)
        assert codes(started, 20) == [INTERRUPTED] * count
    assert 'ended in time' in started[0].text and 'in hang' in started[LAST].text


@pytest.mark.full
@pytest.mark.parametrize('count, index', [(2, 0), (2, 1), (4, 0), (4, 2)])
@pytest.mark.parametrize('where', ['together', 'alone'])
def test_where_a_process_is_killed_the_others_ask_for_a_restart(where, count, index, tmp_path):
    """In a sum of all devices, or while each computes alone."""
    flags = ['--heartbeat_seconds=5']
    with running(tmp_path, f'die:5:{index}', f'{where}:1', count=count, flags=flags) as started:
        assert started[index].wait() == -signal.SIGKILL
        began = time.monotonic()
        others = [host for host in started if host is not started[index]]
        assert codes(others) == [REQUEUE] * (count - 1)
        assert time.monotonic() - began < 15
    for host in others:
        assert 'is gone' in host.text.splitlines()[LAST] and 'Traceback' not in host.text


@pytest.mark.full
@pytest.mark.parametrize('count', [2, 4])
@pytest.mark.parametrize('fault, code', [('fail', REQUEUE), ('reject', 1)])
def test_a_process_that_fails_tells_the_others_why(fault, code, count, tmp_path):
    """An error in the input would occur again; another one is asked to be tried again."""
    with running(tmp_path, f'{fault}:5:1', count=count) as started:
        assert codes(started, 30) == [code] * count
    for host in started:
        assert (
            'the disk is on fire' in host.text if fault == 'fail' else 'not expected' in host.text
        )
    assert all('process 1 of' in host.text for host in started if host is not started[1])


@pytest.mark.full
@pytest.mark.parametrize('count', [2, 4])
def test_facts_are_compared_before_a_device_is_used(count, tmp_path):
    flags = ({0: ['--seed=0']} | {i: ['--seed=1'] for i in range(1, count)}).get
    with running(tmp_path, count=count, each=flags) as started:
        assert codes(started) == [1] * count
    assert all('seed: 0 -> 1' in host.text and 'Gloo' not in host.text for host in started)


@pytest.mark.full
@pytest.mark.parametrize('count', [1, 2])
def test_a_hang_ends_with_the_stacks_of_all_threads(count, tmp_path):
    flags = ['--watchdog_seconds=3', '--start_seconds=3']
    with running(tmp_path, f'hang:5:{count - 1}', count=count, flags=flags) as started:
        assert codes(started, 30) == [REQUEUE] * count
    assert '--watchdog_seconds' in started[0].text
    assert 'most recent call first' in started[0].text
    assert 'in hang' in ''.join(host.text for host in started)


@pytest.mark.full
def test_a_hang_that_keeps_the_lock_of_the_interpreter_ends_too(tmp_path):
    flags = ['--watchdog_seconds=2', '--start_seconds=2', '--heartbeat_seconds=5']
    with running(tmp_path, 'lock:5:1', flags=flags) as started:
        assert codes(started, 40) == [REQUEUE, 1]
    assert 'most recent call first' in started[1].text and 'in <lambda>' in started[1].text


@pytest.mark.full
def test_the_watchdog_is_reset_by_each_batch_and_the_first_steps_have_more_time(tmp_path):
    flags = ['--watchdog_seconds=3', '--start_seconds=9']
    with running(tmp_path, 'long:0', 'steps:20', 'ms:500', count=1, flags=flags) as (host,):
        assert host.wait(60) == 0, host.text


@pytest.mark.full
def test_a_suspension_longer_than_the_watchdog_ends_the_run(tmp_path):
    with running(tmp_path, count=1, flags=['--watchdog_seconds=3', '--start_seconds=3']) as (host,):
        host.wait_for_text('step 9\n')
        host.signal(signal.SIGSTOP)
        time.sleep(1)
        host.signal(signal.SIGCONT)
        time.sleep(1)
        assert host.process.exitcode is None
        host.signal(signal.SIGSTOP)
        time.sleep(5)
        host.signal(signal.SIGCONT)
        assert host.wait(10) == REQUEUE
    assert '--watchdog_seconds' in host.text


@pytest.mark.full
@pytest.mark.parametrize('index', [0, 1])
def test_a_suspended_process_is_gone_for_the_others(index, tmp_path):
    with running(tmp_path, flags=['--heartbeat_seconds=4']) as started:
        started[0].wait_for_text('step 5\n')
        started[index].signal(signal.SIGSTOP)
        assert started[1 - index].wait(40) == REQUEUE
    assert 'is gone' in started[1 - index].text.splitlines()[LAST]


@pytest.mark.full
@pytest.mark.parametrize('index', [0, 1])
def test_a_signal_before_connecting_ends_all(index, tmp_path):
    with running(tmp_path, each=lambda i: ['--late'] if i == index else []) as started:
        started[index].wait_for_text('connects to')
        started[index].signal(signal.SIGTERM)
        assert codes(started, 40) == [REQUEUE] * 2
    assert all('SIGTERM before the first step' in host.text for host in started)


@pytest.mark.full
def test_a_signal_ends_a_process_that_nobody_else_joins(tmp_path):
    with running(tmp_path) as (host, absent):
        absent.process.kill()
        host.wait_for_text('connects to')
        host.signal(signal.SIGTERM)
        assert host.wait(20) == REQUEUE
    assert 'process 0 of 2' in host.text


@pytest.mark.full
def test_where_jax_reports_that_a_connection_failed_the_others_are_the_cause(tmp_path):
    with running(tmp_path, each=lambda _: ['--unreachable']) as started:
        assert codes(started) == [REQUEUE] * 2
    assert all('another process is gone: UNAVAILABLE' in host.text for host in started)
    assert all('Traceback' not in host.text for host in started)


@pytest.mark.full
def test_processes_that_do_not_all_come_say_so(tmp_path):
    with running(tmp_path, count=4, flags=['--start_seconds=4']) as started:
        started[2].process.kill()
        assert codes(started[:2] + started[3:]) == [REQUEUE] * 3
    for host in started[:2] + started[3:]:
        assert 'did not come in time' in host.text.splitlines()[LAST]


@pytest.mark.full
@pytest.mark.parametrize('index', [0, 1])
def test_two_processes_of_one_number_are_an_error(index, tmp_path):
    """One of them may still find its place; the other one is rejected, or ends all."""
    numbers = {0: '0', 1: '1', 2: str(index)}
    with running(
        tmp_path,
        count=3,
        each=lambda i: ['--num_processes=2', f'--process_id={numbers[i]}'],
        flags=['--start_seconds=5'],
    ) as started:
        assert {1, REQUEUE} & {*codes(started)}
    text = ''.join(host.text for host in started)
    assert '--process_id of this one' in text or 'cluster: ' in text or 'already in use' in text


@pytest.mark.full
def test_with_the_coordinator_on_loopback_everything_listens_there_only(tmp_path):
    """The host's name may be that of another address."""
    with running(tmp_path) as started:
        started[0].wait_for_text('step 5\n')
        connections = [psutil.Process(host.process.pid).net_connections() for host in started]
    listening = {c.laddr.ip for found in connections for c in found if c.status == 'LISTEN'}
    assert {ip.removeprefix('::ffff:') for ip in listening} == {'127.0.0.1'}
