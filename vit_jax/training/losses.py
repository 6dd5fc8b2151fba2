"""Losses, which map logits and targets to one number per example, and sums over examples."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, assert_never

import jax
import jax.numpy as jnp
import optax

from vit_jax.base import Array, Bool, Float, Num, UserError, records

# Maps logits (b k) and targets (b k) to one loss per example.
Loss = Callable[[Float[Array, 'b k'], Float[Array, 'b k']], Float[Array, 'b']]
LossKind = Literal['softmax', 'sigmoid']


@dataclasses.dataclass(kw_only=True)
class LossConfig(records.Record):
    """Softmax or sigmoid cross-entropy. Sigmoid losses are summed over classes."""

    kind: LossKind = 'softmax'  # softmax: one class per image; sigmoid: any number of classes
    label_smoothing: float = 0.0  # fraction of the target that is spread over all classes
    binary_targets: bool = False  # kind=sigmoid: both classes of mixed images have target 1 (DeiT)

    def check(self) -> None:
        records.require(
            not self.binary_targets or self.kind == 'sigmoid',
            'binary_targets: not supported by kind=softmax; expected kind=sigmoid',
        )
        records.require_between(self, 'label_smoothing', low=0, below=1)


def make_loss(config: LossConfig | Loss) -> Loss:
    """Makes the loss function of (logits, targets); see `make_targets` for targets.

    If `config` is a function, the shape of its result is checked: without one number per example,
    padding cannot be left out of the mean.

    Raises:
      UserError: When the loss is called, if a function does not return shape (b,).
    """

    def loss(logits: Float[Array, 'b k'], targets: Float[Array, 'b k']) -> Float[Array, 'b']:
        if not isinstance(config, LossConfig):
            losses = config(logits, targets)
            expected = logits.shape[:1]
            if jnp.shape(losses) != expected:
                code = getattr(config, '__code__', None)
                where = f' ({code.co_filename}, line {code.co_firstlineno})' if code else ''
                raise UserError(
                    f'loss {records.text_of(config)}{where}: got shape {jnp.shape(losses)} for '
                    f'logits {logits.shape}; expected {expected}, one number per example'
                )
            return losses
        if config.binary_targets:
            targets = (targets > 0).astype(targets.dtype)
        if not records.is_off(config.label_smoothing):
            targets = optax.smooth_labels(targets, config.label_smoothing)
        match config.kind:
            case 'softmax':
                return optax.softmax_cross_entropy(logits, targets)
            case 'sigmoid':
                return optax.sigmoid_binary_cross_entropy(logits, targets).sum(axis=-1)
            case other:
                assert_never(other)

    return loss


def with_scaled_targets(loss: Loss) -> Loss:
    """Returns the loss with multi-hot targets scaled to sum to one (any of the classes is right).

    Targets without a class stay zero.
    """

    def scaled(logits: Float[Array, 'b k'], targets: Float[Array, 'b k']) -> Float[Array, 'b']:
        return loss(logits, targets / jnp.maximum(1, targets.sum(axis=-1, keepdims=True)))

    return scaled


def make_targets(labels: Num[Array, 'b ...'], num_classes: int) -> Float[Array, 'b k']:
    """Returns float32 targets: class numbers (b) are one-hot encoded, rows (b k) are kept."""
    return jax.nn.one_hot(labels, num_classes) if labels.ndim == 1 else labels.astype(jnp.float32)


class BatchSums(NamedTuple):
    """Sums over the examples of a batch whose `mask` is True.

    The mask is False for padding and for unreadable images.
    """

    sums: dict[str, Array]  # sums of loss and metrics, by name
    num_examples: Array  # number of examples in each sum
    outputs: dict[str, Array]  # outputs of each example (b ...) by name, including masked ones


def sum_examples(
    values: dict[str, Float[Array, 'b']],
    mask: Bool[Array, 'b'],
    outputs: dict[str, Array] | None = None,
) -> BatchSums:
    """Sums values over the examples whose mask is True; `outputs` are passed through."""
    sums = {name: jnp.where(mask, value, 0).sum() for name, value in values.items()}
    return BatchSums(sums, mask.sum(dtype=jnp.int32), outputs or {})


class StepMetrics(NamedTuple):
    """Metrics of one step: arrays from the update, floats after `fit` has read them."""

    sums: dict[str, Any]  # `BatchSums.sums` of the batch
    num_examples: Any  # number of examples in each sum
    scalars: dict[str, Any]  # numbers of the whole step, such as the learning rate

    @property
    def means(self) -> dict[str, float]:
        """Means of loss and metrics over the examples, by name; 0 without examples."""
        count = max(1.0, float(self.num_examples))
        return {name: float(total) / count for name, total in self.sums.items()}
