import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.base import UserError
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
    means = {'loss': pytest.approx(3), 'new': pytest.approx(2 / 3)}
    assert evaluate(loss_sums, {}, BATCHES, count=3) == (means, 3)


@pytest.mark.parametrize('count', [2, 4])
def test_another_number_of_examples_than_the_data_set_has_is_no_result(count):
    with pytest.raises(AssertionError, match=f'evaluated 3 examples of {count}'):
        evaluate(loss_sums, {}, BATCHES, count=count)


def test_what_could_not_be_read_may_be_lacking_but_not_everything():
    means, examples = evaluate(loss_sums, {}, BATCHES, count=4, may_lack=True)
    assert means['loss'] == pytest.approx(3) and examples == 3
    nothing = {name: jnp.zeros(2, bool) for name in BATCHES[0]}
    with pytest.raises(UserError, match='none of 2 images can be read'):
        evaluate(loss_sums, {}, [nothing], count=2, may_lack=True)
    with pytest.raises(AssertionError):  # an image counted twice
        evaluate(loss_sums, {}, BATCHES, count=2, may_lack=True)


def test_average_precision_is_over_the_examples_that_are_not_masked():
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(8, 3)), rng.integers(0, 2, (8, 3))
    mask = np.array([True, False, True, True, True, True, False, False])

    def with_rows(params, batch):
        return {}, batch['mask'].sum(), batch

    rows = {'logits': logits, 'targets': targets, 'mask': mask}
    parts = [{name: x[part] for name, x in rows.items()} for part in (slice(0, 4), slice(4, 8))]
    found = evaluate(with_rows, {}, parts, count=8, may_lack=True)
    expected = classification.average_precisions(logits[mask], targets[mask]).mean()
    assert found == ({'mean_average_precision': pytest.approx(expected)}, 5)


def test_average_precision_is_the_mean_precision_at_each_hit():
    scores = np.array([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.1, 0.4]])
    targets = np.array([[1, 0], [0, 0], [1, 1], [0, 0]])
    expected = [(1 + 2 / 3) / 2, 1 / 2]  # class 0: hits at ranks 1 and 3; class 1: at rank 2
    np.testing.assert_allclose(classification.average_precisions(scores, targets), expected)
    with_absent = np.pad(targets, ((0, 0), (0, 1)))
    scores = np.pad(scores, ((0, 0), (0, 1)))
    found = classification.average_precisions(scores, with_absent)
    np.testing.assert_allclose(found, [*expected, np.nan])  # a class of no image has no precision
    with pytest.raises(UserError, match='none of 4 images has a class'):
        classification.average_precisions(scores, 0 * with_absent)
