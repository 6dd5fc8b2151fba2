"""Images in memory: arrays, npz files, scikit-learn's digits."""

import contextlib
import functools
import importlib.util
import pathlib
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vit_jax.base import UserError, counted, parsing, require
from vit_jax.data.sources.base import Source, Splits, warn_once

_MOST_CLASSES = 100_000  # of labels without names; more than any published set has


def array_source(
    images: np.ndarray, labels: np.ndarray, class_names: Sequence[str], *, name: str
) -> Source:
    """A source of uint8 images (n, height, width) or (n, height, width, 1 or 3).

    Labels are class numbers, (n) or (n, 1), or multi-label, 0 and 1 (n, classes). `name` stands
    for the data in messages. Raises UserError for other shapes and types, for labels out of range,
    and for no images.
    """
    labels = labels[:, 0] if labels.shape[1:] == (1,) and len(class_names) != 1 else labels
    shape_fits = images.ndim in (3, 4) and images.shape[3:] in ((), (1,), (3,))
    found = f'{name}: images are {images.dtype}{list(images.shape)}'
    expected = 'expected uint8 of (n, height, width) or (n, height, width, 1 or 3)'
    require(images.dtype == np.uint8 and shape_fits, f'{found}, {expected}')
    require(images.size > 0, f'{found}; expected at least one image')
    flat, rows = (len(images),), (len(images), len(class_names))
    multi_label = labels.shape == rows and labels.dtype.kind in 'iub'
    single_label = labels.shape == flat and labels.dtype.kind in 'iu'
    found = f'{name}: labels are {labels.dtype}{list(labels.shape)}'
    require(multi_label or single_label, f'{found}, expected whole numbers of {flat} or {rows}')
    top = 2 if multi_label else len(class_names)
    wrong = np.argwhere((labels < 0) | (labels >= top))
    if wrong.size:
        there = '0 or 1 for each class' if multi_label else f'{top} classes, 0 to {top - 1}'
        which = f'label {labels[tuple(wrong[0])]} of image {wrong[0][0]} is out of range'
        raise UserError(f'{name}: {which}: there are {there} ({len(wrong)} such labels)')
    return Source(
        count=len(images),
        class_names=tuple(class_names),
        read=lambda i: (images[i], labels[i]),
        read_names=lambda indices: [f'{name}[{i}]' for i in indices],
        read_labels=lambda indices: labels[np.asarray(indices, int)],
        read_sizes=lambda indices: np.array(
            [zlib.crc32(images[i].tobytes()) for i in indices], np.int64
        ),
        labels_in_memory=True,
        multi_label=multi_label,
    )


def digits_splits() -> Splits:
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels; every fifth one is in `test`."""
    # Found, not imported: all of scikit-learn and scipy would be, which takes a second and a half.
    package = importlib.util.find_spec('sklearn')
    if package is None or package.origin is None:
        raise UserError('digits: they are in scikit-learn, which is not installed')
    file = pathlib.Path(package.origin).parent / 'datasets' / 'data' / 'digits.csv.gz'

    def opened(split: str) -> Source:
        table = np.loadtxt(file, int, delimiter=',')
        images, labels = table[:, :-1], table[:, -1]
        chosen = (np.arange(len(labels)) % 5 == 4) == (split == 'test')
        pixels = np.rint(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
        return array_source(pixels[chosen], labels[chosen], '0123456789', name=f'digits/{split}')

    return {split: functools.partial(opened, split) for split in ('train', 'test')}


def npz_splits(path: str) -> Splits:
    """The splits of a file of arrays `SPLIT_images`, `SPLIT_labels` and perhaps `class_names`."""
    with _opened(path) as file:
        names = [n.removesuffix('_images') for n in file.files if n.endswith('_images')]
        needed = [f'{name}_labels' for name in names] or ['SPLIT_images']
        if absent := [name for name in needed if name not in file]:
            raise UserError(f'{path}: no array {absent[0]!r}; it holds {", ".join(file.files)}')
        if 'class_names' in file:
            given = file['class_names']
            fits = given.ndim == 1 and given.dtype.kind in 'SUiu'
            found = f'{path}: class_names are {given.dtype}{list(given.shape)}'
            require(fits, f'{found}, expected text')
            texts = [n.decode() if isinstance(n, bytes) else str(n) for n in given.tolist()]
            class_names = [text.strip() for text in texts]
        else:
            labels = [file[f'{name}_labels'] for name in names]
            count = max(map(_count_classes, labels))
            more = f'{path}: labels up to {count - 1:,}; expected class numbers from 0'
            require(count <= _MOST_CLASSES, f'{more}, or an array class_names')
            _warn_of_gaps(path, count, labels)
            class_names = [str(label) for label in range(count)]

    def opened(split: str) -> Source:
        with _opened(path) as file:
            images, labels = file[f'{split}_images'], file[f'{split}_labels']
        return array_source(images, labels, class_names, name=f'{path}:{split}')

    return {name: functools.partial(opened, name) for name in names}


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Any]:
    require(zipfile.is_zipfile(path), f'{path}: not a whole .npz file, which is a zip archive')
    expected = 'an .npz file of arrays without Python objects'
    with parsing(path, expected), np.load(path, allow_pickle=False) as file:
        yield file


def _count_classes(labels: np.ndarray) -> int:
    """Returns the number of classes of labels that have no names."""
    if labels.ndim == 2 and labels.shape[1] > 1:
        return labels.shape[1]
    # `array_source` rejects other types.
    return int(labels.max()) + 1 if labels.size and labels.dtype.kind in 'iu' else 1


def _warn_of_gaps(path: str, count: int, labels: Sequence[np.ndarray]) -> None:
    """Warns of class numbers below the largest one that no image has."""
    single = [one.ravel().tolist() for one in labels if one.ndim == 1 or one.shape[1:] == (1,)]
    absent = sorted({*range(count)} - set[Any]().union(*single)) if single else []
    if absent:
        text = f'{counted(len(absent), "class")} without images, such as {absent[0]}'
        warn_once(f'{path}: {text}; expected labels from 0 without gaps')
