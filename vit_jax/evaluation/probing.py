"""Evaluates frozen features: few-shot linear probe, kNN, logistic regression, episodes."""

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.base import Float, UserError, plural, records, require
from vit_jax.data.image_preprocessing import Crop, Preprocessing
from vit_jax.data.loading import ImageReader
from vit_jax.data.sources.base import DataFunction, Source
from vit_jax.data.sources.opening import Opener
from vit_jax.evaluation import episodes, probes, ridge
from vit_jax.evaluation.episodes import EpisodesConfig
from vit_jax.evaluation.features import FeatureFn
from vit_jax.evaluation.linear_probe import LinearProbeConfig
from vit_jax.evaluation.probes import Labeled, LogisticConfig
from vit_jax.evaluation.statistics import sample_deviation
from vit_jax.models import ModelConfig
from vit_jax.training.duration import Interval


@dataclasses.dataclass(kw_only=True)
class ProbeSet(records.Record):
    """A data set for probes."""

    data: str | DataFunction | None = None  # data set; None: the data of the experiment
    train_split: str = 'train'  # split to draw training images from
    test_split: str = 'test'  # split to test on


@dataclasses.dataclass(kw_only=True)
class FewshotConfig(records.Record):
    """Evaluation of frozen features: few-shot linear probe, and other probes.

    kNN and logistic regression use all training images, episodes use test images only. `l2` also
    applies to episodes with the classifier `ridge`. Only the program `fewshot` uses `linear_probe`.
    """

    sets: dict[str, ProbeSet] = dataclasses.field(default_factory=dict)  # empty: experiment's data
    crop: Crop | None = None  # crop of images; None: as in preprocessing
    shots: tuple[int, ...] = (1, 5, 10, 25)  # numbers of training images per class
    seeds: tuple[int, ...] = (0, 1, 2)  # seeds of the draws; accuracy is the mean over seeds
    l2: float = ridge.L2  # regularization
    neighbors: tuple[int, ...] = ()  # numbers of neighbors of kNN; empty: no kNN
    logistic: LogisticConfig | None = None  # logistic regression; None: no logistic regression
    linear_probe: LinearProbeConfig | None = None  # heads trained with SGD; None: no linear probe
    episodes: EpisodesConfig | None = None  # episodic evaluation; None: no episodes
    every_steps: Interval | None = None  # interval while training; None: only at the end

    def check(self) -> None:
        records.require_between(self, 'shots', 'neighbors', 'every_steps', low=1)
        records.require_between(self, 'seeds', low=0)
        records.require_between(self, 'l2', above=0)
        for name, values in {'shots': self.shots, 'seeds': self.seeds}.items():
            are_distinct = len({*values}) == len(values) > 0
            require(are_distinct, f'{name}={values}: expected one or more distinct numbers')
        is_random = self.crop is not None and self.crop.random
        require(not is_random, 'crop: expected a deterministic crop, not one for training')


class Probe(NamedTuple):
    """Readers of an opened data set."""

    train: ImageReader
    test: ImageReader


class Probes(NamedTuple):
    """The opened data sets of a few-shot evaluation."""

    config: FewshotConfig
    by_name: dict[str, Probe]
    missing: dict[str, str]  # reasons why other data sets cannot be used, by name

    @property
    def example(self) -> ImageReader:
        """One of the readers; batches of all readers have equal shapes."""
        return next(iter(self.by_name.values())).test


def open_probes(
    fewshot: FewshotConfig,
    own_data: str | DataFunction,
    open_split: Opener,
    make_reader: Callable[..., ImageReader],
) -> Probes:
    """Opens the data sets of a few-shot evaluation.

    Logs a warning for each data set that cannot be used.

    Args:
      fewshot: Configuration.
      own_data: Data of the experiment, for data sets with `data=None` or if `sets` is empty.
      open_split: Opens a split of a data set.
      make_reader: Makes a reader from a source and an optional crop.

    Raises:
      UserError: If no data set can be used.
    """
    sets = fewshot.sets or {records.text_of(own_data): ProbeSet()}
    crop = {} if fewshot.crop is None else {'crop': fewshot.crop}
    by_name: dict[str, Probe] = {}
    missing: dict[str, str] = {}
    for name, probe_set in sets.items():
        try:
            data = probe_set.data or own_data
            train = open_split(data, probe_set.train_split)
            test = open_split(data, probe_set.test_split)
            _require_suitable(train, test, fewshot.episodes)
            by_name[name] = Probe(train=make_reader(train, **crop), test=make_reader(test, **crop))
        except UserError as error:
            missing[name] = str(error)
            if len(missing) == len(sets):
                raise
            logging.warning('few-shot evaluation skips %s: %s', name, error)
    return Probes(fewshot, by_name, missing)


def _require_suitable(train: Source, test: Source, drawn: EpisodesConfig | None) -> None:
    """Raises UserError if probes do not support the data set."""
    require(
        bool(train.class_names),
        f'{train.data}: the images have no classes; set config.fewshot.sets, or '
        '--config.fewshot=none',
    )
    require(
        train.class_names == test.class_names,
        f'{train.data}: splits {train.split} and {test.split} have different classes',
    )
    require(
        not train.multi_label,
        f'{train.data}: images may have several classes; expected one class per image',
    )
    if drawn is not None:
        episodes.find_classes(test.labels, test.class_names, drawn, shots=max(drawn.shots))


