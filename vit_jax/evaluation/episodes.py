"""Few-shot classification in episodes: many small tasks of a few classes, on frozen features.

An episode draws `ways` classes, and of each `shots` images to learn from and `queries` others to
test on (Vinyals et al., "Matching Networks for One Shot Learning", section 2.1). The result is the
mean accuracy of many episodes, and its 95 % interval.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from vit_jax.base import Float, Int, UserError, records
from vit_jax.evaluation import ridge
from vit_jax.evaluation.probes import Classifier, Labelled

ByEpisode = Literal['centroid', 'ridge']
_NORMAL = 1.96  # deviations of a normal distribution on either side that hold 95 % of it


@dataclasses.dataclass(kw_only=True)
class EpisodesConfig(records.Record):
    """Episodes on the test images: how many classes, how many images of each, how many episodes.

    `centroid` predicts the class whose mean is nearest, `ridge` is the linear classifier of the
    few-shot evaluation. `classes` may name classes that the model was not trained on.
    """

    ways: int = 5  # classes
    shots: tuple[int, ...] = (1, 5)  # images of each to learn from
    queries: int = 15  # images of each to test on
    episodes: int = 600  # for each number of shots
    seed: int = 0  # of the draws
    classifier: ByEpisode = 'centroid'  # the nearest mean; ridge: that of the few-shot evaluation
    classes: tuple[str, ...] = ()  # names of the classes to draw from; none: all

    def check(self) -> None:
        records.require_between(self, 'ways', 'episodes', low=2)
        records.require_between(self, 'shots', 'queries', low=1)
        records.require_between(self, 'seed', low=0)
        distinct = len({*self.shots}) == len(self.shots) > 0
        records.require(distinct, f'shots={self.shots}: expected at least one, each once')


class Episodes(NamedTuple):
    """The test accuracy of each episode, their mean, and half of the mean's 95 % interval."""

    accuracies: Float[np.ndarray, 'e']
    mean: float
    interval: float


def evaluate(
    images: Labelled,
    class_names: Sequence[str],
    config: EpisodesConfig,
    *,
    l2: ridge.Strengths = ridge.L2,
) -> dict[int, Episodes]:
    """Draws episodes from these images and returns the results for each number of shots.

    `l2` is for the classifier `ridge`. Raises UserError as `find_classes` does.
    """
    fit = fit_centroids if config.classifier == 'centroid' else functools.partial(ridge.fit, l2=l2)
    results = {}
    for shots in config.shots:
        drawn = draw(images.labels, class_names, config, shots=shots)
        accuracies = np.array(
            [fit(images.subset(train)).accuracy(images.subset(test)) for train, test in drawn]
        )
        interval = _NORMAL * accuracies.std(ddof=1) / np.sqrt(len(accuracies))
        results[shots] = Episodes(accuracies, float(accuracies.mean()), float(interval))
    return results


def draw(
    labels: Int[np.ndarray, 'n'], class_names: Sequence[str], config: EpisodesConfig, *, shots: int
) -> Iterator[tuple[Int[np.ndarray, 'u'], Int[np.ndarray, 'v']]]:
    """Yields the images to learn from and to test on in each episode, by their indices.

    Episode i is a function of (seed, i): few episodes are the first of many. Raises UserError as
    `find_classes` does.
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
    """Returns the images of each class that has enough for an episode, by class number.

    Raises UserError if a class is not in the data, or fewer than `ways` classes have enough images.
    """
    if unknown := [name for name in config.classes if name not in class_names]:
        raise UserError(f'episodes.classes: there is no class {unknown[0]!r} in the data')
    numbers = sorted(map(class_names.index, config.classes)) or range(len(class_names))
    images = {number: np.flatnonzero(labels == number) for number in numbers}
    size = shots + config.queries
    possible = {number: found for number, found in images.items() if len(found) >= size}
    if len(possible) < config.ways:
        enough = f'{size} images or more (shots={shots}, queries={config.queries})'
        have = f'of {len(images)} classes {len(possible)} have {enough}'
        raise UserError(f'ways={config.ways}: {have}')
    return possible


def fit_centroids(train: Labelled) -> Classifier:
    """Fits the classifier whose class is the nearest mean (Snell et al., "Prototypical Networks").

    |x - c|^2 is |x|^2 - 2 xc + |c|^2, whose first term is the same for all classes: the nearest
    mean has the largest xc - |c|^2 / 2.
    """
    classes, labels = np.unique(train.labels, return_inverse=True)
    mean = train.features.mean(axis=0)  # subtracting it keeps distances
    sums = (labels == np.arange(len(classes))[:, None]) @ (train.features - mean)
    centroids = sums / np.bincount(labels)[:, None]
    return Classifier(classes, mean, centroids.T, bias=-(centroids**2).sum(axis=1) / 2)


def report(config: EpisodesConfig, results: dict[int, Episodes]) -> dict[str, Any]:
    """Returns protocol, accuracies, mean and interval for each number of shots, as JSON."""
    return records.to_dict(config) | {
        'mean': {str(shots): one.mean for shots, one in results.items()},
        'interval': {str(shots): one.interval for shots, one in results.items()},
        'accuracy': {str(shots): one.accuracies.tolist() for shots, one in results.items()},
    }
