"""Opens the data that the configuration's `data`, `split`, `labels` and `classes` describe."""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import os
from collections.abc import Callable, Iterable

import numpy as np

from vit_jax.base import records, require
from vit_jax.base.array_types import Bool
from vit_jax.base.buckets import list_folder
from vit_jax.base.errors import MissingFile, UserError, plural, raise_all, redact_url
from vit_jax.base.storage import is_remote, usable
from vit_jax.data.sources import folders
from vit_jax.data.sources.base import (
    DataFunction,
    Source,
    SourceKind,
    Splits,
    drop_unlabeled,
    keep_classes,
    make_names_relative,
    replace_labels,
    select,
    take_split,
    warn_of_similar_classes,
    warn_once,
)

# The first kind that recognizes the data opens it. `folders` is last: it accepts any folder.
_NAMES = 'arrays', 'tfds', 'vtab', 'tables', 'imagenet', 'shards', 'parquet', 'folders'
KINDS: tuple[SourceKind, ...] = tuple(
    importlib.import_module(f'vit_jax.data.sources.{name}').KIND for name in _NAMES
)
EXPECTED = ', '.join(kind.expected for kind in KINDS)
# `test` stands for the first of these splits that exists.
TEST_NAMES = 'test', 'testing', 'val', 'validation', 'valid'
_TEST_SPLIT_HINT = (
    "to hold out a part of train, set --config.train_split='train[:90%]' "
    "--config.eval_split='train[90%:]'; with vit_jax.evaluate, set --split=train"
)
_SMALL_CLASS = 100  # classes with at most this many images hold out exactly the fraction
_REMOTE = (
    'neither shards (*.tar, *.parquet) nor a folder NAME/VERSION that TFDS prepared; write shards, '
    'or copy images to a disk of every host (gcloud storage rsync -r)'
)


@dataclasses.dataclass(kw_only=True)
class HeldOut(records.Record):
    """Selects the held-out images of data without splits, which become the split `test`."""

    fraction: float = 0.1  # fraction of each class to hold out; at least one image
    seed: int = 0  # another seed holds out other images

    def check(self) -> None:
        records.require_between(self, 'fraction', above=0, below=1)


Opener = Callable[..., Source]  # (data, split, labels=None, classes=()); see `make_opener`


def make_opener(held_out: HeldOut | None = None, *, needs_classes: bool = True) -> Opener:
    """Returns a cached function `(data, split, labels=None, classes=()) -> Source`.

    `data` is data that `open_splits` can open, or a function from the name of a split to a Source.

    `split` is the name of a split, or a slice such as `train[:90%]` or `test[100:200]`, or several
    of them, such as `train[:800]+validation[:200]`. A slice of files is a random sample with a
    fixed seed.

    `labels` replaces the labels. It is a JSON file with a list of class numbers per image (see
    `replace_labels`), or a column of TFDS data. Images without a class are skipped with a warning.

    `classes` are the names of the classes to keep; all if it is empty.

    Args:
      held_out: How data without splits is divided.
      needs_classes: Whether to reject data without classes.
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
            require(column is None, f'labels={labels!r}: expected FILE.json if data is a function')
            source = data(name)
            require(
                isinstance(source, Source),
                f'{records.text_of(data)}({name!r}) returned {source!r}; expected a Source',
            )
        if needs_classes and not source.class_names:
            raise UserError(
                f'{records.text_of(data)}, {name}: the images have no classes; '
                'expected a class for each image, such as a folder CLASS/*.jpg, or a .cls file in '
                'tar shards; --config.objective trains without classes'
            )
        return source if labels is None or column else replace_labels(source, labels)

    @functools.cache
    def open_part(
        data: str | DataFunction, split: str, labels: str | None, classes: tuple[str, ...]
    ) -> Source:
        name = records.text_of(data)
        request = split
        source = take_split(split, functools.partial(open_whole, data, labels), of=name)
        warn_of_similar_classes(source.class_names, name)
        if labels is not None:  # after slicing, so that a slice has the same images with any labels
            source = drop_unlabeled(source)
            request = f'{split} with {labels}'
        for class_name in classes:
            if class_name not in source.class_names:
                nearest = records.closest(class_name, source.class_names)
                raise UserError(f'classes: {name} has no class {class_name!r}; {nearest}')
        if classes:
            source = keep_classes(source, classes)
            request += f' ({plural(len(classes), "class")})'
        return dataclasses.replace(source, data=name, split=request)

    return lambda data, split, labels=None, classes=(): open_part(data, split, labels, classes)


def find_split(name: str, splits: Iterable[str]) -> str | None:
    """Returns the data's own name of the split `name`; None if it does not exist."""
    synonyms = {'test': TEST_NAMES, 'train': ('train', 'training')}
    names = {*splits}
    return next((synonym for synonym in synonyms.get(name, (name,)) if synonym in names), None)


def _find_split(name: str, splits: Splits, data: str) -> str:
    """Returns the data's own name of the split `name`. Raises UserError if it does not exist."""
    if found := find_split(name, splits):
        return found
    hint = f'; {_TEST_SPLIT_HINT}' if name in TEST_NAMES and 'train' in splits else ''
    raise UserError(f'{data}: no split {name!r}; {records.closest(name, splits)}{hint}')


