"""Muon against optax.contrib.muon, and how devices share its Newton-Schulz iterations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import tiny
from vit_jax.base.tree_names import named_leaves
from vit_jax.distributed.meshes import MeshConfig, jit_on, make_mesh
from vit_jax.distributed.sharding_rules import shardings_for
from vit_jax.models import Backbone, abstract_params
from vit_jax.planning.memory_plan import count_update_operations
from vit_jax.training.optimizer import OptimizerConfig, make_optimizer
from vit_jax.training.param_groups import make_param_groups

DEVICES = 8
DEPTH, RATE = 12, 0.5
BACKBONE = Backbone(blocks=(1, 1), width=32)
QUERY, OUT, CONVOLUTION = (
    'encoder/block/attention/query/kernel',
    'encoder/block/attention/out/kernel',
    'backbone/stage2/unit1/conv2/kernel',
)

CONFIG = OptimizerConfig(kind='muon')


def muon(shapes):
    return make_optimizer(CONFIG, lambda _: jnp.asarray(RATE), make_param_groups(CONFIG, shapes))


@functools.partial(jax.jit, static_argnums=0)
def two_updates(optimizer, params, gradient):
    _, state = optimizer.update(gradient, optimizer.init(params), params)
    return optimizer.update(jax.tree.map(jnp.cos, gradient), state, params)[0]


@pytest.mark.gate
def test_kernels_of_other_shapes_move_as_their_matrices_by_optax_alone():
    """In float64: the iterations multiply rounding of small singular values by up to 480."""
    shapes = abstract_params(tiny.model(width=64, patch_size=(1, 1), backbone=BACKBONE))
    optimizer = muon(shapes)
    params, gradient = tiny.random_params(shapes), tiny.random_params(shapes, scale=0.01)
    with jax.enable_x64(True):
        params, gradient = (jax.tree.map(np.float64, tree) for tree in (params, gradient))
        found = named_leaves(two_updates(optimizer, params, gradient))
        gradients = named_leaves(gradient)
        for name, index in ((QUERY, 0), (OUT, 1), (CONVOLUTION, ...)):
            outputs = gradients[name].shape[-1] if name != QUERY else 64
            matrix = gradients[name][index].reshape(-1, outputs)
            single = optax.contrib.muon(RATE, consistent_rms=0.2, mu_dtype='float32')
            expected = two_updates(single, matrix, matrix).reshape(found[name][index].shape)
            np.testing.assert_allclose(found[name][index], expected, atol=1e-6)


def lower_update(optimizer, shapes, **sizes):
    """The update on a mesh, traced; the places of its arguments; the operations that it counts."""
    config = MeshConfig(fsdp_min_mb=0.0, **sizes)
    mesh = make_mesh(config, jax.devices() if sizes else jax.devices()[:1])
    arguments = shapes, jax.eval_shape(optimizer.init, shapes), shapes
    places = shardings_for(arguments, mesh, config)
    step = jit_on(optimizer.update, mesh, in_shardings=places, out_shardings=places[:2])
    operations = count_update_operations(CONFIG, shapes, mesh)
    return step.lower(*arguments), places, operations


@pytest.mark.parametrize(
    'sizes',
    [
        pytest.param({'data': 8}, marks=pytest.mark.nightly),
        pytest.param({'data': 1, 'fsdp': 8}, marks=pytest.mark.nightly),
        pytest.param({'fsdp': 2, 'tensor': 2}, marks=pytest.mark.gate),
    ],
)
def test_devices_share_the_blocks_and_the_updates_stay_the_same(sizes):
    """12 blocks on 8 devices are 2 each. Products are all but 5 % of the operations."""
    shapes = abstract_params(tiny.model(depth=DEPTH, width=64, mlp_dim=128))
    params, gradient = tiny.random_params(shapes), tiny.random_params(shapes, scale=0.01)
    optimizer = muon(shapes)
    alone, split = lower_update(optimizer, shapes), lower_update(optimizer, shapes, **sizes)
    assert 'sharding_constraint' not in alone[0].as_text() and ' pad' not in alone[0].as_text()
    assert split[2] == alone[2] * 2 / DEPTH
    updates = []
    for lowered, places, operations in (alone, split):
        compiled = lowered.compile()
        assert compiled.cost_analysis()['flops'] == pytest.approx(operations, rel=0.05)
        inputs = jax.device_put((gradient, optimizer.init(params), params), places)
        updates.append(named_leaves(compiled(*inputs)[0]))
    for name, leaf in updates[1].items():
        np.testing.assert_allclose(leaf, updates[0][name], atol=1e-6, err_msg=name)
