"""Bytes that a device sends, counted in compiled programs and in the text of one of a TPU."""

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


TPU = """\
%scatter (x: f32[64]) -> f32[16] {
  %x = f32[64]{0} parameter(0)
  %all = f32[64]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%a
  ROOT %slice = f32[16]{0} dynamic-slice(%all, %zero), dynamic_slice_sizes={16}
}

%start (y: bf16[64]) -> bf16[512] {
  %y = bf16[64]{0:T(256)} parameter(0)
  %all = bf16[512] all-gather(%y), channel_id=2, replica_groups=mesh['b'=4], device_ids=([4]) {'b'}
}

%overlapped (y.1: bf16[64]) -> bf16[512] {
  %y.1 = bf16[64]{0:T(256)} parameter(0)
  ROOT %gather.1 = bf16[512]{0} all-gather(%y.1), channel_id=2, replica_groups=mesh['a'=2] {'a'}
}

%body (before: (f32[64], u32[])) -> (f32[64], u32[]) {
  %before = (f32[64]{0}, u32[]) parameter(0)
  %count = u32[] get-tuple-element(%before), index=1
  %value = f32[64]{0} get-tuple-element(%before), index=0
  %two = u32[] constant(2)
  %next = u32[] add(%count, %two)
  %kernel = f32[64]{0} custom-call(%value), frontend_attributes={kernel_metadata={
"block": 512
}}, custom_call_target="tpu_custom_call"
  %reduced = f32[16]{0} fusion(%value), kind=kCustom, calls=%scatter
  %whole = f32[64]{0} all-reduce(%value), channel_id=3, replica_groups=[4,2]<=[8], to_apply=%a
  %other = f32[16]{0} dynamic-slice(%value, %count), dynamic_slice_sizes={16}
  %hidden = bf16[512]{0} fusion(%value), kind=kCustom, calls=%overlapped
  ROOT %after = (f32[64]{0}, u32[]) tuple(%value, %next)
}

%condition (carried: (f32[64], u32[])) -> pred[] {
  %carried = (f32[64]{0}, u32[]) parameter(0)
  %limit = u32[] constant(24)
  %counted = u32[] get-tuple-element(%carried), index=1
  ROOT %less = pred[] compare(%counted, %limit), direction=LT
}

ENTRY %main (input: f32[64], part: bf16[64]) -> f32[64] {
  %input = f32[64]{0} parameter(0)
  %part = bf16[64]{0} parameter(1)
  %zero = u32[] constant(4)
  %copied = u32[] copy(%zero)
  %begun = bf16[512]{0} fusion(%part), kind=kCustom, calls=%start
  %both = (f32[64]{0}, u32[]) tuple(%input, %copied)
  %loop = (f32[64]{0}, u32[]) while(%both), condition=%condition, body=%body
  ROOT %out = f32[64]{0} get-tuple-element(%loop), index=0
}
"""


def test_a_program_for_tpus_is_read():
    """Loops that count by two, a reduce-scatter in two halves, a gather that overlaps a loop, a sum
    beside which something else is sliced, and a kernel whose configuration takes several lines.
    """
    assert sent(TPU, 8) == {
        'all-gather': Sent(1, 3 * 128),
        'all-reduce': Sent(10, 10 * 2 * 1 / 2 * 256),
        'reduce-scatter': Sent(10, 10 * 3 / 4 * 256),
    }


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
