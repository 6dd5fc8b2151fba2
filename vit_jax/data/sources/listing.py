"""Every image of a split by name, label and stamp: how two of them differ, by example."""

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vit_jax.base import Bool, Int, counted
from vit_jax.data.sources.base import Source, relative_names

LOOKS = 16_384  # at files, before anything is computed
ORDER = 'the same images in another order'
_BLOCKS = 1024  # of images, by a checksum of their names


@dataclasses.dataclass(frozen=True)
class Listing:
    """The images of a split in their order.

    Labels are class numbers, of images with several a checksum; -1 where stamps change with them.
    Stamps are those of `Source`; -1 where the disk was not asked.
    """

    class_names: tuple[str, ...]
    names: list[str]
    labels: Int[np.ndarray, 'n']
    stamps: Int[np.ndarray, 'n']
    multi_label: bool = False

    @functools.cached_property
    def digest(self) -> str:
        """Of everything but the stamps."""
        total = hashlib.sha256(json.dumps([self.class_names, self.multi_label]).encode())
        total.update(as_bytes(self.names))
        total.update(self.labels.astype('<i8').tobytes())
        return total.hexdigest()

    def facts(self) -> dict[str, Any]:
        """JSON values of 25 kB at most, by which hosts compare their listings."""
        stamps = hashlib.sha256(self.stamps.astype('<i8').tobytes()).hexdigest()
        classes = hashlib.sha256(as_bytes(self.class_names)).hexdigest()
        summary = {'images': len(self.names), 'classes': classes}
        return summary | {'digest': [self.digest, stamps], 'blocks': self._blocks()}

    def _blocks(self) -> dict[str, str]:
        """Checksums of the names, labels and stamps of each block, in hexadecimal digits."""
        keys = _keys(self.names)
        sums = {'names': 0, 'labels': self.labels, 'stamps': self.stamps}
        return {what: _sums(keys, numbers) for what, numbers in sums.items()}


def listed(source: Source, data: str) -> Listing:
    """The listing of a split of this data; of many files `LOOKS` are looked at, evenly chosen."""
    count = len(source)
    looks = count if source.stamps_at_hand else min(count, LOOKS)
    chosen = np.linspace(0, count - 1, looks).astype(int)
    stamps = np.full(count, -1, np.int64)
    stamps[chosen] = source.read_stamps(chosen.tolist())
    names = relative_names(source.read_names(range(count)), data)
    return Listing(source.class_names, names, _labels(source), stamps, source.multi_label)


def _labels(source: Source) -> Int[np.ndarray, 'n']:
    everything = range(len(source))
    if not source.labels_at_hand:
        return np.full(len(source), -1, np.int64)
    if not source.multi_label:
        return source.read_labels(everything).astype(np.int64)
    parts = (source.read_labels(everything[i : i + 1024]) for i in everything[::1024])
    rows = (row for part in parts for row in part.astype('<i4'))
    return np.array([zlib.crc32(row.tobytes()) for row in rows], np.int64)


def as_bytes(names: Iterable[str]) -> bytes:
    """The names in one text, each with a zero byte after it."""
    return '\0'.join([*names, '']).encode(errors='surrogateescape')


def differences(old: Listing, new: Listing) -> list[str]:
    """A line about each kind of change, with examples; stamps count where both are known."""
    lines = class_differences(old.class_names, new.class_names)
    was = {name: index for index, name in enumerate(old.names)}
    now = {name: index for index, name in enumerate(new.names)}
    before = np.array([was.get(name, -1) for name in new.names], int)
    kept = before >= 0
    before, after = before[kept], np.flatnonzero(kept)
    number_of = {name: index for index, name in enumerate(new.class_names)}
    numbers = np.array([number_of.get(name, -2) for name in old.class_names], np.int64)
    old_labels = old.labels if old.multi_label or (old.labels < 0).any() else numbers[old.labels]
    relabelled = after[old_labels[before] != new.labels[after]].tolist()
    others = after[replaced(old.stamps[before], new.stamps[after])].tolist()

    def label(index: int) -> str:
        name = new.names[index]
        if old.multi_label or new.multi_label or new.labels[index] < 0:
            return repr(name)
        classes = old.class_names[old.labels[was[name]]], new.class_names[new.labels[index]]
        return f'{name!r} from {classes[0]!r} to {classes[1]!r}'

    lines += _some('added', [repr(name) for name in now if name not in was])
    lines += _some('removed', [repr(name) for name in was if name not in now])
    lines += _some('relabelled', relabelled, label)
    lines += _some('replaced', others, lambda index: repr(new.names[index]))
    times = collections.Counter(old.names), collections.Counter(new.names)
    repeated = [repr(name) for name in now if name in was and times[0][name] != times[1][name]]
    lines += _some('listed a different number of times', repeated)
    same = old.digest == new.digest
    return lines if lines or same else [ORDER]


