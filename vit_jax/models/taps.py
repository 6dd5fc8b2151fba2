"""Taps: named intermediate arrays of a model (Flax: intermediates) for `Model.capture`.

docs/visualize.md lists all taps with their shapes. A test compares its tables with the models.
"""

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import flax.linen as nn
import jax
from flax.traverse_util import flatten_dict

from vit_jax.base import Array, UserError, records

COLLECTION = 'taps'  # name of the Flax variable collection
Reduction = Callable[[Any], Any]  # applied to a tap's value, which is an array or a pair of arrays
TapSelection = Iterable[str] | Mapping[str, Reduction]
# The function that maps the name of a tap to its reduction, or to None if it is not captured.
_reduction_of: ContextVar[Callable[[str], Reduction | None]] = ContextVar('_reduction_of')


def tap(module: nn.Module, name: str, value: Callable[[], Any]) -> None:
    """Offers `value()` to `Model.capture`; it is computed only if the tap is captured.

    The tap's name is the module's path without `encoder`, `block` and `backbone`, then `name`: for
    example `attention/weights`, in every block.
    """
    if module.is_mutable_collection(COLLECTION) and not module.is_initializing():
        unnamed = 'encoder', 'block', 'backbone'
        modules = [module_name for module_name in module.path if module_name not in unnamed]
        full_name = '/'.join((*modules, name))
        reduction = _reduction_of.get()(full_name)
        if reduction is not None:
            # The leading slash keeps the name distinct from submodules.
            module.sow(COLLECTION, f'/{full_name}', reduction(value()))


def tap_array(module: nn.Module, name: str, x: Array) -> Array:
    """Offers an array as a tap and returns it."""
    tap(module, name, lambda: x)
    return x


def capture(forward: Callable[[], Mapping[str, Any]], wanted: TapSelection) -> dict[str, Any]:
    """Runs a forward pass and returns the selected taps by name.

    Args:
      forward: Runs the model and returns the mutable collections, for example
        `lambda: module.apply({'params': params}, images, mutable=[COLLECTION])[1]`.
      wanted: Names of taps. If it maps names to functions, each tap is reduced by its function
        inside the block, so that the whole arrays of all blocks are never in memory together.

    Raises:
      UserError: If a name is unknown.
    """
    reductions = wanted if isinstance(wanted, Mapping) else dict.fromkeys(wanted, _identity)

    def run(reduction_of: Callable[[str], Reduction | None]) -> dict[str, Any]:
        token = _reduction_of.set(reduction_of)
        try:
            collection = forward().get(COLLECTION, {})
        finally:
            _reduction_of.reset(token)
        return {path[-1][1:]: value for path, (value,) in flatten_dict(collection).items()}

    values = run(reductions.get)
    for name in sorted(reductions.keys() - values):
        taps = jax.eval_shape(lambda: run(lambda name: _identity))
        raise UserError(f'capture: no activation {name!r}; {records.closest(name, taps)}')
    return values


def _identity(value: Any) -> Any:
    return value
