"""Reads images from tar shards in the layout of WebDataset, such as train-{0000..1023}.tar.

The neighbors of a shard whose names are equal up to the first dot are a sample: an image, and its
class number in a file .cls. Tar files have no table of contents, so each shard is read once, and an
index of its samples is kept in the user's cache.
"""

import functools
import hashlib
import io
import itertools
import json
import os
import pathlib
import re
import tarfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.base import (
    Int,
    MissingFile,
    TransientError,
    UserError,
    make_folder,
    plural,
    require,
    usable,
    write_bytes,
)
from vit_jax.base.files import (
    cache_folder,
    decode_path,
    open_file,
    read_range,
    read_text,
    require_tar_end,
)
from vit_jax.base.npz import open_npz
from vit_jax.data import imagenet_classes
from vit_jax.data.image_decoding import formats_by_extension
from vit_jax.data.sources.base import EncodedImage, Source, SourceKind, Splits, warn_once

CLASS_NAMES = 'classnames.txt'  # a line per class, next to the shards
_VERSION = 1  # of the index
_COMPRESSED = re.compile(r'\.(tgz|tar\.(gz|bz2|xz|zst))$', re.IGNORECASE)
_SHARD = re.compile(r'\.(tar|tgz|tar\.(gz|bz2|xz|zst))$', re.IGNORECASE)
_RANGE = re.compile(r'\{(\d+)\.\.(\d+)\}')
_KEY = re.compile(r'((?:.*/)?[^./][^.]*)\.([^/]*)')  # a name up to its first dot, and the rest
_SPLITS = 'train', 'training', 'val', 'validation', 'valid', 'test', 'testing'


class _Sample(NamedTuple):
    """The image of a sample: its name in the shard, its bytes there, and its class number."""

    name: str
    offset: int
    length: int
    label: int | None


class _Index(NamedTuple):
    """The samples of all shards of a split."""

    names: list[str]
    shard: Int[np.ndarray, 'n']  # numbers of the shards
    offset: Int[np.ndarray, 'n']
    length: Int[np.ndarray, 'n']
    label: Int[np.ndarray, 'n']  # -1: no class


def expand(pattern: str) -> list[str]:
    """Replaces each range in braces, such as {0000..1023}, by its numbers, with equal digits."""
    match = _RANGE.search(pattern)
    if not match:
        return [pattern]
    first, last = match.groups()
    require(
        int(first) <= int(last) < int(first) + 1_000_000,
        f'{pattern}: expected a range such as {{0000..1023}}, from low to high',
    )
    numbers = (f'{number:0{len(first)}}' for number in range(int(first), int(last) + 1))
    before, after = pattern[: match.start()], pattern[match.end() :]
    return [path for number in numbers for path in expand(f'{before}{number}{after}')]


def _recognizes(data: str) -> bool:
    return _SHARD.search(data) is not None or bool(_find_shards(data))


def _find_shards(root: str) -> dict[str, list[str]]:
    """Finds the shards of each split in a folder, or in a folder per split; {} for other data."""
    if not os.path.isdir(root):
        return {}
    shards: dict[str, list[str]] = {}
    for entry in os.scandir(root):
        if entry.is_dir():
            inside = [name for name in os.listdir(entry.path) if _SHARD.search(name)]
            if not inside and not entry.name.startswith(('.', '_')):
                return {}  # class folders, perhaps with a tar file next to them
            if inside:
                shards[entry.name] = [os.path.join(entry.path, name) for name in inside]
        elif _SHARD.search(entry.name):
            shards.setdefault(_split_of(entry.name), []).append(entry.path)
    return {split: sorted(shards[split]) for split in sorted(shards)}


def _split_of(path: str) -> str:
    """Returns the name of a split that is a word of a file name; `all` if there is none."""
    words = re.split(r'[^a-z]+', os.path.basename(path).lower())
    return next((word for word in words if word in _SPLITS), 'all')


def _open_splits(data: str) -> Splits:
    if os.path.isdir(data):
        shards = _find_shards(data)
        root = pathlib.Path(data)
    else:
        shards = {_split_of(data): expand(data)}
        root = pathlib.Path(data).parent
    for path in itertools.chain.from_iterable(shards.values()):
        require(
            not _COMPRESSED.search(path),
            f'{path}: a compressed archive, whose images cannot be read alone; decompress it',
        )
    return {
        split: functools.partial(_open_split, data, root, paths) for split, paths in shards.items()
    }


KIND = SourceKind('SHARD-{0000..1023}.tar', _recognizes, _open_splits)


