"""Each kind of stored data: images, labels, names and sizes, whatever stores them."""

import collections
import dataclasses
import io
import json
import pathlib
import re
import shutil
import sys
import tarfile
from collections.abc import Callable
from concurrent import futures
from typing import Literal, NamedTuple

import cv2
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from vit_jax.base import UserError
from vit_jax.data.image_decoding import decode
from vit_jax.data.sources import opening

CLASSES = 'n01440764', 'n01443537', 'n02000001'  # ImageNet's tar files are named after classes
LABELS = [0, 1, 2, 1, 0, 1, 2, 1, 1, 0]
PHOTOS = np.random.default_rng(0).integers(0, 256, (len(LABELS), 6, 5, 3), np.uint8)


def encode(photo):
    return cv2.imencode('.png', photo[..., ::-1])[1].tobytes()


def write_files(folder, photos):
    """A file of each photo, FOLDER/CLASS/NUMBER.png; their paths below the folder."""
    paths = [f'{CLASSES[label]}/{i}.png' for i, label in enumerate(LABELS)]
    for path, photo in zip(paths, photos, strict=True):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(encode(photo))
    return paths


def make_arrays(folder, photos):
    arrays = {'train_images': photos, 'train_labels': LABELS, 'class_names': CLASSES}
    np.savez(folder / 'a.npz', **arrays)
    return str(folder / 'a.npz')


def make_folders(folder, photos):
    write_files(folder / 'train', photos)
    return str(folder)


def make_csv(folder, photos):
    paths = write_files(folder, photos)
    lines = [f'{path},{CLASSES[label]},train' for path, label in zip(paths, LABELS, strict=True)]
    (folder / 't.csv').write_text('\n'.join(['path,label,split', *lines]))
    return str(folder / 't.csv')


