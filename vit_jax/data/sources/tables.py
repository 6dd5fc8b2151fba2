"""Images listed in a table: a CSV or JSONL file of paths and labels.

A line has `path`, absolute or relative to the table's folder; `label` or, if multi-label, `labels`;
and, optionally, `split`. `labels` is a list in JSONL, and is separated by `;` in CSV. Other columns
are ignored, and so is white space around column names, labels and splits. A CSV file may use
semicolons or tabs as separators, as spreadsheets do in some countries.
"""

import collections
import csv
import difflib
import functools
import io
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.base import UserError, plural, raise_all, require, usable
from vit_jax.base.files import Limit, parse_json, read_text
from vit_jax.data.sources.base import (
    Source,
    SourceKind,
    Splits,
    labeled_source,
    multi_hot,
    shuffle_once,
    sort_class_names,
    warn_once,
)
from vit_jax.data.sources.folders import SPLIT_NAMES


class _Row(NamedTuple):
    line: int
    path: str
    classes: tuple[str, ...]
    multi_label: bool
    split: str


def open_splits(path: str) -> Splits:
    """Returns the splits of a table, or one split `all` if it has no column `split`.

    Class names are sorted by `sort_class_names`. Raises one UserError that lists all wrong lines.
    """
    file = pathlib.Path(path)
    with usable(file, 'a table in UTF-8 (saved as CSV UTF-8)'):
        text = read_text(file, Limit.TABLE_BYTES)
    is_csv = file.suffix.lower() == '.csv'
    rows: list[_Row] = []
    faults: list[str] = []
    for line, values in _read_csv(text, path) if is_csv else _read_jsonl(text):
        try:
            rows.append(_parse_row(values, line))
        except UserError as error:
            faults.append(f'{path}, line {line}: {error}')
    folder = os.path.abspath(file.parent)
    images = [os.path.normpath(os.path.join(folder, row.path)) for row in rows]
    raise_all(faults + _contradictions(rows, images, path))
    require(bool(rows), f'{path}: empty; expected a table of images')
    _warn_of_shared_images(rows, images, path)
    if is_csv:
        _warn_of_commas(rows, path)
    class_names = sort_class_names({name for row in rows for name in row.classes})
    number_of = {name: number for number, name in enumerate(class_names)}
    splits = sorted({row.split for row in rows})

    def open_split(split: str) -> Source:
        in_split = [row for row in rows if row.split == split]
        paths = [str(file.parent / row.path) for row in in_split]
        classes = [[number_of[name] for name in row.classes] for row in in_split]
        labels = multi_hot(classes, len(number_of)) if rows[0].multi_label else np.ravel(classes)
        return shuffle_once(labeled_source(paths, labels, class_names))

    return {split or 'all': functools.partial(open_split, split) for split in splits}


KIND = SourceKind(
    'FILE.csv or .jsonl', lambda data: data.lower().endswith(('.csv', '.jsonl')), open_splits
)


def _contradictions(rows: Sequence[_Row], images: Sequence[str], path: str) -> list[str]:
    """Returns messages about lines that contradict other lines; `images` are normalized paths."""
    has_splits = any(row.split for row in rows)
    faults: list[str] = []
    first_rows: dict[str, _Row] = {}
    for row, image in zip(rows, images, strict=True):
        where = f'{path}, line {row.line}'
        first_row = first_rows.setdefault(image, row)
        if row.multi_label != rows[0].multi_label:
            faults.append(f'{where}: mixes `label` and `labels`; expected the same on all lines')
        elif has_splits and not row.split:
            faults.append(f'{where}: no `split`; expected one, because other lines have one')
        elif row.classes != first_row.classes:
            labels = ', '.join(row.classes) or 'none'
            first_labels = ', '.join(first_row.classes) or 'none'
            faults.append(
                f'{where}: {row.path}: {labels!r} here, {first_labels!r} on line {first_row.line}; '
                'expected one label per image, or a column `labels`'
            )
    return faults


def _warn_of_shared_images(rows: Sequence[_Row], images: Sequence[str], path: str) -> None:
    """Logs a warning if images are in more than one split."""
    first_rows: dict[str, _Row] = {}
    shared: dict[str, str] = {}
    for row, image in zip(rows, images, strict=True):
        first_row = first_rows.setdefault(image, row)
        if first_row.split != row.split and image not in shared:
            shared[image] = (
                f'{row.path} in {first_row.split} (line {first_row.line}) '
                f'and {row.split} (line {row.line})'
            )
    if shared:
        count = plural(len(shared), 'image')
        example = next(iter(shared.values()))
        warn_once(f'{path}: {count} in more than one split, such as {example}')


