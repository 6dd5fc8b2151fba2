"""What ends a run, and what does not: signals, readers that go away, stalled reads.

Processes of their own, as users have them:
python -m pytest -m full tests/experiment/test_stopping.py
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.hosts import ROOT, environment, hosts
from vit_jax.checkpoints import digests
from vit_jax.distributed.processes import EXIT_INTERRUPTED, REQUEUE

pytestmark = pytest.mark.full
PLACEMENT = '--config.loader.placement='


def training(folder, faults='slow:0', count=1, flags=()):
    command = ['tests.faulty', faults, '--config=tests/tiny_config.py', f'--workdir={folder}/run']
    return hosts(folder, [*command, *flags], count)


def steps(folder):
    return sorted(digests.list_steps(folder / 'run/checkpoints'))


def reported(folder):
    lines = map(json.loads, (folder / 'run/metrics.jsonl').read_text().splitlines())
    return [(line['kind'], line['step']) for line in lines]


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path):
    """As `| head -1`, with standard error in the same pipe."""
    read, write = os.pipe()
    command = [sys.executable, '-m', 'tests.faulty', 'slow:0', '--config=tests/tiny_config.py']
    command += [f'--workdir={tmp_path}/run']
    run = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=write, stderr=write)
    os.close(write)
    os.read(read, 1)
    os.close(read)
    assert run.wait(120) == 0
    assert ('train', 60) in reported(tmp_path) and ('test', 60) in reported(tmp_path)
    assert steps(tmp_path)[-1] == 60


def test_a_stop_during_the_last_save_lets_it_take_its_time(tmp_path):
    with training(tmp_path, 'slow_wait:60') as (host,):
        host.wait_for_text('waiting for the save of step 60')
        host.signal(signal.SIGTERM)
        assert host.wait() == 0, host.text
    assert steps(tmp_path)[-1] == 60


def test_ctrl_c_while_compiling_is_one_sentence_and_no_crash(tmp_path):
    """A network that takes long to compile, and that no cache has."""
    command = [sys.executable, '-m', 'vit_jax.train', '--config=tests/tiny_config.py']
    command += [
        f'--workdir={tmp_path}/run',
        '--config.compute.unroll=24',
        '--config.model.depth=24',
    ]
    env = environment() | {'JAX_ENABLE_COMPILATION_CACHE': 'false'}
    run = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while 'compile for' not in run.stdout.readline():
        assert run.poll() is None, run.stderr.read()
    time.sleep(1)
    run.send_signal(signal.SIGINT)
    assert run.wait(5) == EXIT_INTERRUPTED
    said = run.stderr.read().splitlines()
    assert len(said) == 1 and 'SIGINT' in said[0]


def test_a_read_that_stalls_can_be_stopped(tmp_path):
    """Nothing is saved, as the other processes may be a step ahead; the checkpoints are whole."""
    faults = 'hang_loader:0:1,slow:20'
    flags = [
        '--watchdog_seconds=8',
        f'{PLACEMENT}host',
        '--config.total.steps=200',
        '--config.checkpoint_every_steps=50',
    ]
    with training(tmp_path, faults, 2, flags) as started:
        started[0].wait_for('reported', step=85)
        time.sleep(3)
        started[0].signal(signal.SIGTERM)
        assert [host.wait(30) for host in started] == [REQUEUE] * 2, started[0].text
    assert '--watchdog_seconds' in started[0].text and steps(tmp_path)[-1] == 50


def test_a_run_that_reads_its_images_first_can_be_stopped(tmp_path):
    with training(tmp_path, 'stalled_images:7', flags=[f'{PLACEMENT}device']) as (host,):
        host.wait_for('starting')
        time.sleep(1)
        host.signal(signal.SIGTERM)
        assert host.wait(20) == REQUEUE, host.text
    assert 'SIGTERM' in host.text and steps(tmp_path) == []


def test_an_error_ends_a_process_of_which_a_read_stalls(tmp_path):
    """The interpreter's own end would wait for that."""
    flags = [f'{PLACEMENT}host', '--config.total.steps=200']
    with training(tmp_path, 'hang_loader:0,fail:88', flags=flags) as (host,):
        assert host.wait(45) == 1
    assert 'RuntimeError: the disk is on fire' in host.text


def test_a_process_that_compiles_half_a_minute_later_is_waited_for(tmp_path):
    """gloo itself waits for 30 s."""
    with training(tmp_path, 'slow_compile:40:1', 2) as started:
        started[0].wait_for('reported', step=5, seconds=200)


def test_ctrl_c_in_a_program_without_a_job_ends_it_at_once(tmp_path):
    """The checkpoint never comes."""
    with socket.create_server(('127.0.0.1', 0)) as server:
        name = f'http://127.0.0.1:{server.getsockname()[1]}/stalled.npz#sha256={"0" * 64}'
        command = [sys.executable, '-m', 'vit_jax.convert', name, str(tmp_path / 'out.npz')]
        place = {'cwd': ROOT, 'env': environment() | {'VIT_JAX_CACHE': str(tmp_path)}}
        run = subprocess.Popen(command, **place, stderr=subprocess.PIPE, text=True)
        server.settimeout(60)
        with server.accept()[0]:
            time.sleep(0.5)
            run.send_signal(signal.SIGINT)
            assert run.wait(10) == EXIT_INTERRUPTED
    assert run.stderr.read() == 'error: interrupted\n'
