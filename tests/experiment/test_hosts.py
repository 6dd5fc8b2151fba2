"""Many hosts, as processes over loopback: they start, agree, stop, die, hang, and go on.

The rest: python -m pytest -m full tests/experiment/test_hosts.py
"""

import hashlib
import random
import re
import signal
import time

import cv2
import numpy as np
import pytest

import vit_jax
from tests import tiny
from tests.hosts import hosts, result
from tests.networks import loaded
from vit_jax.checkpoints import digests, remote
from vit_jax.data.sources.opening import make_opener
from vit_jax.distributed.processes import REQUEUE
from vit_jax.experiment.reporter import read_ledger

CONFIG = ('--config=tests/tiny_config.py',)


def training(folder, faults='slow:0', count=1, flags=(), **more):
    command = ['tests.faulty', faults, *CONFIG, f'--workdir={folder}/run', *flags]
    return hosts(folder, command, count, **more)


def assert_same(folder, whole, last=60):
    """Bit for bit where the uninterrupted run ended, and on the way."""
    (params, measured), (expected, told) = result(folder), result(whole)
    assert params.keys() == expected.keys()
    for name, leaf in params.items():
        np.testing.assert_array_equal(leaf, expected[name], name)
    kept = {(line['kind'], line['step']) for line in measured}
    assert [line for line in told if (line['kind'], line['step']) in kept] == measured
    assert ('test', last) in kept


def steps(folder):
    return sorted(digests.steps(folder / 'run/checkpoints'))


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """Uninterrupted runs, by the number of processes."""
    made = {}

    def run(count):
        if count not in made:
            made[count] = tmp_path_factory.mktemp(f'whole{count}')
            with training(made[count], count=count) as started:
                assert [host.wait() for host in started] == [0] * count
        return made[count]

    return run


PHASES = {
    'start': ('slow:0', 'starting'),
    'compile': ('slow_compile:5', 'compiling'),
    'evaluate': ('slow_evaluation:300', 'evaluating test'),
    'save': ('slow_save:500,slow:100', 'saving'),
}


@pytest.mark.full
@pytest.mark.parametrize('count, phases', [(1, 'start compile evaluate save'), (2, 'compile save')])
def test_sigterm_in_any_phase_stops_at_one_step_and_loses_none(count, phases, whole, tmp_path):
    """The last process alone is told, twice; both stop. The next start goes on from there."""
    for phase in phases.split():
        faults, event = PHASES[phase]
        before = steps(tmp_path)
        flags = ['--config.eval_every_steps=30', '--accept_config_changes']
        with training(tmp_path, faults, count, flags) as started:
            started[0].wait_for(event)
            started[-1].signal(signal.SIGTERM)
            time.sleep(0.02)
            started[-1].signal(signal.SIGTERM)
            assert [host.wait() for host in started] == [REQUEUE] * count, phase
        if phase in ('start', 'compile'):
            assert steps(tmp_path) == before
            assert 'SIGTERM before the first step' in started[-1].text
        else:
            stopped = steps(tmp_path)[-1]
            assert f'stopped at step {stopped}, saved in' in started[0].text
            assert max(before, default=-1) < stopped < 55  # at once, and not at the end
            lines = read_ledger(tmp_path / 'run/ledger.jsonl')
            assert lines[-1]['step'] == stopped  # nothing was done after it
    with training(tmp_path, count=count, flags=['--accept_config_changes']) as started:
        assert [host.wait() for host in started] == [0] * count
        assert f'resuming at step {stopped} ' in started[0].text
    (params, _), (expected, _) = result(tmp_path), result(whole(count))
    for name, leaf in params.items():
        np.testing.assert_array_equal(leaf, expected[name], name)


def kill_often(folder, count, kills, seed):
    """Kills all processes at random moments of training; the wall time of all starts together."""
    moments = random.Random(seed)
    began = time.time()
    died = 0
    while True:
        with training(folder, 'slow:50', count) as started:
            if died == kills:
                assert [host.wait() for host in started] == [0] * count
                return time.time() - began
            started[0].wait_for('training')
            time.sleep(moments.uniform(0.3, 2.0))
            if started[0].process.exitcode is None:
                died += 1
            for host in moments.sample(started, count):
                host.process.kill()
            for host in started:
                host.wait()


@pytest.mark.full
def test_killed_processes_go_on_to_the_same_bits_and_the_ledger_adds_up(whole, tmp_path):
    """In a folder of any name: each process has its own path of it for orbax."""
    expected = whole(2)  # before: the first process of all waits for the libraries
    folder = tmp_path / 'lr=[0.1] a\\b*?%#'
    folder.mkdir()
    seconds = kill_often(folder, count=2, kills=2, seed=0)
    assert_same(folder, expected)
    spent = read_ledger(folder / 'run/ledger.jsonl')[-1]['seconds']
    assert spent['lost by restart'] > 0
    # The ledger ends before the last lines are printed and the processes have gone.
    assert sum(spent.values()) == pytest.approx(seconds, rel=0.01, abs=2.0)


