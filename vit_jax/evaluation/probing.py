"""Evaluates frozen features: few-shot ridge, nearest neighbours, logistic regression, episodes."""

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.base import Float, UserError, counted, records, require, storage
from vit_jax.data.image_preprocessing import Crop, Preprocessing
from vit_jax.data.loading import ImageReader
from vit_jax.data.sources.base import DataFunction, Source
from vit_jax.data.sources.opening import Opener
from vit_jax.evaluation import episodes, probes, ridge
from vit_jax.evaluation.episodes import EpisodesConfig
from vit_jax.evaluation.features import FeaturesOf
from vit_jax.evaluation.probes import Labelled, LogisticConfig
from vit_jax.training.duration import Interval


@dataclasses.dataclass(kw_only=True)
class ProbeSet(records.Record):
    """One data set: the images to draw from, and to test on."""

    data: str | DataFunction | None = None  # None: the data of the experiment
    train_split: str = 'train'  # to draw from
    test_split: str = 'test'  # to test on


@dataclasses.dataclass(kw_only=True)
class FewshotConfig(records.Record):
    """Evaluation of frozen features with few labels: data, shots, draws, and other probes.

    Nearest neighbors and logistic regression learn from all training images, episodes from test
    images. `l2` holds for ridge episodes too; if it is several numbers, each draw takes the one of
    least generalized cross-validation. `feature_cache` is used when a checkpoint is evaluated by
    `fewshot`, not while training.
    """

    sets: dict[str, ProbeSet] = dataclasses.field(default_factory=dict)  # by name; none: own data
    crop: Crop | None = None  # None: the preprocessing's
    shots: tuple[int, ...] = (1, 5, 10, 25)  # images of each class
    seeds: tuple[int, ...] = (0, 1, 2)  # of the draws, whose mean is reported
    l2: float | tuple[float, ...] = ridge.L2  # one, or several to choose from
    neighbours: int | None = None  # k of the kNN evaluation; None: no kNN
    logistic: LogisticConfig | None = None  # None: no logistic regression
    episodes: EpisodesConfig | None = None  # None: no episodes
    feature_cache: str | None = None  # a folder, for features of whole splits; None: not kept
    every_steps: Interval | None = None  # while training; None: at the end only

    def check(self) -> None:
        records.require_between(self, 'shots', 'neighbours', 'every_steps', low=1)
        records.require_between(self, 'seeds', low=0)
        require(self.l2 != (), 'l2=(): expected one or more numbers')
        records.require_between(self, 'l2', above=0)
        for name, values in {'shots': self.shots, 'seeds': self.seeds}.items():
            distinct = len({*values}) == len(values) > 0
            require(distinct, f'{name}={values}: expected at least one, each once')
        random = self.crop is not None and self.crop.random
        require(not random, 'crop: a random crop is for training only')
        local = not storage.is_remote(self.feature_cache or '')
        require(local, f'feature_cache={self.feature_cache!r}: expected a folder on a disk')


class Probe(NamedTuple):
    """An opened data set: images to learn from, and images to test on."""

    train: ImageReader
    test: ImageReader


class Probes(NamedTuple):
    """The opened data sets of a few-shot evaluation, and why others are missing."""

    config: FewshotConfig
    by_name: dict[str, Probe]
    missing: dict[str, str]

    @property
    def example(self) -> ImageReader:
        """Returns one of the readers, whose batches all have equal shapes."""
        return next(iter(self.by_name.values())).test


def open_probes(
    fewshot: FewshotConfig,
    own_data: str | DataFunction,
    open_split: Opener,
    make_reader: Callable[..., ImageReader],
) -> Probes:
    """Opens the data sets of a few-shot evaluation; `own_data` if it names none.

    Logs a warning for each set that cannot be used. Raises UserError if none can.
    """
    wanted = fewshot.sets or {records.text_of(own_data): ProbeSet()}
    crop = {} if fewshot.crop is None else {'crop': fewshot.crop}
    by_name, missing = dict[str, Probe](), dict[str, str]()
    for name, one in wanted.items():
        try:
            splits = one.train_split, one.test_split
            train, test = (open_split(one.data or own_data, split) for split in splits)
            _require_suitable(train, test, fewshot.episodes)
            by_name[name] = Probe(*(make_reader(source, **crop) for source in (train, test)))
        except UserError as error:
            missing[name] = str(error)
            if len(missing) == len(wanted):
                raise
            logging.warning('left out: %s: %s', name, error)
    return Probes(fewshot, by_name, missing)


