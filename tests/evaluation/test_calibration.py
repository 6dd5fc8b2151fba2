"""Calibration against scikit-learn, closed forms, and synthetic data with known probabilities."""

import numpy as np
import pytest
import scipy.special
from sklearn import metrics

from vit_jax.evaluation import calibration


def draw(*, temperature, count=20_000, classes=5):
    """Logits whose softmax at `temperature` is the distribution of the labels."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(count, classes)) * 3
    probabilities = scipy.special.softmax(logits / temperature, axis=1)
    labels = (probabilities.cumsum(axis=1) < rng.random((count, 1))).sum(axis=1)
    return logits, labels.clip(0, classes - 1)


def test_log_loss_and_brier_score_equal_those_of_scikit_learn():
    logits, labels = draw(temperature=2.0, count=3000)  # more than one chunk
    found = calibration.score(logits, labels)
    probabilities = scipy.special.softmax(logits, axis=1)
    assert found.nll == pytest.approx(metrics.log_loss(labels, probabilities))
    of_class = [metrics.brier_score_loss(labels == k, probabilities[:, k]) for k in range(5)]
    assert found.brier == pytest.approx(sum(of_class))


def test_calibration_error_is_the_weighted_gap_of_the_bins():
    """Four images of confidence 0.55 with one hit, and one of confidence 0.95 without a hit."""
    confidences, correct = np.array([0.55] * 4 + [0.95]), np.array([1, 0, 0, 0, 0], bool)
    low, high = calibration.fill_bins(confidences, correct)
    assert (low.images, low.accuracy, high.images, high.accuracy) == (4, 0.25, 1, 0)
    assert (low.confidence, high.confidence) == (pytest.approx(0.55), pytest.approx(0.95))
    odds = np.log(confidences / (1 - confidences))
    found = calibration.score(np.stack([odds, 0 * odds], axis=1), 1 - correct.astype(int))
    assert found.calibration_error == pytest.approx((4 * 0.3 + 0.95) / 5)


def test_bins_have_equal_width_and_contain_their_upper_edge():
    edges = np.arange(1, 16) / 15
    bins = calibration.fill_bins(np.concatenate([edges, edges - 0.01]), np.ones(30, bool))
    assert [one.images for one in bins] == [2] * 15


def test_the_planted_temperature_is_found_and_repairs_the_other_half():
    """The standard error of the temperature from 10,000 images is 1.3 %."""
    logits, labels = draw(temperature=2.5)
    found = calibration.evaluate(logits, labels)
    assert found.temperature == pytest.approx(2.5, rel=0.05)
    assert found.before.calibration_error > 0.1 > 0.02 > found.after.calibration_error
    assert found.after.nll < found.before.nll
    right = calibration.score(logits, labels, found.temperature)
    for other in 0.9, 1.1:  # the fitted half is half of these images
        assert right.nll < calibration.score(logits, labels, other * found.temperature).nll


@pytest.mark.parametrize('temperature', [0.1, 15.0])
def test_models_of_far_too_little_or_too_much_confidence_are_repaired(temperature):
    logits, labels = draw(temperature=1.0)
    found = calibration.evaluate(temperature * logits, labels)
    assert found.temperature == pytest.approx(temperature, rel=0.05)


def test_the_temperature_is_not_fitted_to_the_half_that_it_is_tested_on():
    logits, labels = draw(temperature=1.0, count=1000)
    order = np.random.default_rng(0).permutation(1000)
    labels[order[500:]] = logits[order[500:]].argmin(axis=1)  # only the other half is wrong
    found = calibration.evaluate(logits, labels)
    assert found.temperature == pytest.approx(1.0, rel=0.15)
    assert found.after.nll > 3
