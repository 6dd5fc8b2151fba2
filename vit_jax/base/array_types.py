"""Shape annotations of jaxtyping, and trees of arrays. The tests check every annotated shape."""

from typing import Any

from jaxtyping import Array, Bool, Float, Int, Key, Num, UInt8

Params = dict[str, Any]
Batch = dict[str, Any]

__all__ = ['Array', 'Batch', 'Bool', 'Float', 'Int', 'Key', 'Num', 'Params', 'UInt8']
