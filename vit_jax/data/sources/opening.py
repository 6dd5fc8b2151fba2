"""Opens data: what a configuration's `data`, `split` and `labels` mean."""

import collections
import dataclasses
import functools
import hashlib
import importlib
import os
from collections.abc import Callable

import numpy as np

from vit_jax.base import records, require, storage
from vit_jax.base.array_types import Bool
from vit_jax.base.errors import MissingFile, UserError, counted, refuse
from vit_jax.base.storage import usable
from vit_jax.data.sources.base import (
    DataFunction,
    Source,
    SourceKind,
    Splits,
    drop_unlabeled,
    keep_classes,
    relabeled,
    relative_names,
    select,
    take_split,
    warn_once,
)

# The first kind that recognizes the data opens it. `folders` is last: it accepts any folder.
_NAMES = 'arrays', 'tfds', 'vtab', 'tables', 'imagenet', 'folders'
KINDS: tuple[SourceKind, ...] = tuple(
    importlib.import_module(f'vit_jax.data.sources.{name}').KIND for name in _NAMES
)
EXPECTED = ', '.join(kind.expected for kind in KINDS)
# The split `test` is the first of these that the data has.
TEST_NAMES = 'test', 'testing', 'val', 'validation', 'valid'
_CUT = (
    "a part of train can be tested on: --config.train_split='train[:90%]' "
    "--config.eval_split='train[90%:]'; in vit_jax.evaluate --split=train"
)
_BALANCED = 100  # images; of a class of at most so many exactly the fraction is held out
_REMOTE = (
    'images on a store are not read from there: copy them to a disk of every host (gcloud storage '
    'rsync -r), or mount the bucket read-only (gcsfuse -o ro --implicit-dirs), and name that folder'
)


@dataclasses.dataclass(kw_only=True)
class HeldOut(records.Record):
    """The part of data without splits that becomes `test`."""

    fraction: float = 0.1  # of each class; at least one image
    seed: int = 0  # of the digests

    def check(self) -> None:
        records.require_between(self, 'fraction', above=0, below=1)


Opener = Callable[..., Source]  # (data, split, labels=None, classes=()), see `make_opener`


def make_opener(held_out: HeldOut | None = None) -> Opener:
    """Returns a function `(data, split, labels=None, classes=()) -> Source` with a cache.

    Args:
      data: One of the kinds of `open_splits`, or a function from the name of a split to a Source.
      split: A name and perhaps a slice, `train[:90%]` or `test[100:200]`: of files a random sample
        with a fixed seed; or several, `train[:800]+validation[:200]`.
      labels: A JSON file (see `relabeled`) or a column of TFDS data that replaces the labels.
        Images without a class are left out, with a warning.
      classes: The names of the classes whose images are kept; all if empty.
    """

    open_all = functools.cache(functools.partial(open_splits, held_out=held_out))

    @functools.cache
    def open_whole(data: str | DataFunction, labels: str | None, name: str) -> Source:
        column = None if labels is None or labels.endswith('.json') else labels
        if isinstance(data, str):
            with usable(data):
                splits = open_all(data, label_column=column)
                source = splits[_find_split(name, splits, data)]()
        else:
            require(column is None, f'labels={labels!r}: expected FILE.json for data of a function')
            source = data(name)
            call = f'{records.text_of(data)}({name!r})'
            require(isinstance(source, Source), f'{call} is no Source: {source!r}')
        return source if labels is None or column else relabeled(source, labels)

    @functools.cache
    def open_part(
        data: str | DataFunction, split: str, labels: str | None, classes: tuple[str, ...]
    ) -> Source:
        name, request = records.text_of(data), split
        source = take_split(split, functools.partial(open_whole, data, labels), of=name)
        if labels is not None:  # after the slice, so that a split names the same images
            source, request = drop_unlabeled(source), f'{split} with {labels}'
        for one in classes:
            if one not in source.class_names:
                nearest = records.nearest(one, source.class_names)
                raise UserError(f'classes: {name} has no class {one!r}; {nearest}')
        if classes:
            source = keep_classes(source, classes)
            request += f' ({counted(len(classes), "class")})'
        return dataclasses.replace(source, data=name, split=request)

    return lambda data, split, labels=None, classes=(): open_part(data, split, labels, classes)


