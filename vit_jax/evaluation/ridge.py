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
Draws = dict[tuple[int, int], Int[np.ndarray, '_']]  # image indices by (seed, shots)


class ProbeResult(NamedTuple):
    """Test accuracy and indices of the training images, by (seed, shots)."""

    accuracies: dict[tuple[int, int], float]
    draws: Draws


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
    l2: float,
) -> ProbeResult:
    """Draws training images, fits a classifier to each draw, and tests it.

    Args:
      train_labels: Class number of each image to draw from.
      test: Test images.
      features_of: Maps indices to features; NaN for unreadable images, which are left out. It is
        called once, with the indices of all draws.
      shots: Numbers of images per class.
      seeds: Seeds of the draws.
      l2: Regularization.

    Raises:
      UserError: If no image of a draw can be read.
    """
    draws = draw(train_labels, shots=shots, seeds=seeds)
    used = np.unique(np.concatenate(list(draws.values())))
    train = Labeled(features_of(used), train_labels[used])
    readable = ~np.isnan(train.features).any(axis=1)
    accuracies = {}
    for drawn, images in draws.items():
        rows = np.searchsorted(used, images)
        rows = rows[readable[rows]]
        if not len(rows):
            raise UserError(f'none of the {len(images):,} drawn training images can be read')
        draws[drawn] = used[rows]
        accuracies[drawn] = accuracy(train.subset(rows), test, l2=l2)
    return ProbeResult(accuracies=accuracies, draws=draws)


def accuracy(train: Labeled, test: Labeled, *, l2: float) -> float:
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
def fit(train: Labeled, *, l2: float) -> Classifier:
    """Fits the ridge classifier in float64 (see above)."""
    classes, labels, sizes = np.unique(train.labels, return_inverse=True, return_counts=True)
    order = np.argsort(labels, kind='stable')
    num_images = len(labels)
    mean = train.features.mean(axis=0, dtype=np.float64)
    x = train.features[order] - mean
    scale = np.sqrt((x**2).mean(axis=0)) + EPSILON
    x /= scale
    if num_images < len(mean):
        targets = 2.0 * (labels[order][:, None] == range(len(classes)))
        targets -= targets.mean(axis=0)  # X'1 = 0 up to rounding, which 1 / l2 would amplify
        weights = x.T @ _solve(x @ x.T, targets, l2)
    else:
        first_rows = np.cumsum(sizes) - sizes
        class_sums = np.add.reduceat(x, first_rows)
        weights = _solve(x.T @ x, 2.0 * class_sums.T, l2)
    bias = BIAS**2 * (2.0 * sizes - num_images) / (BIAS**2 * num_images + l2)
    return Classifier(
        classes=classes, mean=mean, weights=weights / scale[:, None], bias=bias, l2=l2
    )


def _solve(
    gram: Float[np.ndarray, 'm m'], right: Float[np.ndarray, 'm k'], l2: float
) -> Float[np.ndarray, 'm k']:
    """Computes (gram + l2)^-1 right. An l2 below the rounding error of gram is replaced by it."""
    rounding = len(gram) * np.finfo(np.float64).eps * gram.diagonal().max()
    gram[np.diag_indices_from(gram)] += max(l2, rounding)
    factor = scipy.linalg.cho_factor(gram, overwrite_a=True)
    return scipy.linalg.cho_solve(factor, right, overwrite_b=True)
