"""Images as files in folders: ROOT/SPLIT/CLASS/NAME.jpg, ROOT/CLASS/NAME.jpg, or any files."""

import functools
import logging
import os
import pathlib
from collections.abc import Iterator, Sequence

from vit_jax.base.errors import MissingFile, UserError
from vit_jax.data.sources.base import Source, Splits, in_fixed_order, labelled_source

IMAGE_SUFFIXES = frozenset('.jpg .jpeg .png .bmp .gif .tif .tiff .webp .ppm .jp2'.split())
SPLIT_NAMES = frozenset('train training test testing val valid validation'.split())


def folder_splits(root: str) -> Splits:
    """ROOT/train/CLASS and so on are splits; a ROOT of classes is one split, `all`.

    Class names are the sorted names of the folders. Opening a split raises UserError for an empty
    class, and for classes other than those of the other splits.
    """
    path = pathlib.Path(root)
    splits = {name: folder_names(path / name) for name in folder_names(path)}
    named = SPLIT_NAMES & {*splits}
    if not named and any(_has_images(path / name) for name in splits):
        return {'all': lambda: files_by_class(path)}
    for name in named:
        if not splits[name]:
            found = '; it holds images, but no classes' if _has_images(path / name) else ''
            raise UserError(f'{root}: {name}/ holds no folders: expected {name}/CLASS/*.jpg{found}')
    splits = {name: classes for name, classes in splits.items() if classes}
    if not splits:
        expected = f'{root}/train/CLASS/*.jpg or {root}/CLASS/*.jpg'
        raise UserError(f'{root}: no images found: expected {expected}')

    def opened(split: str) -> Source:
        for other, classes in splits.items():
            different = sorted({*classes} ^ {*splits[split]})
            if different and {*classes} & {*splits[split]}:  # else it is no split of the same data
                has, lacks = (split, other) if different[0] in splits[split] else (other, split)
                raise UserError(f'{root}: class {different[0]!r} is in {has}/ but not in {lacks}/')
        return files_by_class(path / split)

    return {name: functools.partial(opened, name) for name in splits}


def files_by_class(root: pathlib.Path) -> Source:
    """The images of ROOT/CLASS/, in a fixed random order. Raises UserError for an empty class."""
    class_names = folder_names(root)
    found = [(path, i) for i, name in enumerate(class_names) for path in image_files(root / name)]
    paths, labels = [path for path, _ in found], [label for _, label in found]
    return in_fixed_order(labelled_source(paths, labels, class_names))


def unlabelled(paths: Sequence[str]) -> Source:
    """These files, and the images of these folders; no classes, and every label is 0."""
    found: list[str] = []
    for path in map(pathlib.Path, paths):
        if not path.exists():
            raise MissingFile(f'{path}: no such image or folder')
        found += image_files(path) if path.is_dir() else [str(path)]
    return labelled_source(found, [0] * len(found), ())


def image_files(path: pathlib.Path) -> list[str]:
    """The images below a folder, sorted. Warns of other files; UserError if there are no images."""
    images, others = list[str](), list[str]()
    for file in sorted(_files(path), key=lambda file: file.split(os.sep)):
        known = os.path.splitext(file)[1].lower() in IMAGE_SUFFIXES
        (images if known else others).append(file)
    count = len(others)
    if not images:
        name = os.path.basename(others[0]) if others else ''
        detail = f'; {count} files have other endings, such as {name}' if others else ''
        raise UserError(f'{path}: no images in this folder{detail}')
    if others:
        logging.warning('%s: %d files are not images by their ending: %s', path, count, others[0])
    return images


def _files(folder: str | pathlib.Path) -> Iterator[str]:
    """The files below a folder, without hidden ones; the disk is asked about folders alone."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)
            elif entry.is_file() and not entry.name.startswith('.'):
                yield entry.path


def folder_names(path: pathlib.Path) -> list[str]:
    """The sorted names of the folders in it, without hidden ones."""
    return sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith('.'))


def _has_images(path: pathlib.Path) -> bool:
    return any(p.suffix.lower() in IMAGE_SUFFIXES for p in path.iterdir() if p.is_file())
