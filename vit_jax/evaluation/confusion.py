"""Which classes are taken for which others: numbers of each class."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.base import Float, Int, Num


def confusion_matrix(
    labels: Int[np.ndarray, 'n'], predicted: Int[np.ndarray, 'n'], *, classes: int
) -> Int[np.ndarray, 'k k']:
    """How many images of each class (row) were taken for which (column)."""
    pairs = labels.astype(np.int64) * classes + predicted
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def class_means(
    values: Num[np.ndarray, 'n'], targets: Num[np.ndarray, 'n ...'], *, classes: int
) -> Float[np.ndarray, 'k']:
    """The mean over the images of each class, of numbers (n) or rows (n k); NaN without images."""
    images, labels = np.nonzero(targets) if targets.ndim == 2 else (np.arange(len(values)), targets)
    totals = np.bincount(labels, weights=values[images], minlength=classes)
    with np.errstate(invalid='ignore'):
        return totals / np.bincount(labels, minlength=classes)


def confusions(matrix: Int[np.ndarray, 'k k'], names: Sequence[str]) -> list[dict[str, Any]]:
    """What was taken for what, the most frequent first: `class`, `taken_for`, `images`."""
    wrong = matrix * (1 - np.eye(len(matrix), dtype=matrix.dtype))
    rows, columns = np.nonzero(wrong)
    order = np.argsort(-wrong[rows, columns], kind='stable')
    return [
        {'class': names[i], 'taken_for': names[j], 'images': int(wrong[i, j])}
        for i, j in zip(rows[order].tolist(), columns[order].tolist(), strict=True)
    ]
