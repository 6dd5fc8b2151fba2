"""Losses: functions of logits and labels, one number for each example."""

import dataclasses
from collections.abc import Callable
from typing import Literal, assert_never

import jax
import jax.numpy as jnp
import optax

from vit_jax.base import Array, Float, Num, records

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
