"""Replaces labels: by those of a JSON file (ReaL, Beyer et al. 2020), or by other class numbers."""

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
from vit_jax.data.sources.base import EncodedImage, Label, Source, matched_names, multi_hot, select


def relabelled(source: Source, path: str) -> Source:
    """Returns the images with the labels of a JSON file, multi-label, over the same classes.

    The file has a list of class numbers for each image, in one of two forms: a list in the order of
    the sorted file names without folders, as ReaL's `real.json`; or an object by file name, of
    which folders and ending may be left out: `{"val/n01440764/ILSVRC2012_val_00000293.JPEG": [0]}`.

    Raises:
      UserError: If an image has no entry, several images have the same, or an entry is no list of
        class numbers.
    """
    with parsing(path, 'a JSON file of labels'):
        entries = json.loads(pathlib.Path(path).read_bytes())
    names = [_as_path(name) for name in source.read_names(range(len(source)))]
    if isinstance(entries, list):
        require(len(names) == len(entries), f'{path}: {len(entries)} entries, {len(names)} images')
        if not all(name.suffix for name in names):  # TFDS and arrays number them in another order
            raise UserError(f'{path}: a list goes by file names, and {names[0]} is none')
        in_order = sorted(name.name for name in names)
        entries = dict(zip(in_order, entries, strict=True))
    require(isinstance(entries, dict), f'{path}: expected a list, or an object by file name')
    entries = {str(_as_path(key)): classes for key, classes in entries.items()}
    keys = [_find_key(name, entries, path) for name in names]
    key, uses = collections.Counter(keys).most_common(1)[0]
    require(uses == 1, f'{path}: entry {key!r} fits {uses} images: name them with folders')
    numbers = range(len(source.class_names))
    for key in keys:
        entry = entries[key]
        if not isinstance(entry, list) or not all(type(n) is int and n in numbers for n in entry):
            legal = f'a list of class numbers, 0 to {len(numbers) - 1}'
            raise UserError(f'{path}: entry {key!r} is {entry!r}: expected {legal}')
    rows = multi_hot([entries[key] for key in keys], len(numbers))
    return dataclasses.replace(
        source,
        read=lambda i: (source.read(i)[0], rows[i]),
        label_of=lambda i: rows[i],
        labels_in_memory=True,
        multi_label=True,
    )


def _as_path(name: str) -> pathlib.PurePath:
    """Returns the name as a path; a member of a tar file is FILE.tar:MEMBER."""
    return pathlib.PurePath(name.replace(':', '/'))


def _find_key(name: pathlib.PurePath, entries: dict[str, object], path: str) -> str:
    """Returns the key of an image: the one with most of its folders."""
    for start in range(len(name.parts)):
        part = pathlib.PurePath(*name.parts[start:])
        for key in str(part), str(part.with_suffix('')):
            if key in entries:
                return key
    raise UserError(f'{path}: no entry for {name}')


def drop_unlabelled(source: Source) -> Source:
    """Leaves out the images without a class, which an evaluation cannot count."""
    if not source.multi_label:
        return source
    has_label = source.read_labels(range(len(source))).any(axis=1)
    if has_label.all():
        return source
    require(bool(has_label.any()), f'none of {len(source)} images has a label')
    name = source.name_of(int(has_label.argmin()))
    count = counted(int((~has_label).sum()), 'image')
    logging.warning('%s without a label left out: %s', count, name)
    return select(source, np.flatnonzero(has_label))


def renumbered(source: Source, class_names: Sequence[str]) -> Source:
    """Returns the images with the numbers that their classes have among a model's `class_names`.

    Classes are matched by name (see `matched_names`). Names that are WordNet ids (n01440764) are
    matched to ImageNet's classes. Images whose classes are all unknown are left out with a warning.

    Raises:
      UserError: If no class is known, or a name stands for two classes of the model.
    """
    if all(re.fullmatch(r'n\d{8}', name) for name in source.class_names):
        class_names = imagenet_classes.ids() if imagenet_classes.are(class_names) else class_names
    if source.class_names == tuple(class_names):
        return source
    known = matched_names(source.class_names, class_names)
    if not known:
        both = f'{_some(source.class_names)}; the network has {_some(class_names)}'
        raise UserError(f'no class of the data is one of the network: the data have {both}')
    uses = collections.Counter(class_names)
    for name in known.values():
        require(uses[name] == 1, f'{uses[name]} classes of the network have the name {name!r}')
    if respelled := [f'{a!r} for {b!r}' for a, b in known.items() if a != b]:
        logging.warning('classes matched in another spelling: %s', ', '.join(respelled[:5]))
    number_of = {name: number for number, name in enumerate(class_names)}
    result = _renumber(source, {a: number_of[b] for a, b in known.items()}, class_names)
    if unknown := [name for name in source.class_names if name not in known]:
        count = f'{len(unknown)} of {len(source.class_names)} classes'
        images = counted(len(source) - len(result), 'image')
        text = f"{count} are not among the network's: {_some(unknown)}; {images} of these left out"
        logging.warning('%s', text)
    return result


def keep_classes(source: Source, class_names: Sequence[str]) -> Source:
    """Returns the images of these classes alone, numbered in this order.

    Raises UserError if no image is left.
    """
    number_of = {name: number for number, name in enumerate(class_names)}
    return _renumber(source, number_of, class_names)


def _renumber(source: Source, number_of: dict[str, int], class_names: Sequence[str]) -> Source:
    """Replaces the class numbers by those of `number_of`, and leaves out images of other classes.

    Of an image with several classes the known ones remain; an image without any class stays.
    """
    numbers = np.array([number_of.get(name, -1) for name in source.class_names])
    is_known = numbers >= 0

    def convert(label: Any) -> Label:
        if not source.multi_label:
            return numbers[label]
        row = np.zeros(len(class_names), label.dtype)
        row[numbers[is_known]] = label[is_known]
        return row

    def read(index: int) -> tuple[EncodedImage, Label]:
        image, label = source.read(index)
        return image, convert(label)

    result = dataclasses.replace(
        source,
        class_names=tuple(class_names),
        read=read,
        label_of=lambda i: convert(source.label_of(i)),
    )
    if is_known.all():
        return result
    if source.multi_label:
        is_kept = result.labels.any(axis=1) | ~source.labels.any(axis=1)
    else:
        is_kept = result.labels >= 0
    require(bool(is_kept.any()), f'no image has one of the classes {_some(class_names)}')
    return select(result, np.flatnonzero(is_kept))


def _some(names: Sequence[str]) -> str:
    """Returns the first few names, and dots if there are more."""
    return ', '.join([*map(repr, names[:3]), *(['...'] if len(names) > 3 else [])])
