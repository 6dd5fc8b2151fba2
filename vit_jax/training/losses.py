"""Losses: functions of logits and labels, one number for each example."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from vit_jax.base.array_types import Array, Float, Num
from vit_jax.base.records import Record

Loss = Callable[[Float[Array, 'b k'], Float[Array, 'b k']], Float[Array, 'b']]


LossKind = Literal['softmax', 'sigmoid']


@dataclasses.dataclass(kw_only=True)
class LossConfig(Record):
    """Softmax: one class an image. Sigmoid: yes or no for each class, summed over classes."""

    kind: LossKind = 'softmax'
    label_smoothing: float = 0.0  # the share of the target that is spread over all classes


def make_loss(config: LossConfig) -> Loss:
    """The loss of (logits, targets), targets as `targets_of` gives them."""

    def softmax(logits: Float[Array, 'b k'], targets: Float[Array, 'b k']) -> Float[Array, 'b']:
        return optax.softmax_cross_entropy(logits, smooth(targets))

    def sigmoid(logits: Float[Array, 'b k'], targets: Float[Array, 'b k']) -> Float[Array, 'b']:
        return optax.sigmoid_binary_cross_entropy(logits, smooth(targets)).sum(axis=-1)

    def smooth(targets: Float[Array, 'b k']) -> Float[Array, 'b k']:
        return optax.smooth_labels(targets, config.label_smoothing)

    return {'softmax': softmax, 'sigmoid': sigmoid}[config.kind]


def targets_of(labels: Num[Array, 'b ...'], num_classes: int) -> Float[Array, 'b k']:
    """Float32 rows: one-hot of class numbers (b); labels that are rows already (b k) pass."""
    return jax.nn.one_hot(labels, num_classes) if labels.ndim == 1 else labels.astype(jnp.float32)


def correct(logits: Float[Array, 'b k'], targets: Float[Array, 'b k']) -> Float[Array, 'b']:
    """The target of the highest logit: 1 where a one-hot label is hit, 0 where it is missed."""
    best = jax.nn.one_hot(logits.argmax(axis=-1), logits.shape[-1])
    return (best * targets).sum(axis=-1)
