"""Reads data sets prepared by TensorFlow Datasets (TFDS), without TensorFlow.

TFDS's own data source reads ArrayRecord files. This module reads TFRecord files, which most
existing folders have. Images stay encoded; image_decoding.py decodes them.
"""

import contextlib
import fnmatch
import functools
import io
import operator
import os
import pathlib
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from vit_jax.base import Int, UInt8, UserError, records, require, usable
from vit_jax.base.buckets import list_folder, read_bucket_file
from vit_jax.base.files import open_file, read_range, require_file
from vit_jax.base.storage import is_remote
from vit_jax.data.image_decoding import open_with_pillow, read_header
from vit_jax.data.sources.base import EncodedImage, Label, Source, SourceKind, Splits, multi_hot
from vit_jax.data.sources.indexing import Sample, file_opener, load_index, open_source

_PREFIX = 'tfds:'
INFO = 'dataset_info.json'
# A record of a TFRecord file is its length (8 bytes), a checksum of the length, its bytes, and a
# checksum of its bytes. Both checksums are masked CRC-32C.
_HEADER = struct.Struct('<QI')
Example = dict[str, Any]


class LabelReader(NamedTuple):
    """Reads the label of an example, or computes it from other columns."""

    class_names: tuple[str, ...]
    read: Callable[[Example], Any]  # returns a class number; if multi-label, several
    multi_label: bool = False


def _recognizes(data: str) -> bool:
    if is_remote(data):
        return any(os.path.basename(file.url) == INFO for file in list_folder(data)[0])
    return data.startswith(_PREFIX) or os.path.isfile(os.path.join(data, INFO))


def find_prepared(full_name: str) -> str:
    """Returns the folder of `NAME`, `NAME:VERSION` or `NAME/CONFIG:VERSION` in `data_dir()`.

    Returns the newest version that matches; VERSION may be a pattern such as `3.*.*`. Raises
    UserError if there is none.
    """
    name, _, version = full_name.partition(':')
    root = f'{data_dir()}/{name}'
    if is_remote(root):
        versions = [os.path.basename(folder) for folder in list_folder(root)[1]]
    else:
        versions = [path.parent.name for path in pathlib.Path(root).glob(f'*/{INFO}')]
    versions = fnmatch.filter(versions, version or '[0-9]*')
    if versions:
        return f'{root}/{max(versions, key=_import_tfds().core.Version)}'
    found = [] if is_remote(root) else sorted(pathlib.Path(root).glob(f'**/{INFO}'))
    others = [os.path.relpath(path.parent, root) for path in found]
    hint = f'found {", ".join(others)}; ' if others else ''
    raise UserError(
        f'tfds:{full_name}: not in {data_dir()}; {hint}'
        f"prepare it with pip install 'vit_jax[tf]' and tfds build {name}"
    )


def data_dir() -> str:
    """Returns the folder of prepared data sets: TFDS_DATA_DIR, or ~/tensorflow_datasets."""
    folder = os.environ.get('TFDS_DATA_DIR', '~/tensorflow_datasets').rstrip('/')
    return folder if is_remote(folder) else os.path.expanduser(folder)


def _import_tfds() -> Any:
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise UserError(
            f"TFDS data needs tensorflow-datasets; run pip install 'vit_jax[tfds]' ({error})"
        ) from error
    return tensorflow_datasets


def open_splits(data: str, label: str | LabelReader | None = None) -> Splits:
    """Returns the splits of `tfds:NAME`, or of a folder NAME/VERSION that TFDS prepared.

    Args:
      data: The name or the folder.
      label: The label column, or a reader of labels. By default, the column `label` or the only
        column of class numbers, or else the column `labels` or the only multi-label column.

    Raises:
      UserError: If the file format is not supported, or a column does not exist.
    """
    root = find_prepared(data.removeprefix(_PREFIX)) if data.startswith(_PREFIX) else data
    root = root.rstrip('/')
    builder = _open_builder(root)
    info = builder.info
    file_format = info.file_format.value
    if file_format not in ('array_record', 'tfrecord'):
        raise UserError(f'{root}: file format {file_format}; expected array_record or tfrecord')
    library = _import_tfds()
    images = [n for n, k in info.features.items() if isinstance(k, library.features.Image)]
    decoders = {name: library.decode.SkipDecoding() for name in images}  # keeps images encoded

    if is_remote(root):
        require(file_format == 'tfrecord', f'{root}: {file_format} in a bucket; expected tfrecord')
        return _open_remote_splits(root, info, images, decoders, label)

    def open_split(split: str) -> Source:
        if file_format == 'array_record':
            with usable(f'{root}: {split}', 'undamaged ArrayRecord files'):
                stored = builder.as_data_source(split, decoders=decoders)
                shards = info.splits[split]
                crcs = np.repeat([*map(_checksum_end, shards.filepaths)], shards.shard_lengths)
            read_example = stored.__getitem__
        else:
            crcs, read_record = read_tfrecords(info.splits[split].filepaths)
            _require_count(root, split, len(crcs), info)

            def read_example(index: int) -> Example:
                return info.features.deserialize_example_np(read_record(index), decoders=decoders)

        name = f'tfds:{info.full_name}/{split}'
        image, labels = _find_columns(info.features, images, name, label)
        is_float = info.features[image].np_dtype == np.float32
        read = functools.partial(_read_image, read_example, image, labels, name, is_float)
        return Source(
            count=len(crcs),
            class_names=labels.class_names,
            read=read,
            name_of=lambda i: f'{name}[{i}]',
            label_of=lambda i: read(i)[1],
            size_of=lambda i: crcs[i],
            multi_label=labels.multi_label,
        )

    return {split: functools.partial(open_split, split) for split in info.splits}


