import dataclasses
import errno
import gc
import io
import itertools
import os
import threading
import types
import weakref
from concurrent import futures
from typing import ClassVar

import chex
import cv2
import jax
import numpy as np
import pytest
from PIL import Image

from vit_jax.base import TransientError, UserError
from vit_jax.data import inspection, loading
from vit_jax.data.image_preprocessing import CentralCrop, Preprocessing, RandomCrop, Resize
from vit_jax.data.loading import make_reader
from vit_jax.data.sampling import Examples
from vit_jax.data.sources.arrays import array_source
from vit_jax.data.sources.base import Source
from vit_jax.distributed.meshes import MeshConfig, batch_sharding, make_mesh

N = 37
CHOSEN = {'repeats': 3, 'balance': 0.5}  # how images are chosen, other than by default
IMAGES = np.random.default_rng(0).integers(0, 256, (N, 6, 6, 3), np.uint8)
SOURCE = array_source(IMAGES, np.arange(N) % 5, list('abcde'), name='test')


def loader(crop=None, *, placement='host', source=SOURCE, threads=3, chosen=None, **options):
    reader = loading.ImageReader(source, crop or Resize(), (6, 6), exif_rotation=True, **options)
    config = loading.LoaderConfig(placement=placement, threads=threads, **(chosen or {}))
    return loading.make_loader(reader, config)


def taken(loader, *, start=0, stop=8, seed=3):
    found = loading.training_batches(loader, steps=range(start, stop), batch_size=8, seed=seed)
    return [jax.tree.map(np.asarray, batch) for batch in found]


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        chex.assert_trees_all_equal(a, b)


@pytest.mark.parametrize('rotation', [False, True])
def test_a_network_is_shown_images_as_its_preprocessing_says(rotation):
    exif, file = Image.Exif(), io.BytesIO()
    exif[274] = 6  # to be turned by a quarter
    Image.fromarray(IMAGES[0]).save(file, 'PNG', exif=exif)
    source = dataclasses.replace(SOURCE, read=lambda index: (file.getvalue(), 0))
    crop = CentralCrop(scale=1.5)
    preprocessing = Preprocessing(crop=crop, exif_rotation=rotation)
    shown, _ = loading.make_reader(source, preprocessing, (4, 3)).example(0)
    turned = np.rot90(IMAGES[0], -1) if rotation else IMAGES[0]
    np.testing.assert_array_equal(shown, crop(np.ascontiguousarray(turned), (4, 3), None))


@pytest.mark.parametrize('chosen', [{}, CHOSEN])
@pytest.mark.parametrize('crop', [Resize(), RandomCrop(scale=1.5)])
def test_batch_n_is_the_same_wherever_the_iteration_begins(crop, chosen):
    whole = taken(loader(crop, chosen=chosen))
    assert_same(taken(loader(crop, chosen=chosen, threads=1), start=5), whole[5:])
    with pytest.raises(AssertionError):
        assert_same(taken(loader(crop, chosen=chosen), seed=4), whole)


@pytest.mark.parametrize('kind', [{'multi_label': True}, {'class_names': ()}])
def test_images_without_exactly_one_class_are_not_balanced(kind):
    with pytest.raises(UserError, match='loader.balance=1.0'):
        config = loading.LoaderConfig(balance=1.0)
        source = dataclasses.replace(SOURCE, **kind)
        loading.training_sampler(source, config, batch_size=8, seed=3)


@pytest.mark.parametrize('chosen', [{}, CHOSEN])
def test_batches_gathered_on_the_device_are_those_read_on_the_host(chosen):
    crop = CentralCrop(scale=1.2)
    assert_same(*(taken(loader(crop, placement=p, chosen=chosen)) for p in ('device', 'host')))


