"""The devices as a mesh of data, fsdp and tensor axes, and the batch over them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vit_jax.base.array_types import Array, Int
from vit_jax.base.errors import UserError
from vit_jax.base.records import Record

AXES = 'data', 'fsdp', 'tensor'
Spec = tuple[str | None, ...]  # the mesh axis that splits each axis of an array, None: none


@dataclasses.dataclass(kw_only=True)
class MeshConfig(Record):
    """Devices by axis; one axis may be -1, the devices that the others leave.

    `data` and `fsdp` split the batch, `fsdp` also parameters and optimizer state, `tensor` the
    heads of attention and the hidden layer of the MLPs. Several TPU slices are spread over
    `data`, whose traffic is the least. What lies where is decided in parallel/placement.py.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    fsdp_min_mb: float = 1.0  # smaller arrays are kept whole on every device
    max_replicated_fraction: float = (
        0.1  # of the bytes, where fsdp or tensor splits; more is an error
    )
    rules: tuple[tuple[str, Spec], ...] = ()  # (pattern of names, axes): before all other rules


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of these devices, all by default. Raises UserError where the axes do not fit."""
    devices = list(devices or jax.devices())
    sizes = _sizes(config, len(devices))
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(slice_of(device), []).append(device)
    if sizes[0] % len(slices):
        raise UserError(
            f'mesh: data={sizes[0]} is not a multiple of {len(slices)} slices, over which only '
            f'data is spread'
        )
    one = sizes[0] // len(slices), *sizes[1:]
    try:
        parts = [jax.make_mesh(one, AXES, devices=part).devices for part in slices.values()]
    except NotImplementedError as error:  # of the TPU's torus
        raise UserError(f'mesh: {_text(sizes)} cannot be laid on these chips: {error}') from error
    return Mesh(np.concatenate(parts), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def slice_of(device: jax.Device) -> int:
    """The TPU slice of a device: within one the network is fast. 0 where there are none."""
    return getattr(device, 'slice_index', None) or 0


def _sizes(config: MeshConfig, count: int) -> tuple[int, ...]:
    """The size of each axis, the free one computed."""
    asked = config.data, config.fsdp, config.tensor  # the order of AXES
    fixed = math.prod(size for size in asked if size != -1)
    if asked.count(-1) > 1 or any(size < 1 for size in asked if size != -1):
        raise UserError(f'mesh: {_text(asked)}: expected sizes of 1 or more, at most one -1')
    sizes = tuple(count // fixed if size == -1 else size for size in asked)
    if math.prod(sizes) != count:
        legal = ', '.join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise UserError(
            f'mesh: {_text(asked)} does not make {count} devices; each axis may be one of '
            f'{legal}, their product {count}'
        )
    return sizes


def _text(sizes: Sequence[int]) -> str:
    return ' x '.join(f'{axis}={size}' for axis, size in zip(AXES, sizes, strict=True))


def describe(mesh: Mesh) -> str:
    """The axes and their sizes, as `data=4 x fsdp=2 x tensor=1`."""
    return _text(tuple(mesh.shape[axis] for axis in AXES))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Examples split over data and fsdp, whole along tensor."""
    return NamedSharding(mesh, PartitionSpec(('data', 'fsdp')))


def shard_activations(mesh: Mesh, x: Array) -> Array:
    """The same activations (b ...), of which the compiler is told that examples are split.

    Without being told it may gather the batch rather than the parameters, and run out of memory.
    """
    if x.shape[0] % (mesh.shape['data'] * mesh.shape['fsdp']):  # the one image of `init`
        return x
    return jax.lax.with_sharding_constraint(x, batch_sharding(mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def rows_here(sharding: NamedSharding, batch_size: int) -> Int[np.ndarray, 'n']:
    """The rows of the global batch that lie on devices of this process, in order."""
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    parts = (range(batch_size)[index[0]] for index in indices if index is not None)
    return np.array(sorted({row for part in parts for row in part}))


def from_rows(
    local: np.ndarray, rows: Int[np.ndarray, 'n'], sharding: NamedSharding, batch_size: int
) -> jax.Array:
    """The global array of which these are the rows that lie on devices of this process."""
    if len(rows) == batch_size:
        return jax.device_put(local, sharding)  # without the copy that the other way makes

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        first, last = np.searchsorted(rows, index[0].indices(batch_size)[:2])
        part: np.ndarray = local[first:last]
        return part

    return jax.make_array_from_callback((batch_size, *local.shape[1:]), sharding, part)


def put(values: Any, shardings: Any) -> Any:
    """Arrays that every process holds whole, each where its sharding says."""
    if jax.process_count() == 1:
        return jax.device_put(values, shardings)
    return jax.tree.map(
        lambda x, to: jax.make_array_from_callback(np.shape(x), to, lambda i: np.asarray(x)[i]),
        values,
        shardings,
    )


def check_batch_size(batch_size: int, mesh: Mesh, *, accumulation_steps: int) -> None:
    """Raises UserError, with the nearest sizes that would do, where a batch cannot be split."""
    parts = mesh.shape['data'] * mesh.shape['fsdp']
    unit = parts * accumulation_steps
    if batch_size < 1 or batch_size % unit:
        below, above = batch_size // unit * unit, (batch_size // unit + 1) * unit
        near = f'{below} or {above}' if below > 0 else f'{above}'
        raise UserError(
            f'batch_size={batch_size} is not a multiple of {parts} devices (data x fsdp) x '
            f'{accumulation_steps} accumulation steps; nearest: {near}'
        )
