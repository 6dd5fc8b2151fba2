"""Finds the images in shards: large files that contain many images, on a disk or in a bucket.

Shards are read once from start to end; the processes of a job share this work. The index of a
shard has the place, the checksum and the class numbers of each image. It is read from the folder
next to the shards, where `vit_jax.index` writes it, or from the user's cache. A shard that was
replaced gets a new index.
"""

import dataclasses
import functools
import hashlib
import io
import itertools
import json
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from vit_jax.base import (
    Int,
    MissingFile,
    TransientError,
    UInt8,
    UserError,
    make_folder,
    plural,
    require,
    usable,
    write_bytes,
)
from vit_jax.base.buckets import (
    BucketFile,
    BucketReader,
    list_folder,
    read_bucket_file,
    write_bucket_file,
)
from vit_jax.base.files import cache_folder, decode_path, open_file, read_range, read_text
from vit_jax.base.npz import open_npz
from vit_jax.base.progress import progress_bar
from vit_jax.base.ranges import RangeReader
from vit_jax.base.storage import is_remote
from vit_jax.data.sources.base import EncodedImage, Label, Places, Source, multi_hot, warn_once
from vit_jax.distributed.processes import gather_texts, keep_alive, share_work

INDEX_FOLDER = '_vit_jax_index'  # next to the shards
_VERSION = 3
_AT_ONCE = 8  # shards that are read at once
SPLIT_WORDS = 'train', 'training', 'val', 'validation', 'valid', 'test', 'testing', 'eval'


class Sample(NamedTuple):
    """An image of a shard: its name there, its place in bytes, its checksum and class numbers."""

    name: str
    start: int
    length: int
    checksum: int  # CRC-32C
    classes: tuple[int, ...]


# Takes the path of a shard, and the open shard.
Scan = Callable[[str, io.BufferedIOBase], Iterator[Sample]]


class LocalFiles(RangeReader):
    """Files on a disk.

    `root` is the folder that has all files. `states` are their sizes, and numbers that change if a
    file is replaced.
    """

    def __init__(self, root: str, paths: Sequence[str]):
        self.root = root
        self.paths = paths
        self.states = [_state(os.stat(path)) for path in paths]
        super().__init__([size for size, _ in self.states])

    def open(self, number: int, *, in_parts: bool = False) -> io.BufferedIOBase:
        file: io.BufferedIOBase = open_file(self.paths[number])
        return file

    def fetch(self, number: int, start: int, stop: int) -> memoryview:
        try:
            descriptor = os.open(self.paths[number], os.O_RDONLY)
        except (FileNotFoundError, PermissionError) as error:  # no error of this image alone
            raise TransientError(f'{self.paths[number]}: {error.strerror}') from error
        try:
            if _state(os.fstat(descriptor)) != self.states[number]:  # no error of this image alone
                raise TransientError(
                    f'{self.paths[number]}: was replaced; run the same command again'
                )
            return memoryview(read_range(descriptor, stop - start, start))
        finally:
            os.close(descriptor)


def _state(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


class BucketFiles(BucketReader):
    """Files in a bucket, as LocalFiles."""

    def __init__(self, root: str, files: Sequence[BucketFile]):
        super().__init__(files)
        self.root = root
        self.paths = [file.url for file in files]
        self.states = [(file.size, file.version) for file in files]


Files = LocalFiles | BucketFiles
# Returns the files of a split, and their numbers.
FileOpener = Callable[[str], tuple[Files, Sequence[int]]]


def file_opener(data: str, root: str, paths: dict[str, list[str]]) -> FileOpener:
    """Returns a function that opens the files of a split.

    Args:
      data: The name of the data for messages.
      root: The folder that has all files.
      paths: The files of each split.
    """
    if not is_remote(root):

        def open_local(split: str) -> tuple[Files, Sequence[int]]:
            _require_all(data, paths[split], filter(os.path.isfile, paths[split]))
            return LocalFiles(root, paths[split]), range(len(paths[split]))

        return open_local

    everything = [path for of_split in paths.values() for path in of_split]
    folders = sorted({*map(os.path.dirname, everything)})
    listed = {file.url: file for folder in folders for file in list_folder(folder)[0]}
    if not listed.keys() & {*everything}:
        count = plural(len(everything), 'shard')
        raise MissingFile(f'{data}: none of its {count} exists, such as {everything[0]}')
    files = BucketFiles(root, [listed[path] for path in everything if path in listed])
    number_of = {path: number for number, path in enumerate(files.paths)}

    def open_remote(split: str) -> tuple[Files, Sequence[int]]:
        _require_all(data, paths[split], number_of)
        return files, [number_of[path] for path in paths[split]]

    return open_remote


def _require_all(data: str, paths: Sequence[str], existing: Iterable[str]) -> None:
    missing = sorted({*paths}.difference(existing))
    if missing:
        count = plural(len(missing), 'shard')
        raise MissingFile(f'{data}: {count} of {len(paths):,} missing, such as {missing[0]}')


def list_folders(
    root: str, is_listed: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, list[str]]]:
    """Yields the name and the file paths of a folder (with the name '') and of its subfolders.

    Args:
      root: The folder.
      is_listed: Returns whether a subfolder with this name is listed.
    """
    if is_remote(root):
        files, folders = list_folder(root)
        yield '', [file.url for file in files]
        for folder in folders:
            if is_listed(name := os.path.basename(folder)):
                yield name, [file.url for file in list_folder(folder)[0]]
    elif os.path.isdir(root):
        entries = [*os.scandir(root)]
        yield '', [entry.path for entry in entries if not entry.is_dir()]
        for entry in entries:
            if entry.is_dir() and is_listed(entry.name):
                yield entry.name, [os.path.join(entry.path, name) for name in os.listdir(entry)]


