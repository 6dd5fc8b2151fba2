"""A `Source`: labeled images at random access, which every kind of stored data becomes."""

import bisect
import dataclasses
import functools
import itertools
import logging
import os
import pathlib
import re
import stat
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from typing import Any

import numpy as np

from vit_jax.base.array_types import Int
from vit_jax.base.errors import UserError, counted
from vit_jax.base.records import require

Label = int | np.integer | np.ndarray  # a class number, or multi-label: a row of 0 and 1
EncodedImage = bytes | np.ndarray  # an encoded file, or uint8 pixels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """One split of a data set, whose images and labels are read on request, by several threads.

    `read(i)` returns image i and its label; `name_of(i)` its name for messages; `label_of(i)` its
    label alone, which can be as slow as reading the image. `size_of(i)` returns a number that
    changes with the image, and decodes nothing: the size of a file, or a checksum; -1 is unknown.
    `data` and `split` are what a configuration calls it (see `make_opener`).
    """

    count: int
    class_names: tuple[str, ...]
    read: Callable[[int], tuple[EncodedImage, Label]]
    name_of: Callable[[int], str]
    label_of: Callable[[int], Label]
    size_of: Callable[[int], int] = lambda index: -1
    labels_in_memory: bool = False  # else sizes change with the labels too
    sizes_in_memory: bool = True  # else each is a look at the disk
    multi_label: bool = False
    data: str = ''
    split: str = ''

    def __len__(self) -> int:
        return self.count

    @property
    def label_shape(self) -> tuple[int, ...]:
        """() for a class number, (k,) for a row over the classes."""
        return (len(self.class_names),) if self.multi_label else ()

    @functools.cached_property
    def labels(self) -> Int[np.ndarray, 'n'] | Int[np.ndarray, 'n k']:
        """Every label: class numbers (n), or rows of 0 and 1 (n k)."""
        return self.read_labels(range(self.count)).astype(np.int32)

    def read_names(self, indices: Sequence[int]) -> list[str]:
        return [*map(self.name_of, indices)]

    def read_labels(self, indices: Sequence[int]) -> Int[np.ndarray, 'n'] | Int[np.ndarray, 'n k']:
        return np.array(_map(self.label_of, indices))

    def read_sizes(self, indices: Sequence[int]) -> Int[np.ndarray, 'n']:
        return np.array(_map(self.size_of, indices), np.int64)


def _map(function: Callable[[int], Any], indices: Sequence[int]) -> list[Any]:
    """Calls a function for each index, in 16 threads: each call may wait for a disk."""
    parts = [indices[i : i + 256] for i in range(0, len(indices), 256)]
    with futures.ThreadPoolExecutor(16) as pool:
        results = pool.map(lambda part: [*map(function, part)], parts)
        return [*itertools.chain.from_iterable(results)]


Splits = dict[str, Callable[[], Source]]  # a function that opens it, for each split
# Your own data: a function that opens the split of a name (sources/arrays.py: images in memory).
DataFunction = Callable[[str], Source]


def labelled_source(
    images: Sequence[Any],
    labels: Sequence[int] | np.ndarray,
    class_names: Sequence[str],
    *,
    read: Callable[[Any], EncodedImage] | None = None,
    name_of: Callable[[Any], str] = str,
    size_of: Callable[[Any], int] = lambda image: -1,
) -> Source:
    """Makes a source of images whose labels are in memory.

    Args:
      images: Paths of files, or whatever `read` takes.
      labels: Class numbers (n), or multi-label 0 and 1 for each class (n, k), see `multi_hot`.
      class_names: The names of the classes, in the order of their numbers.
      read: Returns the encoded file or the pixels of an image; reads a file by default.
      name_of: Returns the name of an image in messages.
      size_of: Returns a number that changes with an image; files have their sizes.
    """
    labels = np.asarray(labels)
    read_image, read_size = (read, size_of) if read else (read_file, _file_size)
    return Source(
        count=len(labels),
        class_names=tuple(class_names),
        read=lambda i: (read_image(images[i]), labels[i]),
        name_of=lambda i: name_of(images[i]),
        label_of=lambda i: labels[i],
        size_of=lambda i: read_size(images[i]),
        labels_in_memory=True,
        sizes_in_memory=read is not None,
        multi_label=labels.ndim == 2,
    )


def multi_hot(classes: Sequence[Sequence[int]], num_classes: int) -> Int[np.ndarray, 'n k']:
    """Returns a row of 0 and 1 for each list of class numbers."""
    rows = np.zeros((len(classes), num_classes), np.int8)
    for row, numbers in zip(rows, classes, strict=True):
        row[list(numbers)] = 1
    return rows


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Returns the bytes of a regular file. A pipe or a device is rejected, not waited for."""
    at_once = getattr(os, 'O_NONBLOCK', 0)  # Windows does not have it
    with open(path, 'rb', opener=lambda name, flags: os.open(name, flags | at_once)) as file:
        require(stat.S_ISREG(os.fstat(file.fileno()).st_mode), 'not a regular file')
        return file.read()


