"""Images as files in folders: ROOT/SPLIT/CLASS/NAME.jpg, ROOT/CLASS/NAME.jpg, or any files."""

import functools
import logging
import pathlib
from collections.abc import Sequence

from vit_jax.base.errors import MissingFile, UserError
from vit_jax.data.image_headers import HEIC_REMEDY, can_read
from vit_jax.data.sources.base import Source, Splits, in_fixed_order, labelled_source

HEIC = frozenset({'.heic', '.heif', '.hif'})
IMAGE_SUFFIXES = frozenset('.jpg .jpeg .png .bmp .gif .tif .tiff .webp .ppm .jp2'.split()) | {
    *HEIC,
    '.avif',
}
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


def problems(root: str) -> list[str]:
    """Everything that keeps the splits of a folder from being opened, each with the way out."""
    path = pathlib.Path(root)
    within = {name: folder_names(path / name) for name in folder_names(path)}
    named = SPLIT_NAMES & {*within}
    whole = not named and any(_has_images(path / name) for name in within)
    splits = {'': [*within]} if whole else {name: within[name] for name in sorted(named)}
    found = []
    for split, classes in splits.items():
        for name in classes:
            images, _, _ = _files(path / split / name)
            if not images:
                found.append(
                    f'{path / split / name}: no images in this folder: remove it, or add some'
                )
            if whole and len(images) == 1:
                text = 'its class has one image, none can be held out for testing'
                found.append(f'{images[0]}: {text}; add some, or remove its folder')
        for other in splits:
            for name in sorted({*classes} - {*splits[other]}):
                found.append(f'{root}: class {name!r} is in {split}/ but not in {other}/')
    return found


def files_by_class(root: pathlib.Path) -> Source:
    """The images of ROOT/CLASS/, in a fixed random order. Raises UserError for an empty class."""
    class_names = folder_names(root)
    found = [(path, i) for i, name in enumerate(class_names) for path in image_files(root / name)]
    paths, labels = [path for path, _ in found], [label for _, label in found]
    return in_fixed_order(labelled_source(paths, labels, class_names))


def unlabelled(paths: Sequence[str]) -> Source:
    """These files, and the images of these folders; no classes, and every label is 0."""
    found: list[pathlib.Path] = []
    for path in map(pathlib.Path, paths):
        if not path.exists():
            raise MissingFile(f'{path}: no such image or folder')
        found += image_files(path) if path.is_dir() else [path]
    return labelled_source(found, [0] * len(found), ())


def image_files(path: pathlib.Path) -> list[pathlib.Path]:
    """The images below a folder, sorted, without files and folders that begin with a dot.

    Warns of other files, and of what cannot be read as its name or link shows. Raises UserError if
    there are no images.
    """
    images, others, links = _files(path)
    count = len(others)
    if not images:
        detail = f'; {count} files have other endings, such as {others[0].name}' if others else ''
        raise UserError(f'{path}: no images in this folder{detail}')
    if others:
        logging.warning('%s: %d files are not images by their ending: %s', path, count, others[0])
    if links:
        logging.warning('%s: %d links lead to no file: %s', path, len(links), links[0])
    heic = [] if can_read('HEIF') else [p for p in images if p.suffix.lower() in HEIC]
    if heic:
        logging.warning('%s: %d HEIC photos; %s: %s', path, len(heic), HEIC_REMEDY, heic[0])
    return images


def _files(path: pathlib.Path) -> tuple[list[pathlib.Path], list[pathlib.Path], list[pathlib.Path]]:
    """Images by their ending, broken links too; other files; links that lead to no file."""
    below = sorted(p for p in path.rglob('*') if not _hidden(p.relative_to(path)))
    is_file = {p: p.is_file() for p in below}
    links = [p for p in below if not is_file[p] and p.is_symlink()]
    present = [p for p in below if is_file[p] or (p.is_symlink() and not p.exists())]
    images = [p for p in present if p.suffix.lower() in IMAGE_SUFFIXES]
    return images, [p for p in present if p.suffix.lower() not in IMAGE_SUFFIXES], links


def _hidden(path: pathlib.Path) -> bool:
    return any(part.startswith('.') for part in path.parts)


def folder_names(path: pathlib.Path) -> list[str]:
    """The sorted names of the folders in it, without hidden ones."""
    return sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith('.'))


def _has_images(path: pathlib.Path) -> bool:
    files = (p for p in path.iterdir() if p.is_file() and not _hidden(p.relative_to(path)))
    return any(p.suffix.lower() in IMAGE_SUFFIXES for p in files)
