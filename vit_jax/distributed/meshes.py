"""The devices as a mesh with the axes data, fsdp and tensor, and how batches lie on it."""

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils  # jax.make_mesh divides a side of the torus on v5e alone
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vit_jax.base import Int, Record, UserError, require, require_between, require_pattern

AXES = 'data', 'fsdp', 'tensor'
Spec = tuple[str | None, ...]  # the mesh axis that splits each axis of an array, None: none


@dataclasses.dataclass(kw_only=True)
class MeshConfig(Record):
    """The number of devices along each axis; one may be -1: all that the others leave.

    `data` and `fsdp` split the batch, `fsdp` also parameters and optimizer state, `tensor` the
    heads of attention and the hidden layer of the MLPs. Several TPU slices are spread over `data`,
    which communicates least. `sharding_rules.py` decides how each array is split.
    """

    data: int = -1  # devices that split the batch; -1: all that the others leave
    fsdp: int = 1  # devices that split the batch, and parameters and optimizer state
    tensor: int = 1  # devices that split heads of attention and hidden layers
    fsdp_min_mb: float = 1.0  # smaller arrays are replicated
    max_replicated_fraction: float = 0.1  # of the state's bytes, with fsdp or tensor; else an error
    rules: tuple[tuple[str, Spec], ...] = ()  # (pattern of names, axes): before all other rules

    def check(self) -> None:
        sizes = self.data, self.fsdp, self.tensor
        for pattern, axes in self.rules:
            require_pattern(pattern)
            for axis in {*axes} - {*AXES, None}:
                raise UserError(f'rules: no axis {axis!r}; there are {", ".join(AXES)}')
        fit = sizes.count(-1) <= 1 and all(size == -1 or size >= 1 for size in sizes)
        require(fit, f'{_text(sizes)}: expected sizes of 1 or more, at most one -1')
        require_between(self, 'fsdp_min_mb', low=0)
        require_between(self, 'max_replicated_fraction', low=0, high=1)


def require_devices() -> None:
    """Raises UserError if JAX_PLATFORMS names devices that jax cannot use."""
    platforms = jax.config.values['jax_platforms']
    try:
        if platforms:
            jax.devices()
    except (RuntimeError, AssertionError) as error:  # of CUDA's plugin without a driver
        raise UserError(
            f'JAX_PLATFORMS={platforms}: jax finds no such device; expected its driver and '
            "pip install 'vit_jax[cuda]' or '[tpu]'; JAX_PLATFORMS=cpu uses the CPU"
        ) from error


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of the devices, all by default. Raises UserError if the axes do not fit."""
    devices = list(devices or jax.devices())
    count, given = len(devices), (config.data, config.fsdp, config.tensor)  # the order of AXES
    fixed = math.prod(size for size in given if size != -1)
    data, *others = sizes = [count // fixed if size == -1 else size for size in given]
    legal = ', '.join(str(n) for n in range(1, count + 1) if count % n == 0)
    needed = f'a multiple of {fixed}' if -1 in given else fixed
    wrong = f'mesh: {_text(given)}: the number of devices is {count}, not {needed}'
    require(math.prod(sizes) == count, f'{wrong}; each axis may be one of {legal}')
    ordered = sorted(devices, key=slice_of)
    slices = [[*part] for _, part in itertools.groupby(ordered, slice_of)]
    wrong = f'mesh: data={data} is not a multiple of {len(slices)} slices'
    require(data % len(slices) == 0, f'{wrong}, over which only data is spread')
    within = data // len(slices), *others
    try:
        parts = [
            mesh_utils.create_device_mesh(within, part, allow_split_physical_axes=True)
            for part in slices
        ]
    # On a TPU's torus jax 0.10.2 loses prime factors of a side such as 20.
    except (NotImplementedError, AssertionError, ValueError, TypeError) as error:
        wrong = f'mesh: {_text(sizes)} does not fit the torus of these chips; take other sizes'
        raise UserError(f'{wrong} (jax {jax.__version__}: {error})') from error
    return Mesh(np.concatenate(parts), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def slice_of(device: jax.Device) -> int:
    """Returns the number of a device's TPU slice, within which the network is fast, or 0."""
    return getattr(device, 'slice_index', None) or 0


def _text(sizes: Sequence[int]) -> str:
    return ' x '.join(f'{axis}={size}' for axis, size in zip(AXES, sizes, strict=True))


def describe(mesh: Mesh) -> str:
    """Returns the axes and their sizes, such as `data=4 x fsdp=2 x tensor=1`."""
    return _text(mesh.axis_sizes)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Splits examples over data and fsdp; replicates them along tensor."""
    return NamedSharding(mesh, PartitionSpec(('data', 'fsdp')))


def traced_on(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function for `jax.jit`, so that it is traced with this mesh in jax's context.

    Its arguments have to be on these devices. models/on_mesh.py reads the mesh there.
    """

    @functools.wraps(function)
    def traced(*arguments: Any, **named: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*arguments, **named)

    return traced


def replicated(mesh: Mesh) -> NamedSharding:
    """Keeps the whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def rows_here(sharding: NamedSharding, batch_size: int) -> Int[np.ndarray, 'n']:
    """Returns the rows of the global batch that belong to devices of this process, in order."""
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    parts = (range(batch_size)[index[0]] for index in indices if index is not None)
    return np.array(sorted({row for part in parts for row in part}))


def put(values: Any, shardings: Any) -> Any:
    """Puts arrays on devices, each by its sharding; every process has all of them in memory."""
    if jax.process_count() == 1:
        return jax.device_put(values, shardings)
    return jax.tree.map(
        lambda x, to: jax.make_array_from_callback(np.shape(x), to, lambda i: np.asarray(x)[i]),
        values,
        shardings,
    )


def check_batch_size(batch_size: int, mesh: Mesh, *, accumulation_steps: int) -> None:
    """Raises UserError, with the nearest possible sizes, if a batch cannot be split."""
    parts = mesh.shape['data'] * mesh.shape['fsdp']
    unit = parts * accumulation_steps
    below = batch_size // unit * unit
    near = f'{below} or {below + unit}' if below > 0 else f'{unit}'
    wrong = f'batch_size={batch_size} is not a multiple of {parts} devices (data x fsdp)'
    wrong += f' x {accumulation_steps} accumulation steps; nearest: {near}'
    require(below == batch_size > 0, wrong)


def jit_on(function: Callable[..., Any], mesh: Mesh, **given: Any) -> Any:
    """Wraps `jax.jit`: traces the function for this mesh.

    On CPUs it leaves out XLA's highest level of optimization, which takes a sixth of the time to
    compile and made no step faster; XLA_FLAGS may set another level.
    """
    on_cpu, level = mesh.devices.flat[0].platform == 'cpu', 'xla_backend_optimization_level'
    is_set = level in os.environ.get('XLA_FLAGS', '')
    options = {level: 2} if on_cpu and not is_set else None
    return jax.jit(traced_on(mesh, function), compiler_options=options, **given)
