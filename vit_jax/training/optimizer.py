"""Learning rate schedules and optimizers."""

import dataclasses
import functools
import operator
import re
from collections.abc import Callable
from typing import Any, Literal, assert_never

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.base import Float, Params, Scalar, UserError, plural, records, tree_names
from vit_jax.training import muon
from vit_jax.training.duration import Duration, TrainLength
from vit_jax.training.param_groups import ParamGroups, ParamGroupsConfig, is_stacked
from vit_jax.training.sharpness import Sam

OptimizerFunction = Callable[[optax.Schedule], optax.GradientTransformation]
Kind = Literal['adamw', 'sgd', 'adafactor', 'muon', 'lamb']
Decay = Literal['cosine', 'linear', 'rsqrt', 'constant']
# Options of each optimizer with their defaults.
OPTIONS: dict[str, dict[str, float]] = {
    'adamw': {'b1': 0.9, 'b2': 0.999, 'epsilon': 1e-8},
    'sgd': {'momentum': 0.9},
    'adafactor': {'b1': 0.9, 'b2': 0.999},  # b1: momentum; b2: largest decay of the second moment
    'muon': {'b1': 0.9, 'b2': 0.999, 'epsilon': 1e-8, 'momentum': 0.95},  # momentum: of matrices
    'lamb': {'b1': 0.9, 'b2': 0.999, 'epsilon': 1e-6},
}
# Options of all named kinds. They do not apply to an optimizer that is a function.
_OF_ALL_KINDS = 'weight_decay', 'head_weight_decay', 'decay_pattern', 'moment_dtype'
_LINEAR_END = 1e-5
_RSQRT_TIMESCALE = 10_000  # steps
_TABLE_STEPS = 2**20
_MAX_STEPS = 2**24 - 1


def _steps(count: int) -> Any:
    return dataclasses.field(default_factory=lambda: Duration(steps=count))


def _require_kind(config: Any, kinds: list[str], option: str) -> None:
    """Raises UserError unless this kind of schedule or optimizer has the option."""
    if config.kind not in kinds:
        kind = records.text_of(config.kind)
        expected = ' or '.join(kinds)
        raise UserError(f'{option}: only kind={expected} has this option; got kind={kind}')


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
        if self.linear_end is not None:
            _require_kind(self, ['linear'], f'linear_end={self.linear_end}')
        if self.rsqrt_timescale != Duration(steps=_RSQRT_TIMESCALE):
            _require_kind(self, ['rsqrt'], 'rsqrt_timescale')


@dataclasses.dataclass(kw_only=True)
class OptimizerConfig(ParamGroupsConfig):
    """Optimizer: AdamW, SGD with momentum, Adafactor as in ViT-g, Muon, LAMB, or your own function.

    Muon updates the kernels of transformer blocks and of the convolutions in ResNet stages; AdamW
    updates all other parameters. Both share learning rate and weight decay. LAMB scales each update
    that has weight decay by the trust ratio of its parameter, with one ratio per block. The default
    values are b1=0.9, b2=0.999, epsilon=1e-8 (lamb: 1e-6) and momentum=0.9 (muon: 0.95).

    A function f(schedule) returns an optax optimizer, which replaces moments, weight decay and
    learning rate. The rates are arguments of the compiled step: in f, schedule(step) is a traced
    value, not a number. `clip_norm`, frozen parameters and learning rate factors still apply.
    """

    # Fields of param groups are inherited, so that flags are short, such as optimizer.weight_decay.
    kind: Kind | OptimizerFunction = 'adamw'  # named optimizer, or f(schedule) -> optax optimizer
    b1: float | None = None  # decay of the first moment (all except sgd); None: default
    b2: float | None = None  # decay of the second moment (all except sgd); None: default
    epsilon: float | None = None  # added to the root of the second moment (adamw, muon, lamb)
    momentum: float | None = None  # momentum (sgd, muon); None: default
    clip_norm: float | None = None  # maximum global norm of the gradient; None: no clipping
    moment_dtype: Literal['float32', 'bfloat16'] = 'float32'  # dtype of first moment or momentum
    sharpness: Sam | None = None  # sharpness-aware minimization (SAM, GSAM); None: plain gradient

    def check(self) -> None:
        super().check()
        records.require_between(self, 'b1', 'b2', 'momentum', low=0, high=0.999999)  # in float32
        records.require_between(self, 'epsilon', 'clip_norm', above=0)
        for name in ('b1', 'b2', 'epsilon', 'momentum', *_OF_ALL_KINDS):
            value = getattr(self, name)
            default = getattr(type(self), name)
            if value != default:
                kinds = [k for k, options in OPTIONS.items() if name in (*options, *_OF_ALL_KINDS)]
                _require_kind(self, kinds, f'{name}={value}')


