"""Parameters of one network in another: what is kept, resized, new, or rejected."""

import dataclasses
import re
import typing

import chex
import cv2
import flax.linen as nn
import jax
import numpy as np
import pytest
import scipy.ndimage
from PIL import Image

from tests import tiny
from vit_jax.base import UserError
from vit_jax.base.tree_names import named_leaves
from vit_jax.checkpoints import resize
from vit_jax.checkpoints.transfer import adapt, head_params, transfer
from vit_jax.models import build
from vit_jax.models.config import PositionKind, PositionResize, PositionsAt
from vit_jax.models.model import compute_position_table

OLD = tiny.model(representation_size=6)


def made(config):
    return jax.tree.map(np.asarray, tiny.built(config)[1])


def changed(**changes):
    return dataclasses.replace(OLD, **({'representation_size': None} | changes))


def fresh_params(config):
    """Parameters that differ from `made`, without compiling the model's initialization."""
    return jax.tree.map(lambda leaf: leaf + 1, made(config))


def moved(**changes):
    new = changed(**changes)
    return new, transfer(made(OLD), old=OLD, new=new, fresh=fresh_params(new))


def logits_shape(config, params):
    return jax.eval_shape(build(config).apply, params, tiny.images(config=config)).shape


@pytest.mark.gate
def test_the_body_is_kept_and_the_head_is_new_and_zero():
    new = changed(num_classes=3)
    fresh = jax.device_get(jax.jit(build(new).init)(jax.random.key(5)))
    result = transfer(made(OLD), old=OLD, new=new, fresh=fresh)
    old_leaves, leaves = named_leaves(made(OLD)), named_leaves(result.params)
    assert leaves['head/kernel'].shape == (16, 3) and not leaves['head/kernel'].any()
    body = [name for name in leaves if not name.startswith('head/')]
    for name in body:
        np.testing.assert_array_equal(leaves[name], old_leaves[name])
    assert result.report[0].startswith(f'{len(body)} of {len(body)} arrays loaded')
    text = '\n'.join(result.report)
    assert re.search('head: .*3 classes', text) and re.search('pre_logits: dropped', text)
    assert logits_shape(new, result.params) == (2, 3)


def test_another_resolution_resizes_the_positions_and_nothing_else():
    new, result = moved(image_size=(12, 8))
    assert re.search('pos_embedding: .*2x2 to 3x2', '\n'.join(result.report))
    positions, old = result.params['pos_embedding'], made(OLD)['pos_embedding']
    assert positions.shape == (1, 7, 16)
    np.testing.assert_array_equal(positions[:, :3], old[:, :3])  # the class token, the top row
    np.testing.assert_allclose(positions[:, 3:5], (old[:, 1:3] + old[:, 3:5]) / 2, rtol=1e-6)
    assert logits_shape(new, result.params) == (2, tiny.CLASSES)


def test_other_patches_and_channels_change_the_projection():
    new, result = moved(patch_size=(2, 4), channels=1)
    assert new.grid == (4, 2)
    text = '\n'.join(result.report)
    assert re.search('pos_embedding: .*2x2 to 4x2', text)
    assert re.search('\nembedding: .*4x4 to 2x4', text)
    assert re.search('embedding/kernel: 3 channels .*1', text)
    assert result.params['embedding']['kernel'].shape == (2, 4, 1, 16)
    assert logits_shape(new, result.params) == (2, tiny.CLASSES)


OWN = tiny.model(num_classes=3)
CATS = 'cat', 'dog', 'ship'


def with_names(old_names, new_names, *, old=OWN, **changes):
    new = dataclasses.replace(old, num_classes=len(new_names), **changes)
    fresh = fresh_params(new)
    result = transfer(made(old), old=old, new=new, fresh=fresh, class_names=(old_names, new_names))
    (line,) = [line for line in result.report if line.startswith('head')]
    return named_leaves(result.params), named_leaves(fresh), line


@pytest.mark.parametrize(
    'names',
    [
        ('ship', 'cat', 'dog'),  # in another order
        ('bird', 'cat', 'dog', 'ship'),  # a new one, which moves the others
        ('cat', 'dog', 'ship', 'zebra', 'yak', 'x'),  # half of them
        ('ship',),
        ('ant', 'dog'),  # one is new, two are missing
    ],
)
@pytest.mark.parametrize('options', [{}, {'image_size': (12, 8), 'head_bias': -3.0}])
def test_classes_of_the_same_name_keep_their_part_of_the_head(names, options):
    leaves, fresh, line = with_names(CATS, names, **options)
    known = [name for name in names if name in CATS]
    assert f'kept for {len(known)} of {len(names)} classes' in line
    assert all((repr(name) in line) == (name not in CATS) for name in names)
    old = named_leaves(made(OWN))
    for leaf in 'head/kernel', 'head/bias':
        for column, name in enumerate(names):
            expected = (
                old[leaf][..., CATS.index(name)] if name in CATS else fresh[leaf][..., column]
            )
            np.testing.assert_array_equal(leaves[leaf][..., column], expected)


