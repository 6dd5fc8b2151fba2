"""Data sets that TensorFlow Datasets (TFDS) prepared, read without TensorFlow.

ArrayRecord files through TFDS's own data source; TFRecord files, as in most existing folders, by
offset (tfrecord.py). Images stay encoded: image_preprocessing.py decodes them.
"""

import functools
import operator
import os
import pathlib
import zlib
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np

from vit_jax.base import Int, UserError, parsing, records
from vit_jax.data.sources import tfrecord
from vit_jax.data.sources.base import EncodedImage, Label, Source, Splits

INFO = 'dataset_info.json'
_BOTH = 'an image and a label'


class ComputedLabel(NamedTuple):
    """A label that is computed of the other columns of an example."""

    class_names: tuple[str, ...]
    number_of: Callable[[dict[str, Any]], Any]


def holds(root: str) -> bool:
    """Whether it is a folder that TFDS prepared, `NAME/VERSION`."""
    return os.path.isfile(os.path.join(root, INFO))


def named_folder(full_name: str) -> str:
    """The folder of `NAME`, `NAME:VERSION` or `NAME/CONFIG:VERSION`, prepared in `data_dir`.

    Without a version the newest; `3.*.*` is the newest that begins so. Raises UserError where there
    is none.
    """
    library = _library()
    name, _, version = full_name.partition(':')
    root = data_dir() / name
    found = [path.parent for path in root.glob(f'{version or "[0-9]*"}/{INFO}')]
    folder = max(found, key=lambda path: _version(path.name), default=None)
    cause = None
    if folder is None:
        try:  # the library may know of other places
            folder = library.builder(full_name, try_gcs=False).data_dir
        except Exception as error:  # of many kinds
            cause = error
    if folder is not None and holds(str(folder)):
        return str(folder)
    others = sorted(str(p.parent.relative_to(root)) for p in root.glob(f'**/{INFO}'))
    known = f'there is {", ".join(others)}; ' if others else ''
    remedy = f'{known}prepare it with python -m vit_jax.prepare {name}'
    raise UserError(f'tfds:{full_name} is not in {data_dir()}: {remedy}') from cause


def folder_splits(root: str, label: str | ComputedLabel | None = None) -> Splits:
    """The splits of a prepared folder.

    `label` is a column, or computes the labels of the others; without it they are those of the
    column `label`, or of `labels` (multi-label), or of the only column of one of the two kinds.
    Raises UserError for unknown file formats and columns.
    """
    library = _library()
    with parsing(f'{root}/{INFO}', 'a data set that TFDS prepared, with features.json'):
        builder = library.builder_from_directory(root)
        info, file_format = builder.info, builder.info.file_format.value
    if file_format not in ('array_record', 'tfrecord'):
        raise UserError(f'{root}: file format {file_format}; expected array_record or tfrecord')
    images = [n for n, kind in info.features.items() if isinstance(kind, library.features.Image)]
    decoders = {name: library.decode.SkipDecoding() for name in images}  # ours decodes them

    def opened(split: str) -> Source:
        if file_format == 'array_record':
            with parsing(f'{root}: {split}', 'whole ArrayRecord files'):
                stored = builder.as_data_source(split, decoders=decoders)
                checksums = _shard_checksums(info.splits[split])
            undamaged = functools.partial(_undamaged, stored.__getitem__)
            return _source(info, split, label, checksums, undamaged)
        checksums, read = tfrecord.read_tfrecords(info.splits[split].filepaths)
        if (count := len(checksums)) != (expected := info.splits[split].num_examples):
            raise UserError(f'{root}: {split} has {count} records, {INFO} says {expected}')
        decode = functools.partial(info.features.deserialize_example_np, decoders=decoders)
        return _source(info, split, label, checksums, lambda index: decode(read(index)))

    return {split: functools.partial(opened, split) for split in info.splits}


def _undamaged(read: Callable[[int], Any], index: int) -> Any:
    try:
        return read(index)
    except RuntimeError as error:  # ArrayRecord has checksums of all that it reads
        raise UserError(f'damaged: {error}') from error


def download_and_prepare(name: str, folder: str | None) -> str:
    """The folder of a named set, downloaded and prepared as ArrayRecord; TFDS needs TensorFlow."""
    library = _library()
    try:
        import tensorflow as tf
    except ImportError as error:
        raise UserError("preparing needs TensorFlow: pip install 'vit_jax[tf]'") from error
    tf.config.set_visible_devices([], 'GPU')
    try:
        builder = library.builder(name, data_dir=folder, file_format='array_record')
    except library.core.registered.DatasetNotFoundError as error:
        raise UserError(f'TFDS knows no {name!r}: {str(error).splitlines()[0]}') from error
    builder.download_and_prepare(file_format='array_record')
    return str(builder.data_dir)


