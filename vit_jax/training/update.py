"""One step of training, a pure function: (state, batch) -> (state, metrics)."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from vit_jax.base.array_types import Array, Batch, Float, Int, Key, Params
from vit_jax.training.losses import Loss, correct, targets_of
from vit_jax.training.optimizer import Schedule

Metrics = dict[str, Array]

# What a key is for. No key is used twice: every use folds in its purpose and the step.
INITIALISE, AUGMENT, DROP = range(3)


class TrainState(NamedTuple):
    """All that changes: after `step` updates, these are the parameters and their optimizer."""

    step: Int[Array, '']
    params: Params
    opt_state: Any
    ema_params: Params | None  # Polyak average of the parameters, where it is asked for

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
        averaged = 'params' in rest
        params = rest['params'] if averaged else eval_params
        average = eval_params if averaged else None
        return TrainState(rest['step'], params, rest['optimizer'], average)


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
        params = init(key_for(seed, INITIALISE, 0))
        average = jax.tree.map(jnp.copy, params) if averaged else None
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), average)

    return initial_state


def make_loss_sums(
    apply: Callable[..., Float[Array, 'b k']],
    loss: Loss,
    normalize: Callable[[Array], Float[Array, 'b h w c']],
    *,
    keep_rows: bool = False,
) -> Callable[..., Metrics]:
    """Sums over the unmasked examples of a batch, for training and evaluation alike.

    `scores(params, batch, key=None)` gives `loss` and `correct` predictions, summed, and the
    `count` of examples that they are sums of. A key switches dropout on. With `keep_rows` there
    are also the `logits` and `targets` (b k) themselves, for metrics over all examples at once.
    """

    def scores(params: Params, batch: Batch, key: Key[Array, ''] | None = None) -> Metrics:
        logits = apply(params, normalize(batch['images']), key)
        targets, mask = targets_of(batch['labels'], logits.shape[-1]), batch['mask']
        rows = {'logits': logits, 'targets': targets} if keep_rows else {}
        return rows | {
            'loss': jnp.where(mask, loss(logits, targets), 0).sum(),
            'correct': jnp.where(mask, correct(logits, targets), 0).sum(),
            'count': mask.sum(dtype=jnp.int32),
        }

    return scores


def make_update(
    scores: Callable[..., Metrics],
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    *,
    augment: Callable[[Key[Array, ''], Batch], Batch],
    stop_frozen_gradients: Callable[[Params], Params],
    seed: int,
    accumulation_steps: int = 1,
    polyak_decay: float | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The update step: gradients of the mean loss over the unmasked examples, one optimizer step.

    `stop_frozen_gradients` gives the parameters without a gradient for those that are frozen.

    A step whose loss or gradient is not finite leaves all but the number of the step as it was,
    and says so in the metric `skipped`.

    With `accumulation_steps=k` the gradients of k parts of the batch are summed one after the
    other before the step: the same update with the activations of one part in memory.
    """

    def gradients(params: Params, batch: Batch, key: Key[Array, '']) -> tuple[Params, Metrics]:
        def total(params: Params) -> tuple[Float[Array, ''], Metrics]:
            sums = scores(stop_frozen_gradients(params), batch, key)
            return sums['loss'], sums

        return jax.grad(total, has_aux=True)(params)

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        batch = augment(purpose_key(seed, AUGMENT), batch)  # by epoch and example, not by step
        total, sums = accumulated(gradients, accumulation_steps)(
            state.params, batch, key_for(seed, DROP, state.step)
        )
        count = jnp.maximum(1, sums['count'])
        gradient = jax.tree.map(lambda g: g / count, total)
        loss, gradient_norm = sums['loss'] / count, optax.tree.norm(gradient)
        updates, optimizer_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        average = state.ema_params
        if polyak_decay is not None:
            average = optax.incremental_update(params, average, 1 - polyak_decay)
        # Known before anything is written, so that the old state needs no second place.
        finite = jnp.isfinite(loss) & jnp.isfinite(gradient_norm)
        updated = TrainState(state.step, params, optimizer_state, average)
        after = jax.tree.map(functools.partial(jnp.where, finite), updated, state)
        metrics = {
            'loss': loss,
            'accuracy': sums['correct'] / count,
            'count': sums['count'],
            'learning_rate': schedule(state.step),
            'gradient_norm': gradient_norm,
            'parameter_norm': optax.tree.norm(after.params),
            'skipped': 1 - finite.astype(jnp.int32),
        }
        return after._replace(step=state.step + 1), metrics

    return update


def accumulated(
    gradients: Callable[[Params, Batch, Key[Array, '']], tuple[Params, Metrics]], parts: int
) -> Callable[[Params, Batch, Key[Array, '']], tuple[Params, Metrics]]:
    """The same sums over the whole batch, computed one part after the other.

    A part takes every `parts`-th example, so that each device goes on working on its own.
    """
    if parts == 1:
        return gradients

    def split(array: Array) -> Array:
        return array.reshape(-1, parts, *array.shape[1:]).swapaxes(0, 1)

    def summed(params: Params, batch: Batch, key: Key[Array, '']) -> tuple[Params, Metrics]:
        def add(sums: Any, part: tuple[Batch, Int[Array, '']]) -> tuple[Any, None]:
            examples, index = part
            more = gradients(params, examples, jax.random.fold_in(key, index))
            return jax.tree.map(jnp.add, sums, more), None

        batches = jax.tree.map(split, batch)
        first = jax.tree.map(lambda x: x[0], batches)
        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
            jax.eval_shape(gradients, params, first, key),
        )
        return jax.lax.scan(add, zeros, (batches, jnp.arange(parts)))[0]

    return summed
