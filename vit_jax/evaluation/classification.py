"""Means of the loss and of metrics over a whole data set, each example counted exactly once."""

import collections
import itertools
from collections.abc import Callable, Iterable

import jax
import numpy as np

from vit_jax.base import Array, Batch, Float, Num, Params, UserError

# Sums over a batch by name, the number of examples that they are sums of, and rows (b k) by name.
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

    Where it also gives rows of `logits` and `targets` (b k) and their `mask` (b), an image may have
    several classes, and there is the `mean_average_precision` too. The batches must hold `count`
    examples, else AssertionError: that would be no result. Where they `may_lack` some, which could
    not be read, the means are over the others; UserError where there are none.
    """
    totals: dict[str, float] = collections.defaultdict(float)
    examples, kept = 0, []
    computed = itertools.chain((loss_sums(params, batch) for batch in batches), [None])
    for found, _ in itertools.pairwise(computed):  # read one batch late: the device runs ahead
        sums, number, rows = jax.device_get(found)
        examples += int(number)
        for name, value in sums.items():
            totals[name] += float(value)
        if rows:
            kept.append([rows[name][rows['mask']] for name in ('logits', 'targets')])
    if may_lack and examples == 0:
        raise UserError(f'none of {count:,} images can be read')
    if examples > count or (examples < count and not may_lack):
        raise AssertionError(f'evaluated {examples} examples of {count}')
    means = {name: total / examples for name, total in totals.items()}
    if kept:
        logits, targets = (np.concatenate(part) for part in zip(*kept, strict=True))
        means['mean_average_precision'] = mean_average_precision(logits, targets)
    return means, examples


def mean_average_precision(
    logits: Float[np.ndarray, 'n k'], targets: Num[np.ndarray, 'n k']
) -> float:
    """The area under precision over recall, a mean over the classes that any image has."""
    from sklearn.metrics import average_precision_score

    present = targets.any(axis=0)
    return float(average_precision_score(targets[:, present], logits[:, present], average='macro'))
