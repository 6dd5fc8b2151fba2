"""Several hosts, as processes over loopback: they start, agree, stop, die, hang and resume.

The rest: python -m pytest -m full tests/experiment/test_hosts.py
"""

import json
import re
import signal
import time

import numpy as np
import pytest

import vit_jax
from tests import tiny
from tests.hosts import hosts, result
from vit_jax.checkpoints import digests
from vit_jax.data.sources.opening import make_opener
from vit_jax.distributed.processes import REQUEUE
from vit_jax.experiment.reporter import read_events

CONFIG = ('--config=tests/tiny_config.py',)


def training(folder, faults='slow:0', count=1, flags=(), **more):
    command = ['tests.faulty', faults, *CONFIG, f'--workdir={folder}/run', *flags]
    return hosts(folder, command, count, **more)


def steps(folder):
    return sorted(digests.list_steps(folder / 'run/checkpoints'))


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """Results of uninterrupted runs, by the number of processes."""
    made = {}

    def run(count):
        if count not in made:
            folder = tmp_path_factory.mktemp(f'whole{count}')
            with training(folder, count=count) as started:
                assert [host.wait() for host in started] == [0] * count
            made[count] = result(folder)
        return made[count]

    return run


def assert_same_params(folder, expected):
    params = result(folder)[0]
    assert params.keys() == expected[0].keys()
    for name, leaf in params.items():
        np.testing.assert_array_equal(leaf, expected[0][name], name)


PHASES = {
    'start': ('slow:0', 'starting'),
    'compile': ('slow_compile:5', 'compiling'),
    'evaluate': ('slow:100', 'evaluating test'),
    'save': ('slow:100', 'saving'),
}


@pytest.mark.full
@pytest.mark.parametrize('count, phases', [(1, 'start evaluate'), (2, 'compile save')])
def test_sigterm_in_any_phase_stops_at_one_step_and_loses_none(count, phases, whole, tmp_path):
    """The last process alone gets the signal, twice; both stop. The next start resumes there."""
    for phase in phases.split():
        faults, event = PHASES[phase]
        before = steps(tmp_path)
        flags = ['--config.eval_every_steps=25', '--accept_config_changes']
        with training(tmp_path, faults, count, flags) as started:
            started[0].wait_for(event)
            started[-1].signal(signal.SIGTERM)
            time.sleep(0.02)
            started[-1].signal(signal.SIGTERM)
            assert [host.wait() for host in started] == [REQUEUE] * count, phase
        if phase in ('start', 'compile'):
            assert steps(tmp_path) == before
        else:
            stopped = steps(tmp_path)[-1]
            assert max(before, default=-1) < stopped < 55  # at once, and not at the end
            lines = read_events(tmp_path / 'run/events.jsonl')
            assert lines[-1]['step'] == stopped  # nothing was done after it
    with training(tmp_path, count=count, flags=['--accept_config_changes']) as started:
        assert [host.wait() for host in started] == [0] * count
        assert f' step {stopped} ' in started[0].text
    assert_same_params(tmp_path, whole(count))


@pytest.mark.full
def test_a_slow_process_is_named(tmp_path):
    """The folder may have any name."""
    folder = tmp_path / 'lr=[0.1] a\\b*?%#'
    folder.mkdir()
    flags = ['--config.total.steps=40', '--config.spike_deviations=6']
    with training(folder, 'slow:300:1', 2, flags) as started:
        assert [host.wait() for host in started] == [0, 0]
    assert 'process 1 of 2' in started[0].text and 'is slow' in started[0].text
    lines = (folder / 'run/metrics.jsonl').read_text().splitlines()
    compared = [line for line in map(json.loads, lines) if 'slowest_host_ratio' in line]
    assert [line['step'] for line in compared] == [20, 30, 40]  # of the ten steps before
    assert all(line['slowest_host_seconds'] > 0.3 for line in compared)
    assert all(line['slowest_host_ratio'] > 3 for line in compared[1:])  # the first step is slow


@pytest.mark.full
def test_parameters_that_are_not_finite_in_one_process_are_never_saved(tmp_path):
    with training(tmp_path, 'nan_memory:15:1', 2) as started:
        assert [host.wait() for host in started] == [1, 1]
    assert re.search('parameter_norm.*/10', started[1].text)
    assert steps(tmp_path) == [10]


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
    """Held against the logits of the saved model, outside of any run."""
    (tmp_path / 'config.py').write_text(EVALUATED)
    flags = [f'--config={tmp_path}/config.py', f'--workdir={tmp_path}/run']
    with hosts(tmp_path, ['vit_jax.train', *flags], 2) as started:
        assert [host.wait() for host in started] == [0, 0]
    assert 'is slow' not in started[0].text
    found = {line['kind']: line for line in result(tmp_path)[1]}
    vit, test = vit_jax.load(str(tmp_path / 'run')), make_opener()('digits', 'test')
    images = np.stack([vit.preprocess(test.read(index)[0]) for index in range(max(COUNTS))])
    right = vit.logits(images).argmax(-1) == test.labels
    for n in COUNTS:
        line = found[f'first{n}']
        assert (line['count'], round(line['accuracy'] * n, 6)) == (n, right[:n].sum())


@pytest.mark.parametrize('program', ['faulty', 'fewshot', 'train'])
def test_hosts_that_differ_are_told_by_name_before_anything_is_computed(program, tmp_path):
    """Two seeds, packages and code; an evaluation; work directories that are not shared."""
    flags = {index: [f'--config.seed={index}', f'--workdir={tmp_path}/run'] for index in (0, 1)}
    names = ['config.seed: 0 -> 1']
    if program == 'faulty':
        command = ['tests.faulty', 'other_packages:0:1', *CONFIG]
        names += ["packages.numpy: '", 'code.training/loop.py: ']
    elif program == 'fewshot':
        start = '--config.start_from=tests/reference/bigvision_map.npz'
        command = ['vit_jax.fewshot', *CONFIG, start]
    else:
        command = ['vit_jax.train', *CONFIG]
        flags = {index: [f'--workdir={tmp_path}/{index}'] for index in (0, 1)}
        names = [f"workdir: '{tmp_path}/0' -> '{tmp_path}/1'"]
    with hosts(tmp_path, command, 2, each=flags.get) as started:
        assert [host.wait(60) for host in started] == [1, 1]
    for host in started:
        assert [name for name in names if name not in host.text] == []
    assert not (tmp_path / 'run').exists()


@pytest.mark.full
def test_test_images_that_cannot_be_read_are_counted_by_all_processes(tmp_path):
    for split, count in ('train', 20), ('test', 9):
        for name in 'cat', 'dog':
            tiny.draw_photos(tmp_path / 'photos' / split / name, [(9, 9)] * count)
    for i in 0, 3, 4:
        broken = tmp_path / 'photos' / 'test' / 'dog' / f'{i}.png'
        broken.write_bytes(broken.read_bytes()[:-30])
    flags = [f'--config.data={tmp_path}/photos', '--config.eval_split=test']
    flags += ['--config.total.steps=2', '--config.loader.placement=host']
    flags += ['--config.loader.on_unreadable=skip']
    with training(tmp_path, count=2, flags=flags) as started:
        assert [host.wait() for host in started] == [0, 0]
    (found,) = (line for line in result(tmp_path)[1] if line['kind'] == 'test')
    assert found['count'] == 15 and found['unreadable'] == 3
    assert abs(15 * found['accuracy'] - round(15 * found['accuracy'])) < 1e-5
