import re
import shutil
import threading
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.base import UnusableDisk, storage
from vit_jax.checkpoints import digests, store
from vit_jax.parallel.meshes import MeshConfig, make_mesh
from vit_jax.parallel.sharding_rules import shardings_for

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


def test_what_two_threads_remove_is_removed_once(saved, monkeypatch):
    """By the thread of a save, and that of the save before, which overlap."""
    folder, checkpoints = saved
    (folder / 'checkpoints/.trash/1/params').mkdir(parents=True)
    running, removals, remove = [], [], shutil.rmtree

    def remove_slowly(path, **options):
        running.append(path)
        removals.append(len(running))
        time.sleep(0.1)
        remove(path, **options)
        running.remove(path)

    monkeypatch.setattr(store.shutil, 'rmtree', remove_slowly)
    threads = [threading.Thread(target=checkpoints._empty_trash) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert removals == [1] and not list((folder / 'checkpoints/.trash').iterdir())


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
    with pytest.raises(FileNotFoundError, match='neither a checkpoint .* nor a work directory'):
        store.checkpoint_folder(str(tmp_path / 'empty'))
    half = folder / 'checkpoints' / '7.orbax-checkpoint-tmp'
    half.mkdir()
    with pytest.raises(FileNotFoundError, match='half-written'):
        store.checkpoint_folder(str(half))
    assert store.checkpoint_folder(str(folder)).name == '4'


def test_a_damaged_checkpoint_is_an_error_in_one_sentence(saved):
    folder, checkpoints = saved
    card = next((folder / 'checkpoints' / '4' / 'card').glob('*'))
    for file in (folder / 'checkpoints' / '4' / 'params').rglob('*'):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match='checkpoint .*/4: (damaged|cannot be read)'):
        store.load_params(str(folder))
    with pytest.raises(ValueError, match='checkpoint .*/4: (damaged|cannot be read)'):
        checkpoints.restore(4, (PARAMS, TRAINING), (shardings(PARAMS), shardings(TRAINING)))
    for text in '{"step": ', '12', '[]':
        for file in card.parent.iterdir():
            file.write_text(text)
        with pytest.raises(ValueError, match='checkpoint .*/4: (damaged|cannot be read)'):
            store.load_card(str(folder))


def test_a_store_that_cannot_be_reached_is_no_damage(bucket):
    """Of a checkpoint that was killed before it had its digests."""
    for folder in '20', '20/card', '20/params':
        bucket.put(f'run[1]/checkpoints/{folder}/commit_success.txt', b'', {})
    bucket.put('run[1]/checkpoints/20/card/metadata', b'{"step": 20}', {})
    assert store.load_card('gs://bucket/run[1]')[0] == {'step': 20}
    bucket.fault = lambda method, path: 403 if re.search(r'/o[?]', path) else None
    with pytest.raises(UnusableDisk):
        digests.steps(storage.folder('gs://bucket/run[1]/checkpoints'))
    bucket.fault = lambda method, path: 403 if 'card%2Fmetadata' in path else None
    where = re.escape('gs://bucket/run[1]/checkpoints/20: cannot be read: ')
    with pytest.raises(UnusableDisk, match=where):
        store.load_card('gs://bucket/run[1]')
