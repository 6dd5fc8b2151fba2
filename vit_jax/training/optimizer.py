"""How gradients become updates: schedules and optimizers."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.base import tree_names
from vit_jax.base.array_types import Array, Float, Int
from vit_jax.base.errors import UserError
from vit_jax.base.records import Record
from vit_jax.training.duration import Duration, TrainLength
from vit_jax.training.rules import BLOCKS, Rules, RulesConfig

_LEAST_SIDE, _NEVER = 32, 2**62  # of a matrix whose second moment is kept as rows and columns
Schedule = Callable[[Int[Array, '']], Float[Array, '']]


def _steps(count: int) -> Any:
    return dataclasses.field(default_factory=lambda: Duration(steps=count))


Decay = Literal['cosine', 'linear', 'rsqrt', 'constant']


@dataclasses.dataclass(kw_only=True)
class ScheduleConfig(Record):
    """The learning rate over the steps: linear warm-up from 0, then a decay."""

    kind: Decay = 'cosine'
    learning_rate: float = 1e-3  # the peak
    warmup: Duration = _steps(0)
    linear_end: float = 1e-5  # where the linear decay ends, as in the paper's code
    rsqrt_timescale: Duration = _steps(10_000)
    cooldown: Duration = _steps(0)  # linear to 0 at the end, after any decay


@dataclasses.dataclass(kw_only=True)
class OptimizerConfig(RulesConfig):
    """AdamW, SGD with momentum, or the Adafactor of Scaling Vision Transformers."""

    kind: Literal['adamw', 'sgd', 'adafactor'] = 'adamw'
    b1: float = 0.9  # of adamw, and of adafactor's momentum
    b2: float = 0.999  # of adamw; the highest that adafactor's rises to
    epsilon: float = 1e-8
    momentum: float = 0.9
    clip_norm: float | None = None  # of the whole gradient
    moment_dtype: Literal['float32', 'bfloat16'] = 'float32'  # of the first moment


def make_schedule(config: ScheduleConfig, length: TrainLength) -> Schedule:
    """The learning rate at each step.

    As in the paper's code the progress is counted after the warm-up, and the result is multiplied
    by min(1, step / warmup): step 0 of a warm-up has rate 0.
    """
    total_steps, peak = length.total_steps, config.learning_rate
    warmup, cooldown = length.steps(config.warmup), length.steps(config.cooldown)
    timescale = length.steps(config.rsqrt_timescale)
    if warmup + cooldown > total_steps:
        raise UserError(
            f'a warm-up of {warmup} steps ({config.warmup}) and a cool-down of {cooldown} '
            f'({config.cooldown}) do not fit into {total_steps} steps'
        )

    def schedule(step: Int[Array, '']) -> Float[Array, '']:
        after = jnp.maximum(0.0, step - warmup)
        progress = jnp.minimum(1.0, after / max(1, total_steps - warmup))
        match config.kind:
            case 'cosine':
                rate = peak * 0.5 * (1 + jnp.cos(jnp.pi * progress))
            case 'linear':
                rate = config.linear_end + (peak - config.linear_end) * (1 - progress)
            case 'rsqrt':  # continuous at the end of the warm-up (Scaling Vision Transformers)
                rate = peak / jnp.sqrt(1 + after / timescale)
            case _:
                rate = jnp.asarray(peak, jnp.float32)
        if warmup:
            rate = rate * jnp.minimum(1.0, step / warmup)
        if cooldown:
            rate = rate * jnp.minimum(1.0, (total_steps - step) / cooldown)
        return rate

    return schedule


def make_optimizer(
    config: OptimizerConfig, schedule: Schedule, rules: Rules
) -> optax.GradientTransformation:
    """The optimizer of parameters for which these are the rules.

    What is frozen has neither moments nor a part in the norm that is clipped.
    """
    steps = []
    if config.clip_norm is not None:
        steps.append(optax.clip_by_global_norm(config.clip_norm))
    moments, everything = _moments(config), all(jax.tree.leaves(rules.learned))
    steps.append(moments if everything else optax.masked(moments, rules.learned))
    steps += [optax.add_decayed_weights(amount, mask) for amount, mask in rules.decays]
    if any(np.any(rate != 1) for rate in jax.tree.leaves(rules.rates)):
        steps.append(_scale_each(rules.rates))
    return optax.chain(*steps, optax.scale_by_learning_rate(schedule))


def _moments(config: OptimizerConfig) -> optax.GradientTransformation:
    match config.kind:
        case 'adamw':
            b1, b2, epsilon = config.b1, config.b2, config.epsilon
            return optax.scale_by_adam(b1, b2, epsilon, mu_dtype=config.moment_dtype)
        case 'sgd':
            return optax.trace(config.momentum, accumulator_dtype=config.moment_dtype)
        case _:
            return _adafactor(config)


def _adafactor(config: OptimizerConfig) -> optax.GradientTransformation:
    """Second moments as rows and columns, no scaling by parameters, momentum added again."""

    def decay(step: Any, exponent: float) -> Any:
        return jnp.minimum(config.b2, 1 - (step + 1.0) ** -exponent)

    def scaled(least_side: int) -> optax.GradientTransformation:
        return optax.scale_by_factored_rms(
            min_dim_size_to_factor=least_side, decay_rate_fn=decay, epsilon=1e-30
        )

    def are_vectors(params: Any) -> Any:
        """Stacked vectors too: the depth is no side of a matrix."""
        return tree_names.map_named(
            lambda name, leaf: leaf.ndim - name.startswith(BLOCKS) < 2, params
        )

    def are_others(params: Any) -> Any:
        return jax.tree.map(operator.not_, are_vectors(params))

    return optax.chain(
        optax.masked(scaled(_NEVER), are_vectors),
        optax.masked(scaled(_LEAST_SIDE), are_others),
        optax.ema(config.b1, debias=False, accumulator_dtype=config.moment_dtype),
    )


def _scale_each(factors: Any) -> optax.GradientTransformation:
    """Each leaf of the updates times its factor."""
    return optax.stateless(
        lambda updates, params: jax.tree.map(lambda update, f: update * f, updates, factors)
    )
