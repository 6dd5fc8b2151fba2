"""ImageNet (ILSVRC 2012) as it is distributed: its folders, or its tar files, read in place.

Classes are the sorted WordNet ids. The validation images are in one folder or tar file without
classes; their labels come from the development kit, or from Kaggle's `LOC_val_solution.csv`.
"""

import csv
import functools
import io
import os
import pathlib
import tarfile
from collections.abc import Iterator
from typing import IO, NamedTuple

import numpy as np

from vit_jax.base.errors import UserError, parsing
from vit_jax.data.sources.base import Source, Splits, in_fixed_order, labelled_source
from vit_jax.data.sources.folders import files_by_class, image_files

TRAIN_TAR, VAL_TAR = 'ILSVRC2012_img_train.tar', 'ILSVRC2012_img_val.tar'
_WHOLE = 'a whole tar file, as it is distributed'
KIT, SOLUTION = 'ILSVRC2012_devkit_t12', 'LOC_val_solution.csv'


def holds(root: str) -> bool:
    """Is it ImageNet in one of its original forms? (`val/CLASS/` is a folder like any other.)"""
    path = pathlib.Path(root)
    tars = (path / TRAIN_TAR).is_file() or (path / VAL_TAR).is_file()
    return tars or any(path.glob('val/ILSVRC2012_val_*.JPEG'))


def folder_splits(root: str) -> Splits:
    """`train` and `val`, if present. Opening `val` raises UserError if its labels are missing."""
    path = pathlib.Path(root)
    forms = (  # of both a folder and a tar file, the tar file is read
        ('train', path / 'train', pathlib.Path.is_dir, files_by_class),
        ('train', path / TRAIN_TAR, pathlib.Path.is_file, _train_tar),
        ('val', path / 'val', pathlib.Path.is_dir, _val_folder),
        ('val', path / VAL_TAR, pathlib.Path.is_file, _val_tar),
    )
    return {split: functools.partial(opened, at) for split, at, there, opened in forms if there(at)}


class _Member(NamedTuple):
    name: str
    offset: int
    size: int


def _members(file: IO[bytes], start: int = 0) -> Iterator[_Member]:
    """The members of a tar archive that starts at an offset of a file, at offsets of that file."""
    file.seek(start)
    with tarfile.open(fileobj=file, mode='r:') as tar:
        for info in tar:
            if info.isfile():
                yield _Member(info.name, info.offset_data, info.size)


def _train_tar(path: pathlib.Path) -> Source:
    """A tar file of tar files, one for each class: `n01440764.tar`."""
    with parsing(path, _WHOLE), path.open('rb') as file:
        classes = sorted(_members(file))
        found = [sorted(_members(file, inner.offset)) for inner in classes]
    labels = [label for label, of_class in enumerate(found) for _ in of_class]
    names = [pathlib.Path(member.name).stem for member in classes]
    return _in_tar(path, [member for of_class in found for member in of_class], labels, names)


def _val_tar(path: pathlib.Path) -> Source:
    with parsing(path, _WHOLE), path.open('rb') as file:
        members = sorted(_members(file))
    labels, names = _labels_of([member.name for member in members], path.parent)
    return _in_tar(path, members, labels, names)


def _in_tar(
    path: pathlib.Path, members: list[_Member], labels: list[int], class_names: list[str]
) -> Source:
    descriptor = os.open(path, os.O_RDONLY)  # which threads read by `pread`
    source = labelled_source(
        members,
        labels,
        class_names,
        read=lambda member: os.pread(descriptor, member.size, member.offset),
        name_of=lambda member: f'{path}:{member.name}',
        size_of=lambda member: member.size,
    )
    return in_fixed_order(source)


def _val_folder(path: pathlib.Path) -> Source:
    paths = image_files(path)
    labels, names = _labels_of([os.path.basename(file) for file in paths], path.parent)
    return in_fixed_order(labelled_source(paths, labels, names))


def _labels_of(names: list[str], root: pathlib.Path) -> tuple[list[int], list[str]]:
    """The class numbers of validation images, and the names of all classes."""
    classes = _solution(root) or _kit(root)
    if classes is None:
        kit = f'expected {KIT}.tar.gz (the development kit), its folder {KIT}'
        places = f'{kit}, or {SOLUTION} there or up to 3 folders above'
        raise UserError(f'{root}: the labels of the validation images are missing: {places}')
    stems = [pathlib.PurePath(name).stem for name in names]
    if absent := [stem for stem in stems if stem not in classes]:
        raise UserError(f'{root}: {absent[0]} has no label ({len(absent)} such images)')
    class_names = sorted(set(classes.values()))
    number = {name: index for index, name in enumerate(class_names)}
    return [number[classes[stem]] for stem in stems], class_names


def _solution(root: pathlib.Path) -> dict[str, str] | None:
    """Kaggle's: `ILSVRC2012_val_00048981,n03995372 85 1 499 272`."""
    for place in (root, *list(root.resolve().parents)[:3]):
        if (place / SOLUTION).is_file():
            with (
                parsing(place / SOLUTION, 'columns ImageId and PredictionString'),
                (place / SOLUTION).open(newline='') as file,
            ):
                rows = list(csv.DictReader(file))
                return {row['ImageId']: row['PredictionString'].split()[0] for row in rows}
    return None


def _kit(root: pathlib.Path) -> dict[str, str] | None:
    """The development kit's: one number per image, and a table from numbers to WordNet ids."""
    read = functools.partial(_kit_file, root)
    truth, table = read('ILSVRC2012_validation_ground_truth.txt'), read('meta.mat')
    if truth is None or table is None:
        return None
    from scipy import io as scipy_io

    with parsing(f'{root}: {KIT}', "the development kit's two files, undamaged"):
        synsets = scipy_io.loadmat(io.BytesIO(table), squeeze_me=True)['synsets']
        wordnet = {int(row['ILSVRC2012_ID']): str(row['WNID']) for row in np.atleast_1d(synsets)}
        numbers = map(int, truth.split())
        return {f'ILSVRC2012_val_{i:08}': wordnet[number] for i, number in enumerate(numbers, 1)}


def _kit_file(root: pathlib.Path, name: str) -> bytes | None:
    if (unpacked := root / KIT / 'data' / name).is_file():
        return unpacked.read_bytes()
    if not (packed := root / f'{KIT}.tar.gz').is_file():
        return None
    with parsing(packed, _WHOLE), tarfile.open(packed) as tar:
        file = tar.extractfile(f'{KIT}/data/{name}')
        return file.read() if file else None
