"""How gradients become updates: schedules and optimizers."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, Literal, assert_never

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.base import Array, Float, Int, counted, records, tree_names
from vit_jax.training.duration import Duration, TrainLength
from vit_jax.training.rules import BLOCKS, Rules, RulesConfig

Schedule = Callable[[Int[Array, '']], Float[Array, '']]
Decay = Literal['cosine', 'linear', 'rsqrt', 'constant']
# The options of each optimizer, with their defaults.
OPTIONS: dict[str, dict[str, float]] = {
    'adamw': {'b1': 0.9, 'b2': 0.999, 'epsilon': 1e-8},
    'sgd': {'momentum': 0.9},
    'adafactor': {'b1': 0.9, 'b2': 0.999},  # of its momentum; the highest that its b2 rises to
}
_LINEAR_END, _RSQRT_TIMESCALE = 1e-5, 10_000


def _steps(count: int) -> Any:
    return dataclasses.field(default_factory=lambda: Duration(steps=count))


def _require_kind(config: Any, users: list[str], option: str) -> None:
    """The option, which is set, is one that this kind of schedule or optimizer uses."""
    wrong = f'kind={config.kind} has no such option, it is of {" and ".join(users)}'
    records.require(config.kind in users, f'{option}: {wrong}')


@dataclasses.dataclass(kw_only=True)
class ScheduleConfig(records.Record):
    """The learning rate over the steps: linear warm-up from 0, then a decay."""

    kind: Decay = 'cosine'  # to 0; linear: to linear_end; rsqrt: 1/sqrt of steps; constant
    learning_rate: float = 1e-3  # the peak
    warmup: Duration = _steps(0)  # from 0 to the peak, linear
    linear_end: float | None = None  # where a linear decay ends; None: at 1e-5, as in ViT's code
    # Not None, so that a command line can assign its `steps`, `epochs`, ...
    rsqrt_timescale: Duration = _steps(_RSQRT_TIMESCALE)  # t of peak / sqrt(1 + n/t), of rsqrt
    cooldown: Duration = _steps(0)  # linear to 0 at the end, after any decay

    def check(self) -> None:
        records.require_between(self, 'learning_rate', 'linear_end', low=0)
        records.require(any(vars(self.rsqrt_timescale).values()), 'rsqrt_timescale is 0')
        if self.linear_end is not None:
            _require_kind(self, ['linear'], f'linear_end={self.linear_end}')
        if self.rsqrt_timescale != Duration(steps=_RSQRT_TIMESCALE):
            _require_kind(self, ['rsqrt'], 'rsqrt_timescale')


@dataclasses.dataclass(kw_only=True)
class OptimizerConfig(RulesConfig):
    """AdamW, SGD with momentum, or the Adafactor of Scaling Vision Transformers."""

    # The rules are inherited so that the command line has short names, optimizer.weight_decay.
    kind: Literal['adamw', 'sgd', 'adafactor'] = 'adamw'  # adafactor: ViT-g's
    b1: float | None = None  # None, of this and the next three: the optimizer's own default
    b2: float | None = None  # of the second moment
    epsilon: float | None = None  # of AdamW, added to the root
    momentum: float | None = None  # of SGD
    clip_norm: float | None = None  # of the whole gradient
    moment_dtype: Literal['float32', 'bfloat16'] = 'float32'  # of the first moment

    def check(self) -> None:
        super().check()
        records.require_between(self, 'b1', 'b2', 'momentum', low=0, below=1)
        records.require_between(self, 'epsilon', 'clip_norm', above=0)
        for name in ('b1', 'b2', 'epsilon', 'momentum'):
            if (value := getattr(self, name)) is not None:
                users = [kind for kind, options in OPTIONS.items() if name in options]
                _require_kind(self, users, f'{name}={value}')


def make_schedule(config: ScheduleConfig, length: TrainLength) -> Schedule:
    """The learning rate at each step.

    As in the paper's code the progress is counted after the warm-up, and the result is multiplied
    by min(1, step / warmup): step 0 of a warm-up has rate 0.
    """
    total_steps, peak = length.total_steps, config.learning_rate
    warmup, cooldown = length.steps(config.warmup), length.steps(config.cooldown)
    timescale = length.steps(config.rsqrt_timescale)
    end = _LINEAR_END if config.linear_end is None else config.linear_end
    both = f'warmup of {counted(warmup, "step")} ({config.warmup}) and cooldown of {cooldown}'
    message = f'{both} ({config.cooldown}) do not fit into {counted(total_steps, "step")}'
    given = {'warmup': warmup, 'cooldown': cooldown}
    fits = ' '.join(f'--config.schedule.{name}.fraction=0.1' for name in given if given[name])
    wrong = f'config.schedule: {message}: take {fits} instead'
    records.require(warmup + cooldown <= total_steps, wrong)

    def schedule(step: Int[Array, '']) -> Float[Array, '']:
        after = jnp.maximum(0.0, step - warmup)
        progress = jnp.minimum(1.0, after / max(1, total_steps - warmup))
        match config.kind:
            case 'cosine':
                rate = peak * 0.5 * (1 + jnp.cos(jnp.pi * progress))
            case 'linear':
                rate = end + (peak - end) * (1 - progress)
            case 'rsqrt':  # continuous at the end of the warm-up (Scaling Vision Transformers)
                rate = peak / jnp.sqrt(1 + after / timescale)
            case 'constant':
                rate = jnp.asarray(peak, jnp.float32)
            case other:
                assert_never(other)
        if warmup:
            rate = rate * jnp.minimum(1.0, step / warmup)
        if cooldown:
            rate = rate * jnp.minimum(1.0, (total_steps - step) / cooldown)
        return rate

    return schedule


def make_optimizer(
    config: OptimizerConfig, schedule: Schedule, rules: Rules
) -> optax.GradientTransformation:
    """The optimizer; what the rules freeze has no moments and no part in the clipped norm."""
    steps = []
    if config.clip_norm is not None:
        steps.append(optax.clip_by_global_norm(config.clip_norm))
    moments, everything = _moments(config), all(jax.tree.leaves(rules.learned))
    steps.append(moments if everything else optax.masked(moments, rules.learned))
    steps += [optax.add_decayed_weights(amount, mask) for amount, mask in rules.weight_decays]
    factors = rules.lr_multipliers
    if any(np.any(factor != 1) for factor in jax.tree.leaves(factors)):
        steps.append(optax.stateless(lambda given, _: jax.tree.map(operator.mul, given, factors)))
    return optax.chain(*steps, optax.scale_by_learning_rate(schedule))


def _moments(config: OptimizerConfig) -> optax.GradientTransformation:
    given = {name: getattr(config, name) for name in OPTIONS[config.kind]}
    use = OPTIONS[config.kind] | {name: value for name, value in given.items() if value is not None}
    match config.kind:
        case 'adamw':
            b1, b2, epsilon = use['b1'], use['b2'], use['epsilon']
            return optax.scale_by_adam(b1, b2, epsilon, mu_dtype=config.moment_dtype)
        case 'sgd':
            return optax.trace(use['momentum'], accumulator_dtype=config.moment_dtype)
        case 'adafactor':
            return _adafactor(use['b1'], use['b2'], config.moment_dtype)
        case other:
            assert_never(other)


def count_moments(config: OptimizerConfig) -> int:
    """Returns how many values the optimizer stores per parameter of a large matrix."""
    matrix = jax.ShapeDtypeStruct((1024, 1024), np.float32)
    state = jax.eval_shape(_moments(config).init, {'kernel': matrix})
    return sum(leaf.size for leaf in jax.tree.leaves(state)) // matrix.size


def _adafactor(b1: float, b2: float, moment_dtype: str) -> optax.GradientTransformation:
    """Second moments as rows and columns, no scaling by parameters, momentum added again."""

    def decay(step: Any, exponent: float) -> Any:
        return jnp.minimum(b2, 1 - (step + 1.0) ** -exponent)

    def scaled(least_side: int, *, vectors: bool) -> optax.GradientTransformation:
        rms = optax.scale_by_factored_rms(
            min_dim_size_to_factor=least_side, decay_rate_fn=decay, epsilon=1e-30
        )

        def are(name: str, leaf: Any) -> bool:  # the stacked depth is no side
            return (leaf.ndim - name.startswith(BLOCKS) < 2) == vectors

        return optax.masked(rms, functools.partial(tree_names.map_named, are))

    return optax.chain(
        scaled(least_side=2**62, vectors=True),  # never as rows and columns
        scaled(least_side=32, vectors=False),  # as in big_vision; optax has 128
        optax.ema(b1, debias=False, accumulator_dtype=moment_dtype),
    )
