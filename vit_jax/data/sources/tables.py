"""Images listed in a table: a CSV or JSONL file of paths and labels.

A line has `path`, absolute or relative to the table's folder, perhaps `split`, and either `label`
or, multi-label, `labels`: a list in JSONL, separated by `;` in CSV. Other columns are ignored.
"""

import csv
import functools
import io
import json
import os
import pathlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from vit_jax.base import UserError, refuse, require
from vit_jax.data.sources.base import Source, Splits, in_fixed_order, labelled_source

_MIXED = 'some lines have `label`, others `labels`'


class _Row(NamedTuple):
    path: str
    classes: tuple[str, ...]
    split: str
    line: int
    several: bool  # it has `labels`


def table_splits(path: str) -> Splits:
    """The splits of a table, or `all` if it has no column `split`. Raises UserError with the lines.

    Class names are sorted, as numbers if all are.
    """
    file = pathlib.Path(path)
    rows, faults = list[_Row](), list[str]()
    for found in _csv(file) if file.suffix == '.csv' else _jsonl(file):
        if isinstance(found, _Row):
            rows.append(found)
        else:
            faults.append(str(found))
    others = [row for row in rows if row.several != rows[0].several]
    refuse(faults + [f'{path}, line {row.line}: {_MIXED}' for row in others])
    require(bool(rows), f'{path}: no lines')
    names = {name for row in rows for name in row.classes}
    by_number = all(map(str.isdecimal, names))
    class_names = sorted(sorted(names), key=int if by_number else str)
    splits = sorted({row.split for row in rows})
    if '' in splits and len(splits) > 1:
        lines = [row.line for row in rows if not row.split]
        refuse([f'{path}, line {line}: some lines have a `split`, this has none' for line in lines])
    number_of = {name: index for index, name in enumerate(class_names)}
    multi_label = rows[0].several

    def opened(split: str) -> Source:
        chosen = [row for row in rows if row.split == split]
        classes = [[number_of[name] for name in row.classes] for row in chosen]
        labels = classes if multi_label else [label for (label,) in classes]
        paths = [str(file.parent / row.path) for row in chosen]
        _require_files(paths, file)
        return in_fixed_order(labelled_source(paths, labels, class_names, multi_label=multi_label))

    return {split or 'all': functools.partial(opened, split) for split in splits}


def _text(file: pathlib.Path) -> str:
    data = file.read_bytes()
    try:
        return data.decode('utf-8-sig')
    except UnicodeDecodeError as error:
        line = data.count(b'\n', 0, error.start) + 1
        raise UserError(f'{file}, line {line}: not UTF-8: save the table in that') from error


def _csv(file: pathlib.Path) -> Iterator[_Row | UserError]:
    """The row of each line, or what is wrong with it."""
    reader = csv.DictReader(io.StringIO(_text(file), newline=''))
    try:
        _require_columns(reader.fieldnames or (), f'{file}, line 1')
        for cells in reader:
            values: dict[str, Any] = {k: v for k, v in cells.items() if v is not None}
            if 'labels' in values:
                parts = map(str.strip, values['labels'].split(';'))
                values['labels'] = [part for part in parts if part]
            yield _row(values, file, reader.line_num)
    except csv.Error as error:
        where = f'{file}, line {reader.line_num + 1}'
        yield UserError(f'{where}: {error}: is a quotation mark left open?')


def _jsonl(file: pathlib.Path) -> Iterator[_Row | UserError]:
    """The row of each line, or what is wrong with it."""
    for number, line in enumerate(io.StringIO(_text(file), newline=None), 1):
        if not line.strip():
            continue
        where = f'{file}, line {number}'
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield UserError(f'{where}: not JSON: {error}')
            continue
        known = isinstance(values, dict)
        yield _row(values, file, number) if known else UserError(f'{where}: expected an object')


def _require_columns(names: Collection[str], where: str) -> None:
    if ('label' in names) == ('labels' in names) or 'path' not in names:
        found = ', '.join(names) or 'nothing'
        raise UserError(f'{where}: it has {found}; expected path and label, or path and labels')


def _require_files(paths: Sequence[str], file: pathlib.Path) -> None:
    """UserError where of a sample of the images none is there: then the paths are wrong."""
    sample = paths[:: -(-len(paths) // 20)]
    if not any(map(os.path.exists, sample)):
        expected = f'paths are absolute, or start in {file.parent.absolute()}'
        raise UserError(f'{file}: no such image: {sample[0]}; {expected}')


def _row(values: dict[str, Any], file: pathlib.Path, line: int) -> _Row | UserError:
    where, several = f'{file}, line {line}', 'labels' in values
    try:
        _require_columns(values, where)
    except UserError as error:
        return error
    classes = values['labels'] if several else [values['label']]
    if not isinstance(classes, list) or not all(isinstance(c, str | int) for c in classes):
        expected = (
            'labels={!r}: expected a list of names' if several else 'label={!r}: expected a name'
        )
        return UserError(f'{where}: {expected.format(classes if several else classes[0])}')
    if classes == [''] or not values['path']:
        return UserError(f'{where}: an empty path or label')
    split = str(values.get('split', ''))
    return _Row(str(values['path']), tuple(map(str, classes)), split, line, several)