@pytest.mark.full
def test_a_run_without_memory_ends_by_itself_and_goes_on_to_the_same_bits(whole, tmp_path):
    """The system gives it none from that step on. jax and tensorstore may abort or hang."""
    flags = ['--watchdog_seconds=10', '--start_seconds=60']
    with training(tmp_path, 'full_memory:23,slow:20', flags=flags) as (host,):
        assert host.wait(150) in (1, REQUEUE, -signal.SIGABRT)
    assert re.search('[Ee]rror|most recent call first', host.text)
    with training(tmp_path) as (host,):
        assert host.wait() == 0, host.text
    assert_same(tmp_path, whole(1))


@pytest.mark.full
def test_a_process_that_is_killed_alone_ends_the_other_and_both_go_on_to_the_same_bits(
    whole, tmp_path
):
    """It is the one that the others join; tests/laws kills the other."""
    with training(tmp_path, 'die:25:0', 2, ['--heartbeat_seconds=5']) as started:
        assert started[0].wait() == -signal.SIGKILL
        assert started[1].wait() == REQUEUE
    with training(tmp_path, count=2) as started:
        assert [host.wait() for host in started] == [0, 0]
        assert 'resuming at step ' in started[0].text
    assert_same(tmp_path, whole(2))


@pytest.mark.full
def test_what_is_not_finite_in_one_process_is_skipped_by_all(tmp_path):
    """To the bits of a run in which it happens to all of them."""
    for name, fault in ('one', 'nan:15:1'), ('all', 'nan:15'):
        (tmp_path / name).mkdir()
        flags = ['--config.total.steps=20']
        with training(tmp_path / name, fault, 2, flags) as started:
            assert [host.wait() for host in started] == [0, 0]
        assert 'step 16: update skipped: ' in started[0].text
    assert_same(tmp_path / 'one', tmp_path / 'all', last=20)
    (params, measured), finite = result(tmp_path / 'one'), np.isfinite
    assert all(finite(leaf).all() for leaf in params.values())
    assert [line['step'] for line in measured if line['kind'] == 'skipped'] == [16]


@pytest.mark.full
def test_parameters_that_are_not_finite_in_one_process_are_never_saved(whole, tmp_path):
    """The job stops; without the fault it goes on to the bits of a run that never had it."""
    with training(tmp_path, 'nan_memory:15:1', 2) as started:
        assert [host.wait() for host in started] == [1, 1]
    said = f'error: step 16: .*parameter_norm is nan; last good checkpoint: {tmp_path}.*/10'
    assert re.search(said, started[1].text)
    assert steps(tmp_path) == [10]
    with training(tmp_path, count=2) as started:
        assert [host.wait() for host in started] == [0, 0]
    assert_same(tmp_path, whole(2))


COUNTS = 1, 50, 359
EVALUATED = f"""
from tests import tiny_config
from vit_jax.config import EvalConfig

def get_config():
    config = tiny_config.get_config()
    config.eval_split = 'test'
    config.evals = {{f'first{{n}}': EvalConfig(split=f'test[:{{n}}]') for n in {COUNTS}}}
    return config
"""


@pytest.mark.full
def test_an_evaluation_of_two_processes_counts_every_image_once(tmp_path):
    """Held against the logits of the saved network, outside of any run."""
    (tmp_path / 'config.py').write_text(EVALUATED)
    flags = [f'--config={tmp_path}/config.py', f'--workdir={tmp_path}/run']
    with hosts(tmp_path, ['vit_jax.train', *flags], 2) as started:
        assert [host.wait() for host in started] == [0, 0]
    _, measured = result(tmp_path)
    found = {line['kind']: line for line in measured}
    vit, test = vit_jax.load(str(tmp_path / 'run')), make_opener()('digits', 'test')
    images = np.stack([vit.prepare(test.read(index)[0]) for index in range(max(COUNTS))])
    right = vit.logits(images).argmax(-1) == test.labels
    for n in COUNTS:
        line = found[f'first{n}']
        assert (line['count'], round(line['accuracy'] * n, 6)) == (n, right[:n].sum())


def test_hosts_that_differ_are_told_by_name_before_anything_is_computed(tmp_path):
    flags = {0: ['--config.seed=0'], 1: ['--config.seed=1']}
    with training(tmp_path, 'other_packages:0:1', 2, each=flags.get) as started:
        assert [host.wait(60) for host in started] == [1, 1]
    for line in (
        'config.seed: 0 -> 1',
        "packages.numpy: '",
        'code.training/loop.py: ',
    ):
        assert line in started[1].text and line in started[0].text, line
    assert 'Gloo' not in started[0].text and not (tmp_path / 'run').exists()


