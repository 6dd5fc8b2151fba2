"""Few-shot classification in episodes: many small tasks of a few classes, on frozen features.

An episode draws `ways` classes, and of each `shots` images to learn from and `queries` others to
test on (Vinyals et al., "Matching Networks for One Shot Learning", section 2.1). The result is the
mean accuracy of many episodes, and its 95 % interval.
"""

import dataclasses
import functools
from collections.abc import Iterator
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
    features: Float[np.ndarray, 'n d'],
    labels: Int[np.ndarray, 'n'],
    *,
    ways: int,
    shots: int,
    queries: int,
    episodes: int,
    seed: int,
    classifier: ByEpisode = 'centroid',
    l2: ridge.Strengths = ridge.L2,
) -> Episodes:
    """The accuracies of episodes drawn from these images; `l2` is of the classifier `ridge`.

    Episode i is a function of (seed, i): the first ones of many are those of few. A class with
    fewer images than `shots + queries` is not drawn. Raises UserError where fewer than `ways`
    classes are left, and for values that `EpisodesConfig` does not take.
    """
    task = dict(ways=ways, shots=shots, queries=queries, episodes=episodes, seed=seed)
    _check(**task, classifier=classifier)
    records.require(bool(np.all(np.asarray(l2) > 0)), f'l2={l2!r}: expected more than 0')
    predict = _nearest_centroid if classifier == 'centroid' else functools.partial(_ridge, l2=l2)
    found = []
    for learned, tested in draw(labels, **task):
        train = Labelled(features[learned], labels[learned])
        found.append(float((predict(train, features[tested]) == labels[tested]).mean()))
    accuracies = np.array(found)
    deviation = accuracies.std(ddof=1)
    interval = _NORMAL * deviation / np.sqrt(len(accuracies))
    return Episodes(accuracies, float(accuracies.mean()), float(interval))


def draw(
    labels: Int[np.ndarray, 'n'], *, ways: int, shots: int, queries: int, episodes: int, seed: int
) -> Iterator[tuple[Int[np.ndarray, 'u'], Int[np.ndarray, 'v']]]:
    """For each episode the images to learn from and those to test on, as indices; UserError, as
    `evaluate`.
    """
    _check(ways=ways, shots=shots, queries=queries, episodes=episodes, seed=seed)
    possible = _possible(labels, ways=ways, shots=shots, queries=queries)

    def one(number: int) -> tuple[Any, Any]:
        rng = np.random.default_rng((seed, number))
        chosen = rng.choice(len(possible), ways, replace=False)
        drawn = [rng.choice(possible[c], shots + queries, replace=False) for c in chosen]
        learned, tested = zip(*((d[:shots], d[shots:]) for d in drawn), strict=True)
        return np.concatenate(learned), np.concatenate(tested)

    return map(one, range(episodes))


def _check(**values: Any) -> None:
    """Raises UserError that names the argument, for what `EpisodesConfig` does not take."""
    plain = {name: x.item() if isinstance(x, np.integer) else x for name, x in values.items()}
    plain['shots'] = (plain['shots'],)
    try:
        records.from_dict(EpisodesConfig, plain, where='')
    except UserError as error:
        raise UserError(str(error).removeprefix('.')) from error


def _possible(
    labels: Int[np.ndarray, 'n'], *, ways: int, shots: int, queries: int
) -> list[Int[np.ndarray, 'm']]:
    """The images of each class that has enough; UserError where too few classes have."""
    classes = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    possible = [images for images in classes if len(images) >= shots + queries]
    if len(possible) < ways:
        images = f'{shots + queries} images or more (shots={shots}, queries={queries})'
        raise UserError(f'ways={ways}: of {len(classes)} classes {len(possible)} have {images}')
    return possible


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


def _ridge(
    train: Labelled, tested: Float[np.ndarray, 'm d'], *, l2: ridge.Strengths
) -> Int[np.ndarray, 'm']:
    return ridge.fit(train, l2=l2).predict(tested)


def report(
    test: Labelled,
    class_names: tuple[str, ...],
    config: EpisodesConfig,
    *,
    l2: ridge.Strengths = ridge.L2,
) -> dict[str, Any]:
    """Protocol, accuracies, mean and interval for each number of shots, as JSON; UserError, as
    `require_possible`.
    """
    chosen = _chosen(test.labels, class_names, config)
    protocol = records.to_dict(config)
    by_shots = {
        str(shots): evaluate(
            test.features[chosen],
            test.labels[chosen],
            ways=config.ways,
            shots=shots,
            queries=config.queries,
            episodes=config.episodes,
            seed=config.seed,
            classifier=config.classifier,
            l2=l2,
        )
        for shots in config.shots
    }
    means = {shots: one.mean for shots, one in by_shots.items()}
    intervals = {shots: one.interval for shots, one in by_shots.items()}
    accuracies = {shots: one.accuracies.tolist() for shots, one in by_shots.items()}
    return protocol | {'mean': means, 'interval': intervals, 'accuracy': accuracies}


def require_possible(
    labels: Int[np.ndarray, 'n'], class_names: tuple[str, ...], config: EpisodesConfig
) -> None:
    """Raises UserError for classes that are not there, or that are too few with enough images."""
    labels = labels[_chosen(labels, class_names, config)]
    _possible(labels, ways=config.ways, shots=max(config.shots), queries=config.queries)


def _chosen(
    labels: Int[np.ndarray, 'n'], class_names: tuple[str, ...], config: EpisodesConfig
) -> Bool[np.ndarray, 'n']:
    """Which images are of the classes to draw from."""
    if unknown := [name for name in config.classes if name not in class_names]:
        raise UserError(f'episodes.classes: there is no class {unknown[0]!r} in the data')
    numbers = [class_names.index(name) for name in config.classes or class_names]
    return np.isin(labels, numbers)
