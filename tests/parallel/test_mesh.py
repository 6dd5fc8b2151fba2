import jax
import numpy as np
import pytest

from tests import tiny
from vit_jax import setup as setups
from vit_jax.data import pipeline, sources
from vit_jax.models import Regularization
from vit_jax.parallel.mesh import MeshConfig, check_batch_size, make_mesh
from vit_jax.parallel.placement import place
from vit_jax.training.duration import Length
from vit_jax.tree import named_leaves

STEPS, ALL = 50, jax.devices()


def trained(mesh: MeshConfig, devices: int, monkeypatch):
    """Initial parameters and the losses of 50 steps on a mesh of some of the eight devices."""
    some = ALL[:devices]
    monkeypatch.setattr(jax, 'devices', lambda: some)
    config = tiny.experiment(
        mesh=mesh,
        polyak_decay=0.9,
        regularization=Regularization(dropout=0.1),
    )
    model = setups.trained_model(config, None, tuple('0123456789'))
    length = Length(config.batch_size, 1438, STEPS)
    setup = setups.prepare(config, None, model, length=length)
    programs = setups.compile_training(setup)
    state = programs.init()
    initial = jax.tree.map(np.asarray, state.params)
    sizes = {
        name: leaf.addressable_shards[0].data.size for name, leaf in named_leaves(state).items()
    }
    feed = setups.Feeds(setup, sources.open_source).training()
    losses = []
    for batch in pipeline.training_batches(feed, steps=range(STEPS), batch_size=16, seed=0):
        state, metrics = programs.update(state, batch)
        losses.append(float(metrics['loss']))
    return initial, np.array(losses), sizes


def test_every_mesh_begins_with_the_same_bits_and_trains_alike(monkeypatch):
    initial, losses, whole = trained(MeshConfig(), 1, monkeypatch)
    assert losses[-1] < losses[0]
    for data, fsdp in (8, 1), (4, 2), (1, 8):
        config = MeshConfig(data=data, fsdp=fsdp, fsdp_min_mb=0.0)
        other, found, sizes = trained(config, 8, monkeypatch)
        jax.tree.map(np.testing.assert_array_equal, other, initial)
        np.testing.assert_allclose(found, losses, rtol=1e-6)
        for copy in 'params', 'average', 'optimizer/1/mu', 'optimizer/1/nu':
            name = f'{copy}/encoder/block/mlp/dense1/kernel'
            assert sizes[name] == whole[name] // fsdp, name


def test_large_leaves_are_split_along_their_largest_axis_but_not_along_depth():
    config = MeshConfig(fsdp=4, fsdp_min_mb=0.001)
    mesh = make_mesh(config)
    leaf = jax.ShapeDtypeStruct
    tree = {
        'encoder': {'block': {'kernel': leaf((64, 8, 12), np.float32)}},
        'head': {'kernel': leaf((8, 64), np.float32), 'bias': leaf((64,), np.float32)},
        'odd': leaf((63, 65), np.float32),
    }
    specs = {name: s.spec for name, s in named_leaves(place(tree, mesh, config)).items()}
    assert specs['encoder/block/kernel'] == jax.P(None, None, 'fsdp')
    assert specs['head/kernel'] == jax.P(None, 'fsdp')
    assert specs['head/bias'] == jax.P() and specs['odd'] == jax.P()  # too small; does not divide


def test_a_mesh_that_does_not_fit_the_devices_says_which_would():
    with pytest.raises(
        ValueError, match='data=3 x fsdp=2 x tensor=1 does not make 8 devices.* 4, 8'
    ):
        make_mesh(MeshConfig(data=3, fsdp=2))
    with pytest.raises(ValueError, match='expected sizes of 1 or more, at most one -1'):
        make_mesh(MeshConfig(fsdp=0))
    assert make_mesh(MeshConfig(fsdp=2)).shape == {'data': 4, 'fsdp': 2, 'tensor': 1}


@pytest.mark.parametrize('size, near', [(100, '96 or 112'), (5, '16'), (0, '16')])
def test_a_batch_that_cannot_be_split_says_which_could(size, near):
    with pytest.raises(ValueError, match=f'batch_size={size} .* 8 devices .*nearest: {near}$'):
        check_batch_size(size, make_mesh(MeshConfig()), accumulation_steps=2)
