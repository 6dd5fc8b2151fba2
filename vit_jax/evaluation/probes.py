"""k nearest neighbors and logistic regression on the devices, with the results of scikit-learn."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.base import Array, Float, Int, UserError, records

TEMPERATURE = 0.07  # of a neighbour's vote, as in DINO (Caron et al. 2021)
EPSILON = 1e-5  # added to deviations of features
_CHUNK = 1024  # test images that are predicted at once


@dataclasses.dataclass(kw_only=True)
class LogisticConfig(records.Record):
    """Softmax regression on standardized features, by L-BFGS to convergence.

    `l2` multiplies half the squared weights, against the sum of losses: 1/C of scikit-learn and of
    CLIP's probes. If there are several, the one that is best on a validation part of the training
    images is chosen, and fitted again to all training images.
    """

    l2: tuple[float, ...] = (1.0, 10.0, 100.0, 1000.0, 10000.0)  # of half the squared weights
    validation_fraction: float = 0.1  # of the training images
    max_iterations: int = 1000  # of L-BFGS
    tolerance: float = 1e-4  # of the gradient of the mean loss, by its largest entry

    def check(self) -> None:
        records.require(bool(self.l2), 'l2=(): expected one or more numbers')
        records.require_between(self, 'l2', low=0)
        records.require_between(self, 'validation_fraction', above=0, below=1)
        records.require_between(self, 'max_iterations', low=1)
        records.require_between(self, 'tolerance', above=0)


class Labelled(NamedTuple):
    """Features of images and their classes."""

    features: Float[np.ndarray, 'n d']
    labels: Int[np.ndarray, 'n']

    def subset(self, indices: np.ndarray) -> 'Labelled':
        """Returns the images of these indices, or of this mask."""
        return Labelled(self.features[indices], self.labels[indices])


class Classifier(NamedTuple):
    """A linear classifier; the score of each class is (features - mean) weights + bias."""

    classes: Int[np.ndarray, 'k']
    mean: Float[np.ndarray, 'd']  # of the training features
    weights: Float[np.ndarray, 'd k']
    bias: Float[np.ndarray, 'k']
    l2: float = 0.0

    def accuracy(self, test: Labelled) -> float:
        """Returns the share of these images that are classified correctly."""
        parts = (slice(start, start + _CHUNK) for start in range(0, len(test.labels), _CHUNK))
        hits = (self.predict(test.features[part]) == test.labels[part] for part in parts)
        return sum(int(hit.sum()) for hit in hits) / len(test.labels)

    def predict(self, features: Float[np.ndarray, 'n d']) -> Int[np.ndarray, 'n']:
        """Returns the class of the largest score, in float32.

        The mean is subtracted first: in the bias it would cost the digits of features that are far
        from zero.
        """
        mean, weights, bias = (part.astype(np.float32) for part in self[1:4])
        scores = (features.astype(np.float32, copy=False) - mean) @ weights
        scores += bias
        return self.classes[scores.argmax(axis=1)]


class LogisticResult(NamedTuple):
    """Test accuracy of the linear probe, with the l2 that was chosen and whether it converged."""

    accuracy: float
    l2: float
    iterations: int
    converged: bool


class Fit(NamedTuple):
    """An unfinished logistic regression: weights, the state of L-BFGS, and its progress."""

    weights: Float[Array, 'e k']
    state: Any
    iterations: Int[Array, '']
    slope: Float[Array, '']  # the largest entry of the gradient of the mean loss


def nearest_neighbours(train: Labelled, test: Labelled, *, neighbours: int) -> float:
    """Returns the test accuracy of a vote of the nearest training images, by cosine similarity.

    Each votes with exp(similarity / TEMPERATURE). Raises UserError for fewer training images.
    """
    if not 1 <= neighbours <= len(train.labels):
        raise UserError(f'neighbours={neighbours}: there are {len(train.labels)} training images')
    classes, labels = np.unique(train.labels, return_inverse=True)
    training = jnp.asarray(_unit(train.features))

    def vote(features: Float[Array, 'd']) -> Int[Array, '']:
        similarity = jnp.matmul(training, features, precision='highest')
        near, index = jax.lax.top_k(similarity, neighbours)
        votes = jax.nn.one_hot(jnp.asarray(labels)[index], len(classes))
        return jnp.matmul(jnp.exp((near - 1) / TEMPERATURE), votes).argmax()

    votes_of = jax.jit(functools.partial(jax.lax.map, vote, batch_size=_CHUNK))
    predicted = classes[np.asarray(votes_of(_unit(test.features)))]
    return float((predicted == test.labels).mean())


def logistic(train: Labelled, test: Labelled, config: LogisticConfig) -> LogisticResult:
    """Fits the linear probe, with the l2 that is best on a part of the training images."""
    mean, std = train.features.mean(axis=0), train.features.std(axis=0) + EPSILON
    inputs = np.pad((train.features - mean) / std, ((0, 0), (0, 1)), constant_values=1.0)
    classes, labels = np.unique(train.labels, return_inverse=True)
    options = {'max_iterations': config.max_iterations, 'tolerance': config.tolerance}

    def fit(rows: Any, l2: float) -> tuple[Classifier, Fit]:
        x, y = inputs[rows], labels[rows]
        fitted = fit_logistic(x, y, l2=l2 / len(y), num_classes=len(classes), **options)
        *weights, bias = np.asarray(fitted.weights)
        return Classifier(classes, mean, np.array(weights) / std[:, None], bias), fitted

    l2, *others = config.l2
    is_valid = np.random.default_rng(0).random(len(labels)) < config.validation_fraction
    if others and is_valid.any():
        valid = train.subset(is_valid)
        l2 = max(config.l2, key=lambda strength: fit(~is_valid, strength)[0].accuracy(valid))
    classifier, fitted = fit(slice(None), l2)
    return LogisticResult(
        accuracy=classifier.accuracy(test),
        l2=l2,
        iterations=int(fitted.iterations),
        converged=bool(fitted.slope <= config.tolerance),
    )


@functools.partial(jax.jit, static_argnames=('num_classes', 'max_iterations', 'tolerance'))
def fit_logistic(
    features: Float[Array, 'n e'],
    labels: Int[Array, 'n'],
    *,
    l2: Float[Array, ''] | float,
    num_classes: int,
    max_iterations: int,
    tolerance: float,
) -> Fit:
    """Minimizes the mean softmax loss of XW plus l2/2 |W|^2 with L-BFGS; labels are 0, 1, ...

    X are the features. Their last column is constant, so that the last row of W is the bias, which
    is not regularized. L-BFGS stops when no entry of the gradient is above the tolerance.
    """

    def loss(weights: Float[Array, 'e k']) -> Float[Array, '']:
        logits = jnp.matmul(features, weights, precision='highest')
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean() + 0.5 * l2 * (weights[:-1] ** 2).sum()

    solver = optax.lbfgs()
    value_and_slope = optax.value_and_grad_from_state(loss)

    def step(carry: Fit) -> Fit:
        value, slope = value_and_slope(carry.weights, state=carry.state)
        updates, state = solver.update(
            slope, carry.state, carry.weights, value=value, grad=slope, value_fn=loss
        )
        weights = optax.apply_updates(carry.weights, updates)
        largest = jnp.abs(optax.tree.get(state, 'grad')).max()
        return Fit(weights, state, carry.iterations + 1, largest)

    def unfinished(carry: Fit) -> Any:
        return (carry.iterations < max_iterations) & (carry.slope > tolerance)

    start = jnp.zeros((features.shape[1], num_classes))
    first = Fit(start, solver.init(start), jnp.zeros((), jnp.int32), jnp.asarray(jnp.inf))
    return jax.lax.while_loop(unfinished, step, first)


def _unit(features: Float[np.ndarray, 'n d']) -> Float[np.ndarray, 'n d']:
    return features / np.maximum(1e-12, np.linalg.norm(features, axis=1, keepdims=True))