def make_schedule(config: ScheduleConfig, length: TrainLength) -> Callable[[Any], Any]:
    """Makes the schedule, which maps steps to learning rates, on the host.

    As in the paper's code, the decay starts after the warmup, and warmup multiplies the rate by
    min(1, step / warmup), so that the rate of step 0 is 0.

    Raises:
      UserError: If warmup and cooldown together are longer than the training run.
    """
    total_steps = length.total_steps
    peak = config.learning_rate
    warmup = length.to_steps(config.warmup)
    cooldown = length.to_steps(config.cooldown)
    timescale = length.to_steps(config.rsqrt_timescale)
    end = _LINEAR_END if config.linear_end is None else config.linear_end
    records.require(
        warmup + cooldown <= total_steps,
        f'config.schedule: warmup.{config.warmup} and cooldown.{config.cooldown} take '
        f'{plural(warmup + cooldown, "step")}, but the training has {total_steps}; '
        'shorten them, for example with --config.schedule.warmup.fraction=0.1',
    )
    records.require(
        timescale > 0,
        f'config.schedule.rsqrt_timescale.{config.rsqrt_timescale}: expected at least one step',
    )

    def schedule(step: Any) -> Any:
        after = np.maximum(0.0, step - warmup)
        progress = np.minimum(1.0, after / max(1, total_steps - warmup))
        match config.kind:
            case 'cosine':
                rate = peak * 0.5 * (1 + np.cos(np.pi * progress))
            case 'linear':
                rate = end + (peak - end) * (1 - progress)
            case 'rsqrt':  # continuous at the end of the warmup (Scaling Vision Transformers)
                rate = peak / np.sqrt(1 + after / timescale)
            case 'constant':
                rate = np.full(np.shape(step), peak)
            case other:
                assert_never(other)
        if warmup:
            rate = rate * np.minimum(1.0, step / warmup)
        if cooldown:
            rate = rate * np.minimum(1.0, (total_steps - step) / cooldown)
        return rate

    return schedule


def tabulate(function: Callable[[Any], Any], total_steps: int) -> Float[np.ndarray, 'n']:
    """Tabulates a function of the step, for `look_up`.

    The length of the table is a multiple of 2**20, so all runs of less than 2**20 steps share one
    program.

    Raises:
      UserError: If the training is longer than 2**24 steps, whose table has 64 MiB.
    """
    records.require(
        total_steps <= _MAX_STEPS,
        f'config.total: {total_steps:,} steps; expected at most {_MAX_STEPS:,}',
    )
    table = np.asarray(function(np.arange(total_steps + 1)), np.float32)
    padding = -len(table) % _TABLE_STEPS
    return np.pad(table, (0, padding), mode='edge')


def look_up(table: Any) -> optax.Schedule:
    """Returns the function of the step that a table of `tabulate` contains."""
    return lambda step: jnp.take(table, jnp.asarray(step, jnp.int32), mode='clip')


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, groups: ParamGroups
) -> optax.GradientTransformation:
    """Makes the optimizer. Frozen parameters have no moments.

    Their gradients must be zero, so that `clip_norm` ignores them (see
    `ParamGroups.stop_frozen_gradients`).
    """
    is_trainable = tree_names.named_leaves(groups.trainable)
    trained = [name for name in is_trainable if is_trainable[name]]
    records.require(
        config.kind != 'muon' or any(re.fullmatch(muon.MATRIX, name) for name in trained),
        'config.optimizer.kind=muon: no block or stage kernels are trained; use kind=adamw',
    )
    records.require(
        config.kind != 'lamb' or bool(groups.decayed),
        'config.optimizer.kind=lamb: got no weight decay; expected weight_decay > 0',
    )
    chain = []
    if config.clip_norm is not None:
        chain.append(optax.clip_by_global_norm(config.clip_norm))
    moments = _make_core(config, schedule)
    trains_all = all(is_trainable.values())
    chain.append(moments if trains_all else optax.masked(moments, groups.trainable))
    for name, mask in groups.decayed.items():
        chain.append(optax.add_decayed_weights(getattr(config, name), mask))
        if config.kind == 'lamb':
            chain.append(optax.masked(_scale_by_trust_ratio(), mask))
    if (factors := groups.lr_factors) is not None:
        chain.append(optax.stateless(lambda grads, _: jax.tree.map(operator.mul, grads, factors)))
    if isinstance(config.kind, str):
        chain.append(optax.scale_by_learning_rate(schedule))
    return optax.chain(*chain)


