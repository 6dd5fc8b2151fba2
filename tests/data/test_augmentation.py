import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.base.errors import UserError
from vit_jax.data import augmentation
from vit_jax.data.augmentation import Augmentation, RandAugment
from vit_jax.data.image_preprocessing import InceptionCrop, Preprocessing, normalize
from vit_jax.training.losses import make_targets

N = 64
IMAGES = np.random.default_rng(0).integers(0, 256, (N, 6, 7, 3), np.uint8)


def batch(images=IMAGES, *, epoch=0):
    count = len(images)
    return {
        'images': jnp.asarray(images),
        'labels': jnp.arange(count) % 5,
        'mask': jnp.ones(count, bool),
        'epoch': jnp.full(count, epoch),
        'example': jnp.arange(count),
    }


@functools.partial(jax.jit, static_argnums=1)
def _augmented(batch, index):
    targets = functools.partial(make_targets, num_classes=5)
    return augmentation.augment(jax.random.key(3), batch, CONFIGS[index], targets_of=targets)


CONFIGS = []


def augmented(batch, config):
    if config not in CONFIGS:
        CONFIGS.append(config)
    return jax.tree.map(np.asarray, _augmented(batch, CONFIGS.index(config)))


def test_nothing_asked_for_changes_nothing():
    chex.assert_trees_all_equal(augmented(batch(), Augmentation()), batch())


def test_about_half_the_images_are_flipped_and_none_otherwise_changed():
    result = augmented(batch(), Augmentation(flip=True))['images']
    same = (result == IMAGES).all(axis=(1, 2, 3))
    flipped = (result == IMAGES[:, :, ::-1]).all(axis=(1, 2, 3))
    assert (same ^ flipped).all() and 16 < flipped.sum() < 48  # 4 deviations of 64 coins


def test_each_image_is_moved_by_its_own_whole_pixels():
    result = augmented(batch(), Augmentation(shift_pixels=2))['images']
    padded = np.pad(IMAGES, ((0, 0), (2, 2), (2, 2), (0, 0)), mode='edge')
    corners = set()
    for image, wide in zip(result, padded, strict=True):
        found = [
            (y, x)
            for y in range(5)
            for x in range(5)
            if (wide[y : y + 6, x : x + 7] == image).all()
        ]
        assert len(found) == 1
        corners.update(found)
    assert len(corners) > 15  # of 25


@pytest.mark.gate
def test_an_example_changes_alike_in_every_batch_and_otherwise_in_every_epoch():
    config = Augmentation(shift_pixels=2, flip=True, randaugment=RandAugment(layers=2), erasing=0.5)
    config = dataclasses.replace(config, three_augment=True, color_jitter=0.3)
    whole = augmented(batch(), config)['images']
    chosen = np.random.default_rng(1).permutation(N)[:24]
    part = augmented(jax.tree.map(lambda array: array[chosen], batch()), config)['images']
    np.testing.assert_array_equal(part, whole[chosen])
    again = augmented(batch(epoch=1), config)['images']
    assert (again != whole).any(axis=(1, 2, 3)).mean() > 0.9


