"""Learning rate schedules and optimizers."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, Literal, assert_never

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.base import Array, Float, Int, plural, records, tree_names
from vit_jax.training.duration import Duration, TrainLength
from vit_jax.training.param_groups import BLOCKS, ParamGroups, ParamGroupsConfig
from vit_jax.training.sharpness import Sam

Schedule = Callable[[Int[Array, '']], Float[Array, '']]
Decay = Literal['cosine', 'linear', 'rsqrt', 'constant']
# Options of each optimizer with their defaults.
OPTIONS: dict[str, dict[str, float]] = {
    'adamw': {'b1': 0.9, 'b2': 0.999, 'epsilon': 1e-8},
    'sgd': {'momentum': 0.9},
    'adafactor': {'b1': 0.9, 'b2': 0.999},  # b1: momentum; b2: largest decay of the second moment
    'muon': {'b1': 0.9, 'b2': 0.999, 'epsilon': 1e-8, 'momentum': 0.95},  # momentum: of matrices
}
_LINEAR_END, _RSQRT_TIMESCALE = 1e-5, 10_000


def _steps(count: int) -> Any:
    return dataclasses.field(default_factory=lambda: Duration(steps=count))


def _require_kind(config: Any, kinds: list[str], option: str) -> None:
    """Raises UserError unless this kind of schedule or optimizer has the option."""
    wrong = f'kind={config.kind} does not have this option; expected kind={" or ".join(kinds)}'
    records.require(config.kind in kinds, f'{option}: {wrong}')


@dataclasses.dataclass(kw_only=True)
class ScheduleConfig(records.Record):
    """Learning rate schedule: linear warmup from 0, decay, and optional linear cooldown to 0.

    The rate of `kind=rsqrt` is peak / sqrt(1 + n/t) at n steps after the warmup.
    """

    kind: Decay = 'cosine'  # cosine: to 0; linear: to linear_end; rsqrt: 1/sqrt(steps); constant
    learning_rate: float = 1e-3  # peak learning rate
    warmup: Duration = _steps(0)  # length of the linear warmup from 0 to the peak
    linear_end: float | None = None  # final rate of kind=linear; None: 1e-5, as in the paper's code
    # The default is not None, so that the command line can set `rsqrt_timescale.epochs`.
    rsqrt_timescale: Duration = _steps(_RSQRT_TIMESCALE)  # kind=rsqrt: timescale t of the decay
    cooldown: Duration = _steps(0)  # length of a final linear decay to 0, for every kind

    def check(self) -> None:
        records.require_between(self, 'learning_rate', 'linear_end', low=0)
        records.require(any(vars(self.rsqrt_timescale).values()), 'rsqrt_timescale: expected > 0')
        if self.linear_end is not None:
            _require_kind(self, ['linear'], f'linear_end={self.linear_end}')
        if self.rsqrt_timescale != Duration(steps=_RSQRT_TIMESCALE):
            _require_kind(self, ['rsqrt'], 'rsqrt_timescale')


@dataclasses.dataclass(kw_only=True)
class OptimizerConfig(ParamGroupsConfig):
    """Optimizer: AdamW, SGD with momentum, Adafactor as in Scaling Vision Transformers, or Muon.

    Muon applies to the kernels of blocks, and AdamW to all other parameters. Both have the learning
    rates and weight decays of AdamW. The default values are b1=0.9, b2=0.999, epsilon=1e-8 and
    momentum=0.9 (muon: 0.95).
    """

    # Fields of param groups are inherited, so that flags are short, such as optimizer.weight_decay.
    kind: Literal['adamw', 'sgd', 'adafactor', 'muon'] = 'adamw'  # adafactor: as in ViT-g
    b1: float | None = None  # decay of the first moment (adamw, adafactor); None: default
    b2: float | None = None  # decay of the second moment (adamw, adafactor); None: default
    epsilon: float | None = None  # added to the root of the second moment (adamw); None: default
    momentum: float | None = None  # momentum (sgd); None: default
    clip_norm: float | None = None  # maximum global norm of the gradient; None: no clipping
    moment_dtype: Literal['float32', 'bfloat16'] = 'float32'  # dtype of first moment or momentum
    sharpness: Sam | None = None  # sharpness-aware minimization (SAM, GSAM); None: plain gradient

    def check(self) -> None:
        super().check()
        records.require_between(self, 'b1', 'b2', 'momentum', low=0, below=1)
        records.require_between(self, 'epsilon', 'clip_norm', above=0)
        for name in ('b1', 'b2', 'epsilon', 'momentum'):
            if (value := getattr(self, name)) is not None:
                kinds = [kind for kind, options in OPTIONS.items() if name in options]
                _require_kind(self, kinds, f'{name}={value}')


def make_schedule(config: ScheduleConfig, length: TrainLength) -> Schedule:
    """Makes the schedule, which maps a step to the learning rate.

    As in the paper's code, the decay starts after the warmup, and warmup multiplies the rate by
    min(1, step / warmup), so that the rate of step 0 is 0.

    Raises:
      UserError: If warmup and cooldown together are longer than the training run.
    """
    total_steps, peak = length.total_steps, config.learning_rate
    warmup, cooldown = length.to_steps(config.warmup), length.to_steps(config.cooldown)
    timescale = length.to_steps(config.rsqrt_timescale)
    end = _LINEAR_END if config.linear_end is None else config.linear_end
    both = f'warmup ({config.warmup}) and cooldown ({config.cooldown})'
    message = f'{both} take {plural(warmup + cooldown, "step")}, the training has {total_steps}'
    lengths = {'warmup': warmup, 'cooldown': cooldown}
    flags = ' '.join(f'--config.schedule.{name}.fraction=0.1' for name in lengths if lengths[name])
    wrong = f'config.schedule: {message}; shorten them, for example {flags}'
    records.require(warmup + cooldown <= total_steps, wrong)

    def schedule(step: Int[Array, '']) -> Float[Array, '']:
        after = jnp.maximum(0.0, step - warmup)
        progress = jnp.minimum(1.0, after / max(1, total_steps - warmup))
        match config.kind:
            case 'cosine':
                rate = peak * 0.5 * (1 + jnp.cos(jnp.pi * progress))
            case 'linear':
                rate = end + (peak - end) * (1 - progress)
            case 'rsqrt':  # continuous at the end of the warmup (Scaling Vision Transformers)
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
    config: OptimizerConfig, schedule: Schedule, groups: ParamGroups
) -> optax.GradientTransformation:
    """Makes the optimizer. Frozen parameters have no moments.

    Their gradients must be zero, so that `clip_norm` ignores them (see
    `ParamGroups.stop_frozen_gradients`).
    """
    chain = []
    if config.clip_norm is not None:
        chain.append(optax.clip_by_global_norm(config.clip_norm))
    moments, trains_all = _scale_by_moments(config), all(jax.tree.leaves(groups.trainable))
    chain.append(moments if trains_all else optax.masked(moments, groups.trainable))
    chain += [optax.add_decayed_weights(amount, mask) for amount, mask in groups.weight_decays]
    factors = groups.lr_multipliers
    if any(np.any(factor != 1) for factor in jax.tree.leaves(factors)):
        chain.append(optax.stateless(lambda grads, _: jax.tree.map(operator.mul, grads, factors)))
    return optax.chain(*chain, optax.scale_by_learning_rate(schedule))


def _scale_by_moments(config: OptimizerConfig) -> optax.GradientTransformation:
    fields = {name: getattr(config, name) for name in OPTIONS[config.kind]}
    options = OPTIONS[config.kind] | {k: value for k, value in fields.items() if value is not None}
    match config.kind:
        case 'adamw':
            b1, b2, epsilon = options['b1'], options['b2'], options['epsilon']
            return optax.scale_by_adam(b1, b2, epsilon, mu_dtype=config.moment_dtype)
        case 'sgd':
            return optax.trace(options['momentum'], accumulator_dtype=config.moment_dtype)
        case 'adafactor':
            return _adafactor(options['b1'], options['b2'], config.moment_dtype)
        case 'muon':
            b1, b2, epsilon = options['b1'], options['b2'], options['epsilon']
            adam = optax.scale_by_adam(b1, b2, epsilon, mu_dtype=config.moment_dtype)
            muon = _muon(options['momentum'], config.moment_dtype)
            return optax.chain(
                optax.masked(muon, _is_matrix),
                optax.masked(adam, lambda params: jax.tree.map(operator.not_, _is_matrix(params))),
            )
        case other:
            assert_never(other)


def count_moments(config: OptimizerConfig) -> int:
    """Returns the number of values that the optimizer stores per parameter of a large matrix."""
    matrix = jax.ShapeDtypeStruct((1, 1024, 1024), np.float32)
    params = {'encoder': {'block': {'kernel': matrix}}}
    state = jax.eval_shape(_scale_by_moments(config).init, params)
    return sum(leaf.size for leaf in jax.tree.leaves(state)) // matrix.size


def _adafactor(b1: float, b2: float, moment_dtype: str) -> optax.GradientTransformation:
    """Makes Adafactor with factored second moments and momentum, without parameter scaling."""

    def decay(step: Any, exponent: float) -> Any:
        return jnp.minimum(b2, 1 - (step + 1.0) ** -exponent)

    def scale(min_size: int, *, vectors: bool) -> optax.GradientTransformation:
        rms = optax.scale_by_factored_rms(
            min_dim_size_to_factor=min_size, decay_rate_fn=decay, epsilon=1e-30
        )

        def selects(name: str, leaf: Any) -> bool:  # ignores the axis of stacked blocks
            return (leaf.ndim - name.startswith(BLOCKS) < 2) == vectors

        return optax.masked(rms, functools.partial(tree_names.map_named, selects))

    return optax.chain(
        scale(min_size=2**62, vectors=True),  # never factored
        scale(min_size=32, vectors=False),  # big_vision's value; the default of optax is 128
        optax.ema(b1, debias=False, accumulator_dtype=moment_dtype),
    )


def _is_matrix(params: Any) -> Any:
    """Returns a tree of booleans that selects the kernels of blocks."""
    return tree_names.match_mask(params, f'{BLOCKS}.*kernel')


def _matrix_axes(params: Any) -> Any:
    """Returns the input and output axes of each kernel. Axis 0, the depth, is a batch axis."""

    def axes(name: str, leaf: Any) -> optax.contrib.MuonDimensionNumbers:
        first = leaf.ndim - 1 if name.endswith('attention/out/kernel') else 2
        return optax.contrib.MuonDimensionNumbers((*range(1, first),), (*range(first, leaf.ndim),))

    return tree_names.map_named(axes, params)


def _muon(momentum: float, moment_dtype: str) -> optax.GradientTransformation:
    """Makes Muon with updates as large as those of Adam (Muon is Scalable for LLM Training)."""
    make = functools.partial(optax.contrib.scale_by_muon, weight_dimension_numbers=_matrix_axes)
    orthogonal = make(beta=0.0, nesterov=False)

    def scale(update: Any, axes: optax.contrib.MuonDimensionNumbers) -> Any:
        sides = (math.prod(update.shape[axis] for axis in group) for group in axes)
        return 0.2 * math.sqrt(max(sides)) * update

    def orthogonalize(momenta: Any, _: Any) -> Any:
        updates, _ = orthogonal.update(momenta, orthogonal.init(momenta))
        return jax.tree.map(scale, updates, _matrix_axes(momenta))

    # The first transformation only normalizes the momentum; `orthogonalize` iterates.
    momentum_only = make(beta=momentum, ns_steps=0, mu_dtype=moment_dtype)
    return optax.chain(momentum_only, optax.stateless(orthogonalize))
