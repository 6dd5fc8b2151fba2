"""Few-shot linear evaluation in closed form, with the protocol of the paper (section 4.1).

A frozen network's features, k labelled images a class, and a ridge regression to targets in
{-1, 1}: what a linear classifier finds in the features without any training. The paper leaves
standardisation, bias, l2 and seeds open; they are those of big_vision's `fewshot_lsr`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vit_jax.base import Float, Int, UserError
from vit_jax.evaluation.probes import Labelled, standardised

BIAS = 100.0  # a constant feature this large is hardly regularised: lambda / 100^2
Accuracies = dict[tuple[int, int], float]  # by seed and shots
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


def probe(
    train_labels: Int[np.ndarray, 'n'],
    test: Labelled,
    *,
    features_of: Callable[[Int[np.ndarray, 'u']], Float[np.ndarray, 'u d']],
    shots: Sequence[int],
    seeds: Sequence[int],
    l2: float,
) -> tuple[Accuracies, Draws]:
    """Test accuracy of each draw, and the draws; `features_of(indices)` is asked once, for all.

    Images whose features are NaN, as of one that cannot be read, are left out of their draws.
    """
    draws = draw(train_labels, shots=shots, seeds=seeds)
    used = np.unique(np.concatenate(list(draws.values())))
    features = features_of(used)
    there = ~np.isnan(features).any(axis=1)
    draws = {drawn: images[there[np.searchsorted(used, images)]] for drawn, images in draws.items()}
    if not all(map(len, draws.values())):
        raise UserError(f'none of the images that were drawn can be read, of {len(train_labels):,}')
    accuracies = {}
    for drawn, indices in draws.items():
        train = Labelled(features[np.searchsorted(used, indices)], train_labels[indices])
        accuracies[drawn] = accuracy(train, test, l2=l2)
    return accuracies, draws


def accuracy(train: Labelled, test: Labelled, *, l2: float) -> float:
    """Test accuracy of the ridge classifier of the training images."""
    classes = np.unique(train.labels)
    targets = 2.0 * (train.labels[:, None] == classes) - 1
    learned, tested = standardised(train.features, test.features, constant=BIAS)
    found = classes[(tested @ ridge(learned, targets, l2=l2)).argmax(axis=1)]
    return float((found == test.labels).mean())


# The protocol is that of big_vision's evaluators/fewshot_lsr.py. With X (n d) the features and Y
# (n k) the targets, -1 or 1 for each class as in the paper, the gradient of |XW - Y|^2 + l2 |W|^2
# is zero where
#     (X'X + l2) W = X'Y.
# That is a d x d system. With few images n < d, and a smaller one does: from
#     (X'X + l2) X' = X' (XX' + l2)
# follows W = X' (XX' + l2)^-1 Y, which is n x n. Both matrices are symmetric: V E V' gives the
# inverse V (E + l2)^-1 V', which exists for any l2 > 0, however few the images.
#
# The bias is the weight of a constant feature of 100: a bias of b needs a weight of b / 100, whose
# penalty is l2 b^2 / 10,000. So it is nearly free, as it should be: nothing is known of the mean of
# the targets, which is far from 0 where there are many classes.
def ridge(
    x: Float[np.ndarray, 'n d'], y: Float[np.ndarray, 'n k'], *, l2: float
) -> Float[np.ndarray, 'd k']:
    """Weights W of least |XW - Y|^2 + l2 |W|^2, in float64."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    few = len(x) < x.shape[1]
    eigenvalues, vectors = np.linalg.eigh(x @ x.T if few else x.T @ x)
    projected = vectors.T @ (y if few else x.T @ y) / (eigenvalues + l2)[:, None]
    return x.T @ vectors @ projected if few else vectors @ projected


def report(
    accuracies: Accuracies, draws: Draws, *, l2: float, name_of: Callable[[int], str], classes: int
) -> dict[str, Any]:
    """Protocol, accuracies, means, deviations as JSON; `name_of(index)` names a training image."""
    seeds, shots = (list(dict.fromkeys(values)) for values in zip(*draws, strict=True))
    by_shots = {k: [accuracies[seed, k] for seed in seeds] for k in shots}
    return {
        'classes': classes,
        'shots': shots,
        'seeds': seeds,
        'l2': l2,
        'bias': BIAS,
        'targets': [-1, 1],
        'standardised': 'by mean and deviation of the drawn images',
        'mean': {str(k): float(np.mean(a)) for k, a in by_shots.items()},
        'deviation': {str(k): float(np.std(a)) for k, a in by_shots.items()},
        'accuracy': {f'seed {s}, {k} shots': a for (s, k), a in accuracies.items()},
        'train_images': {
            f'seed {s}, {k} shots': [name_of(index) for index in drawn.tolist()]
            for (s, k), drawn in draws.items()
        },
    }
