"""Sharding of activations over the mesh in jax's context.

`distributed.meshes.with_mesh` or `jax.set_mesh` sets the mesh. Its axes `data` and `fsdp` shard the
batch, `tensor` shards attention heads. Without a mesh with these axes, sharding is left to XLA.
"""

import math
from collections.abc import Callable

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from vit_jax.base import Array, Float

# Mesh axes that shard the batch, and the attention heads.
_BATCH = ('data', 'fsdp')
_HEADS = ('tensor',)


def keep_sharded(x: Float[Array, 'b ...']) -> Float[Array, 'b ...']:
    """Constrains the batch axis of activations to stay sharded.

    Otherwise XLA may gather the batch rather than the parameters, and run out of memory.
    """
    mesh = mesh_in_context()
    # A batch that cannot be split, such as the single image of `init`, is not constrained.
    is_eager = jax.config.values['jax_disable_jit']  # eager arrays already have a sharding
    if mesh is None or is_eager or _split_over(mesh, _BATCH, x.shape[0]) is None:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(_BATCH))


def is_sharding_known() -> bool:
    """Returns whether the sharding of arrays is known: one device, or a mesh in context."""
    is_alone = jax.device_count() == 1 and jax.sharding.get_abstract_mesh().empty
    return is_alone or mesh_in_context() is not None


def map_shards(
    function: Callable[..., Array], *arrays: Float[Array, '...']
) -> Float[Array, 'b q h k']:
    """Applies a function to arrays (b n h k); each device computes its own examples and heads."""
    mesh = mesh_in_context()
    if mesh is None:
        return function(*arrays)
    batch, _, heads, _ = arrays[0].shape
    batch_axes = _split_over(mesh, _BATCH, batch)
    head_axes = _split_over(mesh, _HEADS, heads)
    spec = PartitionSpec(batch_axes, None, head_axes, None)
    sharded = jax.shard_map(function, in_specs=spec, out_specs=spec, check_vma=False)
    return sharded(*arrays)


def mesh_in_context() -> AbstractMesh | None:
    """Returns the context's mesh if it has axes data, fsdp, tensor, and all its axes are Auto.

    The sharding of arrays over axes of another type cannot be constrained.
    """
    mesh = jax.sharding.get_abstract_mesh()
    has_axes = {*_BATCH, *_HEADS} <= {*mesh.axis_names}
    return mesh if has_axes and {*mesh.axis_types} == {AxisType.Auto} else None


def _split_over(mesh: AbstractMesh, axes: tuple[str, ...], size: int) -> tuple[str, ...] | None:
    """Returns the axes if an array axis of this size can be split over them, otherwise None."""
    return None if size % math.prod(mesh.shape[axis] for axis in axes) else axes
