"""What a network says of its activations, by the mesh in jax's context."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from vit_jax.distributed import meshes
from vit_jax.distributed.meshes import MeshConfig
from vit_jax.models import activation_sharding

DEVICES = 8


def mesh_of(shape, names=meshes.AXES, kind=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


@pytest.mark.parametrize(
    'mesh, batch, is_said',
    [
        (mesh_of((2, 2, 2)), 8, True),
        (mesh_of((2, 2, 2)), 6, False),  # four parts cannot be made of it
        (mesh_of((8,), ('x',)), 8, False),  # another's mesh
        (mesh_of((2, 2, 2), kind=AxisType.Explicit), 8, False),
    ],
)
def test_examples_are_kept_split_where_the_mesh_can_split_them(mesh, batch, is_said):
    keep = meshes.with_mesh(mesh, lambda x: activation_sharding.keep_sharded(x))
    program = str(jax.make_jaxpr(keep)(jnp.zeros((batch, 5, 3))))
    assert ('sharding_constraint' in program) == is_said


def test_a_program_of_a_run_is_traced_for_its_mesh():
    """Of trainings, evaluations and features alike."""
    mesh, seen = meshes.make_mesh(MeshConfig(fsdp=2)), []

    def function(x):
        seen.append(dict(jax.sharding.get_abstract_mesh().shape))
        return x

    meshes.jit_on(function, mesh)(jax.device_put(jnp.zeros(8), meshes.replicated(mesh)))
    assert seen == [{'data': 4, 'fsdp': 2, 'tensor': 1}]