@pytest.mark.parametrize(
    'old_names, new_names, changes',
    [
        (CATS, ('cot', 'hound', 'tall ship'), {}),
        (CATS, ('ant', 'bee', 'cat'), {}),  # one name is the same by chance
        (('cat', 'dog'), CATS, {}),  # fewer names than the head has outputs
        # The old head was given what a tanh layer makes, the new one is not.
        (CATS, CATS, {'old': tiny.model(num_classes=3, representation_size=6)}),
        (CATS, CATS, {'head': nn.Dense}),
    ],
)
def test_a_head_that_does_not_know_the_classes_is_new(old_names, new_names, changes):
    tanh = {'representation_size': None} if 'old' in changes else {}
    leaves, fresh, line = with_names(old_names, new_names, **changes, **tanh)
    assert line.startswith('head: reset')
    for name in head_params(fresh):
        np.testing.assert_array_equal(leaves[name], fresh[name])


@pytest.mark.parametrize(
    'changes, name',
    [
        ({'depth': 2}, 'encoder/block/'),
        ({'width': 8}, 'cls'),
        ({'norm': 'rms'}, r'extra [^\n]*/bias'),
        ({'registers': 1}, 'missing registers'),
        ({'representation_size': 7}, 'pre_logits/kernel'),
    ],
)
def test_an_array_that_does_not_fit_is_named(changes, name):
    new = changed(**changes)
    with pytest.raises(UserError, match=f'(?s)start_from: .*{name}'):
        transfer(made(OLD), old=OLD, new=new, fresh=made(new))


@pytest.mark.parametrize('old, new', [(7, 7), (7, None), (None, 7), (7, 9)])
def test_a_mask_token_and_a_head_of_patches_are_kept_where_they_fit(old, new):
    """Kept if both networks have them in the same shape, else those of the new network, if any."""
    old, new = (tiny.model(patch_outputs=count) for count in (old, new))
    source, fresh = named_leaves(made(old)), fresh_params(new)
    params, report = transfer(made(old), old=old, new=new, fresh=fresh)
    for name, leaf in named_leaves(fresh).items():
        if name.startswith('masked/'):
            kept = name in source and source[name].shape == leaf.shape
            expected = source[name] if kept else leaf
            np.testing.assert_array_equal(named_leaves(params)[name], expected)
    assert jax.tree.structure(params) == jax.tree.structure(fresh)
    assert any('mask token' in line for line in report) == (old != new)


def test_a_head_that_is_dropped_is_reported():
    new = changed(num_classes=None)
    _, report = transfer(made(OLD), old=OLD, new=new, fresh=made(new))
    assert 'head: dropped' in report


RNG = np.random.default_rng(0)
KERNEL = RNG.normal(size=(4, 6, 3, 5)).astype(np.float32)


def enlarged(patch, new):
    """As OpenCV and TensorFlow resize images: bilinear, without antialias."""
    return jax.image.resize(patch, (*new, patch.shape[2]), 'linear', antialias=False)


@pytest.mark.parametrize('new', [(8, 12), (5, 7), (4, 6), (16, 6)])
def test_an_enlarged_patch_gives_the_token_that_it_gave(new):
    """Section 3.4 of FlexiViT: the pseudo-inverse is exact for larger patches."""
    patch = RNG.normal(size=(4, 6, 3))
    kernel = resize.resize_patches(KERNEL, new)
    token = np.einsum('pqc,pqcd->d', patch, KERNEL)
    again = np.einsum('pqc,pqcd->d', enlarged(patch, new), kernel)
    np.testing.assert_allclose(again, token, atol=1e-5)  # float32 sums of 72 products


@pytest.mark.parametrize('new', [1, 2, 3, 4, 5, 7])
def test_images_of_equal_channels_give_the_tokens_that_they_gave(new):
    kernel = resize.rechannel(KERNEL, new)
    assert kernel.shape == (4, 6, new, 5) and kernel.dtype == np.float32
    if new == 2:  # fewer channels than before: the first ones, scaled up
        np.testing.assert_allclose(kernel, 1.5 * KERNEL[:, :, :2], rtol=1e-6)
    else:
        np.testing.assert_allclose(kernel.sum(2), KERNEL.sum(2), atol=1e-5)
    assert (resize.rechannel(KERNEL, 3) == KERNEL).all()


