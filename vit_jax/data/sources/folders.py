"""Images as files in folders: ROOT/SPLIT/CLASS/NAME.jpg, ROOT/CLASS/NAME.jpg, or any files."""

import collections
import errno
import functools
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence

from vit_jax.base import MissingFile, UserError, close_by, counted, refuse
from vit_jax.data.image_headers import HEIC_REMEDY, can_read, kinds_by_ending
from vit_jax.data.sources.base import (
    Source,
    Splits,
    class_order,
    in_fixed_order,
    labelled_source,
    warn_once,
)

HEIC = frozenset({'.heic', '.heif', '.hif'})
_ELSEWHERE = HEIC | {'.avif'}  # images, whether they can be read here or not
_MISREAD = '.pfm'  # floating point, which is not supported
SPLIT_NAMES = frozenset('train training test testing val valid validation'.split())
# Folders that operating systems and network disks put next to images: thumbnails, removed files.
_OF_SYSTEMS = frozenset(
    ['__MACOSX', '@eaDir', '#recycle', '$RECYCLE.BIN', 'System Volume Information', 'lost+found']
)


def folder_splits(root: str) -> Splits:
    """Opens ROOT/train/CLASS and so on as splits, and a ROOT of classes as one split, `all`.

    Images may lie deeper within a class. Class names are the names of the folders, in the order of
    `class_order`. Opening a split raises UserError with all empty classes, and all classes that it
    does not share with the other splits. Images outside of classes are counted in a warning.
    """
    path = _without_wrapper(pathlib.Path(root))
    splits = _split_folders(path)
    if not splits:
        if not folder_names(path):
            expected = f'{root}/train/CLASS/*.jpg or {root}/CLASS/*.jpg'
            raise UserError(f'{root}: no folders of classes; expected {expected}')
        _warn_of_equal_folders(path)
        return {'all': lambda: files_by_class(path)}
    for name, folder in splits.items():
        if not folder_names(folder):
            found = '; it holds images, but no classes' if has_images(folder) else ''
            raise UserError(
                f'{path}: {folder.name}/ holds no folders: expected {name}/CLASS/*.jpg{found}'
            )
    _warn_of_loose_images(path, within=[path / name for name in folder_names(path)])
    classes = {name: folder_names(folder) for name, folder in splits.items()}

    def opened(split: str) -> Source:
        faults, own = list[str](), {*classes[split]}
        for other, names in classes.items():
            for name in sorted(own ^ {*names}) if own & {*names} else ():  # of the same data
                has, lacks = (split, other) if name in own else (other, split)
                faults.append(f'{path}: class {name!r} is in {has}/ but not in {lacks}/')
        return files_by_class(splits[split], faults)

    return {name: functools.partial(opened, name) for name in splits}


def _without_wrapper(path: pathlib.Path) -> pathlib.Path:
    """Returns the folder that holds splits or classes, where ROOT holds nothing but one folder."""
    names = folder_names(path)
    if len(names) != 1 or names[0].casefold() in SPLIT_NAMES or has_images(path):
        return path
    inner = path / names[0]
    if has_images(inner) or not folder_names(inner):
        return path
    warn_once(f'{path}: its only folder is {names[0]}/; using the folders in that')
    return _without_wrapper(inner)


