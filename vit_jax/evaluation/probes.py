"""kNN and logistic regression on the devices, with the same results as scikit-learn."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.base import Array, Float, Int, records

TEMPERATURE = 0.07  # of kNN votes, as in DINO (Caron et al. 2021)
EPSILON = 1e-5  # added to standard deviations of features
_CHUNK = 1024  # number of test images that are predicted at once
_MAX_SIMILARITIES = 2**28  # similarities that are computed at once: 1 GiB


@dataclasses.dataclass(kw_only=True)
class LogisticConfig(records.Record):
    """Linear probe: softmax regression on standardized features, fitted with L-BFGS.

    The objective is the sum of losses plus l2/2 times the squared weights; `l2` is 1/C in
    scikit-learn and in CLIP's linear probes. If there are several values, the one with the best
    accuracy on a validation part of the training images is chosen for the fit to all of them.
    """

    l2: tuple[float, ...] = (1.0, 10.0, 100.0, 1000.0, 10000.0)  # regularization; the best is used
    validation_fraction: float = 0.1  # fraction of the training images that selects l2
    max_iterations: int = 1000  # maximum number of L-BFGS iterations
    tolerance: float = 1e-4  # largest gradient entry of the mean loss at convergence

    def check(self) -> None:
        records.require(bool(self.l2), 'l2=(): expected one or more numbers')
        records.require_between(self, 'l2', low=0)
        records.require_between(self, 'validation_fraction', above=0, below=1)
        records.require_between(self, 'max_iterations', low=1)
        records.require_between(self, 'tolerance', above=0)


class Labeled(NamedTuple):
    """Features and class numbers of images."""

    features: Float[np.ndarray, 'n d']
    labels: Int[np.ndarray, 'n']

    def subset(self, indices: np.ndarray) -> 'Labeled':
        """Selects images by indices or by a boolean mask."""
        return Labeled(self.features[indices], self.labels[indices])


class Classifier(NamedTuple):
    """A linear classifier with the scores `(features - mean) @ weights + bias`."""

    classes: Int[np.ndarray, 'k']  # class number of each score
    mean: Float[np.ndarray, 'd']  # mean of the training features
    weights: Float[np.ndarray, 'd k']
    bias: Float[np.ndarray, 'k']
    l2: float = 0.0  # selected regularization

    def accuracy(self, test: Labeled) -> float:
        """Computes the accuracy on test images."""
        num_correct = 0
        for start in range(0, len(test.labels), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            is_correct = self.predict(test.features[chunk]) == test.labels[chunk]
            num_correct += int(is_correct.sum())
        return num_correct / len(test.labels)

    def predict(self, features: Float[np.ndarray, 'n d']) -> Int[np.ndarray, 'n']:
        """Predicts the class with the largest score, in float32.

        The mean is subtracted from the features first. If it were part of the bias, the scores of
        features far from zero would lose digits.
        """
        centered = features.astype(np.float32, copy=False) - self.mean.astype(np.float32)
        scores = centered @ self.weights.astype(np.float32)
        scores += self.bias.astype(np.float32)
        return self.classes[scores.argmax(axis=1)]


class LogisticResult(NamedTuple):
    """Test accuracy of the linear probe, with the selected l2 and the convergence of its fit."""

    accuracy: float
    l2: float
    iterations: int
    converged: bool


class LogisticState(NamedTuple):
    """State of a logistic regression during its fit."""

    weights: Float[Array, 'e k']  # the last row is the bias
    state: Any  # state of L-BFGS
    iterations: Int[Array, '']
    max_gradient: Float[Array, '']  # largest absolute entry of the gradient of the mean loss


def evaluate_knn(train: Labeled, test: Labeled, *, neighbors: tuple[int, ...]) -> dict[int, float]:
    """Computes the test accuracy of kNN with cosine similarity, for each number of neighbors.

    Neighbors vote with weight exp(similarity / 0.07). The nearest images are found once.

    Raises:
      UserError: If there are fewer training images than one of `neighbors`.
    """
    records.require(
        all(1 <= k <= len(train.labels) for k in neighbors),
        f'neighbors={neighbors}: expected 1 to {len(train.labels)} (training images)',
    )
    classes, labels = np.unique(train.labels, return_inverse=True)
    counts = np.array(neighbors)
    chunk = max(1, min(_CHUNK, _MAX_SIMILARITIES // len(labels)))
    is_neighbor = np.arange(counts.max()) < counts[:, None]

    @jax.jit  # `train` is passed in: a compiled program cannot hold constants of 2 GB
    def vote(train: Array, labels: Array, test: Float[Array, 'n d']) -> Int[Array, 'n q']:
        def vote_once(features: Float[Array, 'd']) -> Int[Array, 'q']:
            similarity = jnp.matmul(train, features, precision='highest')
            near, index = jax.lax.top_k(similarity, counts.max())
            weights = jnp.exp((near - 1) / TEMPERATURE) * is_neighbor
            votes = jnp.zeros((len(counts), len(classes)))
            return votes.at[:, labels[index]].add(weights).argmax(axis=-1)

        return jax.lax.map(vote_once, test, batch_size=chunk)

    predicted = classes[np.asarray(vote(_unit(train.features), labels, _unit(test.features)))]
    accuracies = (predicted == test.labels[:, None]).mean(axis=0)
    return dict(zip(neighbors, accuracies.tolist(), strict=True))


def fit_best_logistic(train: Labeled, config: LogisticConfig) -> tuple[Classifier, LogisticState]:
    """Fits the linear probe with the best l2 (see `LogisticConfig`) to all training images."""
    mean = train.features.mean(axis=0)
    std = train.features.std(axis=0) + EPSILON
    inputs = np.pad((train.features - mean) / std, ((0, 0), (0, 1)), constant_values=1.0)
    classes, labels = np.unique(train.labels, return_inverse=True)
    options = {'max_iterations': config.max_iterations, 'tolerance': config.tolerance}

    def fit(rows: Any, l2: float) -> tuple[Classifier, LogisticState]:
        mean_l2 = l2 / len(labels[rows])
        fitted = fit_logistic(
            inputs[rows], labels[rows], l2=mean_l2, num_classes=len(classes), **options
        )
        *weights, bias = np.asarray(fitted.weights)
        classifier = Classifier(
            classes=classes, mean=mean, weights=np.array(weights) / std[:, None], bias=bias, l2=l2
        )
        return classifier, fitted

    best_l2 = config.l2[0]
    is_valid = np.random.default_rng(0).random(len(labels)) < config.validation_fraction
    if len(config.l2) > 1 and is_valid.any():
        valid = train.subset(is_valid)

        def validation_accuracy(l2: float) -> float:
            classifier, _ = fit(~is_valid, l2)
            return classifier.accuracy(valid)

        best_l2 = max(config.l2, key=validation_accuracy)
    return fit(slice(None), best_l2)


def evaluate_logistic(train: Labeled, test: Labeled, config: LogisticConfig) -> LogisticResult:
    """Fits the linear probe with the best l2 and tests it."""
    classifier, fitted = fit_best_logistic(train, config)
    return LogisticResult(
        accuracy=classifier.accuracy(test),
        l2=classifier.l2,
        iterations=int(fitted.iterations),
        converged=bool(fitted.max_gradient <= config.tolerance),
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
) -> LogisticState:
    """Minimizes the mean softmax loss of XW plus l2/2 |W|^2 with L-BFGS.

    The last row of W is the bias, which is not regularized. L-BFGS stops when no entry of the
    gradient is larger than the tolerance.

    Args:
      features: X; its last column is constant.
      labels: Class numbers 0, 1, ...
      l2: Regularization.
      num_classes: Number of classes.
      max_iterations: Maximum number of iterations.
      tolerance: Largest entry of the gradient at convergence.
    """

    def loss(weights: Float[Array, 'e k']) -> Float[Array, '']:
        logits = jnp.matmul(features, weights, precision='highest')
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean() + 0.5 * l2 * (weights[:-1] ** 2).sum()

    solver = optax.lbfgs()
    value_and_gradient = optax.value_and_grad_from_state(loss)

    def step(carry: LogisticState) -> LogisticState:
        value, gradient = value_and_gradient(carry.weights, state=carry.state)
        updates, state = solver.update(
            gradient, carry.state, carry.weights, value=value, grad=gradient, value_fn=loss
        )
        weights = optax.apply_updates(carry.weights, updates)
        largest = jnp.abs(optax.tree.get(state, 'grad')).max()
        return LogisticState(weights, state, carry.iterations + 1, largest)

    def unfinished(carry: LogisticState) -> Any:
        return (carry.iterations < max_iterations) & (carry.max_gradient > tolerance)

    start = jnp.zeros((features.shape[1], num_classes))
    first = LogisticState(start, solver.init(start), jnp.zeros((), jnp.int32), jnp.asarray(jnp.inf))
    return jax.lax.while_loop(unfinished, step, first)


def _unit(features: Float[np.ndarray, 'n d']) -> Float[np.ndarray, 'n d']:
    return features / np.maximum(1e-12, np.linalg.norm(features, axis=1, keepdims=True))
