import dataclasses
import typing

import chex
import cv2
import jax
import numpy as np
import pytest
import scipy.ndimage
from PIL import Image

from tests import tiny
from vit_jax.base import UserError
from vit_jax.checkpoints import resize, transfer
from vit_jax.models import build
from vit_jax.models.config import PositionKind, PositionResize, PositionsAt
from vit_jax.models.positions import as_array

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


def test_square_to_oblong_and_back_is_the_identity():
    oblong = resize.resize_table(
        TABLE, (6, 6), (11, 16), how='bilinear'
    )  # every old point is among the new ones
    np.testing.assert_allclose(
        resize.resize_table(oblong, (11, 16), (6, 6), how='bilinear'), TABLE, atol=1e-6
    )


def test_a_table_too_short_for_its_grid_is_refused():
    with pytest.raises(ValueError, match='37 position embeddings are too few'):
        resize.resize_table(TABLE, (7, 7), (6, 6), how='bilinear')


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
        with pytest.raises(UserError, match='relative positions of 2x2 patches cannot be resized'):
            transfer.adapt(params, old=old, new=new)
        return
    for how in typing.get_args(PositionResize):
        resized = transfer.adapt(params, old=dataclasses.replace(old, position_resize=how), new=new)
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
    whole = as_array(old, params)
    found = as_array(new, resized)
    expected = resize.resize_table(whole, old.grid, new.grid, how=how)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_positions_of_each_layer_are_resized_like_those_of_the_stem():
    layers = np.stack([TABLE, 2 * TABLE])
    found = resize.resize_table(layers, (6, 6), (9, 5), how='bicubic')
    one = resize.resize_table(TABLE, (6, 6), (9, 5), how='bicubic')
    np.testing.assert_allclose(found, [one, 2 * one], rtol=1e-6)
