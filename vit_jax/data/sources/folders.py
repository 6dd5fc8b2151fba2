"""Images as files in folders: ROOT/SPLIT/CLASS/NAME.jpg, ROOT/CLASS/NAME.jpg, or any files."""

import errno
import functools
import logging
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence

from vit_jax.base import MissingFile, UserError, close_by, counted, refuse
from vit_jax.data.image_headers import HEIC_REMEDY, can_read, kinds_by_ending
from vit_jax.data.sources.base import Source, Splits, in_fixed_order, labelled_source

HEIC = frozenset({'.heic', '.heif', '.hif'})
_ELSEWHERE = HEIC | {'.avif'}  # images, whether they can be read here or not
_MISREAD = '.pfm'  # floating point, of which OpenCV makes 8 bits as if they were whole numbers
ALONE = '%s: of %s this is the only image, none can be held out for testing'
_WAY_OUT = 'remove the folder, or add images'
SPLIT_NAMES = frozenset('train training test testing val valid validation'.split())


def folder_splits(root: str) -> Splits:
    """ROOT/train/CLASS and so on are splits; a ROOT of classes is one split, `all`.

    Class names are the sorted names of the folders. Opening a split raises UserError for an empty
    class, and for classes other than those of the other splits.
    """
    path = pathlib.Path(root)
    splits = {name: folder_names(path / name) for name in folder_names(path)}
    named = SPLIT_NAMES & {*splits}
    if not named and any(has_images(path / name) for name in splits):
        return {'all': lambda: files_by_class(path)}
    for name in named:
        if not splits[name]:
            found = '; it holds images, but no classes' if has_images(path / name) else ''
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
    whole = not named and any(has_images(path / name) for name in within)
    splits = {'': [*within]} if whole else {name: within[name] for name in sorted(named)}
    found = []
    for split, classes in splits.items():
        for name in classes:
            images, others, _ = _files(path / split / name)
            if not images:
                found.append(f'{_nothing_in(path / split / name, others)}: {_WAY_OUT}')
            if whole and len(images) == 1:
                alone = ALONE % (images[0], f'class {name!r}')
                found.append(f'{alone}; add some, or remove its folder')
        for other in splits:
            for name in sorted({*classes} - {*splits[other]}):
                found.append(f'{root}: class {name!r} is in {split}/ but not in {other}/')
    return found


def files_by_class(root: pathlib.Path) -> Source:
    """The images of ROOT/CLASS/, in a fixed random order. Raises UserError for empty classes."""
    class_names, faults, found = folder_names(root), list[str](), list[tuple[str, int]]()
    for i, name in enumerate(class_names):
        try:
            found += [(path, i) for path in image_files(root / name)]
        except UserError as error:
            faults.append(f'{error}: {_WAY_OUT}')
    refuse(faults)
    paths, labels = [path for path, _ in found], [label for _, label in found]
    return in_fixed_order(labelled_source(paths, labels, class_names))


def unlabelled(paths: Sequence[str]) -> Source:
    """These files, and the images of these folders; no classes, and every label is 0."""
    found: list[str] = []
    for path in map(pathlib.Path, paths):
        if not path.exists():
            raise MissingFile(f'{path}: no such image or folder{close_by(path)}')
        if not path.is_dir() and not path.is_file():
            raise UserError(f'{path}: neither a regular file nor a folder')
        found += image_files(path) if path.is_dir() else [str(path)]
    return labelled_source(found, [0] * len(found), ())


def image_files(path: pathlib.Path) -> list[str]:
    """The images below a folder, sorted, without files and folders that begin with a dot.

    Warns of other files, and of what cannot be read as its name or link shows. Raises UserError if
    there are no images.
    """
    images, others, links = _files(path)
    if not images:
        raise UserError(_nothing_in(path, others))
    if others:
        count = counted(len(others), 'file')
        logging.warning(
            '%s: %s left out, whose ending or kind is not that of an image: %s',
            path,
            count,
            others[0],
        )
    if links:
        count = counted(len(links), 'broken link')
        logging.warning('%s: %s, to no file: %s', path, count, links[0])
    heic = [] if can_read('HEIF') else [file for file in images if _suffix(file) in HEIC]
    if heic:
        count = counted(len(heic), 'HEIC photo')
        logging.warning('%s: %s; %s: %s', path, count, HEIC_REMEDY, heic[0])
    return images


def _nothing_in(path: pathlib.Path, others: Sequence[str]) -> str:
    text = f'{path}: no images in this folder'
    if not others:
        return text
    name = os.path.basename(others[0])
    return f'{text}; {counted(len(others), "file")} of other endings, such as {name}'


def _files(path: pathlib.Path) -> tuple[list[str], list[str], list[str]]:
    """Images by their ending, broken links too; other files; links that lead to no file."""
    images, others, links = list[str](), list[str](), list[str]()
    for file, kind in sorted(_below(path), key=lambda found: found[0].split(os.sep)):
        (images if is_image(file) and kind != 'special' else others).append(file)
        if kind == 'link':
            links.append(file)
    return images, others, links


def _below(folder: str | pathlib.Path) -> Iterator[tuple[str, str]]:
    """What is below a folder: a `file`, a broken `link`, or `special`, a pipe or a device.

    The disk is asked about folders alone.
    """
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from _below(entry.path)
        elif _leads(entry.is_file):
            yield entry.path, 'file'
        elif not entry.is_symlink():
            yield entry.path, 'special'
        elif not os.path.exists(entry.path):
            yield entry.path, 'link'


def _leads(ask: Callable[[], bool]) -> bool:
    """What an entry says to this; False of a link that leads to itself."""
    try:
        return ask()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def _entries(folder: str | pathlib.Path) -> Iterator[os.DirEntry[str]]:
    """What is in a folder, without what begins with a dot."""
    with os.scandir(folder) as entries:
        yield from (entry for entry in entries if not entry.name.startswith('.'))


def is_image(file: str) -> bool:
    """Has the name of a file an ending of images?"""
    suffix = _suffix(file)
    return suffix in _ELSEWHERE or (suffix in kinds_by_ending() and suffix != _MISREAD)


def _suffix(file: str) -> str:
    return os.path.splitext(file)[1].lower()


def folder_names(path: pathlib.Path) -> list[str]:
    """The sorted names of the folders in it, without hidden ones."""
    return sorted(entry.name for entry in _entries(path) if _leads(entry.is_dir))


def has_images(path: pathlib.Path) -> bool:
    """Are there images directly in a folder?"""
    return any(is_image(entry.name) for entry in _entries(path) if _leads(entry.is_file))
