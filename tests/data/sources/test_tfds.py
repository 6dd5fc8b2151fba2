"""Data sets of TFDS in both of its formats, made here."""

import io
import json
import pathlib
import re
import shutil
import subprocess
import sys

import cv2
import numpy as np
import pytest
from PIL import Image

tfds_sets = pytest.importorskip('tests.tfds_sets', reason='tensorflow-datasets is not installed')

from vit_jax.base import UserError  # noqa: E402
from vit_jax.data import loading  # noqa: E402
from vit_jax.data.image_preprocessing import InceptionCrop  # noqa: E402
from vit_jax.data.sources import opening, tfds  # noqa: E402

RNG = np.random.default_rng(0)
ENCODED = [
    cv2.imencode('.jpg', RNG.integers(0, 256, (9 + i % 5, 12, 3), np.uint8))[1].tobytes()
    for i in range(40)
]
CLASSES = 'cat', 'dog', 'emu'


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
    """The same images as a folder, as ArrayRecord and as TFRecord, in one order."""
    root = tmp_path_factory.mktemp('sets')
    for split, images in ('train', ENCODED[:30]), ('test', ENCODED[30:]):
        for i, image in enumerate(images):
            path = root / 'folder' / split / CLASSES[i % 3] / f'{i}.jpg'
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image)
    splits = {}
    for split in 'train', 'test':
        source = opening.make_opener()(str(root / 'folder'), split)
        splits[split] = [source.read(i) for i in range(len(source))]
    records = tfds_sets.array_record(root / 'array_record', splits, CLASSES)
    return {
        'folder': root / 'folder',
        'array_record': records,
        'tfrecord': tfds_sets.tfrecord(records, root / 'tfrecord'),
    }


def batches(data):
    reader = loading.ImageReader(
        source=opening.make_opener()(str(data), 'train'),
        crop=InceptionCrop(),
        size=(8, 8),
        exif_rotation=True,
    )
    config = loading.LoaderConfig(placement='host')
    loader = loading.make_loader(reader, config)
    found = loading.training_batches(loader, steps=range(6), batch_size=8, seed=5)
    return [{name: np.asarray(array) for name, array in batch.items()} for batch in found]


@pytest.mark.parametrize('kind', ['array_record', 'tfrecord'])
def test_batches_do_not_depend_on_how_images_are_stored(prepared, kind):
    for one, other in zip(batches(prepared['folder']), batches(prepared[kind]), strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def upload(bucket, folder, name):
    for path in folder.iterdir():
        bucket.put(f'{name}/{path.name}', path.read_bytes(), {})
    return f'gs://{bucket.name}/{name}'


def test_a_set_in_a_bucket_is_the_set_on_the_disk(prepared, bucket, tmp_path, monkeypatch):
    monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))
    data = upload(bucket, prepared['tfrecord'], 'made/1.2.0')
    for split in 'train', 'test[20%:60%]':
        local, remote = (
            opening.make_opener()(str(one), split) for one in (prepared['tfrecord'], data)
        )
        numbers = range(len(local))
        assert [remote.read(i) for i in numbers] == [local.read(i) for i in numbers]
        assert remote.labels.tolist() == local.labels.tolist()
        assert remote.read_names(numbers) == local.read_names(numbers)
        assert remote.class_names == local.class_names


def test_a_set_in_a_bucket_has_as_many_records_as_it_says(prepared, bucket, tmp_path, monkeypatch):
    monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))
    data = upload(bucket, prepared['tfrecord'], 'made/1.2.0')
    (name,) = [name for name in bucket.names() if '-test.' in name]
    records = bucket.objects[name].data
    length = int.from_bytes(records[:8], 'little')
    bucket.put(name, records[length + 16 :], {})
    with pytest.raises(UserError, match='test has 9 records; dataset_info.json says 10'):
        opening.make_opener()(data, 'test')


def test_each_label_column_of_a_set_in_a_bucket_has_its_own_index(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))
    rows = [{'one': i % 3, 'twos': [2, i % 2]} for i in range(3)]
    images = {'train': [*zip(ENCODED, rows, strict=False)]}
    records = tfds_sets.array_record(tmp_path / 'a', images, CLASSES, columns=('one', 'twos'))
    data = upload(bucket, tfds_sets.tfrecord(records, tmp_path / 't'), 'made/1.2.0')
    expected = {'one': [0, 1, 2], 'twos': [[1, 0, 1], [0, 1, 1], [1, 0, 1]]}
    for column, labels in expected.items():
        splits = opening.open_stored_splits(data, label_column=column)
        assert splits['train']().labels.tolist() == labels


