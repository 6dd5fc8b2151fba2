"""Inspects stored images before training: counts per class, defects."""

import collections
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable
from concurrent import futures

import numpy as np

from vit_jax.data.image_headers import kinds_by_ending, read_header
from vit_jax.data.image_preprocessing import decode
from vit_jax.data.sources.base import Label, Source


@dataclasses.dataclass(frozen=True)
class Scan:
    """What was found in the images of one split, as in the program's data.json."""

    images: int
    classes: dict[str, int]  # images of each class
    formats: dict[str, int]
    unreadable: list[str]  # messages that name the image
    misnamed: list[str]  # their format is not that of their ending
    duplicates: list[str]  # NAME = OTHER: the same bytes, perhaps in two splits, or listed twice
    height: list[int]  # minimum, median, maximum, in pixels; of nothing readable, empty
    width: list[int]


def scan(
    source: Source,
    pool: futures.Executor,
    done: Callable[[int], None],
    *,
    max_pixels: int,
    digests: dict[str, bytes],
) -> Scan:
    """Reads and decodes every image of a source once; `done(1)` is called after each.

    `digests` holds those of the images of earlier scans by name, and gets these too.
    """
    formats: collections.Counter[str] = collections.Counter()
    counts = np.zeros(len(source.class_names), int)
    unreadable, misnamed, duplicates, sizes = [], [], [], []
    seen = {digest: name for name, digest in reversed(digests.items())}
    names = map(source.name_of, range(len(source)))
    examine = functools.partial(_examined, source, max_pixels)
    examined = pool.map(examine, range(len(source)))
    for name, found in zip(names, examined, strict=True):
        done(1)
        if isinstance(found, str):
            unreadable.append(f'{name}: {found}')
            continue
        label, kind, size, digest = found
        if counts.size:
            counts[np.flatnonzero(label) if source.multi_label else label] += 1
        digests[name] = digest
        if (other := seen.setdefault(digest, name)) is not name:
            duplicates.append(f'{name} = {other}')
        formats[kind] += 1
        sizes.append(size)
        ending = os.path.splitext(name)[1].lower()
        if kinds_by_ending().get(ending, kind) != kind and kind != 'array':
            misnamed.append(f'{name}: {kind}')
    classes = dict(zip(source.class_names, counts.tolist(), strict=True))
    by_count = dict(formats.most_common())
    sides = np.percentile(sizes, [0, 50, 100], axis=0).astype(int).T.tolist() if sizes else ([], [])
    return Scan(len(source), classes, by_count, unreadable, misnamed, duplicates, *sides)


def _examined(
    source: Source, max_pixels: int, index: int
) -> tuple[Label, str, tuple[int, ...], bytes] | str:
    """Label, format, size and digest of an image, or why it cannot be read."""
    try:
        stored, label = source.read(index)
        size = decode(stored, exif_rotation=True, max_pixels=max_pixels).shape[:2]
    except (ValueError, OSError) as error:
        return getattr(error, 'strerror', None) or str(error)
    if isinstance(stored, np.ndarray):
        kind, data = 'array', stored.tobytes()
    else:
        kind, data = read_header(stored).kind, stored
    return label, kind, size, hashlib.blake2b(data, digest_size=16).digest()
