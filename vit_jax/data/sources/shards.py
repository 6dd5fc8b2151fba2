"""Reads images from tar shards in the layout of WebDataset, such as train-{0000..1023}.tar.

The neighbors of a shard whose names are equal up to the first dot are a sample: an image, and its
class number in a file .cls, or as `label` in a file .json. Tar files have no table of contents (see
indexing.py).
"""

import functools
import io
import itertools
import json
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from vit_jax.base import Int, UserError, plural, require, usable
from vit_jax.base.files import Limit, require_tar_end
from vit_jax.data import imagenet_classes
from vit_jax.data.image_decoding import formats_by_extension
from vit_jax.data.sources.base import Source, SourceKind, Splits, warn_once
from vit_jax.data.sources.indexing import (
    SPLIT_WORDS,
    FileOpener,
    Sample,
    file_opener,
    list_folders,
    load_index,
    open_source,
    read_optional_text,
    split_of,
)

CLASS_NAMES = 'classnames.txt'  # a line per class, next to the shards
_FORM = 'webdataset'  # of the index
_EXPECTED = 'images and class numbers such as 0001.jpg and 0001.cls; a name ends at its first dot'
_COMPRESSED = re.compile(r'\.(tgz|tar\.(gz|bz2|xz|zst))$', re.IGNORECASE)
_SHARD = re.compile(r'\.(tar|tgz|tar\.(gz|bz2|xz|zst))$', re.IGNORECASE)
_RANGE = re.compile(r'\{(\d+)\.\.(\d+)\}')
_LIST = re.compile(r'[*?]|::|\{[^{}]*,|^pipe:')  # which other programs read
_KEY = re.compile(r'((?:.*/)?[^./][^.]*)\.([^/]*)')  # a name up to its first dot, and the rest


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
    shards: dict[str, list[str]] = {}
    for folder, paths in list_folders(root):
        plain = {path for path in paths if path.lower().endswith('.tar')}
        compressed = {path for path in paths if _COMPRESSED.search(path)}
        inside = [*plain, *(c for c in compressed if _COMPRESSED.sub('.tar', c) not in plain)]
        if not folder:
            for path in inside:
                shards.setdefault(split_of(path), []).append(path)
        elif inside:
            shards[folder] = inside
        elif not folder.startswith(('.', '_')):
            return {}  # class folders, perhaps with a tar file next to them
    if 'all' in shards and len(shards) > 1:
        raise UserError(
            f'{shards["all"][0]}: belongs to no split, unlike other shards; expected a name with '
            f'one of the words {", ".join(SPLIT_WORDS)}'
        )
    return {split: sorted(shards[split]) for split in sorted(shards)}


def _open_splits(data: str) -> Splits:
    if _SHARD.search(data):
        require(
            not _LIST.search(data),
            f'{data}: expected the folder of the shards, or a range such as '
            'train-{0000..1023}.tar',
        )
        shards = {split_of(data): expand(data)}
        root = os.path.dirname(data.partition('{')[0]) or '.'
    else:
        shards = _find_shards(data)
        root = data.rstrip('/')
    for path in itertools.chain.from_iterable(shards.values()):
        require(
            not _COMPRESSED.search(path),
            f'{path}: a compressed archive, whose images cannot be read alone; decompress it, or '
            'move it out of the folder',
        )
    open_files = file_opener(data, root, shards)
    return {
        split: functools.partial(_open_split, data, root, split, open_files) for split in shards
    }


KIND = SourceKind('SHARD-{0000..1023}.tar', _recognizes, _open_splits, reads_buckets=True)


def _open_split(data: str, root: str, split: str, open_files: FileOpener) -> Source:
    files, numbers = open_files(split)
    index = load_index(files, numbers, _scan, form=_FORM, data=data, expected=_EXPECTED)
    has_class = index.num_classes_each > 0
    if has_class.any() and not has_class.all():
        number = int(np.argmin(has_class))
        where = f'{files.paths[index.shard[number]]}:{index.name(number)}'
        raise UserError(f'{where}: has no class, unlike {plural(int(has_class.sum()), "sample")}')
    class_names = _class_names(root, index.classes, data) if has_class.all() else ()
    return open_source(files, numbers, index, class_names, form=_FORM)


