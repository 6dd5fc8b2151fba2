"""The tasks of VTAB, on small sets with the features of the real ones, made here."""

import dataclasses

import cv2
import numpy as np
import pytest

tfds_sets = pytest.importorskip('tests.tfds_sets', reason='tensorflow-datasets is not installed')

import tensorflow_datasets as library  # noqa: E402

from vit_jax.base import UserError  # noqa: E402
from vit_jax.data.sources import opening  # noqa: E402
from vit_jax.data.sources.arrays import array_source  # noqa: E402
from vit_jax.data.sources.base import Source, take_split  # noqa: E402
from vit_jax.data.sources.vtab import TASKS, VTAB_1K_SPLIT  # noqa: E402

KINDS = library.features
PIXELS = np.random.default_rng(0).integers(0, 2, (20, 6, 4, 1), np.uint8)


def encoded(index):
    """An image that tells its index, with the values 0 and 1 alone."""
    return cv2.imencode('.png', PIXELS[index])[1].tobytes()


def make(root, name, splits, *, features=None, columns=('label',), classes=('a', 'b')):
    """A set of examples {split: [the values of an example besides its image]}."""
    numbers = iter(range(100))
    made = {s: [(encoded(next(numbers)), values) for values in of] for s, of in splits.items()}
    options = {'features': features, 'columns': columns, 'named': name}
    return tfds_sets.array_record(root, made, classes, **options)


@pytest.fixture
def opened(tmp_path, monkeypatch):
    monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
    return opening.make_opener()


def labels(source):
    """The labels of all images, which `read` must give too."""
    found = source.labels.tolist()
    assert found == [source.read(i)[1] for i in range(len(source))]
    return found


def test_clevr_counts_objects_and_bins_the_distance_of_the_nearest(tmp_path, opened):
    distances = [[8.0, 9.0, 9.1], [8.25, 11, 11, 11], [9, 8.75, 30], [9.25] * 10]
    distances += [[9.75] * 9, [10.5] * 4]
    examples = [
        {'objects': [{'size': i % 2, 'pixel_coords': (1, 2, d)} for i, d in enumerate(of_image)]}
        for of_image in distances
    ]
    objects = KINDS.Sequence(
        {
            'size': KINDS.ClassLabel(names=['small', 'large']),
            'pixel_coords': KINDS.Tensor(shape=(3,), dtype=np.float32),
        }
    )
    splits = {'train': examples, 'validation': examples[:2]}
    make(tmp_path, 'clevr:3.1.0', splits, features={'objects': objects}, columns=())
    count = opened('vtab:clevr_count', 'train+validation')
    assert count.class_names == tuple(f'{n} objects' for n in range(3, 11))
    assert labels(count) == [0, 1, 0, 7, 6, 1]
    distance = opened('vtab:clevr_distance', 'train+validation')
    assert labels(distance) == [0, 1, 2, 3, 4, 5] and len(distance.class_names) == 6
    assert labels(opened('vtab:clevr_distance', 'test')) == [0, 1]


def test_kitti_bins_the_distance_of_the_nearest_vehicle(tmp_path, opened):
    """Cars, vans and trucks are the first three types."""
    images = [[(0, 7.9), (1, 30)], [(1, 8.1), (0, 40)], [(2, 20.5), (3, 1)], [(3, 5), (7, 2)], []]
    examples = [
        {'objects': [{'type': kind, 'location': (5, 5, z)} for kind, z in of]} for of in images
    ]
    objects = KINDS.Sequence(
        {
            'type': KINDS.ClassLabel(num_classes=8),
            'location': KINDS.Tensor(shape=(3,), dtype=np.float32),
        }
    )
    splits = {'train': examples, 'validation': examples[:1], 'test': examples[1:3]}
    make(tmp_path, 'kitti:3.3.0', splits, features={'objects': objects}, columns=())
    task = 'vtab:kitti_distance'
    assert labels(opened(task, 'train')) == [0, 1, 2, 3, 3]
    both = opened(task, 'train[:2]+validation[:1]')
    assert labels(both) == [0, 1, 0] and labels(opened(task, 'test')) == [1, 2]
    assert both.class_names[-1] == 'no vehicle'
    assert both.name_of(2) == 'tfds:kitti/3.3.0/validation[0]'


