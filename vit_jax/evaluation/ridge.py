"""Few-shot linear probe in closed form (ViT paper, section 4.1).

It is ridge regression from frozen features to targets in {-1, 1}, with k labeled images per class.
The paper does not specify standardization, bias, l2 and seeds; they are as in `fewshot_lsr` of
big_vision.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import scipy.linalg

from vit_jax.base import Float, Int, UserError
from vit_jax.evaluation.probes import EPSILON, Classifier, Labeled

BIAS = 100.0  # constant feature; its weight is hardly regularized (l2 / 100^2)
L2 = 1024.0  # not divided by the number of images, so it is strong for few images
L2Strengths = float | Sequence[float]  # an l2, or several to choose from
Draws = dict[tuple[int, int], Int[np.ndarray, '_']]  # image indices by (seed, shots)


class ProbeResult(NamedTuple):
    """Test accuracy, indices of the training images, and selected l2, by (seed, shots)."""

    accuracies: dict[tuple[int, int], float]
    draws: Draws
    l2: dict[tuple[int, int], float]


def draw(labels: Int[np.ndarray, 'n'], *, shots: Sequence[int], seeds: Sequence[int]) -> Draws:
    """Draws training images for each (seed, shots).

    Draws of one seed are nested: the images of fewer shots are among the images of more shots. If a
    class has fewer images than shots, all are drawn.

    Returns:
      Image indices, ordered by class, by (seed, shots).
    """
    draws = {}
    for seed in seeds:
        rng = np.random.default_rng(seed)
        classes = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
        for count in shots:
            draws[int(seed), int(count)] = np.concatenate([c[:count] for c in classes])
    return draws


def few_shot(
    train_labels: Int[np.ndarray, 'n'],
    test: Labeled,
    *,
    features_of: Callable[[Int[np.ndarray, 'u']], Float[np.ndarray, 'u d']],
    shots: Sequence[int],
    seeds: Sequence[int],
    l2: L2Strengths,
) -> ProbeResult:
    """Draws training images, fits a classifier to each draw, and tests it.

    Args:
      train_labels: Class number of each image to draw from.
      test: Test images.
      features_of: Maps indices to features; NaN for unreadable images, which are left out. It is
        called once, with the indices of all draws.
      shots: Numbers of images per class.
      seeds: Seeds of the draws.
      l2: Regularization, or several values to choose from.

    Raises:
      UserError: If no image of a draw can be read.
    """
    draws = draw(train_labels, shots=shots, seeds=seeds)
    used = np.unique(np.concatenate(list(draws.values())))
    train = Labeled(features_of(used), train_labels[used])
    readable = ~np.isnan(train.features).any(axis=1)
    accuracies, chosen_l2 = {}, {}
    for drawn, images in draws.items():
        rows = np.searchsorted(used, images)
        rows = rows[readable[rows]]
        if not len(rows):
            raise UserError(f'none of the {len(images):,} drawn training images can be read')
        classifier = fit(train.subset(rows), l2=l2)
        draws[drawn] = used[rows]
        accuracies[drawn], chosen_l2[drawn] = classifier.accuracy(test), classifier.l2
    return ProbeResult(accuracies=accuracies, draws=draws, l2=chosen_l2)


def accuracy(train: Labeled, test: Labeled, *, l2: L2Strengths) -> float:
    """Computes the test accuracy of the ridge classifier."""
    return fit(train, l2=l2).accuracy(test)


# The protocol follows evaluators/fewshot_lsr.py of big_vision. Let X (n d) be the standardized
# features and Y (n k) the targets, -1 or 1 for each class as in the paper. The gradient of
# |XW - Y|^2 + l2 |W|^2 is zero for
#     (X'X + l2) W = X'Y.
# This is a d x d system. For n < d images, a smaller n x n system is enough: since
#     (X'X + l2) X' = X' (XX' + l2),
# W = X' (XX' + l2)^-1 Y. Both matrices are symmetric, and positive definite for any l2 > 0 and any
# number of images.
#
# The bias is the weight of a constant feature of 100: a bias of b needs a weight of b / 100, whose
# penalty is l2 b^2 / 10,000. It is nearly unregularized, because the mean of the targets is far
# from 0 with many classes. The mean of each standardized feature is zero, so X'1 = 0. Therefore
# the bias does not depend on W: it is 100^2 sum(Y) / (100^2 n + l2). And X'Y is twice the sum of
# the features of each class.
#
# If there are several l2, the one with the lowest generalized cross-validation (GCV) score is
# chosen (Golub, Heath and Wahba 1979). It estimates the squared error on unseen images:
#     |(I - H)Y|^2 / tr(I - H)^2,   where H maps training targets to predictions.
# In the basis of the eigenvectors of XX' and the vector 1 of ones, I - H is diagonal with entries
# l2 / (eigenvalue + l2). The eigenvalue of 1 is 100^2 n, and directions that features do not span
# have eigenvalue 0. So one eigendecomposition serves all l2, and test images are scored once.
def fit(train: Labeled, *, l2: L2Strengths) -> Classifier:
    """Fits the ridge classifier in float64.

    If `l2` has several values, the one with the lowest GCV score is chosen (see above).
    """
    classes, labels, sizes = np.unique(train.labels, return_inverse=True, return_counts=True)
    order, count = np.argsort(labels, kind='stable'), len(labels)
    mean = train.features.mean(axis=0, dtype=np.float64)
    x = train.features[order] - mean
    scale = np.sqrt((x**2).mean(axis=0)) + EPSILON
    x /= scale
    strengths = [float(each) for each in np.atleast_1d(l2)]
    if count < len(mean):
        targets = 2.0 * (labels[order][:, None] == range(len(classes)))
        targets -= targets.mean(axis=0)  # X'1 = 0 up to rounding, which 1 / l2 would amplify
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
    """Computes (gram + l2)^-1 right and the best l2; gram is X'X if `of_features`, else XX'.

    An l2 that is smaller than the rounding error of gram is replaced by it.
    """
    rounding = len(gram) * np.finfo(np.float64).eps * gram.diagonal().max()
    added = [max(l2, rounding) for l2 in strengths]
    if len(strengths) == 1:
        gram[np.diag_indices_from(gram)] += added[0]
        factor = scipy.linalg.cho_factor(gram, overwrite_a=True)
        return scipy.linalg.cho_solve(factor, right, overwrite_b=True), strengths[0]
    values, vectors = scipy.linalg.eigh(gram, overwrite_a=True)
    values, parts = values.clip(rounding), vectors.T @ right
    squares = (parts**2).sum(axis=1) / (values if of_features else 1.0)  # |Y|^2 per eigenvector
    best = int(np.argmin([_cross_validation(values, squares, sizes, l2) for l2 in added]))
    return vectors @ (parts / (values + added[best])[:, None]), strengths[best]


def _cross_validation(
    values: Float[np.ndarray, 'm'],
    squares: Float[np.ndarray, 'm'],
    sizes: Int[np.ndarray, 'k'],
    l2: float,
) -> float:
    """Computes the GCV score of an l2; `sizes` are the numbers of images by class."""
    count, factors, bias_factor = sizes.sum(), l2 / (values + l2), l2 / (BIAS**2 * sizes.sum() + l2)
    total = 4 * (sizes * (1 - sizes / count)).sum()  # |Y|^2 without its mean
    along_one = ((2 * sizes - count) ** 2).sum() / count
    residual = (squares * factors**2).sum() + max(total - squares.sum(), 0.0)
    trace = factors.sum() + (count - len(values) - 1) + bias_factor
    return float((residual + along_one * bias_factor**2) / trace**2)
