"""Checkpoints of a run: saved, restored on other meshes, removed, and read alone."""

import os
import re
import threading
import types
from concurrent import futures

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from vit_jax.base import StorageError, UserError, storage
from vit_jax.checkpoints import digests, store
from vit_jax.distributed.meshes import MeshConfig, make_mesh
from vit_jax.distributed.sharding_rules import shardings_for

DEVICES = 8
PARAMS = {'head': {'kernel': jnp.arange(64.0).reshape(2, 4, 8), 'bias': jnp.ones(8)}}
TRAINING = {'step': jnp.asarray(4), 'optimizer': (({'mu': jnp.arange(16.0)},), None)}
CARD = {'step': 4, 'class_names': ['a', 'b']}


@pytest.fixture
def saved(tmp_path):
    checkpoints = store.Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1, 2, 4)
    yield tmp_path, checkpoints
    checkpoints.close()


def save(checkpoints, *steps, best=None):
    for step in steps:
        checkpoints.save(step, PARAMS, TRAINING, CARD | {'step': step}, {}, best=best)
    checkpoints.wait()


def test_closing_gives_up_on_a_save_that_does_not_end(saved, monkeypatch):
    """It would wait for a process that has died."""
    ended, checkpoints = threading.Event(), saved[1]
    monkeypatch.setattr(store, '_seal', lambda *_: ended.wait())
    checkpoints.save(5, PARAMS, TRAINING, CARD, {})
    checkpoints.close(0.1)
    assert checkpoints._thread.is_alive()
    ended.set()


def shardings(tree, **mesh):
    config = MeshConfig(**mesh, fsdp_min_mb=0.0)
    return shardings_for(tree, make_mesh(config), config)


@pytest.mark.parametrize('mesh', [{}, {'fsdp': 8}, {'fsdp': 2}])
def test_a_state_is_restored_with_other_shardings(saved, mesh):
    _, checkpoints = saved
    assert checkpoints.latest_step == 4
    wanted = shardings(PARAMS, **mesh), shardings(TRAINING, **mesh)
    params, training, _ = checkpoints.restore(4, (PARAMS, TRAINING), wanted)
    assert jax.tree.structure(training) == jax.tree.structure(TRAINING)
    chex.assert_trees_all_equal((params, training), (PARAMS, TRAINING))
    assert params['head']['kernel'].sharding == wanted[0]['head']['kernel']


def test_parameters_are_read_alone_with_their_card(saved):
    folder, _ = saved
    for path in str(folder), str(folder / 'checkpoints'), str(folder / 'checkpoints' / '4'):
        params = store.load_params(path)
        assert isinstance(params['head']['bias'], np.ndarray)
        chex.assert_trees_all_equal(params, PARAMS)
        card, found = store.load_card(path)
        assert card['step'] == 4 and found == folder / 'checkpoints' / '4'


def test_the_newest_are_kept_and_what_a_killed_process_left_is_removed(saved):
    folder, _ = saved
    for name in '.partial-5.orbax-checkpoint-tmp', '.partial-2':
        (folder / 'checkpoints' / name / 'params').mkdir(parents=True)
    store.Checkpoints(folder, keep=2).close()
    assert sorted(os.listdir(folder / 'checkpoints')) == ['2', '4']


@pytest.mark.gate
def test_the_best_is_kept_on_a_bucket_with_the_newest_until_another_is(bucket):
    folder = storage.resolve_folder('gs://bucket/run')
    checkpoints, kept = store.Checkpoints(folder, keep=1), []
    for step, best in (1, 1), (2, 1), (3, 1), (4, 4), (5, 4):
        save(checkpoints, step, best=best)
        kept.append(digests.list_steps(folder / 'checkpoints'))
    checkpoints.close()
    assert kept == [[1], [2, 1], [3, 1], [4], [5, 4]]


# A file system allows these names of folders; orbax would misread them.
@pytest.mark.parametrize('name', ['lr=[0.1,0.2]', 'a*b', os.fsdecode(b'caf\xe9'), 'logs:/a'])
def test_a_checkpoint_is_read_and_resumed_whatever_the_name_of_its_folder(tmp_path, name):
    folder = tmp_path / name
    checkpoints = store.Checkpoints(folder, keep=1)
    save(checkpoints, 1, 2)
    like = PARAMS, TRAINING
    params, training, _ = checkpoints.restore(2, like, (shardings(PARAMS), shardings(TRAINING)))
    checkpoints.close()
    chex.assert_trees_all_equal((params, training), like)
    alone = tmp_path / 'alone' / name
    store.write_standalone(alone, PARAMS, CARD)
    for path in folder, alone:
        chex.assert_trees_all_equal(store.load_params(str(path)), PARAMS)
        assert store.count_params(store.checkpoint_folder(str(path))) == 72
    files = [path for path in tmp_path.rglob('*') if path.is_file()]
    assert all({folder, alone} & {*path.parents} for path in files)


@pytest.mark.gate
def test_the_disk_never_holds_more_than_one_checkpoint_above_the_kept_ones(tmp_path):
    folder, counts, done = tmp_path / 'checkpoints', set(), threading.Event()
    checkpoints = store.Checkpoints(tmp_path, keep=2)

    def count():
        while not done.is_set():
            counts.add(len(os.listdir(folder)))

    thread = threading.Thread(target=count)
    thread.start()
    save(checkpoints, *range(20))
    done.set()
    thread.join()
    checkpoints.close()
    assert max(counts) == 3 and digests.list_steps(folder) == [19, 18]