def _warn_of_commas(rows: Sequence[_Row], path: str) -> None:
    """Warns if each line of a CSV file with `labels` has one label, and some have commas."""
    with_commas = [row for row in rows if row.multi_label and ',' in ''.join(row.classes)]
    if with_commas and all(len(row.classes) < 2 for row in rows):
        row = with_commas[0]
        warn_once(
            f'{path}, line {row.line}: {row.classes[0]!r} is read as one label; '
            'separate several by semicolons'
        )


_COLUMNS = 'path', 'label', 'labels', 'split'  # other columns are ignored
_Line = tuple[int, Any]  # the line number, and the values of the line or a UserError
_SURPLUS = 'more fields than columns; put fields that contain the separator in quotes'


def _read_csv(text: str, path: str) -> Iterator[_Line]:
    first_line = text.partition('\n')[0]
    delimiter = next((d for d in ',;\t' if d in first_line), ',')  # spreadsheets write all three
    reader = csv.DictReader(io.StringIO(text, newline=''), delimiter=delimiter)
    try:
        written = [name.strip() for name in reader.fieldnames or ()]
        reader.fieldnames = [name.casefold() for name in written]
        _require_columns(reader.fieldnames)
        for name in _COLUMNS:
            equal_names = [repr(column) for column in written if column.casefold() == name]
            require(
                len(equal_names) < 2,
                f'columns {" and ".join(equal_names)} have the same name; expected one {name}',
            )
        similar = difflib.get_close_matches('split', reader.fieldnames, n=1, cutoff=0.8)
        if similar and 'split' not in reader.fieldnames:
            name = written[reader.fieldnames.index(similar[0])]
            warn_once(f"{path}: column {name!r} is ignored; did you mean 'split'?")
        for cells in reader:
            surplus = cells.pop(None, ())
            if [str(cell).strip() for cell in cells.values()] == written:
                yield reader.line_num, UserError('repeats the names of the columns; remove it')
                continue
            if any(surplus):
                yield reader.line_num, UserError(_SURPLUS)
                continue
            values: dict[str, Any] = {name: v for name, v in cells.items() if v is not None}
            if 'labels' in values:
                names = [name.strip() for name in values['labels'].split(';')]
                values['labels'] = [name for name in names if name]
            yield reader.line_num, values
    except UserError as error:  # about the header
        yield 1, error
    except csv.Error as error:
        yield reader.line_num + 1, UserError(f'{error}; check for an unclosed quotation mark')


def _read_jsonl(text: str) -> Iterator[_Line]:
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        if line.strip():
            try:
                yield number, parse_json(line, object_pairs_hook=_to_unique)
            except UserError as error:
                yield number, error
            except ValueError as error:
                yield number, UserError(f'not JSON ({error})')


def _to_unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the values of a JSON object by key. Raises UserError if a key is repeated."""
    for key, count in collections.Counter(key for key, _ in pairs).items():
        require(count == 1, f'the key {key!r} is given {count} times; expected it once')
    return dict(pairs)


def _require_columns(names: Collection[str]) -> None:
    require(
        ('label' in names) != ('labels' in names) and 'path' in names,
        f'columns {", ".join(names) or "none"}; expected path and label, or path and labels',
    )


def _parse_row(values: Any, line: int) -> _Row:
    if isinstance(values, UserError):
        raise values
    if not isinstance(values, Mapping):
        raise UserError(f'{values!r}; expected a JSON object')
    _require_columns(values)
    multi_label = 'labels' in values
    classes = values['labels'] if multi_label else [values['label']]
    if not isinstance(classes, list) or not all(isinstance(name, str | int) for name in classes):
        if multi_label:
            raise UserError(f'labels={values["labels"]!r}: expected a list of names')
        raise UserError(f'label={values["label"]!r}: expected a name')
    path = values['path'] or ''
    require(isinstance(path, str), f'path={path!r}: expected a text')
    split = '' if values.get('split') is None else str(values['split']).strip()
    names = tuple(str(name).strip() for name in classes)
    require('' not in names and path != '', 'empty path or label')
    for value in (path, *names, split):
        require(
            '\n' not in value,
            f'{value!r:.80} contains a line break; check for an unclosed quotation mark',
        )
    return _Row(
        line=line,
        path=path,
        classes=names,
        multi_label=multi_label,
        split=split.casefold() if split.casefold() in SPLIT_NAMES else split,
    )
