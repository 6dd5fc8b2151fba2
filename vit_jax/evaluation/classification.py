"""Means of the loss and of metrics over a whole data set, each example counted exactly once."""

import collections
import itertools
from collections.abc import Callable, Iterable

import jax
import numpy as np

from vit_jax.base import Array, Batch, Float, Num, Params, UserError, require

# Sums over a batch by name, the number of examples that they are sums of, and rows (b ...).
Sums = tuple[dict[str, Array], Array, dict[str, Array]]


def evaluate(
    loss_sums: Callable[..., Sums],
    params: Params,
    batches: Iterable[Batch],
    *,
    count: int,
    may_lack: bool = False,
) -> tuple[dict[str, float], int]:
    """Means of what `loss_sums(params, batch)` sums, and over how many examples they are.

    See `measure`. Where there are rows of `logits` and `targets` (b k) too, an image may have
    several classes, and there is the `mean_average_precision`.
    """
    means, examples, rows = measure(loss_sums, params, batches, count=count, may_lack=may_lack)
    if 'logits' in rows:
        precisions = average_precisions(rows['logits'], rows['targets'])
        means['mean_average_precision'] = float(np.nanmean(precisions))
    return means, examples


def measure(
    loss_sums: Callable[..., Sums],
    params: Params,
    batches: Iterable[Batch],
    *,
    count: int,
    may_lack: bool = False,
) -> tuple[dict[str, float], int, dict[str, Num[np.ndarray, 'n ...']]]:
    """Means of what `loss_sums(params, batch)` sums, over how many examples, and their rows.

    Of the rows those stay that are in their `mask` (b). The batches must hold `count` examples,
    else AssertionError: that would be no result. Where they `may_lack` some, which could not be
    read, all is of the others; UserError where there are none.
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
            kept[name].append(values[rows['mask']])
    if may_lack and examples == 0:
        raise UserError(f'none of {count:,} images can be read')
    if examples > count or (examples < count and not may_lack):
        raise AssertionError(f'evaluated {examples} examples of {count}')
    means = {name: total / examples for name, total in totals.items()}
    return means, examples, {name: np.concatenate(parts) for name, parts in kept.items()}


def average_precisions(
    logits: Float[np.ndarray, 'n k'], targets: Num[np.ndarray, 'n k']
) -> Float[np.ndarray, 'k']:
    """The area under precision over recall of each class; NaN of a class that no image has.

    Raises UserError where no image has any.
    """
    from sklearn.metrics import average_precision_score

    found, present = np.full(targets.shape[1], np.nan), targets.any(axis=0)
    require(bool(present.any()), f'none of {len(targets):,} images has a class')
    found[present] = average_precision_score(targets[:, present], logits[:, present], average=None)
    return found
