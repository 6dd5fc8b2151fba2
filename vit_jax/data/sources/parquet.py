"""Reads Parquet files in the layout of the Hugging Face Hub, on a disk or in a bucket.

The images of a row group are compressed together. So they are read together, and training shuffles
row groups and windows of images (`sampling.shuffle_blocks`), also on a disk.
"""

import fnmatch
import functools
import importlib.util
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from vit_jax.base import MissingFile, UserError, hub, records, require, usable
from vit_jax.base.ranges import FileOfParts
from vit_jax.data.sources.base import Source, SourceKind, Splits, warn_once
from vit_jax.data.sources.indexing import (
    FileOpener,
    Files,
    Sample,
    file_opener,
    list_folders,
    load_index,
    open_source,
    read_optional_text,
    split_of,
)

_ENDING = '.parquet'
_NUMBERED = re.compile(r'(\w+)-\d+-of-\d+(-\w+)?\.parquet')  # SPLIT-00000-of-00002
_FRONT_MATTER = re.compile(r'\A---\s*\n(.*?)\n---\s*$', re.DOTALL | re.MULTILINE)


def _recognizes(data: str) -> bool:
    return data.startswith('hf:') or data.endswith(_ENDING) or bool(_find_files(data))


def _find_files(root: str) -> dict[str, list[str]]:
    """Finds the files of each split in a folder: those of its README.md, or else by their names."""
    if root.endswith(_ENDING):
        return {split_of(root): [root]}
    patterns = _configured_splits(root)
    folders = {pattern.split('/')[0] for _, pattern in patterns}
    names: dict[str, str] = {}
    for folder, paths in list_folders(
        root, lambda name: name in ('data', *folders) or split_of(name) != 'all'
    ):
        for path in paths:
            if path.endswith(_ENDING):
                names[os.path.join(folder, os.path.basename(path))] = path
    files: dict[str, list[str]] = {}
    for split, pattern in patterns:
        files.setdefault(split, []).extend(fnmatch.filter(names, pattern))
    if not patterns:
        for name in names:
            folder, base = os.path.split(name)
            match = _NUMBERED.fullmatch(base)
            split = match[1] if match else split_of(base)
            files.setdefault(split_of(folder) if split == 'all' else split, []).append(name)
    return {split: [names[name] for name in sorted(files[split])] for split in sorted(files)}


def _configured_splits(root: str) -> list[tuple[str, str]]:
    """Returns the splits, and the patterns of their files, in the front matter of README.md."""
    match = _FRONT_MATTER.match(read_optional_text(f'{root}/README.md') or '')
    if match is None or 'configs:' not in match[1]:
        return []
    import yaml  # not all programs need it

    with usable(f'{root}/README.md', 'YAML between lines of ---'):
        configs = yaml.safe_load(match[1])['configs']
        found = [one for one in configs if one.get('default') or one['config_name'] == 'default']
        names = [one['config_name'] for one in configs]
        if len(configs) > 1 and not found:
            raise UserError(
                f'{root}: has the configurations {", ".join(names)}; expected the folder of one'
            )
        parts = (found or configs)[0].get('data_files', [])
        if isinstance(parts, str):
            parts = [{'split': 'train', 'path': parts}]
        return [
            (part['split'], pattern)
            for part in parts
            for pattern in ([part['path']] if isinstance(part['path'], str) else part['path'])
        ]


def _open_splits(data: str, label: str | None = None) -> Splits:
    if importlib.util.find_spec('pyarrow') is None:
        raise UserError(f"{data}: pyarrow is not installed; run pip install 'vit_jax[parquet]'")
    place = data
    if data.startswith('hf:'):
        place = hub.pin(data)
        warn_once(f'{data}: reads the commit {place.rpartition("@")[2]}')
    files = _find_files(place)
    if not files:
        raise MissingFile(f'{data}: no Parquet files')
    root = os.path.dirname(place) or '.' if place.endswith(_ENDING) else place.rstrip('/')
    open_files = file_opener(data, root, files)
    return {
        split: functools.partial(_open_split, data, split, open_files, label) for split in files
    }


KIND = SourceKind(
    'a folder of *.parquet, hf:OWNER/NAME',
    _recognizes,
    _open_splits,
    has_label_columns=True,
    reads_buckets=True,
)


class _Columns(NamedTuple):
    """The columns of a file that are read."""

    image: str  # the path of the encoded files, such as `image.bytes`
    label: str | None
    class_names: tuple[str, ...] | None  # None: the class numbers are not named
    multi_label: bool


def _open_split(data: str, split: str, open_files: FileOpener, label: str | None) -> Source:
    files, numbers = open_files(split)
    footer_of = functools.cache(functools.partial(_read_footer, files))
    columns = _find_columns(footer_of(numbers[0]).schema.to_arrow_schema(), data, label)

    def scan(path: str, file: io.BufferedIOBase) -> Iterator[Sample]:
        with usable(path, f'a Parquet file with the columns of {files.paths[numbers[0]]}'):
            yield from _scan(path, file, columns)

    form = f'parquet:{columns.image}:{columns.label}:{columns.multi_label}'
    index = load_index(files, numbers, scan, form=form, data=data, in_parts=True)
    highest = int(index.classes.max()) if len(index.classes) else -1
    class_names = columns.class_names
    if class_names is None:
        class_names = tuple(map(str, range(highest + 1))) if columns.label else ()
    lowest = int(index.classes.min()) if len(index.classes) else 0
    require(
        0 <= lowest and highest < max(1, len(class_names)),
        f'{data}: {split} has labels from {lowest} to {highest}; expected 0 to '
        f'{len(class_names) - 1}; is it unlabeled?',
    )

    def decode(number: int, start: int, stored: memoryview) -> Any:
        with usable(f'{files.paths[number]}: the row group at byte {start}', 'undamaged images'):
            return _decode(footer_of(number), start, stored, columns.image)

    return open_source(
        files,
        numbers,
        index,
        class_names,
        form=form,
        multi_label=columns.multi_label,
        name_of=lambda number: f'{files.paths[index.shard[number]]}[{index.name(number)}]',
        decode=decode,
    )