def test_hosts_of_an_evaluation_that_differ_are_told_too(tmp_path):
    command = ['vit_jax.fewshot', *CONFIG, f'--workdir={tmp_path}/run']
    command += ['--config.start_from=tests/reference/bigvision_map.npz']
    flags = {0: ['--config.seed=0'], 1: ['--config.seed=1']}
    with hosts(tmp_path, command, 2, each=flags.get) as started:
        assert [host.wait(60) for host in started] == [1, 1]
    assert 'config.seed: 0 -> 1' in started[0].text


@pytest.mark.full
def test_hosts_whose_downloads_differ_are_refused_with_both_digests(tmp_path, monkeypatch):
    monkeypatch.setenv('STORAGE_EMULATOR_HOST', 'http://127.0.0.1:9')
    for index in 0, 1:
        file = tmp_path / f'{index}.npz'
        vit_jax.save(loaded(tiny.model(num_classes=10 + index)), str(file))
        monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / str(index)))
        kept = remote.cached_path('http://127.0.0.1:9/bucket/file.npz')
        kept.parent.mkdir(parents=True)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(kept)
    monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))
    flags = ['--config.start_from=gs://bucket/file.npz']
    with training(tmp_path, 'own_downloads:0', 2, flags) as started:
        assert [host.wait(60) for host in started] == [1, 1]
    assert 'what is decided: process 1' in started[0].text and digest in started[0].text
    assert not (tmp_path / 'run').exists()


def test_a_work_directory_that_is_not_shared_is_refused(tmp_path):
    """Another path gives a difference by name; the same path on another disk is faked by root."""
    elsewhere = {0: [f'--workdir={tmp_path}/a'], 1: [f'--workdir={tmp_path}/b']}
    with hosts(tmp_path, ['vit_jax.train', *CONFIG], 2, each=elsewhere.get) as started:
        assert [host.wait(60) for host in started] == [1, 1]
    assert f"workdir: '{tmp_path}/a' -> '{tmp_path}/b'" in started[0].text


@pytest.mark.full
@pytest.mark.parametrize('fault', ['stalled_disk:15:0', 'hang_barrier:0:1'])
def test_a_process_that_hangs_ends_with_the_stacks_of_all_threads(fault, tmp_path):
    flags = ['--watchdog_seconds=6', '--config.total.steps=150']
    flags += ['--start_seconds=6'] * fault.startswith('hang_barrier')  # before the first step
    with training(tmp_path, fault, 2, flags) as started:
        assert [host.wait() for host in started] == [REQUEUE] * 2
    text = started[0].text + started[1].text
    assert 'most recent call first' in text and 'in forever' in text
    if fault.startswith('stalled_disk'):
        assert 20 not in steps(tmp_path)  # 10 is written by then, or was about to be


@pytest.mark.full
def test_test_images_that_cannot_be_read_are_known_or_counted_by_all_processes(tmp_path):
    rng = np.random.default_rng(0)
    for split, count in ('train', 20), ('test', 9):
        for name in 'cat', 'dog':
            (tmp_path / 'photos' / split / name).mkdir(parents=True)
            for i in range(count):
                image = rng.integers(0, 256, (9, 9, 3), np.uint8)
                cv2.imwrite(str(tmp_path / 'photos' / split / name / f'{i}.png'), image)
    for i in 0, 3, 4:
        broken = tmp_path / 'photos' / 'test' / 'dog' / f'{i}.png'
        broken.write_bytes(broken.read_bytes()[:-30])
    flags = [f'--config.data={tmp_path}/photos', '--config.eval_split=test']
    flags += ['--config.total.steps=2', '--config.loader.placement=host']
    with training(tmp_path, count=2, flags=flags) as started:
        assert [host.wait() for host in started] == [1, 1]
        said = started[0].text + started[1].text
    assert 'dog/' in said and 'not a whole image' in said and 'on_unreadable=skip' in said
    assert not (tmp_path / 'run' / 'checkpoints' / '2').exists()
    flags.append('--config.loader.on_unreadable=skip')
    with training(tmp_path, count=2, flags=[*flags, '--accept_config_changes']) as started:
        assert [host.wait() for host in started] == [0, 0]
    (found,) = (line for line in result(tmp_path)[1] if line['kind'] == 'test')
    assert found['count'] == 15 and found['unreadable'] == 3
    assert abs(15 * found['accuracy'] - round(15 * found['accuracy'])) < 1e-5
