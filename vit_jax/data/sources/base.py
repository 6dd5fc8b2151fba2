"""What every kind of stored data becomes: a `Source`, labelled images at random access."""

import dataclasses
import decimal
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


def _unknown_sizes(indices: Sequence[int]) -> Int[np.ndarray, 'n']:
    return np.full(len(indices), -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """One split of a data set, whose images and labels are read on request.

    `read(i)` returns image i and its label; `read_names(indices)` names for messages;
    `read_labels(indices)` labels alone, which can be as slow as reading the images.
    `read_sizes(indices)` returns a number for each image that changes with it, and decodes nothing:
    the size of a file, or a checksum; -1 is unknown.
    `data` and `split` are what a configuration calls it (see `make_opener`).
    """

    count: int
    class_names: tuple[str, ...]
    read: Callable[[int], tuple[EncodedImage, Label]]
    read_names: Callable[[Sequence[int]], list[str]]
    read_labels: Callable[[Sequence[int]], np.ndarray]
    read_sizes: Callable[[Sequence[int]], np.ndarray] = _unknown_sizes
    labels_in_memory: bool = False  # else sizes change with the labels too
    sizes_in_memory: bool = True  # else each is a look at the disk
    multi_label: bool = False
    data: str = ''
    split: str = ''

    def __len__(self) -> int:
        return self.count

    def name_of(self, index: int) -> str:
        """The name of an image in messages."""
        return self.read_names([index])[0]

    @property
    def label_shape(self) -> tuple[int, ...]:
        """() for a class number, (k,) for a row over the classes."""
        return (len(self.class_names),) if self.multi_label else ()

    @functools.cached_property
    def labels(self) -> Int[np.ndarray, 'n'] | Int[np.ndarray, 'n k']:
        """Every label: class numbers (n), or rows of 0 and 1 (n k)."""
        return self.read_labels(range(self.count)).astype(np.int32)


@functools.cache
def warn_once(text: str) -> None:
    """Logs a warning, once in a program, however often the data are opened."""
    logging.warning('%s', text)


_NUMBER = re.compile(r'[+-]?\d+(\.\d+)?')
_AMOUNT = re.compile(r'[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?')
# Greek and Cyrillic letters that look like Latin ones, in either case; apostrophes and dashes.
_LATIN = str.maketrans('ονρаеорсухіѕјһтмквн’‘´`–—‑‒−', 'ovpaeopcyxisjhtmkbh' + "'" * 4 + '-' * 5)


def class_order(names: Iterable[str]) -> list[str]:
    """Sorts the names of classes: as numbers if all are numbers, else as text."""
    ordered = sorted(names)
    return sorted(ordered, key=float) if all(map(_NUMBER.fullmatch, ordered)) else ordered


def warn_of_similar_classes(where: str, names: Sequence[str]) -> None:
    """Warns of classes whose names a person reads as the same name.

    Such names differ in case, in their Unicode form, in characters that are not visible, in white
    space, in letters that look alike, or in how one number is written.
    """
    pairs = itertools.pairwise(sorted(names, key=canonical_name))
    similar = [_both(*pair) for pair in pairs if len({*map(canonical_name, pair)}) == 1]
    if similar:
        more = f' and {len(similar) - 5:,} more pairs' if len(similar) > 5 else ''
        text = f'{where}: classes with names that look the same: {", ".join(similar[:5])}{more}'
        warn_once(f'{text}; expected one spelling for each class')


def _both(one: str, other: str) -> str:
    """Shows two names, and their characters where they cannot be told apart."""
    text = f'{one!r} and {other!r}'
    return text if text.isascii() else f'{text} ({one!a}, {other!a})'


def matched_names(names: Iterable[str], known: Sequence[str]) -> dict[str, str]:
    """Maps each given name to the one known name that looks the same (see `canonical_name`).

    Omits a name that looks like no known name, or like more than one.
    """
    by_form: dict[str, list[str]] = {}
    for name in known:
        by_form.setdefault(canonical_name(name), []).append(name)
    exact, found = {*known}, dict[str, str]()
    for name in names:
        meant = [name] if name in exact else by_form.get(canonical_name(name), [])
        if len(meant) == 1:
            found[name] = meant[0]
    return found


def canonical_name(name: str) -> str:
    """Returns a name in one form for all names that a person reads as the same."""
    text = unicodedata.normalize('NFKC', name).casefold().translate(_LATIN)
    text = ''.join(c for c in text if c.isspace() or unicodedata.category(c)[0] != 'C')
    text = {'true': '1', 'false': '0'}.get(text, ' '.join(text.split()))
    return str((decimal.Decimal(text) + 0).normalize()) if _AMOUNT.fullmatch(text) else text


def relative_names(names: Sequence[str], data: str) -> list[str]:
    """The names without the folder of the data, which may lie elsewhere another time."""
    path = pathlib.Path(data)
    inner, outer = (f'{folder}{os.sep}' for folder in (path, path.parent))
    start = len(inner)
    return [n[start:] if n.startswith(inner) else n.removeprefix(outer) for n in names]


Splits = dict[str, Callable[[], Source]]
# One's own data: a function that opens the split of a name (sources/arrays.py: images in memory).
DataFunction = Callable[[str], Source]


def select(source: Source, indices: Sequence[int] | np.ndarray) -> Source:
    """The source that holds these images only, in this order."""
    chosen = np.asarray(indices)

    def there(indices: Sequence[int]) -> list[int]:
        return list(chosen[np.asarray(indices, int)].tolist())

    return dataclasses.replace(
        source,
        count=len(chosen),
        read=lambda i: source.read(int(chosen[i])),
        read_names=lambda indices: source.read_names(there(indices)),
        read_labels=lambda indices: source.read_labels(there(indices)),
        read_sizes=lambda indices: source.read_sizes(there(indices)),
    )


def joined(sources: Sequence[Source]) -> Source:
    """The images of all sources, one source after the other; their classes are the same."""
    lengths = [len(source) for source in sources]
    number_of = np.repeat(np.arange(len(sources)), lengths)
    index_within = np.concatenate([np.arange(length) for length in lengths])

    def gathered(name: str, indices: Sequence[int]) -> list[Any]:
        places, found = np.asarray(indices, int), dict[int, Any]()
        for number, source in enumerate(sources):
            rows = np.flatnonzero(number_of[places] == number).tolist()
            if rows:
                values = getattr(source, name)(index_within[places[rows]].tolist())
                found.update(zip(rows, values, strict=True))
        return [found[row] for row in range(len(places))]

    return dataclasses.replace(
        sources[0],
        count=len(number_of),
        read=lambda i: sources[number_of[i]].read(int(index_within[i])),
        read_names=lambda indices: gathered('read_names', indices),
        read_labels=lambda indices: np.array(gathered('read_labels', indices)),
        read_sizes=lambda indices: np.array(gathered('read_sizes', indices), np.int64),
        labels_in_memory=all(source.labels_in_memory for source in sources),
        sizes_in_memory=all(source.sizes_in_memory for source in sources),
    )


_SPLIT = 'expected a name, or NAME[:90%], NAME[90%:], NAME[10:20], or several joined by +'


def take_split(split: str, whole: Callable[[str], Source], *, of: str) -> Source:
    """Selects the images of `NAME`, a slice `NAME[10%:200]`, or several of these joined by `+`.

    `whole` opens the split of a name, `of` names the data in messages. Raises UserError for an
    empty slice, and for splits of different classes that are joined.
    """
    parts = [_part(text.strip(), split, whole, of) for text in split.split('+')]
    for part in parts[1:]:
        if (part.class_names, part.multi_label) != (parts[0].class_names, parts[0].multi_label):
            raise UserError(f'split {split!r} of {of}: its parts have different classes')
    return joined(parts) if len(parts) > 1 else parts[0]


def split_names(split: str) -> list[str]:
    """Returns the names in it, without their slices."""
    return [text.partition('[')[0].strip() for text in split.split('+')]


def _part(text: str, split: str, whole: Callable[[str], Source], of: str) -> Source:
    match = re.fullmatch(r'([^\[\]]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?', text)
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


def in_fixed_order(source: Source) -> Source:
    """The source in one random order, the same every time, so that a slice is a fair sample."""
    return select(source, np.random.default_rng(0).permutation(len(source)))


def labelled_source(
    images: Sequence[Any],
    labels: Sequence[Any],
    class_names: Sequence[str],
    *,
    read: Callable[[Any], EncodedImage] | None = None,
    name_of: Callable[[Any], str] = str,
    size_of: Callable[[Any], int] | None = None,
    multi_label: bool = False,
) -> Source:
    """Images with labels in memory: class numbers, or if `multi_label` lists.

    Images are paths of files, or what `read` and `size_of` take.
    """
    numbers = None if multi_label else np.array(labels, np.int32)
    read_image = read or read_file

    def label(i: int) -> Label:
        if not multi_label:
            return int(labels[i])
        row = np.zeros(len(class_names), np.int32)
        row[list(labels[i])] = 1
        return row

    def read_labels(indices: Sequence[int]) -> np.ndarray:
        if numbers is not None:
            return numbers[np.asarray(indices, int)]
        return np.array([label(i) for i in indices], np.int32)

    def read_sizes(indices: Sequence[int]) -> Int[np.ndarray, 'n']:
        if read is None:
            return _sizes([images[i] for i in indices])
        return np.array([-1 if size_of is None else size_of(images[i]) for i in indices], int)

    return Source(
        count=len(labels),
        class_names=tuple(class_names),
        read=lambda i: (read_image(images[i]), label(i)),
        read_names=lambda indices: [name_of(images[i]) for i in indices],
        read_labels=read_labels,
        read_sizes=read_sizes,
        labels_in_memory=True,
        sizes_in_memory=read is not None,
        multi_label=multi_label,
    )


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Returns the bytes of a regular file. A pipe or a device is rejected, not waited for."""
    with open(path, 'rb', opener=_open_at_once) as file:
        require(stat.S_ISREG(os.fstat(file.fileno()).st_mode), 'not a regular file')
        return file.read()


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, 'O_NONBLOCK', 0))  # which Windows has not


_LOOKS = 16  # at once: a file system in a network takes its time over each


def _sizes(paths: Sequence[str | pathlib.Path]) -> Int[np.ndarray, 'n']:
    """The sizes of files in bytes, -2 of one that is not there."""

    def size(path: str | pathlib.Path) -> int:
        try:
            return os.stat(path).st_size
        except OSError:
            return -2

    parts = [paths[i : i + 256] for i in range(0, len(paths), 256)]
    with futures.ThreadPoolExecutor(_LOOKS) as pool:
        found = pool.map(lambda part: [size(path) for path in part], parts)
        return np.array([number for part in found for number in part], np.int64)
