"""jaxtyping's shape annotations and types for trees of arrays. The gate checks all of them."""

from typing import Any

from jaxtyping import Array, Bool, Float, Int, Key, Num, UInt8, UInt64

Params = dict[str, Any]
Batch = dict[str, Any]
Scalar = float | Float[Array, '']  # a Python number, or a scalar that may be traced

__all__ = [
    'Array',
    'Batch',
    'Bool',
    'Float',
    'Int',
    'Key',
    'Num',
    'Params',
    'Scalar',
    'UInt64',
    'UInt8',
]