def make_jsonl(folder, photos):
    paths = write_files(folder, photos)
    rows = [
        {'path': path, 'label': CLASSES[label], 'split': 'train'}
        for path, label in zip(paths, LABELS, strict=True)
    ]
    (folder / 't.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    return str(folder / 't.jsonl')


def tar_of(members):
    """The bytes of a tar file of these members, by name."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode='w') as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def make_imagenet(folder, photos):
    by_class = collections.defaultdict(dict)
    for number, label in enumerate(LABELS):
        name = CLASSES[label]
        by_class[f'{name}.tar'][f'{name}_{number}.JPEG'] = encode(photos[number])
    inner = {name: tar_of(members) for name, members in by_class.items()}
    (folder / 'ILSVRC2012_img_train.tar').write_bytes(tar_of(inner))
    return str(folder)


def make_shards(folder, photos):
    """Two shards, with the classes in the order of their numbers."""
    parts = {'train-0.tar': range(6), 'train-1.tar': range(6, len(photos))}
    for name, numbers in parts.items():
        members = {}
        for number in numbers:
            members[f'{number}.png'] = encode(photos[number])
            members[f'{number}.cls'] = str(LABELS[number]).encode()
        (folder / name).write_bytes(tar_of(members))
    (folder / 'classnames.txt').write_text('\n'.join(CLASSES))
    return str(folder / 'train-{0..1}.tar')


def make_parquet(folder, photos):
    """A file of two row groups, whose sizes change with each image."""
    images = [{'bytes': encode(photo), 'path': None} for photo in photos]
    features = {
        'image': {'_type': 'Image'},
        'label': {'_type': 'ClassLabel', 'names': CLASSES},
    }
    table = pa.table({'image': images, 'label': LABELS})
    described = {'huggingface': json.dumps({'info': {'features': features}})}
    (folder / 'data').mkdir(exist_ok=True)
    path = folder / 'data' / 'train-00000-of-00001.parquet'
    parquet.write_table(table.replace_schema_metadata(described), path, row_group_size=6)
    return str(folder)


def make_array_record(folder, photos, name='made_here:1.2.0'):
    tfds_sets = pytest.importorskip('tests.tfds_sets', reason='tensorflow-datasets is missing')
    examples = [*zip(map(encode, photos), LABELS, strict=True)]
    return str(tfds_sets.array_record(folder, {'train': examples}, CLASSES, named=name))


def make_tfrecord(folder, photos):
    made = make_array_record(folder / 'array_record', photos)
    from tests import tfds_sets

    return str(tfds_sets.tfrecord(pathlib.Path(made), folder / 'tfrecord'))


def make_vtab(folder, photos):
    make_array_record(folder, photos, 'dtd:3.0.1')
    return 'vtab:dtd'


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of a kind of data; to add a kind, add its forms to FORMS."""

    # Writes the PHOTOS, or others, with their LABELS and CLASSES below a folder, as the split
    # `train`; returns the value of `config.data`. TFDS_DATA_DIR is the folder.
    make: Callable
    # Images whose `size_of` changes if one is replaced: that image, all images in its file, or that
    # image and those after it in its file. None: `size_of` is -1; write the reason next to it.
    sizes: Literal['image', 'file', 'rest'] | None = 'image'
    in_bucket: bool = False  # the folder is copied to a bucket

    def write(self, folder, photos, bucket):
        """Writes photos as data of this form; returns the value of `config.data`."""
        data = self.make(folder, photos)
        if not self.in_bucket:
            return data
        for path in folder.rglob('*'):
            if path.is_file():
                bucket.put(path.relative_to(folder.parent).as_posix(), path.read_bytes(), {})
        return f'gs://bucket/{pathlib.Path(data).relative_to(folder.parent)}'


FORMS = {
    'arrays': [Form(make_arrays)],
    # An ArrayRecord file has one checksum at its end.
    'tfds': [
        Form(make_array_record, 'file'),
        Form(make_tfrecord),
        # The order in a bucket depends on the places of images, which are part of `size_of`.
        Form(make_tfrecord, 'rest', in_bucket=True),
    ],
    'vtab': [Form(make_vtab, 'file')],
    'tables': [Form(make_csv), Form(make_jsonl)],
    'imagenet': [Form(make_imagenet)],
    'shards': [Form(make_shards), Form(make_shards, in_bucket=True)],
    # An image changes the size of its row group, and the place of all later ones.
    'parquet': [Form(make_parquet, 'file'), Form(make_parquet, 'file', in_bucket=True)],
    'folders': [Form(make_folders)],
}
CASES = [
    pytest.param((name, form), id=f'{name}-{form.make.__name__}{"-bucket" * form.in_bucket}')
    for name, forms in FORMS.items()
    for form in forms
]


@pytest.mark.parametrize('name', opening._NAMES)
def test_each_kind_is_in_the_table(name):
    form = 'a Form with a function that writes PHOTOS as data of this kind'
    assert name in FORMS, f'{name}: no row in FORMS, tests/data/sources/test_kinds.py; add {form}'


@pytest.mark.parametrize('number', range(len(opening._NAMES)))
def test_each_kind_that_reads_buckets_is_tried_in_one(number):
    name = opening._NAMES[number]
    tried = any(form.in_bucket for form in FORMS[name])
    assert tried == opening.KINDS[number].reads_buckets, f'{name}: no Form with in_bucket=True'


class Made(NamedTuple):
    name: str  # of the kind
    form: Form
    data: str  # the value of `config.data`


@pytest.fixture(scope='module', params=CASES)
def made(request, tmp_path_factory, _bucket):
    name, form = request.param
    folder = tmp_path_factory.mktemp(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('TFDS_DATA_DIR', str(folder))
        patch.setenv('VIT_JAX_CACHE', str(folder / 'cache'))
        yield Made(name, form, form.write(folder, PHOTOS, _bucket))


@pytest.fixture
def source(made):
    return opening.make_opener()(made.data, 'train')


def number_of(image, photos=PHOTOS):
    """The number of the photo that a source returned, as an encoded file or as pixels."""
    pixels = image if isinstance(image, np.ndarray) else decode(image, exif_rotation=False)
    (number,) = (n for n, photo in enumerate(photos) if np.array_equal(photo, pixels))
    return number


def test_the_kind_recognizes_its_data_before_the_others_do(made):
    first = next(i for i, kind in enumerate(opening.KINDS) if kind.recognizes(made.data))
    assert opening._NAMES[first] == made.name


def test_images_and_labels_are_those_that_were_written(source):
    images, labels = zip(*map(source.read, range(len(source))), strict=True)
    numbers = [*map(number_of, images)]
    assert sorted(numbers) == [*range(len(PHOTOS))] and source.class_names == CLASSES
    assert [*labels] == [LABELS[number] for number in numbers]
    assert [source.label_of(i) for i in range(len(source))] == [*labels]
    np.testing.assert_array_equal(source.labels, labels)


def test_many_threads_read_what_one_reads(source):
    alone = [source.read(i) for i in range(len(source))]
    indices = np.random.default_rng(0).integers(0, len(source), 1000).tolist()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # seconds: threads take turns within a read
    try:
        with futures.ThreadPoolExecutor(16) as pool:
            found = [*pool.map(source.read, indices)]
    finally:
        sys.setswitchinterval(before)
    for index, (image, label) in zip(indices, found, strict=True):
        assert np.array_equal(image, alone[index][0]) and label == alone[index][1]


def test_names_are_unique_and_do_not_depend_on_the_order_of_access(made, source):
    names = source.read_names(range(len(source)))
    assert len({*names}) == len(names)
    again = opening.make_opener()(made.data, 'train')
    assert again.read_names(range(len(source))[::-1]) == names[::-1]


def test_an_image_that_was_replaced_has_another_size(made, source, tmp_path, monkeypatch, _bucket):
    everything = range(len(source))
    sizes, replaced = source.read_sizes(everything), PHOTOS.copy()
    replaced[number_of(source.read(3)[0])] = 0  # whose file is shorter
    monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
    again = opening.make_opener()(made.form.write(tmp_path, replaced, _bucket), 'train')
    assert number_of(again.read(3)[0], replaced) == number_of(source.read(3)[0])
    changed = np.flatnonzero(again.read_sizes(everything) != sizes).tolist()
    rest = [*range(3, max(changed, default=3) + 1)]
    expected = {'image': [3], 'file': [*everything], 'rest': rest, None: []}
    assert changed == expected[made.form.sizes]
    assert (sizes == -1).all() == (made.form.sizes is None)


def test_data_that_is_not_there_is_named(made, tmp_path, monkeypatch, _bucket):
    folder = tmp_path / 'removed'
    folder.mkdir()
    monkeypatch.setenv('TFDS_DATA_DIR', str(folder))
    data = made.form.write(folder, PHOTOS, _bucket)
    shutil.rmtree(folder)
    for name in _bucket.names(folder.name):
        _bucket.remove(name, {})
    with pytest.raises(UserError, match=re.escape(re.split('[:/]', data)[-1])):
        opening.make_opener()(data, 'train')
