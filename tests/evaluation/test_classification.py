import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.evaluation import classification
from vit_jax.evaluation.classification import evaluate


def loss_sums(params, batch):
    mask = batch['mask']
    return {name: (batch[name] * mask).sum() for name in ('loss', 'new')}, mask.sum(), {}


BATCHES = [
    {'loss': jnp.array([1.0, 3.0]), 'new': jnp.array([1.0, 0.0]), 'mask': jnp.array([True, True])},
    {'loss': jnp.array([5.0, 9.0]), 'new': jnp.array([1.0, 1.0]), 'mask': jnp.array([True, False])},
]


def test_means_of_whatever_is_summed_are_over_examples_and_not_over_batches():
    assert evaluate(loss_sums, {}, BATCHES, count=3) == {
        'loss': pytest.approx(3),
        'new': pytest.approx(2 / 3),
    }


@pytest.mark.parametrize('count', [2, 4])
def test_another_number_of_examples_than_the_data_set_has_is_no_result(count):
    with pytest.raises(AssertionError, match=f'evaluated 3 examples of {count}'):
        evaluate(loss_sums, {}, BATCHES, count=count)


def test_average_precision_is_the_mean_precision_at_each_hit():
    scores = np.array([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.1, 0.4]])
    targets = np.array([[1, 0], [0, 0], [1, 1], [0, 0]])
    expected = [(1 + 2 / 3) / 2, 1 / 2]  # class 0: hits at ranks 1 and 3; class 1: at rank 2
    np.testing.assert_allclose(classification.average_precisions(scores, targets), expected)
    with_absent = np.pad(targets, ((0, 0), (0, 1)))
    scores = np.pad(scores, ((0, 0), (0, 1)))
    found = classification.average_precisions(scores, with_absent)
    np.testing.assert_allclose(found, [*expected, np.nan])  # a class of no image has no precision
