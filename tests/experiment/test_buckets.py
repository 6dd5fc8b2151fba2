"""Runs whose work directory is on a bucket end, resume and are rejected as in a directory.

python -m pytest -m '' tests/experiment/test_buckets.py
"""

import itertools
import re
import signal

import numpy as np
import pytest

import vit_jax
from tests.hosts import assert_same, hosts, result
from vit_jax.base import UserError, storage
from vit_jax.checkpoints import digests
from vit_jax.checkpoints.store import load_card
from vit_jax.distributed.processes import REQUEUE

STORE = 'gs://bucket/of'
LEASE = 4000  # milliseconds


def training(folder, where=STORE, faults='slow:0', count=1, flags=()):
    command = ['tests.faulty', f'lease:{LEASE},{faults}', '--config=tests/tiny_config.py']
    command += ['--config.checkpoint_every_steps=20', f'--workdir={where}/run', *flags]
    return hosts(folder, command, count)


def finish(folder, where=STORE, count=1, flags=()):
    """Returns the output of process 0 of a run to the end, and its result."""
    with training(folder, where, count=count, flags=flags) as started:
        assert [host.wait() for host in started] == [0] * count, started[0].text
    return started[0].text, result(where)


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """The result of an uninterrupted run in a directory."""
    folder = tmp_path_factory.mktemp('whole')
    return finish(folder, folder)[1]


def flip(bucket, name):
    """Flips one bit in the middle of an object."""
    there = bucket.objects[name]
    data = bytearray(there.data)
    data[len(data) // 2] ^= 1
    bucket.objects[name] = there._replace(data=bytes(data))


@pytest.mark.gate
def test_a_run_on_a_bucket_is_that_in_a_directory_and_is_started_from(bucket, whole, tmp_path):
    """The role storage.objectAdmin suffices. Every fortieth request is to be repeated."""
    number = itertools.count(1)

    def fault(method, path):
        if re.search(r'/b/bucket(\?|$)', path):  # storage.buckets.get
            return 403
        return None if next(number) % 40 else 503

    bucket.fault = fault
    text, found = finish(tmp_path)
    bucket.fault = lambda method, path: None
    assert_same(found, whole)
    assert f'checkpoint {STORE}/run/checkpoints/60' in text
    assert bucket.names('of/run/.') == []  # neither the lock nor the files of the first check
    with training(tmp_path, tmp_path, flags=[f'--config.start_from={STORE}/run']) as (host,):
        assert host.wait() == 0, host.text
    assert f'{STORE}/run\n' in host.text and ', step 60: ' in host.text
    flip(bucket, max(bucket.names('of/run/checkpoints/60/params/ocdbt.process_0/d/')))
    with pytest.raises(UserError, match='params/ocdbt'):
        vit_jax.load(f'{STORE}/run')


# Requests while checkpoint 40 is written, and the step from which the next start resumes.
MOMENTS = {
    'digests': (r'POST .*checkpoints(%2F|/)40(%2F|/)digests', 20),
    'an old one removed': (r'DELETE .*20(%2F|/)card', 40),
}


@pytest.mark.parametrize(
    'moment',
    [
        pytest.param('digests', marks=pytest.mark.gate),
        pytest.param('an old one removed', marks=pytest.mark.nightly),
    ],
)
def test_a_run_that_is_killed_while_it_saves_goes_on_to_the_same_bits(
    moment, bucket, whole, tmp_path
):
    pattern, step = MOMENTS[moment]
    flags, matching = ['--config.keep_checkpoints=1'], itertools.count()
    with training(tmp_path, faults='slow:50', flags=flags) as (host,):

        def kill_once(method, path):
            if re.search(pattern, f'{method} {path}') and not next(matching):
                host.signal(signal.SIGKILL)

        bucket.fault = kill_once
        assert host.wait() == -signal.SIGKILL
    assert bucket.names('of/run/.lock')  # nobody has released it
    assert load_card(f'{STORE}/run')[0]['step'] == step
    text, found = finish(tmp_path, flags=flags)
    assert f'{STORE}/run/checkpoints/{step}\n' in text
    assert bucket.names('of/run/checkpoints/damaged/') == []  # half-written is not damaged
    assert_same(found, whole)


@pytest.mark.gate
def test_a_second_run_is_rejected_and_sigterm_saves_and_releases(bucket, whole, tmp_path):
    with training(tmp_path, faults='slow:200') as (first,):
        first.wait_for_text('step 5/')
        with training(tmp_path) as (second,):
            assert second.wait() == 1
        assert f'process {first.process.pid} ' in second.text
        first.signal(signal.SIGTERM)
        assert first.wait() == REQUEUE, first.text
    assert bucket.names('of/run/.') == []
    text, found = finish(tmp_path)
    assert 'locked by' not in text and 'resuming at step' in text
    assert_same(found, whole)


@pytest.mark.gate
def test_a_run_that_lost_its_lease_ends_with_a_sentence_and_leaves_it_alone(bucket, tmp_path):
    with training(tmp_path, faults='slow:200') as (host,):
        host.wait_for_text('step 5/')
        (storage.resolve_folder(STORE) / 'run/.lock').write_text('process 1 on another\n')
        assert host.wait(60) == 1
    assert host.text.splitlines()[-1].startswith(f'error: workdir {STORE}/run ')
    assert bucket.text('of/run/.lock') == 'process 1 on another\n' and 'Traceback' not in host.text
    assert digests.list_steps(storage.resolve_folder(STORE) / 'run/checkpoints') == []


@pytest.mark.gate
def test_a_bucket_that_cannot_be_written_is_rejected_before_anything_is_compiled(bucket, tmp_path):
    bucket.fault = lambda method, path: 403 if '/upload/' in path else None
    with training(tmp_path) as (host,):
        assert host.wait(60) == 1
    assert f'error: {STORE}/run: 403 ' in host.text
    assert 'compiling' not in host.text and 'Traceback' not in host.text


@pytest.mark.gate
def test_two_hosts_train_as_one_does(bucket, whole, tmp_path):
    """Sums over two processes are rounded in another way than the sums of one."""
    _, found = finish(tmp_path, count=2)
    for name, leaf in found[0].items():
        np.testing.assert_allclose(leaf, whole[0][name], rtol=1e-3, atol=1e-3)