def test_a_checkpoint_whose_arrays_orbax_has_lost_gets_no_name(tmp_path, monkeypatch):
    wait = ocp.AsyncCheckpointer.wait_until_finished

    def waiting(writer):
        wait(writer)
        for partial in tmp_path.glob('run/checkpoints/.partial-*'):
            (partial / 'training/manifest.ocdbt').unlink(True)

    monkeypatch.setattr(ocp.AsyncCheckpointer, 'wait_until_finished', waiting)
    checkpoints = store.Checkpoints(tmp_path / 'run', keep=3)
    for step in 1, 2:  # the second call raises it again
        with pytest.raises(StorageError, match='manifest.ocdbt'):
            save(checkpoints, step)
    checkpoints.close()
    assert not digests.list_steps(tmp_path / 'run/checkpoints')


def test_what_a_killed_writer_of_a_checkpoint_left_is_removed(tmp_path):
    for name in 'a', 'a-b':
        left = f'{store._partial_stem(tmp_path / name)}-{"0" * 32}.orbax-checkpoint-tmp'
        (tmp_path / left / 'params').mkdir(parents=True)
    store.write_standalone(tmp_path / 'a', PARAMS, CARD)
    assert sorted(os.listdir(tmp_path)) == [left, 'a']  # of the other checkpoint


def test_two_writers_of_one_checkpoint_take_turns(tmp_path):
    def write(scale):
        params = jax.tree.map(lambda x: scale * x, PARAMS)
        store.write_standalone(tmp_path / 'a', params, CARD)

    with futures.ThreadPoolExecutor() as pool:
        list(pool.map(write, [1.0, 2.0, 3.0]))
    assert store.load_params(str(tmp_path / 'a'))['head']['bias'][0] in (1, 2, 3)
    assert os.listdir(tmp_path) == ['a']


def test_a_checkpoint_that_cannot_be_written_is_one_sentence_and_leaves_nothing(
    tmp_path, monkeypatch
):
    store.write_standalone(tmp_path / 'a', PARAMS, CARD)
    before = sorted(tmp_path.rglob('*'))

    def no_room(*_):
        raise ValueError('RESOURCE_EXHAUSTED: No space left on device [details]\n[more details]')

    for place in (ocp.Checkpointer, 'save'), (digests, 'write_digests'):
        with monkeypatch.context() as patch, pytest.raises(StorageError) as raised:
            patch.setattr(*place, no_room)
            store.write_standalone(tmp_path / 'a', PARAMS, CARD)
        assert str(raised.value).startswith(f'{tmp_path}/a: cannot be written: ')
        assert '\n' not in str(raised.value) and sorted(tmp_path.rglob('*')) == before


def test_a_checkpoint_needs_as_many_bytes_as_its_arrays_have(tmp_path, monkeypatch):
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(PARAMS))
    disk = types.SimpleNamespace(free=needed)
    monkeypatch.setattr(store.shutil, 'disk_usage', lambda path: disk)
    store.write_standalone(tmp_path / 'a', PARAMS, CARD)
    disk.free = needed - 1
    with pytest.raises(StorageError, match=f'{needed:,} bytes'):
        store.write_standalone(tmp_path / 'b', PARAMS, CARD)
    assert [path.name for path in tmp_path.iterdir()] == ['a']


def test_a_run_that_was_replaced_completes_no_checkpoint(saved):
    """Another run may take over the work directory while a checkpoint is written."""
    folder, _ = saved
    calls = []

    def check_lease():
        calls.append(1)
        if len(calls) > 1:  # the first call is before anything is written
            raise UserError('taken over')

    checkpoints = store.Checkpoints(folder, keep=2, check_lease=check_lease)
    with pytest.raises(UserError, match='taken over'):
        save(checkpoints, 5)
    assert digests.list_steps(folder / 'checkpoints') == [4, 2]
    checkpoints.close()


@pytest.mark.parametrize(
    'head, name',
    [
        (
            {'kernel': jnp.zeros((8, 4)), 'bias': jnp.ones(8)},
            r'head/kernel is .*2, 4, 8.*expected .*8, 4',
        ),
        ({'kernel': PARAMS['head']['kernel']}, 'extra head/bias'),
        (PARAMS['head'] | {'scale': jnp.ones(8)}, 'missing head/scale'),
        (PARAMS['head'] | {'bias': jnp.ones(8, jnp.bfloat16)}, 'expected bfloat16'),
    ],
)
def test_a_state_of_other_names_shapes_or_types_is_rejected(saved, head, name):
    _, checkpoints = saved
    like = {'head': head}, TRAINING
    with pytest.raises(UserError, match=f'(?s)4/params.*{name}'):
        checkpoints.restore(4, like, (shardings(like[0]), shardings(like[1])))


@pytest.mark.parametrize('path', ['/no/where', '/'])
def test_a_path_without_a_checkpoint_is_a_missing_file(path):
    with pytest.raises(FileNotFoundError, match=path):
        store.checkpoint_folder(path)


def test_a_bucket_that_cannot_be_reached_is_no_damage(bucket):
    for file, text in ('digests.json', b'{}'), ('card.json', b'{"step": 20}'):
        bucket.put(f'run/checkpoints/20/{file}', text, {})
    assert store.load_card('gs://bucket/run')[0] == {'step': 20}
    bucket.fault = lambda method, path: 403 if re.search(r'/o[?]', path) else None
    with pytest.raises(StorageError):
        digests.list_steps(storage.resolve_folder('gs://bucket/run/checkpoints'))
    bucket.fault = lambda method, path: 403 if 'json' in path else None
    with pytest.raises(StorageError):
        store.load_card('gs://bucket/run')