def test_erasing_fills_one_rectangle_in_its_share_of_the_images():
    images = np.full((400, 20, 30, 3), 7, np.uint8)
    changed = (augmented(batch(images), Augmentation(erasing=0.25))['images'] != 7).any(axis=-1)
    hit = changed.any(axis=(1, 2))
    assert 66 <= hit.sum() <= 134  # 4 deviations of 400 coins of 1/4
    areas = []
    for noise in changed[hit]:
        rows, columns = np.flatnonzero(noise.any(axis=1)), np.flatnonzero(noise.any(axis=0))
        area = (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
        assert noise.sum() >= area - 2  # noise is 7 by chance in 1 of 256^3 pixels
        areas.append(area / 600)
    assert min(areas) > 0.01 and max(areas) < 0.4 and 0.1 < np.mean(areas) < 0.22


def plain_images():
    """Images of one value each, 10 times their number."""
    return (
        np.ones((20, 8, 8, 3), np.uint8) * (10 * np.arange(20, dtype=np.uint8))[:, None, None, None]
    )


@pytest.mark.gate
@pytest.mark.parametrize('kinds', [['mixup'], ['cutmix'], ['mixup', 'cutmix']])
def test_an_image_and_its_label_are_mixed_with_the_neighbor_alike(kinds):
    result = augmented(batch(plain_images()), Augmentation(**dict.fromkeys(kinds, 1.0)))
    own = np.array([result['labels'][i, i % 5] for i in range(20)])
    others = np.array([result['labels'][i, (i - 1) % 5] for i in range(20)])
    np.testing.assert_allclose(own + others, 1, atol=1e-6)
    values = 10 * np.arange(20)
    expected = own * values + others * np.roll(values, 1)
    np.testing.assert_allclose(result['images'].mean(axis=(1, 2, 3)), expected, rtol=1e-5)
    whole_values = (result['images'] % 10 == 0).all(axis=(1, 2, 3))  # pixels of one or the other
    least, most = {'mixup': (0, 1), 'cutmix': (20, 20)}.get(''.join(kinds), (3, 17))
    assert least <= whole_values.sum() <= most


@pytest.mark.gate
def test_an_image_that_could_not_be_read_is_mixed_into_none():
    partly = batch(plain_images())
    partly['mask'] = partly['mask'].at[4].set(False)
    result = augmented(partly, Augmentation(flip=True, mixup=0.5, cutmix=0.5))
    alone = augmented(partly, Augmentation(flip=True))
    np.testing.assert_array_equal(result['images'][5], alone['images'][5])
    assert result['labels'][5].tolist() == [1, 0, 0, 0, 0]


def test_the_seven_levels_are_those_of_the_paper():
    levels = {
        name: (a.randaugment.layers, a.randaugment.magnitude, a.mixup)
        for name, a in ((name, augmentation.augreg(name)) for name in augmentation.AUGREG_LEVELS)
    }
    assert list(levels) == 'none light1 light2 medium1 medium2 strong1 strong2'.split()
    assert levels['none'] == (0, 0, 0) and levels['light1'] == (2, 0, 0)
    assert levels['medium2'] == (2, 15, 0.5) and levels['strong2'] == (2, 20, 0.8)
    assert all(augmentation.augreg(name).crop == InceptionCrop() for name in levels)


def inverted(key, batch):
    """One's own augmentation, as a configuration may hold it."""
    keys = augmentation.example_keys(key, batch)
    coins = jax.vmap(jax.random.bernoulli)(keys)[:, None, None, None]
    return batch | {'images': jnp.where(coins, 255 - batch['images'], batch['images'])}


def test_a_function_is_an_augmentation():
    result = augmented(batch(), inverted)
    changed = (result['images'] == 255 - IMAGES).all(axis=(1, 2, 3))
    same = (result['images'] == IMAGES).all(axis=(1, 2, 3))
    assert (changed ^ same).all() and 16 < changed.sum() < 48
    part = augmented(jax.tree.map(lambda array: array[10:20], batch()), inverted)['images']
    np.testing.assert_array_equal(part, result['images'][10:20])
    assert (augmented(batch(epoch=1), inverted)['images'] != result['images']).any()


def test_normalize_maps_black_to_minus_one_and_white_to_one():
    pixels = np.zeros((1, 1, 2, 3), np.uint8)
    pixels[0, 0, 1] = 255
    by_channel = Preprocessing(mean=(0.0, 255.0, 51.0), std=(255.0, 255.0, 51.0))
    for images in pixels, jnp.asarray(pixels):
        assert normalize(images, Preprocessing())[0, 0, :, 0].tolist() == [-1, 1]
        assert normalize(images, by_channel)[0, 0, 1].tolist() == [1, 0, 4]
        assert type(normalize(images, by_channel)) is type(images * 1.0)


@pytest.mark.parametrize(
    'record, values',
    [
        (Augmentation, {'erasing': 1.5}),
        (Augmentation, {'color_jitter': 1.1}),
        (Augmentation, {'mixup': -0.1}),
        (Augmentation, {'shift_pixels': -3}),
        (RandAugment, {'layers': -1}),
        (RandAugment, {'magnitude': float('nan')}),
    ],
)
def test_a_value_that_makes_no_sense_is_named(record, values):
    with pytest.raises(UserError, match=[*values][0]):
        record(**values)
