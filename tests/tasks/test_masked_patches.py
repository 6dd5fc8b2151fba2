import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.networks import HYBRID, RESNET
from vit_jax.data.augmentation import example_keys
from vit_jax.data.image_preprocessing import Preprocessing, normalize
from vit_jax.models.masked_patches import cut_patches
from vit_jax.tasks import masked_patches
from vit_jax.tasks.masked_patches import configure_for_patches
from vit_jax.training.objectives import MaskedPatches
from vit_jax.training.update import CORRUPT, make_purpose_key

RNG = np.random.default_rng(0)
BODY = tiny.model(num_classes=None, image_size=(8, 16))  # patches of 4x4 pixels, on a grid 2x4
BATCH = {
    'images': RNG.integers(0, 256, (6, 8, 16, 3), np.uint8),
    'mask': np.array([True] * 5 + [False]),
    'epoch': np.array([0, 0, 1, 2, 2, 0], np.int32),
    'example': np.array([3, 7, 3, 1, 0, 0], np.int32),
}


def drawn(config, *, images=300, patches=49):
    """Which patches of some images are corrupted, masked, and what they come from."""
    keys = jax.random.split(jax.random.key(0), images)
    draw = functools.partial(masked_patches.corrupt, config=config, patches=patches)
    corrupted, corruption = jax.vmap(draw)(keys)
    return np.asarray(corrupted), np.asarray(corruption.masked), np.asarray(corruption.source)


@pytest.mark.parametrize('fraction, count', [(0.5, 24), (0.15, 7), (1.0, 49)])
def test_so_many_patches_of_every_image_are_corrupted_and_no_others(fraction, count):
    corrupted, masked, source = drawn(MaskedPatches(fraction=fraction))
    assert (corrupted.sum(axis=1) == count).all()
    assert not (masked & ~corrupted).any()
    assert (source == np.arange(49))[~corrupted | masked].all()
    shares = corrupted.mean(axis=0)
    assert fraction == 1 or abs(shares - count / 49).max() < 4 * 0.5 / 300**0.5


def test_of_these_eight_tenths_are_masked_and_one_tenth_is_another_patch():
    corrupted, masked, source = drawn(MaskedPatches())
    replaced, n = source != np.arange(49), corrupted.sum()
    for found, share in (masked, 0.8), (replaced, 0.1), (corrupted & ~masked & ~replaced, 0.1):
        assert abs(found.sum() / n - share) < 4 * (share * (1 - share) / n) ** 0.5


def test_a_replaced_patch_is_any_other_of_the_image_and_never_itself():
    _, masked, source = drawn(MaskedPatches(fraction=1.0, masked=0.0, replaced=1.0), patches=5)
    assert not masked.any()
    pairs = np.zeros((5, 5), int)
    np.add.at(pairs, (np.tile(np.arange(5), 300), source.ravel()), 1)
    assert (np.diag(pairs) == 0).all()
    others = pairs[~np.eye(5, dtype=bool)]
    assert abs(others - 75).max() < 5 * 75**0.5


def sums_of(config, predict, batch=BATCH, seed=0):
    """The sums over a batch, of the outputs that `predict(normalized images, corruption)` gives."""

    def predict_patches(params, images, corruption, key):
        return jnp.asarray(predict(images, corruption), jnp.float32)

    loss_sums = masked_patches.make_patch_loss_sums(
        predict_patches,
        config,
        functools.partial(normalize, preprocessing=Preprocessing()),
        model=configure_for_patches(BODY, config),
        keys_of=lambda batch: example_keys(make_purpose_key(seed, CORRUPT), batch),
    )
    return loss_sums({}, jax.tree.map(jnp.asarray, batch))


def corruption_of(batch, seed=0):
    seen = []

    def predict(images, corruption):
        seen.append(corruption)
        return np.zeros((len(images), 8, 512))

    sums_of(MaskedPatches(), predict, batch, seed)
    return jax.tree.map(np.asarray, seen[0])


@pytest.mark.gate
def test_an_example_is_corrupted_alike_in_any_batch_and_otherwise_in_another_epoch():
    whole = corruption_of(BATCH)
    order = np.array([4, 2, 0, 1, 5, 3])
    part = corruption_of({name: values[order] for name, values in BATCH.items()})
    np.testing.assert_array_equal(part.masked, whole.masked[order])
    np.testing.assert_array_equal(part.source, whole.source[order])
    assert (whole.masked[0] != whole.masked[2]).any()  # the same example, in another epoch
    assert (corruption_of(BATCH, seed=1).masked != whole.masked).any()


