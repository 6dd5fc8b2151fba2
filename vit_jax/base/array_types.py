"""Shape annotations of jaxtyping, where it is installed.

The model and the update step need jax, flax, optax and numpy alone; without jaxtyping (a bare
accelerator image, say) the annotations are inert. The tests install it and check every shape.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or importlib.util.find_spec('jaxtyping'):
    from jaxtyping import Array, Bool, Float, Int, Key, Num, UInt8
else:

    class _Unchecked:
        def __class_getitem__(cls, _: Any) -> Any:
            return Any

    Array = Any
    Bool = Float = Int = Key = Num = UInt8 = _Unchecked

Params = dict[str, Any]
Batch = dict[str, Any]

__all__ = ['Array', 'Batch', 'Bool', 'Float', 'Int', 'Key', 'Num', 'Params', 'UInt8']
