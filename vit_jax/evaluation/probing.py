"""Evaluates frozen features: few-shot ridge, nearest neighbours, logistic regression, episodes."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.base import Float, UserError, counted, records, storage
from vit_jax.data.image_preprocessing import Crop, Preprocessing
from vit_jax.data.loading import ImageReader
from vit_jax.data.sources.base import DataFunction, Source
from vit_jax.evaluation import episodes, probes, ridge
from vit_jax.evaluation.episodes import EpisodesConfig
from vit_jax.evaluation.features import FeaturesOf
from vit_jax.evaluation.probes import Labelled, LogisticConfig
from vit_jax.training.duration import Interval


@dataclasses.dataclass(kw_only=True)
class ProbeSet(records.Record):
    """The images of one data set: to draw from, and to test on."""

    data: str | DataFunction | None = None  # None: the data of the experiment
    train_split: str = 'train'  # to draw from
    test_split: str = 'test'  # to test on


@dataclasses.dataclass(kw_only=True)
class FewshotConfig(records.Record):
    """Which images, how many of each class, drawn how often; and which other probes.

    `sets` are data sets by the names of their results; none: the data of the experiment. Nearest
    neighbours and a logistic regression learn from all training images, episodes from test images
    alone. `l2` is of ridge episodes too; of several, each draw takes that of least generalized
    cross-validation. `feature_cache` is where the features of whole splits are kept, when a
    checkpoint is evaluated alone.
    """

    sets: dict[str, ProbeSet] = dataclasses.field(default_factory=dict)  # by name; none: own
    crop: Crop | None = None  # None: the preprocessing's
    shots: tuple[int, ...] = (1, 5, 10, 25)  # images of each class
    seeds: tuple[int, ...] = (0, 1, 2)  # of the draws, whose mean is told
    l2: float | tuple[float, ...] = ridge.L2  # the best of several; not divided by the images
    neighbours: int | None = None  # that vote on a test image; None: no such evaluation
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
    """One data set of an evaluation: images to learn from, and images to test on."""

    data: str
    splits: ProbeSet
    train: ImageReader
    test: ImageReader


class Probes(NamedTuple):
    """What is evaluated how: the data sets by name, and why others are missing."""

    config: FewshotConfig
    found: dict[str, Probe]
    missing: dict[str, str]

    @property
    def example(self) -> ImageReader:
        """One of the readers: batches of all of them have equal shapes."""
        return next(iter(self.found.values())).test


def open_probes(
    fewshot: FewshotConfig,
    own_data: str | DataFunction,
    opened: Callable[..., Source],
    reader: Callable[..., ImageReader],
) -> Probes:
    """Opens the data sets of a few-shot evaluation, `own_data` where it names none.

    Logs a warning for each set that cannot be opened. Raises UserError if none can.
    """
    wanted = fewshot.sets or {records.text_of(own_data): ProbeSet()}
    crop = {} if fewshot.crop is None else {'crop': fewshot.crop}
    found: dict[str, Probe] = {}
    missing: dict[str, str] = {}
    for name, splits in wanted.items():
        data = splits.data or own_data
        try:
            train, test = (opened(data, s) for s in (splits.train_split, splits.test_split))
            _require_one_class(records.text_of(data), splits, train, test)
            if fewshot.episodes is not None:
                episodes.require_possible(test.labels, test.class_names, fewshot.episodes)
        except UserError as error:
            if len(missing) == len(wanted) - 1:
                raise
            missing[name] = str(error)
            logging.warning('left out: %s: %s', name, error)
        else:
            readers = (reader(source, **crop) for source in (train, test))
            found[name] = Probe(records.text_of(data), splits, *readers)
    return Probes(fewshot, found, missing)


def _require_one_class(data: str, splits: ProbeSet, train: Source, test: Source) -> None:
    if train.class_names != test.class_names:
        both = f'{splits.train_split} and {splits.test_split}'
        raise UserError(f'{data}: the classes of {both} differ')
    if train.multi_label:
        raise UserError(f'{data}: an image may have several classes; probes need one')


def episodes_outline(sets: Probes, trained: Sequence[str]) -> list[str]:
    """Which classes that episodes draw from are trained on, by name, where that is not every one.

    The names in `trained` may not be known; then there is nothing to say.
    """
    lines: list[str] = []
    if sets.config.episodes is None or not trained:
        return lines
    for probe in sets.found.values():
        every, known = probe.test.source.class_names, {*trained}
        drawn = sets.config.episodes.classes or every
        both = [name for name in drawn if name in known]
        listed = ', '.join([*both[:5], *(['...'] if len(both) > 5 else [])])
        said = f'trained on are {listed}' if both else 'none of these names is trained on'
        if len(both) < len(every):
            classes = counted(len(drawn), 'class')
            lines.append(f'episodes of {probe.data} draw from {classes}: {said}')
    return lines


def evaluate(
    features_of: FeaturesOf, probe_sets: Probes, preprocessing: Preprocessing
) -> dict[str, Any]:
    """Returns results and protocol of each set, by name, and which sets are missing, as JSON."""
    results = {}
    for name, probe in probe_sets.found.items():
        how = dataclasses.replace(preprocessing, crop=probe.test.crop)
        protocol = {
            'data': probe.data,
            'train_split': probe.splits.train_split,
            'test_split': probe.splits.test_split,
            'layer': 'pre_logits',
            'image_size': list(probe.test.size),
            'preprocessing': records.to_dict(how),
        }
        results[name] = protocol | _evaluate_probe(features_of, probe, probe_sets.config)
    return {'sets': results, 'missing': probe_sets.missing}


def _evaluate_probe(features_of: FeaturesOf, probe: Probe, config: FewshotConfig) -> dict[str, Any]:
    """Computes features of the training images that are drawn, or of all if a probe needs them."""
    train, test = probe.train.source, probe.test.source
    tested = _label(probe.test, features_of(probe.test, np.arange(len(test))))
    results: dict[str, Any] = {'test_images': len(tested.labels)}
    drawn_features: Callable[[Any], np.ndarray] = functools.partial(features_of, probe.train)
    if config.neighbours is not None or config.logistic is not None:
        features = features_of(probe.train, np.arange(len(train)))
        learned, drawn_features = _label(probe.train, features), features.__getitem__
    if config.neighbours is not None:
        accuracy = probes.nearest_neighbours(learned, tested, neighbours=config.neighbours)
        results['nearest_neighbours'] = {'neighbours': config.neighbours, 'accuracy': accuracy}
    if config.logistic is not None:
        results['logistic'] = probes.logistic(learned, tested, config.logistic)._asdict()
    if (drawn := config.episodes) is not None:
        by_shots = episodes.evaluate(tested, test.class_names, drawn, l2=config.l2)
        results['episodes'] = episodes.report(drawn, by_shots)
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
    """Returns the shots that every class has, at least the fewest, and what classes lack."""
    images = np.bincount(train.labels)
    fewest = int(images[images > 0].min())
    possible = [count for count in shots if count <= max(fewest, min(shots))]
    others = ', '.join(f'{count}-shot' for count in shots if count not in possible)
    lacks = [f'{others} left out'] if others else []
    lacks += [f'{min(shots)}-shot takes all that there are'] if fewest < min(shots) else []
    rare = train.class_names[int(np.flatnonzero(images == fewest)[0])]
    why = f'{", ".join(lacks)}: class {rare!r} has {counted(fewest, "image")}'
    return possible, {'left_out': why} if lacks else {}


def _label(reader: ImageReader, features: Float[np.ndarray, 'n d']) -> Labelled:
    """Returns features and labels of the images that could be read; warns of the others."""
    readable = ~np.isnan(features).any(axis=1)
    if missing := int((~readable).sum()):
        name = reader.source.name_of(int(readable.argmin()))
        text = '%d of %d images cannot be read, left out: %s'
        logging.warning(text, missing, len(readable), name)
    return Labelled(features, reader.source.labels).subset(readable)


def summary(result: dict[str, Any]) -> str:
    """The few-shot results in one line, each set's with its name where there are several."""
    sets, parts = result['sets'], []
    for name, values in sets.items():
        shots = ', '.join(
            f'{shots}-shot {mean:.1%} +- {values["deviation"][shots]:.1%}'
            for shots, mean in values['mean'].items()
        )
        shots += f', {values["left_out"]}' if 'left_out' in values else ''
        if (drawn := values.get('episodes')) is not None:
            shots += ''.join(
                f', {drawn["ways"]}-way {count}-shot {mean:.1%} +- {drawn["interval"][count]:.1%}'
                for count, mean in drawn['mean'].items()
            )
        parts.append(shots if len(sets) == 1 else f'{name}: {shots}')
    return '; '.join(parts)


def numbers(result: dict[str, Any]) -> dict[str, float]:
    """The few-shot accuracies by name, for the metrics file."""
    sets = result['sets']
    found = {}
    for name, values in sets.items():
        where = f'{name}/' if len(sets) > 1 else ''
        for shots, accuracy in values['mean'].items():
            found[f'{where}{shots}_shot_accuracy'] = accuracy
        drawn = values.get('episodes', {'mean': {}})
        for shots, accuracy in drawn['mean'].items():
            found[f'{where}{drawn["ways"]}_way_{shots}_shot_accuracy'] = accuracy
    return found