def _class_names(root: str, labels: Int[np.ndarray, 'n'], data: str) -> tuple[str, ...]:
    """Returns the names in classnames.txt, ImageNet's of 1,000 classes, or else the numbers."""
    count = int(labels.max()) + 1
    path = os.path.join(root, CLASS_NAMES)
    if (text := read_optional_text(path)) is not None:
        names = text.splitlines()
        require(
            count <= len(names),
            f'{path}: has {len(names)} classes; {data} has the class number {count - 1}',
        )
        return tuple(names)
    if count == len(imagenet_classes.ids()):
        warn_once(f'{data}: assumes the 1,000 classes of ImageNet; {path} can name others')
        return imagenet_classes.ids()
    return tuple(map(str, range(count)))


class _Member(NamedTuple):
    """A file of a shard, with the class number or the checksum of the image that it contains."""

    key: str  # the name of its sample
    kind: str  # its extension
    info: tarfile.TarInfo
    value: int | None


def _scan(path: str, file: io.BufferedIOBase) -> Iterator[Sample]:
    """Yields the samples of a shard that have an image."""
    with usable(path, 'a complete tar file'):
        with tarfile.open(fileobj=file, mode='r:') as tar:
            members = _read_members(path, tar)
            for key, of_sample in itertools.groupby(members, key=lambda member: member.key):
                sample = _find_sample(path, key, [*of_sample])
                if sample is not None:
                    yield sample
            require_tar_end(file, tar)


def _read_members(path: str, tar: tarfile.TarFile) -> Iterator[_Member]:
    """Yields the files of an archive, reading images and classes from start to end."""
    for info in tar:
        match = _KEY.fullmatch(info.name)  # None: a file without an extension, such as metadata
        if not info.isfile() or info.issparse() or not match:
            continue
        key, kind = match[1], match[2].lower()
        value = None
        if f'.{kind}' in formats_by_extension():
            require(
                info.size <= Limit.IMAGE_BYTES,
                f'{path}: {info.name} has {info.size:,} bytes; expected at most '
                f'{Limit.IMAGE_BYTES:,}',
            )
            value = google_crc32c.value(_read_member(tar, info, info.size))
        elif kind == 'cls':
            text = _read_member(tar, info, 32)
            require(
                re.fullmatch(rb'\s*\d{1,9}\s*', text) is not None,
                f'{path}: {key}.cls: got {text!r:.40}; expected a class number, and the '
                f'names of classes in {CLASS_NAMES}',
            )
            value = int(text)
        elif kind == 'json':
            value = _read_label(_read_member(tar, info, min(info.size, Limit.JSON_BYTES)))
        yield _Member(key, kind, info, value)


def _read_member(tar: tarfile.TarFile, info: tarfile.TarInfo, size: int) -> bytes:
    file: Any = tar.extractfile(info)
    contents: bytes = file.read(size)
    return contents


def _read_label(text: bytes) -> int | None:
    """Returns the class number in a JSON object; None if there is none."""
    try:
        label = json.loads(text).get('label')
    except (ValueError, AttributeError):  # no JSON, or no object
        return None
    return label if type(label) is int and 0 <= label < 10**9 else None


def _find_sample(path: str, key: str, members: Sequence[_Member]) -> Sample | None:
    kinds = [member.kind for member in members]
    for kind in kinds:
        require(kinds.count(kind) == 1, f'{path}: two files {key}.{kind}; expected one per sample')
    images = [member for member in members if f'.{member.kind}' in formats_by_extension()]
    require(
        len(images) <= 1,
        f'{path}: {key} has several images: {", ".join(image.kind for image in images)}',
    )
    if not images:
        return None
    _, _, info, checksum = images[0]
    numbers = {m.kind: m.value for m in members if m.value is not None}
    classes = tuple(numbers[kind] for kind in ('cls', 'json') if kind in numbers)[:1]
    assert checksum is not None
    return Sample(info.name, info.offset_data, info.size, checksum, classes)
