"""Episodic few-shot classification on frozen features.

An episode draws `ways` classes, and for each class `shots` training images and `queries` test
images (Vinyals et al., "Matching Networks for One Shot Learning", section 2.1). The result is the
mean accuracy over many episodes with its 95 % confidence interval.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from vit_jax.base import Float, Int, UserError, records
from vit_jax.evaluation import ridge
from vit_jax.evaluation.probes import Classifier, Labeled

EpisodeKind = Literal['centroid', 'ridge']
_NORMAL = 1.96  # standard deviations, for a 95 % interval of a normal distribution


@dataclasses.dataclass(kw_only=True)
class EpisodesConfig(records.Record):
    """Episodic few-shot evaluation, which draws all images from the test split."""

    ways: int = 5  # number of classes per episode
    shots: tuple[int, ...] = (1, 5)  # numbers of training images per class
    queries: int = 15  # number of test images per class
    episodes: int = 600  # number of episodes for each number of shots
    seed: int = 0  # seed of the draws
    classifier: EpisodeKind = 'centroid'  # nearest class mean; ridge: the few-shot linear probe
    classes: tuple[str, ...] = ()  # classes to draw from, for example unseen ones; empty: all

    def check(self) -> None:
        records.require_between(self, 'ways', 'episodes', low=2)
        records.require_between(self, 'shots', 'queries', low=1)
        records.require_between(self, 'seed', low=0)
        are_distinct = len({*self.shots}) == len(self.shots) > 0
        records.require(are_distinct, f'shots={self.shots}: expected one or more distinct numbers')


class EpisodeResults(NamedTuple):
    """Test accuracy of each episode, their mean, and half the width of its 95 % interval."""

    accuracies: Float[np.ndarray, 'e']
    mean: float
    interval: float


def evaluate(
    images: Labeled, class_names: Sequence[str], config: EpisodesConfig, *, l2: float = ridge.L2
) -> dict[int, EpisodeResults]:
    """Computes the test accuracy of few-shot classifiers in randomly drawn episodes.

    Args:
      images: Images to draw from.
      class_names: Names of all classes.
      config: Classes, images and classifier of an episode.
      l2: Regularization of the classifier `ridge`.

    Returns:
      Results by number of shots.

    Raises:
      UserError: If a class is unknown, or too few classes have enough images.
    """
    fit = fit_centroids if config.classifier == 'centroid' else functools.partial(ridge.fit, l2=l2)
    results = {}
    for shots in config.shots:
        test_accuracies = []
        for train, test in draw_episodes(images.labels, class_names, config, shots=shots):
            classifier = fit(images.subset(train))
            test_accuracies.append(classifier.accuracy(images.subset(test)))
        accuracies = np.array(test_accuracies)
        standard_error = accuracies.std(ddof=1) / np.sqrt(len(accuracies))
        results[shots] = EpisodeResults(
            accuracies=accuracies,
            mean=float(accuracies.mean()),
            interval=float(_NORMAL * standard_error),
        )
    return results


def draw_episodes(
    labels: Int[np.ndarray, 'n'], class_names: Sequence[str], config: EpisodesConfig, *, shots: int
) -> Iterator[tuple[Int[np.ndarray, 'u'], Int[np.ndarray, 'v']]]:
    """Yields the indices of training and test images of each episode.

    Episode i depends only on (seed, i), not on the number of episodes.

    Raises:
      UserError: If a class is unknown, or fewer than `ways` classes have enough images.
    """
    images = [*find_classes(labels, class_names, config, shots=shots).values()]
    for number in range(config.episodes):
        rng = np.random.default_rng((config.seed, number))
        chosen = rng.choice(len(images), config.ways, replace=False)
        size = shots + config.queries
        drawn = np.array([rng.choice(images[c], size, replace=False) for c in chosen])
        yield drawn[:, :shots].ravel(), drawn[:, shots:].ravel()


def find_classes(
    labels: Int[np.ndarray, 'n'], class_names: Sequence[str], config: EpisodesConfig, *, shots: int
) -> dict[int, Int[np.ndarray, '_']]:
    """Returns image indices by class number, for classes with enough images for an episode.

    Raises:
      UserError: If a class is unknown, or fewer than `ways` classes have enough images.
    """
    if unknown := [name for name in config.classes if name not in class_names]:
        raise UserError(f'episodes.classes: the data set has no class {unknown[0]!r}')
    numbers = sorted(map(class_names.index, config.classes)) or range(len(class_names))
    images = {number: np.flatnonzero(labels == number) for number in numbers}
    size = shots + config.queries
    large = {number: indices for number, indices in images.items() if len(indices) >= size}
    if len(large) < config.ways:
        raise UserError(
            f'episodes.ways={config.ways}: only {len(large)} of {len(images)} classes have {size} '
            f'or more test images (shots={shots}, queries={config.queries})'
        )
    return large


def fit_centroids(train: Labeled) -> Classifier:
    """Fits a nearest-centroid classifier (Snell et al., "Prototypical Networks").

    |x - c|^2 = |x|^2 - 2 xc + |c|^2, and |x|^2 is the same for all classes. So the nearest centroid
    c has the largest xc - |c|^2 / 2.
    """
    classes, labels = np.unique(train.labels, return_inverse=True)
    mean = train.features.mean(axis=0)  # subtraction keeps distances
    sums = (labels == np.arange(len(classes))[:, None]) @ (train.features - mean)
    centroids = sums / np.bincount(labels)[:, None]
    return Classifier(classes, mean, centroids.T, bias=-(centroids**2).sum(axis=1) / 2)


def report_episodes(config: EpisodesConfig, results: dict[int, EpisodeResults]) -> dict[str, Any]:
    """Returns the protocol, and accuracies, mean and interval by number of shots, as JSON."""
    return records.to_dict(config) | {
        'mean': {str(shots): result.mean for shots, result in results.items()},
        'interval': {str(shots): result.interval for shots, result in results.items()},
        'accuracy': {str(shots): result.accuracies.tolist() for shots, result in results.items()},
    }
