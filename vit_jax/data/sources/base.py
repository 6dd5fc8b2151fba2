"""`Source`, the interface of all data sets: labeled images with random access.

The functions of this module take and return sources: they slice, shuffle and join them, or replace
labels with the labels of a JSON file (ReaL, Beyer et al. 2020) or with class numbers of a model.
"""

import collections
import contextlib
import dataclasses
import fractions
import functools
import itertools
import logging
import os
import pathlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np

from vit_jax.base import Bool, Int, UserError, files, plural, require, usable
from vit_jax.base.ranges import BLOCK_BYTES, RangeReader, Ranges
from vit_jax.base.storage import is_remote
from vit_jax.data import imagenet_classes

Label = int | np.integer | np.ndarray  # a class number; if multi-label, a row of 0 and 1
EncodedImage = bytes | memoryview | np.ndarray  # bytes of an encoded file, or uint8 pixels


class Places(NamedTuple):
    """Where images lie in files that are read in blocks of neighbors.

    Images with the same file and start are stored together, and are always read together.
    """

    reader: RangeReader
    file: Int[np.ndarray, 'n']
    start: Int[np.ndarray, 'n']
    length: Int[np.ndarray, 'n']

    def select(self, indices: Int[np.ndarray, 'm']) -> 'Places':
        return Places(self.reader, self.file[indices], self.start[indices], self.length[indices])

    @property
    def is_first(self) -> Bool[np.ndarray, 'n']:
        """Whether each image is the first one that is stored at its place."""
        is_first = np.ones(len(self.file), bool)
        is_first[1:] = (self.file[1:] != self.file[:-1]) | (self.start[1:] != self.start[:-1])
        return is_first

    @property
    def rows(self) -> Int[np.ndarray, 'n']:
        """The number of each image among those that are stored together."""
        numbers = np.arange(len(self.file))
        return numbers - np.maximum.accumulate(np.where(self.is_first, numbers, 0))

    @property
    def num_bytes(self) -> int:
        return int(self.length[self.is_first].sum())

    def find_blocks(self, most_images: int) -> Int[np.ndarray, 'b']:
        """Returns the first image of each block: neighbors within BLOCK_BYTES of a file.

        A block has at most `most_images` images, unless more are stored together.
        """
        numbers = np.arange(len(self.file))
        starts_block = np.ones(len(self.file), bool)
        starts_block[1:] = (
            (self.file[1:] != self.file[:-1])
            | (self.start[1:] // BLOCK_BYTES != self.start[:-1] // BLOCK_BYTES)
            | (self.start[1:] < self.start[:-1])
        )
        in_block = numbers - np.maximum.accumulate(np.where(starts_block, numbers, 0))
        part = (in_block - self.rows) // most_images  # equal for images that are stored together
        starts_block[1:] |= part[1:] != part[:-1]
        return np.flatnonzero(starts_block)

    def request(self, indices: Int[np.ndarray, 'm']) -> Ranges:
        """Requests these images together, before `Source.read` reads them."""
        return self.reader.request(*self.select(indices)[1:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A split of a data set. Images and labels are read lazily, from several threads.

    `read(i)` returns image i and its label. `name_of(i)` returns its name for messages.
    `label_of(i)` returns only its label, which may be as slow as reading the image. `size_of(i)`
    returns a number that changes with the image, such as the size of its file or a checksum, or -1
    if it is unknown; it decodes nothing. Resumed runs detect replaced images by this number.
    `places` is set if the images are read in blocks. `data` and `split` are the names in the
    configuration (see `make_opener`).
    """

    count: int  # number of images
    class_names: tuple[str, ...]  # in the order of class numbers; (): images without classes
    read: Callable[[int], tuple[EncodedImage, Label]]
    name_of: Callable[[int], str]
    label_of: Callable[[int], Label]
    size_of: Callable[[int], int] = lambda index: -1
    labels_in_memory: bool = False  # False: read from the disk, and `size_of` changes with them
    sizes_in_memory: bool = True  # False: `size_of` accesses the disk
    multi_label: bool = False  # True: labels are rows of 0 and 1, not class numbers
    places: Places | None = None
    # Writes the index of all shards of the split next to them; returns the number of written files.
    write_index: Callable[[], int] | None = None
    data: str = ''
    split: str = ''

    def __len__(self) -> int:
        return self.count

    @property
    def label_shape(self) -> tuple[int, ...]:
        """() for class numbers; (k,) for multi-label rows over k classes."""
        return (len(self.class_names),) if self.multi_label else ()

    @functools.cached_property
    def labels(self) -> Int[np.ndarray, 'n'] | Int[np.ndarray, 'n k']:
        """All labels, as class numbers (n) or as multi-label rows of 0 and 1 (n k)."""
        kind = np.int8 if self.multi_label else np.int32
        return self.read_labels(range(self.count)).astype(kind, copy=False)

    def read_names(self, indices: Sequence[int]) -> list[str]:
        """Returns the names of these images."""
        return [*map(self.name_of, indices)]

    def read_labels(self, indices: Sequence[int]) -> Int[np.ndarray, 'n'] | Int[np.ndarray, 'n k']:
        """Reads the labels of these images, in threads if they are not in memory."""
        apply = map if self.labels_in_memory else _map_in_threads
        labels = [*apply(self.label_of, indices)]
        array = np.array(labels)
        if array.dtype.kind not in 'iub':
            for label in labels:  # names the first one that is wrong
                check_label(label, self.data)
        return array

    def read_sizes(self, indices: Sequence[int]) -> Int[np.ndarray, 'n']:
        """Reads the sizes (see `size_of`) of these images in threads."""
        return np.array(_map_in_threads(self.size_of, indices), np.int64)


def check_label(label: Any, data: str) -> None:
    """Raises UserError unless a label is a class number or a row of integers."""
    if not isinstance(label, int | np.integer) and np.asarray(label).dtype.kind not in 'iub':
        raise UserError(
            f'{data}: got the label {label!r:.60}; expected class numbers, or rows of 0 and 1'
        )


def _map_in_threads(function: Callable[[int], Any], indices: Sequence[int]) -> list[Any]:
    """Calls a function for each index in 16 threads, because each call may wait for a disk."""
    parts = [indices[i : i + 256] for i in range(0, len(indices), 256)]
    with futures.ThreadPoolExecutor(16) as pool:
        results = pool.map(lambda part: [*map(function, part)], parts)
        return [*itertools.chain.from_iterable(results)]


Splits = dict[str, Callable[[], Source]]  # maps the name of a split to a function that opens it
# Custom data: a function that opens a split by name (see arrays.py for images in memory).
DataFunction = Callable[[str], Source]


class SourceKind(NamedTuple):
    """A kind of stored data. To add one, define KIND in a new module and list it in opening.py."""

    expected: str  # the form of `config.data`, for messages and help
    recognizes: Callable[[str], bool]  # returns whether `config.data` is of this kind
    # Takes `config.data` and, with `has_label_columns`, the name of a label column.
    open_splits: Callable[..., Splits]
    has_label_columns: bool = False  # whether the label column can be chosen
    reads_buckets: bool = False  # whether `config.data` can be in a bucket


def labeled_source(
    images: Sequence[Any],
    labels: Sequence[int] | np.ndarray,
    class_names: Sequence[str],
    *,
    read: Callable[[Any], EncodedImage] | None = None,
    name_of: Callable[[Any], str] | None = None,
    size_of: Callable[[Any], int] = lambda image: -1,
) -> Source:
    """Makes a source of images whose labels are in memory.

    Args:
      images: The path of each image, or whatever `read` takes.
      labels: Class numbers (n), or multi-label rows of 0 and 1 (n, k), as from `multi_hot`.
      class_names: The names of the classes in the order of their numbers.
      read: Returns the encoded file or the pixels of an image; by default reads a file.
      name_of: Returns the name of an image for messages; by default its path.
      size_of: Returns a number that changes with an image (see `Source`); not used without `read`,
        because the size of the file is used.
    """
    labels = np.asarray(labels)
    read_image, read_size = (read, size_of) if read else (read_image_file, _file_size)
    to_name = name_of or (str if read else files.decode_path)
    return Source(
        count=len(labels),
        class_names=tuple(class_names),
        read=lambda i: (read_image(images[i]), labels[i]),
        name_of=lambda i: to_name(images[i]),
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


def read_image_file(path: str | os.PathLike[str]) -> bytes:
    """Reads the bytes of a file."""
    return files.read_file(path, files.Limit.IMAGE_BYTES)


def _file_size(path: str | os.PathLike[str]) -> int:
    """Returns the size of a file in bytes, or -2 if it cannot be accessed."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -2


def select(source: Source, indices: Sequence[int] | np.ndarray) -> Source:
    """Returns a source with only these images, in this order."""
    return _gather([source], np.broadcast_to(0, len(indices)), np.asarray(indices))


def shuffle_once(source: Source) -> Source:
    """Shuffles a source with a fixed seed, so that a slice of it is a random sample."""
    return select(source, np.random.default_rng(0).permutation(len(source)))


def join(sources: Sequence[Source]) -> Source:
    """Concatenates sources, which must have the same classes."""
    counts = [*map(len, sources)]
    indices = np.concatenate([np.arange(count) for count in counts])
    return _gather(sources, np.repeat(np.arange(len(sources)), counts), indices)


def _gather(
    sources: Sequence[Source], numbers: Int[np.ndarray, 'n'], indices: Int[np.ndarray, 'n']
) -> Source:
    """Returns the source whose image i is image `indices[i]` of `sources[numbers[i]]`."""

    def forward(field: str) -> Callable[[int], Any]:
        return lambda i: getattr(sources[numbers[i]], field)(int(indices[i]))

    fields: dict[str, Any] = {
        name: forward(name) for name in ('read', 'name_of', 'label_of', 'size_of')
    }
    fields['labels_in_memory'] = all(source.labels_in_memory for source in sources)
    fields['sizes_in_memory'] = all(source.sizes_in_memory for source in sources)
    fields['places'] = _gather_places(sources, numbers, indices)
    return dataclasses.replace(sources[0], count=len(indices), **fields)


def _gather_places(
    sources: Sequence[Source], numbers: Int[np.ndarray, 'n'], indices: Int[np.ndarray, 'n']
) -> Places | None:
    """Gathers places as `_gather`; None unless all sources lie in the same files."""
    places = [source.places for source in sources if source.places is not None]
    if len(places) < len(sources) or any(one.reader is not places[0].reader for one in places):
        return None
    firsts = np.cumsum([0, *map(len, sources[:-1])])
    joined = (np.concatenate(parts) for parts in zip(*(one[1:] for one in places), strict=True))
    return Places(places[0].reader, *joined).select(firsts[numbers] + indices)


def request_ahead(source: Source, *, size: int = 1024) -> Iterator[range]:
    """Yields parts of the numbers of all images, in order.

    If the images are in a bucket, those of a part and of the next part are requested together.
    """
    parts = [range(len(source))[first : first + size] for first in range(0, len(source), size)]
    if source.places is None:
        yield from parts
        return
    requested = collections.deque[Ranges]()
    try:
        for part, following in itertools.zip_longest(parts, parts[1:]):
            if not requested:
                requested.append(source.places.request(np.array(part)))
            if following is not None:
                requested.append(source.places.request(np.array(following)))
            yield part
            requested.popleft().release()
    finally:
        for ranges in requested:
            ranges.release()


_SLICE = re.compile(r'([^\[\]]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?')
_SPLIT = 'expected NAME, NAME[:90%], NAME[90%:], NAME[10:20], or several of them joined by +'


def take_split(split: str, whole: Callable[[str], Source], *, of: str) -> Source:
    """Opens a split `NAME`, a slice such as `NAME[10%:200]`, or several of them joined by `+`.

    Args:
      split: The split, slice or sum.
      whole: A function that opens a whole split by name.
      of: The name of the data for messages.

    Raises:
      UserError: If `split` has another form, a slice is empty, or the classes of joined splits
        differ.
    """
    parts = [_take_slice(text.strip(), split, whole, of) for text in split.split('+')]
    for part in parts[1:]:
        if (part.class_names, part.multi_label) != (parts[0].class_names, parts[0].multi_label):
            raise UserError(f'{of}: the parts of split {split!r} have different classes')
    return join(parts) if len(parts) > 1 else parts[0]


def split_names(split: str) -> list[str]:
    """Returns the names in `split` without slices: `['train']` for `train[:90%]`."""
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
        images = plural(len(source), 'image')
        raise UserError(f'{of}: split {text!r} is empty; {name} has {images}')
    return source if len(selected) == len(source) else select(source, selected)


def _index(bound: str, length: int) -> int:
    return round(int(bound[:-1]) * length / 100) if bound[-1] == '%' else int(bound)


_NUMBER = re.compile(r'[+-]?\d+(\.\d+)?')


def sort_class_names(names: Iterable[str]) -> list[str]:
    """Sorts class names, numerically if all of them are numbers."""
    ordered = sorted(names)
    return sorted(ordered, key=float) if all(map(_NUMBER.fullmatch, ordered)) else ordered


def canonicalize_name(name: str) -> str:
    """Normalizes case, Unicode form and white space of a name, for comparisons."""
    return ' '.join(unicodedata.normalize('NFKC', name).casefold().split())


# Invisible letters that Unicode does not count as format characters: joiners, fillers, selectors.
_INVISIBLE = {'\u034f', '\u115f', '\u1160', '\u2800', '\u3164', '\uffa0', '\0'}
_INVISIBLE |= {chr(code) for code in range(0xFE00, 0xFE10)}


def warn_of_similar_classes(class_names: Sequence[str], data: str) -> None:
    """Logs a warning if classes have similar names, such as `cat` and `Cat`."""
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(class_names):
        groups.setdefault(normalize_look(name), []).append(name)
    pairs = [group for group in groups.values() if len(group) > 1]
    if pairs:
        names = ' and '.join(map(ascii, pairs[0]))
        more = f' ({len(pairs) - 1:,} more such classes)' if len(pairs) > 1 else ''
        warn_once(f'{data}: {names} are different classes with similar names{more}')


def normalize_look(name: str) -> str:
    """Normalizes differences that a reader may overlook, such as case, and `01` instead of `1`."""
    letters = canonicalize_name(name).replace('\u2044', '/')  # NFKC spells one half as 1\u20442
    text = ''.join(c for c in letters if unicodedata.category(c) != 'Cf' and c not in _INVISIBLE)
    text = {'true': '1', 'false': '0'}.get(text, text)
    if re.fullmatch(r'[+-]?[\d._/]{1,99}(e[+-]?\d)?', text):
        with contextlib.suppress(ValueError, ZeroDivisionError):
            return str(fractions.Fraction(text))
    return text


def match_names(names: Iterable[str], known: Sequence[str]) -> dict[str, str]:
    """Maps names to the known names with the same canonical name.

    Prefers an identical known name. Omits names with no match or with several matches.
    """
    count = collections.Counter(map(canonicalize_name, known))
    by_form = {form: name for name in known if count[form := canonicalize_name(name)] == 1}
    exact = {name: name for name in known}
    matches = {name: exact.get(name) or by_form.get(canonicalize_name(name)) for name in names}
    return {name: match for name, match in matches.items() if match is not None}


@functools.cache
def warn_once(text: str) -> None:
    """Logs a warning once per process, even if the data is opened several times."""
    logging.warning('%s', text)


def make_names_relative(names: Sequence[str], data: str) -> list[str]:
    """Removes the folder of the data from file names, so that they do not change if it moves."""
    if data.startswith('hf:'):
        return [re.sub('^hf://[^@]+@[^/]+/', '', name) for name in names]
    if is_remote(data):
        is_pattern = '{' in data or data.endswith(('.tar', '.parquet'))
        folder = os.path.dirname(data.partition('{')[0]) if is_pattern else data.rstrip('/')
        return [name.removeprefix(f'{folder}/') for name in names]
    path = pathlib.Path(data)
    inner, outer = (f'{folder}{os.sep}' for folder in (path, path.parent))
    start = len(inner)
    return [n[start:] if n.startswith(inner) else n.removeprefix(outer) for n in names]


def replace_labels(source: Source, path: str) -> Source:
    """Replaces the labels by the multi-labels of a JSON file, over the same classes.

    The file has a list of class numbers for each image, in one of two forms. A list, such as ReaL's
    `real.json`, is in the order of the sorted file names without folders. An object has file names
    as keys: `{"val/n01440764/ILSVRC2012_val_00000293.JPEG": [0]}`; folders and extension are
    optional.

    Raises:
      UserError: If an image has no entry, several images have the same entry, or an entry is not a
        list of class numbers.
    """
    with usable(path, 'a JSON file of labels'):
        entries = files.read_json(path)
    names = [_as_path(name) for name in source.read_names(range(len(source)))]
    if isinstance(entries, list):
        require(len(names) == len(entries), f'{path}: {len(entries)} items for {len(names)} images')
        if not all(name.suffix for name in names):  # TFDS and arrays have another order
            raise UserError(f'{path}: got a list; expected an object with keys like {names[0]}')
        in_order = sorted(name.name for name in names)
        entries = dict(zip(in_order, entries, strict=True))
    require(isinstance(entries, dict), f'{path}: expected a list or an object (keys: file names)')
    entries = {str(_as_path(key)): classes for key, classes in entries.items()}
    keys = [_find_key(name, entries, path) for name in names]
    key, uses = collections.Counter(keys).most_common(1)[0]
    require(uses == 1, f'{path}: entry {key!r} matches {uses} images; add folders to the names')
    numbers = range(len(source.class_names))
    for key in keys:
        entry = entries[key]
        if not isinstance(entry, list) or not all(type(n) is int and n in numbers for n in entry):
            legal = f'a list of class numbers, 0 to {len(numbers) - 1}'
            raise UserError(f'{path}: entry {key!r} is {entry!r}; expected {legal}')
    rows = multi_hot([entries[key] for key in keys], len(numbers))
    return dataclasses.replace(
        source,
        read=lambda i: (source.read(i)[0], rows[i]),
        label_of=lambda i: rows[i],
        labels_in_memory=True,
        multi_label=True,
    )


def _as_path(name: str) -> pathlib.PurePath:
    """Converts a name to a path; the name of a member of a tar file is FILE.tar:MEMBER."""
    return pathlib.PurePath(name.replace(':', '/'))


def _find_key(name: pathlib.PurePath, entries: dict[str, object], path: str) -> str:
    """Returns the key of an image: the key with the most folders of its name."""
    for start in range(len(name.parts)):
        part = pathlib.PurePath(*name.parts[start:])
        for key in str(part), str(part.with_suffix('')):
            if key in entries:
                return key
    raise UserError(f'{path}: no entry for image {name}')


def drop_unlabeled(source: Source) -> Source:
    """Drops the images without a class, because an evaluation cannot count them."""
    if not source.multi_label:
        return source
    has_label = source.labels.any(axis=1)
    if has_label.all():
        return source
    require(bool(has_label.any()), f'labels: none of {len(source)} images has a label')
    name = source.name_of(int(has_label.argmin()))
    count = plural(int((~has_label).sum()), 'image')
    logging.warning('%s without a label skipped, such as %s', count, name)
    return select(source, np.flatnonzero(has_label))


def renumber_classes(source: Source, class_names: Sequence[str]) -> Source:
    """Renumbers the classes of a source as a model numbers them, by name (see `match_names`).

    WordNet ids (n01440764) match ImageNet's classes. Images are skipped with a warning if the model
    has none of their classes.

    Args:
      source: The images.
      class_names: The classes of the model.

    Raises:
      UserError: If no class matches, or a name stands for two classes of the model.
    """
    if all(re.fullmatch(r'n\d{8}', name) for name in source.class_names):
        class_names = imagenet_classes.ids() if imagenet_classes.match(class_names) else class_names
    if source.class_names == tuple(class_names):
        return source
    known = match_names(source.class_names, class_names)
    if not known:
        both = f'data {_format_names(source.class_names)}; model {_format_names(class_names)}'
        raise UserError(f'the data and the model have no class in common: {both}')
    uses = collections.Counter(class_names)
    for name in known.values():
        require(uses[name] == 1, f'the model has {uses[name]} classes named {name!r}; expected one')
    number_of = {name: number for number, name in enumerate(class_names)}
    result = _renumber(source, {a: number_of[b] for a, b in known.items()}, class_names)
    if unknown := [name for name in source.class_names if name not in known]:
        count = f'{len(unknown)} of {len(source.class_names)} classes'
        images = plural(len(source) - len(result), 'image')
        text = f'skipped {images}: the model lacks {count} of the data, {_format_names(unknown)}'
        logging.warning('%s', text)
    return result


def keep_classes(source: Source, class_names: Sequence[str]) -> Source:
    """Returns the images of only these classes, with class numbers in this order.

    Raises UserError if no image is left.
    """
    number_of = {name: number for number, name in enumerate(class_names)}
    return _renumber(source, number_of, class_names)


def _renumber(source: Source, number_of: dict[str, int], class_names: Sequence[str]) -> Source:
    """Replaces class numbers by `number_of`, and drops images that have only other classes.

    A multi-label image keeps its known classes. Images without any class are kept.
    """
    numbers = np.array([number_of.get(name, -1) for name in source.class_names])
    is_known = numbers >= 0

    def convert(label: Any) -> Label:
        if not source.multi_label:
            return numbers[label]
        row = np.zeros(len(class_names), label.dtype)
        row[numbers[is_known]] = label[is_known]
        return row

    def read(index: int) -> tuple[EncodedImage, Label]:
        image, label = source.read(index)
        return image, convert(label)

    result = dataclasses.replace(
        source,
        class_names=tuple(class_names),
        read=read,
        label_of=lambda i: convert(source.label_of(i)),
    )
    if is_known.all():
        return result

    labels = source.labels
    if source.multi_label:
        is_kept = labels[:, is_known].any(axis=1) | ~labels.any(axis=1)
    else:
        is_kept = is_known[labels]
    require(bool(is_kept.any()), f'classes: no image has any of {_format_names(class_names)}')
    return select(result, np.flatnonzero(is_kept))


def _format_names(names: Sequence[str]) -> str:
    """Formats the first three names, with dots if there are more."""
    return ', '.join([*map(repr, names[:3]), *(['...'] if len(names) > 3 else [])])
