"""Opens data: what a configuration's `data`, `split` and `labels` mean."""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Sequence

import numpy as np

from vit_jax.base import (
    Float,
    Int,
    MissingFile,
    UserError,
    close_by,
    counted,
    records,
    refuse,
    storage,
    usable,
)
from vit_jax.data.sources import arrays, folders, imagenet, relabelling, tables, tfds, vtab
from vit_jax.data.sources.base import (
    DataFunction,
    Source,
    Splits,
    relative_names,
    select,
    take_split,
    warn_of_similar_classes,
    warn_once,
)

# The split `test` is the first of these that the data has.
TEST_NAMES = 'test', 'testing', 'val', 'validation', 'valid'
_MEASURED = 'test', 'val', 'dev', 'eval', 'held', 'hold'  # how names of such splits begin
_CUT = (
    "a part of train can be tested on: --config.train_split='train[:90%]' "
    "--config.eval_split='train[90%:]'; of vit_jax.evaluate --split=train"
)

_BALANCED = 100  # images of a class, of which exactly the fraction is held out
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
    """A function `(data, split, labels=None, classes=()) -> Source` that opens everything once.

    `data` is one of the kinds of `open_splits`, or a function from the name of a split to a Source.
    `split` is a name and perhaps a slice, `train[:90%]` or `test[100:200]`: of files a random
    sample with a fixed seed; or several, `train[:800]+validation[:200]`. `labels` is a JSON file
    (see `relabelled`) or a column of TFDS data that replaces the labels; images to which it gives
    no class are left out, with a warning. `classes` are the names of those whose images alone are
    kept; none: all.
    """

    @functools.cache
    def splits_of(data: str, label_column: str | None) -> Splits:
        splits = open_splits(data, held_out, label_column=label_column)
        return {name: functools.cache(opened) for name, opened in splits.items()}

    def whole(data: str | DataFunction, labels: str | None, name: str) -> Source:
        column = None if labels is None or labels.endswith('.json') else labels
        if isinstance(data, str):
            with usable(data):
                splits = splits_of(data, column)
                names = {'test': TEST_NAMES, 'train': ('train', 'training')}.get(name, (name,))
                name = next((other for other in names if other in splits), name)
                if name not in splits:
                    raise UserError(f'{data}: no split {name!r}; {_nearest_split(name, splits)}')
                source = splits[name]()
        elif column is not None:
            raise UserError(f'labels={labels!r}: expected FILE.json for data of a function')
        else:
            source = _returned_by(data, name)
        warn_of_similar_classes(records.text_of(data), source.class_names)
        return source if labels is None or column else relabelling.relabelled(source, labels)

    @functools.cache
    def chosen(
        data: str | DataFunction, split: str, labels: str | None, classes: tuple[str, ...]
    ) -> Source:
        name = records.text_of(data)
        source = take_split(split, functools.partial(whole, data, labels), of=name)
        # After the slice, so that a split names the same images with any labels.
        source = source if labels is None else relabelling.with_labels(source)
        for one in classes:
            if one not in source.class_names:
                nearest = records.nearest(one, source.class_names)
                raise UserError(f'classes: {name} has no class {one!r}; {nearest}')
        source = relabelling.of_classes(source, classes) if classes else source
        request = f'{split} with {labels}' if labels else split
        request += f' ({counted(len(classes), "class")})' if classes else ''
        return dataclasses.replace(source, data=name, split=request)

    def opened(
        data: str | DataFunction,
        split: str,
        labels: str | None = None,
        classes: tuple[str, ...] = (),
    ) -> Source:
        return chosen(data, split, labels, classes)

    return opened


def _returned_by(data: DataFunction, name: str) -> Source:
    source = data(name)
    if not isinstance(source, Source):
        raise UserError(f'{records.text_of(data)}({name!r}) is no Source: {source!r}')
    return source


def _nearest_split(name: str, splits: Splits) -> str:
    """Ends an error message about an unknown split; never leads from tests to training images."""
    tested = [other for other in TEST_NAMES if other in splits]
    if tested and name.lower().startswith(_MEASURED):
        return f'did you mean {tested[0]!r}?'
    advice = f'; {_CUT}' if name == 'test' and 'train' in splits else ''
    return f'{records.nearest(name, splits)}{advice}'