def open_splits(
    data: str, held_out: HeldOut | None = None, *, label_column: str | None = None
) -> Splits:
    """Returns functions that open the splits of a data set, by name.

    Args:
      data: A path or name: `digits`, FILE.npz, `tfds:NAME` or the folder of a TFDS data set,
        `vtab:TASK`, FILE.csv or FILE.jsonl, ImageNet's own files, or folders of images.
      held_out: How data without splits is divided: it has the splits `all`, `train` and `test`.
      label_column: The column of labels, instead of the default one.

    Raises:
      UserError: If no kind recognizes `data`, or if it has no label columns to choose from.
    """
    splits = open_stored_splits(data, label_column=label_column)
    return _with_held_out(splits, held_out or HeldOut(), data)


def open_stored_splits(data: str, *, label_column: str | None = None) -> Splits:
    """Returns functions that open the splits of a data set as `open_splits`, none held out."""
    require(
        not is_remote(data) or data.startswith(('gs://', 's3://')),
        f'data={redact_url(data)!r}: expected a folder or file on a disk, or in a bucket '
        '(gs://BUCKET/FOLDER or s3://BUCKET/FOLDER)',
    )
    kind = _find_kind(data)
    if kind is None and is_remote(data):
        folders_inside = [os.path.basename(folder) for folder in list_folder(data)[1]]
        found = f'; found the folders {", ".join(folders_inside[:8])}' if folders_inside else ''
        raise MissingFile(f'data={data!r}: {_REMOTE}{found}')
    if kind is None:
        wrong = 'unknown kind of data' if os.path.exists(data) else 'no such file or folder'
        raise MissingFile(f'data={data!r}: {wrong}; expected {EXPECTED}')
    columns = () if label_column is None else (label_column,)
    require(
        kind.has_label_columns or not columns,
        f'labels={label_column!r}: expected FILE.json, because {data} has no label columns',
    )
    return kind.open_splits(data, *columns)


def require_outside(folder: str, *data: str | DataFunction | None) -> None:
    """Raises UserError if files written to a folder would be read as input images."""
    for one in data:
        if not isinstance(one, str) or is_remote(one) or is_remote(folder):
            continue
        if _find_kind(one) is folders.KIND:
            with contextlib.suppress(OSError):  # a folder that cannot be read is named later
                require(
                    not folders.would_be_class(folder, one),
                    f'{folder}: inside the image folder {one}; choose a folder outside of it',
                )


def _find_kind(data: str) -> SourceKind | None:
    """Returns the first kind of data that recognizes `data`."""
    kinds = [kind for kind in KINDS if kind.reads_buckets or not is_remote(data)]
    return next((kind for kind in kinds if kind.recognizes(data)), None)


def _with_held_out(splits: Splits, held_out: HeldOut, data: str) -> Splits:
    """Adds `train` and `test` if the only split is `all`."""
    if list(splits) != ['all']:
        return splits

    @functools.cache
    def divide() -> tuple[Source, Bool[np.ndarray, 'n']]:
        source = splits['all']()
        is_test = _draw_test_images(source, held_out, data)
        count = f'{is_test.sum():,} of {len(source):,} images are held out for testing'
        how = '--config.held_out.fraction sets the fraction of each class'
        warn_once(f'{data}: no train/ and test/ splits: {count}; {how}')
        return source, is_test

    def open_split(split: str) -> Source:
        source, is_test = divide()
        return select(source, np.flatnonzero(is_test == (split == 'test')))

    return {split: functools.partial(open_split, split) for split in ('train', 'test')} | splits


def _draw_test_images(source: Source, held_out: HeldOut, data: str) -> Bool[np.ndarray, 'n']:
    """Returns a mask that is True for the held-out images.

    A digest of the seed and its name gives each file a number between 0 and 1. In a class with
    many files, the files with numbers below the fraction are held out, so that a file stays in its
    split when other files are added or removed. A class with at most _SMALL_CLASS files holds out
    exactly the fraction. Every class holds out at least one file, but never all. Multi-label data
    counts as one class. If several names (links or table lines) lead to one file, its real path is
    used if it is among them, otherwise the first name. Raises UserError for a class with only one
    image.
    """
    paths = source.read_names(range(len(source)))
    names = make_names_relative(paths, data)
    files = [*map(os.path.realpath, paths)]
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
    held: set[str] = set()
    faults: list[str] = []
    for label, members in sorted(by_class.items()):
        if len(members) <= _SMALL_CLASS:
            count = round(held_out.fraction * len(members))
        else:
            count = sum(number < held_out.fraction for number, _ in members)
        count = max(1, min(count, len(members) - 1))
        held |= {file for _, file in sorted(members)[:count]}
        if len(members) == 1:
            has_class = source.class_names and not source.multi_label
            owner = f'class {source.class_names[label]!r}' if has_class else 'the data'
            faults.append(
                f'{paths[first[members[0][1]]]}: the only image of {owner}; '
                'expected at least 2, to hold out 1 for testing'
            )
    raise_all(faults)
    return np.array([file in held for file in files])