def split_of(path: str) -> str:
    """Returns the name of a split that is a word of a file name; `all` if there is none."""
    words = re.split(r'[^a-z]+', os.path.basename(path).lower())
    return next((word for word in words if word in SPLIT_WORDS), 'all')


def read_optional_text(path: str) -> str | None:
    """Reads a text file; returns None if it does not exist."""
    if is_remote(path):
        contents = read_bucket_file(path)
        return None if contents is None else contents.decode('utf-8-sig')
    if not os.path.isfile(path):
        return None
    with usable(path):
        return read_text(path)


@dataclasses.dataclass(frozen=True)
class Index:
    """The images of shards in order. Names and class numbers are concatenated in one array each."""

    names: UInt8[np.ndarray, 'm']
    name_ends: Int[np.ndarray, 'n']
    shard: Int[np.ndarray, 'n']
    start: Int[np.ndarray, 'n']
    length: Int[np.ndarray, 'n']
    checksum: Int[np.ndarray, 'n']
    classes: Int[np.ndarray, 'k']
    class_ends: Int[np.ndarray, 'n']

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> 'Index':
        """Makes the index of one shard."""
        samples = [*samples]
        names = [sample.name.encode('utf-8', 'surrogateescape') for sample in samples]
        classes = [number for sample in samples for number in sample.classes]
        return cls(
            names=np.frombuffer(b''.join(names), np.uint8),
            name_ends=np.cumsum([*map(len, names)], dtype=np.int64),
            shard=np.zeros(len(samples), np.int32),
            start=np.array([sample.start for sample in samples], np.int64),
            length=np.array([sample.length for sample in samples], np.int32),
            checksum=np.array([sample.checksum for sample in samples], np.int64),
            classes=np.array(classes, np.int32),
            class_ends=np.cumsum([len(sample.classes) for sample in samples], dtype=np.int64),
        )

    @classmethod
    def join(cls, parts: dict[int, 'Index']) -> 'Index':
        """Concatenates the indexes of shards by their numbers."""
        joined: dict[str, Any] = {
            field.name: np.concatenate([getattr(part, field.name) for part in parts.values()])
            for field in dataclasses.fields(cls)
        }
        counts = [*map(len, parts.values())]
        joined['shard'] = np.repeat(np.array([*parts], np.int32), counts)
        for ends, name in ('name_ends', 'names'), ('class_ends', 'classes'):
            sizes = [len(getattr(part, name)) for part in parts.values()]
            joined[ends] += np.repeat(np.cumsum([0, *sizes[:-1]]), counts)
        return cls(**joined)

    def __len__(self) -> int:
        return len(self.shard)

    def name(self, number: int) -> str:
        first = int(self.name_ends[number - 1]) if number else 0
        text = self.names[first : self.name_ends[number]].tobytes()
        return text.decode('utf-8', 'surrogateescape')

    def classes_of(self, number: int) -> list[int]:
        first = int(self.class_ends[number - 1]) if number else 0
        numbers: list[int] = self.classes[first : self.class_ends[number]].tolist()
        return numbers

    @property
    def num_classes_each(self) -> Int[np.ndarray, 'n']:
        """The number of classes of each image."""
        return np.diff(self.class_ends, prepend=0)

    @property
    def labels(self) -> Int[np.ndarray, 'n']:
        """The first class number of each image, or -1."""
        has_class = self.num_classes_each > 0
        labels = np.full(len(self), -1, np.int32)
        labels[has_class] = self.classes[(self.class_ends - self.num_classes_each)[has_class]]
        return labels


