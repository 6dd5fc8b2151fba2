"""Few-shot linear evaluation in closed form, with the protocol of the paper (section 4.1).

Ridge regression from the features of a frozen model to targets in {-1, 1}, for k labeled images of
each class. The paper leaves standardization, bias, l2 and seeds open; here they equal those of
big_vision's `fewshot_lsr`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import scipy.linalg

from vit_jax.base import Float, Int, UserError
from vit_jax.evaluation.probes import EPSILON, Classifier, Labelled

BIAS = 100.0  # a constant feature this large is hardly regularised: lambda / 100^2
L2 = 1024.0  # not divided by the number of images: strong where they are few
Strengths = float | Sequence[float]  # an l2, or several to choose from
Draws = dict[tuple[int, int], Int[np.ndarray, '_']]  # indices of images by seed and shots


class ProbeResult(NamedTuple):
    """By seed and shots: test accuracy, indices of the training images, and the best l2."""

    accuracies: dict[tuple[int, int], float]
    draws: Draws
    l2: dict[tuple[int, int], float]


def draw(labels: Int[np.ndarray, 'n'], *, shots: Sequence[int], seeds: Sequence[int]) -> Draws:
    """Draws the images of each (seed, shots), and returns their indices, class after class.

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
    l2: Strengths,
) -> ProbeResult:
    """Draws training images, fits a classifier to each draw, and tests it.

    `features_of(indices)` is called once, for all draws. Images whose features are NaN, because
    they cannot be read, are left out. Raises UserError if none is left of a draw.
    """
    draws = draw(train_labels, shots=shots, seeds=seeds)
    used = np.unique(np.concatenate(list(draws.values())))
    train = Labelled(features_of(used), train_labels[used])
    readable = ~np.isnan(train.features).any(axis=1)
    accuracies, chosen_l2 = {}, {}
    for drawn, images in draws.items():
        rows = np.searchsorted(used, images)
        rows = rows[readable[rows]]
        if not len(rows):
            raise UserError(f'none of the {len(images):,} images that were drawn can be read')
        classifier = fit(train.subset(rows), l2=l2)
        draws[drawn] = used[rows]
        accuracies[drawn], chosen_l2[drawn] = classifier.accuracy(test), classifier.l2
    return ProbeResult(accuracies=accuracies, draws=draws, l2=chosen_l2)


def accuracy(train: Labelled, test: Labelled, *, l2: Strengths) -> float:
    """Returns the test accuracy of the ridge classifier of the training images."""
    return fit(train, l2=l2).accuracy(test)


# The protocol is that of big_vision's evaluators/fewshot_lsr.py. With X (n d) the standardized
# features and Y (n k) the targets, -1 or 1 for each class as in the paper, the gradient of
# |XW - Y|^2 + l2 |W|^2 is zero where
#     (X'X + l2) W = X'Y.
# That is a d x d system. With few images n < d, and a smaller one does: from
#     (X'X + l2) X' = X' (XX' + l2)
# follows W = X' (XX' + l2)^-1 Y, which is n x n. Both matrices are symmetric, and positive definite
# for any l2 > 0, however few the images.
#
# The bias is the weight of a constant feature of 100: a bias of b needs a weight of b / 100, whose
# penalty is l2 b^2 / 10,000. So it is nearly free, as it should be, for the mean of the
# targets is far from 0 where there are many classes. As the mean of each standardized
# feature is zero, X'1 = 0: the bias is a system of its own, 100^2 sum(Y) / (100^2 n + l2), and X'Y
# is twice the sum of the features of each class.
#
# Among several l2, the generalized cross-validation (Golub, Heath and Wahba 1979) decides. It is an
# estimate of the squared error on other images, from the training images alone,
#     |(I - H)Y|^2 / tr(I - H)^2,   H the matrix that makes predictions for these of their targets.
# In the basis of eigenvectors of XX' and of 1, I - H is diagonal: l2 / (eigenvalue + l2), where the
# eigenvalue of 1 is 100^2 n, and of what features do not span it is 0. So one eigendecomposition
# serves all l2, and the test images are scored once.
def fit(train: Labelled, *, l2: Strengths) -> Classifier:
    """Fits the ridge classifier, in float64, with the best of several l2."""
    classes, labels, sizes = np.unique(train.labels, return_inverse=True, return_counts=True)
    order, count = np.argsort(labels, kind='stable'), len(labels)
    mean = train.features.mean(axis=0, dtype=np.float64)
    x = train.features[order] - mean
    scale = np.sqrt((x**2).mean(axis=0)) + EPSILON
    x /= scale
    strengths = [float(each) for each in np.atleast_1d(l2)]
    if count < len(mean):
        targets = 2.0 * (labels[order][:, None] == range(len(classes)))
        targets -= targets.mean(axis=0)  # as X'1 = 0, it would leave its rounding alone, over l2
        solved, chosen = _solve(x @ x.T, targets, strengths, sizes)
        weights = x.T @ solved
    else:
        right = 2.0 * np.add.reduceat(x, np.cumsum(sizes) - sizes).T
        weights, chosen = _solve(x.T @ x, right, strengths, sizes, of_features=True)
    bias = BIAS**2 * (2.0 * sizes - count) / (BIAS**2 * count + chosen)
    return Classifier(classes, mean, weights / scale[:, None], bias, chosen)


def _solve(
    gram: Float[np.ndarray, 'm m'],
    right: Float[np.ndarray, 'm k'],
    strengths: list[float],
    sizes: Int[np.ndarray, 'k'],
    *,
    of_features: bool = False,
) -> tuple[Float[np.ndarray, 'm k'], float]:
    """Returns (gram + l2)^-1 right, and the best l2; gram is X'X if `of_features`, else XX'.

    An l2 below the rounding of gram is raised to it.
    """
    rounding = len(gram) * np.finfo(np.float64).eps * gram.diagonal().max()
    added = [max(l2, rounding) for l2 in strengths]
    if len(strengths) == 1:
        gram[np.diag_indices_from(gram)] += added[0]
        factor = scipy.linalg.cho_factor(gram, overwrite_a=True)
        return scipy.linalg.cho_solve(factor, right, overwrite_b=True), strengths[0]
    values, vectors = scipy.linalg.eigh(gram, overwrite_a=True)
    values, parts = values.clip(rounding), vectors.T @ right
    squares = (parts**2).sum(axis=1) / (values if of_features else 1.0)  # of Y along eigenvectors
    best = int(np.argmin([_cross_validation(values, squares, sizes, l2) for l2 in added]))
    return vectors @ (parts / (values + added[best])[:, None]), strengths[best]


def _cross_validation(
    values: Float[np.ndarray, 'm'],
    squares: Float[np.ndarray, 'm'],
    sizes: Int[np.ndarray, 'k'],
    l2: float,
) -> float:
    """Returns the generalized cross-validation of an l2; `sizes` are the images of each class."""
    count, left, left_of_bias = sizes.sum(), l2 / (values + l2), l2 / (BIAS**2 * sizes.sum() + l2)
    total = 4 * (sizes * (1 - sizes / count)).sum()  # |Y|^2 without its mean
    along_one = ((2 * sizes - count) ** 2).sum() / count
    residual = (squares * left**2).sum() + max(total - squares.sum(), 0.0)
    trace = left.sum() + (count - len(values) - 1) + left_of_bias
    return float((residual + along_one * left_of_bias**2) / trace**2)
