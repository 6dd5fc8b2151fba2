import os
import re
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from vit_jax.base import UnusableDisk, storage
from vit_jax.checkpoints import digests, store
from vit_jax.distributed.meshes import MeshConfig, make_mesh
from vit_jax.distributed.sharding_rules import shardings_for

PARAMS = {'head': {'kernel': jnp.arange(64.0).reshape(8, 8), 'bias': jnp.ones(8)}}
TRAINING = {'step': jnp.asarray(4), 'optimizer': (({'mu': jnp.arange(16.0)},), None)}
CARD = {'step': 4, 'class_names': ['a', 'b']}


@pytest.fixture
def saved(tmp_path):
    checkpoints = store.Checkpoints(tmp_path, keep=2)
    for step in 1, 2, 4:
        checkpoints.save(step, PARAMS, TRAINING, CARD | {'step': step}, {})
    checkpoints.wait()
    yield tmp_path, checkpoints
    checkpoints.close()


def shardings(tree, **mesh):
    config = MeshConfig(**mesh, fsdp_min_mb=0.0)
    return shardings_for(tree, make_mesh(config), config)


@pytest.mark.parametrize('mesh', [{}, {'fsdp': 8}, {'fsdp': 2}])
def test_a_state_comes_back_where_it_is_wanted(saved, mesh):
    _, checkpoints = saved
    assert checkpoints.latest_step == 4
    wanted = shardings(PARAMS, **mesh), shardings(TRAINING, **mesh)
    params, training, _ = checkpoints.restore(4, (PARAMS, TRAINING), wanted)
    assert jax.tree.structure(training) == jax.tree.structure(TRAINING)
    for old, new in (PARAMS, params), (TRAINING, training):
        chex.assert_trees_all_equal(new, old)
    assert params['head']['kernel'].sharding == wanted[0]['head']['kernel']


def test_parameters_can_be_used_alone_with_their_card(saved):
    folder, _ = saved
    for path in str(folder), str(folder / 'checkpoints'), str(folder / 'checkpoints' / '4'):
        params = store.load_params(path)
        assert isinstance(params['head']['bias'], np.ndarray)
        chex.assert_trees_all_equal(params, PARAMS)
        card, found = store.load_card(path)
        assert card['step'] == 4 and found == folder / 'checkpoints' / '4'


def test_only_the_newest_are_kept(saved):
    folder, _ = saved
    assert sorted(p.name for p in (folder / 'checkpoints').glob('[0-9]*')) == ['2', '4']


# Of folders, which a file system allows.
NAMES = ['lr=[0.1,0.2]', 'a*b', 'a\\b', os.fsdecode(b'caf\xe9'), 'a' * 200]
MORE = ['a?b', '{a}', 'a%20b', 'a#b', 'a"b', '~x', ' a ', 'a\nb', 'e\u0301', '$HOME', 'logs:/a']
NAMES += [pytest.param(name, marks=pytest.mark.full) for name in MORE]


@pytest.mark.parametrize('name', NAMES)
def test_a_checkpoint_is_read_and_resumed_whatever_its_folder_is_called(tmp_path, name):
    folder = tmp_path / name
    for step in 1, 2:
        checkpoints = store.Checkpoints(folder, keep=1)
        checkpoints.save(step, PARAMS, TRAINING, CARD | {'step': step}, {})
        checkpoints.wait()
        checkpoints.close()
    assert not store.quarantine_damaged(folder) and digests.steps(folder / 'checkpoints') == [2]
    checkpoints = store.Checkpoints(folder, keep=1)
    like = PARAMS, TRAINING
    params, training, _ = checkpoints.restore(2, like, (shardings(PARAMS), shardings(TRAINING)))
    checkpoints.close()
    chex.assert_trees_all_equal((params, training), like)
    alone = tmp_path / 'alone' / name
    store.save_alone(alone, PARAMS, CARD)
    for path in folder, alone:
        chex.assert_trees_all_equal(store.load_params(str(path)), PARAMS)
        assert store.count_params(store.checkpoint_folder(str(path))) == 72
    files = [path for path in tmp_path.rglob('*') if path.is_file()]
    assert all({folder, alone} & {*path.parents} for path in files)


def test_a_folder_whose_name_is_a_pattern_is_not_that_of_others(tmp_path):
    for name in 'a*b', 'axb':
        zeros = jax.tree.map(jnp.zeros_like, PARAMS)
        store.save_alone(tmp_path / name / '1', zeros if name == 'axb' else PARAMS, CARD)
    chex.assert_trees_all_equal(store.load_params(str(tmp_path / 'a*b/1')), PARAMS)


@pytest.mark.full
@pytest.mark.parametrize('name', ['a%20b', 'a\\b', '\u00e9'])
def test_a_folder_on_a_store_may_be_called_so_too(bucket, name):
    folder = storage.folder(f'gs://bucket/x/{name}')
    checkpoints = store.Checkpoints(folder, keep=1)
    for step in 1, 2:
        checkpoints.save(step, PARAMS, TRAINING, CARD | {'step': step}, {})
    checkpoints.wait()
    checkpoints.close()
    assert digests.steps(folder / 'checkpoints') == [2]
    chex.assert_trees_all_equal(store.load_params(str(folder)), PARAMS)
    assert bucket.names(f'x/{name}/') == bucket.names()


