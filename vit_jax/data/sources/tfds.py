"""Data sets that TensorFlow Datasets prepared, read without TensorFlow.

ArrayRecord files through TFDS's own data source; TFRecord files, which most existing folders
hold, by offset (tfrecord.py). Images stay encoded: our own decoder reads them.
"""

import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import numpy as np

from vit_jax.base.errors import UserError
from vit_jax.data.sources import tfrecord
from vit_jax.data.sources.base import Label, Source, Splits, Stored

INFO = 'dataset_info.json'


def holds(root: str) -> bool:
    """Is it a folder that TFDS prepared, `NAME/VERSION`?"""
    return os.path.isfile(os.path.join(root, INFO))


def named(name: str) -> Splits:
    """The splits of `NAME`, `NAME:VERSION` or `NAME/CONFIG:VERSION`, prepared before.

    They are looked for in TFDS_DATA_DIR, or in ~/tensorflow_datasets. Raises UserError where
    they are not there.
    """
    library = _library()
    name, _, version = name.partition(':')
    root = data_dir() / name
    found = [path.parent for path in root.glob(f'{version or "[0-9]*"}/{INFO}')]
    if found:
        return folder(str(max(found, key=lambda path: _version(path.name))))
    others = sorted(str(p.parent.relative_to(root)) for p in root.glob(f'**/{INFO}'))
    try:  # the library may know of other places
        builder = library.builder(name, try_gcs=False)
        if builder.info.splits and holds(str(builder.data_dir)):
            return folder(str(builder.data_dir))
        builder.as_data_source('train')
    except Exception as error:
        known = f'there is {", ".join(others)}; ' if others else ''
        raise UserError(
            f'tfds:{name}{":" * bool(version)}{version} is not in {data_dir()}: {known}prepare it '
            f'with python -m vit_jax.prepare {name}'
        ) from error
    return {  # the library's mock, for tests: there are no files, and its images are pixels
        split: functools.partial(_from_data_source, builder, split, name, None)
        for split in ('train', 'test')
    }


def folder(root: str) -> Splits:
    """The splits of a prepared folder. Raises UserError for a file format other than the two."""
    builder = _library().builder_from_directory(root)
    file_format = builder.info.file_format.value
    name = builder.info.full_name
    if file_format not in ('array_record', 'tfrecord'):
        raise UserError(f'{root}: file format {file_format}; expected array_record or tfrecord')
    decoders = _skip(builder.info.features)
    opened = _from_data_source if file_format == 'array_record' else _from_tfrecord
    return {
        split: functools.partial(opened, builder, split, name, decoders)
        for split in builder.info.splits
    }


def prepare(name: str, folder: str | None) -> str:
    """Downloads and prepares a named data set as ArrayRecord; gives its folder.

    Raises UserError where TensorFlow, which the builders of TFDS need, is not installed.
    """
    library = _library()
    try:
        import tensorflow as tf
    except ImportError as error:
        raise UserError("preparing needs TensorFlow: pip install -e '.[tf]'") from error
    tf.config.set_visible_devices([], 'GPU')
    try:
        builder = library.builder(name, data_dir=folder, file_format='array_record')
    except library.core.registered.DatasetNotFoundError as error:
        raise UserError(f'TFDS knows no {name!r}: {str(error).splitlines()[0]}') from error
    builder.download_and_prepare(file_format='array_record')
    return str(builder.data_dir)


def data_dir() -> pathlib.Path:
    """Where TFDS keeps what it prepared."""
    return pathlib.Path(os.environ.get('TFDS_DATA_DIR', '~/tensorflow_datasets')).expanduser()


def _from_data_source(builder: Any, split: str, name: str, decoders: Any) -> Source:
    source = builder.as_data_source(split, decoders=decoders)
    return _source(builder.info.features, len(source), lambda i: source[i], f'tfds:{name}/{split}')


def _from_tfrecord(builder: Any, split: str, name: str, decoders: Any) -> Source:
    features = builder.info.features
    count, read = tfrecord.records(builder.info.splits[split].filepaths)
    expected = builder.info.splits[split].num_examples
    if count != expected:
        raise UserError(f'{builder.data_dir}: {split} has {count} records, {INFO} says {expected}')
    return _source(
        features,
        count,
        lambda i: features.deserialize_example_np(read(i), decoders=decoders),
        f'tfds:{name}/{split}',
    )


def _source(
    features: Any, count: int, example: Callable[[int], dict[str, Any]], name: str
) -> Source:
    image, label, several = _columns(features, name)
    names = (features[label].feature if several else features[label]).names

    def target(values: dict[str, Any]) -> Label:
        if not several:
            number = int(values[label])
            if not 0 <= number < len(names):
                raise UserError(f'label {number}, of {len(names)} classes: has {name} labels?')
            return number
        row = np.zeros(len(names), np.int32)
        row[np.asarray(values[label], int)] = 1
        return row

    def read(index: int) -> tuple[Stored, Label]:
        values = example(index)
        return values[image], target(values)

    def read_labels(indices: Sequence[int]) -> np.ndarray:
        with futures.ThreadPoolExecutor() as pool:
            return np.array(list(pool.map(lambda i: target(example(i)), indices)))

    return Source(
        count=count,
        class_names=tuple(names),
        read=read,
        name_of=lambda i: f'{name}[{i}]',
        read_labels=read_labels,
        multi_label=several,
    )


def _columns(features: Any, name: str) -> tuple[str, str, bool]:
    """The names of the image and of its label, and whether there are several labels an image."""
    kinds = _library().features
    images = [n for n, kind in features.items() if isinstance(kind, kinds.Image)]
    one = [n for n, kind in features.items() if isinstance(kind, kinds.ClassLabel)]
    many = [
        n
        for n, kind in features.items()
        if isinstance(kind, kinds.Sequence) and isinstance(kind.feature, kinds.ClassLabel)
    ]
    image = 'image' if 'image' in images else images[0] if len(images) == 1 else None
    for labels, preferred, several in (one, 'label', False), (many, 'labels', True):
        label = preferred if preferred in labels else labels[0] if len(labels) == 1 else None
        if image and label:
            return image, label, several
    raise UserError(f'{name}: expected an image and a label among {", ".join(features)}')


def _skip(features: Any) -> dict[str, Any]:
    """Images stay as they are stored."""
    library = _library()
    kinds = [n for n, kind in features.items() if isinstance(kind, library.features.Image)]
    return {name: library.decode.SkipDecoding() for name in kinds}


def _version(text: str) -> tuple[int, ...]:
    parts = text.split('.')
    return tuple(int(part) for part in parts) if all(p.isdecimal() for p in parts) else ()


def _library() -> Any:
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise UserError(
            f"data of TFDS needs tensorflow-datasets: pip install -e '.[tfds]' ({error})"
        ) from error
    return tensorflow_datasets
