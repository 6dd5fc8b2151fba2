import contextlib
import re

import chex
import jax
import numpy as np
import pytest

from tests import tiny
from vit_jax.base.errors import UserError
from vit_jax.base.tree_names import named_leaves
from vit_jax.data import loading
from vit_jax.distributed.meshes import (
    MeshConfig,
    batch_sharding,
    check_batch_size,
    local_rows,
    make_mesh,
)
from vit_jax.distributed.sharding_rules import require_sharded, sharding_report, shardings_for
from vit_jax.models import Regularization
from vit_jax.training.duration import Duration

DEVICES = 8
STEPS, ALL = 20, jax.devices()


def trained(mesh: MeshConfig, devices: int, dropout: float):
    """Initial parameters and the losses of some steps on a mesh of some of the eight devices."""
    config = tiny.experiment(
        mesh=mesh,
        ema_decay=0.9,
        total=Duration(steps=STEPS),
        regularization=Regularization(dropout=dropout),
    )
    experiment, state, update = tiny.compiled(config, ALL[:devices])
    initial = jax.tree.map(np.asarray, state.params)
    sizes = {
        name: leaf.addressable_shards[0].data.size for name, leaf in named_leaves(state).items()
    }
    loader = loading.make_loader(
        experiment.train_reader, config.loader, batch_sharding(experiment.mesh)
    )
    losses = []
    for batch in loading.training_batches(loader, steps=range(STEPS), batch_size=16, seed=0):
        state, metrics = update(state, batch)
        losses.append(metrics.means['loss'])
    return initial, np.array(losses), sizes


@pytest.mark.parametrize(
    'shape, dropout',
    [
        pytest.param((2, 2, 2), 0.1, marks=pytest.mark.gate),
        pytest.param((1, 8, 1), 0.1, marks=pytest.mark.nightly),
        # The last block is computed for the class token alone.
        pytest.param((2, 2, 2), 0.0, marks=pytest.mark.nightly),
    ],
)
def test_every_mesh_begins_with_the_same_bits_and_has_the_same_losses(shape, dropout):
    initial, losses, whole = trained(MeshConfig(), 1, dropout)
    assert losses[-1] < losses[0]
    data, fsdp, tensor = shape
    config = MeshConfig(data=data, fsdp=fsdp, tensor=tensor, fsdp_min_mb=0.0)
    other, found, sizes = trained(config, 8, dropout)
    chex.assert_trees_all_equal(other, initial)
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    for copy in 'params', 'ema_params', 'opt_state/1/mu', 'opt_state/1/nu':
        name = f'{copy}/encoder/block/mlp/dense1/kernel'
        assert sizes[name] == whole[name] // (fsdp * tensor), name


@pytest.mark.parametrize('size, near', [(100, '96 or 112'), (5, '16'), (0, '16')])
def test_a_batch_that_cannot_be_split_is_rejected_with_sizes_that_can(size, near):
    with pytest.raises(UserError, match=f'batch_size={size} .*: {near}$'):
        check_batch_size(size, make_mesh(MeshConfig()), accumulation_steps=2)


def test_devices_of_the_tensor_axis_share_the_rows_of_a_batch():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2))
    check_batch_size(4, mesh, accumulation_steps=1)
    with pytest.raises(UserError, match=r'not a multiple of 4 \(data x fsdp\).*: 4 or 8$'):
        check_batch_size(6, mesh, accumulation_steps=1)


def test_one_axis_takes_the_devices_that_the_others_leave():
    assert make_mesh(MeshConfig(fsdp=2)).shape == {'data': 4, 'fsdp': 2, 'tensor': 1}
    assert make_mesh(MeshConfig(data=2, fsdp=-1)).shape == {'data': 2, 'fsdp': 4, 'tensor': 1}
    assert make_mesh(MeshConfig(tensor=4)).shape == {'data': 2, 'fsdp': 1, 'tensor': 4}
    for wrong, name in (
        ({'data': 3, 'fsdp': 2}, 'data=3 x fsdp=2'),
        ({'fsdp': 16}, 'fsdp=16'),
        ({'data': -1, 'fsdp': -1}, 'fsdp=-1'),
        ({'tensor': 0}, 'tensor=0'),
        ({'fsdp_min_mb': -1.0}, 'fsdp_min_mb'),
        ({'max_replicated_fraction': 1.1}, 'max_replicated_fraction'),
    ):
        with pytest.raises(UserError, match=name):
            make_mesh(MeshConfig(**wrong))


def test_slices_are_spread_over_data_and_over_nothing_else(monkeypatch):
    """The even and the odd devices are a slice each: within data they are not mixed."""
    monkeypatch.setattr('vit_jax.distributed.meshes.slice_index', lambda device: device.id % 2)
    laid = make_mesh(MeshConfig(fsdp=2)).devices
    assert laid.shape == (4, 2, 1)
    assert [[d.id % 2 for d in row.flat] for row in laid] == [[0, 0], [0, 0], [1, 1], [1, 1]]
    with pytest.raises(UserError, match='data=1'):
        make_mesh(MeshConfig(data=1, fsdp=8))


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


