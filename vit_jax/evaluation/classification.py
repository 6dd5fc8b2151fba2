"""Loss and accuracy over a whole data set, each example counted exactly once."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from vit_jax.base.array_types import Array, Batch, Float, Num, Params


def evaluate(
    scores: Callable[[Params, Batch], dict[str, Array]],
    params: Params,
    batches: Iterable[Batch],
    *,
    count: int,
) -> dict[str, float]:
    """Mean loss and accuracy over the batches, which must hold `count` examples, then padding.

    `scores` gives the sums `loss`, `correct` and `count` of one batch. Where it also gives
    `logits` and `targets` (b k), an image may have several classes: then the accuracy is the
    share of images whose most probable class is one of theirs, and there is the
    `mean_average_precision`.

    Raises AssertionError where the batches held another number: an accuracy over other examples
    than those asked for is no result.
    """
    totals = {'loss': 0.0, 'correct': 0.0, 'count': 0.0}
    rows: dict[str, list[np.ndarray]] = {'logits': [], 'targets': []}

    def add(results: Any) -> None:
        for name, value in jax.device_get(results).items():
            if name in rows:
                rows[name].append(value)
            else:
                totals[name] += float(value)

    pending = None
    for batch in batches:
        results = scores(params, batch)
        if pending is not None:
            add(pending)  # read one batch late: the device runs ahead
        pending = results
    if pending is not None:
        add(pending)
    if totals['count'] != count:
        raise AssertionError(f'evaluated {totals["count"]:.0f} examples of {count}')
    found = {'loss': totals['loss'] / count, 'accuracy': totals['correct'] / count}
    if rows['logits']:
        logits, targets = (np.concatenate(parts)[:count] for parts in rows.values())
        found['mean_average_precision'] = mean_average_precision(logits, targets)
    return found


def mean_average_precision(
    logits: Float[np.ndarray, 'n k'], targets: Num[np.ndarray, 'n k']
) -> float:
    """The area under precision over recall, a mean over the classes that any image has."""
    from sklearn.metrics import average_precision_score

    present = targets.any(axis=0)
    return float(average_precision_score(targets[:, present], logits[:, present], average='macro'))
