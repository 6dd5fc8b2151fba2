"""Weight decay, learning rates and freezing of parameters, selected by name.

Each option reports which parameters it changes. A pattern that matches no parameter is an error.
"""

import dataclasses
import functools
import operator
import re
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax.base import UserError, records, tree_names
from vit_jax.training.objectives import TASK_PARAMS

BLOCKS = 'encoder/block/'  # the blocks of the model
_HEAD = r'(masked/)?head/.*'  # head for classes, or for patches
# Parameters of the head's layer. All others that are not in blocks belong to layer 0, so that a new
# kind of embedding never counts as part of the head.
_LAST_LAYER = re.compile(rf'(encoder/norm|norm|pool|pre_logits|{TASK_PARAMS})/.*|{_HEAD}')
_multiply = functools.partial(jax.tree.map, operator.mul)


@dataclasses.dataclass(kw_only=True)
class ParamGroupsConfig(records.Record):
    """Param groups: weight decay, learning rate factors, and frozen parameters.

    Weight decay is decoupled: the decay per step is learning rate times `weight_decay`. Patterns
    are regular expressions that match whole parameter names; a pattern without a match is an error.
    The factors of `layer_decay` and `lr_multipliers` are multiplied. `trained_blocks=k` trains the
    last k blocks, the final norm and the head; 0 trains only the head.
    """

    weight_decay: float = 0.0  # weight decay of the parameters that match decay_pattern
    head_weight_decay: float | None = None  # weight decay of the head; None: weight_decay
    decay_pattern: str = r'(.*/)?kernel'  # pattern of the parameters that weight decay applies to
    layer_decay: float | None = None  # learning rate factor per layer below the head; None: 1
    lr_multipliers: tuple[tuple[str, float], ...] = ()  # (pattern, learning rate factor) pairs
    trained_blocks: int | None = None  # number of last blocks to train; 0: only head; None: all
    frozen: tuple[str, ...] = ()  # patterns of parameters that are not trained

    def check(self) -> None:
        records.require_between(self, 'weight_decay', 'head_weight_decay', 'trained_blocks', low=0)
        records.require_between(self, 'layer_decay', above=0, high=1)
        multiplied = (pattern for pattern, _ in self.lr_multipliers)
        for pattern in self.decay_pattern, *self.frozen, *multiplied:
            records.require_pattern(pattern)
        for pattern, factor in self.lr_multipliers:
            records.require(
                0 <= factor < float('inf'),
                f'lr_multipliers: factor {factor} of {pattern!r}; expected a number, at least 0',
            )


class ParamGroups(NamedTuple):
    """Param groups of a model, as trees with the structure of its parameters."""

    decayed: dict[str, Any]  # tree of booleans for each field with a weight decay, by its name
    trained: Any  # tree of booleans, each a scalar or an array over blocks
    lr_factors: Any | None  # tree of learning rate factors, as `trained`; None: all are 1
    report: list[str]  # one line per option or pattern, with what it matches

    def stop_frozen_gradients(self, params: Any) -> Any:
        """Applies stop_gradient to frozen parameters."""

        def stop(param: Any, trained: Any) -> Any:
            if np.all(trained):
                return param
            stopped = jax.lax.stop_gradient(param)
            return jax.numpy.where(trained, param, stopped) if np.any(trained) else stopped

        return jax.tree.map(stop, params, self.trained)

    @property
    def trainable(self) -> Any:
        """Tree of booleans: True if any part of the leaf is trained."""
        return jax.tree.map(lambda trained: bool(np.any(trained)), self.trained)


