"""Images listed in a table: a CSV or JSONL file of paths and labels.

A line has `path`, absolute or relative to the table's folder, perhaps `split`, and either `label`
or, multi-label, `labels`: a list in JSONL, separated by `;` in CSV. Other columns are ignored, and
white space around columns, labels and splits. A CSV file may have semicolons or tabs between its
columns, as spreadsheets write it in some countries.
"""

import csv
import functools
import io
import json
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.base import UserError, refuse, require, usable
from vit_jax.data.sources.base import (
    Source,
    SourceKind,
    Splits,
    class_order,
    labeled_source,
    multi_hot,
    shuffle_once,
)
from vit_jax.data.sources.folders import SPLIT_NAMES


class _Row(NamedTuple):
    line: int
    path: str
    classes: tuple[str, ...]
    multi_label: bool
    split: str


def open_splits(path: str) -> Splits:
    """Opens the splits of a table, or `all` if it has no column `split`.

    Class names are sorted, as numbers if all are.
    Raises UserError with all lines that are wrong.
    """
    file, rows, faults = pathlib.Path(path), list[_Row](), list[str]()
    with usable(file, 'a table in UTF-8 (saved as CSV UTF-8)'):
        text = file.read_text('utf-8-sig')
    for line, values in _read_csv(text) if file.suffix == '.csv' else _read_jsonl(text):
        try:
            rows.append(_parse_row(values, line))
        except UserError as error:
            faults.append(f'{path}, line {line}: {error}')
    refuse(faults + _contradictions(rows, path))
    require(bool(rows), f'{path}: no lines')
    class_names = class_order({name for row in rows for name in row.classes})
    number_of = {name: number for number, name in enumerate(class_names)}
    splits = sorted({row.split for row in rows})

    def open_split(split: str) -> Source:
        chosen = [row for row in rows if row.split == split]
        paths = [str(file.parent / row.path) for row in chosen]
        classes = [[number_of[name] for name in row.classes] for row in chosen]
        labels = multi_hot(classes, len(number_of)) if rows[0].multi_label else np.ravel(classes)
        return shuffle_once(labeled_source(paths, labels, class_names))

    return {split or 'all': functools.partial(open_split, split) for split in splits}


KIND = SourceKind('FILE.csv or .jsonl', lambda data: data.endswith(('.csv', '.jsonl')), open_splits)


def _contradictions(rows: Sequence[_Row], path: str) -> list[str]:
    """Describes the lines that do not agree with others."""
    with_split, faults = any(row.split for row in rows), list[str]()
    first = dict[str, _Row]()
    for row in rows:
        where, other = f'{path}, line {row.line}', first.setdefault(row.path, row)
        if row.multi_label != rows[0].multi_label:
            faults.append(f'{where}: some lines have `label`, others `labels`')
        elif with_split and not row.split:
            faults.append(f'{where}: some lines have a `split`, this has none')
        elif not row.multi_label and row.classes != other.classes:
            text = f'{row.path} is {row.classes[0]!r}, on line {other.line} {other.classes[0]!r}'
            faults.append(f'{where}: {text}; expected one label an image, or a column `labels`')
    return faults


_Line = tuple[int, Any]  # its number, and its values; or an error, if it has none
_SURPLUS = 'more fields than columns: is a separator not within quotes?'


def _read_csv(text: str) -> Iterator[_Line]:
    head = text.partition('\n')[0]
    delimiter = next((d for d in ',;\t' if d in head), ',')  # spreadsheets write all three
    reader = csv.DictReader(io.StringIO(text, newline=''), delimiter=delimiter)
    try:
        reader.fieldnames = [name.strip().casefold() for name in reader.fieldnames or ()]
        _require_columns(reader.fieldnames)
        for cells in reader:
            surplus = cells.pop(None, ())
            values: dict[str, Any] = {name: v for name, v in cells.items() if v is not None}
            if 'labels' in values:
                values['labels'] = [*filter(None, map(str.strip, values['labels'].split(';')))]
            yield reader.line_num, UserError(_SURPLUS) if any(surplus) else values
    except UserError as error:  # of the header
        yield 1, error
    except csv.Error as error:
        yield reader.line_num + 1, UserError(f'{error}: is a quotation mark left open?')


def _read_jsonl(text: str) -> Iterator[_Line]:
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                yield number, UserError(f'not JSON: {error}')


def _require_columns(names: Collection[str]) -> None:
    found = f'it has {", ".join(names) or "nothing"}; expected path and label, or path and labels'
    require(('label' in names) != ('labels' in names) and 'path' in names, found)


def _parse_row(values: Any, line: int) -> _Row:
    if isinstance(values, UserError):
        raise values
    if not isinstance(values, Mapping):
        raise UserError('expected an object')
    _require_columns(values)
    column, expected = ('labels', 'a list of names') if 'labels' in values else ('label', 'a name')
    classes = values['labels'] if column == 'labels' else [values['label']]
    if not isinstance(classes, list) or not all(isinstance(name, str | int) for name in classes):
        raise UserError(f'{column}={values[column]!r}: expected {expected}')
    names, path = tuple(str(name).strip() for name in classes), str(values['path'] or '')
    require('' not in names and path != '', 'an empty path or label')
    split = str(values.get('split') or '').strip()
    return _Row(
        line=line,
        path=path,
        classes=names,
        multi_label=column == 'labels',
        split=split.casefold() if split.casefold() in SPLIT_NAMES else split,
    )
