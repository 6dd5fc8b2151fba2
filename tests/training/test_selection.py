"""Which evaluation of a run is the best, and when there has been no better one for long."""

import dataclasses
import itertools
import json
import math

import pytest

from vit_jax.training.selection import Selection

NAN, INF = math.nan, math.inf


def select(values, metric='accuracy', patience=None):
    selection = Selection('val', metric, 'train[90%:]', patience)
    for number, value in enumerate(values, 1):
        selection.record(100 * number, value)
    return selection


@pytest.mark.parametrize(
    'metric, values, step, since',
    [
        ('accuracy', [0.5, 0.75, 0.25], 200, 1),
        ('loss', [0.5, 0.75, 0.25], 300, 0),
        ('mean_average_precision', [0.5, 0.75, 0.75], 200, 1),  # of equal values the first
        ('loss', [NAN, 2.0, -INF, NAN, 1.0, NAN], 500, 1),
        ('accuracy', [NAN, INF, NAN], None, 3),
        ('loss', [0.0, 0.0], 100, 1),
    ],
)
def test_the_best_value_is_the_first_of_the_highest_or_of_a_loss_the_lowest(
    metric, values, step, since
):
    found = select(values, metric)
    assert (found.step, len(found.since)) == (step, since)


def test_a_run_that_was_killed_anywhere_selects_as_if_it_had_not_been():
    """It restores what a checkpoint holds, and records the evaluation at its step once more."""
    values = [0.5, 0.75, NAN, 0.75, 0.25, 0.875]
    whole = [select(values[:count], patience=3) for count in range(len(values) + 1)]
    assert [one.is_exhausted for one in whole] == [False] * 5 + [True, False]
    for before, after in itertools.combinations_with_replacement(range(1, len(values) + 1), 2):
        resumed = Selection('val', 'accuracy', 'train[90%:]', patience=3)
        resumed.resume(json.loads(json.dumps(dataclasses.asdict(whole[before]))))
        for number in range(before, after + 1):
            resumed.record(100 * number, values[number - 1])
        assert resumed == whole[after]


@pytest.mark.parametrize('name', ['evaluation', 'metric', 'split'])
def test_values_of_other_images_or_metrics_are_not_compared(name):
    saved = dataclasses.asdict(select([0.9, 0.5]))
    selection = dataclasses.replace(select([]), **{name: 'other'})
    selection.resume(saved)
    assert selection.step is None and selection.record(300, 0.1)
