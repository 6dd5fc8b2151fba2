"""Intermediate arrays of a model: how they are offered and captured.

The tables of the page "Look inside" list the taps by name, with their shapes. A test compares them
with the models.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import flax.linen as nn
import jax
from flax.core.scope import DenyList

from vit_jax.base import Array, UserError, records

# What becomes of a tap's value, an array or a pair, where it is computed: any tree of arrays.
Reduction = Callable[[Any], Any]
Wanted = Iterable[str] | Mapping[str, Reduction]
_reductions: ContextVar[Mapping[str, Reduction]] = ContextVar('_reductions')


def tap(module: nn.Module, name: str, value: Callable[[], Any]) -> None:
    """Offers `value()` to `Model.capture`; computed only if it is asked for by name.

    It is a Flax collection of its own, whose name is the module's place in the tree, without
    `encoder/block` and `backbone`, and `name`: `attention/weights` in every block.
    """
    place = [part for part in module.path if part not in ('encoder', 'block', 'backbone')]
    collection = '/'.join((*place, name))
    if module.is_mutable_collection(collection) and not module.is_initializing():
        kept = _reductions.get({}).get(collection, lambda whole: whole)(value())
        module.sow(collection, 'tapped', kept, reduce_fn=lambda _, latest: latest)


def needs_everything(module: nn.Module) -> bool:
    """Are parameters made, or taps asked for? Then nothing may be left out."""
    return module.is_initializing() or bool(module.scope and module.scope.root.mutable)


def seen(module: nn.Module, name: str, x: Array) -> Array:
    """The array itself, offered as a tap."""
    tap(module, name, lambda: x)
    return x


def capture(forward: Callable[[Any], Mapping[str, Any]], wanted: Wanted) -> dict[str, Any]:
    """The taps of these names, from a forward pass that gives the collections it is asked for.

    If `wanted` is a mapping, each tap is reduced by its function inside the block, before blocks
    are stacked: the whole arrays of all blocks are then never in memory together. Raises UserError
    for an unknown name.
    """
    reductions = wanted if isinstance(wanted, Mapping) else {}
    names = [*dict.fromkeys(wanted)]

    def kept(collections: Any) -> dict[str, Any]:
        with _reduced(reductions):
            return {name: _tapped(found) for name, found in forward(collections).items()}

    every = jax.eval_shape(lambda: kept(DenyList('params')))
    for name in names:
        if name not in every:
            raise UserError(f'capture: no {name!r} here; {records.nearest(name, every)}')
    return kept(names)


def _tapped(collection: Mapping[str, Any]) -> Any:
    """What was kept in a collection, whose only other keys are the way to its module."""
    while 'tapped' not in collection:
        (collection,) = collection.values()
    return collection['tapped']


@contextlib.contextmanager
def _reduced(reductions: Mapping[str, Reduction]) -> Iterator[None]:
    """Within, taps keep what these functions make of them: it is traced, and does not run."""
    token = _reductions.set(reductions)
    try:
        yield
    finally:
        _reductions.reset(token)