@pytest.mark.full
def test_the_disk_holds_one_checkpoint_more_than_are_kept_at_any_time(tmp_path):
    folder, counts, done = tmp_path / 'checkpoints', set(), threading.Event()
    checkpoints = store.Checkpoints(tmp_path, keep=2)

    def count():
        while not done.is_set():
            counts.add(len(os.listdir(folder)))

    thread = threading.Thread(target=count)
    thread.start()
    for step in range(20):
        checkpoints.save(step, PARAMS, TRAINING, CARD | {'step': step}, {})
    checkpoints.wait()
    done.set()
    thread.join()
    checkpoints.close()
    assert max(counts) == 3 and digests.steps(folder) == [19, 18]


def test_a_checkpoint_whose_arrays_orbax_has_lost_gets_no_name(tmp_path, monkeypatch):
    wait = ocp.AsyncCheckpointer.wait_until_finished

    def waiting(writer):
        wait(writer)
        for partial in tmp_path.glob('run/checkpoints/.partial-*'):
            (partial / 'training/manifest.ocdbt').unlink(True)

    monkeypatch.setattr(ocp.AsyncCheckpointer, 'wait_until_finished', waiting)
    checkpoints = store.Checkpoints(tmp_path / 'run', keep=3)
    checkpoints.save(1, PARAMS, TRAINING, CARD, {})
    with pytest.raises(UnusableDisk, match='manifest.ocdbt'):
        checkpoints.wait()
    with pytest.raises(UnusableDisk):  # again, so that no caller goes on
        checkpoints.save(2, PARAMS, TRAINING, CARD, {})
    checkpoints.close()
    assert not digests.steps(tmp_path / 'run/checkpoints')


def test_what_a_killed_process_left_is_removed_by_the_next(saved):
    folder, _ = saved
    for name in '.partial-5.orbax-checkpoint-tmp', '.partial-2':
        (folder / 'checkpoints' / name / 'params').mkdir(parents=True)
    store.Checkpoints(folder, keep=2).close()
    assert sorted(os.listdir(folder / 'checkpoints')) == ['2', '4']


@pytest.mark.parametrize(
    'other, message',
    [
        ({'kernel': jnp.zeros((8, 4)), 'bias': jnp.ones(8)}, r'head/kernel is float32\[8, 8\]'),
        ({'kernel': PARAMS['head']['kernel']}, r'extra head/bias'),
        (PARAMS['head'] | {'scale': jnp.ones(8)}, r'missing head/scale'),
        (
            PARAMS['head'] | {'bias': jnp.ones(8, jnp.bfloat16)},
            r'bias is float32\[8\], expected bfloat16\[8\]',
        ),
    ],
)
def test_a_state_of_another_shape_or_type_is_refused_by_name(saved, other, message):
    _, checkpoints = saved
    like = {'head': other}, TRAINING
    with pytest.raises(ValueError, match=f'(?s)4/params.*{message}'):
        checkpoints.restore(4, like, (shardings(like[0]), shardings(like[1])))


def test_what_is_no_checkpoint_is_explained(saved, tmp_path):
    folder, _ = saved
    with pytest.raises(FileNotFoundError, match='no such folder'):
        store.checkpoint_folder('/no/where')
    (tmp_path / 'empty').mkdir()
    with pytest.raises(FileNotFoundError, match='neither a complete checkpoint .* nor a work d'):
        store.checkpoint_folder(str(tmp_path / 'empty'))
    assert store.checkpoint_folder(str(folder)).name == '4'


def test_reading_what_is_damaged_is_an_error_in_one_sentence(saved):
    folder, checkpoints = saved
    for path in (folder / 'checkpoints/4/params').rglob('*'):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (folder / 'checkpoints/4/card.json').write_text('[]')
    like = PARAMS, TRAINING
    for read in (
        lambda: checkpoints.restore(4, like, (shardings(PARAMS), shardings(TRAINING))),
        lambda: store.load_card(str(folder)),
        lambda: store.load_params(str(folder)),
    ):
        with pytest.raises(ValueError, match='checkpoint .*/4: (damaged|cannot be read)'):
            read()


def test_a_store_that_cannot_be_reached_is_no_damage(bucket):
    for file, text in ('digests.json', b'{}'), ('card.json', b'{"step": 20}'):
        bucket.put(f'run/checkpoints/20/{file}', text, {})
    assert store.load_card('gs://bucket/run')[0] == {'step': 20}
    bucket.fault = lambda method, path: 403 if re.search(r'/o[?]', path) else None
    with pytest.raises(UnusableDisk):
        digests.steps(storage.folder('gs://bucket/run/checkpoints'))
    bucket.fault = lambda method, path: 403 if 'json' in path else None
    with pytest.raises(UnusableDisk):
        store.load_card('gs://bucket/run')
