"""Image files in folders: ROOT/SPLIT/CLASS/NAME.jpg, ROOT/CLASS/NAME.jpg, or without classes."""

import functools
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import NoReturn

from vit_jax.base import MissingFile, UserError, plural, raise_all, require
from vit_jax.base.files import decode_path
from vit_jax.data.image_decoding import formats_by_extension
from vit_jax.data.sources.base import (
    Source,
    SourceKind,
    Splits,
    canonicalize_name,
    labeled_source,
    normalize_look,
    shuffle_once,
    sort_class_names,
    warn_once,
)

SPLIT_NAMES = frozenset('train training test testing val valid validation'.split())
_HEIC = frozenset({'.heic', '.heif', '.hif'})  # images, even if pillow-heif is not installed
# Folders that operating systems and network disks create: thumbnails, deleted files.
_SYSTEM_FOLDERS = frozenset(
    ['__MACOSX', '@eaDir', '#recycle', '$RECYCLE.BIN', 'System Volume Information', 'lost+found']
)


def open_splits(root: str) -> Splits:
    """Returns the splits ROOT/train/CLASS, ROOT/test/CLASS etc., or one split `all` of ROOT/CLASS.

    Images may be in subfolders of a class. Class names are folder names, in the order of
    `sort_class_names`. Opening a split raises one UserError that lists all empty classes and all
    classes that are not in the other splits. A warning counts the images outside of classes.
    """
    path = pathlib.Path(root)
    folders = _split_folders(path)
    if not folders:
        return {'all': lambda: open_folder(path)}
    _warn_of_loose_images(path)
    classes = {split: {*folder_names(folder)} for split, folder in folders.items()}
    looks = {split: {normalize_look(n): n for n in names} for split, names in classes.items()}

    def open_split(split: str) -> Source:
        faults: list[str] = []
        names = classes[split]
        for other, other_names in classes.items():
            shared = {*map(canonicalize_name, names)} & {*map(canonicalize_name, other_names)}
            if not shared:
                continue
            for name in sorted(names ^ other_names):
                has, lacks = (split, other) if name in names else (other, split)
                fault = f'{path}: class {name!r} is in {has}/ but not in {lacks}/'
                similar = looks[lacks].get(normalize_look(name))
                if similar:
                    fault += f', which has {similar!a}'
                faults.append(fault)
        return open_folder(folders[split], faults)

    return {split: functools.partial(open_split, split) for split in folders}


KIND = SourceKind('a folder of train/CLASS/*.jpg or CLASS/*.jpg', os.path.isdir, open_splits)


def would_be_class(folder: str, data: str) -> bool:
    """Returns whether a folder in DATA would be read as a class of images, or as a part of one."""
    path = pathlib.Path(os.path.realpath(folder))
    root = pathlib.Path(os.path.realpath(data))
    if not path.is_relative_to(root):
        return False
    parts = path.relative_to(root).parts
    has_splits = not SPLIT_NAMES.isdisjoint(folder_names(root))
    is_in_split = not SPLIT_NAMES.isdisjoint(parts[:1])
    return all(map(_is_visible, parts)) and (is_in_split or not has_splits)


