"""Loss and accuracy over a whole data set, each example counted exactly once."""

from collections.abc import Callable, Iterable

import jax

from vit_jax.typing import Array, Batch, Params


def evaluate(
    scores: Callable[[Params, Batch], dict[str, Array]],
    params: Params,
    batches: Iterable[Batch],
    *,
    count: int,
) -> dict[str, float]:
    """Mean loss and accuracy over the batches, which must hold `count` examples.

    `scores` gives the sums `loss`, `correct` and `count` of one batch.

    Raises AssertionError where the batches held another number: an accuracy over other examples
    than those asked for is no result.
    """
    totals = {'loss': 0.0, 'correct': 0.0, 'count': 0.0}
    pending: list[dict[str, Array]] = []
    for batch in batches:
        pending.append(scores(params, batch))  # read one batch late: the device runs ahead
        if len(pending) > 1:
            _add(totals, pending.pop(0))
    for sums in pending:
        _add(totals, sums)
    if totals['count'] != count:
        raise AssertionError(f'evaluated {totals["count"]:.0f} examples of {count}')
    return {'loss': totals['loss'] / count, 'accuracy': totals['correct'] / count}


def _add(totals: dict[str, float], sums: dict[str, Array]) -> None:
    for name, value in jax.device_get(sums).items():
        totals[name] += float(value)
