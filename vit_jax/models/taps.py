"""Intermediate arrays of a model: how they are offered and captured.

The tables of docs/visualize.md list the taps by name, with their shapes. A test compares them
with the models.
"""

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import flax.linen as nn
import jax
from flax.traverse_util import flatten_dict

from vit_jax.base import Array, UserError, records

COLLECTION = 'taps'  # of Flax variables
Reduction = Callable[[Any], Any]  # what to keep of a tap's value, an array or a pair
Wanted = Iterable[str] | Mapping[str, Reduction]
# Returns the reduction of a tap by its name; None: the tap is not captured.
_reduction_of: ContextVar[Callable[[str], Reduction | None]] = ContextVar('_reduction_of')


def tap(module: nn.Module, name: str, value: Callable[[], Any]) -> None:
    """Offers `value()` to `Model.capture`; it is computed only if the tap is wanted.

    The tap is named by the module's place in the tree, without `encoder/block` and `backbone`, and
    `name`: `attention/weights` in every block.
    """
    if module.is_mutable_collection(COLLECTION) and not module.is_initializing():
        place = [part for part in module.path if part not in ('encoder', 'block', 'backbone')]
        full_name = '/'.join((*place, name))
        if reduction := _reduction_of.get()(full_name):
            module.sow(COLLECTION, f'/{full_name}', reduction(value()))  # no submodule's name


def seen(module: nn.Module, name: str, x: Array) -> Array:
    """Returns the array, and offers it as a tap."""
    tap(module, name, lambda: x)
    return x


def capture(forward: Callable[[], Mapping[str, Any]], wanted: Wanted) -> dict[str, Any]:
    """Returns the wanted taps of a forward pass.

    Args:
      forward: Runs the model and returns the mutable collections.
      wanted: Names of taps. If it maps names to functions, each tap is reduced by its function
        inside the block, before blocks are stacked: the whole arrays of all blocks are never in
        memory together.

    Raises:
      UserError: For an unknown name.
    """
    reductions = wanted if isinstance(wanted, Mapping) else dict.fromkeys(wanted, _whole)

    def captured(reduction_of: Callable[[str], Reduction | None]) -> dict[str, Any]:
        token = _reduction_of.set(reduction_of)
        try:
            collection = forward().get(COLLECTION, {})
        finally:
            _reduction_of.reset(token)
        return {path[-1][1:]: value for path, (value,) in flatten_dict(collection).items()}

    found = captured(reductions.get)
    for name in sorted(reductions.keys() - found):
        every = jax.eval_shape(lambda: captured(lambda name: _whole))
        raise UserError(f'capture: no {name!r} here; {records.nearest(name, every)}')
    return found


def _whole(value: Any) -> Any:
    return value
