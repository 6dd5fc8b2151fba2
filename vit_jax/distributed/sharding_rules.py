"""How each array of the state is sharded: rules over names and shapes, and a report of them."""

import math
import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.base import UserError, tree_names
from vit_jax.distributed.meshes import MeshConfig, Spec, describe

# The axis, from the end, that tensor splits: heads, and the hidden layer. The first matrix of a
# pair is split along its output and the second along its input, so that nothing is exchanged
# between the two (Megatron-LM, arXiv:1909.08053, section 3).
_TENSOR = (
    (r'attention/((query|key|value)/(kernel|bias)|relative)', -2),
    (r'attention/out/kernel', -3),
    (r'mlp/(dense1|gate)/(kernel|bias)', -1),
    (r'mlp/dense2/kernel', -2),
)


def shardings_for(state: Any, mesh: Mesh, config: MeshConfig) -> Any:
    """Returns the sharding of each leaf of a state, from its name and shape.

    The first of `config.rules` that matches decides. Else heads and hidden layers are split over
    tensor, and a large leaf over fsdp along the largest remaining axis that it divides, never the
    depth of stacked blocks, over which the scan runs. Only names and shapes count, also for the
    optimizer's copies of a parameter. Raises UserError for a rule that fits nothing.
    """
    names = tree_names.named_leaves(state)
    for pattern, _ in config.rules:
        if not any(_matches(pattern, name) for name in names):
            raise UserError(f'config.mesh.rules: {pattern!r} matches no array of the state')

    def sharding(name: str, leaf: Any) -> NamedSharding:
        given = next((axes for pattern, axes in config.rules if _matches(pattern, name)), None)
        if given is not None and not (wrong := _misfit(leaf, given, mesh)):
            return NamedSharding(mesh, PartitionSpec(*given))
        # What the optimizer keeps of a parameter may have another shape than the parameter.
        if given is not None and not name.startswith('opt_state/'):
            raise UserError(f'config.mesh.rules: {name} {list(leaf.shape)} by {given}: {wrong}')
        return NamedSharding(mesh, PartitionSpec(*_axes(name, leaf, mesh, config.fsdp_min_mb)))

    return tree_names.map_named(sharding, state)


def _matches(pattern: str, name: str) -> bool:
    """Returns whether the name is that of this parameter, or of the optimizer's copy of it."""
    return re.fullmatch(f'(.*/)?{pattern}', name) is not None


def _axes(name: str, leaf: Any, mesh: Mesh, fsdp_min_mb: float) -> Spec:
    axes: list[str | None] = [None] * leaf.ndim

    def divides(axis: int, by: str) -> bool:
        return mesh.shape[by] > 1 and axes[axis] is None and leaf.shape[axis] % mesh.shape[by] == 0

    for pattern, axis in _TENSOR:
        if _matches(pattern, name) and leaf.ndim >= -axis and divides(axis, 'tensor'):
            axes[axis] = 'tensor'
    first = 1 if 'encoder/block/' in name else 0
    free = [axis for axis in range(first, leaf.ndim) if divides(axis, 'fsdp')]
    if free and _bytes(leaf) >= fsdp_min_mb * 2**20:
        axes[max(free, key=lambda axis: leaf.shape[axis])] = 'fsdp'
    while axes and axes[-1] is None:
        axes.pop()
    return tuple(axes)


def _misfit(leaf: Any, axes: Spec, mesh: Mesh) -> str | None:
    """Returns why the axes cannot split the leaf; None if they can."""
    if len(axes) > leaf.ndim:
        return 'more axes than the array has'
    for size, axis in zip(leaf.shape, axes, strict=False):
        if axis is not None and size % mesh.shape[axis]:
            return f'{size} is not a multiple of {axis}={mesh.shape[axis]}'
    return None


def sharding_report(state: Any, shardings: Any, mesh: Mesh) -> list[str]:
    """Returns lines: how each parameter is split, its bytes on a device, and what is replicated."""
    if mesh.size == 1:
        return []
    places, leaves = tree_names.named_leaves(shardings), tree_names.named_leaves(state)
    here = {n: _bytes(leaf, places[n].shard_shape(leaf.shape)) for n, leaf in leaves.items()}
    lines = [f'mesh {describe(mesh)}; parameters, the axes that split them, megabytes on a device:']
    replicated = []
    for name in [name for name in leaves if name.startswith('params/')]:
        if split := ', '.join(f'{a} on axis {n}' for n, a in enumerate(places[name].spec) if a):
            label = f'{name.removeprefix("params/")} {list(leaves[name].shape)}'
            lines.append(f'  {label:<64}{split:<36}{_mb(here[name]):>14}')
        else:
            replicated.append(here[name])
    lines.append(f'  replicated arrays: {len(replicated)}, {_mb(sum(replicated))}')
    total, size = _mb(sum(map(_bytes, leaves.values()))), _mb(sum(here.values()))
    return [*lines, f'state, optimizer included: {total}, of which {size} on each device']


def check_split(state: Any, shardings: Any, mesh: Mesh, config: MeshConfig) -> None:
    """Raises UserError if more of the state is replicated than allowed."""
    if mesh.shape['fsdp'] * mesh.shape['tensor'] == 1:  # no axis splits it
        return
    places, leaves = tree_names.named_leaves(shardings), tree_names.named_leaves(state)
    replicated = {name: _bytes(leaf) for name, leaf in leaves.items() if not any(places[name].spec)}
    share = sum(replicated.values()) / sum(map(_bytes, leaves.values()))
    if share > config.max_replicated_fraction:
        largest = sorted(replicated, key=lambda name: -replicated[name])[:3]
        named = ', '.join(f'{name} {list(leaves[name].shape)}' for name in largest)
        raise UserError(
            f'mesh {describe(mesh)}: {share:.0%} of the state would be replicated, '
            f'max_replicated_fraction={config.max_replicated_fraction:.0%} is allowed; largest: '
            f'{named}. Lower config.mesh.fsdp_min_mb={config.fsdp_min_mb:g}, give '
            f'config.mesh.rules, or choose axes that divide these'
        )


def abstract(values: Any, shardings: Any) -> Any:
    """Returns shape, type and sharding of each array of a tree, without the arrays."""
    return jax.tree.map(
        lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), values, shardings
    )


def _bytes(leaf: Any, shape: tuple[int, ...] | None = None) -> int:
    return math.prod(leaf.shape if shape is None else shape) * leaf.dtype.itemsize


def _mb(count: int) -> str:
    return f'{count / 1e6:,.2f} MB'