TABLE = np.random.default_rng(0).normal(size=(1, 1 + 6 * 6, 5)).astype(np.float32)


@pytest.mark.parametrize('new', [(6, 6), (12, 12), (4, 4), (9, 5), (1, 8)])
def test_resizing_is_scipys_zoom_and_keeps_the_class_token(new):
    resized = resize.resize_table(TABLE, (6, 6), new, how='bilinear')
    grid = TABLE[0, 1:].reshape(6, 6, 5)
    expected = scipy.ndimage.zoom(grid, (new[0] / 6, new[1] / 6, 1), order=1)
    np.testing.assert_allclose(resized[0, 1:].reshape(*new, 5), expected, atol=1e-6)
    np.testing.assert_array_equal(resized[:, 0], TABLE[:, 0])


def by_library(grid, new, how):
    """The grid (h w d) resized by OpenCV, or by Pillow, which widens its kernel where it shrinks.

    DINOv2's own way, which no other library has, is among tests/reference/families.
    """
    if how == 'bicubic_antialias':
        channels = [Image.fromarray(grid[..., i]) for i in range(grid.shape[-1])]
        resized = [channel.resize(new[::-1], Image.Resampling.BICUBIC) for channel in channels]
        return np.stack([np.asarray(channel) for channel in resized], axis=-1)
    method = {'bicubic': cv2.INTER_CUBIC, 'bilinear_edges': cv2.INTER_LINEAR}[how]
    return cv2.resize(grid, new[::-1], interpolation=method)


@pytest.mark.parametrize('how', ['bicubic', 'bicubic_antialias', 'bilinear_edges'])
@pytest.mark.parametrize('new', [(12, 12), (4, 4), (9, 5), (2, 13)])
def test_each_way_of_resizing_is_that_of_its_library(how, new):
    resized = resize.resize_table(TABLE, (6, 6), new, how=how)
    expected = by_library(TABLE[0, 1:].reshape(6, 6, 5), new, how)
    np.testing.assert_allclose(resized[0, 1:].reshape(*new, 5), expected, atol=1e-5)
    np.testing.assert_array_equal(resized[:, 0], TABLE[:, 0])


@pytest.mark.parametrize('kind', typing.get_args(PositionKind))
@pytest.mark.parametrize('at', typing.get_args(PositionsAt))
def test_positions_of_every_kind_and_place_are_resized(kind, at):
    """`transfer` compares names and shapes: none is forgotten, and no other is touched."""
    if at != 'stem' and kind in ('relative', 'rope', 'none'):
        pytest.skip('not added to tokens')
    old = tiny.model(positions=kind, positions_at=at, image_size=(8, 8))
    new = dataclasses.replace(old, image_size=(12, 20))
    key = jax.random.key(0)
    params, shapes = (jax.eval_shape(build(config).init, key) for config in (old, new))
    params = tiny.random_params(params)
    if kind == 'relative':
        with pytest.raises(UserError, match='positions=relative'):
            adapt(params, old=old, new=new)
        return
    for how in typing.get_args(PositionResize):
        resized = adapt(params, old=dataclasses.replace(old, position_resize=how), new=new)
        chex.assert_trees_all_equal_shapes(resized.params, shapes)


@pytest.mark.parametrize('how', typing.get_args(PositionResize))
def test_resizing_columns_and_rows_is_resizing_the_table_that_they_make(how):
    old, new = (
        tiny.model(positions='learned2d', position_resize=how, image_size=size)
        for size in ((24, 16), (12, 36))
    )
    rng = np.random.default_rng(0)
    params = {
        'pos_embedding_x': rng.normal(size=(1, 4, 5)).astype(np.float32),
        'pos_embedding_y': rng.normal(size=(1, 6, 5)).astype(np.float32),
    }
    resized = resize.resize_positions(params, old, new)
    whole = compute_position_table(old, params)
    found = compute_position_table(new, resized)
    expected = resize.resize_table(whole, old.grid, new.grid, how=how)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_positions_of_each_layer_are_resized_like_those_of_the_stem():
    layers = np.stack([TABLE, 2 * TABLE])
    found = resize.resize_table(layers, (6, 6), (9, 5), how='bicubic')
    one = resize.resize_table(TABLE, (6, 6), (9, 5), how='bicubic')
    np.testing.assert_allclose(found, [one, 2 * one], rtol=1e-6)