def test_every_epoch_has_every_example_once_in_another_order():
    images = np.concatenate([batch['images'] for batch in taken(loader(), stop=4 * N // 8 + 1)])
    epochs = [[image.tobytes() for image in images[e * N : (e + 1) * N]] for e in range(3)]
    expected = sorted(image.tobytes() for image in IMAGES)
    assert all(sorted(epoch) == expected for epoch in epochs)
    assert all(a != b for a, b in itertools.pairwise(epochs))


@pytest.mark.parametrize('chosen', [{}, CHOSEN])
@pytest.mark.parametrize('count', [1, 2, 4])
def test_the_global_batch_does_not_depend_on_the_number_of_processes(count, chosen):
    steps, config = range(3), loading.LoaderConfig(**chosen)
    sampler = loading.training_sampler(SOURCE, config, batch_size=8, seed=3)
    parts = [
        list(loading.host_batches(loader(), sampler, steps=steps, rows=rows, batch_size=8))
        for rows in np.split(np.arange(8), count)
    ]
    together = [
        jax.tree.map(lambda *p: np.concatenate(p), *step) for step in zip(*parts, strict=True)
    ]
    assert_same(together, taken(loader(chosen=chosen), stop=3))


@pytest.mark.parametrize('placement', ['host', 'device'])
@pytest.mark.parametrize('batch_size', [8, 32, 64])
def test_sequential_examples_come_once_each_in_order_then_padding(placement, batch_size):
    indices = np.array([5, 3, 36, 0, 11, 12, 13, 14, 15, 16, 17])
    found = loading.sequential_batches(loader(placement=placement), indices, batch_size=batch_size)
    batches = [jax.tree.map(np.asarray, batch) for batch in found]
    assert {len(batch['mask']) for batch in batches} == {batch_size}
    together = jax.tree.map(lambda *b: np.concatenate(b), *batches)
    assert together['mask'].tolist() == [True] * 11 + [False] * (len(together['mask']) - 11)
    np.testing.assert_array_equal(together['images'][:11], IMAGES[indices])


def broken_source():
    png = cv2.imencode('.png', IMAGES[0])[1].tobytes()
    return dataclasses.replace(SOURCE, read=lambda i: (b'garbage' if i == 7 else png, i % 5))


def test_a_batch_begins_where_a_cpu_device_takes_it_without_a_copy():
    for _ in range(5):
        images = loader().load(Examples.of(np.zeros(3, int)))['images']
        assert images.ctypes.data % 64 == 0
        alone = jax.device_put(images, jax.devices()[0])
        assert alone.unsafe_buffer_pointer() == images.ctypes.data


def test_random_crops_depend_on_epoch_and_example_and_not_on_the_batch():
    crop = loader(RandomCrop(scale=2.0))
    index, epoch = np.tile(np.arange(10), 2), np.repeat([0, 1], 10)
    whole = crop.load(Examples(index, epoch))['images']
    part = slice(12, 7, -1)
    np.testing.assert_array_equal(
        crop.load(Examples(index[part], epoch[part]))['images'], whole[part]
    )
    assert (whole[:10] != whole[10:]).any(axis=(1, 2, 3)).sum() >= 8


@dataclasses.dataclass(kw_only=True)
class OwnCrop(Resize):
    """A crop of a user, who may also spawn generators."""

    random: ClassVar[bool] = True
    extra: int = 0

    def __call__(self, image, size, rng):
        (child,) = rng.spawn(1)
        return np.roll(image, child.integers(5), axis=0)[: size[0] + self.extra, : size[1]]


def test_a_crop_of_the_user_has_random_numbers_of_its_image():
    reader = loading.ImageReader(SOURCE, OwnCrop(), (2, 2), exif_rotation=True)
    first = [reader.example(index)[0] for index in range(10)]
    np.testing.assert_array_equal(first, [reader.example(index)[0] for index in range(10)])
    other = [reader.example(index, epoch=1)[0] for index in range(10)]
    assert any((a != b).any() for a, b in zip(first, other, strict=True))


def test_a_crop_of_the_user_with_another_size_is_no_unreadable_image():
    reader = loading.ImageReader(SOURCE, OwnCrop(extra=1), (2, 2), True, on_unreadable='skip')
    with futures.ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match='broadcast'):
        reader.examples(Examples.of(0), pool)


def failing(index, times, number=errno.ESTALE):
    """The images, but that the network fails the first times that one of them is read."""
    left = [times]

    def read(i):
        if i == index and left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return SOURCE.read(i)

    return dataclasses.replace(SOURCE, read=read)


@pytest.mark.parametrize('on_unreadable', ['error', 'skip'])
def test_a_failing_network_changes_no_batch(monkeypatch, on_unreadable):
    monkeypatch.setattr(loading, '_PAUSES', (0, 0))
    expected = taken(loader(), stop=5)
    found = loader(source=failing(7, times=2), on_unreadable=on_unreadable)
    assert_same(taken(found, stop=5), expected)
    with pytest.raises(TransientError, match=r'test\[7\]: Stale'):
        taken(loader(source=failing(7, times=3), on_unreadable=on_unreadable), stop=5)
    with pytest.raises(UserError, match=r'test\[7\]: Input/output error'):
        taken(loader(source=failing(7, 3, errno.EIO)), stop=5)


def test_no_batch_is_kept_by_its_errors():
    reader = loading.ImageReader(broken_source(), Resize(), (6, 6), True, on_unreadable='skip')
    gc.collect()
    gc.disable()
    try:
        with futures.ThreadPoolExecutor(1) as pool:
            batch = reader.examples(Examples.of(np.arange(16)), pool)
        images = weakref.ref(batch['images'])
        del batch
        assert images() is None
    finally:
        gc.enable()


def test_a_thread_holds_few_bytes_of_stored_images(monkeypatch):
    monkeypatch.setattr(loading, '_MOST_BYTES', 2 * IMAGES[0].nbytes)
    made, alive = [], []

    def read(index):
        image = IMAGES[index].copy()
        made.append(weakref.ref(image))
        alive.append(sum(one() is not None for one in made))
        return image, 0

    source = dataclasses.replace(SOURCE, read=read)
    reader = loading.ImageReader(source, Resize(), (6, 6), exif_rotation=True)
    with futures.ThreadPoolExecutor(1) as pool:
        batch = reader.examples(Examples.of(np.arange(N)), pool)
    np.testing.assert_array_equal(batch['images'], IMAGES)
    assert len(alive) == N and max(alive) <= 4


@pytest.mark.parametrize('batch_size', [4, 8, 32])
def test_small_batches_are_read_by_all_threads(batch_size):
    """The first read ends when 16 threads read."""
    started, all_read = itertools.count(1), threading.Event()

    def read(index):
        if next(started) == 16:
            all_read.set()
        assert all_read.wait(60)
        return SOURCE.read(index)

    batches = loading.training_batches(
        loader(source=dataclasses.replace(SOURCE, read=read), threads=16),
        steps=range(32),
        batch_size=batch_size,
        seed=0,
    )
    assert len([*batches]) == 32


@pytest.mark.parametrize('num_classes, is_on_device', [(5, True), (100_000, False)])
def test_what_is_kept_on_the_device_includes_labels(num_classes, is_on_device):
    rows = np.zeros((8, num_classes), np.int8)
    source = array_source(IMAGES[:8], rows, [*map(str, range(num_classes))], name='test')
    reader = loading.ImageReader(source, Resize(), (6, 6), exif_rotation=True)
    read = []
    counted = dataclasses.replace(source, read=lambda i: read.append(i) or source.read(i))
    reader = dataclasses.replace(reader, source=counted)
    loading.make_loader(reader, loading.LoaderConfig(device_mb=1.0))
    assert bool(read) == is_on_device


@pytest.mark.parametrize('placement', ['host', 'device'])
def test_an_unreadable_image_is_named_or_masked(placement):
    with pytest.raises(UserError, match=r'test\[7\]'):
        taken(loader(source=broken_source(), placement=placement))
    skipping = loader(source=broken_source(), placement=placement, on_unreadable='skip')
    batches = loading.sequential_batches(skipping, np.arange(N), batch_size=40)
    mask = np.concatenate([np.asarray(batch['mask']) for batch in batches])
    assert np.flatnonzero(~mask).tolist() == [7, 37, 38, 39]


def test_the_first_images_that_are_left_out_are_named_once(caplog):
    warn = loading.make_warning(shown=2)
    for text in 'a', 'b', 'a', 'c':
        warn(text)
    assert [line[:10] for line in caplog.messages] == ['skipped: a', 'skipped: b']


def test_images_are_kept_on_the_device_if_their_bytes_fit():
    """If they fit, all images are read when the loader is made."""
    read = []

    def record(index):
        read.append(index)
        return SOURCE.read(index)

    source = dataclasses.replace(SOURCE, read=record)
    megabytes = (IMAGES.nbytes + 4 * N) / 2**20  # with labels
    loader(placement='auto', source=source, chosen={'device_mb': 0.99 * megabytes})
    assert read == []
    loader(placement='auto', source=source, chosen={'device_mb': megabytes})
    assert sorted(read) == [*range(N)]


# For each field that affects what a reader reads, another value.
OTHER = {
    'source': dataclasses.replace(SOURCE),
    'crop': RandomCrop(),
    'size': (4, 4),
    'exif_rotation': False,
    'seed': 1,
    'on_unreadable': 'skip',
    'max_pixels': 7,
}


def test_readers_share_a_loader_if_they_read_the_same():
    reader = loading.ImageReader(SOURCE, Resize(), (6, 6), exif_rotation=True)
    assert {*OTHER} == {field.name for field in dataclasses.fields(reader)} - {'on_skipped'}
    sharding = batch_sharding(make_mesh(MeshConfig()))
    loader_of = loading.make_loaders(loading.LoaderConfig(placement='host'), sharding)
    one = loader_of(reader)
    assert loader_of(dataclasses.replace(reader, on_skipped=print)) is one
    for name, value in OTHER.items():
        assert loader_of(dataclasses.replace(reader, **{name: value})) is not one, name


SENSELESS = {'threads': 0, 'device_mb': -1.0, 'placement': 'device', 'repeats': 0, 'balance': 1.5}


@pytest.mark.parametrize('name', SENSELESS)
def test_a_value_that_makes_no_sense_is_named(name):
    with pytest.raises(UserError, match=name):
        reader = loading.ImageReader(SOURCE, RandomCrop(), (6, 6), exif_rotation=True)
        loading.make_loader(reader, loading.LoaderConfig(**{name: SENSELESS[name]}))


@pytest.mark.parametrize(
    'backend, steps, bytes_per_row', [('gpu', 1, 3 * 24), ('cpu', 1, 7 * 24), ('cpu', 4, 4 * 24)]
)
def test_a_batch_needs_no_more_than_the_memory(monkeypatch, backend, steps, bytes_per_row):
    """An image has 24 bytes. There are three batches; on a CPU, also one part of one as float32."""
    monkeypatch.setattr(jax, 'default_backend', lambda: backend)
    memory = types.SimpleNamespace(total=100 * bytes_per_row)
    monkeypatch.setattr(loading.psutil, 'virtual_memory', lambda: memory)
    options = {'accumulation_steps': steps, 'threads': 4}
    loading.check_memory(100, (2, 4), 'config.batch_size', **options)
    with pytest.raises(UserError, match='config.batch_size=101'):
        loading.check_memory(101, (2, 4), 'config.batch_size', **options)


def test_a_label_that_is_no_whole_number_is_rejected_not_rounded():
    images = np.zeros((3, 8, 8, 3), np.uint8)
    source = Source(
        count=3,
        class_names=('a', 'b'),
        read=lambda index: (images[index], np.array(0.75)),
        name_of=str,
        label_of=lambda index: np.array(0.75),
        data='mine',
    )
    reader = make_reader(source, Preprocessing(), (8, 8), on_unreadable='skip')
    with futures.ThreadPoolExecutor(1) as pool:
        with pytest.raises(
            UserError, match=r'mine: got the label array\(0.75\); expected class numbers'
        ):
            reader.examples(Examples.of(0), pool)
    with pytest.raises(UserError, match='mine: got the label'):
        assert source.labels is None
    mixed = dataclasses.replace(source, label_of=[1, 0.5, 1].__getitem__)
    with pytest.raises(UserError, match='mine: got the label 0.5'):
        assert mixed.labels is None
    with futures.ThreadPoolExecutor(1) as pool:
        with pytest.raises(UserError, match='mine: got the label'):
            inspection.scan(reader, pool, lambda count: None, images_by_name={})
