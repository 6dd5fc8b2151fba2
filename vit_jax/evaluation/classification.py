"""Means of the loss and of metrics over a whole data set, each example counted exactly once."""

import collections
import itertools
from collections.abc import Callable, Iterable

import jax
import numpy as np

from vit_jax.base.array_types import Array, Batch, Float, Num, Params

# Sums over a batch by name, the number of examples that they are sums of, and rows (b ...) by name.
Sums = tuple[dict[str, Array], Array, dict[str, Array]]


def evaluate(
    loss_sums: Callable[..., Sums], params: Params, batches: Iterable[Batch], *, count: int
) -> dict[str, float]:
    """Means of what `loss_sums(params, batch)` sums, see `measure`.

    Where it also gives rows of `logits` and `targets` (b k), an image may have several classes, and
    there is the `mean_average_precision` too.
    """
    means, rows = measure(loss_sums, params, batches, count=count)
    if 'logits' in rows:
        precisions = average_precisions(rows['logits'], rows['targets'])
        means['mean_average_precision'] = float(np.nanmean(precisions))
    return means


def measure(
    loss_sums: Callable[..., Sums], params: Params, batches: Iterable[Batch], *, count: int
) -> tuple[dict[str, float], dict[str, Num[np.ndarray, 'n ...']]]:
    """Means of what `loss_sums(params, batch)` sums, and its rows of all examples, by name.

    Masked examples must come after all others. Raises AssertionError where the batches do not hold
    `count` examples: that would be no result.
    """
    totals: dict[str, float] = collections.defaultdict(float)
    kept: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    examples = 0
    computed = itertools.chain((loss_sums(params, batch) for batch in batches), [None])
    for found, _ in itertools.pairwise(computed):  # read one batch late: the device runs ahead
        sums, number, rows = jax.device_get(found)
        examples += int(number)
        for name, value in sums.items():
            totals[name] += float(value)
        for name, values in rows.items():
            kept[name].append(values)
    if examples != count:
        raise AssertionError(f'evaluated {examples} examples of {count}')
    means = {name: total / count for name, total in totals.items()}
    return means, {name: np.concatenate(parts)[:count] for name, parts in kept.items()}


def average_precisions(
    logits: Float[np.ndarray, 'n k'], targets: Num[np.ndarray, 'n k']
) -> Float[np.ndarray, 'k']:
    """The area under precision over recall of each class; NaN of a class that no image has."""
    from sklearn.metrics import average_precision_score

    found, present = np.full(targets.shape[1], np.nan), targets.any(axis=0)
    found[present] = average_precision_score(targets[:, present], logits[:, present], average=None)
    return found
