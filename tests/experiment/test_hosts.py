"""Several hosts, as processes over loopback: they start, agree, stop, die, hang and resume.

All tests of this file: python -m pytest -m '' -n 0 tests/experiment/test_hosts.py
"""

import contextlib
import json
import re
import signal

import numpy as np
import pytest

import vit_jax
from tests import tiny
from tests.hosts import KILL_AFTER, assert_same, hosts, result
from vit_jax.checkpoints import digests
from vit_jax.data.sources.opening import make_opener
from vit_jax.distributed.processes import REQUEUE, Job
from vit_jax.experiment.build import build_experiment
from vit_jax.experiment.reporter import Reporter, read_events
from vit_jax.training.loop import Clock
from vit_jax.training.losses import StepMetrics

STEPS, EVERY = 12, 3  # steps of a run, and from one checkpoint to the next
COUNTS = 1, 50, 359  # images of the evaluations: fewer than processes, and of several batches
UNREADABLE = 3, 48, 49, 200, 358  # test images; both processes read some of them
CONFIG = f"""
import dataclasses

from tests import tiny_config
from vit_jax.config import EvalConfig
from vit_jax.data.sources.opening import make_opener


def digits(split):
    source = make_opener()('digits', split)

    def read(index):
        if split == 'test' and index in {UNREADABLE}:
            raise OSError('half a file')
        return source.read(index)

    return dataclasses.replace(source, read=read)


def get_config():
    config = tiny_config.get_config()
    config.data = digits
    config.total.steps = {STEPS}
    config.checkpoint_every_steps = {EVERY}
    config.spike_deviations = 6.0
    config.eval_split, config.eval_batch_size = 'test', 32
    config.evals = {{f'first{{n}}': EvalConfig(split=f'test[:{{n}}]') for n in {COUNTS}}}
    config.loader.placement = 'host'
    config.loader.on_unreadable = 'skip'
    return config
"""


def training(folder, faults='slow:0', count=1, flags=()):
    (folder / 'config.py').write_text(CONFIG)
    command = ['tests.faulty', faults, f'--config={folder}/config.py', f'--workdir={folder}/run']
    return hosts(folder, [*command, *flags], count)


def steps(folder):
    return sorted(digests.list_steps(folder / 'run/checkpoints'))


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """Starts a run of `count` processes; returns a function that waits, and returns its folder."""
    runs = {}

    def start(count):
        if count not in runs:
            folder = tmp_path_factory.mktemp(f'whole{count}')
            runs[count] = folder, stack.enter_context(training(folder, count=count))
        folder, started = runs[count]

        def finish():
            assert [host.wait() for host in started] == [0] * count
            return folder

        return finish

    with contextlib.ExitStack() as stack:
        yield start


# Faults, and what is printed or in the event log when the signal is sent. Steps of 1 s are longer
# than a signal needs to reach all processes (0.5 s), so the run cannot finish first.
PHASES = {
    'start': ('slow:0', 'starting'),
    'compile': (f'slow_compile:{KILL_AFTER}', 'compiling'),
    'evaluate': ('slow:1000', f'evaluating first{max(COUNTS)}'),
    'save': ('slow:1000', 'saving'),
}


