"""Data sets that TFDS prepares here, from images at hand: no TensorFlow, no network."""

import json
import pathlib
import struct

import tensorflow_datasets as tfds

from vit_jax.data.sources.tfds import masked_crc


def array_record(
    root, splits, class_names, *, columns=('label',), features=None, named='made_here:1.2.0'
) -> pathlib.Path:
    """A set of splits {name: [(encoded image, label), ...]} in that order, as ArrayRecord.

    Columns that end with `s` are multi-label. With other columns than `label`, a dictionary takes
    the label's place; `features` are those that are no labels of `class_names`.
    """
    kind = tfds.features.ClassLabel(names=list(class_names))
    kinds = {name: tfds.features.Sequence(kind) if name[-1] == 's' else kind for name in columns}
    kinds |= features or {}
    set_name, _, version = named.partition(':')

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = set_name
        VERSION = tfds.core.Version(version)

        def _info(self):
            features = {'image': tfds.features.Image(), 'id': tfds.features.Text()} | kinds
            return self.dataset_info_from_configs(
                features=tfds.features.FeaturesDict(features), disable_shuffling=True
            )

        def _split_generators(self, manager):
            return {split: self._generate_examples(split) for split in splits}

        def _generate_examples(self, split):
            for i, (stored, label) in enumerate(splits[split]):
                values = {'image': stored, 'id': str(i)}
                values |= label if isinstance(label, dict) else {'label': label}
                yield i, {k: _Encoded(v) if isinstance(v, bytes) else v for k, v in values.items()}

    builder = Builder(data_dir=str(root), file_format='array_record')
    builder.download_and_prepare(file_format='array_record')
    return pathlib.Path(builder.data_dir)


def tfrecord(source: pathlib.Path, root: pathlib.Path) -> pathlib.Path:
    """The same set, record for record, as TFRecord files: what TFDS with TensorFlow writes."""
    from array_record.python.array_record_module import ArrayRecordReader

    target = root / source.parent.name / source.name
    target.mkdir(parents=True)
    for file in source.iterdir():
        if 'array_record' in file.name:
            reader = ArrayRecordReader(str(file))
            lines = reader.read_all() if reader.num_records() else []
            with (target / file.name.replace('array_record', 'tfrecord')).open('wb') as out:
                for line in lines:
                    out.write(framed(line))
        else:
            (target / file.name).write_bytes(file.read_bytes())
    info = json.loads((target / 'dataset_info.json').read_text())
    info['fileFormat'] = 'tfrecord'
    for split in info['splits']:
        split['filepathTemplate'] = split['filepathTemplate'].replace('array_record', 'tfrecord')
    (target / 'dataset_info.json').write_text(json.dumps(info).replace('array_record', 'tfrecord'))
    return target


def framed(record: bytes) -> bytes:
    """A record of a TFRecord file."""
    length = struct.pack('<Q', len(record))
    return (
        length
        + struct.pack('<I', masked_crc(length))
        + record
        + struct.pack('<I', masked_crc(record))
    )


class _Encoded:
    """Bytes that TFDS takes as an encoded image."""

    def __init__(self, data):
        self._data = data

    def read(self):
        return self._data
