"""Bytes that a device sends, counted in compiled programs."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.communication import Sent, least, sent
from vit_jax.distributed import meshes
from vit_jax.distributed.meshes import MeshConfig

STEPS, SIZE = 5, 4 * 64
COLLECTIVES = {
    'all-gather': (lambda x: lax.all_gather(x, 'data').sum(0), 7),
    'all-reduce': (lambda x: lax.psum(x, 'data'), 2 * 7 / 8),
    'reduce-scatter': (
        lambda x: jnp.tile(lax.psum_scatter(x, 'data', scatter_dimension=0, tiled=True), 8),
        7 / 8,
    ),
    'collective-permute': (lambda x: lax.ppermute(x, 'data', [(n, n ^ 1) for n in range(8)]), 1),
}


@pytest.mark.parametrize('kind', COLLECTIVES)
def test_what_is_sent_in_a_loop_counts_as_often_as_it_runs(kind):
    """Of a ring of eight devices, by the known cost of each collective."""
    collective, ring = COLLECTIVES[kind]
    mesh, parts = Mesh(jax.devices(), ('data',)), PartitionSpec('data')

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=parts, out_specs=parts, check_vma=False)
    def loop(x):
        return lax.scan(lambda x, _: (jnp.sin(collective(x)), None), x, length=STEPS)[0]

    x = jax.ShapeDtypeStruct((8 * 64,), 'float32')
    text = jax.jit(loop).lower(x).compile().as_text()
    assert sent(text, 8) == {kind: Sent(STEPS, STEPS * ring * SIZE)}


@pytest.mark.parametrize(
    'data, fsdp, expected', [(8, 1, 2 * 7 / 8), (1, 8, 3 * 7 / 8), (2, 4, 3 * 3 / 4 + 1 / 4)]
)
def test_the_least_is_that_of_rings(data, fsdp, expected):
    """Of a kernel that fsdp splits: two gathers, a scatter, and the sum over data of a part."""
    mesh = meshes.make_mesh(MeshConfig(data=data, fsdp=fsdp))
    split = NamedSharding(mesh, PartitionSpec(None, 'fsdp' if fsdp > 1 else None))
    kernel = jax.ShapeDtypeStruct((16, 64), 'float32', sharding=split)
    assert least([kernel], mesh, itemsize=2) == expected * 16 * 64 * 2


def test_the_least_over_tensor_is_a_sum_of_each_branch_forward_and_backward():
    mesh = meshes.make_mesh(MeshConfig(data=2, tensor=4))
    kernel = jax.ShapeDtypeStruct((16,), 'float32', sharding=NamedSharding(mesh, PartitionSpec()))
    of_gradient = 2 * 1 / 2 * 16 * 2  # over data
    of_branches = 2 * (2 * 3 / 4) * 1000 * 2
    assert least([kernel], mesh, itemsize=2, branches=1000) == of_gradient + of_branches
