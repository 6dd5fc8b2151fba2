"""Devices that are not here: what a compiler needs to know of a TPU slice or a GPU cluster."""

import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# The only thing taken from jax.experimental: there is no other way to a compiler without devices.
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

GIB = 2**30
_EXHAUSTED = 'RESOURCE_EXHAUSTED'
_UNITS = {'B': 1, 'K': 2**10, 'M': 2**20, 'G': GIB, 'T': 2**40}
_SIZE = r'([0-9.]+)([BKMGT])'


class Topology(NamedTuple):
    """Devices to compile for, and the memory of each, in bytes."""

    name: str
    devices: Sequence[jax.Device]
    memory: int


class DoesNotFit(Exception):
    """The program needs more memory than a device has: `needed` bytes, where that is known."""

    def __init__(self, needed: int | None):
        super().__init__(f'{needed or 0:,} bytes')
        self.needed = needed


def find(name: str) -> Topology:
    """The topology of a name: `v5e:4x4` is a TPU slice, `2*v5e:4x4` two of them.

    Raises ValueError where there is none or where its compiler is not installed.
    """
    found = re.fullmatch(r'(?:(\d+)\*)?(v\d\w*|tpu7x):(\d+(?:x\d+)+)', name)
    if found is None:
        raise ValueError(
            f'--topology={name}: expected KIND:SHAPE such as v5e:4x4, v6e:16x16, v5p:2x2x4, or '
            f'2*v5e:16x16 for two slices'
        )
    slices = int(found[1] or 1)
    # Of the machine that compiles, so that the library does not look for a TPU in the network.
    os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
    os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')  # it opens no chip
    os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
    os.environ.setdefault('TPU_ACCELERATOR_TYPE', 'v5litepod-4')
    options = {'num_slices': slices} if slices > 1 else {}
    try:
        devices = topologies.get_topology_desc(
            f'{found[2]}:{found[3]}', platform='tpu', **options
        ).devices
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if 'TPU support not installed' in str(error):
            raise ValueError(
                f'--topology={name}: the TPU compiler is not installed: '
                f"pip install 'vit_jax[tpu]' (no TPU is needed)"
            ) from error
        raise ValueError(f'--topology={name}: {str(error).splitlines()[0]}') from error
    return Topology(name, devices, _memory(devices[0]))


def _memory(device: jax.Device) -> int:
    """The bytes that a program may use: the compiler says it of one that needs far more."""
    huge = jax.ShapeDtypeStruct((2**45,), jnp.int8, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x * 2).lower(huge).compile()
    except jax.errors.JaxRuntimeError as error:
        limit = re.search(rf'(?:available HBM \(| of ){_SIZE}', str(error))
        assert _EXHAUSTED in str(error) and limit, error
        return _bytes(limit)
    raise AssertionError('a program with 32 TiB of arguments was compiled')


def compile_for(topology: Topology, lowered: Any) -> Any:
    """The compiled program. Raises DoesNotFit where the compiler finds no room for it."""
    cached = jax.config.values['jax_enable_compilation_cache']
    jax.config.update('jax_enable_compilation_cache', False)  # which cannot be read without devices
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if _EXHAUSTED not in str(error):
            raise
        needed = re.search(rf'(?:Used |required for[^(]*\(){_SIZE}', str(error))
        raise DoesNotFit(_bytes(needed) if needed else None) from error
    finally:
        jax.config.update('jax_enable_compilation_cache', cached)


def _bytes(found: re.Match[str]) -> int:
    return round(float(found[1]) * _UNITS[found[2]])


def collectives(compiled: Any) -> dict[str, int]:
    """How often each kind of communication stands in the program; a loop's body counts once."""
    kinds = 'all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute'
    text = compiled.as_text()
    counts = {kind: len(re.findall(rf' {kind}(?:-start)?\(', text)) for kind in kinds}
    return {kind: count for kind, count in counts.items() if count}
