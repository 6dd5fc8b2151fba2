"""Whole runs whose images are in a bucket: killed, resumed, with several processes."""

import random
import re
import signal

import cv2
import numpy as np
import pytest

from tests.data.sources import test_parquet, test_shards
from tests.hosts import assert_same, hosts, result

COUNT = 150


def draw(seed):
    rng = np.random.default_rng(seed)
    return cv2.imencode('.png', rng.integers(0, 256, (8, 8, 3), np.uint8))[1].tobytes()


SIZE = np.mean([len(draw(i)) for i in range(COUNT)])


@pytest.fixture(params=['tar', 'parquet'])
def data(request, bucket, tmp_path, monkeypatch):
    """Shards of training images of ten classes, and of test images."""
    monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))
    for split, shard, first in (
        ('train', 0, 0),
        ('train', 1, 50),
        ('train', 2, 100),
        ('test', 0, 150),
    ):
        numbers = range(first, first + 50)
        path = tmp_path / 'set' / f'{split}-{shard}.{request.param}'
        if request.param == 'parquet':
            images = [{'bytes': draw(i), 'path': None} for i in numbers]
            columns = {'image': images, 'label': [i % 10 for i in numbers]}
            test_parquet.write(path, columns, row_group_size=20, compression='none')
        else:
            members = [(f'{i}.png', draw(i)) for i in numbers]
            members += [(f'{i}.cls', str(i % 10).encode()) for i in numbers]
            test_shards.write(path, sorted(members))
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
@pytest.mark.parametrize('data', ['parquet'], indirect=True)
def test_a_run_that_is_killed_ends_with_the_same_bits(data, tmp_path):
    text, whole = finish(tmp_path / 'whole', data, 1)
    assert re.search(r'order   shuffles \d\d images at a time', text)
    with train(tmp_path / 'killed', data, 1) as started:
        kill(started, 35)
    _, found = finish(tmp_path / 'killed', data, 1)
    assert_same(found, whole)


@pytest.mark.nightly
def test_two_processes_that_are_killed_five_times_end_with_the_same_bits(data, bucket, tmp_path):
    """The first start reads each tar shard once for the index."""
    _, whole = finish(tmp_path / 'whole', data, 2)
    shards = [name for name in bucket.names('set/') if name.endswith('.tar')]
    complete = [
        name
        for name, start, stop in bucket.sent
        if name in shards and (start, stop) == (0, len(bucket.objects[name].data))
    ]
    assert sorted(complete) == shards
    for step in sorted(random.sample(range(5, 60, 5), 5)):
        with train(tmp_path / 'killed', data, 2) as started:
            kill(started, step)
    _, found = finish(tmp_path / 'killed', data, 2)
    assert_same(found, whole)
    _, one = finish(tmp_path / 'one', data, 1)  # sums of two processes are rounded differently
    for name, leaf in found[0].items():
        np.testing.assert_allclose(leaf, one[0][name], rtol=1e-3, atol=1e-3)


@pytest.mark.gate
@pytest.mark.parametrize('data', ['tar'], indirect=True)
def test_the_doctor_measures_a_bucket(data, tmp_path):
    command = ['vit_jax.doctor', '--config=tests/tiny_config.py', f'--config.data={data}']
    with hosts(tmp_path, [*command, '--config.eval_split=test']) as (host,):
        assert host.wait() == 0, host.text
    assert re.search(r'\nbucket +\d+ MB/s, [\d,]+ images/s; \d+ ms for one image\n', host.text)