STATE = {
    'params': {
        'encoder': {
            'block': {
                'attention': {
                    'query': {'kernel': leaf(4, 8, 2, 4), 'bias': leaf(4, 2, 4)},
                    'out': {'kernel': leaf(4, 2, 4, 8), 'bias': leaf(4, 8)},
                    'relative': leaf(4, 9, 2, 4),
                },
                'mlp': {
                    'dense1': {'kernel': leaf(4, 8, 16), 'bias': leaf(4, 16)},
                    'dense2': {'kernel': leaf(4, 16, 8), 'bias': leaf(4, 8)},
                },
            }
        },
        'head': {'kernel': leaf(8, 10)},
    },
    'opt_state': {'mu': {'head': {'kernel': leaf(8, 10)}}, 'nu': {'head': {'kernel': leaf(1)}}},
}


def specs(config, state=STATE):
    places = shardings_for(state, make_mesh(config), config)
    return {name: tuple(sharding.spec) for name, sharding in named_leaves(places).items()}


def test_large_leaves_are_split_along_their_largest_axis_but_not_along_depth():
    tree = {
        'encoder': {'block': {'kernel': leaf(64, 8, 12)}},
        'head': {'kernel': leaf(8, 64), 'bias': leaf(64)},
        'odd': leaf(63, 65),
    }
    assert specs(MeshConfig(fsdp=4, fsdp_min_mb=0.001), tree) == {
        'encoder/block/kernel': (None, None, 'fsdp'),
        'head/kernel': (None, 'fsdp'),
        'head/bias': (),  # too small
        'odd': (),  # 4 divides neither axis
    }


def test_tensor_splits_heads_and_hidden_layers_and_fsdp_the_rest():
    found = specs(MeshConfig(data=2, fsdp=2, tensor=2, fsdp_min_mb=0.0))
    block = 'params/encoder/block'
    assert found[f'{block}/attention/query/kernel'] == (None, 'fsdp', 'tensor')
    assert found[f'{block}/attention/query/bias'] == (None, 'tensor', 'fsdp')
    assert found[f'{block}/attention/out/kernel'] == (None, 'tensor', None, 'fsdp')
    assert found[f'{block}/attention/relative'] == (None, None, 'tensor', 'fsdp')
    assert found[f'{block}/mlp/dense1/kernel'] == (None, 'fsdp', 'tensor')
    assert found[f'{block}/mlp/dense2/kernel'] == (None, 'tensor', 'fsdp')
    assert found['params/head/kernel'] == found['opt_state/mu/head/kernel'] == (None, 'fsdp')
    assert found['opt_state/nu/head/kernel'] == ()


def test_a_rule_of_the_configuration_comes_first_and_is_checked():
    rules = (('head/kernel', ('fsdp', None)),)
    found = specs(MeshConfig(fsdp=4, fsdp_min_mb=0.0, rules=rules))
    assert found['params/head/kernel'] == found['opt_state/mu/head/kernel'] == ('fsdp', None)
    assert found['opt_state/nu/head/kernel'] == ()  # of another shape
    for rule, name in (
        (('heads/kernel', ('fsdp',)), 'heads/kernel'),
        (('head/kernel', ('fdsp',)), 'fdsp'),
        (('mlp/dense2/bias', (None, None, 'fsdp')), 'mlp/dense2/bias'),  # it has two axes
        (('head/kernel', (None, 'fsdp')), 'head/kernel .* 10 .*fsdp=4'),
    ):
        with pytest.raises(UserError, match=name):
            specs(MeshConfig(fsdp=4, rules=(rule,)))


@pytest.mark.parametrize(
    'config, name',
    [
        (MeshConfig(fsdp=8), 'max_replicated_fraction'),
        (MeshConfig(tensor=8, fsdp_min_mb=0.0), 'attention'),
        (MeshConfig(), None),
        (MeshConfig(fsdp=2, fsdp_min_mb=0.0), None),
    ],
)
def test_a_state_that_stays_replicated_although_it_should_be_split_is_an_error(config, name):
    mesh = make_mesh(config)
    with pytest.raises(UserError, match=name) if name else contextlib.nullcontext():
        require_sharded(STATE, shardings_for(STATE, mesh, config), mesh, config)


def test_the_report_names_each_split_and_the_bytes_on_a_device():
    config = MeshConfig(data=2, fsdp=2, tensor=2, fsdp_min_mb=0.0)
    mesh = make_mesh(config)
    places = shardings_for(STATE, mesh, config)
    lines = sharding_report(STATE, places, mesh)
    (row,) = (line for line in lines if 'mlp/dense1/kernel' in line)
    assert '[4, 8, 16]' in row and re.search('fsdp [a-z ]+ 1, tensor [a-z ]+ 2', row)
    arrays = jax.tree.map(
        lambda x, to: jax.device_put(np.zeros(x.shape, x.dtype), to), STATE, places
    )
    here = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(arrays))
    assert f'{here / 1e6:.2f} MB' in lines[-1]


def test_a_process_reads_the_rows_of_its_devices(monkeypatch):
    """The devices of a process need not be neighbors, as on the torus of a TPU."""
    devices = [ALL[n] for n in (0, 4, 1, 5, 2, 6, 3, 7)]
    sharding = batch_sharding(make_mesh(MeshConfig(fsdp=2), devices))
    assert list(local_rows(sharding, 16)) == list(range(16))
    indices = sharding.addressable_devices_indices_map((16,))
    own = {device: index for device, index in indices.items() if device.id < 4}
    monkeypatch.setattr(type(sharding), 'addressable_devices_indices_map', lambda *_: own)
    assert list(local_rows(sharding, 16)) == [0, 1, 4, 5, 8, 9, 12, 13]