@pytest.mark.parametrize(
    'count, phases',
    [
        pytest.param(2, ['save'], marks=pytest.mark.gate),
        pytest.param(2, ['start', 'compile', 'evaluate'], marks=pytest.mark.nightly),
        pytest.param(1, ['start', 'compile', 'save', 'evaluate'], marks=pytest.mark.nightly),
    ],
)
def test_sigterm_stops_all_after_one_step_and_the_run_resumes_to_the_same_bits(
    count, phases, whole, tmp_path
):
    """The last process alone gets the signal, twice. The folder may have any name."""
    folder, finish_whole = tmp_path / 'lr=[0.1] a\\b*?%#', whole(count)
    folder.mkdir()
    for phase in phases:
        (faults, event), before = PHASES[phase], steps(folder)
        flags = ['--config.eval_every_steps=5', '--accept_config_changes']
        with training(folder, faults, count, flags if phase == 'evaluate' else ()) as started:
            started[0].wait_for(event)
            started[-1].signal(signal.SIGTERM)
            if phase in ('start', 'compile'):
                assert [host.wait() for host in started] == [REQUEUE] * count, phase
                assert steps(folder) == before
                continue
            started[-1].wait_for_text('saving and exiting after this step')
            started[-1].signal(signal.SIGTERM)
            assert [host.wait() for host in started] == [REQUEUE] * count, phase
        stopped = steps(folder)[-1]
        assert max(before, default=0) < stopped < STEPS  # at once, and not at the end
        assert read_events(folder / 'run/events.jsonl')[-1]['step'] == stopped  # nothing after it
    with training(folder, count=count, flags=['--accept_config_changes']) as started:
        assert [host.wait() for host in started] == [0] * count
    assert f'resuming at step {stopped} ' in started[0].text
    found, expected = result(folder), result(finish_whole())
    if phases != ['save']:  # evaluations at other steps
        found, expected = (found[0], []), (expected[0], [])
    assert_same(found, expected)


@pytest.mark.gate
def test_an_evaluation_of_two_processes_counts_every_readable_image_once(whole):
    """Compared with the logits of the saved model, outside of any run."""
    folder, test = whole(2)(), make_opener()('digits', 'test')
    lines = {line['kind']: line for line in result(folder)[1]}
    vit = vit_jax.load(str(folder / 'run'))
    images = np.stack([vit.preprocess(test.read(index)[0]) for index in range(max(COUNTS))])
    right = vit.logits(images).argmax(-1) == test.labels
    right[[*UNREADABLE]] = False
    for n in COUNTS:
        line, unreadable = lines[f'first{n}'], sum(index < n for index in UNREADABLE)
        assert (line['count'], line.get('unreadable', 0)) == (n - unreadable, unreadable)
        assert round(line['accuracy'] * line['count'], 6) == right[:n].sum()


@pytest.mark.gate
def test_all_wait_for_a_process_that_compiles_and_its_stop_saves_nothing(tmp_path):
    """They wait before the first collective, for which gloo has 30 s."""
    faults = f'barriers:0,slow_compile:{KILL_AFTER}:1'  # longer than the test
    with training(tmp_path, faults, 2) as started:
        started[1].wait_for_text('compiling slowly')
        started[0].wait_for_text('waiting at compiled')
        started[1].signal(signal.SIGTERM)
        assert [host.wait() for host in started] == [REQUEUE] * 2
    for host in started:
        why = host.text.splitlines()[-1]
        assert why.startswith('process 1 of 2 ')
        assert why.endswith(': SIGTERM before the first step; run the same command again')
        assert 'saving and' not in host.text and 'saved in' not in host.text
    assert steps(tmp_path) == []


@pytest.mark.nightly
def test_a_process_that_compiles_longer_than_gloo_waits_is_waited_for(tmp_path):
    """gloo waits for 30 s."""
    with training(tmp_path, 'slow_compile:40:1', 2) as started:
        assert [host.wait() for host in started] == [0, 0]


