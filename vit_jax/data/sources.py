"""Stored images at random access: the embedded digits, arrays, folders; and slices of them."""

import dataclasses
import logging
import os
import pathlib
import re
from collections.abc import Callable, Sequence

import numpy as np

from vit_jax import records
from vit_jax.typing import Int

IMAGE_SUFFIXES = frozenset('.jpg .jpeg .png .bmp .gif .tif .tiff .webp .ppm .jp2'.split())


@dataclasses.dataclass(frozen=True)
class Source:
    """One split of a data set: labels in memory, images read when asked for.

    `read(i)` gives the encoded bytes or the uint8 array of image i, `describe(i)` what a person
    would call it.
    """

    labels: Int[np.ndarray, 'n']
    class_names: tuple[str, ...]
    read: Callable[[int], bytes | np.ndarray]
    describe: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.labels)


def open_source(data: str, split: str) -> Source:
    """The images that a configuration names: `data` is `digits`, an npz file or a folder.

    `split` is a name and an optional slice of it: `train`, `train[:90%]`, `test[100:200]`. A
    slice of a folder is a random sample with a fixed seed, not its first classes. Raises
    ValueError or FileNotFoundError with what was found instead.
    """
    name, part = _parse_split(split)
    if data == 'digits':
        source = digits(name)
    elif data.endswith('.npz'):
        source = npz_file(data, name)
    elif os.path.isdir(data):
        source = folder(data, name)
    else:
        raise FileNotFoundError(
            f"data={data!r}: no such folder; expected 'digits', FILE.npz, or a folder that holds "
            f'train/CLASS/*.jpg'
        )
    selected = range(len(source))[part(len(source))]
    if not selected:
        raise ValueError(f'split {split!r} of {data} is empty: {name} has {len(source)} images')
    return source if len(selected) == len(source) else select(source, selected)


def select(source: Source, indices: Sequence[int]) -> Source:
    """The source that holds these images only, in this order."""
    chosen = np.asarray(indices)
    return Source(
        labels=source.labels[chosen],
        class_names=source.class_names,
        read=lambda i: source.read(int(chosen[i])),
        describe=lambda i: source.describe(int(chosen[i])),
    )


def arrays(
    images: np.ndarray,
    labels: np.ndarray,
    class_names: Sequence[str],
    *,
    name: str,
) -> Source:
    """Images already in memory: (n, height, width) or (n, height, width, 1 or 3).

    Raises ValueError where shapes, types or labels are not those of images of these classes.
    """
    if (
        images.dtype != np.uint8
        or images.ndim not in (3, 4)
        or images.shape[3:] not in ((), (1,), (3,))
    ):
        raise ValueError(
            f'{name}: images are {images.dtype}{list(images.shape)}, expected uint8 of shape '
            f'(n, height, width) or (n, height, width, 1 or 3)'
        )
    if labels.shape != (len(images),) or labels.dtype.kind not in 'iu':
        raise ValueError(
            f'{name}: labels are {labels.dtype}{list(labels.shape)}, expected whole numbers of '
            f'shape ({len(images)},)'
        )
    wrong = np.flatnonzero((labels < 0) | (labels >= len(class_names)))
    if wrong.size:
        raise ValueError(
            f'{name}: label {labels[wrong[0]]} of image {wrong[0]} is out of range: there are '
            f'{len(class_names)} classes, 0 to {len(class_names) - 1} ({wrong.size} such labels)'
        )
    return Source(
        labels=labels.astype(np.int32),
        class_names=tuple(class_names),
        read=lambda i: images[i],
        describe=lambda i: f'{name}[{i}]',
    )


