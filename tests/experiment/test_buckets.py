"""Runs whose work directory is on a store.

python -m pytest -m full tests/experiment/test_buckets.py

They end, are killed, refused and go on as those in a directory do, to the same bits.
"""

import itertools
import re
import signal

import numpy as np
import pytest

import vit_jax
from tests.hosts import hosts, result
from vit_jax.base import UserError, storage
from vit_jax.checkpoints import digests
from vit_jax.checkpoints.store import load_card
from vit_jax.distributed.processes import REQUEUE

pytestmark = pytest.mark.full
STORE = 'gs://bucket/of'
LEASE = 4000  # milliseconds


def training(folder, where=STORE, faults='slow:0', count=1, flags=()):
    command = ['tests.faulty', f'lease:{LEASE},{faults}', '--config=tests/tiny_config.py']
    command += ['--config.checkpoint_every_steps=20', f'--workdir={where}/run', *flags]
    return hosts(folder, command, count)


def finish(folder, where=STORE, count=1, flags=()):
    """What process 0 says of a run to the end, and its result."""
    with training(folder, where, count=count, flags=flags) as started:
        assert [host.wait() for host in started] == [0] * count, started[0].text
    return started[0].text, result(where)


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """The results of uninterrupted runs in a directory, by the number of processes."""
    made = {}

    def run(count=1):
        if count not in made:
            folder = tmp_path_factory.mktemp(f'whole{count}')
            made[count] = finish(folder, folder, count)[1]
        return made[count]

    return run


def assert_same(found, expected):
    """The parameters bit for bit, and every number that was measured, once."""
    assert found[0].keys() == expected[0].keys()
    for name, leaf in found[0].items():
        np.testing.assert_array_equal(leaf, expected[0][name], name)
    assert found[1] == expected[1]


def at_request(bucket, pattern, act):
    """Acts once, before the first request whose method and path match is answered."""
    matching = itertools.count()

    def fault(method, path):
        if re.search(pattern, f'{method} {path}') and not next(matching):
            act()

    bucket.fault = fault