def _open_split(data: str, root: pathlib.Path, paths: Sequence[str]) -> Source:
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        raise MissingFile(
            f'{data}: {plural(len(missing), "shard")} of {len(paths):,} missing, such as '
            f'{missing[0]}'
        )
    states = [_state(os.stat(path)) for path in paths]
    index = _load_index(data, paths, states)
    has_label = index.label >= 0
    if has_label.any() and not has_label.all():
        where = _name(paths, index, int(np.argmin(has_label)))
        raise UserError(f'{where}: has no .cls, unlike {plural(int(has_label.sum()), "sample")}')

    def read(number: int) -> tuple[EncodedImage, int]:
        shard = int(index.shard[number])
        descriptor = os.open(paths[shard], os.O_RDONLY)
        try:
            if _state(os.fstat(descriptor)) != states[shard]:  # no error of this image alone
                raise TransientError(f'{paths[shard]}: was replaced; run the same command again')
            image = read_range(descriptor, int(index.length[number]), int(index.offset[number]))
            return image, int(index.label[number])
        finally:
            os.close(descriptor)

    return Source(
        count=len(index.names),
        class_names=_class_names(root, index.label, data) if has_label.all() else (),
        read=read,
        name_of=lambda number: _name(paths, index, number),
        label_of=lambda number: int(index.label[number]),
        size_of=lambda number: int(index.length[number]),
        labels_in_memory=True,
    )


def _state(status: os.stat_result) -> tuple[int, int]:
    """Returns what differs if a shard was replaced: size and time of change."""
    return status.st_size, status.st_mtime_ns


def _name(paths: Sequence[str], index: _Index, number: int) -> str:
    return f'{decode_path(paths[index.shard[number]])}:{index.names[number]}'


def _class_names(root: pathlib.Path, labels: Int[np.ndarray, 'n'], data: str) -> tuple[str, ...]:
    """Returns the names in classnames.txt, ImageNet's of 1,000 classes, or else the numbers."""
    count = int(labels.max()) + 1
    path = root / CLASS_NAMES
    if path.is_file():
        with usable(path):
            names = read_text(path).splitlines()
        require(
            count <= len(names),
            f'{path}: has {len(names)} classes; {data} has the class number {count - 1}',
        )
        return tuple(names)
    if count == len(imagenet_classes.ids()):
        warn_once(f'{data}: assumes the 1,000 classes of ImageNet; {path} can name others')
        return imagenet_classes.ids()
    return tuple(map(str, range(count)))


def _load_index(data: str, paths: Sequence[str], states: Sequence[tuple[int, int]]) -> _Index:
    """Reads the index from the cache, or makes it by reading the shards."""
    key = json.dumps([_VERSION, [*map(os.path.realpath, paths)], states])
    file = cache_folder() / 'shards' / f'{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz'
    if file.is_file():
        with usable(file, 'an index of shards; delete it'):
            arrays = {name: array.read() for name, array in open_npz(file).items()}
            names = arrays.pop('names').tobytes().decode('utf-8', 'surrogateescape')
            return _Index(names=names.split('\0')[:-1], **arrays)
    warn_once(f'{data}: makes an index of {plural(len(paths), "shard")} in {file}')
    samples = [(number, sample) for number, path in enumerate(paths) for sample in _scan(path)]
    require(bool(samples), f'{data}: no images in {plural(len(paths), "shard")}')
    index = _Index(
        names=[sample.name for _, sample in samples],
        shard=np.array([number for number, _ in samples], np.int32),
        offset=np.array([sample.offset for _, sample in samples], np.int64),
        length=np.array([sample.length for _, sample in samples], np.int64),
        label=np.array([-1 if s.label is None else s.label for _, s in samples], np.int64),
    )
    text = ''.join(f'{name}\0' for name in index.names).encode('utf-8', 'surrogateescape')
    buffer = io.BytesIO()
    np.savez(buffer, **index._asdict() | {'names': np.frombuffer(text, np.uint8)})
    try:
        make_folder(file.parent)
        write_bytes(file, buffer.getvalue())
    except UserError as error:
        warn_once(f'{error}; VIT_JAX_CACHE sets another folder for the index of shards')
    return index


def _scan(path: str) -> Iterator[_Sample]:
    """Yields the samples of a shard that have an image."""
    with usable(path, 'a complete tar file'), open_file(path) as file:
        with tarfile.open(fileobj=file, mode='r:') as tar:
            for key, members in itertools.groupby(_members(tar), key=lambda member: member[0]):
                sample = _read_sample(path, key, [(kind, info) for _, kind, info in members], tar)
                if sample is not None:
                    yield sample
            require_tar_end(file, tar)


def _members(tar: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Yields key, extension and header of the files in an archive."""
    for info in tar:
        match = _KEY.fullmatch(info.name)  # None: a file without an extension, such as metadata
        if info.isfile() and not info.issparse() and match:
            yield match[1], match[2].lower(), info


def _read_sample(
    path: str, key: str, members: Sequence[tuple[str, tarfile.TarInfo]], tar: tarfile.TarFile
) -> _Sample | None:
    kinds = [kind for kind, _ in members]
    for kind in kinds:
        require(kinds.count(kind) == 1, f'{path}: two files {key}.{kind}; expected one per sample')
    by_kind = dict(members)
    images = [kind for kind in kinds if f'.{kind}' in formats_by_extension()]
    require(len(images) <= 1, f'{path}: {key} has several images: {", ".join(images)}')
    if not images:
        return None
    info = by_kind[images[0]]
    label = None
    if 'cls' in by_kind:
        stored: Any = tar.extractfile(by_kind['cls'])
        text = stored.read(32)
        require(
            re.fullmatch(rb'\s*\d{1,9}\s*', text) is not None,
            f'{path}: {key}.cls: got {text!r:.40}; expected a class number',
        )
        label = int(text)
    return _Sample(info.name, info.offset_data, info.size, label)
