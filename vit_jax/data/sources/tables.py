"""Images listed in a table: a CSV or JSONL file of paths and labels.

A line has `path`, absolute or relative to the table's folder, perhaps `split`, and either `label`
or, multi-label, `labels`: a list in JSONL, separated by `;` in CSV. Other columns are ignored.
"""

import csv
import functools
import json
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from vit_jax.base import UserError, require
from vit_jax.data.sources.base import Source, Splits, in_fixed_order, labelled_source


class _Row(NamedTuple):
    path: str
    classes: tuple[str, ...]
    split: str


def table_splits(path: str) -> Splits:
    """The splits of a table, or `all` if it has no column `split`. Raises UserError with the line.

    Class names are sorted, as numbers if all are.
    """
    file = pathlib.Path(path)
    rows, columns = [], set()
    for number, values in _csv(file) if file.suffix == '.csv' else _jsonl(file):
        where = f'{path}, line {number}'
        columns.add('labels' in values)
        rows.append(_row(values, where))
        require(len(columns) == 1, f'{where}: some lines have `label`, others `labels`')
    require(bool(rows), f'{path}: no lines')
    names = {name for row in rows for name in row.classes}
    by_number = all(map(str.isdecimal, names))
    class_names = sorted(sorted(names), key=int if by_number else str)
    splits = sorted({row.split for row in rows})
    if '' in splits and len(splits) > 1:
        raise UserError(f'{path}: some lines have a `split`, others have none')
    number_of = {name: index for index, name in enumerate(class_names)}
    multi_label = columns == {True}

    def opened(split: str) -> Source:
        chosen = [row for row in rows if row.split == split]
        classes = [[number_of[name] for name in row.classes] for row in chosen]
        labels = classes if multi_label else [label for (label,) in classes]
        paths = [str(file.parent / row.path) for row in chosen]
        return in_fixed_order(labelled_source(paths, labels, class_names, multi_label=multi_label))

    return {split or 'all': functools.partial(opened, split) for split in splits}


def _csv(file: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with file.open(newline='', encoding='utf-8-sig') as lines:
        reader = csv.DictReader(lines)
        for cells in reader:
            values: dict[str, Any] = {k: v for k, v in cells.items() if v is not None}
            if 'labels' in values:
                parts = map(str.strip, values['labels'].split(';'))
                values['labels'] = [part for part in parts if part]
            yield reader.line_num, values


def _jsonl(file: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with file.open(encoding='utf-8') as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f'{file}, line {number}: not JSON: {error}') from error
            require(isinstance(values, dict), f'{file}, line {number}: expected an object')
            yield number, values


def _row(values: dict[str, Any], where: str) -> _Row:
    if ('label' in values) == ('labels' in values) or 'path' not in values:
        found = ', '.join(values) or 'nothing'
        raise UserError(f'{where}: it has {found}; expected path and label, or path and labels')
    classes = values['labels'] if 'labels' in values else [values['label']]
    if not isinstance(classes, list) or not all(isinstance(c, str | int) for c in classes):
        raise UserError(f'{where}: labels={classes!r}: expected a list of names')
    require(classes != [''] and bool(values['path']), f'{where}: an empty path or label')
    return _Row(str(values['path']), tuple(map(str, classes)), str(values.get('split', '')))
