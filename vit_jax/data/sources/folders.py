"""Images as files in folders: ROOT/SPLIT/CLASS/NAME.jpg, ROOT/CLASS/NAME.jpg, or any files."""

import functools
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import NoReturn

from vit_jax.base import MissingFile, UserError, counted, refuse, require
from vit_jax.data.image_decoding import formats_by_ending
from vit_jax.data.sources.base import (
    Source,
    SourceKind,
    Splits,
    canonical_name,
    class_order,
    labeled_source,
    shuffle_once,
    warn_once,
)

SPLIT_NAMES = frozenset('train training test testing val valid validation'.split())
_HEIC = frozenset({'.heic', '.heif', '.hif'})  # images, even if they cannot be read here
# Folders that operating systems and network disks put next to images: thumbnails, removed files.
_SYSTEM_FOLDERS = frozenset(
    ['__MACOSX', '@eaDir', '#recycle', '$RECYCLE.BIN', 'System Volume Information', 'lost+found']
)


def open_splits(root: str) -> Splits:
    """Opens ROOT/train/CLASS and so on as splits, and a ROOT of classes as one split, `all`.

    Images may lie deeper within a class. Class names are the names of the folders, in the order of
    `class_order`. Opening a split raises UserError with all empty classes, and all classes that it
    does not share with the other splits. Images outside of classes are counted in a warning.
    """
    path = pathlib.Path(root)
    folders = _split_folders(path)
    if not folders:
        return {'all': lambda: files_by_class(path)}
    _warn_of_loose_images(path)
    classes = {split: {*folder_names(folder)} for split, folder in folders.items()}

    def open_split(split: str) -> Source:
        faults, own = list[str](), classes[split]
        for other, names in classes.items():
            same_data = {*map(canonical_name, own)} & {*map(canonical_name, names)}
            for name in sorted(own ^ names) if same_data else ():
                has, lacks = (split, other) if name in own else (other, split)
                faults.append(f'{path}: class {name!r} is in {has}/ but not in {lacks}/')
        return files_by_class(folders[split], faults)

    return {split: functools.partial(open_split, split) for split in folders}


KIND = SourceKind('a folder of train/CLASS/*.jpg or CLASS/*.jpg', os.path.isdir, open_splits)


def _split_folders(path: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the folders of splits by lower-case name; none where the folders are classes.

    Capitalized names are splits if all folders have such names: `Train` may be a class of vehicles.
    """
    names = folder_names(path)
    if all(name.casefold() in SPLIT_NAMES for name in names):
        splits = {name.casefold(): path / name for name in names}
        twice = f'{path}: {", ".join(names)}: expected one folder for each split'
        require(len(splits) == len(names), twice)
        return splits
    if not SPLIT_NAMES & {*names}:
        return {}
    return {name: path / name for name in names if name in SPLIT_NAMES or folder_names(path / name)}


def files_by_class(root: pathlib.Path, faults: Sequence[str] = ()) -> Source:
    """Opens the images of ROOT/CLASS/, in a fixed random order.

    Raises UserError with these faults, and for empty classes.
    """
    class_names, faults = folder_names(root), [*faults]
    if not class_names:
        faults.append(f'{root}: no folders of classes; expected {root}/CLASS/*.jpg')
    paths, labels = list[str](), list[int]()
    for label, name in enumerate(class_names):
        try:
            images = image_files(root / name)
            paths += images
            labels += [label] * len(images)
        except UserError as error:
            faults.append(f'{error}: add images, or move it out of the data')
    refuse(faults)
    _warn_of_loose_images(root)
    return shuffle_once(labeled_source(paths, labels, class_names))


def unlabeled(paths: Sequence[str]) -> Source:
    """These files, and the images of these folders; no classes, and every label is 0."""
    images: list[str] = []
    for path in map(pathlib.Path, paths):
        if not path.exists():
            raise MissingFile(f'{path}: no such image or folder')
        images += image_files(path) if path.is_dir() else [str(path)]
    return labeled_source(images, [0] * len(images), ())


def image_files(path: pathlib.Path) -> list[str]:
    """Returns the images below a folder, sorted, without hidden files and folders.

    Warns of other files. Raises UserError if there are no images.
    """
    files = sorted(_files_below(path), key=lambda file: file.split(os.sep))
    images = [file for file in files if is_image(file)]
    others = [file for file in files if not is_image(file)]
    absent = f'{path}: no images in this folder'
    if others:
        left_out = f'{counted(len(others), "file")} of other endings, such as {others[0]}'
        require(bool(images), f'{absent}; {left_out}')
        warn_once(f'{path}: left out {left_out}')
    require(bool(images), absent)
    return images


def _files_below(folder: pathlib.Path) -> Iterator[str]:
    """Yields the files below a folder; links are followed, each folder is read once.

    Links to folders are read last, in the order of their names, so that a link to a folder that is
    in the data anyway changes no file's name.
    """
    seen, links = set[str](), [os.fspath(folder)]
    while links:
        for place, folders, files in os.walk(links.pop(0), onerror=_raise):
            if (real := os.path.realpath(place)) in seen:
                warn_once(f'{place}: left out, as it was read by another path')
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(filter(_is_visible, folders))
            links += filter(os.path.islink, (os.path.join(place, name) for name in folders))
            yield from (os.path.join(place, name) for name in filter(_is_visible, files))


def _raise(error: OSError) -> NoReturn:
    raise error


def _is_visible(name: str) -> bool:
    return not name.startswith('.') and name not in _SYSTEM_FOLDERS


def is_image(file: str) -> bool:
    """Whether the ending of a file's name is one of images, readable here or not."""
    suffix = os.path.splitext(file)[1].lower()
    return suffix in _HEIC or suffix in formats_by_ending()


def folder_names(path: pathlib.Path) -> list[str]:
    """Returns the names of the visible folders in a folder, in the order of classes."""
    return class_order(filter(_is_visible, next(os.walk(path, onerror=_raise))[1]))


def loose_images(path: pathlib.Path) -> list[str]:
    """Returns the names of the images directly in a folder."""
    names = next(os.walk(path, onerror=_raise))[2]
    return [name for name in names if _is_visible(name) and is_image(name)]


def _warn_of_loose_images(folder: pathlib.Path) -> None:
    """Warns of images next to the folders of classes."""
    if images := loose_images(folder):
        count = counted(len(images), 'image')
        warn_once(f'{folder}: {count} in no folder of a class left out, such as {min(images)}')