KIND = SourceKind('tfds:NAME', _recognizes, open_splits, has_label_columns=True, reads_buckets=True)


def _open_builder(root: str) -> Any:
    """Opens a folder; only its small files if it is in a bucket."""
    library = _import_tfds()
    with contextlib.ExitStack() as stack:
        folder = root
        if is_remote(root):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            for file in list_folder(root)[0]:
                if file.url.endswith(('.json', '.txt')):
                    contents = read_bucket_file(file.url) or b''
                    pathlib.Path(folder, os.path.basename(file.url)).write_bytes(contents)
        with usable(f'{root}/{INFO}', 'a data set that TFDS prepared, with features.json'):
            return library.builder_from_directory(folder)


def _open_remote_splits(
    root: str, info: Any, images: Sequence[str], decoders: Any, label: str | LabelReader | None
) -> Splits:
    """Returns the splits of a folder in a bucket, whose records are found by reading them once."""
    open_files = file_opener(
        root,
        root,
        {
            name: [f'{root}/{path}' for path in split.filenames]
            for name, split in info.splits.items()
        },
    )

    def open_split(split: str) -> Source:
        name = f'tfds:{info.full_name}/{split}'
        image, labels = _find_columns(info.features, images, name, label)
        is_float = info.features[image].np_dtype == np.float32

        def scan(path: str, file: io.BufferedIOBase) -> Iterator[Sample]:
            for start, record in _read_records(path, file):
                example = info.features.deserialize_example_np(record, decoders=decoders)
                try:
                    stored, classes = _check_example(example, image, labels, name)
                except UserError as error:
                    where = f'{path}: the record at byte {start - _HEADER.size}'
                    raise UserError(f'{where}: {error}') from error
                place = start + record.index(stored)
                yield Sample('', place, len(stored), google_crc32c.value(stored), classes)

        files, numbers = open_files(split)
        form = f'tfds:{image}:{label}:{",".join(labels.class_names)}'
        index = load_index(files, numbers, scan, form=form, data=root)
        _require_count(root, split, len(index), info)
        return open_source(
            files,
            numbers,
            index,
            labels.class_names,
            form=form,
            multi_label=labels.multi_label,
            name_of=lambda number: f'{name}[{number}]',
            convert=_to_gray if is_float else None,
        )

    return {split: functools.partial(open_split, split) for split in info.splits}


def _require_count(root: str, split: str, count: int, info: Any) -> None:
    expected = info.splits[split].num_examples
    require(count == expected, f'{root}: {split} has {count} records; {INFO} says {expected}')


def _read_records(path: str, file: io.BufferedIOBase) -> Iterator[tuple[int, bytes]]:
    """Yields the place and the bytes of each record of a TFRecord file, after its checksums."""
    start = _HEADER.size
    while header := file.read(_HEADER.size):
        length = _read_length(path, header, start - _HEADER.size)
        stored = file.read(length + 4)
        checksum = int.from_bytes(stored[length:], 'little')
        if len(stored) < length + 4 or masked_crc(stored[:length]) != checksum:
            raise UserError(f'{path}: the record at byte {start - _HEADER.size} is damaged')
        yield start, stored[:length]
        start += length + 4 + _HEADER.size


def _read_image(
    read_example: Callable[[int], Example],
    image_column: str,
    labels: LabelReader,
    split: str,
    is_float: bool,
    index: int,
) -> tuple[EncodedImage, Label]:
    try:
        example = read_example(index)
    except RuntimeError as error:  # ArrayRecord verifies checksums
        raise UserError(f'damaged: {error}') from error
    image, classes = _check_example(example, image_column, labels, split)
    if is_float:
        image = _to_gray(image)
    if labels.multi_label:
        return image, multi_hot([classes], len(labels.class_names))[0]
    return image, classes[0]


def _check_example(
    example: Example, image_column: str, labels: LabelReader, split: str
) -> tuple[Any, tuple[int, ...]]:
    """Returns the stored image of an example, and its class numbers."""
    image = example[image_column]
    label = labels.read(example)
    if image is None or label is None:
        raise UserError('damaged: the record lacks an image or a label')
    numbers = np.atleast_1d(np.asarray(label, int))
    num_classes = len(labels.class_names)
    out_of_range = numbers[(numbers < 0) | (numbers >= num_classes)]
    if len(out_of_range):
        raise UserError(
            f'label {out_of_range[0]}; expected 0 to {num_classes - 1}; is {split} unlabeled?'
        )
    return image, tuple(numbers.tolist())


