"""The device mesh with axes data, fsdp and tensor, and the sharding of batches over it."""

import dataclasses
import functools
import itertools
import math
import os
import socket
import uuid
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vit_jax.base import Int, Record, UserError, require, require_between, require_pattern

AXES = 'data', 'fsdp', 'tensor'
Spec = tuple[str | None, ...]  # the mesh axis that splits each axis of an array; None: not split


@dataclasses.dataclass(kw_only=True)
class MeshConfig(Record):
    """The number of devices along each mesh axis. One of them may be -1: all remaining devices.

    `data` splits the batch. `fsdp` splits the batch, the parameters and the optimizer state.
    `tensor` splits the attention heads and the hidden layers of the MLPs. TPU slices are
    distributed along `data`, which communicates least. `shardings_for` describes how each array is
    split. A rule such as ('head/kernel', (None, 'fsdp')) names the mesh axis that splits each axis
    of the matching arrays.
    """

    data: int = -1  # devices that split the batch; -1: all remaining devices
    fsdp: int = 1  # devices that split the batch, parameters and optimizer state
    tensor: int = 1  # devices that split attention heads and hidden layers
    fsdp_min_mb: float = 1.0  # in MiB; smaller arrays are replicated, not split over fsdp
    max_replicated_fraction: float = 0.1  # share of the state that fsdp or tensor may replicate
    rules: tuple[tuple[str, Spec], ...] = ()  # (name pattern, axes), applied before other rules

    def check(self) -> None:
        sizes = self.data, self.fsdp, self.tensor
        for pattern, axes in self.rules:
            require_pattern(pattern)
            for axis in {*axes} - {*AXES, None}:
                raise UserError(f'rules: unknown axis {axis!r}; expected {", ".join(AXES)}')
        are_possible = sizes.count(-1) <= 1 and all(size == -1 or size >= 1 for size in sizes)
        require(are_possible, f'{_text(sizes)}: expected sizes of at least 1, or -1 for one axis')
        require_between(self, 'fsdp_min_mb', low=0)
        require_between(self, 'max_replicated_fraction', low=0, high=1)


def require_devices() -> None:
    """Raises UserError if JAX_PLATFORMS names devices that jax cannot use."""
    platforms = jax.config.values['jax_platforms']
    try:
        if platforms:
            jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError: CUDA plugin without a driver
        raise UserError(
            f'JAX_PLATFORMS={platforms}: jax finds no such device; install its driver and '
            "'vit_jax[cuda]' or 'vit_jax[tpu]', or set JAX_PLATFORMS=cpu to use the CPU"
        ) from error


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes the mesh of these devices, by default all. Raises UserError if the sizes do not fit."""
    devices = list(devices or jax.devices())
    sizes = _axis_sizes(config, len(devices))
    data, fsdp, tensor = sizes
    ordered = sorted(devices, key=slice_index)
    slices = [list(in_slice) for _, in_slice in itertools.groupby(ordered, slice_index)]
    require(
        data % len(slices) == 0,
        f'mesh: data={data}; expected a multiple of {len(slices)}, the number of TPU slices',
    )
    sizes_in_slice = (data // len(slices), fsdp, tensor)
    try:
        device_arrays = [  # jax.make_mesh can split a torus side only on v5e
            mesh_utils.create_device_mesh(sizes_in_slice, in_slice, allow_split_physical_axes=True)
            for in_slice in slices
        ]
    # jax 0.10.2 fails for some torus sides, such as 20: it drops prime factors of them.
    except (NotImplementedError, AssertionError, ValueError, TypeError) as error:
        raise UserError(
            f'mesh: {_text(sizes)} does not fit the torus of these chips; choose other sizes '
            f'(jax {jax.__version__}: {error})'
        ) from error
    return Mesh(np.concatenate(device_arrays), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _axis_sizes(config: MeshConfig, num_devices: int) -> tuple[int, int, int]:
    """Returns the sizes of AXES. Raises UserError if their product is not the number of devices."""
    requested = (config.data, config.fsdp, config.tensor)
    fixed = math.prod(size for size in requested if size != -1)
    data, fsdp, tensor = (num_devices // fixed if size == -1 else size for size in requested)
    if data * fsdp * tensor != num_devices:
        divisors = [str(n) for n in range(1, num_devices + 1) if num_devices % n == 0]
        needed = f'a multiple of {fixed}' if -1 in requested else fixed
        raise UserError(
            f'mesh: {_text(requested)} needs {needed} devices; found {num_devices}; '
            f'possible sizes of an axis: {", ".join(divisors)}'
        )
    return data, fsdp, tensor


def slice_index(device: jax.Device) -> int:
    """Returns the index of a device's TPU slice; 0 for other devices.

    Connections within a slice are faster than between slices.
    """
    return getattr(device, 'slice_index', None) or 0


def _text(sizes: Sequence[int]) -> str:
    return ' x '.join(f'{axis}={size}' for axis, size in zip(AXES, sizes, strict=True))


def format_mesh(mesh: Mesh) -> str:
    """Formats the axes and their sizes, such as `data=4 x fsdp=2 x tensor=1`."""
    return _text(mesh.axis_sizes)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: split over data and fsdp, replicated over tensor."""
    return NamedSharding(mesh, PartitionSpec(('data', 'fsdp')))