def _require_suitable(train: Source, test: Source, drawn: EpisodesConfig | None) -> None:
    """Raises UserError for classes that cannot be probed."""
    same, both = train.class_names == test.class_names, f'{train.split} and {test.split}'
    require(same, f'{train.data}: the classes of {both} differ')
    several = f'{train.data}: an image may have several classes; probes need one'
    require(not train.multi_label, several)
    if drawn is not None:
        episodes.find_classes(test.labels, test.class_names, drawn, shots=max(drawn.shots))


def evaluate(features_of: FeaturesOf, sets: Probes, preprocessing: Preprocessing) -> dict[str, Any]:
    """Returns results and protocol of each data set, by name, and which are missing, as JSON."""
    results = {}
    for name, probe in sets.by_name.items():
        how = dataclasses.replace(preprocessing, crop=probe.test.crop)
        protocol = {
            'data': probe.train.source.data,
            'train_split': probe.train.source.split,
            'test_split': probe.test.source.split,
            'layer': 'pre_logits',
            'image_size': list(probe.test.size),
            'preprocessing': records.to_dict(how),
        }
        results[name] = protocol | _evaluate_probe(features_of, probe, sets.config)
    return {'sets': results, 'missing': sets.missing}


def _evaluate_probe(features_of: FeaturesOf, probe: Probe, config: FewshotConfig) -> dict[str, Any]:
    """Evaluates all probes of a data set, and notes what their numbers lack.

    Computes features of the training images that are drawn, or of all if a probe needs them.
    """
    test, notes = probe.test.source, list[str]()
    tested = _labelled(probe.test, features_of(probe.test, np.arange(len(test))), notes)
    drawn_features: Callable[[Any], np.ndarray] = functools.partial(features_of, probe.train)
    result = {'test_images': len(tested.labels), 'notes': notes}
    if config.neighbours is not None or config.logistic is not None:
        features = features_of(probe.train, np.arange(len(probe.train.source)))
        learned, drawn_features = _labelled(probe.train, features, notes), features.__getitem__
    if config.neighbours is not None:
        accuracy = probes.nearest_neighbours(learned, tested, neighbours=config.neighbours)
        result['nearest_neighbours'] = {'neighbours': config.neighbours, 'accuracy': accuracy}
    if config.logistic is not None:
        fitted = probes.logistic(learned, tested, config.logistic)
        if not fitted.converged:
            notes.append(f'logistic has not converged in {counted(fitted.iterations, "iteration")}')
        result['logistic'] = fitted._asdict()
    if config.episodes is not None:
        by_shots = episodes.evaluate(tested, test.class_names, config.episodes, l2=config.l2)
        result['episodes'] = episodes.report(config.episodes, by_shots)
    return result | _evaluate_few_shot(probe.train.source, tested, drawn_features, config, notes)


def _labelled(
    reader: ImageReader, features: Float[np.ndarray, 'n d'], notes: list[str]
) -> Labelled:
    """Returns features and labels of the images that could be read; notes how many could not."""
    readable = ~np.isnan(features).any(axis=1)
    require(bool(readable.any()), f'none of {len(readable)} images can be read')
    if missing := int((~readable).sum()):
        name = reader.source.name_of(int(readable.argmin()))
        notes.append(f'{missing} of {len(readable)} images cannot be read, left out: {name}')
    return Labelled(features, reader.source.labels).subset(readable)


