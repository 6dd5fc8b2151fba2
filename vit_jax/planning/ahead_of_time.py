"""Ahead-of-time compilation for TPU slices and GPU clusters that are not attached."""

import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax

# The only way in jax to compile without devices.
from jax.experimental import topologies

from vit_jax.base import UserError, require
from vit_jax.base.errors import is_out_of_memory

GIB = 2**30
_SIDE = r'[1-9]\d*'

# GiB that a program may use on one device (from the error of libtpu 0.0.42 for a larger program).
_TPUS = {
    'v2': 7.48,
    'v3': 15.48,
    'v4': 30.75,
    'v5e': 15.75,
    'v5p': 95.74,
    'v6e': 31.25,
    'tpu7x': 94.75,
}


class _Gpu(NamedTuple):
    """GPU properties that the compiler needs, from NVIDIA's data sheets and CUDA's limits."""

    title: str
    compute_capability: int  # major version
    multiprocessors: int
    l2_cache: int  # bytes
    bandwidth: float  # of the memory, in bytes/s
    clock: float  # GHz
    shared_per_multiprocessor: int  # bytes of shared memory
    shared_per_block: int  # bytes of shared memory
    memory: int  # bytes


_H100 = _Gpu(
    title='H100-SXM5-80GB',
    compute_capability=9,
    multiprocessors=132,
    l2_cache=50 * 2**20,
    bandwidth=3352e9,
    clock=1.98,
    shared_per_multiprocessor=233472,
    shared_per_block=232448,
    memory=84_900_000_000,
)
_GPUS = {
    'a100': _Gpu(
        title='A100-SXM4-80GB',
        compute_capability=8,
        multiprocessors=108,
        l2_cache=40 * 2**20,
        bandwidth=2039e9,
        clock=1.41,
        shared_per_multiprocessor=167936,
        shared_per_block=166912,
        memory=85_100_000_000,
    ),
    'h100': _H100,
    'h200': _H100._replace(title='H200-SXM-141GB', bandwidth=4800e9, memory=150_000_000_000),
}
_EXPECTED = (
    'expected KIND:SHAPE, such as v5e:4x4, v5p:2x2x4 or 2*v5e:16x16 (two slices), with KIND one of '
    f'{", ".join(_TPUS)}; or KIND:HOSTSxGPUS, with KIND one of {", ".join(_GPUS)}'
)


class Topology(NamedTuple):
    """Devices to compile for, and the memory of each in bytes."""

    name: str
    devices: Sequence[jax.Device]
    memory: int


class DoesNotFitError(Exception):
    """The program needs more memory than a device has: `needed` bytes, or None if unknown."""

    def __init__(self, needed: int | None):
        super().__init__(f'{needed or 0:,} bytes')
        self.needed = needed


def find_topology(name: str) -> Topology:
    """Returns the devices of a TPU slice `v5e:4x4`, two slices `2*v5e:4x4`, or GPUs `h100:2x8`.

    Raises:
      UserError: If the name is invalid, or if the compiler for these devices is not installed.
    """
    if gpus := re.fullmatch(rf'({"|".join(_GPUS)}):({_SIDE}x{_SIDE})', name, re.ASCII):
        return _find_gpus(name, *gpus.groups())
    kinds = '|'.join(_TPUS)
    tpus = re.fullmatch(rf'(?:({_SIDE})\*)?({kinds}):({_SIDE}(?:x{_SIDE})+)', name, re.ASCII)
    if tpus is None:
        raise UserError(f'--topology={name}: {_EXPECTED}')
    slices, kind, shape = tpus.groups()
    sides = [int(side) for side in shape.split('x')]
    # The largest slice. For a larger v5e, libtpu aborts the process while it compiles.
    require(
        kind not in ('v5e', 'v6e') or (len(sides) == 2 and max(sides) <= 16),
        f'--topology={name}: expected at most 16x16 chips in a slice of {kind}; '
        f'for two slices, 2*{kind}:16x16',
    )
    # These variables keep libtpu from looking for a TPU in the network and from opening a chip.
    os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
    os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
    os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
    os.environ.setdefault('TPU_ACCELERATOR_TYPE', 'v5litepod-4')
    require(
        importlib.util.find_spec('libtpu') is not None,
        f'--topology={name}: the TPU compiler is not installed; '
        "run pip install 'vit_jax[tpu]' (needs no TPU)",
    )
    options: dict[str, Any] = {'num_slices': int(slices)} if slices else {}
    if math.prod(sides) < 4:  # the default is four chips per host
        options['chips_per_host_bounds'] = [*sides, 1][:3]
    if kind == 'v4':
        options['chip_config_name'] = 'megacore'  # one device per chip, as on an attached TPU
    devices = _devices(name, f'{kind}:{shape}', platform='tpu', **options)
    return Topology(name, devices, round(_TPUS[kind] * GIB))


