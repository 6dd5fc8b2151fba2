"""What the features of a frozen network are worth: few-shot and its companions, on several sets."""

import hashlib
import json
import logging
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax.base import records, tree_names
from vit_jax.base.array_types import Array, Batch, Float, Int, Params
from vit_jax.base.atomic_files import atomic_write, write_json
from vit_jax.base.errors import UserError
from vit_jax.config import TrainConfig, checked
from vit_jax.data import loading
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.opening import make_opener
from vit_jax.evaluation import probes, ridge
from vit_jax.parallel.meshes import put
from vit_jax.parallel.processes import Job
from vit_jax.parallel.sharding_rules import shardings_for
from vit_jax.runs import fingerprint, setups, workdirs

Features = Callable[[Params, Batch], Float[Array, 'b d']]
# The features of these images of a feed, in this order, in host memory.
Rows = Callable[[loading.Loader, Int[np.ndarray, 'n']], Float[np.ndarray, 'n d']]
_SAMPLE = 64  # images of a split whose bytes say whether it is still the same


class OpenSet(NamedTuple):
    """One data set of an evaluation: images to learn from, and images to test on."""

    train: loading.Loader
    test: loading.Loader
    told: ridge.ProbeSet


class OpenSets(NamedTuple):
    """The data sets of an evaluation by name, and why others are missing."""

    found: dict[str, OpenSet]
    missing: dict[str, str]


def open_sets(setup: setups.Setup, feeds: setups.Feeds) -> OpenSets:
    """The data sets to evaluate on. Some of several may be absent: they are named, once.

    Raises UserError or MissingFile with what is wrong where none is left.
    """
    config = setup.config.fewshot
    assert config is not None
    wanted = config.sets or {
        config.data or setup.config.data: ridge.ProbeSet(
            data=config.data, train_split=config.train_split, test_split=config.test_split
        )
    }
    found: dict[str, OpenSet] = {}
    missing: dict[str, str] = {}
    for name, told in wanted.items():
        try:
            found[name] = _open(setup, feeds, told)
        except (ValueError, FileNotFoundError) as error:
            if len(wanted) == 1 or len(missing) == len(wanted) - 1:
                raise
            missing[name] = str(error)
            logging.warning('left out: %s: %s', name, error)
    return OpenSets(found, missing)


def _open(setup: setups.Setup, feeds: setups.Feeds, told: ridge.ProbeSet) -> OpenSet:
    data = told.data or setup.config.data
    train, test = (
        feeds.evaluation(data, split, setup.config.fewshot_crop)
        for split in (told.train_split, told.test_split)
    )
    if train.source.class_names != test.source.class_names:
        raise UserError(f'{data}: the classes of {told.train_split} and {told.test_split} differ')
    if train.source.multi_label:
        raise UserError(f'{data}: an image may have several classes; probes need one')
    return OpenSet(train, test, told)


def evaluate(setup: setups.Setup, rows: Rows, sets: OpenSets) -> dict[str, Any]:
    """Every set's result, with the whole protocol, by name; and which sets are missing."""
    return {
        'sets': {name: _result(setup, rows, opened) for name, opened in sets.found.items()},
        'missing': sets.missing,
    }


def _result(setup: setups.Setup, rows: Rows, opened: OpenSet) -> dict[str, Any]:
    config, (train, test, told) = setup.config.fewshot, opened
    assert config is not None
    labels = train.source.labels, test.source.labels
    test_rows = rows(test, np.arange(len(test.source)))
    protocol = {
        'data': told.data or setup.config.data,
        'train_split': told.train_split,
        'test_split': told.test_split,
        'test_images': len(test.source),
        'layer': 'pre_logits',
        'image_size': list(setup.model.config.image_size),
        'preprocessing': records.to_dict(setup.preprocessing) | _crop(setup.config),
    }
    more: dict[str, Any] = {}
    train_rows = None
    if config.neighbours is not None or config.logistic is not None:
        train_rows = rows(train, np.arange(len(train.source)))
        data = train_rows, labels[0], test_rows, labels[1]
        if config.neighbours is not None:
            nearest = probes.nearest_neighbours(*data, neighbours=config.neighbours)
            more['nearest_neighbours'] = {'neighbours': config.neighbours, 'accuracy': nearest}
        if config.logistic is not None:
            more['logistic'] = probes.logistic(*data, config.logistic)
    accuracies, draws = ridge.probe(
        lambda chosen: rows(train, chosen) if train_rows is None else train_rows[chosen],
        labels[0],
        test_rows,
        labels[1],
        shots=config.shots,
        seeds=config.seeds,
        l2=config.l2,
    )
    report = ridge.report(
        accuracies,
        draws,
        config,
        name_of=train.source.name_of,
        classes=len(train.source.class_names),
    )
    return protocol | more | report


def _crop(config: TrainConfig) -> dict[str, Any]:
    """The crop of this evaluation, where it is not the preprocessing's."""
    if config.fewshot_crop is None:
        return {}
    crop = config.fewshot_crop
    return {'crop': {'kind': type(crop).__name__} | records.to_dict(crop)}