def flip(bucket, name):
    """The object with one bit in its middle the other way round."""
    there = bucket.objects[name]
    data = bytearray(there.data)
    data[len(data) // 2] ^= 1
    bucket.objects[name] = there._replace(data=bytes(data))


def test_a_run_on_a_store_is_that_in_a_directory_and_is_started_from(bucket, whole, tmp_path):
    bucket.fault = lambda method, path: 403 if re.search(r'/b/bucket(\?|$)', path) else None
    said, found = finish(tmp_path)  # storage.objectAdmin suffices, without storage.buckets.get
    assert_same(found, whole())
    assert f'checkpoint {STORE}/run/checkpoints/60' in said
    assert bucket.names('of/run/.') == []  # neither the lock nor what the store was tried with
    loaded = vit_jax.load(f'{STORE}/run')
    assert loaded.report[1].startswith('vit_jax layout, step 60:')
    with training(tmp_path, tmp_path, flags=[f'--config.start_from={STORE}/run']) as (host,):
        assert host.wait() == 0, host.text
    assert f'start_from {STORE}/run\nvit_jax layout, step 60' in host.text
    flip(bucket, max(bucket.names('of/run/checkpoints/60/params/ocdbt.process_0/d/')))
    with pytest.raises(UserError, match='60: damaged since it was written: params/ocdbt'):
        vit_jax.load(f'{STORE}/run')


# Requests while checkpoint 40 is written, and the step from which a run goes on that they end.
MOMENTS = {
    'the end': (r'POST .*checkpoints(%2F|/)40(%2F|/)commit_success', 20),
    'digests': (r'POST .*checkpoints(%2F|/)40(%2F|/)digests', 20),
    'an old one removed': (r'DELETE .*20(%2F|/)card', 40),
}


@pytest.mark.parametrize('moment', MOMENTS)
def test_a_run_that_is_killed_while_it_saves_goes_on_to_the_same_bits(
    moment, bucket, whole, tmp_path
):
    pattern, step = MOMENTS[moment]
    flags = ['--config.keep_checkpoints=1']
    with training(tmp_path, faults='slow:50', flags=flags) as (host,):
        at_request(bucket, pattern, lambda: host.signal(signal.SIGKILL))
        assert host.wait() == -signal.SIGKILL
    assert bucket.names('of/run/.lock')  # nobody has released it
    assert load_card(f'{STORE}/run')[0]['step'] == step
    said, found = finish(tmp_path, flags=flags)
    assert f'resuming at step {step} from {STORE}/run/checkpoints/{step}\n' in said
    assert 'waits 4 s for a renewal' in said
    assert bucket.names('of/run/checkpoints/damaged/') == []  # what is half-written is not damaged
    assert_same(found, whole())


def test_a_second_run_is_refused_and_the_first_goes_on(bucket, whole, tmp_path):
    with training(tmp_path, faults='slow:100,upload:200') as (first,):
        first.wait_for('reported', step=5)
        with training(tmp_path) as (second,):
            assert second.wait() == 1
        pid = first.process.pid
        assert f'error: workdir {STORE}/run is in use by process {pid} on ' in second.text
        assert first.wait() == 0, first.text
    assert_same(result(STORE), whole())


def test_a_run_that_lost_its_lease_ends_with_a_sentence_and_leaves_it_alone(bucket, tmp_path):
    with training(tmp_path, faults='slow:400,upload:200') as (host,):
        host.wait_for('reported', step=5)
        (storage.folder(STORE) / 'run/.lock').write_text('process 1 on another\n')
        assert host.wait(60) == 1
    said = host.text.splitlines()[-1]
    assert said.startswith(f'error: workdir {STORE}/run was lost to process 1 on another')
    assert bucket.text('of/run/.lock') == 'process 1 on another\n' and 'Traceback' not in host.text
    assert 'step 40/60' not in host.text  # noticed when checkpoint 20 was to be completed
    assert digests.steps(storage.folder(STORE) / 'run/checkpoints') == []


def test_sigterm_saves_and_releases_so_that_the_next_start_waits_for_nothing(
    bucket, whole, tmp_path
):
    with training(tmp_path, faults='slow:100,upload:200') as (host,):
        host.wait_for('reported', step=5)
        host.signal(signal.SIGTERM)
        assert host.wait() == REQUEUE, host.text
    assert bucket.names('of/run/.') == []
    said, found = finish(tmp_path)
    assert 'waits' not in said and 'resuming at step' in said
    assert_same(found, whole())


def test_a_damaged_object_is_noticed_and_its_checkpoint_moved_aside(bucket, whole, tmp_path):
    finish(tmp_path)
    before = bucket.names('of/run/checkpoints/60/training')
    flip(bucket, max(bucket.names('of/run/checkpoints/60/training/ocdbt.process_0/d/')))
    said, found = finish(tmp_path)
    assert f'{STORE}/run/checkpoints/60: damaged since it was written: training/' in said
    assert f'resuming at step 40 from {STORE}/run/checkpoints/40\n' in said
    assert_same(found, whole())
    aside = bucket.names('of/run/checkpoints/damaged/60-')
    assert {name.partition('/training/')[2] for name in aside if '/training/' in name} == {
        name.partition('/training/')[2] for name in before
    }


def test_answers_that_the_store_refuses_now_and_then_are_asked_for_again(bucket, whole, tmp_path):
    """Every fortieth request."""
    number = itertools.count(1)
    bucket.fault = lambda method, path: None if next(number) % 40 else 503
    assert_same(finish(tmp_path)[1], whole())


@pytest.mark.parametrize(
    'fault, where, said',
    [
        (403, STORE, f'{STORE}/run: 403 POST '),
        (None, 'gs://other/of', 'gs://other/of/run: 404 POST '),
    ],
)
def test_where_the_bucket_cannot_be_used_nothing_is_compiled(fault, where, said, bucket, tmp_path):
    bucket.fault = lambda method, path: fault if '/upload/' in path else None
    with training(tmp_path, where) as (host,):
        assert host.wait(60) == 1
    assert f'error: {said}' in host.text
    assert 'compiling' not in host.text and 'Traceback' not in host.text


def test_two_hosts_of_which_one_dies_go_on_to_the_same_bits(bucket, whole, tmp_path):
    flags = ['--heartbeat_seconds=10']
    with training(tmp_path, faults='slow:50,die:47:1', count=2, flags=flags) as started:
        codes = [host.wait() for host in started]
        assert codes[1] == -signal.SIGKILL and codes[0] != 0, started[0].text
    said, found = finish(tmp_path, count=2)
    assert re.search(f'resuming at step (20|40) from {STORE}/run/checkpoints/', said)
    assert_same(found, whole(2))


def test_hosts_with_other_stores_are_told(bucket, tmp_path):
    flags = {0: f'--workdir={STORE}/run', 1: f'--workdir={STORE}/other'}
    command = ['tests.faulty', f'lease:{LEASE}', '--config=tests/tiny_config.py']
    with hosts(tmp_path, command, 2, each=lambda index: [flags[index]]) as started:
        assert 0 not in [host.wait() for host in started]
    assert 'workdir' in started[1].text and 'differs from process 0' in started[1].text
