"""Shape annotations of jaxtyping, where it is installed.

The model and the update step need jax, flax, optax and numpy alone; without jaxtyping (a bare
accelerator image, say) the annotations are inert. The tests install it and check every shape.
`Array` imports jax when it is asked for: processes that only decode images have none.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Array
if TYPE_CHECKING or importlib.util.find_spec('jaxtyping'):
    from jaxtyping import Bool, Float, Int, Key, Num, UInt8
else:

    class _Unchecked:
        def __class_getitem__(cls, _: Any) -> Any:
            return Any

    Bool = Float = Int = Key = Num = UInt8 = _Unchecked

Params = dict[str, Any]
Batch = dict[str, Any]

__all__ = ['Array', 'Batch', 'Bool', 'Float', 'Int', 'Key', 'Num', 'Params', 'UInt8']


def __getattr__(name: str) -> Any:
    if name != 'Array':
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    if importlib.util.find_spec('jaxtyping') is None:
        return Any
    from jaxtyping import Array

    return Array
