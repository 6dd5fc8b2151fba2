"""Whole runs whose images are in a bucket: killed, resumed, with several processes."""

import random
import re
import signal

import cv2
import numpy as np
import pytest

from tests.data.sources.test_shards import write
from tests.hosts import assert_same, hosts, result

COUNT = 150


def draw(seed):
    rng = np.random.default_rng(seed)
    return cv2.imencode('.png', rng.integers(0, 256, (8, 8, 3), np.uint8))[1].tobytes()


SIZE = np.mean([len(draw(i)) for i in range(COUNT)])


@pytest.fixture
def data(bucket, tmp_path, monkeypatch):
    """Shards of training images of ten classes, and of test images."""
    monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))
    for split, shard, first in (
        ('train', 0, 0),
        ('train', 1, 50),
        ('train', 2, 100),
        ('test', 0, 150),
    ):
        members = []
        for i in range(first, first + 50):
            members += [(f'{i}.png', draw(i)), (f'{i}.cls', str(i % 10).encode())]
        path = tmp_path / 'set' / f'{split}-{shard}.tar'
        write(path, members)
        bucket.put(f'set/{path.name}', path.read_bytes(), {})
    return 'gs://bucket/set'


def train(folder, data, count, *flags):
    folder.mkdir(exist_ok=True)
    command = [
        'tests.faulty',
        'slow:50',
        '--config=tests/tiny_config.py',
        f'--workdir={folder}/run',
    ]
    command += [f'--config.data={data}', '--config.eval_split=test']
    command += [f'--config.loader.shuffle_gb={64.1 * SIZE / 2**30}', *flags]
    return hosts(folder, command, count)


def finish(folder, *arguments):
    with train(folder, *arguments) as started:
        assert [host.wait() for host in started] == [0] * len(started), started[0].text
    return started[0].text, result(folder)


def kill(started, step):
    """Kills one process after a step; the other one ends by itself."""
    started[0].wait_for_text(f'step {step}/60')
    victim = random.choice(started)
    victim.signal(signal.SIGKILL)
    for host in started:
        host.wait()


@pytest.mark.gate
def test_a_run_that_is_killed_ends_with_the_same_bits(data, tmp_path):
    text, whole = finish(tmp_path / 'whole', data, 1)
    assert 'bucket  shuffles 64 images at a time' in text
    with train(tmp_path / 'killed', data, 1) as started:
        kill(started, 35)
    _, found = finish(tmp_path / 'killed', data, 1)
    assert_same(found, whole)


@pytest.mark.nightly
def test_two_processes_that_are_killed_five_times_end_with_the_same_bits(data, bucket, tmp_path):
    """The first start reads each shard once for the index."""
    _, whole = finish(tmp_path / 'whole', data, 2)
    complete = [
        name
        for name, start, stop in bucket.sent
        if (start, stop) == (0, len(bucket.objects[name].data))
    ]
    assert sorted(set(complete)) == bucket.names('set/')
    assert len(complete) == len(set(complete))
    for step in sorted(random.sample(range(5, 60, 5), 5)):
        with train(tmp_path / 'killed', data, 2) as started:
            kill(started, step)
    _, found = finish(tmp_path / 'killed', data, 2)
    assert_same(found, whole)
    _, one = finish(tmp_path / 'one', data, 1)  # sums of two processes are rounded differently
    for name, leaf in found[0].items():
        np.testing.assert_allclose(leaf, one[0][name], rtol=1e-3, atol=1e-3)


@pytest.mark.gate
def test_the_doctor_measures_a_bucket(data, tmp_path):
    command = ['vit_jax.doctor', '--config=tests/tiny_config.py', f'--config.data={data}']
    with hosts(tmp_path, [*command, '--config.eval_split=test']) as (host,):
        assert host.wait() == 0, host.text
    assert re.search(r'\nbucket +\d+ MB/s, [\d,]+ images/s; \d+ ms for one image\n', host.text)
