"""Stored images at random access: what a split of a data set is, and how one is opened and cut."""

import dataclasses
import functools
import logging
import os
import re
from collections.abc import Callable

import numpy as np

from vit_jax.base import records
from vit_jax.base.errors import MissingFile, UserError
from vit_jax.base.records import Record
from vit_jax.data.sources import arrays, folders, imagenet, tables, tfds
from vit_jax.data.sources.base import Source, Splits, select

# Whatever data calls the images that are kept for testing, `test` means them.
TEST_NAMES = 'test', 'val', 'validation', 'valid'


@dataclasses.dataclass(kw_only=True)
class HeldOut(Record):
    """What is kept for testing of data that has no splits of its own."""

    fraction: float = 0.1  # of each class, at least one image
    seed: int = 0


def open_source(data: str, split: str, held_out: HeldOut | None = None) -> Source:
    """The images that a configuration names; `data` is one of the kinds of `open_splits`.

    `split` is a name and an optional slice of it: `train`, `train[:90%]`, `test[100:200]`. A
    slice of files is a random sample with a fixed seed, not the first classes. Where there is no
    `test`, it is what else images for testing are called. Raises UserError or MissingFile
    with what was found instead.
    """
    return make_opener(held_out)(data, split)


def make_opener(held_out: HeldOut | None = None) -> Callable[[str, str], Source]:
    """`open_source` that opens everything once: a folder is not looked through again."""

    @functools.cache
    def splits_of(data: str) -> Splits:
        splits = open_splits(data, held_out)
        return {name: functools.cache(opened) for name, opened in splits.items()}

    @functools.cache
    def opened(data: str, split: str) -> Source:
        name, part = _parse_split(split)
        source = splits_of(data)[_split_name(name, splits_of(data), data)]()
        selected = range(len(source))[part(len(source))]
        if not selected:
            raise UserError(f'split {split!r} of {data} is empty: {name} has {len(source)} images')
        return source if len(selected) == len(source) else select(source, selected)

    return opened


def open_splits(data: str, held_out: HeldOut | None = None) -> Splits:
    """The splits of a data set by name, each a function that opens it.

    `data` is `digits`; a `.npz`, `.csv` or `.jsonl` file; a folder (of splits, of classes, the
    ImageNet tree or its tar files, a data set that TFDS prepared); or `tfds:NAME`. Data without
    splits is split into `train` and `test` as `held_out` says.
    """
    if data == 'digits':
        return arrays.digits()
    if data.startswith('tfds:'):
        return tfds.named(data.removeprefix('tfds:'))
    if data.endswith('.npz'):
        return arrays.npz_file(data)
    if data.endswith(('.csv', '.jsonl')):
        return _with_splits(tables.table(data), held_out or HeldOut(), data)
    if not os.path.isdir(data):
        raise MissingFile(
            f"data={data!r}: no such folder; expected 'digits', tfds:NAME, FILE.npz, FILE.csv, "
            f'FILE.jsonl, or a folder that holds train/CLASS/*.jpg or CLASS/*.jpg'
        )
    for kind in tfds, imagenet:
        if kind.holds(data):
            return kind.folder(data)
    return _with_splits(folders.folder(data), held_out or HeldOut(), data)


def _with_splits(splits: Splits, held_out: HeldOut, data: str) -> Splits:
    """The splits as they are, or `train` and `test` made of the only one, `all`."""
    if list(splits) != ['all']:
        return splits
    if not 0 < held_out.fraction < 1:
        raise UserError(f'held_out.fraction={held_out.fraction}: expected more than 0, less than 1')

    @functools.cache
    def parts() -> tuple[Source, Source]:
        source = splits['all']()
        logging.warning(
            '%s has no splits: %g of each class are held out for testing (held_out)',
            data,
            held_out.fraction,
        )
        tested = _drawn(source, held_out)
        return (
            select(source, np.flatnonzero(~tested).tolist()),
            select(source, np.flatnonzero(tested).tolist()),
        )

    return {'train': lambda: parts()[0], 'test': lambda: parts()[1]}


def _drawn(source: Source, held_out: HeldOut) -> np.ndarray:
    """Which images are held out: a share of each class, or of all where images have several."""
    rng = np.random.default_rng(held_out.seed)
    labels = source.labels if source.labels.ndim == 1 else np.zeros(len(source), np.int32)
    tested = np.zeros(len(source), bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        if len(members) < 2:
            name = source.name_of(int(members[0]))
            raise UserError(f'{name}: its class has one image, none can be held out for testing')
        tested[members[: max(1, round(held_out.fraction * len(members)))]] = True
    return tested


def _split_name(name: str, splits: Splits, data: str) -> str:
    if name in splits:
        return name
    others = [other for other in TEST_NAMES if other in splits]
    if name == 'test' and others:
        return others[0]
    raise UserError(f'{data}: no split {name!r}; {records.nearest(name, splits)}')


def _parse_split(split: str) -> tuple[str, Callable[[int], slice]]:
    """The split's name and the slice of its length that is meant."""
    match = re.fullmatch(r'([\w-]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?', split)
    if not match:
        raise UserError(f'split {split!r}: expected a name, or NAME[:90%], NAME[90%:], NAME[10:20]')
    name, *bounds = match.groups()

    def part(length: int) -> slice:
        ends = (
            None if b is None else round(int(b[:-1]) * length / 100) if b[-1] == '%' else int(b)
            for b in bounds
        )
        return slice(*ends)

    return name, part
