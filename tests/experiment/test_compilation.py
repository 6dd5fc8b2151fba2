"""What compiling takes and leaves."""

import ctypes
import pathlib
import resource

import pytest

from vit_jax.experiment import compilation


def resident():
    """Bytes of this process in memory."""
    return resource.getpagesize() * int(pathlib.Path('/proc/self/statm').read_text().split()[1])


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), 'malloc_trim'), reason='not glibc')
def test_freed_memory_below_what_is_held_is_given_back():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(50_000) for _ in range(2000)]
    for block in blocks:
        ctypes.memset(block, 1, 50_000)
    for block in blocks[:-1]:
        libc.free(block)
    before = resident()
    compilation.give_back_memory()
    assert resident() < before - 80_000_000
    libc.free(blocks[-1])
