"""ImageNet (ILSVRC 2012) as it is distributed: its folders, or its tar files without unpacking.

Classes are the sorted WordNet ids. The validation images are in one folder or tar file without
classes. Their labels come from the development kit or from Kaggle's `LOC_val_solution.csv`.
"""

import csv
import functools
import io
import os
import pathlib
import tarfile
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.base import UserError, require, usable
from vit_jax.base.files import (
    Limit,
    open_file,
    read_file,
    read_range,
    require_file,
    require_tar_end,
)
from vit_jax.data.sources.base import Source, SourceKind, Splits, labeled_source, shuffle_once
from vit_jax.data.sources.folders import image_files, open_folder

TRAIN_TAR = 'ILSVRC2012_img_train.tar'
VAL_TAR = 'ILSVRC2012_img_val.tar'
_WHOLE = 'a complete tar file, as ImageNet distributes it'
KIT = 'ILSVRC2012_devkit_t12'
SOLUTION = 'LOC_val_solution.csv'
# Files in the kit.
_KIT_LABELS = 'ILSVRC2012_validation_ground_truth.txt'
_KIT_TABLE = 'meta.mat'


def _recognizes(root: str) -> bool:
    """Returns whether a folder has ImageNet's tar files, or a val/ folder without class folders."""
    path = pathlib.Path(root)
    tars = (path / TRAIN_TAR).is_file() or (path / VAL_TAR).is_file()
    return tars or any(path.glob('val/ILSVRC2012_val_*.JPEG'))


def _open_splits(root: str) -> Splits:
    """Returns the splits `train` and `val` that exist; prefers a tar file to a folder.

    Opening `val` raises UserError if its labels are missing.
    """
    openers: dict[str, dict[str, Callable[[pathlib.Path], Source]]] = {
        'train': {TRAIN_TAR: _open_train_tar, 'train': open_folder},
        'val': {VAL_TAR: _open_val_tar, 'val': _open_val_folder},
    }
    splits: Splits = {}
    for split, by_name in openers.items():
        if path := _first_of(*(pathlib.Path(root, name) for name in by_name)):
            splits[split] = functools.partial(by_name[path.name], path)
    return splits


KIND = SourceKind("a folder of ImageNet's own files", _recognizes, _open_splits)


def _first_of(*paths: pathlib.Path) -> pathlib.Path | None:
    """Returns the first file or folder that exists."""
    return next((path for path in paths if path.exists()), None)


class _Member(NamedTuple):
    name: str
    offset: int
    size: int


def _members(file: io.BufferedIOBase, start: int = 0) -> Iterator[_Member]:
    """Yields the members of a tar archive that starts at byte `start`, with offsets in the file."""
    file.seek(start)
    with tarfile.open(fileobj=file, mode='r:') as tar:
        for info in tar:
            is_plain = info.isfile() and not info.issparse() and info.size >= 0
            require(is_plain or info.isdir(), f'{info.name}: not a plain file in the archive')
            if is_plain:
                yield _Member(info.name, info.offset_data, info.size)
        require_tar_end(file, tar)


def _open_train_tar(path: pathlib.Path) -> Source:
    """Opens a tar file that contains a tar file for each class, such as `n01440764.tar`."""
    with usable(path, _WHOLE), open_file(path) as file:
        classes = sorted(_members(file))
        images_by_class = [sorted(_members(file, inner.offset)) for inner in classes]
    images: list[_Member] = []
    labels: list[int] = []
    for label, of_class in enumerate(images_by_class):
        images += of_class
        labels += [label] * len(of_class)
    class_names = [pathlib.Path(member.name).stem for member in classes]
    return _tar_source(path, images, labels, class_names)


def _open_val_tar(path: pathlib.Path) -> Source:
    with usable(path, _WHOLE), open_file(path) as file:
        members = sorted(_members(file))
    labels, class_names = _val_labels([member.name for member in members], path.parent)
    return _tar_source(path, members, labels, class_names)


def _tar_source(
    path: pathlib.Path,
    members: Sequence[_Member],
    labels: Sequence[int] | np.ndarray,
    class_names: Sequence[str],
) -> Source:
    require_file(path)
    descriptor = os.open(path, os.O_RDONLY)  # shared by threads
    source = labeled_source(
        members,
        labels,
        class_names,
        read=lambda member: read_range(descriptor, member.size, member.offset),
        name_of=lambda member: f'{path}:{member.name}',
        size_of=lambda member: member.size,
    )
    return shuffle_once(source)


def _open_val_folder(path: pathlib.Path) -> Source:
    paths = image_files(path)
    labels, class_names = _val_labels([os.path.basename(file) for file in paths], path.parent)
    return shuffle_once(labeled_source(paths, labels, class_names))


def _val_labels(names: Sequence[str], root: pathlib.Path) -> tuple[np.ndarray, list[str]]:
    """Returns the class numbers of validation images, and the names of all classes."""
    above = (folder / SOLUTION for folder in [*root.resolve().parents][:3])
    path = _first_of(root / SOLUTION, root / f'{KIT}.tar.gz', root / KIT, *above)
    if path is None:
        raise UserError(
            f'{root}: no labels of the validation images; expected {KIT}.tar.gz (the development '
            f'kit), its folder {KIT}, or {SOLUTION} in this folder or up to 3 folders above'
        )
    classes = _read_solution(path) if path.name == SOLUTION else _read_kit(path)
    stems = [pathlib.PurePath(name).stem for name in names]
    if absent := [stem for stem in stems if stem not in classes]:
        raise UserError(f'{root}: {absent[0]} has no label in {path} ({len(absent)} such images)')
    class_names = sorted(set(classes.values()))
    return np.searchsorted(class_names, [classes[stem] for stem in stems]), class_names


def _read_solution(path: pathlib.Path) -> dict[str, str]:
    """Reads Kaggle's labels, with lines `ILSVRC2012_val_00048981,n03995372 85 1 499 272`."""
    with (
        usable(path, 'columns ImageId and PredictionString'),
        open_file(path, 'r', newline='') as file,
    ):
        rows = csv.DictReader(file)
        return {row['ImageId']: row['PredictionString'].split()[0] for row in rows}


def _extract(tar: tarfile.TarFile, name: str) -> bytes:
    """Returns the contents of a file in an archive; empty for a folder."""
    file = tar.extractfile(name)
    return file.read(Limit.TEXT_BYTES) if file else b''


def _read_kit(path: pathlib.Path) -> dict[str, str]:
    """Reads the kit's labels: a number per image, and a table from numbers to WordNet ids."""
    from scipy import io as scipy_io

    with usable(path, f'undamaged files {_KIT_LABELS} and {_KIT_TABLE}'):
        if path.is_dir():
            truth = read_file(path / 'data' / _KIT_LABELS, Limit.TEXT_BYTES)
            table = read_file(path / 'data' / _KIT_TABLE, Limit.TEXT_BYTES)
        else:
            with open_file(path) as opened, tarfile.open(fileobj=opened) as tar:
                truth = _extract(tar, f'{KIT}/data/{_KIT_LABELS}')
                table = _extract(tar, f'{KIT}/data/{_KIT_TABLE}')
        synsets = scipy_io.loadmat(io.BytesIO(table), squeeze_me=True)['synsets']
        wordnet = {int(row['ILSVRC2012_ID']): str(row['WNID']) for row in np.atleast_1d(synsets)}
        numbers = map(int, truth.split())
        return {f'ILSVRC2012_val_{i:08}': wordnet[number] for i, number in enumerate(numbers, 1)}
