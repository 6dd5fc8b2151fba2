"""Ahead-of-time compilation: programs for a TPU slice or GPU cluster that is not attached."""

import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

# There is no other way to a compiler without devices.
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from vit_jax.base import UserError, require
from vit_jax.base.errors import lacks_memory

GIB = 2**30
_SIZE = r'([0-9.]+)([BKMGT])'
_SIDE = r'[1-9]\d*'

# What the compiler asks of a GPU (NVIDIA's data sheets and CUDA's limits of the architecture):
# compute capability, multiprocessors, L2 cache in bytes, bytes/s, GHz, shared memory of a
# multiprocessor and of a block, memory in bytes.
_GPUS = {
    'a100': ('A100-SXM4-80GB', 8, 108, 40 * 2**20, 2039e9, 1.41, 167936, 166912, 85_100_000_000),
    'h100': ('H100-SXM5-80GB', 9, 132, 50 * 2**20, 3352e9, 1.98, 233472, 232448, 84_900_000_000),
    'h200': ('H200-SXM-141GB', 9, 132, 50 * 2**20, 4800e9, 1.98, 233472, 232448, 150_000_000_000),
}
_EXPECTED = (
    'expected KIND:SHAPE such as v5e:4x4, v6e:16x16, v5p:2x2x4, 2*v5e:16x16 for two slices, '
    f'or KIND:HOSTSxGPUS, KIND one of {", ".join(_GPUS)}'
)


class Topology(NamedTuple):
    """Devices to compile for, and the memory of each, in bytes."""

    name: str
    devices: Sequence[jax.Device]
    memory: int


class DoesNotFit(Exception):
    """The program needs more memory than a device has: `needed` bytes, where that is known."""

    def __init__(self, needed: int | None, *, estimated: bool = False):
        super().__init__(f'{needed or 0:,} bytes')
        self.needed, self.estimated = needed, estimated


def find_topology(name: str) -> Topology:
    """The topology of a name: a TPU slice `v5e:4x4`, two `2*v5e:4x4`, 2 hosts of 8 GPUs `h100:2x8`.

    Raises UserError where there is none or where its compiler is not installed.
    """
    if gpus := re.fullmatch(rf'({"|".join(_GPUS)}):({_SIDE}x{_SIDE})', name, re.ASCII):
        return _gpus(name, *gpus.groups())
    found = re.fullmatch(rf'(?:({_SIDE})\*)?(v\d\w*|tpu7x):({_SIDE}(?:x{_SIDE})+)', name, re.ASCII)
    if found is None:
        raise UserError(f'--topology={name}: {_EXPECTED}')
    sides = [int(side) for side in found[3].split('x')]
    fits = found[2] not in ('v5e', 'v6e') or len(sides) == 2
    require(fits, f'--topology={name}: chips of {found[2]} lie in two directions; {_EXPECTED}')
    fits = found[2] != 'v5e' or max(sides) <= 16  # else libtpu would end the process
    several = 'a slice of v5e has at most 16x16 chips; of several: 2*v5e:16x16'
    require(fits, f'--topology={name}: {several}')
    # Of the machine that compiles, so that the library does not look for a TPU in the network.
    os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
    os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')  # it opens no chip
    os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
    os.environ.setdefault('TPU_ACCELERATOR_TYPE', 'v5litepod-4')
    how = "pip install 'vit_jax[tpu]' (no TPU is needed)"
    installed = importlib.util.find_spec('libtpu') is not None
    require(installed, f'--topology={name}: the TPU compiler is not installed: {how}')
    options: dict[str, Any] = {'num_slices': int(found[1])} if found[1] else {}
    if math.prod(sides) < 4:  # else a host is taken to have four
        options['chips_per_host_bounds'] = [*sides, 1][:3]
    if found[2] == 'v4':
        options['chip_config_name'] = 'megacore'  # both cores as one device, as programs have them
    devices = _devices(name, f'{found[2]}:{found[3]}', platform='tpu', **options)
    return Topology(name, devices, _memory(devices[0]))


def _devices(name: str, *known_as: str, **options: Any) -> Sequence[jax.Device]:
    try:
        return topologies.get_topology_desc(*known_as, **options).devices
    except (RuntimeError, NotImplementedError, ValueError) as error:
        reason = str(error).splitlines()[0].removeprefix('INVALID_ARGUMENT: ')
        raise UserError(f'--topology={name}: {reason}; {_EXPECTED}') from error