def _devices(name: str, *jax_name: str, **options: Any) -> Sequence[jax.Device]:
    try:
        return topologies.get_topology_desc(*jax_name, **options).devices
    except (RuntimeError, NotImplementedError, ValueError) as error:
        reason = str(error).splitlines()[0].removeprefix('INVALID_ARGUMENT: ')
        raise UserError(f'--topology={name}: {reason}; {_EXPECTED}') from error


def _find_gpus(name: str, kind: str, shape: str) -> Topology:
    gpu = _GPUS[kind]
    target = f"""gpu_device_info {{
        cuda_compute_capability {{ major: {gpu.compute_capability} }}
        core_count: {gpu.multiprocessors} fpus_per_core: 128
        threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        registers_per_core_limit: 65536 registers_per_block_limit: 65536
        shared_memory_per_core: {gpu.shared_per_multiprocessor} shared_memory_per_block: 49152
        shared_memory_per_block_optin: {gpu.shared_per_block} l2_cache_size: {gpu.l2_cache}
        memory_bandwidth: {gpu.bandwidth:.0f} clock_rate_ghz: {gpu.clock}
        device_memory_size: {gpu.memory}
        }} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
        device_description_str: "{gpu.title}" """
    require(
        any(importlib.util.find_spec(f'jax_cuda{n}_plugin') for n in (12, 13)),
        f"--topology={name}: jax's GPU compiler, which needs no GPU, is not installed; "
        "run pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt, with jax's version, in a "
        'separate environment, because jax then warns at each start without a GPU',
    )
    devices = _devices(name, name, platform='cuda', topology=f'1x{shape}', target_config=target)
    return Topology(name, devices, int(0.75 * gpu.memory))  # jax's XLA_PYTHON_CLIENT_MEM_FRACTION


@contextlib.contextmanager
def assume_cudnn() -> Iterator[None]:
    """Allows tracing programs with cuDNN attention without a GPU."""
    # jax has no public way to disable the checks that query the GPU.
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
    """Compiles a program for devices that are not attached.

    jax's compilation cache should be off, because it cannot load a program without devices.

    Args:
      topology: The devices to compile for.
      lowered: The result of `jax.jit(...).lower(...)` for these devices.
      quickly: Reduces the optimization effort of the TPU compiler. For L/16 on v5e:4x4 this took a
        quarter of the time, and the program needed 6 to 11 % less memory.
      options: Other compiler options.

    Returns:
      The compiled program. A real run on GPUs uses other kernels: XLA cannot time kernels without a
      GPU, and takes the first candidates.

    Raises:
      DoesNotFitError: If the program needs more memory than a device has.
    """
    if quickly:
        if jax.__version_info__ < (0, 11):
            effort: dict[str, Any] = {'exec_time_optimization_effort': -1.0}
        else:
            effort = {'optimization_level': 'O1'}
        options = effort | (options or {})
    try:
        compiled = _compiled(lowered, options or {})
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DoesNotFitError(_parse_needed_bytes(str(error))) from error
    peak = compiled.memory_analysis().peak_memory_in_bytes
    if peak > topology.memory:  # the GPU compiler does not check this
        raise DoesNotFitError(peak)
    return compiled


def _parse_needed_bytes(message: str) -> int | None:
    """Returns the bytes that a program needs, from XLA's error; None if it does not state them."""
    match = re.search(r'(?:Used |required for[^(]*\()([0-9.]+)([BKMGT])', message)
    if match is None:
        return None
    number, unit = match.groups()
    return round(float(number) * 1024 ** 'BKMGT'.index(unit))


def _compiled(lowered: Any, options: dict[str, Any]) -> Any:
    """Compiles the program, without Triton if XLA cannot tile a matrix product without autotuning.

    This happens in jax 0.10 with `layout=batched` and `attention=xla`.
    """
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if 'output tile sizes' not in str(error):
            raise
    return lowered.compile(options | {'xla_gpu_enable_triton_gemm': False})
