"""The devices as a mesh of data and fsdp axes, and what of the state lies where."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vit_jax import tree


@dataclasses.dataclass(kw_only=True)
class MeshConfig:
    """Devices by axis. Both axes split the batch; fsdp also splits parameters and optimizer state.

    Arrays smaller than `fsdp_min_mb` are kept whole on every device.
    """

    data: int | None = None  # None: the devices that fsdp leaves
    fsdp: int = 1
    fsdp_min_mb: float = 1.0


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of these devices, all by default. Raises ValueError where the axes do not fit."""
    devices = devices or jax.devices()
    count = len(devices)
    data = config.data or count // max(1, config.fsdp)
    if config.fsdp < 1 or data * config.fsdp != count:
        legal = ', '.join(f'{count // n}x{n}' for n in range(1, count + 1) if count % n == 0)
        raise ValueError(
            f'mesh: data={config.data} x fsdp={config.fsdp} does not make {count} devices; '
            f'data x fsdp may be {legal}'
        )
    return jax.make_mesh(
        (data, config.fsdp), ('data', 'fsdp'), (AxisType.Auto, AxisType.Auto), devices=devices
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Examples split over all devices."""
    return NamedSharding(mesh, PartitionSpec(('data', 'fsdp')))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def place(state: Any, mesh: Mesh, *, fsdp_min_mb: float) -> Any:
    """The sharding of each leaf of a state, from its name and shape.

    A large leaf is split over fsdp along its largest axis that divides; the depth axis of stacked
    blocks is left whole, because the scan walks along it. The rule sees names and shapes only, so
    the optimizer's copies of a parameter lie where the parameter lies.
    """

    def sharding(name: str, leaf: Any) -> NamedSharding:
        size_mb = math.prod(leaf.shape) * leaf.dtype.itemsize / 2**20
        first = 1 if 'encoder/block/' in name else 0
        axes = [a for a in range(first, leaf.ndim) if leaf.shape[a] % mesh.shape['fsdp'] == 0]
        if mesh.shape['fsdp'] == 1 or size_mb < fsdp_min_mb or not axes:
            return replicated(mesh)
        largest = max(axes, key=lambda a: leaf.shape[a])
        return NamedSharding(mesh, PartitionSpec(*[None] * largest, 'fsdp'))

    return tree.map_named(sharding, state)


def described(tree: Any, shardings: Any) -> Any:
    """Shape, type and place of each array of a tree, without the arrays."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def check_batch_size(batch_size: int, *, devices: int, accumulation_steps: int) -> None:
    """Raises ValueError, with the nearest sizes that would do, where a batch cannot be split."""
    unit = devices * accumulation_steps
    if batch_size < 1 or batch_size % unit:
        below, above = batch_size // unit * unit, (batch_size // unit + 1) * unit
        near = f'{below} or {above}' if below > 0 else f'{above}'
        raise ValueError(
            f'batch_size={batch_size} is not a multiple of {devices} devices x '
            f'{accumulation_steps} accumulation steps; nearest: {near}'
        )