def replaced(old: Int[np.ndarray, 'n'], new: Int[np.ndarray, 'n']) -> Bool[np.ndarray, 'n']:
    """Where stamps differ that are known in both."""
    return (old != new) & (old != -1) & (new != -1)


def class_differences(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """A line about classes that have other names, or none."""
    pairs = enumerate(itertools.zip_longest(old, new))
    changes = [f'class {i}: {_named(a)} -> {_named(b)}' for i, (a, b) in pairs if a != b]
    return [_shortened(changes)] if changes else []


def host_differences(theirs: dict[str, Any], ours: dict[str, Listing]) -> list[str]:
    """A line about each difference between `facts` of process 0, by split, and listings here."""
    lines = []
    for name in sorted({*theirs, *ours}):
        if name in theirs and name in ours:
            lines += [f'{name}: {line}' for line in _host_differences(theirs[name], ours[name])]
        else:
            lines.append(f'{name}: is {"there" if name in theirs else "here"} alone')
    return lines


def _host_differences(theirs: dict[str, Any], listing: Listing) -> list[str]:
    ours = listing.facts()
    if theirs == ours:
        return []
    lines, blocks, seen = [], _keys(listing.names) % _BLOCKS, np.zeros(_BLOCKS, bool)
    if theirs['images'] != ours['images']:
        lines.append(f'{_images(theirs["images"])} there, {ours["images"]:,} here')
    if theirs['classes'] != ours['classes']:
        lines.append(f'other classes; here {_shortened(list(map(repr, listing.class_names)))}')
    for what, text in {'names': 'names', 'labels': 'labels', 'stamps': 'contents'}.items():
        sums = (np.frombuffer(bytes.fromhex(f['blocks'][what]), '<u4') for f in (theirs, ours))
        other = np.not_equal(*sums) & ~seen
        seen |= other
        found = np.flatnonzero(other[blocks])
        some = _shortened([repr(listing.names[i]) for i in found[:4]])
        if found.size:
            lines.append(f'other {text} among {_images(found.size)} here: {some}')
        elif other.any():
            lines.append('images there that are not here')
    return lines or ['the images have another order']


def _keys(names: Sequence[str]) -> np.ndarray:
    encoded = as_bytes(names).split(b'\0')[:-1]
    return np.fromiter(map(zlib.crc32, encoded), np.uint64, len(names))


def _sums(keys: np.ndarray, numbers: Any) -> str:
    """For each block the sum of what became of key and number by splitmix64's mixing."""
    mixed = keys + np.asarray(numbers).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    sums = np.zeros(_BLOCKS, np.uint64)
    np.add.at(sums, keys % _BLOCKS, mixed)
    return (sums >> np.uint64(32)).astype('<u4').tobytes().hex()


def _named(name: str | None) -> str:
    return 'none' if name is None else repr(name)


def _some(change: str, found: Any, text: Any = str) -> list[str]:
    if not len(found):
        return []
    return [f'{_images(len(found))} {change}: {_shortened(list(map(text, found[:4])))}']


def _images(count: int) -> str:
    return counted(count, 'image')


def _shortened(texts: list[str]) -> str:
    return ', '.join([*texts[:3], '...'] if len(texts) > 3 else texts)
