"""Other labels for images that have some: ReaL (Beyer et al. 2020), one's own, other numbers."""

import collections
import dataclasses
import json
import logging
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.base import UserError, counted, parsing, require
from vit_jax.data import imagenet_classes
from vit_jax.data.sources.base import (
    EncodedImage,
    Label,
    Source,
    labelled_source,
    matched_names,
    select,
)

_OF_IMAGES = 'read_names', 'read_sizes', 'sizes_in_memory'  # of a source: the labels are others


def relabelled(source: Source, path: str) -> Source:
    """The images with the labels of a JSON file, multi-label, over the same classes.

    The file has a list of class numbers for each image, in one of two forms: a list in the order of
    the sorted file names without folders, as ReaL's `real.json`; or an object by file name, of
    which folders and ending may be left out: `{"val/n01440764/ILSVRC2012_val_00000293.JPEG": [0]}`.
    UserError names the image without an entry, or the entry that is no list of classes.
    """
    with parsing(path, 'a JSON file of labels'):
        entries = json.loads(pathlib.Path(path).read_bytes())
    names = [_path(source.name_of(i)) for i in range(len(source))]
    if isinstance(entries, list):
        keys: list[Any] = _positions(names, len(entries), path)
    elif isinstance(entries, dict):
        entries = {str(_path(name)): value for name, value in entries.items()}
        keys = [_key(name, entries, path) for name in names]
    else:
        raise UserError(f'{path}: expected a list, or an object by file name')
    classes = range(len(source.class_names))
    legal = f'a list of class numbers, 0 to {len(classes) - 1}'
    for key, uses in collections.Counter(keys).items():
        require(uses == 1, f'{path}: entry {key!r} fits {uses} images: name them with folders')
        entry = entries[key]
        if not isinstance(entry, list) or not all(type(n) is int and n in classes for n in entry):
            raise UserError(f'{path}: entry {key!r} is {entry!r}: expected {legal}')
    labelled = labelled_source(
        range(len(source)),
        [entries[key] for key in keys],
        source.class_names,
        read=lambda i: source.read(i)[0],
        multi_label=True,
    )
    of_images = {name: getattr(source, name) for name in _OF_IMAGES}
    return dataclasses.replace(labelled, **of_images)


def with_labels(source: Source) -> Source:
    """The images that have a class: the others cannot count in an evaluation."""
    if not source.multi_label:
        return source
    parts = (range(len(source))[i : i + 1024] for i in range(0, len(source), 1024))  # a few MB
    has_label = np.concatenate([source.read_labels(part).any(axis=1) for part in parts])
    if has_label.all():
        return source
    require(bool(has_label.any()), f'none of {len(source)} images has a label')
    name = source.name_of(int(has_label.argmin()))
    count = counted(int((~has_label).sum()), 'image')
    logging.warning('%s without a label left out: %s', count, name)
    return select(source, np.flatnonzero(has_label))


def renumbered(source: Source, class_names: Sequence[str]) -> Source:
    """The images with the numbers that their classes have among `class_names`, matched by name.

    Names that are WordNet ids (n01440764) are found among ImageNet's classes by these.
    Images of other classes alone are left out, with a warning. UserError where all are, and where
    a name stands for two classes.
    """
    if all(re.fullmatch(r'n\d{8}', name) for name in source.class_names):
        class_names = imagenet_classes.ids() if imagenet_classes.are(class_names) else class_names
    if source.class_names == tuple(class_names):
        return source
    meant = matched_names(source.class_names, class_names)
    respelled = [f'{a!r} for {b!r}' for a, b in meant.items() if a != b]
    if len({*meant.values()}) == len(meant) and respelled:
        logging.warning('classes matched in another spelling: %s', ', '.join(respelled[:5]))
        names = tuple(meant.get(name, name) for name in source.class_names)
        source = dataclasses.replace(source, class_names=names)
    known = {*class_names}
    unknown = [name for name in source.class_names if name not in known]
    if len(unknown) == len(source.class_names):
        both = f'{_listed(source.class_names)}; the network has {_listed(class_names)}'
        raise UserError(f'no class of the data is one of the network: the data have {both}')
    for name, uses in collections.Counter(class_names).items():
        twice = uses > 1 and name in source.class_names
        require(not twice, f'{uses} classes of the network have the name {name!r}')
    found = of_classes(source, class_names)
    if unknown:
        text = "%d of %d classes are not among the network's: %s; %s of these left out"
        left_out = counted(len(source) - len(found), 'image')
        listed = len(unknown), len(source.class_names), _listed(unknown)
        logging.warning(text, *listed, left_out)
    return found


def of_classes(source: Source, class_names: Sequence[str]) -> Source:
    """The images of these classes alone, each with the number that its class has here.

    Of an image with several classes those remain that are here; one without any stays. Raises
    UserError where no image is left.
    """
    number = {name: index for index, name in enumerate(class_names)}
    numbers = np.array([number.get(name, -1) for name in source.class_names])

    def of(labels: np.ndarray) -> np.ndarray:
        if not source.multi_label:
            return numbers[labels]
        rows = np.zeros((len(labels), len(class_names)), labels.dtype)
        rows[:, numbers[numbers >= 0]] = labels[:, numbers >= 0]
        return rows

    def read(index: int) -> tuple[EncodedImage, Label]:
        image, label = source.read(index)
        return image, of(np.asarray(label)[None])[0]

    found = dataclasses.replace(
        source,
        class_names=tuple(class_names),
        read=read,
        read_labels=lambda indices: of(source.read_labels(indices)),
    )
    if (numbers >= 0).all():
        return found
    has_class = found.labels.any(axis=1) if source.multi_label else found.labels >= 0
    if source.multi_label:  # an image without any class is one that the network may know as such
        has_class |= ~source.labels.any(axis=1)
    require(bool(has_class.any()), f'no image has one of the classes {_listed(class_names)}')
    return select(found, np.flatnonzero(has_class))


def _listed(names: Sequence[str]) -> str:
    """The first few names, and that there are more."""
    return ', '.join([*map(repr, names[:3]), *(['...'] if len(names) > 3 else [])])


def _path(name: str) -> pathlib.PurePath:
    """The name as a path; a member of a tar file is FILE.tar:MEMBER."""
    return pathlib.PurePath(name.replace(':', '/'))


def _positions(names: list[pathlib.PurePath], length: int, path: str) -> list[int]:
    """The position of each image in the order of the sorted file names."""
    require(len(names) == length, f'{path}: a list of {length} entries for {len(names)} images')
    if not all(name.suffix for name in names):  # TFDS and arrays number them in another order
        raise UserError(f'{path}: a list goes by file names, and {names[0]} is none')
    position = {name: index for index, name in enumerate(sorted(n.name for n in names))}
    return [position[name.name] for name in names]


def _key(name: pathlib.PurePath, entries: dict[str, Any], path: str) -> str:
    """The entry of an image: the one with most of its folders."""
    for start in range(len(name.parts)):
        part = pathlib.PurePath(*name.parts[start:])
        for key in str(part), str(part.with_suffix('')):
            if key in entries:
                return key
    raise UserError(f'{path}: no entry for {name}')