def evaluate(
    features_of: FeatureFn,
    sets: Probes,
    preprocessing: Preprocessing,
    train_linear: Callable[[ImageReader, ImageReader], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Evaluates all probes of all data sets.

    Args:
      features_of: Computes features.
      sets: Opened data sets.
      preprocessing: Preprocessing of the experiment, which the result states.
      train_linear: Trains and tests the linear probe (see `LinearProbe`); None: no linear probe.

    Returns:
      Results and protocol of each data set, and reasons for missing ones, as JSON.
    """
    results = {}
    for name, probe in sets.by_name.items():
        used = dataclasses.replace(preprocessing, crop=probe.test.crop)
        protocol = {
            'data': probe.train.source.data,
            'train_split': probe.train.source.split,
            'test_split': probe.test.source.split,
            'layer': 'pre_logits',
            'image_size': list(probe.test.size),
            'preprocessing': records.to_dict(used),
        }
        results[name] = protocol | _evaluate_probe(features_of, probe, sets.config)
        if train_linear is not None:
            results[name]['linear_probe'] = train_linear(probe.train, probe.test)
    return {'sets': results, 'missing': sets.missing}


def _evaluate_probe(features_of: FeatureFn, probe: Probe, config: FewshotConfig) -> dict[str, Any]:
    """Evaluates all probes of a data set; `notes` in the result name limitations.

    Features are computed for all training images only if a probe needs them, otherwise for drawn
    images.
    """
    source = probe.test.source
    notes: list[str] = []
    test = _labeled(probe.test, features_of(probe.test, np.arange(len(source))), notes)
    drawn_features: Callable[[Any], np.ndarray] = functools.partial(features_of, probe.train)
    result = {'test_images': len(test.labels), 'notes': notes}
    if config.neighbors or config.logistic is not None:
        features = features_of(probe.train, np.arange(len(probe.train.source)))
        train = _labeled(probe.train, features, notes)
        drawn_features = features.__getitem__
    if config.neighbors:
        possible = tuple(k for k in config.neighbors if k <= len(train.labels))
        for k in config.neighbors:
            if k not in possible:
                images = plural(len(train.labels), 'training image')
                notes.append(f'knn {k} is skipped, because there are {images}')
        knn = probes.evaluate_knn(train, test, neighbors=possible) if possible else {}
        result['knn'] = {'accuracy': knn}
    if config.logistic is not None:
        fitted = probes.evaluate_logistic(train, test, config.logistic)
        if not fitted.converged:
            notes.append(f'logistic regression did not converge by iteration {fitted.iterations}')
        result['logistic'] = fitted._asdict()
    if config.episodes is not None:
        by_shots = episodes.evaluate(test, source.class_names, config.episodes, l2=config.l2)
        result['episodes'] = episodes.report_episodes(config.episodes, by_shots)
    return result | _evaluate_few_shot(probe.train.source, test, drawn_features, config, notes)


def check_init_head(model: ModelConfig, train: Source, *, has_start: bool) -> None:
    """Raises UserError unless the head can be a linear probe of the training images."""
    require(has_start, 'config.init_head: expected config.start_from to be set')
    pool = getattr(model, 'pool', None)
    require(
        model.head == 'linear' and pool not in ('none', 'cls_dist'),
        f'config.init_head: got head={records.text_of(model.head)}, pool={pool}; '
        'expected head=linear and one feature vector',
    )
    require(
        not train.multi_label,
        f'config.init_head: images of {train.data} may have several classes; '
        'expected one class per image',
    )


def fit_head(
    features_of: FeatureFn, reader: ImageReader
) -> tuple[dict[str, Float[np.ndarray, '...']], str]:
    """Fits a linear head to all images of a reader by logistic regression (LP-FT).

    Returns:
      `kernel` (d k) and `bias` (k) of the head, and a report line.

    Raises:
      UserError: If a class has no readable image.
    """
    source = reader.source
    notes: list[str] = []
    train = _labeled(reader, features_of(reader, np.arange(len(source))), notes)
    if missing := {*range(len(source.class_names))}.difference(train.labels.tolist()):
        name = source.class_names[min(missing)]
        raise UserError(f'config.init_head: no readable training image of class {name!r}')
    classifier, _ = probes.fit_best_logistic(train, LogisticConfig())
    weights = classifier.weights.astype(np.float64)
    bias = classifier.bias - classifier.mean @ weights
    line = (
        f'head: logistic regression on {plural(len(train.labels), "image")}, '
        f'l2 {classifier.l2:g}, training accuracy {classifier.accuracy(train):.2%}'
    )
    head = {'kernel': weights.astype(np.float32), 'bias': bias.astype(np.float32)}
    return head, '; '.join([line, *notes])


def _labeled(reader: ImageReader, features: Float[np.ndarray, 'n d'], notes: list[str]) -> Labeled:
    """Returns features and labels of readable images; `notes` gets a line about unreadable ones."""
    readable = ~np.isnan(features).any(axis=1)
    require(bool(readable.any()), f'none of {len(readable)} images can be read')
    num_unreadable = int((~readable).sum())
    if num_unreadable:
        name = reader.source.name_of(int(readable.argmin()))
        notes.append(
            f'{num_unreadable} of {len(readable)} images cannot be read, for example {name}'
        )
    return Labeled(features, reader.source.labels).subset(readable)


def _evaluate_few_shot(
    train: Source,
    test: Labeled,
    features_of: Callable[[Any], np.ndarray],
    config: FewshotConfig,
    notes: list[str],
) -> dict[str, Any]:
    """Returns accuracies and protocol of the few-shot linear probe, as JSON."""
    shots = _possible_shots(config.shots, train, notes)
    result = ridge.few_shot(
        train.labels,
        test,
        features_of=features_of,
        shots=shots,
        seeds=config.seeds,
        l2=config.l2,
    )
    by_shots = {str(k): [result.accuracies[seed, k] for seed in config.seeds] for k in shots}

    def by_draw(values: dict[tuple[int, int], Any]) -> dict[str, Any]:
        return {f'seed {seed}, {count} shots': value for (seed, count), value in values.items()}

    images = {draw: train.read_names(rows.tolist()) for draw, rows in result.draws.items()}
    return {
        'classes': len(train.class_names),
        'shots': shots,
        'seeds': [*config.seeds],
        'l2': config.l2,
        'bias': ridge.BIAS,
        'mean': {k: float(np.mean(accuracies)) for k, accuracies in by_shots.items()},
        'deviation': {k: sample_deviation(accuracies) for k, accuracies in by_shots.items()},
        'accuracy': by_draw(result.accuracies),
        'train_images': by_draw(images),
    }


def _possible_shots(shots: Sequence[int], train: Source, notes: list[str]) -> list[int]:
    """Returns the numbers of shots for which every class has enough images.

    If no number qualifies, returns the lowest, for which small classes use all their images. If a
    class is too small for a number of shots, appends a line about it to `notes`.
    """
    images = np.bincount(train.labels)
    fewest = int(images[images > 0].min())
    possible = [count for count in shots if count <= fewest]
    effects = []
    if not possible:
        possible = [min(shots)]
        effects.append(f'{possible[0]}-shot uses all of them')
    effects += [f'{count}-shot is skipped' for count in shots if count not in possible]
    if effects:
        name = train.class_names[int(np.flatnonzero(images == fewest)[0])]
        notes.append(f'class {name!r} has {plural(fewest, "image")}, so {", ".join(effects)}')
    return possible


class Score(NamedTuple):
    """An accuracy with its uncertainty."""

    accuracy: float
    spread: float | None = None  # sample deviation over draws, or half the 95 % interval
    detail: str = ''  # the selected settings

    def __str__(self) -> str:
        spread = '' if self.spread is None else f' +- {self.spread:.2%}'
        detail = f' ({self.detail})' if self.detail else ''
        return f'{self.accuracy:.2%}{spread}{detail}'


def list_scores(values: dict[str, Any]) -> dict[str, Score]:
    """Returns the accuracies of a data set, by names such as `10-shot`, `5-way 1-shot`, `knn 9`."""
    scores = {
        f'{k}-shot': Score(mean, values['deviation'][k]) for k, mean in values['mean'].items()
    }
    if (knn := values.get('knn')) is not None:
        scores |= {f'knn {k}': Score(accuracy) for k, accuracy in knn['accuracy'].items()}
    if (logistic := values.get('logistic')) is not None:
        scores['logistic'] = Score(logistic['accuracy'])
    if (probe := values.get('linear_probe')) is not None:
        scores['linear probe'] = Score(probe['accuracy'], detail=probe['chosen'])
    if (drawn := values.get('episodes')) is not None:
        for k, mean in drawn['mean'].items():
            scores[f'{drawn["ways"]}-way {k}-shot'] = Score(mean, drawn['interval'][k])
    return scores


def summarize(result: dict[str, Any]) -> str:
    """Formats accuracies and notes in one line, with data set names if there are several."""
    sets = result['sets']
    summaries = []
    for name, values in sets.items():
        scores = [f'{label} {score}' for label, score in list_scores(values).items()]
        summary = ', '.join([*scores, *values['notes']])
        summaries.append(summary if len(sets) == 1 else f'{name}: {summary}')
    return '; '.join(summaries)


def name_accuracies(result: dict[str, Any]) -> dict[str, float]:
    """Returns accuracies by metric name, such as `10_shot_accuracy`."""
    sets = result['sets']
    accuracies = {}
    for name, values in sets.items():
        prefix = f'{name}/' if len(sets) > 1 else ''
        for label, score in list_scores(values).items():
            metric = re.sub('[ -]', '_', label) + '_accuracy'
            accuracies[f'{prefix}{metric}'] = score.accuracy
    return accuracies
