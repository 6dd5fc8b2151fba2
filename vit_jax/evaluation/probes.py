"""What frozen features know, from all training images: nearest neighbours, logistic regression."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.base.array_types import Array, Float, Int
from vit_jax.base.errors import UserError
from vit_jax.base.records import Record
from vit_jax.evaluation.standardising import standardised

TEMPERATURE = 0.07  # of a neighbour's vote, as in DINO (Caron et al. 2021)
_CHUNK = 1024  # test images that are compared with all training images at once


@dataclasses.dataclass(kw_only=True)
class LogisticConfig(Record):
    """Softmax regression on standardised features, by L-BFGS to convergence.

    `l2` multiplies half the squared weights, against the sum of losses: 1/C of scikit-learn and of
    CLIP's probes. Of several, the one that is best on the held-out part of the training images is
    taken, and all of these are fitted again with it.
    """

    l2: tuple[float, ...] = (1.0, 10.0, 100.0, 1000.0, 10000.0)
    held_out: float = 0.1
    max_iterations: int = 1000
    tolerance: float = 1e-4  # of the gradient of the mean loss, by its largest entry


def nearest_neighbours(
    train_features: Float[np.ndarray, 'n d'],
    train_labels: Int[np.ndarray, 'n'],
    test_features: Float[np.ndarray, 'm d'],
    test_labels: Int[np.ndarray, 'm'],
    *,
    neighbours: int,
) -> float:
    """Test accuracy of a vote of the nearest training images, by cosine similarity.

    Each votes with exp(similarity / TEMPERATURE). Raises UserError for fewer training images.
    """
    if not 1 <= neighbours <= len(train_labels):
        raise UserError(f'neighbours={neighbours}: there are {len(train_labels)} training images')
    classes, labels = np.unique(train_labels, return_inverse=True)
    train = jnp.asarray(_unit(train_features))

    @jax.jit
    def vote(test: Float[Array, 'c d']) -> Int[Array, 'c']:
        similarity = jnp.matmul(test, train.T, precision='highest')
        near, index = jax.lax.top_k(similarity, neighbours)
        votes = jax.nn.one_hot(jnp.asarray(labels)[index], len(classes))
        weights = jnp.exp((near - 1) / TEMPERATURE)
        return (votes * weights[..., None]).sum(axis=1).argmax(axis=-1)

    found = []
    for start in range(0, len(test_labels), _CHUNK):
        rows = _unit(test_features[start : start + _CHUNK])
        padded = np.pad(rows, ((0, _CHUNK - len(rows)), (0, 0)))
        found.append(np.asarray(vote(padded))[: len(rows)])
    return float((classes[np.concatenate(found)] == test_labels).mean())


def logistic(
    train_features: Float[np.ndarray, 'n d'],
    train_labels: Int[np.ndarray, 'n'],
    test_features: Float[np.ndarray, 'm d'],
    test_labels: Int[np.ndarray, 'm'],
    config: LogisticConfig,
) -> dict[str, float | int | bool]:
    """Test accuracy of the linear probe, with the l2 that was chosen and whether it converged."""
    train, test = standardised(train_features, test_features, constant=1.0)
    classes, labels = np.unique(train_labels, return_inverse=True)
    fit = functools.partial(fit_logistic, num_classes=len(classes), config=config)
    l2 = config.l2[0]
    if len(config.l2) > 1:
        held = np.random.default_rng(0).random(len(labels)) < config.held_out
        scores = {
            strength: accuracy_of(
                fit(train[~held], labels[~held], l2=strength)[0], train[held], labels[held]
            )
            for strength in config.l2
        }
        l2 = max(scores, key=lambda strength: scores[strength])
    weights, iterations, converged = fit(train, labels, l2=l2)
    numbers = np.where(np.isin(test_labels, classes), np.searchsorted(classes, test_labels), -1)
    return {
        'accuracy': accuracy_of(weights, test, numbers),
        'l2': l2,
        'iterations': iterations,
        'converged': converged,
    }


def fit_logistic(
    features: Float[np.ndarray, 'n e'],
    labels: Int[np.ndarray, 'n'],
    *,
    num_classes: int,
    l2: float,
    config: LogisticConfig,
) -> tuple[Float[np.ndarray, 'e k'], int, bool]:
    """Weights W of least sum of softmax losses of XW plus l2/2 |W|^2, iterations, converged or not.

    The last row of W belongs to a constant feature, the bias, and is not regularised.
    """
    weights, iterations, slope = _descend(
        jnp.asarray(features),
        jnp.asarray(labels),
        l2 / len(labels),
        num_classes=num_classes,
        max_iterations=config.max_iterations,
        tolerance=config.tolerance,
    )
    return np.asarray(weights), int(iterations), bool(slope <= config.tolerance)


@functools.partial(jax.jit, static_argnames=('num_classes', 'max_iterations', 'tolerance'))
def _descend(
    features: Float[Array, 'n e'],
    labels: Int[Array, 'n'],
    l2: Float[Array, ''] | float,
    *,
    num_classes: int,
    max_iterations: int,
    tolerance: float,
) -> tuple[Float[Array, 'e k'], Array, Array]:
    """L-BFGS until no entry of the gradient of the mean loss is above the tolerance."""

    def loss(weights: Float[Array, 'e k']) -> Float[Array, '']:
        logits = jnp.matmul(features, weights, precision='highest')
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean() + 0.5 * l2 * (weights[:-1] ** 2).sum()

    solver = optax.lbfgs()
    value_and_slope = optax.value_and_grad_from_state(loss)

    def step(carry: Any) -> Any:
        weights, state, count, _ = carry
        value, slope = value_and_slope(weights, state=state)
        updates, state = solver.update(
            slope, state, weights, value=value, grad=slope, value_fn=loss
        )
        weights = optax.apply_updates(weights, updates)
        return weights, state, count + 1, jnp.abs(optax.tree.get(state, 'grad')).max()

    def go_on(carry: Any) -> Any:
        return (carry[2] < max_iterations) & (carry[3] > tolerance)

    start = jnp.zeros((features.shape[1], num_classes))
    first = start, solver.init(start), jnp.zeros((), jnp.int32), jnp.asarray(jnp.inf)
    weights, _, count, slope = jax.lax.while_loop(go_on, step, first)
    return weights, count, slope


def accuracy_of(
    weights: Float[np.ndarray, 'e k'], features: Float[np.ndarray, 'n e'], labels: Any
) -> float:
    """The share of rows whose highest score is at their label."""
    return float(((features @ weights).argmax(axis=1) == labels).mean())


def _unit(features: Float[np.ndarray, 'n d']) -> Float[np.ndarray, 'n d']:
    return features / np.maximum(1e-12, np.linalg.norm(features, axis=1, keepdims=True))
