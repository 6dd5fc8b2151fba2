"""Means of the loss and of metrics over a whole data set, each example counted exactly once."""

import collections
import itertools
from collections.abc import Callable, Iterable

import jax
import numpy as np

from vit_jax.base.array_types import Array, Batch, Float, Num, Params

# Sums over a batch by name, the number of examples that they are sums of, and rows (b k) by name.
Sums = tuple[dict[str, Array], Array, dict[str, Array]]


def evaluate(
    loss_sums: Callable[..., Sums], params: Params, batches: Iterable[Batch], *, count: int
) -> dict[str, float]:
    """Means of what `loss_sums(params, batch)` sums, over batches that must hold `count` examples.

    Where it also gives rows of `logits` and `targets` (b k), an image may have several classes, and
    there is the `mean_average_precision` too; masked examples must come after all others. Raises
    AssertionError where the batches hold another number: that would be no result.
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
            kept.append((rows['logits'], rows['targets']))
    if examples != count:
        raise AssertionError(f'evaluated {examples} examples of {count}')
    means = {name: total / count for name, total in totals.items()}
    if kept:
        logits, targets = (np.concatenate(part)[:count] for part in zip(*kept, strict=True))
        means['mean_average_precision'] = mean_average_precision(logits, targets)
    return means


def mean_average_precision(
    logits: Float[np.ndarray, 'n k'], targets: Num[np.ndarray, 'n k']
) -> float:
    """The area under precision over recall, a mean over the classes that any image has."""
    from sklearn.metrics import average_precision_score

    present = targets.any(axis=0)
    return float(average_precision_score(targets[:, present], logits[:, present], average='macro'))
