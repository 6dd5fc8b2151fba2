"""What every kind of stored data becomes: labelled images at random access."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vit_jax.base.array_types import Int

Label = int | np.integer | np.ndarray  # a class, or a row of 0 and 1 over the classes
Stored = bytes | np.ndarray  # an encoded file, or uint8 pixels


@dataclasses.dataclass(frozen=True)
class Source:
    """One split of a data set: images with their labels, read when asked for.

    `read(i)` gives the encoded bytes or the uint8 array of image i and its label, `name_of(i)`
    what a person would call it. `read_labels(indices)` gives labels alone: where they lie among
    the images that is as slow as reading these. With `multi_label` an image may have any number of
    classes, and its label is a row of 0 and 1.
    """

    count: int
    class_names: tuple[str, ...]
    read: Callable[[int], tuple[Stored, Label]]
    name_of: Callable[[int], str]
    read_labels: Callable[[Sequence[int]], np.ndarray]
    multi_label: bool = False

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


Splits = dict[str, Callable[[], Source]]
DataFunction = Callable[[str], Source]


def select(source: Source, indices: Sequence[int]) -> Source:
    """The source that holds these images only, in this order."""
    chosen = np.asarray(indices)
    return dataclasses.replace(
        source,
        count=len(chosen),
        read=lambda i: source.read(int(chosen[i])),
        name_of=lambda i: source.name_of(int(chosen[i])),
        read_labels=lambda indices: source.read_labels(chosen[np.asarray(indices)].tolist()),
    )


def shuffled(source: Source) -> Source:
    """The source in one random order, the same every time, so that a slice is a fair sample."""
    return select(source, np.random.default_rng(0).permutation(len(source)).tolist())


def labelled(
    labels: Sequence[Any],
    class_names: Sequence[str],
    *,
    read: Callable[[int], Stored],
    name_of: Callable[[int], str],
    multi_label: bool = False,
) -> Source:
    """A source whose labels are at hand: class numbers, or tuples of them where `multi_label`."""

    def row(i: int) -> Label:
        if not multi_label:
            return int(labels[i])
        hot = np.zeros(len(class_names), np.int32)
        hot[list(labels[i])] = 1
        return hot

    return Source(
        count=len(labels),
        class_names=tuple(class_names),
        read=lambda i: (read(i), row(i)),
        name_of=name_of,
        read_labels=lambda indices: np.array([row(i) for i in indices], np.int32),
        multi_label=multi_label,
    )


def files(
    paths: Sequence[pathlib.Path],
    labels: Sequence[Any],
    class_names: Sequence[str],
    *,
    multi_label: bool = False,
) -> Source:
    """Images that are files, with labels as `labelled` takes them."""
    return labelled(
        labels,
        class_names,
        read=lambda i: paths[i].read_bytes(),
        name_of=lambda i: str(paths[i]),
        multi_label=multi_label,
    )