def _file_size(path: str | os.PathLike[str]) -> int:
    """Returns the size of a file in bytes; -2 for a missing one."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -2


def select(source: Source, indices: Sequence[int] | np.ndarray) -> Source:
    """Returns the source that holds these images only, in this order."""
    chosen = np.asarray(indices)
    return _rearrange(source, len(chosen), lambda i: (source, int(chosen[i])))


def shuffle_once(source: Source) -> Source:
    """Returns the source in one random order, always the same, so that a slice is a fair sample."""
    return select(source, np.random.default_rng(0).permutation(len(source)))


def join(sources: Sequence[Source]) -> Source:
    """Returns the images of all sources, one source after the other; their classes are the same."""
    starts = [0, *itertools.accumulate(map(len, sources))]

    def place(i: int) -> tuple[Source, int]:
        number = bisect.bisect_right(starts, i) - 1
        return sources[number], i - starts[number]

    return dataclasses.replace(
        _rearrange(sources[0], starts[-1], place),
        labels_in_memory=all(source.labels_in_memory for source in sources),
        sizes_in_memory=all(source.sizes_in_memory for source in sources),
    )


def _rearrange(source: Source, count: int, place: Callable[[int], tuple[Source, int]]) -> Source:
    """Returns the source like this one whose image i is in another source, at another index."""

    def forward(field: str) -> Callable[[int], Any]:
        def call(i: int) -> Any:
            other, index = place(i)
            return getattr(other, field)(index)

        return call

    fields: dict[str, Any] = {
        name: forward(name) for name in ('read', 'name_of', 'label_of', 'size_of')
    }
    return dataclasses.replace(source, count=count, **fields)


_SLICE = re.compile(r'([^\[\]]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?')
_SPLIT = 'expected a name, or NAME[:90%], NAME[90%:], NAME[10:20], or several joined by +'


def take_split(split: str, whole: Callable[[str], Source], *, of: str) -> Source:
    """Selects the images of `NAME`, a slice `NAME[10%:200]`, or several of these joined by `+`.

    Args:
      split: The text.
      whole: Opens the split of a name.
      of: The name of the data in messages.

    Raises:
      UserError: If the text is of another form, a slice is empty, or the classes of joined splits
        differ.
    """
    parts = [_take_slice(text.strip(), split, whole, of) for text in split.split('+')]
    for part in parts[1:]:
        if (part.class_names, part.multi_label) != (parts[0].class_names, parts[0].multi_label):
            raise UserError(f'split {split!r} of {of}: its parts have different classes')
    return join(parts) if len(parts) > 1 else parts[0]


def split_names(split: str) -> list[str]:
    """Returns the names in a split, without their slices."""
    return [text.partition('[')[0].strip() for text in split.split('+')]


def _take_slice(text: str, split: str, whole: Callable[[str], Source], of: str) -> Source:
    match = _SLICE.fullmatch(text)
    if not match:
        raise UserError(f'split {split!r}: {_SPLIT}')
    name, *bounds = match.groups()
    source = whole(name)
    start, stop = (None if bound is None else _index(bound, len(source)) for bound in bounds)
    selected = range(len(source))[start:stop]
    if not selected:
        there = f'{name} has {counted(len(source), "image")}'
        raise UserError(f'split {text!r} of {of} is empty: {there}')
    return source if len(selected) == len(source) else select(source, selected)


def _index(bound: str, length: int) -> int:
    return round(int(bound[:-1]) * length / 100) if bound[-1] == '%' else int(bound)


_NUMBER = re.compile(r'[+-]?\d+(\.\d+)?')


def class_order(names: Iterable[str]) -> list[str]:
    """Sorts the names of classes: as numbers if all are numbers, else as text."""
    ordered = sorted(names)
    return sorted(ordered, key=float) if all(map(_NUMBER.fullmatch, ordered)) else ordered


def canonical_name(name: str) -> str:
    """Returns the same text for names that differ in case, Unicode form or amount of white space."""
    return ' '.join(unicodedata.normalize('NFKC', name).casefold().split())


def matched_names(names: Iterable[str], known: Sequence[str]) -> dict[str, str]:
    """Maps each given name to the one known name that looks the same (see `canonical_name`).

    Omits a name that looks like no known name, or like more than one.
    """
    by_form: dict[str, list[str]] = {}
    for name in known:
        by_form.setdefault(canonical_name(name), []).append(name)
    exact, matches = {*known}, dict[str, str]()
    for name in names:
        alike = [name] if name in exact else by_form.get(canonical_name(name), [])
        if len(alike) == 1:
            matches[name] = alike[0]
    return matches


@functools.cache
def warn_once(text: str) -> None:
    """Logs a warning, once in a program, however often the data are opened."""
    logging.warning('%s', text)


def relative_names(names: Sequence[str], data: str) -> list[str]:
    """Returns the names without the folder of the data, which may lie elsewhere another time."""
    path = pathlib.Path(data)
    inner, outer = (f'{folder}{os.sep}' for folder in (path, path.parent))
    start = len(inner)
    return [n[start:] if n.startswith(inner) else n.removeprefix(outer) for n in names]