def _make_core(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Makes the moments of a named kind, or the whole optimizer of a function."""
    if not isinstance(config.kind, str):
        try:
            optimizer = config.kind(schedule)
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
            raise UserError(
                'config.optimizer.kind: the function needs the number schedule(step), which is '
                'an argument of the step; pass schedule to optax'
            ) from error
        records.require(
            isinstance(optimizer, optax.GradientTransformation),
            f'config.optimizer.kind: the function returned {optimizer}; '
            'expected an optax optimizer',
        )
        return optimizer
    fields = {name: getattr(config, name) for name in OPTIONS[config.kind]}
    options = OPTIONS[config.kind] | {k: value for k, value in fields.items() if value is not None}
    match config.kind:
        case 'adamw' | 'lamb' | 'muon':
            adam = optax.scale_by_adam(
                options['b1'], options['b2'], options['epsilon'], mu_dtype=config.moment_dtype
            )
            if config.kind != 'muon':
                return adam
            orthogonal = muon.scale_by_muon(options['momentum'], config.moment_dtype)
            return optax.chain(
                optax.masked(orthogonal, muon.is_matrix),
                optax.masked(adam, lambda tree: jax.tree.map(operator.not_, muon.is_matrix(tree))),
            )
        case 'sgd':
            return optax.trace(options['momentum'], accumulator_dtype=config.moment_dtype)
        case 'adafactor':
            return _adafactor(options['b1'], options['b2'], config.moment_dtype)
        case other:
            assert_never(other)


def count_moments(config: OptimizerConfig, params: Params) -> int:
    """Returns the number of values that are stored per parameter, rounded down.

    They include the average of a schedule-free optimizer. `params` may be abstract.
    """
    core = _make_core(config, lambda step: jnp.zeros(()))
    state = jax.eval_shape(core.init, params)
    values_in_state = sum(leaf.size for leaf in jax.tree.leaves(state))
    values_in_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    moments = values_in_state // values_in_params
    return moments if find_schedule_free(state) is None else moments + 1


def _adafactor(b1: Scalar, b2: Scalar, moment_dtype: str) -> optax.GradientTransformation:
    """Makes Adafactor with factored second moments and momentum, without parameter scaling."""

    def decay(step: Any, exponent: float) -> Any:
        return jnp.minimum(b2, 1 - (step + 1.0) ** -exponent)

    def scale(min_size: int, *, vectors: bool) -> optax.GradientTransformation:
        rms = optax.scale_by_factored_rms(min_dim_size_to_factor=min_size, decay_rate_fn=decay)

        def selects(name: str, leaf: Any) -> bool:  # ignores the axis of stacked blocks
            num_axes = leaf.ndim - 1 if is_stacked(name) else leaf.ndim
            is_vector = num_axes < 2
            return is_vector == vectors

        return optax.masked(rms, functools.partial(tree_names.map_named, selects))

    return optax.chain(
        scale(min_size=2**62, vectors=True),  # never factored
        scale(min_size=32, vectors=False),  # big_vision's value; the default of optax is 128
        optax.ema(b1, debias=False, accumulator_dtype=moment_dtype),
    )


def _scale_by_trust_ratio() -> optax.GradientTransformation:
    """Makes LAMB's factor |parameter| / |update|, one for each block of a stacked parameter."""

    def scale(name: str, update: Any, param: Any) -> Any:
        first_axis = 1 if is_stacked(name) else 0
        axes = tuple(range(first_axis, param.ndim))
        param_norm = jnp.sqrt(jnp.sum(param**2, axes, keepdims=True))
        update_norm = jnp.sqrt(jnp.sum(update**2, axes, keepdims=True))
        has_ratio = (param_norm > 0) & (update_norm > 0)
        return update * jnp.where(has_ratio, param_norm / update_norm, 1.0)

    return optax.stateless(functools.partial(tree_names.map_named, scale))


def find_schedule_free(opt_state: Any) -> Any:
    """Returns the state of a schedule-free optimizer of optax.contrib; None if there is none."""
    states = optax.tree.get_all_with_path(opt_state, 'ScheduleFreeState')
    return states[0][1] if states else None


def schedule_free_average(opt_state: Any, params: Params) -> Params | None:
    """Returns the parameters that a schedule-free optimizer evaluates; otherwise None."""
    state = find_schedule_free(opt_state)
    return None if state is None else optax.contrib.schedule_free_eval_params(state, params)


def check_optimizer(optimizer: Any, groups: ParamGroups, params: Params, *, with_ema: bool) -> None:
    """Raises UserError if `update` needs more than (gradient, state, params), or options conflict.

    A schedule-free optimizer computes its average from the parameters and its own state, so each
    parameter must change exactly by the optimizer's update. The parameters may be abstract.
    """
    opt_state = jax.eval_shape(optimizer.init, params)
    try:
        jax.eval_shape(optimizer.update, params, opt_state, params)
    except TypeError as error:
        raise UserError(
            f'config.optimizer.kind: the update of the optimizer fails ({error}); '
            'use one with update(gradient, state, params)'
        ) from error
    state = find_schedule_free(opt_state)
    if state is None:
        return
    has_equal_rates = groups.lr_factors is None
    trains_all = len(jax.tree.leaves(state.z)) == len(jax.tree.leaves(params))
    records.require(
        has_equal_rates and trains_all and not with_ema,
        'config.optimizer.kind: a schedule-free optimizer treats all parameters equally; '
        'leave out ema_decay, frozen, trained_blocks, lr_multipliers and layer_decay',
    )

    @jax.jit
    def initial_b1() -> Any:
        return find_schedule_free(optimizer.init(optax.tree.zeros_like(params))).b1

    records.require(
        float(initial_b1()) > 0,
        'config.optimizer.kind: a schedule-free optimizer with b1=0 has no average; use b1 > 0',
    )
