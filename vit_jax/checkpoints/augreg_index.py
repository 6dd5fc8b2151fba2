"""The index of "How to train your ViT?": its published checkpoints, and which one to take."""

import csv
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from vit_jax.base import MissingFile, UserError, records, require, usable
from vit_jax.checkpoints import names


class Row(NamedTuple):
    """One pre-training and one fine-tuning of it."""

    name: str  # of the variant, as in `B/16` or `R26+S/32`
    ds: str  # what it was pre-trained on
    filename: str  # of the pre-trained checkpoint, without `.npz`
    final_val: float  # its validation accuracy
    adapt_ds: str
    adapt_resolution: str
    adapt_filename: str  # of the fine-tuned checkpoint
    adapt_final_val: float
    adapt_final_test: float


def read_index(path: str) -> list[Row]:
    """The rows of a copy of the index, a local one or a name. UserError for another file."""
    place, path = pathlib.Path(names.local_file(path)), names.shown(path)
    if not place.is_file():
        raise MissingFile(f'{path}: no such file')
    with usable(path), place.open(newline='', encoding='utf-8', errors='replace') as file:
        reader = csv.DictReader(file)
        try:
            absent = [name for name in Row._fields if name not in (reader.fieldnames or ())]
            require(not absent, f'{path}: not the AugReg index: no column {", ".join(absent)}')
            return [_row(values, f'{path}, line {line}') for line, values in enumerate(reader, 2)]
        except csv.Error as error:
            raise UserError(f'{path}: not the AugReg index: {error}') from error


def listed(rows: Sequence[Row], name: str) -> list[Row]:
    """One row for each pre-trained checkpoint of a variant, the best first.

    Raises UserError for a variant that the index does not have.
    """
    # Files begin with `R50_L_32-` for `R50+L/32`, as for `R50+ViT-L_32`.
    key = name.replace('ViT-', '').replace('/', '_').replace('+', '_')
    chosen = {row.filename: row for row in rows if row.filename.split('-')[0] == key}
    known = {row.filename.split('-')[0] for row in rows}
    require(key in known, f'no variant {name!r} in the index; {records.nearest(key, known)}')
    return sorted(chosen.values(), key=lambda row: row.final_val, reverse=True)


def pick(rows: Sequence[Row], name: str) -> Row:
    """The published choice for a variant: the best on ImageNet-21k's validation images.

    A file name is that file. Raises UserError where the index does not have it.
    """
    if is_file_name(name):
        file, known = name.removesuffix('.npz'), {row.filename: row for row in reversed(rows)}
        if file not in known:
            raise UserError(f'no file {name!r} in the index; {records.nearest(name, known)}')
        return known[file]
    candidates = [row for row in listed(rows, name) if row.ds == 'i21k']
    require(bool(candidates), f'no variant {name!r} that was pre-trained on i21k in the index')
    # Of equals the last, as in the published code.
    return max(reversed(candidates), key=lambda row: row.final_val)


def is_file_name(name: str) -> bool:
    """Is it the name of a file, and not of a variant?"""
    return '-' in name.replace('ViT-', '')


def fine_tuned(rows: Sequence[Row], filename: str) -> list[Row]:
    """The fine-tunings of a pre-trained checkpoint, those of one data set side by side."""
    chosen = [row for row in rows if row.filename == filename and row.adapt_filename]
    return sorted(chosen, key=lambda row: (row.adapt_ds, -row.adapt_final_val))


def _row(values: dict[str, str], where: str) -> Row:
    """The columns that a Row has, accuracies as numbers: NaN where one is empty."""
    read: dict[str, Any] = {name: values[name] for name in Row._fields}
    require(None not in read.values(), f'{where}: the line has too few columns')
    try:
        numbers = {name: float(text or 'nan') for name, text in read.items() if 'final_' in name}
    except ValueError as error:
        raise UserError(f'{where}: {error}') from error
    return Row(**read | numbers)
