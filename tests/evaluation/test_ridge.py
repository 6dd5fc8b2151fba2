import numpy as np
import pytest

from vit_jax.evaluation import ridge
from vit_jax.evaluation.probes import Labeled

RNG = np.random.default_rng(0)


def with_constant(x):
    return np.pad(x, ((0, 0), (0, 1)), constant_values=100.0)


def test_draws_are_nested_distinct_and_balanced():
    labels = RNG.integers(0, 7, 300)
    draws = ridge.draw(labels, shots=(1, 5, 10), seeds=(0, 1))
    for seed in 0, 1:
        assert set(draws[seed, 1]) < set(draws[seed, 5]) < set(draws[seed, 10])
        for shots in 1, 5, 10:
            drawn = draws[seed, shots]
            assert len(set(drawn)) == len(drawn)
            assert np.bincount(labels[drawn]).tolist() == [shots] * 7
    assert set(draws[0, 5]) != set(draws[1, 5])
    few = ridge.draw(np.array([0, 0, 0, 0, 1]), shots=(3,), seeds=(0,))[0, 3]
    assert len(few) == 4 and 4 in few  # a class of one image


@pytest.mark.parametrize('images', [12, 60, 5000])  # fewer, and more, than the 30 features; slices
@pytest.mark.parametrize('l2', [0.1, 1024.0])
def test_the_classifier_is_the_minimum_whichever_matrix_is_decomposed(images, l2):
    """Of the problem as the protocol states it, with the constant feature of 100."""
    x, labels = 50 + RNG.normal(size=(images, 30)), RNG.permutation(np.arange(images) % 4)
    found = ridge.fit(Labeled(x, 7 * labels), l2=l2)
    assert found.classes.tolist() == [0, 7, 14, 21]
    scale = x.std(axis=0) + 1e-5
    x = with_constant((x - x.mean(axis=0)) / scale)
    weights = np.vstack([found.weights * scale[:, None], found.bias / 100])
    gradient = x.T @ (x @ weights - (2.0 * (labels[:, None] == range(4)) - 1)) + l2 * weights
    np.testing.assert_allclose(gradient, 0, atol=1e-7)  # of sums up to 5e5, in float64


def test_the_bias_is_hardly_regularized():
    """50 images that look the same: the prediction is the mean target, shrunk by 0.2 %."""
    labels = np.arange(50) % 5 // 4  # one in five
    found = ridge.fit(Labeled(np.ones((50, 3)), labels), l2=1024.0)
    np.testing.assert_allclose(found.bias, np.array([0.6, -0.6]) * 50e4 / (50e4 + 1024))
    assert not found.weights.any()


@pytest.mark.parametrize('images', [12, 60])
def test_where_features_lie_changes_nothing_however_small_the_l2(images):
    labels = np.arange(images) % 3
    x = np.round(RNG.normal(size=(images, 30)), 4)
    there, far = (ridge.fit(Labeled(at + x, labels), l2=1e-9) for at in (0, 1e4))
    # At 1e4 features are rounded to 1e-12; 1e4 times that for what the small matrix makes of it.
    np.testing.assert_allclose(far.weights, there.weights, atol=1e-8 * abs(there.weights).max())


def test_features_far_from_zero_are_scored_by_what_differs():
    """What differs is a hundred thousandth of what they have in common."""
    labels = np.arange(40) % 2
    features = (1000 + 0.01 * labels[:, None] * np.ones((40, 6))).astype(np.float32)
    data = Labeled(features, labels)
    assert ridge.accuracy(data, data, l2=1.0) == 1.0


@pytest.mark.parametrize('images', [12, 60])
def test_a_strength_below_all_rounding_is_solved_as_well(images):
    labels = np.arange(images) % 3
    data = Labeled(np.repeat(RNG.normal(size=(images, 1)), 30, axis=1), labels)  # rank one
    assert np.isfinite(ridge.fit(data, l2=1e-300).weights).all()


def test_features_are_computed_only_for_images_that_some_draw_uses():
    labels, features = RNG.integers(0, 5, 400), RNG.normal(size=(400, 8))
    test = Labeled(RNG.normal(size=(50, 8)), RNG.integers(0, 5, 50))
    asked = []

    def features_of(indices):
        asked.extend(indices.tolist())
        return features[indices]

    found, draws = ridge.few_shot(
        labels, test, features_of=features_of, shots=(1, 3), seeds=(0, 1), l2=10.0
    )
    assert len(asked) == len(set(asked)) <= 3 * 5 * 2
    assert set(asked) == set(np.concatenate(list(draws.values())).tolist())
    assert found == {
        drawn: ridge.accuracy(Labeled(features[indices], labels[indices]), test, l2=10.0)
        for drawn, indices in draws.items()
    }