def test_dsprites_groups_positions_and_orientations_and_its_white_is_white(tmp_path, opened):
    names = 'label_x_position', 'label_orientation'
    features = dict(zip(names, (KINDS.ClassLabel(num_classes=n) for n in (32, 40)), strict=True))
    examples = [dict(zip(names, pair, strict=True)) for pair in [(i, i) for i in range(20)]]
    examples[-1] = {'label_x_position': 31, 'label_orientation': 39}
    make(tmp_path, 'dsprites:2.0.0', {'train': examples}, features=features, columns=())
    every = 'train+validation+test'
    assert labels(opened('vtab:dsprites_location', every)) == [i // 2 for i in range(19)] + [15]
    by_angle = opened('vtab:dsprites_orientation', every)
    assert labels(by_angle) == [int(i // 2.5) for i in range(19)] + [15]
    assert len(by_angle.class_names) == 16
    test = opened('vtab:dsprites_location', 'test')
    np.testing.assert_array_equal(test.read(1)[0], np.repeat(PIXELS[19] * 255, 3, axis=-1))


def test_another_version_of_a_set_is_said_and_the_benchmarks_is_preferred(tmp_path, opened, caplog):
    examples = [{'label': i % 2} for i in range(10)]
    make(tmp_path, 'oxford_iiit_pet:4.0.0', {'train': examples, 'test': examples[:1]})
    assert labels(opened('vtab:pets', 'validation')) == [0, 1]
    assert '4.0.0' in caplog.text and 'oxford_iiit_pet' in caplog.text
    make(tmp_path, 'oxford_iiit_pet:3.2.0', {'train': examples[:5], 'test': examples[:1]})
    assert len(opening.make_opener()('vtab:pets', 'train')) == 4


def test_what_is_not_there_is_named_with_what_prepares_it(opened):
    for data, labels, name in (
        ('vtab:pet', None, 'pets'),
        ('vtab:eurosat', None, 'tfds build eurosat/rgb'),
        ('vtab:dtd', 'label', 'vtab:dtd'),
    ):
        with pytest.raises(UserError, match=name):
            opened(data, 'train', labels)


# Sizes of the sets, and where task_adaptation's parts of 200 and its test images begin.
BOUNDS = {
    'caltech101': ({'train': 3_060, 'test': 6_084}, 2_754, 0),
    'cifar100': ({'train': 50_000, 'test': 10_000}, 45_000, 0),
    'pets': ({'train': 3_680, 'test': 3_669}, 2_944, 0),
    'svhn': ({'train': 73_257, 'test': 26_032}, 65_931, 0),
    'eurosat': ({'train': 27_000}, 16_200, 21_600),
    'resisc45': ({'train': 31_500}, 18_900, 25_200),
    'clevr_count': ({'train': 70_000, 'validation': 15_000}, 63_000, 0),
    'dsprites_location': ({'train': 737_280}, 589_824, 663_552),
    'smallnorb_azimuth': ({'train': 24_300, 'test': 24_300}, 0, 12_150),
}


@pytest.mark.parametrize('name', BOUNDS)
def test_parts_begin_where_those_of_the_benchmarks_code_do(name):
    sizes, validation, test = BOUNDS[name]
    task = TASKS[name]
    one = array_source(PIXELS, np.zeros(len(PIXELS), int), 'ab', name='x')

    def part(split: str) -> Source:
        return take_split(getattr(task, split), whole, of=name)

    def whole(split: str) -> Source:
        return dataclasses.replace(one, count=sizes[split], read=lambda i: (PIXELS[0], i))

    assert part('train').read(0)[1] == 0 and part('validation').read(0)[1] == validation
    assert part('test').read(0)[1] == test and len(part('validation')) >= 200
    total = sum(len(part(split)) for split in ('train', 'validation', 'test'))
    assert total == sum(sizes.values())


def test_there_are_seven_four_and_eight_tasks():
    groups = [task.group for task in TASKS.values()]
    assert [groups.count(g) for g in ('natural', 'specialized', 'structured')] == [7, 4, 8]
    assert groups == sorted(groups) and VTAB_1K_SPLIT == 'train[:800]+validation[:200]'


@pytest.mark.gate
@pytest.mark.parametrize('name', TASKS)
def test_tfds_knows_the_sets_and_their_columns(name):
    """As far as it tells without their data; TFDS has gone on to version 4 of the pets."""
    task = TASKS[name]
    info = library.builder(task.data, try_gcs=False).info
    assert int(info.version.major) == task.version or name == 'pets'
    assert isinstance(info.features['image'], KINDS.Image)
    if isinstance(task.label, str):
        assert isinstance(info.features[task.label], KINDS.ClassLabel)
    classes = {'dsprites_location': 'label_x_position', 'dsprites_orientation': 'label_orientation'}
    if name in classes:
        assert info.features[classes[name]].num_classes in (32, 40)