def _gpus(name: str, kind: str, shape: str) -> Topology:
    title, major, cores, cache, bandwidth, clock, per_core, per_block, memory = _GPUS[kind]
    target = f"""gpu_device_info {{
        cuda_compute_capability {{ major: {major} }} core_count: {cores} fpus_per_core: 128
        threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        registers_per_core_limit: 65536 registers_per_block_limit: 65536
        shared_memory_per_core: {per_core} shared_memory_per_block: 49152
        shared_memory_per_block_optin: {per_block} l2_cache_size: {cache}
        memory_bandwidth: {bandwidth:.0f} clock_rate_ghz: {clock} device_memory_size: {memory}
        }} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
        device_description_str: "{title}" """
    how = 'pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt, of the version of jax, into an '
    how += 'environment of its own, as without a GPU jax complains at each start'
    installed = any(importlib.util.find_spec(f'jax_cuda{n}_plugin') for n in (12, 13))
    missing = f"--topology={name}: jax's compiler for GPUs is not installed"
    require(installed, f'{missing}: {how} (no GPU is needed)')
    devices = _devices(name, name, platform='cuda', topology=f'1x{shape}', target_config=target)
    return Topology(name, devices, int(0.75 * memory))  # jax's XLA_PYTHON_CLIENT_MEM_FRACTION


def _memory(device: jax.Device) -> int:
    """Bytes that a program may use: no API (jax 0.10.2), but the error for far more tells them."""
    huge = jax.ShapeDtypeStruct((2**45,), jnp.int8, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x * 2).lower(huge).compile()
    except jax.errors.JaxRuntimeError as error:
        limit = re.search(rf'(?:available HBM \(| of ){_SIZE}', str(error))
        assert lacks_memory(error) and limit, error
        return _bytes(limit)
    raise AssertionError('a program with 32 TiB of arguments was compiled')


@contextlib.contextmanager
def assume_cudnn() -> Iterator[None]:
    """Lets programs with cuDNN's attention be traced without a GPU."""
    # jax has no public way to turn off the checks that ask the GPU.
    import jax._src.cudnn.fused_attention_stablehlo as cudnn

    answers: dict[str, Any] = {
        'check_cudnn_version': lambda: 91000,
        'check_compute_capability': lambda least: True,
        'is_cuda_compute_capability_equal': lambda version: False,
    }
    with mock.patch.multiple(cudnn, **answers):
        yield


def compile_for(
    topology: Topology,
    lowered: Any,
    *,
    quickly: bool = False,
    options: dict[str, Any] | None = None,
) -> Any:
    """The compiled program. Raises DoesNotFit where it needs more memory than a device has.

    With `quickly` a TPU's compiler looks less for the fastest program. That took a quarter of the
    time for L/16 on v5e:4x4, and the memory of the program was 6 to 11 % less than of the other.
    A GPU's program is compiled with the options of a run. Without a device XLA cannot time kernels,
    and takes its first candidate. `options` adds options of the compiler.
    """
    cached = jax.config.values['jax_enable_compilation_cache']
    jax.config.update('jax_enable_compilation_cache', False)  # which cannot be read without devices
    if quickly:
        older = jax.__version_info__ < (0, 11)
        effort = {'exec_time_optimization_effort': -1.0} if older else {'optimization_level': 'O1'}
        options = effort | (options or {})
    try:
        compiled = _compiled(lowered, options or {})
    except jax.errors.JaxRuntimeError as error:
        if not lacks_memory(error):
            raise
        needed = re.search(rf'(?:Used |required for[^(]*\(){_SIZE}', str(error))
        raise DoesNotFit(_bytes(needed) if needed else None) from error
    finally:
        jax.config.update('jax_enable_compilation_cache', cached)
    memory = compiled.memory_analysis()
    if memory.peak_memory_in_bytes > topology.memory:  # GPUs' compiler does not look
        raise DoesNotFit(memory.peak_memory_in_bytes)
    return compiled


def _compiled(lowered: Any, options: dict[str, Any]) -> Any:
    """Compiles the program, and disables Triton if XLA cannot tile a product without autotuning.

    That happens in jax 0.10, with `layout=batched` and `attention=xla`.
    """
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if 'output tile sizes' not in str(error):
            raise
    return lowered.compile(options | {'xla_gpu_enable_triton_gemm': False})


def _bytes(found: re.Match[str]) -> int:
    return round(float(found[1]) * 2 ** (10 * 'BKMGT'.index(found[2])))