def open_splits(
    data: str, held_out: HeldOut | None = None, *, label_column: str | None = None
) -> Splits:
    """The splits of a data set by name, each a function that opens it.

    `data` is `digits`; a `.npz`, `.csv` or `.jsonl` file; a folder (of splits, of classes, the
    ImageNet tree or its tar files, a data set that TFDS prepared); `tfds:NAME`; or `vtab:TASK`.
    TFDS's sets alone have columns of labels. Data without splits is `all`, and of that `train` and
    `test` as `held_out` says.
    """
    if storage.is_remote(data):
        raise UserError(f'data={data!r}: {_REMOTE}')
    if data.startswith('tfds:'):
        return tfds.folder_splits(tfds.named_folder(data.removeprefix('tfds:')), label_column)
    if tfds.holds(data):
        return tfds.folder_splits(data, label_column)
    if data.endswith(('.npz', '.csv', '.jsonl')) and not os.path.isfile(data):
        wrong = 'is no file' if os.path.exists(data) else 'no such file'
        raise MissingFile(f'{data}: {wrong}{close_by(data)}')
    if label_column is not None:
        raise UserError(f'labels={label_column!r}: expected FILE.json; {data} is no data of TFDS')
    if data.startswith('vtab:'):
        return vtab.task_splits(data.removeprefix('vtab:'))
    if data == 'digits':
        return arrays.digits_splits()
    if data.endswith('.npz'):
        return arrays.npz_splits(data)
    if data.endswith(('.csv', '.jsonl')):
        return _with_splits(tables.table_splits(data), held_out or HeldOut(), data)
    if not os.path.isdir(data):
        files = "FILE.csv, FILE.jsonl, FILE.npz, tfds:NAME, vtab:TASK, or 'digits'"
        expected = f'; expected a folder that holds train/CLASS/*.jpg or CLASS/*.jpg, {files}'
        if os.path.exists(data):
            raise UserError(f'data={data!r}: is no folder{expected}')
        raise MissingFile(f'data={data!r}: no such folder{close_by(data) or expected}')
    if imagenet.holds(data):
        return imagenet.folder_splits(data)
    return _with_splits(folders.folder_splits(data), held_out or HeldOut(), data)


def _with_splits(splits: Splits, held_out: HeldOut, data: str) -> Splits:
    """The splits as they are, or `train` and `test` made of the only one, `all`, and that too."""
    if list(splits) != ['all']:
        return splits

    @functools.cache
    def whole() -> tuple[Source, np.ndarray]:
        source = splits['all']()
        names = relative_names(source.read_names(range(len(source))), data)
        is_test = _drawn(source, names, held_out)
        count = f'{is_test.sum():,} of {len(source):,} images are held out for testing'
        if not source.multi_label:
            by_class = np.bincount(source.labels[is_test]).tolist()
            least, most = min(by_class), max(by_class)
            count += f', {least:,}{"" if least == most else f" to {most:,}"} of each class'
        how = '--config.held_out.fraction sets the share'
        warn_once(f'{data}: no train/ and test/ splits: {count}; {how}')
        return source, is_test

    def opened(split: str) -> Source:
        source, is_test = whole()
        return select(source, np.flatnonzero(is_test == (split == 'test')))

    return {split: functools.partial(opened, split) for split in ('train', 'test')} | splits


def _drawn(source: Source, names: Sequence[str], held_out: HeldOut) -> np.ndarray:
    """Returns a mask of the held-out images.

    Holds out an image if the digest of its name is below the fraction. Adding or removing other
    images of a large class therefore does not change the split of an image. In a class of at most
    100 images, holds out exactly the rounded fraction, by the smallest digests. Always holds out
    the image with the smallest digest of a class, and never the one with the largest. Multi-label
    data counts as one class, and a file as one image even if several links or lines of a table
    point to it. Raises UserError for a class of one image.
    """
    labels = np.zeros(len(source), np.int32) if source.multi_label else source.labels
    paths = source.read_names(range(len(source)))
    by_name = np.argsort(names, kind='stable')
    files = [os.path.realpath(paths[i]) for i in by_name]
    _, first, file_of = np.unique(files, return_index=True, return_inverse=True)
    chosen = by_name[first]  # of each file the image with the first name
    keys = (f'{held_out.seed} {names[i]}'.encode(errors='surrogateescape') for i in chosen)
    digests = (hashlib.blake2b(key, digest_size=8).digest() for key in keys)
    places = np.frombuffer(b''.join(digests), '<u8') / 2**64
    held = _smallest(places, labels[chosen], held_out.fraction)
    alone = chosen[held < 0]
    of = [
        'all the data' if source.multi_label else f'class {source.class_names[labels[i]]!r}'
        for i in alone
    ]
    text = '%s: of %s this is the only image, none can be held out for testing'
    refuse([text % (paths[i], group) for i, group in zip(alone, of, strict=True)])
    is_test = np.zeros(len(source), bool)
    is_test[by_name] = held[file_of] > 0
    return is_test


def _smallest(
    places: Float[np.ndarray, 'n'], labels: Int[np.ndarray, 'n'], fraction: float
) -> Int[np.ndarray, 'n']:
    """Returns 1 for what is held out by its place, from 0 to 1; -1 for what is alone in a class."""
    held = (places < fraction).astype(int)
    for label in np.unique(labels):
        order = np.flatnonzero(labels == label)
        order = order[np.argsort(places[order], kind='stable')]
        if len(order) <= _BALANCED:
            held[order] = np.arange(len(order)) < round(fraction * len(order))
        held[order[0]], held[order[-1]] = 1, 0 if len(order) > 1 else -1
    return held
