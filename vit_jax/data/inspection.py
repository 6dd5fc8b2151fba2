"""Inspects stored images before training: counts per class, defects."""

import collections
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable
from concurrent import futures
from typing import NamedTuple

import numpy as np

from vit_jax.data.image_headers import kinds_by_ending, read_header
from vit_jax.data.image_preprocessing import decode
from vit_jax.data.reading import ImageReader
from vit_jax.data.sources.base import Label


class Known(NamedTuple):
    """An image that was read: the digest of its bytes, and the names of its classes."""

    digest: bytes
    classes: str


@dataclasses.dataclass(frozen=True)
class Scan:
    """What was found in the images of one split, as in the program's data.json."""

    images: int
    classes: dict[str, int]  # images of each class
    formats: dict[str, int]
    unreadable: list[str]  # messages that name the image
    misnamed: list[str]  # their format is not that of their ending
    duplicates: list[str]  # NAME = OTHER: the same bytes, perhaps in two splits, or listed twice
    contradictory: list[str]  # NAME (CLASS) = OTHER (CLASS): the same bytes in other classes
    height: list[int]  # minimum, median, maximum, in pixels; of nothing readable, empty
    width: list[int]


def scan(
    reader: ImageReader,
    pool: futures.Executor,
    done: Callable[[int], None],
    *,
    known: dict[str, Known],
) -> Scan:
    """Reads, decodes and crops every image of a source once; `done(1)` is called after each.

    `known` holds the images of earlier scans by name, and gets these too.
    """
    source = reader.source
    formats: collections.Counter[str] = collections.Counter()
    counts = np.zeros(len(source.class_names), int)
    unreadable, misnamed, duplicates, contradictory, sizes = [], [], [], [], []
    seen = {one.digest: name for name, one in reversed(known.items())}
    names = map(source.name_of, range(len(source)))
    examined = pool.map(functools.partial(_examined, reader), range(len(source)))
    for name, found in zip(names, examined, strict=True):
        done(1)
        if isinstance(found, str):
            unreadable.append(f'{name}: {found}')
            continue
        label, kind, size, digest = found
        if counts.size:
            counts[np.flatnonzero(label) if source.multi_label else label] += 1
        numbers = np.flatnonzero(label) if source.multi_label else [int(label)]
        classes = ', '.join(source.class_names[n] for n in numbers if counts.size)
        known[name] = Known(digest, classes)
        if (other := seen.setdefault(digest, name)) is not name:
            if known[other].classes == classes:
                duplicates.append(f'{name} = {other}')
            else:
                contradictory.append(f'{name} ({classes}) = {other} ({known[other].classes})')
        formats[kind] += 1
        sizes.append(size)
        ending = os.path.splitext(name)[1].lower()
        if kinds_by_ending().get(ending, kind) != kind and kind != 'array':
            misnamed.append(f'{name}: {kind}')
    by_class = dict(zip(source.class_names, counts.tolist(), strict=True))
    by_count = dict(formats.most_common())
    sides = np.percentile(sizes, [0, 50, 100], axis=0).astype(int).T.tolist() if sizes else ([], [])
    lists = unreadable, misnamed, duplicates, contradictory
    return Scan(len(source), by_class, by_count, *lists, *sides)


def _examined(reader: ImageReader, index: int) -> tuple[Label, str, tuple[int, ...], bytes] | str:
    """Label, format, size and digest of an image, or why it cannot be used."""
    try:
        stored, label = reader.source.read(index)
        image = decode(stored, exif_rotation=True, max_pixels=reader.max_pixels)
        reader.crop(image, reader.size, None)
        size = image.shape[:2]
    except (ValueError, OSError) as error:
        return getattr(error, 'strerror', None) or str(error)
    if isinstance(stored, np.ndarray):
        kind, data = 'array', stored.tobytes()
    else:
        kind, data = read_header(stored).kind, stored
    return label, kind, size, hashlib.blake2b(data, digest_size=16).digest()