def make_param_groups(config: ParamGroupsConfig, params: Any) -> ParamGroups:
    """Makes the param groups for the names and shapes of parameters, which may be abstract.

    Raises:
      UserError: If a pattern matches no parameter, or the model does not support an option.
    """
    has_head = any(re.fullmatch(_HEAD, name) for name in tree_names.named_leaves(params))
    without_head = 'the model has no head; leave it out'
    records.require(
        has_head or config.trained_blocks != 0,
        f'config.optimizer.trained_blocks=0: {without_head}',
    )
    records.require(
        has_head or config.head_weight_decay is None,
        f'config.optimizer.head_weight_decay={config.head_weight_decay}: {without_head}',
    )
    report: list[str] = []
    factors = tree_names.map_named(lambda name, _: np.float32(1), params)

    def multiply_matched(pattern: str, factor: float, what: str) -> Any:
        mask = tree_names.match_mask(params, pattern)
        report.append(f'{what}: {_describe_match(params, mask)}')
        return _multiply(factors, jax.tree.map(lambda m: np.float32(factor if m else 1), mask))

    if config.layer_decay is not None:
        decay = config.layer_decay
        layers, head = _layer_indices(params, 'layer_decay')
        slower = jax.tree.map(lambda layer: np.float32(decay) ** (head - layer), layers)
        factors = _multiply(factors, slower)
        report.append(f'learning rate x {decay:g} for each layer below the head')
    for pattern, factor in config.lr_multipliers:
        factors = multiply_matched(pattern, factor, f'learning rate x {factor:g}')
    if config.trained_blocks is not None:
        factors = _multiply(factors, _trainable_factors(params, config.trained_blocks))
        counts = jax.tree.map(lambda leaf, f: leaf.size * float(np.mean(f != 0)), params, factors)
        num_params = round(sum(jax.tree.leaves(counts)))
        report.append(
            f'trained: {_describe_trained(config.trained_blocks)}, {num_params:,} parameters'
        )
    for pattern in config.frozen:
        factors = multiply_matched(pattern, 0.0, 'frozen')
    decayed: dict[str, Any] = {}
    rules = [rule for rule in _decay_rules(config) if rule.amount]
    matches_pattern = tree_names.match_mask(params, config.decay_pattern) if rules else None
    for rule in rules:
        is_in_part = tree_names.match_mask(params, rule.pattern)
        mask = jax.tree.map(operator.and_, matches_pattern, is_in_part)
        records.require(
            any(jax.tree.leaves(mask)),
            f'config.optimizer.decay_pattern={config.decay_pattern!r}: '
            f'matches no parameter{rule.label}',
        )
        decayed[rule.field] = mask
        report.append(f'weight decay {rule.amount:g}{rule.label}: {_describe_match(params, mask)}')
    trained = jax.tree.map(lambda factor: factor != 0, factors)
    has_equal_rates = all(np.all(factor == 1) for factor in jax.tree.leaves(factors))
    return ParamGroups(
        decayed=decayed,
        trained=trained,
        lr_factors=None if has_equal_rates else factors,
        report=report,
    )


class _DecayRule(NamedTuple):
    """Weight decay of one part of the model."""

    field: str  # of the configuration
    amount: float
    pattern: str  # of the names of the part's parameters
    label: str = ''  # of the part, in messages


def _decay_rules(config: ParamGroupsConfig) -> list[_DecayRule]:
    """Returns the weight decay of the whole model, or of its body and its head."""
    if config.head_weight_decay is None:
        return [_DecayRule('weight_decay', config.weight_decay, pattern='.*')]
    return [
        _DecayRule(
            'weight_decay', config.weight_decay, pattern=f'(?!{_HEAD}).*', label=' of the body'
        ),
        _DecayRule(
            'head_weight_decay', config.head_weight_decay, pattern=_HEAD, label=' of the head'
        ),
    ]


def _describe_trained(blocks: int) -> str:
    if blocks == 0:
        return 'the head'
    last_blocks = 'the last block' if blocks == 1 else f'the last {blocks} blocks'
    return f'the head, the final norm and {last_blocks}'


def _trainable_factors(params: Any, count: int) -> Any:
    """Returns 1 for trained parameters (the last blocks and later layers, or the head), else 0."""
    if count == 0:
        return jax.tree.map(np.float32, tree_names.match_mask(params, _HEAD))
    layers, head = _layer_indices(params, 'trained_blocks')
    if count >= head:
        raise UserError(f'config.optimizer.trained_blocks={count}: expected at most {head - 1}')
    return jax.tree.map(lambda layer: np.float32(layer >= head - count), layers)


def is_stacked(name: str) -> bool:
    """Returns whether a parameter is stacked over blocks, so that its first axis is the depth."""
    return BLOCKS in name


def _layer_indices(params: Any, field: str) -> tuple[Any, int]:
    """Returns the layer index of each leaf, and of the head.

    Embeddings are layer 0. Blocks are layers 1, 2, ... along axis 0 of their leaves. The head is
    the last layer.
    """
    leaves = tree_names.named_leaves(params).items()
    depth = next((leaf.shape[0] for name, leaf in leaves if name.startswith(BLOCKS)), None)
    if depth is None:
        raise UserError(f'config.optimizer.{field}: a ResNet has no blocks; use a ViT or hybrid')

    def layer(name: str, leaf: Any) -> np.ndarray:
        if name.startswith(BLOCKS):
            return np.arange(1, depth + 1).reshape(-1, *[1] * (leaf.ndim - 1))
        return np.array(depth + 1 if _LAST_LAYER.fullmatch(name) else 0)

    return tree_names.map_named(layer, params), depth + 1


def _describe_match(params: Any, mask: Any) -> str:
    """Describes matched parameters: the number of arrays and of parameters, and their names."""
    chosen = tree_names.named_leaves(mask)
    leaves = {name: leaf for name, leaf in tree_names.named_leaves(params).items() if chosen[name]}
    num_params = sum(leaf.size for leaf in leaves.values())
    names = [*leaves]
    shown = ', '.join(names if len(names) <= 2 else [names[0], '...'])
    return f'{len(leaves)} of {len(chosen)} arrays, {num_params:,} parameters: {shown}'