@pytest.mark.parametrize('kind', ['array_record', 'tfrecord'])
def test_a_prepared_set_is_found_by_its_name(prepared, kind, monkeypatch):
    monkeypatch.setenv('TFDS_DATA_DIR', str(prepared[kind].parent.parent))
    stored = opening.make_opener()(str(prepared['folder']), 'test').read(4)
    for name in 'tfds:made_here', 'tfds:made_here:1.2.0':
        source = opening.make_opener()(name, 'test')
        assert source.class_names == CLASSES and len(source) == 10
        assert source.read(4) == stored and source.labels[4] == stored[1]
        assert source.name_of(4) == 'tfds:made_here/1.2.0/test[4]'
    for name, split, message in (
        ('tfds:made_here:9.9.9', 'test', '1.2.0'),
        ('tfds:cifar10', 'train', 'tfds build cifar10'),
        ('tfds:made_here', 'val', 'val'),
    ):
        with pytest.raises(UserError, match=message):
            opening.make_opener()(name, split)


def test_a_set_in_a_bucket_is_found_by_its_name(prepared, bucket, tmp_path, monkeypatch):
    monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))
    monkeypatch.setenv('TFDS_DATA_DIR', 'gs://bucket/sets')
    for version in '1.2.0', '1.10.0', '1.9.0':
        upload(bucket, prepared['tfrecord'], f'sets/made_here/{version}')
    found = {'': '1.10.0', ':1.2.0': '1.2.0', ':1.9.*': '1.9.0'}
    for version, folder in found.items():
        assert tfds.find_prepared(f'made_here{version}') == f'gs://bucket/sets/made_here/{folder}'
    source = opening.make_opener()('tfds:made_here:1.2.0', 'test')
    assert len(source) == 10 and source.places is not None
    with pytest.raises(UserError, match='found the folders 1.10.0, 1.2.0, 1.9.0'):
        opening.make_opener()('gs://bucket/sets/made_here', 'test')
    for name in 'made_here:3.*.*', 'other':
        with pytest.raises(UserError, match=f'tfds:{re.escape(name)}: not in gs://bucket/sets'):
            opening.make_opener()(f'tfds:{name}', 'test')


def test_several_labels_are_rows_and_other_numbers_are_rejected(tmp_path):
    """Every label of ImageNet's `test` in TFDS is -1."""

    def labels_of(name, values, columns):
        images = [*zip(ENCODED, values, strict=False)]
        root = tfds_sets.array_record(tmp_path / name, {'train': images}, CLASSES, columns=columns)
        return opening.make_opener()(str(root), 'train').labels.tolist()

    rows = [{'labels': [i % 3, 2]} for i in range(3)]
    assert labels_of('several', rows, ('labels',)) == [[1, 0, 1], [0, 1, 1], [0, 0, 1]]
    for name, value, columns in (
        ('label', -1, ('label',)),
        ('label', {'labels': [1, -1]}, ('labels',)),
        ('image', {}, ()),
    ):
        with pytest.raises(UserError, match=name):
            labels_of(f'{value}', [value], columns)


def test_images_of_floats_are_those_of_tfds(tmp_path, bucket, monkeypatch):
    """TFDS stores a float32 image as the PNG of its bytes, in four channels."""
    ramp = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8, 1)
    images = {'train': ramp, 'high': 2 * ramp, 'low': -ramp, 'nan': ramp * np.nan}
    splits = {}
    for split, image in images.items():
        Image.fromarray(image.view(np.uint8).reshape(8, 8, 4)).save(file := io.BytesIO(), 'PNG')
        splits[split] = [(file.getvalue(), 0)]
    library = pytest.importorskip('tensorflow_datasets')
    feature = library.features.Image(shape=(8, 8, 4))
    root = tfds_sets.array_record(tmp_path, splits, CLASSES, features={'image': feature})
    described = json.loads((root / 'features.json').read_text())
    kind = {'shape': {'dimensions': ['8', '8', '1']}, 'dtype': 'float32', 'encodingFormat': 'png'}
    described['featuresDict']['features']['image']['image'] = kind
    (root / 'features.json').write_text(json.dumps(described))
    stored = library.builder_from_directory(str(root)).as_data_source('train')[0]['image']
    np.testing.assert_array_equal(stored, ramp)
    monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))
    remote = upload(bucket, tfds_sets.tfrecord(root, tmp_path / 'tfrecord'), 'made/1.2.0')
    for data in str(root), remote:
        image, _ = opening.make_opener()(data, 'train').read(0)
        np.testing.assert_array_equal(image, np.rint(255 * ramp[..., 0]))
        for split in 'high', 'low', 'nan':
            with pytest.raises(UserError, match='float32 pixels from .*; expected 0 to 1'):
                opening.make_opener()(data, split).read(0)