class Store:
    """The key-value store of several jobs in this process."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value):
        assert key not in self.values
        self.values[key] = value

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.values.items() if key.startswith(folder)]

    def key_value_delete(self, folder):
        for key, _ in self.key_value_dir_get(folder):
            del self.values[key]


def test_the_process_that_the_others_wait_for_is_named_the_second_time(tmp_path, caplog):
    """Process 0 is slow in ten steps, and process 1 in twenty. The first report compares none."""
    experiment, store = build_experiment(tiny.experiment(log_every_steps=10)), Store()
    slow = {0: range(1, 11), 1: range(11, 31)}
    reporters, clocks = [], [Clock(), Clock()]
    for index, clock in enumerate(clocks):
        job = Job()
        job.count, job.index, job._store = len(clocks), index, store
        arguments = {'steps': range(60), 'progress': {}, 'clock': clock, 'job': job}
        reporters.append(Reporter(experiment, tmp_path, **arguments))
    metrics = StepMetrics({'loss': 1.0, 'accuracy': 1.0}, 1.0, {'skipped': 0.0})
    for step in range(1, 51):
        for index, (reporter, clock) in enumerate(zip(reporters, clocks, strict=True)):
            own = 3.0 if step in slow[index] else 1.0
            together = 3.0 if any(step in each for each in slow.values()) else 1.0
            clock.seconds['step'] = clock.seconds.get('step', 0.0) + together
            clock.device_wait += together - own
            reporter.record_step(step, metrics)
    lines = map(json.loads, (tmp_path / 'metrics.jsonl').read_text().splitlines())
    names = 'step', 'slowest_host_seconds', 'slowest_host_ratio'
    found = [tuple(line[x] for x in names) for line in lines if 'slowest_host_ratio' in line]
    assert found == [(20, 3.0, 3.0), (30, 3.0, 3.0), (40, 3.0, 3.0), (50, 1.0, 1.0)]
    (message,) = (record.getMessage() for record in caplog.records)
    assert re.fullmatch(r'process 1 of 2 \(.*\) is slow: 3 s .*; median process: 1 s', message)
    assert len(store.values) == 2  # of the last report


@pytest.mark.nightly
def test_a_slow_process_of_a_run_is_named(tmp_path):
    """Its steps take 0.5 s; the other process needs a few tens of milliseconds for a step."""
    flags = ['--config.total.steps=40', '--config.checkpoint_every_steps=10']
    with training(tmp_path, 'slow:500:1', 2, flags) as started:
        assert [host.wait() for host in started] == [0, 0]
    assert 'process 1 of 2' in started[0].text and 'is slow' in started[0].text
    lines = map(json.loads, (tmp_path / 'run/metrics.jsonl').read_text().splitlines())
    compared = [line for line in lines if 'slowest_host_ratio' in line]
    assert [line['step'] for line in compared] == [20, 30, 40]  # of the ten steps before
    assert all(line['slowest_host_seconds'] > 0.5 for line in compared)
    assert all(line['slowest_host_ratio'] > 2 for line in compared)  # from which it is slow


@pytest.mark.gate
def test_parameters_that_are_not_finite_in_one_process_are_never_saved(tmp_path):
    with training(tmp_path, f'nan_memory:{EVERY + 1}:1', 2) as started:
        assert [host.wait() for host in started] == [1, 1]
    assert re.search(f'parameter_norm.*/checkpoints/{EVERY}', started[1].text)
    assert steps(tmp_path) == [EVERY]


def test_hosts_that_differ_are_told_by_name_before_anything_is_computed(tmp_path):
    """Two seeds, packages and code; an evaluation; work directories that are not shared."""
    config, run = '--config=tests/tiny_config.py', f'--workdir={tmp_path}/run'
    start = '--config.start_from=tests/reference/bigvision_map.npz'
    seeds = {index: [run, f'--config.seed={index}'] for index in (0, 1)}
    folders = {index: [f'--workdir={tmp_path}/{index}'] for index in (0, 1)}
    seed = 'config.seed: 0 -> 1'
    with (
        hosts(tmp_path, ['tests.faulty', 'other_packages:0:1', config], 2, each=seeds.get) as one,
        hosts(tmp_path, ['vit_jax.fewshot', config, start], 2, each=seeds.get) as two,
        hosts(tmp_path, ['vit_jax.train', config], 2, each=folders.get) as three,
    ):
        assert [host.wait() for host in (*one, *two, *three)] == [1] * 6
    for started, *names in (
        (one, seed, "packages.numpy: '", 'code.training/loop.py: '),
        (two, seed),
        (three, f"workdir: '{tmp_path}/0' -> '{tmp_path}/1'"),
    ):
        for host in started:
            assert [name for name in names if name not in host.text] == []
            assert 'compile for' not in host.text
    assert not (tmp_path / 'run').exists()
