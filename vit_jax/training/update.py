"""The training step, a pure function (state, batch) -> (state, metrics)."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.base.array_types import Array, Batch, Bool, Float, Int, Key, Params, Scalar
from vit_jax.training import losses
from vit_jax.training.losses import BatchSums, Loss, StepMetrics
from vit_jax.training.metrics import OutputName, compute_outputs, example_metrics
from vit_jax.training.objectives import TASK_PARAMS
from vit_jax.training.optimizer import schedule_free_average
from vit_jax.training.sharpness import GradientFunction, Sharpener

# Purposes of PRNG keys; no key has two purposes. The step is folded into the key of DROP, and with
# gradient accumulation also the part of the batch. The epoch and number of each example are folded
# into the keys of AUGMENT and CORRUPT, so that an example does not depend on its batch.
INITIALIZE, AUGMENT, DROP, CORRUPT = range(4)


class TrainState(NamedTuple):
    """State of training after `step` updates."""

    step: Int[Array, '']
    params: Params
    opt_state: Any
    ema_params: Params | None  # Polyak or schedule-free average; None: no average

    @staticmethod
    def initial(
        params: Params, optimizer: optax.GradientTransformation, *, with_ema: bool = False
    ) -> 'TrainState':
        """Makes the state before the first step, from parameters that are jax arrays.

        It has `ema_params` if `with_ema` is True or the optimizer is schedule-free.
        """
        opt_state = optimizer.init(params)
        if with_ema:
            average = jax.tree.map(jnp.copy, params)
        else:
            average = schedule_free_average(opt_state, params)
        return TrainState(jnp.zeros((), jnp.int32), params, opt_state, average)

    @property
    def eval_params(self) -> Params:
        """Parameters to evaluate and export, `ema_params` if not None, otherwise `params`."""
        return self.params if self.ema_params is None else self.ema_params

    def split(self) -> tuple[Params, dict[str, Any]]:
        """Splits the state into `eval_params` and the rest, as checkpoints store it."""
        rest = {'step': self.step, 'optimizer': self.opt_state}
        if self.ema_params is not None:
            rest['params'] = self.params
        params = dict(self.eval_params)
        if TASK_PARAMS in params:
            rest[TASK_PARAMS] = params.pop(TASK_PARAMS)
        return params, rest

    @staticmethod
    def join(eval_params: Params, rest: dict[str, Any]) -> 'TrainState':
        """Inverts `split`."""
        if TASK_PARAMS in rest:
            eval_params = eval_params | {TASK_PARAMS: rest[TASK_PARAMS]}
        if 'params' in rest:
            return TrainState(rest['step'], rest['params'], rest['optimizer'], eval_params)
        return TrainState(rest['step'], eval_params, rest['optimizer'], None)


def key_for(seed: int | Array, purpose: int, step: Int[Array, ''] | int) -> Key[Array, '']:
    """Returns the key of a purpose at a step."""
    return jax.random.fold_in(make_purpose_key(seed, purpose), step)


def make_purpose_key(seed: int | Array, purpose: int) -> Key[Array, '']:
    """Returns the key of a purpose, from which other keys are derived."""
    return jax.random.fold_in(jax.random.key(seed), purpose)


def draw_patch_size(sizes: Sequence[int], seed: int, step: int) -> int | None:
    """Draws the patch size of a step uniformly, on the host; None if there are no sizes.

    It depends on the arguments only, so all processes and a resumed run draw the same.
    """
    if not sizes:
        return None
    # Random crops use seeds of three numbers, which numpy pads with zeros. The 1 keeps this seed
    # different from theirs.
    return int(np.random.default_rng((seed, step, 0, 1)).choice(sizes))


def make_loss_sums(
    apply: Callable[..., Float[Array, 'b k']],
    loss: Loss,
    normalize: Callable[[Array], Float[Array, 'b h w c']],
    *,
    outputs: Iterable[OutputName] = (),
) -> Callable[..., BatchSums]:
    """Makes the function that computes loss and metrics, in training and evaluation.

    Args:
      apply: Maps (params, images, key) to logits; see `Model`.
      loss: Maps (logits, targets) to one loss per example.
      normalize: Maps images with pixels from 0 to 255 to the input of the model.
      outputs: Names of the outputs of each example, for `BatchSums.outputs`.

    Returns:
      `loss_sums(params, batch, key=None)`, which sums the loss and each of `example_metrics` over
      the unmasked examples of a batch. A key enables dropout.
    """

    def loss_sums(params: Params, batch: Batch, key: Key[Array, ''] | None = None) -> BatchSums:
        logits = apply(params, normalize(batch['images']), key)
        targets = losses.make_targets(batch['labels'], logits.shape[-1])
        values = {'loss': loss(logits, targets)} | example_metrics(logits, targets)
        named = compute_outputs(outputs, logits, batch['labels'])
        return losses.sum_examples(values, batch['mask'], named)

    return loss_sums


def make_update(
    loss_sums: Callable[..., BatchSums],
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    augment: Callable[..., Batch] = lambda key, batch: batch,
    stop_frozen_gradients: Callable[[Params], Params] = lambda params: params,
    seed: int | Array = 0,
    accumulation_steps: int = 1,
    ema_rate: Scalar | None = None,
    sharpen: Sharpener | None = None,
) -> Callable[..., tuple[TrainState, StepMetrics]]:
    """Makes the update: one optimizer step on the mean loss over the unmasked examples.

    If the loss or the gradient norm is not finite, or the loss is above `loss_limit`, the update is
    skipped: the state keeps its values, except for the step counters of state and schedule, and the
    metric `skipped` is 1.

    Args:
      loss_sums: Maps (params, batch, key) to `BatchSums` (see `make_loss_sums`). It also gets the
        frozen parameters of the task, as `frozen`, if there are any.
      optimizer: Transforms the gradient of the mean loss into an update.
      schedule: The optimizer's schedule, for the metric `learning_rate`.
      augment: Maps (key, batch) to a batch. The key is constant; fold in epoch and example number.
      stop_frozen_gradients: Applies stop_gradient to frozen parameters (see `ParamGroups`).
      seed: Seed of the keys of augmentation and dropout.
      accumulation_steps: Number of parts of the batch. Their gradients are summed one after the
        other, with activations of one part in memory. The result does not depend on this number,
        except for dropout and rounding.
      ema_rate: 1 - decay of the moving average of parameters; None: no average.
      sharpen: Replaces the gradient by SAM's (see `make_sharpener`); None: plain gradient. Loss and
        metrics are from the first pass; `gradient_norm` is the norm of SAM's gradient.

    Returns:
      `update(state, batch, frozen=None, loss_limit=inf)`; `frozen` are the frozen parameters of
      the task, such as those of a teacher.
    """

    def update(
        state: TrainState, batch: Batch, frozen: Params | None = None, loss_limit: Any = jnp.inf
    ) -> tuple[TrainState, StepMetrics]:
        options = {} if frozen is None else {'frozen': frozen}

        def summed_loss(
            params: Params, batch: Batch, key: Key[Array, '']
        ) -> tuple[Array, BatchSums]:
            batch_sums = loss_sums(stop_frozen_gradients(params), batch, key, **options)
            return batch_sums.sums['loss'], batch_sums

        gradients = accumulate_gradients(jax.grad(summed_loss, has_aux=True), accumulation_steps)
        if sharpen is not None:
            gradients = sharpen(gradients, state.step)
        batch = augment(make_purpose_key(seed, AUGMENT), batch)
        total, (sums, examples, _) = gradients(state.params, batch, key_for(seed, DROP, state.step))
        count = jnp.maximum(1, examples)
        gradient = jax.tree.map(lambda g: g / count, total)
        loss = sums['loss'] / count
        gradient_norm = optax.tree.norm(gradient)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        average = schedule_free_average(opt_state, params)
        if ema_rate is not None:
            average = optax.incremental_update(params, state.ema_params, ema_rate)
        # Selecting the state here lets XLA reuse the old memory. optax.apply_if_finite does
        # not check the loss or select the average, and it applies the last of many bad updates.
        is_used = jnp.isfinite(loss) & jnp.isfinite(gradient_norm) & (loss <= loss_limit)
        updated = TrainState(state.step, params, opt_state, average)
        after = _select(is_used, updated, state)
        scalars = {
            'learning_rate': schedule(state.step),
            'gradient_norm': gradient_norm,
            'parameter_norm': optax.tree.norm(after.params),
            'skipped': 1 - is_used.astype(jnp.int32),
        }
        return after._replace(step=state.step + 1), StepMetrics(sums, examples, scalars)

    return update


def _select(is_used: Bool[Array, ''], new: TrainState, old: TrainState) -> TrainState:
    """Returns `new` if `is_used`, otherwise `old` with the new state of the schedule."""

    def is_schedule(node: Any) -> bool:  # it advances in skipped steps too
        return isinstance(node, optax.ScaleByScheduleState)

    def select(new: Any, old: Any) -> Any:
        return new if is_schedule(new) else jnp.where(is_used, new, old)

    return jax.tree.map(select, new, old, is_leaf=is_schedule)


def accumulate_gradients(gradients: GradientFunction, parts: int) -> GradientFunction:
    """Returns a function that sums `gradients` over parts of the batch, one part at a time.

    A part takes every `parts`-th example, so that examples stay on their devices.
    """
    if parts == 1:
        return gradients

    def summed(params: Params, batch: Batch, key: Key[Array, '']) -> tuple[Params, BatchSums]:
        def part(examples: Batch, positions: Int[Array, 'p']) -> tuple[Params, BatchSums]:
            # The first position is the index of the part.
            return gradients(params, examples, jax.random.fold_in(key, positions[0]))

        positions = jnp.arange(len(batch['mask']))
        size = len(positions) // parts
        return optax.microbatch(part, argnums=(0, 1), microbatch_size=size)(batch, positions)

    return summed