def _split_folders(path: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the folders of splits by lower-case name; an empty dict if the folders are classes.

    Folders such as `Train` are splits only if all folders have names of splits: `Train` may also be
    a class of vehicles.
    """
    names = folder_names(path)
    if all(name.casefold() in SPLIT_NAMES for name in names):
        splits = {name.casefold(): path / name for name in names}
        require(
            len(splits) == len(names),
            f'{path}: found {", ".join(names)}; expected one folder per split',
        )
        return splits
    if not SPLIT_NAMES & {*names}:
        return {}
    return {name: path / name for name in names if name in SPLIT_NAMES or folder_names(path / name)}


def open_folder(root: pathlib.Path, faults: Sequence[str] = ()) -> Source:
    """Opens the images of ROOT/CLASS/, or images in ROOT/ without classes if it has no subfolders.

    Raises UserError as `files_by_class` does.
    """
    if not folder_names(root) and loose_images(root):
        return shuffle_once(unlabeled_source([str(root)]))
    return files_by_class(root, faults)


def files_by_class(root: pathlib.Path, faults: Sequence[str] = ()) -> Source:
    """Opens the images of ROOT/CLASS/ in a fixed random order.

    Raises one UserError that lists `faults` and all empty classes, if there are any.
    """
    class_names = folder_names(root)
    faults = [*faults]
    if not class_names:
        faults.append(f'{root}: no class folders; expected {root}/CLASS/*.jpg')
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(class_names):
        try:
            images = image_files(root / name)
            paths += images
            labels += [label] * len(images)
        except UserError as error:
            faults.append(f'{error}; add images, or move the folder out of the data')
    raise_all(faults)
    _warn_of_loose_images(root)
    return shuffle_once(labeled_source(paths, labels, [*map(decode_path, class_names)]))


def unlabeled_source(paths: Sequence[str]) -> Source:
    """Opens these files and the images of these folders, without classes; all labels are 0."""
    images: list[str] = []
    for path in map(pathlib.Path, paths):
        if not path.exists():
            raise MissingFile(f'{path}: no such image or folder')
        images += image_files(path) if path.is_dir() else [str(path)]
    return labeled_source(images, [0] * len(images), ())


def image_files(path: pathlib.Path) -> list[str]:
    """Returns the images in a folder and its subfolders, sorted, without hidden ones.

    Logs a warning if there are other files. Raises UserError if there are no images.
    """
    files = sorted(_files_below(path), key=lambda file: file.split(os.sep))
    images = [file for file in files if is_image(file)]
    others = [file for file in files if not is_image(file)]
    empty = f'{path}: no images in this folder'
    if others:
        skipped = f'{plural(len(others), "file")} with other extensions, such as {others[0]}'
        require(bool(images), f'{empty}; found {skipped}')
        warn_once(f'{path}: skipped {skipped}')
    require(bool(images), empty)
    return images


def _files_below(folder: pathlib.Path) -> Iterator[str]:
    """Yields the files in a folder and its subfolders; follows links, and reads no folder twice.

    Reads links to folders last, in the order of their names. So a link to a folder that is also in
    the data under its own name changes no file's name.
    """
    seen: set[str] = set()
    pending = [os.fspath(folder)]
    while pending:
        for parent, folders, files in os.walk(pending.pop(0), onerror=_raise):
            real_path = os.path.realpath(parent)
            if real_path in seen:
                warn_once(f'{parent}: skipped, because it was already read from another path')
                folders.clear()
                continue
            seen.add(real_path)
            folders[:] = sorted(filter(_is_visible, folders))
            pending += filter(os.path.islink, (os.path.join(parent, name) for name in folders))
            yield from (os.path.join(parent, name) for name in filter(_is_visible, files))


def _raise(error: OSError) -> NoReturn:
    raise error


def _is_visible(name: str) -> bool:
    return not name.startswith('.') and name not in _SYSTEM_FOLDERS


def is_image(file: str) -> bool:
    """Returns whether a file has the extension of a supported image format, or of HEIC."""
    suffix = os.path.splitext(file)[1].lower()
    return suffix in _HEIC or suffix in formats_by_extension()


def folder_names(path: pathlib.Path) -> list[str]:
    """Returns the names of the visible subfolders in the order of `sort_class_names`."""
    _, folders, _ = next(os.walk(path, onerror=_raise))
    return sort_class_names(filter(_is_visible, folders))


def loose_images(path: pathlib.Path) -> list[str]:
    """Returns the names of the images that are directly in a folder, not in subfolders."""
    _, _, files = next(os.walk(path, onerror=_raise))
    return [name for name in files if _is_visible(name) and is_image(name)]


def _warn_of_loose_images(folder: pathlib.Path) -> None:
    """Logs a warning if there are images outside of the class folders."""
    if images := loose_images(folder):
        count = plural(len(images), 'image')
        warn_once(f'{folder}: {count} outside of class folders skipped, such as {min(images)}')