def with_mesh(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function for `jax.jit` so that this mesh is jax's current mesh during tracing.

    The models then shard their activations over the mesh. The arguments of the function must be on
    its devices.
    """

    @functools.wraps(function)
    def traced(*arguments: Any, **options: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*arguments, **options)

    return traced


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that every device holds completely."""
    return NamedSharding(mesh, PartitionSpec())


def local_rows(sharding: NamedSharding, batch_size: int) -> Int[np.ndarray, 'n']:
    """Returns the sorted rows of the global batch that are on devices of this process."""
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    rows = {row for index in indices if index is not None for row in range(batch_size)[index[0]]}
    return np.array(sorted(rows))


def put(values: Any, shardings: Any) -> Any:
    """Moves a tree of arrays to devices by their shardings.

    Every process must have all arrays in host memory.
    """
    if jax.process_count() == 1:
        return jax.device_put(values, shardings)

    def put_array(array: Any, sharding: Any) -> jax.Array:
        host_array = np.asarray(array)
        return jax.make_array_from_callback(
            host_array.shape, sharding, lambda index: host_array[index]
        )

    return jax.tree.map(put_array, values, shardings)


def broadcast(values: Any) -> Any:
    """Returns process 0's host arrays in all processes."""
    return multihost_utils.broadcast_one_to_all(values)


@functools.cache
def count_processes_on_host() -> int:
    """Returns how many processes of the job run on this machine."""
    if jax.process_count() == 1:
        return 1
    name = np.array([zlib.crc32(f'{socket.gethostname()} {uuid.getnode()}'.encode())], np.uint32)
    return int(np.sum(multihost_utils.process_allgather(name) == name))


def check_batch_size(batch_size: int, mesh: Mesh, *, accumulation_steps: int) -> None:
    """Raises UserError if a batch cannot be split evenly; the message names the nearest sizes."""
    num_shards = mesh.shape['data'] * mesh.shape['fsdp']
    unit = num_shards * accumulation_steps
    below = batch_size // unit * unit
    if batch_size != below or batch_size <= 0:
        nearest = f'{below} or {below + unit}' if below > 0 else f'{unit}'
        raise UserError(
            f'batch_size={batch_size} is not a multiple of {num_shards} (data x fsdp)'
            f' x {accumulation_steps} accumulation steps; nearest: {nearest}'
        )


def jit_on(function: Callable[..., Any], mesh: Mesh, **options: Any) -> Any:
    """Jits a function that is traced with this mesh (see `with_mesh`)."""
    return jit(with_mesh(mesh, function), mesh, **options)


def jit(function: Callable[..., Any], mesh: Mesh, **options: Any) -> Any:
    """Jits a function for the devices of a mesh; passes options to `jax.jit`.

    On CPUs, XLA's optimization level is 2 unless XLA_FLAGS sets it. The passes of the highest level
    take a sixth of the compile time, and made no step faster. With JAX_DISABLE_JIT, the function is
    executed operation by operation.
    """
    if jax.config.values['jax_disable_jit']:
        return _EagerFunction(function, options.get('out_shardings'))
    level = 'xla_backend_optimization_level'
    on_cpu = mesh.devices.flat[0].platform == 'cpu'
    is_set = level in os.environ.get('XLA_FLAGS', '')
    compiler_options = {level: 2} if on_cpu and not is_set else None
    return jax.jit(function, compiler_options=compiler_options, **options)


class _EagerFunction(NamedTuple):
    """A function with the methods of a jitted one, for debugging with JAX_DISABLE_JIT."""

    function: Callable[..., Any]
    out_shardings: Any

    def __call__(self, *arguments: Any) -> Any:
        outputs = self.function(*arguments)
        shardings = self.out_shardings
        return outputs if shardings is None else jax.device_put(outputs, shardings)

    def lower(self, *_: Any) -> '_EagerFunction':
        return self

    def compile(self) -> '_EagerFunction':
        return self
