"""Evaluates frozen features: few-shot ridge, nearest neighbours, logistic regression, episodes."""

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.base import Float, UserError, counted, records, storage
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
        records.require(self.l2 != (), 'l2=(): expected one or more numbers')
        records.require_between(self, 'l2', above=0)
        for name, values in {'shots': self.shots, 'seeds': self.seeds}.items():
            distinct = len({*values}) == len(values) > 0
            records.require(distinct, f'{name}={values}: expected at least one, each once')
        random = self.crop is not None and self.crop.random
        records.require(not random, 'crop: a random crop is for training only')
        remote = storage.is_remote(self.feature_cache or '')
        records.require(
            not remote, f'feature_cache={self.feature_cache!r}: expected a folder on a disk'
        )


class Probe(NamedTuple):
    """An opened data set: images to learn from, and images to test on."""

    data: str
    splits: ProbeSet
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

    Logs a warning for each set that cannot be opened. Raises UserError if none can.
    """
    wanted = fewshot.sets or {records.text_of(own_data): ProbeSet()}
    crop = {} if fewshot.crop is None else {'crop': fewshot.crop}
    by_name, missing = dict[str, Probe](), dict[str, str]()
    for name, splits in wanted.items():
        data = splits.data or own_data
        try:
            train, test = (open_split(data, s) for s in (splits.train_split, splits.test_split))
            _require_one_class(records.text_of(data), splits, train, test)
            if fewshot.episodes is not None:
                episodes.require_possible(test.labels, test.class_names, fewshot.episodes)
        except UserError as error:
            if len(missing) == len(wanted) - 1:
                raise
            missing[name] = str(error)
            logging.warning('left out: %s: %s', name, error)
        else:
            readers = (make_reader(source, **crop) for source in (train, test))
            by_name[name] = Probe(records.text_of(data), splits, *readers)
    return Probes(fewshot, by_name, missing)


def _require_one_class(data: str, splits: ProbeSet, train: Source, test: Source) -> None:
    if train.class_names != test.class_names:
        both = f'{splits.train_split} and {splits.test_split}'
        raise UserError(f'{data}: the classes of {both} differ')
    if train.multi_label:
        raise UserError(f'{data}: an image may have several classes; probes need one')


def episodes_outline(probes: Probes, trained: Sequence[str]) -> list[str]:
    """Returns, for each data set, how many of the classes that episodes draw are trained on.

    `trained` are the names of the classes that the model was trained on; empty if unknown.
    """
    config = probes.config.episodes
    if config is None or not trained:
        return []
    lines = []
    for probe in probes.by_name.values():
        drawn = config.classes or probe.test.source.class_names
        count, known = counted(len(drawn), 'class'), len({*drawn} & {*trained})
        lines.append(
            f'episodes of {probe.data} draw from {count}; training includes {known} of them'
        )
    return lines


def evaluate(features_of: FeaturesOf, sets: Probes, preprocessing: Preprocessing) -> dict[str, Any]:
    """Returns results and protocol of each data set, by name, and which are missing, as JSON."""
    results = {}
    for name, probe in sets.by_name.items():
        how = dataclasses.replace(preprocessing, crop=probe.test.crop)
        protocol = {
            'data': probe.data,
            'train_split': probe.splits.train_split,
            'test_split': probe.splits.test_split,
            'layer': 'pre_logits',
            'image_size': list(probe.test.size),
            'preprocessing': records.to_dict(how),
        }
        results[name] = protocol | _evaluate_probe(features_of, probe, sets.config)
    return {'sets': results, 'missing': sets.missing}


def _evaluate_probe(features_of: FeaturesOf, probe: Probe, config: FewshotConfig) -> dict[str, Any]:
    """Computes features of the training images that are drawn, or of all if a probe needs them."""
    train, test = probe.train.source, probe.test.source
    tested = _labelled(probe.test, features_of(probe.test, np.arange(len(test))))
    results: dict[str, Any] = {'test_images': len(tested.labels)}
    drawn_features: Callable[[Any], np.ndarray] = functools.partial(features_of, probe.train)
    if config.neighbours is not None or config.logistic is not None:
        features = features_of(probe.train, np.arange(len(train)))
        learned, drawn_features = _labelled(probe.train, features), features.__getitem__
    if config.neighbours is not None:
        accuracy = probes.nearest_neighbours(learned, tested, neighbours=config.neighbours)
        results['nearest_neighbours'] = {'neighbours': config.neighbours, 'accuracy': accuracy}
    if config.logistic is not None:
        fitted = probes.logistic(learned, tested, config.logistic)
        if not fitted.converged:
            text = '%s: the logistic regression stopped after %d iterations, before it converged'
            logging.warning(text, probe.data, fitted.iterations)
        results['logistic'] = fitted._asdict()
    if config.episodes is not None:
        by_shots = episodes.evaluate(tested, test.class_names, config.episodes, l2=config.l2)
        results['episodes'] = episodes.report(config.episodes, by_shots)
    shots, left_out = _possible_shots(config.shots, train)
    few_shot = ridge.probe(
        train.labels,
        tested,
        features_of=drawn_features,
        shots=shots,
        seeds=config.seeds,
        l2=config.l2,
    )
    classes = len(train.class_names)
    report = ridge.report(few_shot, l2=config.l2, name_of=train.name_of, classes=classes)
    return results | left_out | report


def _possible_shots(shots: Sequence[int], train: Source) -> tuple[list[int], dict[str, str]]:
    """Returns the shots that every class has, or the fewest, and which shots a class lacks."""
    images = np.bincount(train.labels)
    fewest = int(images[images > 0].min())
    lacking = [f'{count}-shot' for count in shots if count > fewest]
    if not lacking:
        return [*shots], {}
    name = train.class_names[int(np.flatnonzero(images == fewest)[0])]
    why = f'class {name!r} has {counted(fewest, "image")}, too few for {", ".join(lacking)}'
    return [count for count in shots if count <= fewest] or [min(shots)], {'left_out': why}


def _labelled(reader: ImageReader, features: Float[np.ndarray, 'n d']) -> Labelled:
    """Returns features and labels of the images that could be read; warns of the others."""
    readable = ~np.isnan(features).any(axis=1)
    if missing := int((~readable).sum()):
        name = reader.source.name_of(int(readable.argmin()))
        text = '%d of %d images cannot be read, left out: %s'
        logging.warning(text, missing, len(readable), name)
    return Labelled(features, reader.source.labels).subset(readable)


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
        text = ', '.join([*texts, *([values['left_out']] if 'left_out' in values else [])])
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