def digits(split: str) -> Source:
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels; every fifth one is for testing."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    is_test = np.arange(len(labels)) % 5 == 4
    parts = {'train': ~is_test, 'test': is_test}
    if split not in parts:
        raise ValueError(f'digits have no split {split!r}; {records.nearest(split, parts)}')
    pixels = np.rint(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    names = [str(digit) for digit in range(10)]
    chosen = parts[split]
    return arrays(pixels[chosen], labels[chosen], names, name=f'digits/{split}')


def npz_file(path: str, split: str) -> Source:
    """A file of arrays `SPLIT_images`, `SPLIT_labels` and, if there are names, `class_names`."""
    with np.load(path, allow_pickle=False) as file:
        wanted = f'{split}_images', f'{split}_labels'
        absent = [name for name in wanted if name not in file]
        if absent:
            raise ValueError(f'{path}: no array {absent[0]!r}; it holds {", ".join(file.files)}')
        images, labels = (file[name] for name in wanted)
        if 'class_names' in file:
            class_names = [str(name) for name in file['class_names']]
        else:
            top = max(int(file[name].max()) for name in file.files if name.endswith('_labels'))
            class_names = [str(label) for label in range(top + 1)]
    return arrays(images, labels, class_names, name=f'{path}:{split}')


def unlabelled(paths: Sequence[str]) -> Source:
    """Images as files, and all those in folders, without classes; every label is 0.

    Raises ValueError or FileNotFoundError for a path that is neither.
    """
    found: list[pathlib.Path] = []
    for path in map(pathlib.Path, paths):
        if not path.exists():
            raise FileNotFoundError(f'{path}: no such image or folder')
        found += _image_files(path) if path.is_dir() else [path]
    return Source(
        labels=np.zeros(len(found), np.int32),
        class_names=(),
        read=lambda i: found[i].read_bytes(),
        describe=lambda i: str(found[i]),
    )


def folder(root: str, split: str) -> Source:
    """Images as files: ROOT/SPLIT/CLASS/NAME.jpg. Class names are the sorted folder names.

    The files are in one random order, the same every time, so that a slice is a fair sample.
    Raises ValueError for an empty class and for classes that are not those of the other splits.
    """
    splits = _class_folders(pathlib.Path(root))
    if split not in splits:
        raise ValueError(
            f'{root}: no split {split!r}: expected {root}/{split}/CLASS/*.jpg; '
            + (f'there is {", ".join(sorted(splits))}' if splits else 'there are no such folders')
        )
    class_names = splits[split]
    for other, names in splits.items():
        if set(names).isdisjoint(class_names):
            continue  # not a split of the same data
        for name in sorted(set(names) ^ set(class_names)):
            here, there = (split, other) if name in class_names else (other, split)
            raise ValueError(f'{root}: class {name!r} is in {here}/ but not in {there}/')
    files, labels = [], []
    for label, name in enumerate(class_names):
        found = _image_files(pathlib.Path(root, split, name))
        files += found
        labels += [label] * len(found)
    order = np.random.default_rng(0).permutation(len(files))
    return Source(
        labels=np.asarray(labels, np.int32)[order],
        class_names=tuple(class_names),
        read=lambda i: files[order[i]].read_bytes(),
        describe=lambda i: str(files[order[i]]),
    )


def _class_folders(root: pathlib.Path) -> dict[str, list[str]]:
    """The classes of each split: sub-folders of sub-folders, hidden ones left out."""

    def folders(path: pathlib.Path) -> list[str]:
        return sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith('.'))

    found = {split: folders(root / split) for split in folders(root)}
    return {split: classes for split, classes in found.items() if classes}


def _image_files(path: pathlib.Path) -> list[pathlib.Path]:
    files = sorted(p for p in path.rglob('*') if p.is_file() and not p.name.startswith('.'))
    images = [p for p in files if p.suffix.lower() in IMAGE_SUFFIXES]
    ignored = len(files) - len(images)
    if not images:
        detail = f'; {ignored} files have other endings, such as {files[0].name}' if ignored else ''
        raise ValueError(f'{path}: no images in this folder{detail}')
    if ignored:
        other = next(p for p in files if p not in images)
        logging.warning('%s: %d files are not images by their ending: %s', path, ignored, other)
    return images


def _parse_split(split: str) -> tuple[str, Callable[[int], slice]]:
    """The split's name and the slice of its length that is meant."""
    match = re.fullmatch(r'(\w+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?', split)
    if not match:
        raise ValueError(
            f'split {split!r}: expected a name, or NAME[:90%], NAME[90%:], NAME[10:20]'
        )
    name, *bounds = match.groups()

    def part(length: int) -> slice:
        ends = (
            None if b is None else round(int(b[:-1]) * length / 100) if b[-1] == '%' else int(b)
            for b in bounds
        )
        return slice(*ends)

    return name, part
