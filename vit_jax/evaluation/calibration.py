"""Calibration of class probabilities: log loss, Brier score, calibration error, temperature.

A classifier is calibrated if a fraction p of the images that it classifies with confidence p is
classified correctly ("On Calibration of Modern Neural Networks", Guo et al. 2017). Probabilities
are the softmax of the logits, for any training loss.
"""

import dataclasses

import numpy as np
import scipy.optimize
import scipy.special

from vit_jax.base import Bool, Float, Int

NUM_BINS = 15  # bins of equal width, as in Guo et al.
_TEMPERATURES = 0.05, 20.0  # range of the fitted temperature
_CHUNK = 1024  # number of images whose probabilities are in memory at once


@dataclasses.dataclass(frozen=True)
class Bin:
    """Images whose confidence, the probability of the predicted class, is in one bin."""

    images: int
    confidence: float  # mean confidence
    accuracy: float


@dataclasses.dataclass(frozen=True)
class Scores:
    """Quality of the probabilities of some images."""

    nll: float  # mean negative log-likelihood of the true class
    brier: float  # mean squared distance of the probabilities from the one-hot label, 0 to 2
    calibration_error: float  # mean over images of |accuracy - confidence| of their bin (ECE)
    bins: list[Bin]  # bins that contain images


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Scores of all images, and the effect of dividing the logits by a temperature.

    The temperature is fitted to a random half of the images. `before` and `after` are scores of the
    other half, without and with this division.
    """

    scores: Scores
    temperature: float
    before: Scores
    after: Scores


def evaluate(logits: Float[np.ndarray, 'n k'], labels: Int[np.ndarray, 'n']) -> Calibration:
    """Computes the scores, and fits the temperature to a half that is drawn with a fixed seed."""
    order = np.random.default_rng(0).permutation(len(labels))
    half = len(order) // 2
    fitted = order[:half]
    rest = order[half:]
    temperature = fit_temperature(logits[fitted], labels[fitted])
    return Calibration(
        scores=score(logits, labels),
        temperature=temperature,
        before=score(logits[rest], labels[rest]),
        after=score(logits[rest], labels[rest], temperature),
    )


def fit_temperature(logits: Float[np.ndarray, 'n k'], labels: Int[np.ndarray, 'n']) -> float:
    """Returns the temperature, from 0.05 to 20, that minimizes the log loss.

    The loss is convex in the inverse temperature, so it has one minimum.
    """

    def loss(log_temperature: float) -> float:
        return score(logits, labels, float(np.exp(log_temperature))).nll

    minimum = scipy.optimize.minimize_scalar(loss, bounds=np.log(_TEMPERATURES), method='bounded')
    return float(np.exp(minimum.x))


def score(
    logits: Float[np.ndarray, 'n k'], labels: Int[np.ndarray, 'n'], temperature: float = 1.0
) -> Scores:
    """Computes the scores of probabilities softmax(logits / temperature)."""
    log_likelihoods = np.empty(len(labels))
    distances = np.empty(len(labels))
    confidences = np.empty(len(labels))
    for start in range(0, len(labels), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        log_probs = scipy.special.log_softmax(
            logits[chunk].astype(np.float64) / temperature, axis=1
        )
        rows = np.arange(len(log_probs))
        probabilities = np.exp(log_probs)
        log_likelihoods[chunk] = log_probs[rows, labels[chunk]]
        confidences[chunk] = probabilities.max(axis=1)
        probabilities[rows, labels[chunk]] -= 1
        distances[chunk] = (probabilities**2).sum(axis=1)
    bins = fill_bins(confidences, logits.argmax(axis=1) == labels)
    gaps = sum(bin.images * abs(bin.accuracy - bin.confidence) for bin in bins)
    return Scores(
        nll=-log_likelihoods.mean(),
        brier=distances.mean(),
        calibration_error=gaps / len(labels),
        bins=bins,
    )


def fill_bins(confidences: Float[np.ndarray, 'n'], correct: Bool[np.ndarray, 'n']) -> list[Bin]:
    """Sorts images into bins (0, 1/15], (1/15, 2/15], ..., and drops empty bins."""
    numbers = np.ceil(confidences * NUM_BINS).astype(int).clip(1, NUM_BINS) - 1
    counts = np.bincount(numbers, minlength=NUM_BINS)
    confidence = np.bincount(numbers, weights=confidences, minlength=NUM_BINS)
    hits = np.bincount(numbers, weights=correct, minlength=NUM_BINS)
    return [
        Bin(
            images=int(counts[i]),
            confidence=confidence[i] / counts[i],
            accuracy=hits[i] / counts[i],
        )
        for i in np.flatnonzero(counts)
    ]
