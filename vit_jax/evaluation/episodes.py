"""Few-shot classification in episodes: many small tasks of a few classes, on frozen features.

An episode draws `ways` classes, and of each `shots` images to learn from and `queries` others to
test on (Vinyals et al., "Matching Networks for One Shot Learning", section 2.1). The result is the
mean accuracy of many episodes, and its 95 % interval.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from vit_jax.base import Bool, Float, Int, UserError, records
from vit_jax.evaluation import ridge
from vit_jax.evaluation.probes import Labelled

ByEpisode = Literal['centroid', 'ridge']
_NORMAL = 1.96  # deviations of a normal distribution on either side that hold 95 % of it


@dataclasses.dataclass(kw_only=True)
class EpisodesConfig(records.Record):
    """Episodes on the test images: how many classes, how many images of each, how many episodes.

    `centroid` takes the class whose mean is nearest, `ridge` the linear classifier of the few-shot
    evaluation. `classes` are the names of those to draw from, such as some that the network was not
    trained on; none: all.
    """

    ways: int = 5  # classes
    shots: tuple[int, ...] = (1, 5)  # images of each to learn from
    queries: int = 15  # images of each to test on
    episodes: int = 600  # for each number of shots
    seed: int = 0  # of the draws
    classifier: ByEpisode = 'centroid'  # the nearest mean; ridge: that of the few-shot evaluation
    classes: tuple[str, ...] = ()  # names of those to draw from; none: all

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
    """Returns the results for each number of shots, of episodes drawn from these images.

    `l2` is for the classifier `ridge`. Raises UserError as `require_possible` does.
    """
    images = images.subset(_chosen(images.labels, class_names, config))

    def accuracy(train: Labelled, test: Labelled) -> float:
        if config.classifier == 'ridge':
            return ridge.accuracy(train, test, l2=l2)
        return float((_nearest_centroid(train, test.features) == test.labels).mean())

    results = {}
    for shots in config.shots:
        drawn = draw(images.labels, config, shots=shots)
        found = [accuracy(images.subset(train), images.subset(test)) for train, test in drawn]
        accuracies = np.array(found)
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


def _nearest_centroid(train: Labelled, tested: Float[np.ndarray, 'm d']) -> Int[np.ndarray, 'm']:
    """The class whose mean is nearest (Snell et al., "Prototypical Networks", equations 1 and 2).

    |x - c|^2 is |x|^2 - 2 xc + |c|^2, whose first term is the same for all classes.
    """
    classes, labels = np.unique(train.labels, return_inverse=True)
    middle = train.features.mean(axis=0)  # taken off, it leaves distances and keeps digits
    sums = (labels == np.arange(len(classes))[:, None]) @ (train.features - middle)
    centroids = sums / np.bincount(labels)[:, None]
    distances = (centroids**2).sum(axis=1) - 2 * (tested - middle) @ centroids.T
    return classes[distances.argmin(axis=1)]


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