def rows_of(setup: setups.Setup, features: Features, params: Params, job: Job) -> Rows:
    """Features by the compiled program, computed each time they are asked for."""

    def rows(feed: loading.Loader, indices: Int[np.ndarray, 'n']) -> Float[np.ndarray, 'n d']:
        batches = loading.sequential_batches(feed, indices, batch_size=setup.eval_batch_size)
        found = np.concatenate(
            [np.asarray(features(params, batch)) for batch in job.with_heartbeat(batches)]
        )
        return found[: len(indices)]

    return rows


def cached(rows: Rows, folder: pathlib.Path, network: str) -> Rows:
    """The same features, of whole splits, kept on disk: another run with this network reads them.

    A file is named by a digest of the network, of how images are prepared, and of the images:
    names, labels, and the bytes of some.
    """
    folder.mkdir(parents=True, exist_ok=True)
    at_hand: dict[str, np.ndarray] = {}

    def kept(feed: loading.Loader, indices: Int[np.ndarray, 'n']) -> Float[np.ndarray, 'n d']:
        name = _digest(network, feed.preprocessing_id, _fingerprint(feed.source))
        path = folder / f'{name}.npy'
        if name not in at_hand:
            if path.exists():
                at_hand[name] = np.load(path, allow_pickle=False)
                print(f'features of {len(feed.source):,} images read from {path}')
            else:
                at_hand[name] = rows(feed, np.arange(len(feed.source)))
                with atomic_write(path) as partial, partial.open('wb') as file:
                    np.save(file, at_hand[name], allow_pickle=False)
        return at_hand[name][indices]

    return kept


def digest_of(setup: setups.Setup, params: Params) -> str:
    """One name for a network: configuration, numbers, how pixels are scaled, precision."""
    model = json.dumps(records.to_dict(setup.model.config))
    scaling = setup.preprocessing.mean, setup.preprocessing.std, setup.config.compute.dtype
    leaves = tree_names.named_leaves(params)
    return _digest(
        model, repr(scaling), *(part for name, leaf in leaves.items() for part in (name, leaf))
    )


def _fingerprint(source: Source) -> str:
    some = np.linspace(0, len(source) - 1, min(_SAMPLE, len(source))).astype(int).tolist()
    names = [source.name_of(i) for i in range(len(source))]
    return _digest(*names, source.labels, *(source.read(i)[0] for i in some))


def _digest(*parts: Any) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        if not isinstance(data, bytes):
            data = np.ascontiguousarray(data).tobytes()
        total.update(len(data).to_bytes(8, 'little') + data)
    return total.hexdigest()


def probe(
    config: TrainConfig, path: str, *, job: Job | None = None
) -> tuple[dict[str, Any], pathlib.Path]:
    """Evaluation of the checkpoint `start_from` alone; the result file lies in `path`.

    Raises UserError or MissingFile for input that does not fit.
    """
    job = job or Job()
    config = checked(config)
    job.require_same('this evaluation', fingerprint.of_run(config, path))
    if config.start_from is None:
        raise UserError('config.start_from is none: expected the checkpoint to evaluate')
    if config.fewshot is None:
        raise UserError('config.fewshot is none: expected shots, seeds and data to evaluate with')
    origin = setups.read_origin(config)
    assert origin is not None
    # The checkpoint's own pre-processing, whatever the configuration would train with.
    config.preprocessing = origin.card.preprocessing
    setup = setups.prepare(config, origin, setups.frozen_model(config, origin))
    feeds = setups.Feeds(setup, make_opener(config.held_out))
    sets = open_sets(setup, feeds)  # what is wrong with them is said before anything is computed
    with workdirs.opened(path, records.to_dict(config), job) as folder:
        like = jax.eval_shape(setup.model.init, jax.random.key(0))
        shardings = shardings_for(like, setup.mesh, config.mesh)
        params, said = setups.transferred(setup, like)
        features = setups.compile_features(setup, like, shardings)
        rows = rows_of(setup, features, put(params, shardings), job)
        if jax.process_index() == 0:
            print('\n'.join(said))
        if config.fewshot.feature_cache is not None and jax.process_count() == 1:
            kept = pathlib.Path(config.fewshot.feature_cache)
            rows = cached(rows, kept, digest_of(setup, params))
        result = evaluate(setup, rows, sets)
        result |= {'step': origin.card.step, 'checkpoint': config.start_from}
        if jax.process_index() == 0:
            write_json(folder / workdirs.FEWSHOT, result)
    return result, folder / workdirs.FEWSHOT


def summary(result: dict[str, Any]) -> str:
    """The few-shot results in one line, each set's with its name where there are several."""
    sets, parts = result['sets'], []
    for name, values in sets.items():
        shots = ', '.join(
            f'{shots}-shot {mean:.1%} +- {values["deviation"][shots]:.1%}'
            for shots, mean in values['mean'].items()
        )
        parts.append(shots if len(sets) == 1 else f'{name}: {shots}')
    return '; '.join(parts)


def numbers(result: dict[str, Any]) -> dict[str, float]:
    """The few-shot accuracies by name, for the metrics file."""
    sets = result['sets']
    return {
        f'{name}/' * (len(sets) > 1) + f'{shots}_shot_accuracy': accuracy
        for name, values in sets.items()
        for shots, accuracy in values['mean'].items()
    }
