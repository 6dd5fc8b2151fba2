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
    file, rows, faults = pathlib.Path(path), list[_Row](), list[str]()
    with usable(file, 'a table in UTF-8 (saved as CSV UTF-8)'):
        text = read_text(file, Limit.TABLE_BYTES)
    is_csv = file.suffix.lower() == '.csv'
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
    with_split, faults = any(row.split for row in rows), list[str]()
    first = dict[str, _Row]()
    for row, image in zip(rows, images, strict=True):
        where, other = f'{path}, line {row.line}', first.setdefault(image, row)
        if row.multi_label != rows[0].multi_label:
            faults.append(f'{where}: mixes `label` and `labels`; expected the same on all lines')
        elif with_split and not row.split:
            faults.append(f'{where}: no `split`; expected one, because other lines have one')
        elif row.classes != other.classes:
            labels, others = (', '.join(each.classes) or 'none' for each in (row, other))
            text = f'{row.path}: {labels!r} here, {others!r} on line {other.line}'
            faults.append(f'{where}: {text}; expected one label per image, or a column `labels`')
    return faults


def _warn_of_shared_images(rows: Sequence[_Row], images: Sequence[str], path: str) -> None:
    """Logs a warning if images are in more than one split."""
    first, shared = dict[str, _Row](), dict[str, str]()
    for row, image in zip(rows, images, strict=True):
        other = first.setdefault(image, row)
        if other.split != row.split:
            splits = f'{other.split} (line {other.line}) and {row.split} (line {row.line})'
            shared.setdefault(image, f'{row.path} in {splits}')
    if shared:
        count, example = plural(len(shared), 'image'), next(iter(shared.values()))
        warn_once(f'{path}: {count} in more than one split, such as {example}')


def _warn_of_commas(rows: Sequence[_Row], path: str) -> None:
    """Warns if each line of a CSV file with `labels` has one label, and some have commas."""
    joined = [row for row in rows if row.multi_label and ',' in ''.join(row.classes)]
    if joined and all(len(row.classes) < 2 for row in rows):
        where, name = f'{path}, line {joined[0].line}', joined[0].classes[0]
        warn_once(f'{where}: {name!r} is read as one label; separate several by semicolons')


_COLUMNS = 'path', 'label', 'labels', 'split'  # other columns are ignored
_Line = tuple[int, Any]  # the line number, and the values of the line or a UserError
_SURPLUS = 'more fields than columns; put fields that contain the separator in quotes'


def _read_csv(text: str, path: str) -> Iterator[_Line]:
    head = text.partition('\n')[0]
    delimiter = next((d for d in ',;\t' if d in head), ',')  # spreadsheets write all three
    reader = csv.DictReader(io.StringIO(text, newline=''), delimiter=delimiter)
    try:
        written = [name.strip() for name in reader.fieldnames or ()]
        reader.fieldnames = [name.casefold() for name in written]
        _require_columns(reader.fieldnames)
        for name in _COLUMNS:
            same = [repr(each) for each in written if each.casefold() == name]
            require(
                len(same) < 2,
                f'columns {" and ".join(same)} have the same name; expected one {name}',
            )
        similar = difflib.get_close_matches('split', reader.fieldnames, n=1, cutoff=0.8)
        if similar and 'split' not in reader.fieldnames:
            name = written[reader.fieldnames.index(similar[0])]
            warn_once(f"{path}: column {name!r} is ignored; did you mean 'split'?")
        for cells in reader:
            surplus = cells.pop(None, ())
            if [str(text).strip() for text in cells.values()] == written:
                yield reader.line_num, UserError('repeats the names of the columns; remove it')
                continue
            values: dict[str, Any] = {name: v for name, v in cells.items() if v is not None}
            if 'labels' in values:
                values['labels'] = [*filter(None, map(str.strip, values['labels'].split(';')))]
            yield reader.line_num, UserError(_SURPLUS) if any(surplus) else values
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
    text = f'columns {", ".join(names) or "none"}; expected path and label, or path and labels'
    require(('label' in names) != ('labels' in names) and 'path' in names, text)


def _parse_row(values: Any, line: int) -> _Row:
    if isinstance(values, UserError):
        raise values
    if not isinstance(values, Mapping):
        raise UserError(f'{values!r}; expected a JSON object')
    _require_columns(values)
    column, expected = ('labels', 'a list of names') if 'labels' in values else ('label', 'a name')
    classes = values['labels'] if column == 'labels' else [values['label']]
    if not isinstance(classes, list) or not all(isinstance(name, str | int) for name in classes):
        raise UserError(f'{column}={values[column]!r}: expected {expected}')
    path = values['path'] or ''
    require(isinstance(path, str), f'path={path!r}: expected a text')
    split = '' if values.get('split') is None else str(values['split']).strip()
    names = tuple(str(name).strip() for name in classes)
    require('' not in names and path != '', 'empty path or label')
    advice = 'check for an unclosed quotation mark'
    for text in path, *names, split:
        require('\n' not in text, f'{text!r:.80} contains a line break; {advice}')
    return _Row(
        line=line,
        path=path,
        classes=names,
        multi_label=column == 'labels',
        split=split.casefold() if split.casefold() in SPLIT_NAMES else split,
    )
