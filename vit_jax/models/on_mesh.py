"""How activations lie on devices: by the mesh of the program that is being traced.

It is that of jax's context, where `distributed.meshes.traced_on` or `jax.set_mesh` put it. Its axes
data and fsdp split the batch, tensor the heads of attention. Without such a mesh nothing is said.
"""

import math
from collections.abc import Callable

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from vit_jax.base import Array, Float

_BATCH, _HEADS = ('data', 'fsdp'), ('tensor',)


def keep_split(x: Float[Array, 'b ...']) -> Float[Array, 'b ...']:
    """The same activations, with a hint for the compiler to keep examples split.

    Without it the compiler may gather the batch rather than the parameters, and run out of memory.
    """
    mesh = _mesh()
    if mesh is None or _split_over(mesh, _BATCH, x.shape[0]) is None:  # the one image of `init`
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(_BATCH))


def is_known() -> bool:
    """Is it known which part of the activations each device has? A single device has them all."""
    is_alone = jax.device_count() == 1 and jax.sharding.get_abstract_mesh().empty
    return is_alone or _mesh() is not None


def on_each_device(
    function: Callable[..., Array], *arrays: Float[Array, '...']
) -> Float[Array, 'b q h k']:
    """The function of these arrays (b n h k), called by each device for its examples and heads."""
    mesh = _mesh()
    if mesh is None:
        return function(*arrays)
    batch, _, heads, _ = arrays[0].shape
    by_example, by_head = _split_over(mesh, _BATCH, batch), _split_over(mesh, _HEADS, heads)
    spec = PartitionSpec(by_example, None, by_head, None)
    split = jax.shard_map(function, in_specs=spec, out_specs=spec, check_vma=False)
    return split(*arrays)


def _mesh() -> AbstractMesh | None:
    """The mesh of the context, if it has these axes, all of the type Auto, which takes hints."""
    mesh = jax.sharding.get_abstract_mesh()
    is_ours = {*_BATCH, *_HEADS} <= {*mesh.axis_names}
    return mesh if is_ours and {*mesh.axis_types} == {AxisType.Auto} else None


def _split_over(mesh: AbstractMesh, axes: tuple[str, ...], size: int) -> tuple[str, ...] | None:
    """These axes, if an array's axis of this size can be split over them."""
    return None if size % math.prod(mesh.shape[axis] for axis in axes) else axes
