"""Images in memory: arrays, .npz files, scikit-learn's digits."""

import functools
import importlib.util
import pathlib
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from vit_jax.base import UserError, require, usable
from vit_jax.base.npz import StoredArray, decode_names, open_npz
from vit_jax.data.sources.base import Source, SourceKind, Splits, labeled_source

_ARRAYS = 'an .npz file of arrays without Python objects'
_MOST_CLASSES = 100_000  # limit without class names; no published data set has more


def array_source(
    images: np.ndarray, labels: np.ndarray, class_names: Sequence[str], *, name: str
) -> Source:
    """Makes a source of uint8 images (n, height, width) or (n, height, width, 1 or 3).

    Args:
      images: The pixels.
      labels: Class numbers (n) or (n, 1), or multi-label rows of 0 and 1 (n, classes).
      class_names: The names of the classes in the order of their numbers.
      name: The name of the data for messages.

    Raises:
      UserError: If a shape or dtype is wrong, a label is out of range, or there are no images.
    """
    if labels.shape[1:] == (1,) and len(class_names) != 1:
        labels = labels[:, 0]
    has_image_shape = images.ndim in (3, 4) and images.shape[3:] in ((), (1,), (3,))
    require(
        has_image_shape and images.size > 0 and images.dtype == np.uint8,
        f'{name}: images are {images.dtype}{list(images.shape)}; '
        'expected uint8 of shape (n, height, width) or (n, height, width, 1 or 3)',
    )
    single_shape = (len(images),)
    multi_shape = (len(images), len(class_names))
    single_label = labels.shape == single_shape and labels.dtype.kind in 'iu'
    multi_label = labels.shape == multi_shape and labels.dtype.kind in 'iub'
    require(
        multi_label or single_label,
        f'{name}: labels are {labels.dtype}{list(labels.shape)}; '
        f'expected integers of shape {single_shape} or {multi_shape}',
    )
    end = 2 if multi_label else len(class_names)
    out_of_range = np.argwhere((labels < 0) | (labels >= end))
    if out_of_range.size:
        first = tuple(out_of_range[0])
        expected = '0 or 1 for each class' if multi_label else f'0 to {end - 1} for {end} classes'
        raise UserError(
            f'{name}: label {labels[first]} of image {first[0]} is out of range; '
            f'expected {expected} ({len(out_of_range)} such labels)'
        )
    return labeled_source(
        range(len(images)),
        labels,
        class_names,
        read=lambda i: images[i],
        name_of=lambda i: f'{name}[{i}]',
        size_of=lambda i: zlib.crc32(images[i].tobytes()),
    )


def _recognizes(data: str) -> bool:
    return data == 'digits' or data.endswith('.npz')


def _open_splits(data: str) -> Splits:
    return _digits_splits() if data == 'digits' else _npz_splits(data)


KIND = SourceKind("'digits', FILE.npz", _recognizes, _open_splits)


def _digits_splits() -> Splits:
    """Opens scikit-learn's 1,797 handwritten digits of 8x8 pixels; every fifth is in `test`."""
    # Reads the file without importing scikit-learn and scipy, which takes 1.5 s.
    package = importlib.util.find_spec('sklearn')
    assert package is not None and package.origin is not None
    file = pathlib.Path(package.origin).parent / 'datasets' / 'data' / 'digits.csv.gz'

    def open_split(split: str) -> Source:
        table = np.loadtxt(file, int, delimiter=',')
        pixels = np.rint(table[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
        labels = table[:, -1]
        is_test = np.arange(len(labels)) % 5 == 4
        in_split = is_test if split == 'test' else ~is_test
        return array_source(
            pixels[in_split], labels[in_split], '0123456789', name=f'digits/{split}'
        )

    return {split: functools.partial(open_split, split) for split in ('train', 'test')}


def _npz_splits(path: str) -> Splits:
    """Opens a file of arrays `SPLIT_images`, `SPLIT_labels` and, optionally, `class_names`."""
    with usable(path, _ARRAYS):
        arrays = open_npz(path)
    names = [n.removesuffix('_images') for n in arrays if n.endswith('_images')]
    needed = [f'{name}_labels' for name in names] or ['SPLIT_images']
    if absent := [name for name in needed if name not in arrays]:
        raise UserError(f'{path}: no array {absent[0]!r}; found {", ".join(arrays)}')
    with usable(path, _ARRAYS):
        class_names = _read_class_names(arrays, names, path)

    def open_split(split: str) -> Source:
        images = arrays[f'{split}_images']
        labels = arrays[f'{split}_labels']
        require(
            images.shape[:1] == labels.shape[:1],
            f'{path}:{split}: images of shape {images.shape} and labels of shape {labels.shape}; '
            'expected a label per image',
        )
        with usable(path, _ARRAYS):
            pixels = images.read()
            numbers = labels.read()
        return array_source(pixels, numbers, class_names, name=f'{path}:{split}')

    return {name: functools.partial(open_split, name) for name in names}


def _read_class_names(
    arrays: Mapping[str, StoredArray], splits: Sequence[str], path: str
) -> list[str]:
    """Returns the array `class_names`, or the class numbers as text if there is none."""
    if 'class_names' in arrays:
        names = arrays['class_names'].read()
        require(
            names.ndim == 1 and names.dtype.kind in 'SUiu',
            f'{path}: class_names are {names.dtype}{list(names.shape)}; expected strings',
        )
        return decode_names(names)
    count = max(_count_classes(arrays[f'{split}_labels'].read()) for split in splits)
    require(
        count <= _MOST_CLASSES,
        f'{path}: label {count - 1:,}; expected below {_MOST_CLASSES}, or an array class_names',
    )
    return [str(number) for number in range(count)]


def _count_classes(labels: np.ndarray) -> int:
    """Returns the number of classes of labels without class names."""
    if labels.ndim == 2 and labels.shape[1] > 1:
        return labels.shape[1]
    # `array_source` rejects other types.
    return int(labels.max()) + 1 if labels.size and labels.dtype.kind in 'iu' else 1
