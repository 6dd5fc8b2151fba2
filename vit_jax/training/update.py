"""One step of training, a pure function: (state, batch) -> (state, metrics)."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from vit_jax.base.array_types import Array, Batch, Float, Int, Key, Params
from vit_jax.training import losses
from vit_jax.training.losses import BatchSums, Loss, RowsOf, StepMetrics
from vit_jax.training.optimizer import Schedule

Gradients = Callable[[Params, Batch, Key[Array, '']], tuple[Params, BatchSums]]

# What a key is for: no key serves two purposes. DROP folds in the step, and with accumulation the
# part of the batch; AUGMENT and CORRUPT fold in the epoch and the number of each example, so that
# an example does not depend on the batch that it falls into.
INITIALISE, AUGMENT, DROP, CORRUPT = range(4)


class TrainState(NamedTuple):
    """All that changes: after `step` updates, these are the parameters and their optimizer."""

    step: Int[Array, '']
    params: Params
    opt_state: Any
    ema_params: Params | None  # Polyak average of the parameters, where it is asked for

    @staticmethod
    def initial(
        params: Params, optimizer: optax.GradientTransformation, *, averaged: bool = False
    ) -> 'TrainState':
        """The state before the first step; `averaged`: with the average that `polyak_decay` moves.

        The parameters are arrays of jax.
        """
        average = jax.tree.map(jnp.copy, params) if averaged else None
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), average)

    @property
    def eval_params(self) -> Params:
        """The parameters to evaluate and to keep: the average where there is one."""
        return self.params if self.ema_params is None else self.ema_params

    def split(self) -> tuple[Params, dict[str, Any]]:
        """The parameters to keep, and what else the next step needs: what a checkpoint holds."""
        rest = {'step': self.step, 'optimizer': self.opt_state}
        if self.ema_params is not None:
            rest['params'] = self.params
        return self.eval_params, rest

    @staticmethod
    def join(eval_params: Params, rest: dict[str, Any]) -> 'TrainState':
        """The inverse of `split`."""
        if 'params' in rest:
            return TrainState(rest['step'], rest['params'], rest['optimizer'], eval_params)
        return TrainState(rest['step'], eval_params, rest['optimizer'], None)


def key_for(seed: int, purpose: int, step: Int[Array, ''] | int) -> Key[Array, '']:
    """The key of one purpose at one step."""
    return jax.random.fold_in(purpose_key(seed, purpose), step)


def purpose_key(seed: int, purpose: int) -> Key[Array, '']:
    """The key of one purpose, from which others are made."""
    return jax.random.fold_in(jax.random.key(seed), purpose)


def make_init(
    init: Callable[[Key[Array, '']], Params],
    optimizer: optax.GradientTransformation,
    *,
    seed: int,
    averaged: bool,
) -> Callable[[], TrainState]:
    """The state before the first step, as a function to be compiled into its place."""

    def initial_state() -> TrainState:
        return TrainState.initial(init(key_for(seed, INITIALISE, 0)), optimizer, averaged=averaged)

    return initial_state


def make_loss_sums(
    apply: Callable[..., Float[Array, 'b k']],
    loss: Loss,
    normalize: Callable[[Array], Float[Array, 'b h w c']],
    *,
    rows_of: RowsOf | None = None,
) -> Callable[..., BatchSums]:
    """Sums over the unmasked examples of a batch, for training and evaluation alike.

    `loss_sums(params, batch, key=None)` sums the `loss` and each of `example_metrics`; a key
    switches dropout on. `rows_of(logits, targets)` returns rows to pass on (see `BatchSums`).
    """

    def loss_sums(params: Params, batch: Batch, key: Key[Array, ''] | None = None) -> BatchSums:
        logits = apply(params, normalize(batch['images']), key)
        targets, mask = losses.targets_of(batch['labels'], logits.shape[-1]), batch['mask']
        values = {'loss': loss(logits, targets)} | losses.example_metrics(logits, targets)
        return losses.summed(values, mask, rows_of(logits, targets) if rows_of else None)

    return loss_sums


def make_update(
    loss_sums: Callable[..., BatchSums],
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    *,
    augment: Callable[[Key[Array, ''], Batch], Batch] = lambda key, batch: batch,
    stop_frozen_gradients: Callable[[Params], Params] = lambda params: params,
    seed: int = 0,
    accumulation_steps: int = 1,
    polyak_decay: float | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """The update step: gradients of the mean loss over the unmasked examples, one optimizer step.

    `schedule` is that of the optimizer, to report the rate. `augment` is applied to each batch;
    `stop_frozen_gradients` gives the parameters without a gradient for those that are frozen. If
    the loss or the gradient is not finite, only the counters of steps advance, that of the state
    and that of the schedule, and the metric `skipped` is 1. With `accumulation_steps=k` the
    gradients of k parts of the batch are summed one after the other: the same update with the
    activations of one part in memory.
    """

    @functools.partial(accumulated, parts=accumulation_steps)
    def gradients(params: Params, batch: Batch, key: Key[Array, '']) -> tuple[Params, BatchSums]:
        def total(params: Params) -> tuple[Float[Array, ''], BatchSums]:
            batch_sums = loss_sums(stop_frozen_gradients(params), batch, key)
            return batch_sums.sums['loss'], batch_sums

        return jax.grad(total, has_aux=True)(params)

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        batch = augment(purpose_key(seed, AUGMENT), batch)
        total, (sums, examples, _) = gradients(state.params, batch, key_for(seed, DROP, state.step))
        count = jnp.maximum(1, examples)
        gradient = jax.tree.map(lambda g: g / count, total)
        loss, gradient_norm = sums['loss'] / count, optax.tree.norm(gradient)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        average = state.ema_params
        if polyak_decay is not None:
            average = optax.incremental_update(params, average, 1 - polyak_decay)
        # Decided before the state is overwritten, so that its memory can be reused. Not
        # optax.apply_if_finite: it looks at the gradient alone, lets the average of the parameters
        # move on, and after a number of bad steps in a row applies one.
        finite = jnp.isfinite(loss) & jnp.isfinite(gradient_norm)
        updated = TrainState(state.step, params, opt_state, average)

        def select(new: Any, old: Any) -> Any:
            # A skipped step has its place in the schedule.
            return new if _is_schedule(new) else jnp.where(finite, new, old)

        after = jax.tree.map(select, updated, state, is_leaf=_is_schedule)
        scalars = {
            'learning_rate': schedule(state.step),
            'gradient_norm': gradient_norm,
            'parameter_norm': optax.tree.norm(after.params),
            'skipped': 1 - finite.astype(jnp.int32),
        }
        return after._replace(step=state.step + 1), StepMetrics(sums, examples, scalars)

    return update


def _is_schedule(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


def accumulated(gradients: Gradients, parts: int) -> Gradients:
    """The same sums over the whole batch, computed one part after the other.

    A part takes every `parts`-th example, so that each device goes on working on its own.
    """
    if parts == 1:
        return gradients

    def summed(params: Params, batch: Batch, key: Key[Array, '']) -> tuple[Params, BatchSums]:
        def part(examples: Batch, positions: Int[Array, 'p']) -> tuple[Params, BatchSums]:
            # The first of every `parts`-th position is the number of the part.
            return gradients(params, examples, jax.random.fold_in(key, positions[0]))

        positions = jnp.arange(len(batch['mask']))
        size = len(positions) // parts
        return optax.microbatch(part, argnums=(0, 1), microbatch_size=size)(batch, positions)

    return summed