def load_index(
    files: Files,
    numbers: Sequence[int],
    scan: Scan,
    *,
    form: str,
    data: str,
    in_parts: bool = False,
    expected: str = 'images',
) -> Index:
    """Reads the index of each shard, or makes it by reading the shard.

    Args:
      files: Files.
      numbers: The files that are the shards of this split.
      scan: Finds the images of a shard.
      form: The format, and the options of `scan`.
      data: The name of the data for messages.
      in_parts: Whether `scan` reads only small parts of a shard.
      expected: What shards contain, for messages.

    Raises:
      UserError: If a shard cannot be read, or if there are no images.
    """
    names = {number: _part_name(files, number, form) for number in numbers}
    cached = {number: _cached(files, name) for number, name in names.items()}
    stored = _read_parts_next_to(files, names)
    for number in numbers:
        if number not in stored and cached[number].is_file():
            stored[number] = _read_part(cached[number])

    def make(number: int) -> bytes:
        keep_alive()
        if number in stored:  # in this process, but not in another one
            return _to_npz(stored[number])
        with usable(files.paths[number]), files.open(number, in_parts=in_parts) as file:
            contents = _to_npz(Index.of(scan(files.paths[number], file)))
        _write_part(cached[number], contents)
        return contents

    def make_all(keys: Sequence[str]) -> Iterator[bytes]:
        with futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            yield from _show_progress(pool.map(make, map(int, keys)), len(keys))

    missing = [number for number in numbers if number not in stored]
    work = _find_common_work([*names.values()], missing)
    if missing:
        count = plural(len(missing), 'shard')
        warn_once(f'{data}: reads {count} once, for an index in {cached[missing[0]].parent}')
    if work is None:  # each host has its own copies of the shards
        parts = zip(missing, make_all([*map(str, missing)]), strict=True)
    else:
        parts = zip(work, share_work('index', [*map(str, work)], make_all), strict=True)
    for number, contents in parts:
        if number not in stored:
            stored[number] = _from_npz(contents)
            if not cached[number].is_file():
                _write_part(cached[number], contents)
    index = Index.join({number: stored[number] for number in numbers})
    require(
        len(index) > 0, f'{data}: no images in {plural(len(numbers), "shard")}; expected {expected}'
    )
    return index


def _find_common_work(names: Sequence[str], missing: Sequence[int]) -> list[int] | None:
    """Returns the shards that any process has to read; None if processes have other shards.

    The time of change differs between copies of local shards on several hosts.
    """
    facts = gather_texts('index', json.dumps([_hash_texts(*names), missing]))
    digests, lacking = zip(*map(json.loads, facts), strict=True)
    return sorted({*itertools.chain(*lacking)}) if len({*digests}) == 1 else None


def write_index(files: Files, numbers: Sequence[int], *, form: str) -> int:
    """Copies the index of each shard from the cache to the folder next to the shards.

    Returns the number of written files.
    """
    folder = f'{files.root}/{INDEX_FOLDER}'
    make_folder(folder)
    existing = _list_next_to(files)
    names = {number: _part_name(files, number, form) for number in numbers}
    missing = [number for number, name in names.items() if name not in existing]

    def copy(number: int) -> None:
        path = _cached(files, names[number])
        if not path.is_file():
            raise MissingFile(
                f'{path}: the index of {files.paths[number]} could not be written there; '
                'VIT_JAX_CACHE sets another folder'
            )
        contents = path.read_bytes()
        if is_remote(folder):
            write_bucket_file(f'{folder}/{names[number]}', contents)
        else:
            write_bytes(pathlib.Path(folder, names[number]), contents)

    with futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(copy, missing))
    return len(missing)


def _cached(files: Files, name: str) -> pathlib.Path:
    """Returns the path of the index of a shard in the user's cache."""
    root = files.root if is_remote(files.root) else os.path.realpath(files.root)
    return cache_folder() / 'shards' / _hash_texts(root, name)


def _part_name(files: Files, number: int, form: str) -> str:
    """Returns the name of the index of a shard, which differs if the shard is replaced."""
    path = os.path.relpath(files.paths[number], files.root)
    return _hash_texts(str(_VERSION), form, path, *map(str, files.states[number]))


def _hash_texts(*texts: str) -> str:
    return f'{hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:32]}.npz'


def _list_next_to(files: Files) -> dict[str, BucketFile | None]:
    """Lists the files in the folder of indexes next to the shards."""
    folder = f'{files.root}/{INDEX_FOLDER}'
    if is_remote(folder):
        return {os.path.basename(file.url): file for file in list_folder(folder)[0]}
    return dict.fromkeys(os.listdir(folder)) if os.path.isdir(folder) else {}


