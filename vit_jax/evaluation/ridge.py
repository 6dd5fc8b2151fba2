"""Few-shot linear evaluation in closed form, with the protocol of the paper (section 4.1).

A frozen network's features, k labelled images a class, and a ridge regression to targets in
{-1, 1}: what a linear classifier finds in the features without any training. The paper leaves
standardisation, bias, l2 and seeds open; they are those of big_vision's `fewshot_lsr`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vit_jax.base.array_types import Float, Int
from vit_jax.evaluation.standardising import standardised

BIAS = 100.0  # a constant feature this large is hardly regularised: lambda / 100^2
Draws = dict[tuple[int, int], Int[np.ndarray, '_']]


def draw(labels: Int[np.ndarray, 'n'], *, shots: Sequence[int], seeds: Sequence[int]) -> Draws:
    """Indices of the images of each (seed, shots), class after class.

    A seed permutes the images of each class once: its draws are nested in shots. A class with
    fewer images than shots gives all that it has.
    """
    draws = {}
    for seed in seeds:
        rng = np.random.default_rng(seed)
        classes = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
        for count in shots:
            draws[int(seed), int(count)] = np.concatenate([c[:count] for c in classes])
    return draws


def evaluate(
    train_features: Float[np.ndarray, 'n d'],
    train_labels: Int[np.ndarray, 'n'],
    test_features: Float[np.ndarray, 'm d'],
    test_labels: Int[np.ndarray, 'm'],
    *,
    shots: Sequence[int],
    seeds: Sequence[int],
    l2: float | Sequence[float],
) -> dict[tuple[int, int], Any]:
    """Test accuracy by (seed, shots): a number, or one for each l2 where several are given."""
    return {
        drawn: accuracy(
            train_features[indices], train_labels[indices], test_features, test_labels, l2=l2
        )
        for drawn, indices in draw(train_labels, shots=shots, seeds=seeds).items()
    }


def probe(
    train_features: Callable[[Int[np.ndarray, 'n']], Float[np.ndarray, 'n d']],
    train_labels: Int[np.ndarray, 'n'],
    test_features: Float[np.ndarray, 'm d'],
    test_labels: Int[np.ndarray, 'm'],
    *,
    shots: Sequence[int],
    seeds: Sequence[int],
    l2: float,
) -> tuple[dict[tuple[int, int], float], Draws]:
    """As `evaluate`, with features computed for those training images alone that are drawn."""
    draws = draw(train_labels, shots=shots, seeds=seeds)
    used = np.unique(np.concatenate(list(draws.values())))
    features = train_features(used)
    accuracies = {}
    for drawn, indices in draws.items():
        rows = np.searchsorted(used, indices)
        accuracies[drawn] = accuracy(
            features[rows], train_labels[indices], test_features, test_labels, l2=l2
        )
    return accuracies, draws


def accuracy(
    train_features: Float[np.ndarray, 'n d'],
    train_labels: Int[np.ndarray, 'n'],
    test_features: Float[np.ndarray, 'm d'],
    test_labels: Int[np.ndarray, 'm'],
    *,
    l2: float | Sequence[float],
) -> Any:
    """Test accuracy of the ridge classifier of these images, for one l2 or for each of several."""
    classes = np.unique(train_labels)
    targets = 2.0 * (train_labels[:, None] == classes) - 1
    train, test = standardised(train_features, test_features, constant=BIAS)
    accuracies = [
        float((classes[(test @ weights).argmax(axis=1)] == test_labels).mean())
        for weights in ridge(train, targets, np.atleast_1d(np.asarray(l2, np.float64)))
    ]
    return accuracies[0] if np.ndim(l2) == 0 else accuracies


def ridge(
    x: Float[np.ndarray, 'n d'], y: Float[np.ndarray, 'n k'], l2: Float[np.ndarray, 's']
) -> list[Float[np.ndarray, 'd k']]:
    """Weights W of least |XW - Y|^2 + l2 |W|^2 for each l2, from one eigendecomposition.

    W = (X'X + l2)^-1 X'Y = X'(XX' + l2)^-1 Y; the smaller of the two matrices is decomposed.
    """
    x, y = x.astype(np.float64), y.astype(np.float64)
    if x.shape[0] >= x.shape[1]:
        eigenvalues, vectors = np.linalg.eigh(x.T @ x)
        projected = vectors.T @ (x.T @ y)
        back = vectors
    else:
        eigenvalues, vectors = np.linalg.eigh(x @ x.T)
        projected = vectors.T @ y
        back = x.T @ vectors
    return [back @ (projected / (eigenvalues + strength)[:, None]) for strength in l2]


def report(
    accuracies: dict[tuple[int, int], float],
    draws: Draws,
    config: Any,
    *,
    name_of: Callable[[int], str],
    classes: int,
) -> dict[str, Any]:
    """The result as JSON values: the protocol, each accuracy, mean and deviation over seeds.

    `name_of` names a training image by its index.
    """
    by_shots = {k: [accuracies[seed, k] for seed in config.seeds] for k in config.shots}
    return {
        'classes': classes,
        'shots': list(config.shots),
        'seeds': list(config.seeds),
        'l2': config.l2,
        'bias': BIAS,
        'targets': [-1, 1],
        'standardised': 'by mean and deviation of the drawn images',
        'mean': {str(k): float(np.mean(a)) for k, a in by_shots.items()},
        'deviation': {str(k): float(np.std(a)) for k, a in by_shots.items()},
        'accuracy': {f'seed {s}, {k} shots': a for (s, k), a in accuracies.items()},
        'train_images': {
            f'seed {seed}, {shots} shots': [name_of(index) for index in drawn.tolist()]
            for (seed, shots), drawn in draws.items()
        },
    }