def _evaluate_few_shot(
    train: Source,
    test: Labelled,
    features_of: Callable[[Any], np.ndarray],
    config: FewshotConfig,
    notes: list[str],
) -> dict[str, Any]:
    """Returns accuracies and protocol of the ridge probe, as JSON."""
    shots = _possible_shots(config.shots, train, notes)
    draws = {'shots': shots, 'seeds': config.seeds}
    found = ridge.probe(train.labels, test, features_of=features_of, l2=config.l2, **draws)
    by_shots = {str(k): [found.accuracies[seed, k] for seed in config.seeds] for k in shots}

    def by_draw(values: dict[tuple[int, int], Any]) -> dict[str, Any]:
        return {f'seed {seed}, {count} shots': each for (seed, count), each in values.items()}

    return {
        'classes': len(train.class_names),
        'shots': shots,
        'seeds': [*config.seeds],
        'l2': np.asarray(config.l2).tolist(),
        'bias': ridge.BIAS,
        'mean': {k: float(np.mean(accuracies)) for k, accuracies in by_shots.items()},
        'deviation': {k: float(np.std(accuracies)) for k, accuracies in by_shots.items()},
        'accuracy': by_draw(found.accuracies),
        'l2_chosen': by_draw(found.l2),
        'train_images': by_draw({d: train.read_names(i.tolist()) for d, i in found.draws.items()}),
    }


def _possible_shots(shots: Sequence[int], train: Source, notes: list[str]) -> list[int]:
    """Returns the numbers of shots that every class has; notes which class is too small for others.

    If no number is possible, the lowest one remains, and small classes give all their images.
    """
    images = np.bincount(train.labels)
    fewest = int(images[images > 0].min())
    possible = [count for count in shots if count <= fewest] or [min(shots)]
    left_out = [f'{count}-shot' for count in shots if count not in possible]
    uses_all = f', all used for {possible[0]}-shot' if possible[0] > fewest else ''
    too_few = f', too few for {", ".join(left_out)}' if left_out else ''
    if uses_all or too_few:
        name = train.class_names[int(np.flatnonzero(images == fewest)[0])]
        notes.append(f'class {name!r} has {counted(fewest, "image")}{uses_all}{too_few}')
    return possible


class Score(NamedTuple):
    """An accuracy, with its deviation over draws or half of its 95 % interval."""

    accuracy: float
    spread: float | None = None

    def __str__(self) -> str:
        return f'{self.accuracy:.2%}' + ('' if self.spread is None else f' +- {self.spread:.2%}')


def scores(values: dict[str, Any]) -> dict[str, Score]:
    """Returns the accuracies in the result of one data set: `10-shot`, `5-way 1-shot`, `knn`."""
    shots = {f'{k}-shot': Score(mean, values['deviation'][k]) for k, mean in values['mean'].items()}
    if (nearest := values.get('nearest_neighbours')) is not None:
        shots['knn'] = Score(nearest['accuracy'])
    if (linear := values.get('logistic')) is not None:
        shots['logistic'] = Score(linear['accuracy'])
    if (drawn := values.get('episodes')) is not None:
        for k, mean in drawn['mean'].items():
            shots[f'{drawn["ways"]}-way {k}-shot'] = Score(mean, drawn['interval'][k])
    return shots


def summary(result: dict[str, Any]) -> str:
    """Returns the accuracies in one line, with the names of the data sets if there are several."""
    sets, parts = result['sets'], []
    for name, values in sets.items():
        texts = [f'{label} {score}' for label, score in scores(values).items()]
        text = ', '.join([*texts, *values['notes']])
        parts.append(text if len(sets) == 1 else f'{name}: {text}')
    return '; '.join(parts)


def numbers(result: dict[str, Any]) -> dict[str, float]:
    """Returns the accuracies by name, for the metrics file: `10_shot_accuracy`."""
    sets = result['sets']
    return {
        (f'{name}/' if len(sets) > 1 else '') + re.sub('[ -]', '_', label) + '_accuracy': accuracy
        for name, values in sets.items()
        for label, (accuracy, _) in scores(values).items()
    }
