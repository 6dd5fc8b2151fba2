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

from vit_jax.base import Bool, Float, Int, UserError, records
from vit_jax.evaluation import ridge
from vit_jax.evaluation.probes import Labelled
from vit_jax.evaluation.ridge import Classifier

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

    `l2` is for the classifier `ridge`. Raises UserError as `require_possible` does.
    """
    images = images.subset(_chosen(images.labels, class_names, config))

    fit = fit_centroids if config.classifier == 'centroid' else functools.partial(ridge.fit, l2=l2)
    results = {}
    for shots in config.shots:
        drawn = draw(images.labels, config, shots=shots)
        accuracies = np.array(
            [fit(images.subset(train)).accuracy(images.subset(test)) for train, test in drawn]
        )
        interval = _NORMAL * accuracies.std(ddof=1) / np.sqrt(len(accuracies))
        results[shots] = Episodes(accuracies, float(accuracies.mean()), float(interval))
    return results


def draw(
    labels: Int[np.ndarray, 'n'], config: EpisodesConfig, *, shots: int
) -> Iterator[tuple[Int[np.ndarray, 'u'], Int[np.ndarray, 'v']]]:
    """Yields the images to learn from and to test on in each episode, by their indices.

    Episode i is a function of (seed, i): few episodes are the first of many. A class with fewer
    images than `shots + queries` is not drawn. Raises UserError if fewer than `ways` are left.
    """
    size = shots + config.queries
    classes = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    possible = [images for images in classes if len(images) >= size]
    if len(possible) < config.ways:
        images = f'{size} images or more (shots={shots}, queries={config.queries})'
        have = f'of {len(classes)} classes {len(possible)} have {images}'
        raise UserError(f'ways={config.ways}: {have}')
    for number in range(config.episodes):
        rng = np.random.default_rng((config.seed, number))
        chosen = rng.choice(len(possible), config.ways, replace=False)
        drawn = np.array([rng.choice(possible[c], size, replace=False) for c in chosen])
        yield drawn[:, :shots].ravel(), drawn[:, shots:].ravel()


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


def require_possible(
    labels: Int[np.ndarray, 'n'], class_names: Sequence[str], config: EpisodesConfig
) -> None:
    """Raises UserError for classes that are not in the data, or too few with enough images."""
    next(draw(labels[_chosen(labels, class_names, config)], config, shots=max(config.shots)))


def _chosen(
    labels: Int[np.ndarray, 'n'], class_names: Sequence[str], config: EpisodesConfig
) -> Bool[np.ndarray, 'n']:
    """Which images are of the classes to draw from."""
    if unknown := [name for name in config.classes if name not in class_names]:
        raise UserError(f'episodes.classes: there is no class {unknown[0]!r} in the data')
    numbers = [class_names.index(name) for name in config.classes or class_names]
    return np.isin(labels, numbers)