def _split_folders(path: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the folders of splits by lower-case name; none where the folders are classes.

    Capitalized names are splits if all folders have such names: `Train` may be a class of vehicles.
    """
    names = folder_names(path)
    all_splits = all(name.casefold() in SPLIT_NAMES for name in names)
    if not names or not (all_splits or SPLIT_NAMES & {*names}):
        return {}
    splits: dict[str, pathlib.Path] = {}
    for name in names:
        split = name.casefold() if all_splits else name
        if split in splits:
            raise UserError(
                f'{path}: {splits[split].name}/ and {name}/ are one split; expected one'
            )
        if split in SPLIT_NAMES or folder_names(path / name):
            splits[split] = path / name
    return splits


def _warn_of_equal_folders(path: pathlib.Path) -> None:
    """Warns where all classes hold the same folders, which may be the classes of splits."""
    names = folder_names(path)
    inner = {tuple(folder_names(path / name)) for name in names}
    if len(names) > 1 and len(inner) == 1 and not any(has_images(path / name) for name in names):
        parts = [*inner.pop()]
        shown = ', '.join([*parts[:3], '...'] if len(parts) > 3 else parts)
        text = f'all {len(names)} class folders contain the same folders ({shown})'
        remedy = 'if these inner folders are the classes, rename the outer ones to train and test'
        warn_once(f'{path}: {text}; {remedy}')


def _warn_of_loose_images(folder: pathlib.Path, within: Sequence[pathlib.Path] = ()) -> None:
    """Warns of images next to the folders of classes, or of splits and `within` those."""
    for place in folder, *within:
        if images := _images_directly_in(place):
            count = counted(len(images), 'image')
            warn_once(f'{place}: {count} in no folder of a class left out, such as {min(images)}')


def files_by_class(root: pathlib.Path, faults: Sequence[str] = ()) -> Source:
    """Opens the images of ROOT/CLASS/, in a fixed random order.

    Raises UserError with these faults, and for empty classes.
    """
    class_names, faults, found = folder_names(root), [*faults], list[tuple[str, int]]()
    for i, name in enumerate(class_names):
        try:
            found += [(path, i) for path in image_files(root / name)]
        except UserError as error:
            faults.append(f'{error}: {_way_out(root / name)}')
    refuse(faults)
    _warn_of_loose_images(root)
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
    """The images below a folder, sorted, without hidden files and folders.

    Warns of other files, and of what cannot be read as its name or link shows. Raises UserError if
    there are no images.
    """
    images, others, links = _files(path)
    if not images:
        raise UserError(_nothing_in(path, others))
    if others:
        count = counted(len(others), 'file')
        text = f'{count} left out, whose ending or kind is not that of an image'
        warn_once(f'{path}: {text}, such as {others[0]}')
    if links:
        count = counted(len(links), 'link')
        text = 'whose target is missing or already read from another place'
        warn_once(f'{path}: {count} {text}, such as {links[0]}')
    heic = [] if can_read('HEIF') else [file for file in images if _suffix(file) in HEIC]
    if heic:
        warn_once(f'{path}: {counted(len(heic), "HEIC photo")}; {HEIC_REMEDY}: {heic[0]}')
    return images


def _nothing_in(path: pathlib.Path, others: Sequence[str]) -> str:
    text = f'{path}: no images in this folder'
    if not others:
        return text
    name = os.path.basename(others[0])
    return f'{text}; {counted(len(others), "file")} of other endings, such as {name}'


def _way_out(folder: pathlib.Path) -> str:
    """What to do about a folder without images, which may be what a run has written."""
    for place in folder, folder.parent:
        if (place / 'ledger.jsonl').exists():
            return f'{place} is the work directory of a run; expected it outside of the data'
    return 'remove the folder, or add images'


def _files(path: pathlib.Path) -> tuple[list[str], list[str], list[str]]:
    """Images by their ending, broken links too; other files; links that lead nowhere new."""
    images, others, links = list[str](), list[str](), list[str]()
    for file, kind in sorted(_below(path), key=lambda found: found[0].split(os.sep)):
        if kind != 'again':
            (images if is_image(file) and kind != 'special' else others).append(file)
        if kind in ('link', 'again'):
            links.append(file)
    return images, others, links


def _below(folder: str | pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yields the paths below a folder, each with its kind; links to folders are followed.

    A kind is `file`; `link`, which leads to no file; `again`, a link to a folder whose files are
    yielded anyway; or `special`, a pipe or a device. Only folders are looked up on the disk.
    """
    seen, waiting = set[tuple[int, int]](), collections.deque([os.fspath(folder)])
    links = list[str]()  # to folders: looked at last, so that a file has its own path
    while waiting or links:
        place = waiting.popleft() if waiting else links.pop(0)
        status = os.stat(place)
        if (status.st_dev, status.st_ino) in seen:
            yield place, 'again'
            continue
        seen.add((status.st_dev, status.st_ino))
        for path, kind in _directly_in(place):
            if kind == 'folder':
                waiting.append(path)
            elif kind == 'linked folder':
                links.append(path)
            else:
                yield path, kind


def _directly_in(folder: str) -> Iterator[tuple[str, str]]:
    for entry in _entries(folder):
        if _leads(entry.is_dir):
            yield entry.path, 'linked folder' if entry.is_symlink() else 'folder'
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
    """What is in a folder, without names that begin with a dot and folders of systems."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith('.') and entry.name not in _OF_SYSTEMS:
                yield entry


def is_image(file: str) -> bool:
    """Has the name of a file an ending of images?"""
    suffix = _suffix(file)
    return suffix in _ELSEWHERE or (suffix in kinds_by_ending() and suffix != _MISREAD)


def _suffix(file: str) -> str:
    return os.path.splitext(file)[1].lower()


def folder_names(path: pathlib.Path) -> list[str]:
    """The names of the folders in it, without hidden ones, in the order of classes."""
    return class_order(entry.name for entry in _entries(path) if _leads(entry.is_dir))


def has_images(path: pathlib.Path) -> bool:
    """Are there images directly in a folder?"""
    return bool(_images_directly_in(path))


def _images_directly_in(path: pathlib.Path) -> list[str]:
    return [e.name for e in _entries(path) if is_image(e.name) and _leads(e.is_file)]
