"""What ends a run, and what does not: signals, readers that go away, stalled reads, removed files.

Processes of their own, as users have them:
python -m pytest -m '' tests/experiment/test_stopping.py
"""

import contextlib
import json
import os
import signal
import socket

import pytest

from tests import tiny
from tests.hosts import KILL_AFTER, hosts
from vit_jax.base import MissingFile
from vit_jax.checkpoints import digests
from vit_jax.distributed.processes import EXIT_INTERRUPTED, REQUEUE, Job
from vit_jax.experiment.build import build_experiment
from vit_jax.experiment.reporter import Reporter
from vit_jax.training.loop import Clock

STEPS = 60  # of tests/tiny_config.py
EPOCH = 6  # steps of 16 images, of the split of SMALL
SELDOM = ['--config.checkpoint_every_steps=50']
SMALL = ['--config.train_split=train[:96]', '--config.loader.placement=host']


def training(folder, faults='slow:0', count=1, flags=(), **more):
    command = ['tests.faulty', faults, '--config=tests/tiny_config.py', f'--workdir={folder}/run']
    return hosts(folder, [*command, *flags], count, **more)


def steps(folder):
    return sorted(digests.list_steps(folder / 'run/checkpoints'))


def reported(folder):
    lines = map(json.loads, (folder / 'run/metrics.jsonl').read_text().splitlines())
    return [(line['kind'], line['step']) for line in lines]


@pytest.mark.gate
def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path):
    """As `| head -1`, with standard error in the same pipe."""
    pipe = tmp_path / 'pipe'
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def has_written():
        try:
            return os.read(reader, 1) != b''
        except BlockingIOError:
            return False

    with training(tmp_path, flags=SELDOM, pipe=pipe) as (host,):
        host.wait_until(has_written, 'output')
        os.close(reader)
        assert host.wait() == 0
    assert ('train', STEPS) in reported(tmp_path) and ('test', STEPS) in reported(tmp_path)
    assert steps(tmp_path)[-1] == STEPS


@pytest.mark.gate
def test_a_stop_during_the_last_save_lets_it_take_its_time(tmp_path):
    with training(tmp_path, f'slow_wait:{STEPS}', flags=SELDOM) as (host,):
        host.wait_for_text(f'waiting for the save of step {STEPS}')
        host.signal(signal.SIGTERM)
        assert host.wait() == 0, host.text
    assert steps(tmp_path)[-1] == STEPS


@pytest.mark.gate
def test_ctrl_c_while_compiling_is_one_sentence_and_no_crash(tmp_path):
    """Without a cache, compilation takes longer than a signal."""
    flags = ['--config.compute.unroll=24', '--config.model.depth=24']
    with training(tmp_path, 'uncached_compile:0', flags=flags) as (host,):
        host.wait_for_text('XLA compiles\n')
        host.signal(signal.SIGINT)
        assert host.wait() == EXIT_INTERRUPTED
    after = host.text.partition('XLA compiles\n')[2]
    assert len(after.splitlines()) == 1 and 'SIGINT before the first step' in after


@pytest.mark.gate
def test_a_read_that_stalls_keeps_no_process_from_stopping_or_failing(tmp_path):
    """After a stop nothing is saved, as other processes may be a step ahead."""
    stopped, failed = tmp_path / 'stopped', tmp_path / 'failed'
    stopped.mkdir()
    failed.mkdir()
    flags = [*SMALL, '--config.checkpoint_every_steps=4', '--config.log_every_steps=1']
    flags += ['--watchdog_seconds=5']  # several times as long as a step on a busy machine
    with (
        training(stopped, 'hang_loader:0:1', 2, flags) as (first, second),
        # The interpreter's own end would wait for the read.
        training(failed, f'hang_loader:0,fail_after_hang:{EPOCH - 1}', flags=SMALL) as (alone,),
    ):
        second.wait_for_text('hanging')
        first.wait_for('reported', step=EPOCH - 1)  # while the last step of the epoch runs
        first.signal(signal.SIGTERM)
        assert [first.wait(), second.wait()] == [REQUEUE] * 2, first.text
        assert alone.wait() == 1
    assert '--watchdog_seconds' in first.text
    assert steps(stopped) == [4]  # a whole checkpoint
    assert 'RuntimeError: the disk is on fire' in alone.text


@pytest.mark.gate
def test_a_run_that_reads_its_images_first_can_be_stopped(tmp_path):
    flags = ['--config.loader.placement=device']
    with training(tmp_path, 'stalled_images:7', flags=flags) as (host,):
        host.wait_for_text('hanging')
        host.signal(signal.SIGTERM)
        assert host.wait() == REQUEUE, host.text
    assert 'SIGTERM' in host.text and steps(tmp_path) == []


@pytest.mark.gate
def test_ctrl_c_in_a_program_without_a_job_ends_it_at_once(tmp_path, monkeypatch):
    """The checkpoint never comes."""
    monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))
    connections = []

    def has_connected():
        with contextlib.suppress(BlockingIOError):
            connections.append(server.accept()[0])
        return connections != []

    with socket.create_server(('127.0.0.1', 0)) as server:
        name = f'http://127.0.0.1:{server.getsockname()[1]}/stalled.npz#sha256={"0" * 64}'
        with hosts(tmp_path, ['vit_jax.convert', name, str(tmp_path / 'out.npz')]) as (host,):
            server.setblocking(False)
            host.wait_until(has_connected, 'a connection')
            with connections[0] as connection:
                connection.settimeout(KILL_AFTER)
                assert connection.recv(1) == b'G'  # of GET: the program waits for an answer
                host.signal(signal.SIGINT)
                assert host.wait() == EXIT_INTERRUPTED
    assert host.text.endswith('error: interrupted\n')


def test_a_run_whose_log_is_removed_ends_with_a_sentence(tmp_path):
    """The open file can still be written, and nobody would ever see the lines."""
    arguments = {'steps': range(10), 'progress': {}, 'clock': Clock(), 'job': Job()}
    reporter = Reporter(build_experiment(tiny.experiment()), tmp_path, **arguments)
    reporter.record_metrics('test', 1, {'loss': 1.0}, '')
    (tmp_path / 'metrics.jsonl').unlink()
    with pytest.raises(MissingFile, match='metrics.jsonl was removed or renamed'):
        reporter.record_metrics('test', 2, {'loss': 1.0}, '')