def _read_footer(files: Files, number: int) -> Any:
    from pyarrow import parquet

    with usable(files.paths[number], 'a Parquet file'), files.open(number, in_parts=True) as file:
        return parquet.read_metadata(file)


def _find_columns(schema: Any, data: str, label: str | None) -> _Columns:
    """Finds the image column and the label column.

    The Hub stores the types of columns in the metadata of a file.
    """
    described = json.loads((schema.metadata or {}).get(b'huggingface', b'{}'))
    features = described.get('info', {}).get('features', {})
    images = [name for name, kind in features.items() if _type_of(kind) == 'Image']
    images = images or [field.name for field in schema if _is_image(field.type)]
    image = _preferred(('image', 'img'), images)
    listed = ', '.join(schema.names)
    if image is None:
        raise UserError(f'{data}: columns {listed}; expected one image column, or the name `image`')
    kind = schema.field(image).type
    path = f'{image}.bytes' if _is_struct(kind) else image
    named = {name: kind for name, kind in features.items() if _class_names(kind)}
    numbers = [field.name for field in schema if str(field.type).startswith(('int', 'list<'))]
    label = label or _preferred(('label', 'labels'), [*named]) or _preferred(('label',), numbers)
    if label is None:
        return _Columns(path, None, None, multi_label=False)
    if label not in schema.names:
        raise UserError(
            f'{data}: no label column {label!r}; {records.closest(label, schema.names)}'
        )
    kind = schema.field(label).type
    require(
        label in named or str(kind).startswith(('int', 'list<')),
        f'{data}: the column {label!r} has {kind}; expected class numbers',
    )
    class_names = _class_names(features.get(label)) or None
    return _Columns(path, label, class_names, multi_label=str(kind).startswith('list<'))


def _preferred(names: Sequence[str], columns: Sequence[str]) -> str | None:
    """Returns the first of these names that is a column, or else the only column."""
    found = [name for name in names if name in columns]
    return found[0] if found else columns[0] if len(columns) == 1 else None


def _type_of(kind: Any) -> str | None:
    return kind.get('_type') if isinstance(kind, dict) else None


def _class_names(kind: Any) -> tuple[str, ...]:
    """Returns the names of a ClassLabel, or a list of ClassLabel; () for other types of the Hub."""
    if isinstance(kind, list) and len(kind) == 1:
        return _class_names(kind[0])
    if _type_of(kind) in ('Sequence', 'List'):
        return _class_names(kind['feature'])
    return tuple(kind['names']) if _type_of(kind) == 'ClassLabel' else ()


def _is_struct(kind: Any) -> bool:
    return str(kind).startswith('struct<')


def _is_image(kind: Any) -> bool:
    if _is_struct(kind):
        return any(field.name == 'bytes' for field in kind)
    return str(kind) in ('binary', 'large_binary')


def _scan(path: str, file: io.BufferedIOBase, columns: _Columns) -> Iterator[Sample]:
    """Yields the images of a file from its footer and its label column; reads no image."""
    from pyarrow import parquet

    opened = parquet.ParquetFile(file)
    row = 0
    for number in range(opened.metadata.num_row_groups):
        group = opened.metadata.row_group(number)
        start, length = _find_chunk(group, columns.image, path)
        labels: Sequence[Any] = [()] * group.num_rows
        if columns.label is not None:
            table = opened.read_row_group(number, columns=[columns.label])
            labels = table[columns.label].to_pylist()
        for label in labels:
            if label is None:
                raise UserError(f'{path}[{row}]: has no {columns.label}')
            classes = tuple(label) if isinstance(label, tuple | list) else (label,)
            yield Sample(str(row), start, length, _checksum(group), classes)
            row += 1


def _find_chunk(group: Any, column: str, path: str) -> tuple[int, int]:
    """Returns the place of a column in a row group: its first byte, and its length."""
    for number in range(group.num_columns):
        chunk = group.column(number)
        if chunk.path_in_schema == column:
            first = chunk.dictionary_page_offset or chunk.data_page_offset
            return min(first, chunk.data_page_offset), chunk.total_compressed_size
    raise UserError(f'{path}: no column {column}, unlike the first file')


def _checksum(group: Any) -> int:
    """Returns a number that changes with the sizes of a row group, which has no checksum."""
    return int(group.total_byte_size) % 2**31


def _decode(footer: Any, start: int, stored: memoryview, column: str) -> Any:
    """Returns the encoded images of a row group, as buffers, from the bytes of its column."""
    from pyarrow import parquet

    for number in range(footer.num_row_groups):
        if _find_chunk(footer.row_group(number), column, '')[0] == start:
            break
    file = FileOfParts(
        start + len(stored), lambda position, length: stored[position - start :][:length]
    )
    opened = parquet.ParquetFile(file, metadata=footer, page_checksum_verification=True)
    name, _, field = column.partition('.')
    images = opened.read_row_group(number, columns=[column])[name].combine_chunks()
    return images.field(field) if field else images
