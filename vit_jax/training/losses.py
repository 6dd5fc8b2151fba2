"""Losses and metrics: functions of logits and targets, one number for each example.

A new metric is one more line in `example_metrics`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, assert_never

import jax
import jax.numpy as jnp
import optax

from vit_jax.base import Array, Bool, Float, Num, records

# Of logits (b k) and targets (b k), for each example.
Loss = Callable[[Float[Array, 'b k'], Float[Array, 'b k']], Float[Array, 'b']]
LossKind = Literal['softmax', 'sigmoid']


@dataclasses.dataclass(kw_only=True)
class LossConfig(records.Record):
    """Softmax: one class an image. Sigmoid: yes or no for each class, summed over classes."""

    kind: LossKind = 'softmax'  # one class an image; sigmoid: each class is yes or no
    label_smoothing: float = 0.0  # the share of the target that is spread over all classes

    def check(self) -> None:
        records.require_between(self, 'label_smoothing', low=0, below=1)


def make_loss(config: LossConfig | Loss) -> Loss:
    """The loss of (logits, targets), targets as `targets_of` gives them.

    A function is its own loss; UserError if its result has another shape than (b,), because the
    mean over a batch with masked examples needs one number for each.
    """

    def loss(logits: Float[Array, 'b k'], targets: Float[Array, 'b k']) -> Float[Array, 'b']:
        if not isinstance(config, LossConfig):
            losses, expected = config(logits, targets), logits.shape[:1]
            code = getattr(config, '__code__', None)
            where = f' ({code.co_filename}, line {code.co_firstlineno})' if code else ''
            found = f'gives shape {jnp.shape(losses)} for logits {logits.shape}'
            wanted = f'expected one number for each example, {expected}'
            fits = jnp.shape(losses) == expected
            records.require(fits, f'loss {records.text_of(config)}{where} {found}: {wanted}')
            return losses
        targets = optax.smooth_labels(targets, config.label_smoothing)
        match config.kind:
            case 'softmax':
                return optax.softmax_cross_entropy(logits, targets)
            case 'sigmoid':
                return optax.sigmoid_binary_cross_entropy(logits, targets).sum(axis=-1)
            case other:
                assert_never(other)

    return loss


def of_any(loss: Loss) -> Loss:
    """The loss where any of several classes is right: as if each were so to an equal share.

    An image without a class (a row of zeros) stays one.
    """

    def shared(logits: Float[Array, 'b k'], targets: Float[Array, 'b k']) -> Float[Array, 'b']:
        return loss(logits, targets / jnp.maximum(1, targets.sum(axis=-1, keepdims=True)))

    return shared


def targets_of(labels: Num[Array, 'b ...'], num_classes: int) -> Float[Array, 'b k']:
    """Float32 rows: one-hot of class numbers (b); labels that are rows already (b k) pass."""
    return jax.nn.one_hot(labels, num_classes) if labels.ndim == 1 else labels.astype(jnp.float32)


class BatchSums(NamedTuple):
    """Sums over the unmasked examples of a batch, to be added up and divided by their number."""

    sums: dict[str, Array]  # by name: the loss, and each of `example_metrics`
    num_examples: Array
    rows: dict[str, Array]  # outputs of each example (b ...) by name, masked ones included


def summed(
    values: dict[str, Float[Array, 'b']],
    mask: Bool[Array, 'b'],
    rows: dict[str, Array] | None = None,
) -> BatchSums:
    """Sums the values of unmasked examples, by name; `rows` are passed on."""
    sums = {name: jnp.where(mask, value, 0).sum() for name, value in values.items()}
    return BatchSums(sums, mask.sum(dtype=jnp.int32), rows or {})


# Rows (b ...) of logits (b k) and targets (b k), by name.
RowsOf = Callable[[Float[Array, 'b k'], Float[Array, 'b k']], dict[str, Array]]


class StepMetrics(NamedTuple):
    """The numbers of one step: arrays as the update gives them, floats once they are read."""

    sums: dict[str, Any]  # over the unmasked examples, by name
    num_examples: Any
    scalars: dict[str, Any]  # one number for the step, such as the learning rate

    @property
    def means(self) -> dict[str, float]:
        """Means over the examples of this step, by name; 0 where it has none."""
        count = max(1.0, float(self.num_examples))
        return {name: float(total) / count for name, total in self.sums.items()}


def scores(
    logits: Float[Array, 'b k'], targets: Float[Array, 'b k']
) -> dict[str, Float[Array, 'b k']]:
    """Rows for metrics of a whole data set, such as the mean average precision."""
    return {'logits': logits, 'targets': targets}


def predictions(
    logits: Float[Array, 'b k'], targets: Float[Array, 'b k']
) -> dict[str, Num[Array, 'b']]:
    """Of each example its class and the one that was predicted, by number, and the metrics."""
    numbers = {'label': targets.argmax(axis=-1), 'predicted': logits.argmax(axis=-1)}
    return numbers | example_metrics(logits, targets)


def example_metrics(
    logits: Float[Array, 'b k'], targets: Float[Array, 'b k']
) -> dict[str, Float[Array, 'b']]:
    """One number for each example, by name; evaluation and training report their means.

    `accuracy` is the target of the highest logit and `top5_accuracy` that of the five highest,
    added up and at most 1. For one-hot targets that is a hit or a miss, for several classes in one
    image whether any of them was hit, for mixed images the share of the label that was hit.
    """
    # Not jax.lax.top_k: XLA brings the logits of all devices together for it (jax 0.10.2).
    rest, hits = jax.lax.stop_gradient(logits), []
    for _ in range(5):  # the highest, the second, ...; of equal logits the first is higher
        best = jax.nn.one_hot(rest.argmax(axis=-1), rest.shape[-1])
        hits.append((best * targets).sum(axis=-1))
        rest = jnp.where(best > 0, -jnp.inf, rest)
    metrics = {'accuracy': hits[0]}
    if logits.shape[-1] > 5:  # otherwise everything would be a hit
        metrics['top5_accuracy'] = jnp.minimum(1.0, sum(hits))
    return metrics
