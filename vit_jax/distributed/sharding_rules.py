"""Sharding of the train state: rules over names and shapes, and a report of the result."""

import math
import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.base import UserError, tree_names
from vit_jax.distributed.meshes import MeshConfig, Spec, format_mesh

# The axis, from the end, that tensor splits: attention heads or the hidden layer. The first matrix
# of a pair is split along its output and the second along its input, so that no communication is
# needed between the two (Megatron-LM, arXiv:1909.08053, section 3).
_TENSOR = (
    (r'attention/((query|key|value)/(kernel|bias)|relative)', -2),
    (r'attention/out/kernel', -3),
    (r'mlp/(dense1|gate)/(kernel|bias)', -1),
    (r'mlp/dense2/kernel', -2),
)


def shardings_for(state: Any, mesh: Mesh, config: MeshConfig) -> Any:
    """Returns the sharding of each leaf of a state, from its name and shape.

    The first of `config.rules` that matches decides. Otherwise tensor splits attention heads and
    hidden layers, and fsdp splits leaves of at least `fsdp_min_mb` along the largest axis that is
    still whole and divisible by its size. The depth axis of stacked blocks is never split, because
    the scan runs over it. The same rules apply to the optimizer's copies of a parameter.

    Raises:
      UserError: If a rule matches no leaf, or does not fit the shape of a leaf.
    """
    names = tree_names.named_leaves(state)
    for pattern, _ in config.rules:
        if not any(_matches(pattern, name) for name in names):
            raise UserError(f'config.mesh.rules: {pattern!r} matches no array of the state')

    def sharding(name: str, leaf: Any) -> NamedSharding:
        rule = next((axes for pattern, axes in config.rules if _matches(pattern, name)), None)
        if rule is not None:
            misfit = _explain_misfit(leaf, rule, mesh)
            if misfit is None:
                return NamedSharding(mesh, PartitionSpec(*rule))
            # The optimizer's state of a parameter may have another shape than the parameter.
            if not name.startswith('opt_state/'):
                raise UserError(
                    f'config.mesh.rules: {rule} for {name} {list(leaf.shape)}: {misfit}'
                )
        axes = _choose_axes(name, leaf, mesh, config.fsdp_min_mb)
        return NamedSharding(mesh, PartitionSpec(*axes))

    return tree_names.map_named(sharding, state)


def _matches(pattern: str, name: str) -> bool:
    """Returns whether the pattern matches a parameter's name, alone or after a prefix."""
    return re.fullmatch(f'(.*/)?{pattern}', name) is not None


def _choose_axes(name: str, leaf: Any, mesh: Mesh, fsdp_min_mb: float) -> Spec:
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


def _explain_misfit(leaf: Any, axes: Spec, mesh: Mesh) -> str | None:
    """Returns why these axes cannot split the leaf, or None if they can."""
    if len(axes) > leaf.ndim:
        return f'the array has only {leaf.ndim} axes'
    for size, axis in zip(leaf.shape, axes, strict=False):
        if axis is not None and size % mesh.shape[axis]:
            return f'{size} is not a multiple of {axis}={mesh.shape[axis]}'
    return None


def sharding_report(state: Any, shardings: Any, mesh: Mesh) -> list[str]:
    """Returns lines about the split parameters and their size per device, and replicated arrays."""
    if mesh.size == 1:
        return []
    by_name = tree_names.named_leaves(shardings)
    leaves = tree_names.named_leaves(state)
    local_bytes = {
        name: _bytes(leaf, by_name[name].shard_shape(leaf.shape)) for name, leaf in leaves.items()
    }
    lines = [f'mesh {format_mesh(mesh)}; sharded parameters, mesh axes, megabytes per device:']
    replicated = []
    for name in leaves:
        if not name.startswith('params/'):
            continue
        spec = by_name[name].spec
        split_axes = [f'{axis} on axis {n}' for n, axis in enumerate(spec) if axis]
        if split_axes:
            label = f'{name.removeprefix("params/")} {list(leaves[name].shape)}'
            size = _mb(local_bytes[name])
            lines.append(f'  {label:<64}{", ".join(split_axes):<36}{size:>14}')
        else:
            replicated.append(local_bytes[name])
    lines.append(f'  replicated parameters: {len(replicated)} arrays, {_mb(sum(replicated))}')
    total = _mb(sum(map(_bytes, leaves.values())))
    per_device = _mb(sum(local_bytes.values()))
    return [*lines, f'state with optimizer: {total} in total, {per_device} per device']


def require_sharded(state: Any, shardings: Any, mesh: Mesh, config: MeshConfig) -> None:
    """Raises UserError if more than `max_replicated_fraction` of the state is replicated."""
    if mesh.shape['fsdp'] * mesh.shape['tensor'] == 1:  # no axis splits the state
        return
    by_name = tree_names.named_leaves(shardings)
    leaves = tree_names.named_leaves(state)
    replicated = {
        name: _bytes(leaf) for name, leaf in leaves.items() if not any(by_name[name].spec)
    }
    share = sum(replicated.values()) / sum(map(_bytes, leaves.values()))
    if share > config.max_replicated_fraction:
        largest = sorted(replicated, key=lambda name: -replicated[name])[:3]
        named = ', '.join(f'{name} {list(leaves[name].shape)}' for name in largest)
        raise UserError(
            f'mesh {format_mesh(mesh)}: {share:.0%} of the state is replicated; expected at most '
            f'{config.max_replicated_fraction:.0%} (max_replicated_fraction). Largest arrays: '
            f'{named}. Reduce --config.mesh.fsdp_min_mb={config.fsdp_min_mb:g}, set '
            f'--config.mesh.rules, or choose axis sizes that divide these shapes'
        )


def abstract_arrays(values: Any, shardings: Any) -> Any:
    """Returns shape, dtype and sharding of each array of a tree as a jax.ShapeDtypeStruct."""
    return jax.tree.map(
        lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), values, shardings
    )


def get_shardings(abstract: Any) -> Any:
    """Returns the shardings of abstract arrays."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def _bytes(leaf: Any, shape: tuple[int, ...] | None = None) -> int:
    return math.prod(leaf.shape if shape is None else shape) * leaf.dtype.itemsize


def _mb(count: int) -> str:
    return f'{count / 1e6:,.2f} MB'