def _to_gray(stored: bytes | memoryview) -> UInt8[np.ndarray, 'h w']:
    """Converts a float32 image, which TFDS stores as a PNG of its bytes in four channels.

    Raises UserError if the values are not between 0 and 1.
    """
    read_header(stored)  # bounds the number of pixels
    channels = np.asarray(open_with_pillow(bytes(stored)))
    require(
        channels.dtype == np.uint8 and channels.shape[2:] == (4,),
        'expected the PNG of a float32 image, with four channels',
    )
    pixels = channels.view('<f4')[..., 0]
    low = pixels.min()
    high = pixels.max()
    require(0 <= low and high <= 1, f'float32 pixels from {low} to {high}; expected 0 to 1')
    return np.rint(255 * pixels).astype(np.uint8)


def _find_columns(
    features: Any, images: Sequence[str], split: str, label: str | LabelReader | None
) -> tuple[str, LabelReader]:
    """Returns the image column, one of `images`, and the reader of labels."""
    kinds = _import_tfds().features
    single = [n for n, kind in features.items() if isinstance(kind, kinds.ClassLabel)]
    lists = [n for n, kind in features.items() if isinstance(kind, kinds.Sequence)]
    multi = [n for n in lists if isinstance(features[n].feature, kinds.ClassLabel)]
    image = _preferred('image', images)
    label = label or _preferred('label', single) or _preferred('labels', multi)
    if image is None or label is None:
        raise UserError(f'{split}: columns {", ".join(features)}; expected an image and a label')
    if isinstance(label, LabelReader):
        return image, label
    if label not in (*single, *multi):
        near = records.closest(label, (*single, *multi))
        raise UserError(f'{split}: no label column {label!r}; {near}')
    kind = features[label].feature if label in multi else features[label]
    return image, LabelReader(tuple(kind.names), operator.itemgetter(label), label in multi)


def _preferred(column: str, columns: Sequence[str]) -> str | None:
    """Returns the column if it exists, or else the only one; None if there are none or several."""
    if column in columns:
        return column
    return columns[0] if len(columns) == 1 else None


def _checksum_end(path: str | os.PathLike[str]) -> int:
    """Returns a checksum of the end of an ArrayRecord file, which has the offsets of records."""
    with open_file(path) as file:
        file.seek(-min(file.seek(0, os.SEEK_END), 65_536), os.SEEK_END)
        return zlib.crc32(file.read())


def read_tfrecords(
    paths: Sequence[str | os.PathLike[str]],
) -> tuple[Int[np.ndarray, 'n'], Callable[[int], bytes]]:
    """Returns the checksums of the records of TFRecord files, and a function that reads a record.

    Finds records by reading only lengths, and verifies the checksums of lengths. The checksum of a
    record is verified when it is read.

    Raises:
      UserError: If a checksum is wrong or a file ends early. The message names file and offset.
    """
    for path in paths:
        with usable(path):
            require_file(path)
    files = [os.open(path, os.O_RDONLY) for path in paths]  # shared by threads

    rows = (
        (number, *record)
        for number, path in enumerate(paths)
        for record in _find_records(path, files[number])
    )
    dtype = [('file', 'i4'), ('offset', 'i8'), ('length', 'i8'), ('checksum', 'u4')]
    table = np.fromiter(rows, dtype)

    def read(index: int) -> bytes:
        number, offset, length, checksum = table[index].tolist()
        data = read_range(files[number], length, offset + _HEADER.size)
        if len(data) < length or masked_crc(data) != checksum:
            raise UserError(f'{paths[number]}: the record at byte {offset} is damaged')
        return data

    return table['checksum'].astype(np.int64), read


def _find_records(path: str | os.PathLike[str], file: int) -> Iterator[tuple[int, int, int]]:
    """Yields the offset of each record, and the length and the stored checksum of its bytes."""
    size = os.fstat(file).st_size
    offset = 0
    header = read_range(file, _HEADER.size, 0)
    while header:
        length = _read_length(path, header, offset)
        end = offset + _HEADER.size + length
        # The checksum of this record, and the header of the next one.
        following = read_range(file, 4 + _HEADER.size, end) if end < size else b''
        if len(following) < 4:
            raise UserError(f'{path}: the file ends within the record at byte {offset}')
        yield offset, length, int.from_bytes(following[:4], 'little')
        offset = end + 4
        header = following[4:]


def _read_length(path: str | os.PathLike[str], header: bytes, offset: int) -> int:
    """Returns the length of a record from its header, after its checksum."""
    if len(header) < _HEADER.size:
        raise UserError(f'{path}: the file ends within the record at byte {offset}')
    length, checksum = _HEADER.unpack(header)
    if checksum != masked_crc(header[:8]):
        raise UserError(f'{path}: the length of the record at byte {offset} is damaged')
    return int(length)


def masked_crc(data: bytes) -> int:
    """Returns the checksum of the TFRecord format: CRC-32C, rotated, plus a constant."""
    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
