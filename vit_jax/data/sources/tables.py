"""Images listed in a table: a CSV or JSONL file of paths and labels.

A line has `path`, absolute or relative to the table's folder, perhaps `split`, and either `label`
or, multi-label, `labels`: a list in JSONL, separated by `;` in CSV. Other columns are ignored, and
white space around columns, labels and splits. A CSV file may have semicolons or tabs between its
columns, as spreadsheets write it in some countries.
"""

import collections
import csv
import functools
import io
import json
import os
import pathlib
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from vit_jax.base import UserError, counted, refuse, require, require_regular
from vit_jax.data.sources.base import (
    Source,
    Splits,
    class_order,
    in_fixed_order,
    labelled_source,
    warn_once,
)
from vit_jax.data.sources.folders import SPLIT_NAMES

_COLUMNS = 'path', 'label', 'labels', 'split'
_MIXED = 'some lines have `label`, others `labels`'


_MEASURED = re.compile(r'[+-]?\d*\.\d+(e[+-]?\d+)?', re.IGNORECASE)


class _Row(NamedTuple):
    path: str
    classes: tuple[str, ...]
    split: str
    line: int
    several: bool  # it has `labels`


def table_splits(path: str) -> Splits:
    """The splits of a table, or `all` if it has no column `split`. Raises UserError with the lines.

    Class names are sorted, as numbers if all are. Warns of names that look mistyped.
    """
    file = pathlib.Path(path)
    rows, faults = _rows(file)
    names = {name for row in rows for name in row.classes}
    class_names = class_order(names)
    counts = collections.Counter(row.split for row in rows)
    _warn_of_splits(path, counts)
    refuse(faults + _contradictions(rows, path))
    require(bool(rows), f'{path}: no lines')
    if len(names) > len(rows) / 2 and all(map(_MEASURED.fullmatch, names)):
        text = f'{len(names):,} different numbers with fractions as labels of {len(rows):,} images'
        raise UserError(f'{path}: {text}; regression is not supported, expected classes')
    number_of = {name: index for index, name in enumerate(class_names)}
    multi_label = rows[0].several

    def opened(split: str) -> Source:
        chosen = [row for row in rows if row.split == split]
        classes = [[number_of[name] for name in row.classes] for row in chosen]
        labels = classes if multi_label else [label for (label,) in classes]
        paths = [str(file.parent / row.path) for row in chosen]
        _require_files(paths, file)
        return in_fixed_order(labelled_source(paths, labels, class_names, multi_label=multi_label))

    return {split or 'all': functools.partial(opened, split) for split in sorted(counts)}


def unlabelled(path: str) -> Source:
    """The images of all lines that can be understood; no classes, and every label is 0."""
    file = pathlib.Path(path)
    paths = dict.fromkeys(str(file.parent / row.path) for row in _rows(file)[0])
    return labelled_source([*paths], [0] * len(paths), ())


def _rows(file: pathlib.Path) -> tuple[list[_Row], list[str]]:
    """The rows of a table, and what is wrong with other lines."""
    found = [*(_csv(file) if file.suffix == '.csv' else _jsonl(file))]
    rows = [row for row in found if isinstance(row, _Row)]
    return rows, [str(fault) for fault in found if isinstance(fault, UserError)]


def _contradictions(rows: Sequence[_Row], path: str) -> list[str]:
    """Lines that do not agree with others."""
    with_split, found = any(row.split for row in rows), list[str]()
    first = dict[str, _Row]()
    for row in rows:
        where, other = f'{path}, line {row.line}', first.setdefault(row.path, row)
        if row.several != rows[0].several:
            found.append(f'{where}: {_MIXED}')
        elif with_split and not row.split:
            found.append(f'{where}: some lines have a `split`, this has none')
        elif not row.several and row.classes != other.classes:
            (mine,), (theirs,) = row.classes, other.classes
            text = f'{row.path} is {mine!r}, on line {other.line} {theirs!r}'
            found.append(f'{where}: {text}; expected one label an image, or a column `labels`')
    return found


def _warn_of_splits(path: str, counts: dict[str, int]) -> None:
    """Warns of splits that are used only where they are requested."""
    unusual = {name: n for name, n in counts.items() if name not in SPLIT_NAMES | {'', 'all'}}
    if unusual:
        found = ', '.join(f'{name!r} ({counted(n, "line")})' for name, n in unusual.items())
        text = 'used only where asked for, as by --config.train_split=NAME'
        warn_once(f'{path}: unusual names of splits, {text}: {found}')


def _text(file: pathlib.Path) -> str:
    require_regular(file)
    data = file.read_bytes()
    try:
        return data.decode('utf-8-sig')
    except UnicodeDecodeError as error:
        line = data.count(b'\n', 0, error.start) + 1
        raise UserError(f'{file}, line {line}: not UTF-8; save the table as CSV UTF-8') from error


def _csv(file: pathlib.Path) -> Iterator[_Row | UserError]:
    """The row of each line, or what is wrong with it."""
    text = _text(file)
    head = text.partition('\n')[0]
    delimiter = next((d for d in ',;\t' if d in head), ',')  # spreadsheets write all three
    reader = csv.DictReader(io.StringIO(text, newline=''), delimiter=delimiter)
    try:
        names = [name.strip() for name in reader.fieldnames or ()]
        columns = [name if name.casefold() in names else name.casefold() for name in names]
        _require_columns(columns, f'{file}, line 1')
        reader.fieldnames = columns
        for cells in reader:
            values: dict[Any, Any] = {k: v for k, v in cells.items() if v is not None}
            if any(surplus := values.pop(reader.restkey, ())):
                fields = (
                    f'{len(columns) + len(surplus)} fields for {counted(len(columns), "column")}'
                )
                where = f'{file}, line {reader.line_num}'
                yield UserError(
                    f'{where}: {fields}: is a {delimiter!r} not within quotation marks?'
                )
                continue
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
    if twice := [name for name in _COLUMNS if [*names].count(name) > 1]:
        raise UserError(f'{where}: several columns {twice[0]!r}; expected one')


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
    names = tuple(str(name).strip() for name in classes)
    if '' in names or not values['path']:
        return UserError(f'{where}: an empty path or label')
    split = str(values.get('split') or '').strip()
    split = split.casefold() if split.casefold() in SPLIT_NAMES else split
    return _Row(str(values['path']), names, split, line, several)