def data_dir() -> pathlib.Path:
    """Where TFDS keeps what it prepared: TFDS_DATA_DIR, by default ~/tensorflow_datasets."""
    return pathlib.Path(os.environ.get('TFDS_DATA_DIR', '~/tensorflow_datasets')).expanduser()


def _source(
    info: Any,
    split: str,
    label: str | ComputedLabel | None,
    checksums: Int[np.ndarray, 'n'],
    example: Callable[[int], Any],
) -> Source:
    name = f'tfds:{info.full_name}/{split}'
    count = len(checksums)
    image_column = _image_column(info.features, name)
    names, multi_label, label_of = _labels(info.features, name, label)

    def read(index: int) -> tuple[EncodedImage, Label]:
        values = example(index)
        found = label_of(values)
        if values[image_column] is None or found is None:
            raise UserError('damaged: the record has no image or no label')
        numbers = np.atleast_1d(np.asarray(found, int))
        for number in numbers[(numbers < 0) | (numbers >= len(names))]:
            raise UserError(f'label {number}, of {len(names)} classes: has {name} labels?')
        if not multi_label:
            return values[image_column], int(numbers[0])
        row = np.zeros(len(names), np.int32)
        row[numbers] = 1
        return values[image_column], row

    def read_labels(indices: Sequence[int]) -> np.ndarray:
        with futures.ThreadPoolExecutor() as pool:
            return np.array(list(pool.map(lambda i: read(i)[1], indices)))

    return Source(
        count=count,
        class_names=names,
        read=read,
        read_names=lambda indices: [f'{name}[{i}]' for i in indices],
        read_labels=read_labels,
        read_sizes=lambda indices: checksums[np.asarray(indices, int)],
        multi_label=multi_label,
    )


def _shard_checksums(info: Any) -> Int[np.ndarray, 'n']:
    """For each record of a split a checksum of where all records of its file begin.

    That, and no checksum of what they hold, is at the end of an ArrayRecord file.
    """
    checksums = []
    for path, count in zip(info.filepaths, info.shard_lengths, strict=True):
        with open(path, 'rb') as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(-min(size, 65_536), os.SEEK_END)
            checksums.append(np.full(count, zlib.crc32(file.read(), size & 0xFFFFFFFF)))
    return np.concatenate(checksums) if checksums else np.zeros(0, np.int64)


def _image_column(features: Any, name: str) -> str:
    images = [n for n, kind in features.items() if isinstance(kind, _library().features.Image)]
    image = _preferred('image', images)
    if image is None:
        raise UserError(f'{name}: expected {_BOTH} among {", ".join(features)}')
    return image


def _labels(
    features: Any, name: str, label: str | ComputedLabel | None
) -> tuple[tuple[str, ...], bool, Callable[[dict[str, Any]], Any]]:
    """The names of the classes, whether an image may have several, and the label of an example."""
    if isinstance(label, ComputedLabel):
        return label.class_names, False, label.number_of
    kinds = _library().features
    single = [n for n, kind in features.items() if isinstance(kind, kinds.ClassLabel)]
    lists = [n for n, kind in features.items() if isinstance(kind, kinds.Sequence)]
    multi = [n for n in lists if isinstance(features[n].feature, kinds.ClassLabel)]
    column = label or _preferred('label', single) or _preferred('labels', multi)
    if column is None:
        raise UserError(f'{name}: expected {_BOTH} among {", ".join(features)}')
    if column not in (*single, *multi):
        near = records.nearest(column, (*single, *multi))
        raise UserError(f'{name}: no column of labels {column!r}; {near}')
    kind = features[column].feature if column in multi else features[column]
    return tuple(kind.names), column in multi, operator.itemgetter(column)


def _preferred(column: str, columns: Sequence[str]) -> str | None:
    return column if column in columns else columns[0] if len(columns) == 1 else None


def _version(text: str) -> tuple[int, ...]:
    parts = text.split('.')
    return tuple(map(int, parts)) if all(map(str.isdecimal, parts)) else ()


def _library() -> Any:
    try:
        import tensorflow_datasets
    except ImportError as error:
        text = f"data of TFDS needs tensorflow-datasets: pip install 'vit_jax[tfds]' ({error})"
        raise UserError(text) from error
    return tensorflow_datasets