@pytest.mark.gate
def test_damage_of_array_records_is_noticed_wherever_it_is(prepared, tmp_path):
    """Flips in headers of blocks and chunks, in images, in padding; and a file that was cut."""
    folder = tmp_path / '1.2.0'
    shutil.copytree(prepared['array_record'], folder)
    (file,) = folder.glob('*train.array_record*')
    whole, rng, noticed = file.read_bytes(), np.random.default_rng(0), 0

    def read():
        source = opening.make_opener()(str(folder), 'train')
        return [source.read(i) for i in range(len(source))]

    expected = read()
    used = np.flatnonzero(np.frombuffer(whole, np.uint8))
    places = {*range(0, 124, 4), *range(2**16 - 4, 2**16 + 80, 4), *rng.choice(used, 60).tolist()}
    for place in sorted(places):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        file.write_bytes(damaged)
        try:
            assert read() == expected, f'other data after a flip of byte {place}'
        except UserError as error:
            assert 'damaged: ' in str(error)
            noticed += 1
    assert noticed > 80  # the others hit what is not read
    for length in 0, 100, int(used[-200]), 2**16, len(whole) - 2**16:
        file.write_bytes(whole[:length])
        with pytest.raises(UserError, match='damaged: '):
            read()


@pytest.mark.gate
def test_neither_format_imports_tensorflow(prepared):
    program = (
        'import sys; from vit_jax.data.sources.opening import make_opener\n'
        'for path in sys.argv[1:]: make_opener()(path, "train").read(3)\n'
        'assert "tensorflow" not in sys.modules and "tensorflow_datasets" in sys.modules'
    )
    paths = [str(prepared[kind]) for kind in ('array_record', 'tfrecord')]
    subprocess.run(
        [sys.executable, '-c', program, *paths],
        check=True,
        cwd=pathlib.Path(__file__).parents[3],
        timeout=120,
    )


def test_the_column_of_labels_can_be_chosen_and_images_without_one_are_left_out(tmp_path, caplog):
    """As of tfds:imagenet2012_real, which has the original labels and ReaL's."""
    real = [0, 1], [], [2], [1]
    images = [
        (image, {'original_label': i % 3, 'real_labels': labels})
        for i, (image, labels) in enumerate(zip(ENCODED, real, strict=False))
    ]
    columns = 'original_label', 'real_labels'
    root = tfds_sets.array_record(tmp_path, {'validation': images}, CLASSES, columns=columns)
    opened = opening.make_opener()
    original = opened(str(root), 'test')
    assert original.labels.tolist() == [0, 1, 2, 0]
    assert opened(str(root), 'test', 'original_label').labels.tolist() == [0, 1, 2, 0]
    chosen = opened(str(root), 'test', 'real_labels')
    assert chosen.labels.tolist() == [[1, 1, 0], [0, 0, 1], [0, 1, 0]]
    assert [chosen.name_of(i) for i in range(3)] == [original.name_of(i) for i in (0, 2, 3)]
    assert 'tfds:made_here/1.2.0/validation[1]' in caplog.text
    for data in str(root), 'digits':
        with pytest.raises(UserError, match='real_label'):
            opened(data, 'test', 'real_label')


def written(path, records):
    path.write_bytes(b''.join(tfds_sets.framed(record) for record in records))
    return path


def test_the_size_of_a_tfrecord_changes_with_its_label(tmp_path):
    def sizes(name, *labels):
        images = [*zip(ENCODED[:4], labels, strict=True)]
        made = tfds_sets.array_record(tmp_path / name, {'train': images}, CLASSES)
        root = tfds_sets.tfrecord(made, tmp_path / f'{name}-tfrecord')
        return opening.make_opener()(str(root), 'train').read_sizes(range(4))

    first = sizes('a', 0, 1, 2, 1)
    np.testing.assert_array_equal(sizes('b', 0, 1, 2, 1), first)
    assert (sizes('c', 0, 1, 2, 0) != first).tolist() == [False, False, False, True]


def test_records_of_several_files_are_one_sequence(tmp_path):
    parts = [b'one', b'', b'three'], [], [b'four' * 1000]
    files = [written(tmp_path / f'{i}', part) for i, part in enumerate(parts)]
    checksums, read = tfds.read_tfrecords(files)
    assert [read(i) for i in range(len(checksums))] == [record for part in parts for record in part]
    # CRC-32C of '123456789' is 0xE3069283 (RFC 3720, appendix B.4)
    rotated = (0xE3069283 >> 15 | 0xE3069283 << 17) & 0xFFFFFFFF
    checksums, _ = tfds.read_tfrecords([written(tmp_path / 'file', [b'123456789'])])
    assert checksums.tolist() == [(rotated + 0xA282EAD8) % 2**32]


@pytest.mark.parametrize('place', range(0, 60, 3))
def test_damage_of_tfrecords_is_noticed_wherever_it_is(tmp_path, place):
    path = written(tmp_path / 'file', [b'some record', b'another one, longer'])
    whole = path.read_bytes()
    start = 0 if place < 27 else 27  # of the record: 16 bytes and its text
    flipped = whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :]
    for damaged in (flipped, whole[:place]) if place % 27 else (flipped,):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=f'byte {start}'):
            checksums, read = tfds.read_tfrecords([path])
            for i in range(len(checksums)):
                read(i)
