"""How gradients become updates: schedules and optimizers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from vit_jax import records, tree
from vit_jax.typing import Array, Float, Int

Schedule = Callable[[Int[Array, '']], Float[Array, '']]


@dataclasses.dataclass(kw_only=True)
class ScheduleConfig:
    """The learning rate over the steps: linear warm-up from 0, then a decay."""

    kind: str = records.choice('cosine', 'linear', 'rsqrt', 'constant')
    learning_rate: float = 1e-3  # the peak
    warmup_steps: int = 0
    linear_end: float = 1e-5  # where the linear decay ends, as in the paper's code
    rsqrt_timescale_steps: int = 10_000
    cooldown_steps: int = 0  # linear to 0 at the end, after any decay


@dataclasses.dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW or SGD with momentum; decay is decoupled: multiplied by the learning rate alone."""

    kind: str = records.choice('adamw', 'sgd')
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8
    momentum: float = 0.9
    weight_decay: float = 0.0
    decayed: str = r'(.*/)?kernel'  # the whole names of the parameters that decay
    clip_norm: float | None = None  # of the whole gradient
    moment_dtype: str = records.choice('float32', 'bfloat16')  # of the first moment


def make_schedule(config: ScheduleConfig, *, total_steps: int) -> Schedule:
    """The learning rate at each step.

    As in the paper's code the progress is counted after the warm-up, and the result is multiplied
    by min(1, step / warmup_steps): step 0 of a warm-up has rate 0.
    """
    warmup, cooldown, peak = config.warmup_steps, config.cooldown_steps, config.learning_rate
    if warmup + cooldown > total_steps:
        raise ValueError(
            f'warmup_steps={warmup} and cooldown_steps={cooldown} do not fit into '
            f'total_steps={total_steps}'
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
                rate = peak / jnp.sqrt(1 + after / config.rsqrt_timescale_steps)
            case _:
                rate = jnp.asarray(peak, jnp.float32)
        if warmup:
            rate = rate * jnp.minimum(1.0, step / warmup)
        if cooldown:
            rate = rate * jnp.minimum(1.0, (total_steps - step) / cooldown)
        return rate

    return schedule


def make_optimizer(
    config: OptimizerConfig, schedule: Schedule, params: Any
) -> optax.GradientTransformation:
    """The optimizer of parameters like these (only their names are used).

    Raises ValueError where weight decay is asked for and its rule matches no parameter.
    """
    steps = []
    if config.clip_norm is not None:
        steps.append(optax.clip_by_global_norm(config.clip_norm))
    if config.kind == 'adamw':
        steps.append(
            optax.scale_by_adam(config.b1, config.b2, config.epsilon, mu_dtype=config.moment_dtype)
        )
    else:
        steps.append(optax.trace(config.momentum, accumulator_dtype=config.moment_dtype))
    if config.weight_decay:
        mask = tree.matches(params, config.decayed)
        steps.append(optax.add_decayed_weights(config.weight_decay, mask))
    steps.append(optax.scale_by_learning_rate(schedule))
    return optax.chain(*steps)