def _read_parts_next_to(files: Files, names: dict[int, str]) -> dict[int, Index]:
    """Reads the indexes in the folder next to the shards, by the number of the shard."""
    existing = _list_next_to(files)
    found = {number: existing[name] for number, name in names.items() if name in existing}
    listed = [file for file in found.values() if file is not None]
    if not listed:
        folder = pathlib.Path(files.root, INDEX_FOLDER)
        return {number: _read_part(folder / names[number]) for number in found}
    reader = BucketReader(listed)
    places = np.arange(len(listed))
    sizes = np.array([file.size for file in listed])
    parts = {}
    with reader.request(places, np.zeros_like(places), sizes):
        for place, (number, file) in enumerate(zip(found, listed, strict=True)):
            with usable(file.url, 'an index of a shard; delete it'):
                parts[number] = _from_npz(bytes(reader.read(place, 0, file.size)))
    return parts


def _show_progress(made: Iterable[bytes], total: int) -> Iterator[bytes]:
    with progress_bar(transient=True) as bar:
        yield from bar.track(made, total, description='shards read')


def _to_npz(part: Index) -> bytes:
    buffer = io.BytesIO()
    names = [field.name for field in dataclasses.fields(part)]
    np.savez(buffer, **{name: getattr(part, name) for name in names})
    return buffer.getvalue()


def _from_npz(contents: bytes) -> Index:
    arrays = open_npz(io.BytesIO(contents))
    return Index(**{name: array.read() for name, array in arrays.items()})


def _read_part(path: pathlib.Path) -> Index:
    with usable(path, 'an index of a shard; delete it'):
        return _from_npz(path.read_bytes())


def _write_part(path: pathlib.Path, contents: bytes) -> None:
    try:
        make_folder(path.parent)
        write_bytes(path, contents)
    except UserError as error:
        warn_once(f'{error}; VIT_JAX_CACHE sets another folder for the index of shards')


def open_source(
    files: Files,
    numbers: Sequence[int],
    index: Index,
    class_names: tuple[str, ...],
    *,
    form: str,
    multi_label: bool = False,
    name_of: Callable[[int], str] | None = None,
    convert: Callable[[bytes | memoryview], EncodedImage] | None = None,
    decode: Callable[[int, int, memoryview], Any] | None = None,
) -> Source:
    """Opens the images of an index.

    Args:
      files: Files.
      numbers: The files that are the shards of this split.
      index: The images in the shards.
      class_names: The names of the classes; (): images without classes.
      form: As in `load_index`.
      multi_label: Whether an image may have several classes.
      name_of: Returns the name of an image for messages; by default SHARD:NAME.
      convert: Converts the stored bytes of an image; by default they are an encoded file.
      decode: Returns the images that are stored together, from the number of their file, their
        first byte, and their bytes; by default each image is stored alone.
    """
    is_verified = np.zeros(len(index), bool)
    places = Places(files, index.shard, index.start, index.length)
    rows = places.rows if decode else None

    def read_together(number: int) -> tuple[EncodedImage, Label]:
        assert decode is not None and rows is not None
        place = int(index.shard[number]), int(index.start[number])
        images = files.read(*place, int(index.length[number]), functools.partial(decode, *place))
        image = images[int(rows[number])]
        require(image.is_valid, 'the file has only a path; expected the bytes of the image')
        return memoryview(image.as_buffer()), label_of(number)

    def read(number: int) -> tuple[EncodedImage, Label]:
        stored = files.read(
            int(index.shard[number]), int(index.start[number]), int(index.length[number])
        )
        if not is_verified[number]:
            checksum = google_crc32c.value(bytes(stored))
            require(checksum == index.checksum[number], 'damaged: its checksum has changed')
            is_verified[number] = True
        return (convert(stored) if convert else stored), label_of(number)

    def labels_of(number: int) -> Int[np.ndarray, 'k']:
        return multi_hot([index.classes_of(number)], len(class_names))[0]

    label_of: Callable[[int], Label] = labels_of if multi_label else index.labels.item

    def default_name(number: int) -> str:
        return f'{decode_path(files.paths[index.shard[number]])}:{index.name(number)}'

    def size_of(number: int) -> int:
        # The order of a bucket depends on the places of its images.
        facts = index.checksum[number], index.shard[number], index.start[number]
        return zlib.crc32(np.array(facts, np.int64).tobytes())

    is_local = isinstance(files, LocalFiles) and decode is None
    return Source(
        count=len(index),
        class_names=class_names,
        read=read_together if decode else read,
        name_of=name_of or default_name,
        label_of=label_of,
        size_of=size_of,
        labels_in_memory=True,
        multi_label=multi_label,
        places=None if is_local else places,
        write_index=functools.partial(write_index, files, numbers, form=form),
    )
