"""What every kind of stored data becomes: a `Source`, labelled images at random access."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vit_jax.base.array_types import Int

Label = int | np.integer | np.ndarray  # a class number, or multi-label: a row of 0 and 1
EncodedImage = bytes | np.ndarray  # an encoded file, or uint8 pixels


@dataclasses.dataclass(frozen=True)
class Source:
    """One split of a data set, of which images and labels are read when they are asked for.

    `read(i)` returns image i and its label; `name_of(i)` its name in messages;
    `read_labels(indices)` labels alone, which can be as slow as reading the images.
    """

    count: int
    class_names: tuple[str, ...]
    read: Callable[[int], tuple[EncodedImage, Label]]
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
# One's own data: a function that opens the split of a name (sources/arrays.py: images in memory).
DataFunction = Callable[[str], Source]


def select(source: Source, indices: Sequence[int] | np.ndarray) -> Source:
    """The source that holds these images only, in this order."""
    chosen = np.asarray(indices)
    return dataclasses.replace(
        source,
        count=len(chosen),
        read=lambda i: source.read(int(chosen[i])),
        name_of=lambda i: source.name_of(int(chosen[i])),
        read_labels=lambda indices: source.read_labels(chosen[np.asarray(indices)].tolist()),
    )


def in_fixed_order(source: Source) -> Source:
    """The source in one random order, the same every time, so that a slice is a fair sample."""
    return select(source, np.random.default_rng(0).permutation(len(source)))


def labelled_source(
    images: Sequence[Any],
    labels: Sequence[Any],
    class_names: Sequence[str],
    *,
    read: Callable[[Any], EncodedImage] = pathlib.Path.read_bytes,
    name_of: Callable[[Any], str] = str,
    multi_label: bool = False,
) -> Source:
    """Images, by default files, with labels in memory: class numbers, or if `multi_label` lists."""

    def label(i: int) -> Label:
        if not multi_label:
            return int(labels[i])
        row = np.zeros(len(class_names), np.int32)
        row[list(labels[i])] = 1
        return row

    return Source(
        count=len(labels),
        class_names=tuple(class_names),
        read=lambda i: (read(images[i]), label(i)),
        name_of=lambda i: name_of(images[i]),
        read_labels=lambda indices: np.array([label(i) for i in indices], np.int32),
        multi_label=multi_label,
    )