def corrupted_of(batch, config):
    keys = example_keys(make_purpose_key(0, CORRUPT), batch)
    draw = functools.partial(masked_patches.corrupt, config=config, patches=8)
    return np.asarray(jax.vmap(draw)(keys)[0])


def tiles(images):
    """The patches of each image, by slices."""
    corners = [(y, x) for y in (0, 4) for x in (0, 4, 8, 12)]
    return np.stack([images[:, y : y + 4, x : x + 4] for y, x in corners], axis=1).astype(float)


def colors(parts):
    """Of parts (... p q c) of images, by integers."""
    means = parts.mean(axis=(-3, -2))
    red, green, blue = np.moveaxis((means // 32).astype(int), -1, 0)
    return (red << 6) | (green << 3) | blue


@pytest.mark.gate
def test_the_loss_is_that_of_the_colors_of_corrupted_patches():
    config, logits = MaskedPatches(), RNG.normal(size=(6, 8, 512))
    expected = colors(tiles(BATCH['images']))
    logits[:2, :, :] += 9 * np.eye(512)[expected[:2]]  # right in two images, by chance elsewhere
    sums, count, _ = sums_of(config, lambda *_: logits)
    where = corrupted_of(BATCH, config) & BATCH['mask'][:, None]
    logs = (
        np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, expected[..., None], 2)[..., 0]
    )
    assert count == 5 and where.sum() == 5 * 4
    assert sums['loss'] == pytest.approx(logs[where].sum() / 4, rel=1e-5)
    hits = logits.argmax(-1) == expected
    assert sums['accuracy'] == pytest.approx(hits[where].sum() / 4)
    assert 2 <= sums['accuracy'] <= sums['top5_accuracy'] < 5


def test_small_patches_are_sixteen_colors_each_the_mean_of_a_cell():
    images = np.repeat(np.repeat(BATCH['images'], 2, axis=1), 2, axis=2)  # cells of 2x2 pixels
    images[:, 0::2, 0::2] //= 2
    patches = cut_patches(jnp.asarray(images), (2, 4), (8, 8))
    found = masked_patches.mean_colors(patches, 4)
    cells = np.asarray(patches, float).reshape(6, 8, 4, 2, 4, 2, 3).swapaxes(3, 4)
    np.testing.assert_array_equal(found, colors(cells).reshape(6, 8, 16))


def test_pixels_are_those_that_the_network_sees():
    config = MaskedPatches(target='pixels')
    outputs = RNG.normal(size=(6, 8, 48))
    sums, _, _ = sums_of(config, lambda *_: outputs)
    seen = tiles(np.asarray(normalize(BATCH['images'], Preprocessing()))).reshape(6, 8, 48)
    where = corrupted_of(BATCH, config) & BATCH['mask'][:, None]
    errors = ((outputs - seen) ** 2).mean(-1)
    assert {*sums} == {'loss'}
    assert sums['loss'] == pytest.approx(errors[where].sum() / 4, rel=1e-5)


def test_a_hybrids_patch_is_the_part_of_the_image_that_it_stands_for():
    config = dataclasses.replace(HYBRID, num_classes=None)
    assert config.patch_size_in_pixels == (16, 16)
    pixels = configure_for_patches(config, MaskedPatches(target='pixels')).patch_outputs
    assert pixels == 16 * 16 * 3


@pytest.mark.parametrize(
    'model, objective, message',
    [
        (RESNET, {}, 'ResNet'),
        (HYBRID, {}, 'num_classes'),
        (dataclasses.replace(HYBRID, num_classes=None, image_size=(60, 32)), {}, 'image_size'),
        ({'head_bias': -10.0}, {}, 'head_bias'),
        ({'pool': 'map'}, {}, 'pool=map'),
        ({'patch_outputs': 7}, {}, 'patch_outputs=7'),
        ({'image_size': (4, 4)}, {'fraction': 0.4}, 'fraction=0.4'),
        ({'patch_size': (2, 4)}, {'target': 'colors_4x4'}, 'target=colors_4x4'),
        ({}, {'replaced': 0.5}, 'replaced=0.5'),
        ({}, {'fraction': 0.0}, 'fraction'),
    ],
)
def test_networks_that_cannot_predict_patches_are_named(model, objective, message):
    model = dataclasses.replace(BODY, **model) if isinstance(model, dict) else model
    with pytest.raises(ValueError, match=message):
        configure_for_patches(model, MaskedPatches(**objective))