def _find_split(name: str, splits: Splits, data: str) -> str:
    """Returns the name that a split has in the data. Raises UserError if there is none."""
    names = {'test': TEST_NAMES, 'train': ('train', 'training')}
    for other in names.get(name, (name,)):
        if other in splits:
            return other
    cut = f'; {_CUT}' if name == 'test' and 'train' in splits else ''
    raise UserError(f'{data}: no split {name!r}; {records.nearest(name, splits)}{cut}')


def open_splits(
    data: str, held_out: HeldOut | None = None, *, label_column: str | None = None
) -> Splits:
    """Returns the splits of a data set by name, each a function that opens it.

    One of KINDS recognizes `data`. Data without splits has the split `all`, which `held_out`
    divides into `train` and `test`. `label_column` names another column of labels.
    """
    require(not storage.is_remote(data), f'data={data!r}: {_REMOTE}')
    kind = next((kind for kind in KINDS if kind.recognizes(data)), None)
    if kind is None:
        wrong = 'unknown kind of data' if os.path.exists(data) else 'no such file or folder'
        raise MissingFile(f'data={data!r}: {wrong}; expected {EXPECTED}')
    columns = () if label_column is None else (label_column,)
    unused = f'labels={label_column!r}: expected FILE.json; {data} has no columns of labels'
    require(kind.has_label_columns or not columns, unused)
    return _with_held_out(kind.open_splits(data, *columns), held_out or HeldOut(), data)


def _with_held_out(splits: Splits, held_out: HeldOut, data: str) -> Splits:
    """Adds `train` and `test` if the only split is `all`."""
    if list(splits) != ['all']:
        return splits

    @functools.cache
    def divide() -> tuple[Source, Bool[np.ndarray, 'n']]:
        source = splits['all']()
        is_test = _draw_test_images(source, held_out, data)
        count = f'{is_test.sum():,} of {len(source):,} images are held out for testing'
        how = '--config.held_out.fraction sets the share of each class'
        warn_once(f'{data}: no train/ and test/ splits: {count}; {how}')
        return source, is_test

    def open_split(split: str) -> Source:
        source, is_test = divide()
        return select(source, np.flatnonzero(is_test == (split == 'test')))

    return {split: functools.partial(open_split, split) for split in ('train', 'test')} | splits


def _draw_test_images(source: Source, held_out: HeldOut, data: str) -> Bool[np.ndarray, 'n']:
    """Returns a mask of the held-out images.

    Each file has a place from 0 to 1, a digest of its name within the data. Of a class of many
    files those below the fraction are held out, so that none changes sides when others come or go;
    of few files exactly the fraction; always at least one, and never all. Multi-label data counts
    as one class. A file to which several links or lines of a table point has its own name if that
    is among them, else the first one. Raises UserError for a class of one image.
    """
    paths = source.read_names(range(len(source)))
    names, files = relative_names(paths, data), [*map(os.path.realpath, paths)]
    root = os.path.realpath(data if os.path.isdir(data) else os.path.dirname(data))
    labels = [0] * len(source) if source.multi_label else source.labels.tolist()
    ranks = [
        (os.path.join(root, name) != file, name) for name, file in zip(names, files, strict=True)
    ]
    first = {files[i]: i for i in sorted(range(len(ranks)), key=ranks.__getitem__, reverse=True)}
    by_class = collections.defaultdict[int, list[tuple[float, str]]](list)
    for file, i in first.items():
        key = f'{held_out.seed} {names[i]}'.encode(errors='surrogateescape')
        digest = hashlib.blake2b(key, digest_size=8).digest()
        by_class[labels[i]].append((int.from_bytes(digest, 'little') / 2**64, file))
    held, faults = set[str](), list[str]()
    for label, members in sorted(by_class.items()):
        if len(members) <= _BALANCED:
            count = round(held_out.fraction * len(members))
        else:
            count = sum(place < held_out.fraction for place, _ in members)
        count = max(1, min(count, len(members) - 1))
        held |= {file for _, file in sorted(members)[:count]}
        if len(members) == 1:
            of = 'all the data' if source.multi_label else f'class {source.class_names[label]!r}'
            text = f'of {of} this is the only image, none can be held out for testing'
            faults.append(f'{paths[first[members[0][1]]]}: {text}')
    refuse(faults)
    return np.array([file in held for file in files])
