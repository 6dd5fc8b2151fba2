"""Rules over the names of parameters: weight decay, learning rates, freezing.

Every rule reports what it matched, and one that matches nothing is an error.
"""

import dataclasses
import functools
import operator
import re
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax.base import UserError, records, tree_names

BLOCKS = 'encoder/block/'  # stacked: the first axis of these is the depth
_HEAD = r'(masked/)?head/.*'  # of the classes, or of each patch
# The layer of the head. Whatever has another name and is no block is an input, the lowest layer, so
# that a new kind of embedding is never taken for a part of the head.
_LAST_LAYER = re.compile(rf'(encoder/norm|norm|pool|pre_logits)/.*|{_HEAD}')
_times = functools.partial(jax.tree.map, operator.mul)


@dataclasses.dataclass(kw_only=True)
class RulesConfig(records.Record):
    """What is done to some parameters and not to others.

    Weight decay is decoupled: multiplied by the learning rate alone. Patterns are regular
    expressions for whole names of parameters; one that matches nothing is an error. Learning rates
    can be smaller for layers further from the head (`layer_decay`, a factor for each), multiplied
    by name (`lr_multipliers`), or nothing: `trained_blocks=0` learns the head alone, k the last k
    blocks with all that follows, and `frozen` names what stays as it is.
    """

    weight_decay: float = 0.0  # of the parameters that decay_pattern names
    head_weight_decay: float | None = None  # None: that of the body
    decay_pattern: str = r'(.*/)?kernel'  # what weight_decay applies to
    layer_decay: float | None = None  # factor of the rate, a layer further down; None: 1
    lr_multipliers: tuple[tuple[str, float], ...] = ()  # (pattern of names, factor of the rate)
    trained_blocks: int | None = None  # the last so many, and what follows; 0: the head; None: all
    frozen: tuple[str, ...] = ()  # patterns of names of what is not learned

    def check(self) -> None:
        records.require_between(self, 'weight_decay', 'head_weight_decay', 'trained_blocks', low=0)
        records.require_between(self, 'layer_decay', above=0, high=1)
        rates = (pattern for pattern, _ in self.lr_multipliers)
        for pattern in self.decay_pattern, *self.frozen, *rates:
            records.require_pattern(pattern)
        for pattern, factor in self.lr_multipliers:
            wrong = f'{pattern!r} is {factor}, expected a number, at least 0'
            records.require(0 <= factor < float('inf'), f'lr_multipliers: {wrong}')


class Rules(NamedTuple):
    """What a configuration means for parameters like these."""

    weight_decays: list[tuple[float, Any]]  # how much, and a tree of booleans: where
    lr_multipliers: Any  # a tree of factors: numbers, or one for each block; 0 is frozen
    report: list[str]

    def stop_frozen_gradients(self, params: Any) -> Any:
        """The parameters, without a gradient for those that are frozen."""

        def stop(param: Any, factor: Any) -> Any:
            if np.all(factor != 0):
                return param
            stopped = jax.lax.stop_gradient(param)
            return stopped if not np.any(factor) else jax.numpy.where(factor != 0, param, stopped)

        return jax.tree.map(stop, params, self.lr_multipliers)

    @property
    def learned(self) -> Any:
        """A tree of booleans: is any part of the leaf learned?"""
        return jax.tree.map(lambda factor: bool(np.any(factor)), self.lr_multipliers)


def make_rules(config: RulesConfig, params: Any) -> Rules:
    """The rules for parameters like these: names and shapes are used.

    Raises UserError for a pattern that matches none, or a rule that this network cannot follow.
    """
    report: list[str] = []
    factors = tree_names.map_named(lambda name, _: np.float32(1), params)

    def multiply_matched(pattern: str, factor: float, what: str) -> Any:
        mask = tree_names.mask_of(params, pattern)
        report.append(f'{what}: {_matched(params, mask)}')
        return _times(factors, jax.tree.map(lambda m: np.float32(factor if m else 1), mask))

    if (decay := config.layer_decay) is not None:
        layers, head = _layers(params, 'layer_decay')
        slower = jax.tree.map(lambda layer: np.float32(decay) ** (head - layer), layers)
        factors = _times(factors, slower)
        report.append(f'learning rate x {decay:g} for each layer below the head')
    for pattern, factor in config.lr_multipliers:
        factors = multiply_matched(pattern, factor, f'learning rate x {factor:g}')
    if (blocks := config.trained_blocks) is not None:
        factors = _times(factors, _last_blocks(params, blocks))
        last = 'the last block' if blocks == 1 else f'the last {blocks} blocks'
        what = f'the head, the final norm and {last}' if blocks else 'the head'
        learned = jax.tree.map(lambda leaf, f: leaf.size * float(np.mean(f != 0)), params, factors)
        report.append(f'learned: {what}, {round(sum(jax.tree.leaves(learned))):,} numbers')
    for pattern in config.frozen:
        factors = multiply_matched(pattern, 0.0, 'frozen')
    # Weight decay of the body and, where it has one of its own, of the head.
    body = config.weight_decay
    parts = [('', body, '.*')]
    if (own := config.head_weight_decay) is not None:
        parts = [(' of the body', body, f'(?!{_HEAD}).*'), (' of the head', own, _HEAD)]
    decays = []
    for part, amount, where in parts:
        if amount:
            decayed = tree_names.mask_of(params, config.decay_pattern)
            mask = jax.tree.map(operator.and_, decayed, tree_names.mask_of(params, where))
            if not any(jax.tree.leaves(mask)):
                raise UserError(f'decay_pattern={config.decay_pattern!r} matches nothing{part}')
            decays.append((amount, mask))
            report.append(f'weight decay {amount:g}{part}: {_matched(params, mask)}')
    return Rules(decays, factors, report)


def _last_blocks(params: Any, count: int) -> Any:
    """1 for what is learned: the head alone, or what follows from the last blocks on."""
    if count == 0:
        return jax.tree.map(np.float32, tree_names.mask_of(params, _HEAD))
    layers, head = _layers(params, 'trained_blocks')
    if count >= head:
        raise UserError(f'optimizer.trained_blocks={count}: the network has {head - 1} blocks')
    return jax.tree.map(lambda layer: np.float32(layer >= head - count), layers)


def _layers(params: Any, field: str) -> tuple[Any, int]:
    """The layer of each leaf, and that of the head. Inputs are 0, blocks 1, 2, ... along axis 0."""
    leaves = tree_names.named_leaves(params).items()
    depth = next((leaf.shape[0] for name, leaf in leaves if name.startswith(BLOCKS)), None)
    if depth is None:
        raise UserError(f'optimizer.{field} needs a network of encoder blocks: a ViT, or a hybrid')

    def layer(name: str, leaf: Any) -> np.ndarray:
        if name.startswith(BLOCKS):
            return np.arange(1, depth + 1).reshape(-1, *[1] * (leaf.ndim - 1))
        return np.array(depth + 1 if _LAST_LAYER.fullmatch(name) else 0)

    return tree_names.map_named(layer, params), depth + 1


def _matched(params: Any, mask: Any) -> str:
    """How many arrays and numbers a rule matched, and their names, of many the first."""
    chosen = tree_names.named_leaves(mask)
    leaves = {name: leaf for name, leaf in tree_names.named_leaves(params).items() if chosen[name]}
    size, names = sum(leaf.size for leaf in leaves.values()), [*leaves]
    shown = ', '.join(names if len(names) <= 2 else [names[0], '...'])
    return f'{len(leaves)} of {len(chosen)} arrays, {size:,} numbers: {shown}'
