"""Which evaluation of a run is the best, and when there has been no better one for long."""

import itertools
import json
import math

import pytest

from vit_jax.evaluation.evaluator import Selection
from vit_jax.training.metrics import find_metric

NAN, INF = math.nan, math.inf


def select(values, metric='accuracy', patience=None):
    selection = Selection('val', find_metric(metric), 'digits', 'train[90%:]', patience)
    for number, value in enumerate(values, 1):
        selection.record(100 * number, value)
    return selection


@pytest.mark.parametrize(
    'metric, values, step, later',
    [
        ('accuracy', [0.5, 0.75, 0.75], 200, 1),
        ('loss', [NAN, 2.0, -INF, NAN, 1.0, NAN], 500, 1),
        ('accuracy', [NAN, INF, NAN], None, 3),
    ],
)
def test_the_first_of_the_best_finite_values_is_selected(metric, values, step, later):
    found = select(values, metric)
    assert (found.step, len(found.later_steps)) == (step, later)


def test_a_run_that_was_killed_anywhere_selects_as_if_it_had_not_been():
    """It restores what a checkpoint holds, and records the evaluation at its step once more."""
    values = [0.5, 0.75, NAN, 0.75, 0.25, 0.875]
    whole = [select(values[:count], patience=3) for count in range(len(values) + 1)]
    assert [one.is_exhausted for one in whole] == [False] * 5 + [True, False]
    for before, after in itertools.combinations_with_replacement(range(1, len(values) + 1), 2):
        resumed = select([], patience=3)
        saved = json.loads(json.dumps(whole[before].to_dict()))
        resumed.resume(saved)
        for number in range(before, after + 1):
            resumed.record(100 * number, values[number - 1])
        other = {'split': 'test', 'data': 'photos', 'lower_is_better': True, 'metric': 'loss'}
        for name, value in other.items():  # values of other images are not compared
            resumed.resume(saved | {name: value})
        assert resumed == whole[after]
