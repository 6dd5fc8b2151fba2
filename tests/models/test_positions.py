import itertools
import typing

import cv2
import jax
import numpy as np
import pytest
import scipy.ndimage
from PIL import Image

from tests import tiny
from vit_jax.base import tree_names
from vit_jax.base.errors import UserError
from vit_jax.models import build
from vit_jax.models.positions import (
    PositionKind,
    PositionResize,
    PositionsAt,
    as_array,
    resize,
    resizers,
    rotation,
    sincos2d,
)

TABLE = np.random.default_rng(0).normal(size=(1, 1 + 6 * 6, 5)).astype(np.float32)


@pytest.mark.parametrize('new', [(6, 6), (12, 12), (4, 4), (9, 5), (1, 8)])
def test_resizing_is_scipys_zoom_and_keeps_the_class_token(new):
    resized = resize(TABLE, (6, 6), new)
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
    resized = resize(TABLE, (6, 6), new, how=how)
    expected = by_library(TABLE[0, 1:].reshape(6, 6, 5), new, how)
    np.testing.assert_allclose(resized[0, 1:].reshape(*new, 5), expected, atol=1e-5)
    np.testing.assert_array_equal(resized[:, 0], TABLE[:, 0])


def test_rotated_queries_and_keys_know_how_far_apart_they_are_and_no_more():
    """Their products are the same for all pairs of patches as far apart (RoFormer, 3.2)."""
    grid, prefix = (3, 4), 2
    rotate = rotation('rope', grid, prefix, 8)
    query, key = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    queries, keys = (jax.numpy.tile(x, (1, prefix + 12, 1, 1)) for x in (query, key))
    rotated = [np.asarray(rotate(x))[0, :, 0] for x in (queries, keys)]
    products = np.einsum('qk,nk->qn', *rotated)
    np.testing.assert_allclose(products[:prefix, :prefix], query @ key, rtol=1e-5)
    places = np.argwhere(np.ones(grid))
    among = products[prefix:, prefix:]
    for apart in (0, 0), (1, 0), (0, 2), (-1, 3):
        same = (places[None] - places[:, None] == apart).all(axis=-1)
        assert np.ptp(among[same]) < 1e-5
    assert np.ptp(among) > 0.1


def test_square_to_oblong_and_back_is_the_identity():
    oblong = resize(TABLE, (6, 6), (11, 16))  # every old point is among the new ones
    np.testing.assert_allclose(resize(oblong, (11, 16), (6, 6)), TABLE, atol=1e-6)


def test_a_table_too_short_for_its_grid_is_refused():
    with pytest.raises(ValueError, match='37 position embeddings are too few'):
        resize(TABLE, (7, 7), (6, 6))


def test_sincos_neighbours_are_more_alike_than_strangers():
    table = sincos2d((5, 7), 32)
    assert table.shape == (35, 32)
    np.testing.assert_allclose((table**2).sum(1), 16, rtol=1e-6)  # sin^2 + cos^2, 16 pairs
    similarity = (table @ table[0]).reshape(5, 7)
    assert similarity[0, 0] > similarity[0, 1] > similarity[0, 3]
    assert similarity[0, 1] == pytest.approx(similarity[1, 0])


@pytest.mark.parametrize('pool', ['cls', pytest.param('gap', marks=pytest.mark.full)])
@pytest.mark.parametrize('kind', ['sincos2d', 'learned2d', 'none'])
def test_every_kind_that_is_added_is_the_learned_one_with_its_array(kind, pool):
    config = tiny.model(positions=kind, pool=pool, image_size=(8, 12))
    fixed, learned = build(config), build(tiny.model(pool=pool, image_size=(8, 12)))
    params = tiny.random_params(jax.eval_shape(fixed.init, jax.random.key(0)))
    images = tiny.images(config=config)
    expected = fixed.apply(params, images)
    table = as_array(kind, config.grid, params, length=config.num_tokens, width=config.width)
    assert table.dtype == np.float32 and table.shape == (1, config.num_tokens, config.width)
    patches = config.grid[0] * config.grid[1]
    assert not table[0, :-patches].any()  # the class token's row
    if kind == 'sincos2d':
        np.testing.assert_array_equal(table[0, -patches:], sincos2d(config.grid, config.width))
    if kind == 'learned2d':  # of each patch the vector of its column and that of its row
        x, y = params['pos_embedding_x'][0], params['pos_embedding_y'][0]
        expected_rows = [np.concatenate([x[c], y[r]]) for r, c in np.ndindex(config.grid)]
        np.testing.assert_array_equal(table[0, -patches:], expected_rows)
    np.testing.assert_array_equal(
        learned.apply(params | {'pos_embedding': table}, images), expected
    )


ADDED = 'learned', 'learned2d', 'sincos2d'


@pytest.mark.parametrize(
    'kind, at',
    [
        ('learned', 'every_layer'),
        pytest.param('sincos2d', 'every_layer', marks=pytest.mark.full),
        pytest.param('learned2d', 'every_layer_shared', marks=pytest.mark.full),
    ],
)
def test_what_is_added_in_every_layer_is_seen_between_the_layers(kind, at):
    config = tiny.model(positions=kind, positions_at=at, registers=2, depth=2)
    model = build(config)
    params = tiny.random_params(jax.eval_shape(model.init, jax.random.key(0)))
    names = 'embedding', 'tokens', 'attention/residual'
    seen = model.capture(params, tiny.images(), names)[1]
    before = np.stack([seen['embedding'], seen['tokens'][0]])
    added = np.asarray(seen['attention/residual'][0] - before)
    sizes = {'length': config.num_tokens - config.registers, 'width': config.width}
    for layer in range(config.depth):
        own = jax.tree.map(lambda leaf, n=layer: leaf[n], params['encoder']['block'])
        found = own if at == 'every_layer' else params
        table = as_array(kind, config.grid, found, **sizes)
        expected = np.insert(table[0], [1, 1], 0, axis=0)  # registers have no positions
        np.testing.assert_allclose(added[layer, 0], expected, atol=1e-6)


PLACED = [
    (kind, at)
    for kind, at in itertools.product(typing.get_args(PositionKind), typing.get_args(PositionsAt))
    if kind in ADDED or at == 'stem'
]


@pytest.mark.parametrize('kind, at', PLACED)
def test_every_parameter_of_a_kind_can_be_resized(kind, at):
    """And no other: to add a kind is to say which parameters are its own."""
    sizes = (8, 8), (12, 20)
    old, new = (tiny.model(positions=kind, positions_at=at, image_size=size) for size in sizes)
    old_shapes, new_shapes = (
        jax.eval_shape(build(config).init, jax.random.key(0)) for config in (old, new)
    )
    named = zip(
        tree_names.named_leaves(old_shapes).items(), jax.tree.leaves(new_shapes), strict=True
    )
    changed = {name: (leaf, target) for (name, leaf), target in named if leaf.shape != target.shape}
    assert set(resizers(kind, at, 'bilinear')) == set(changed)
    if kind == 'relative':
        return
    for how, (name, (leaf, target)) in itertools.product(
        typing.get_args(PositionResize), changed.items()
    ):
        resized = resizers(kind, at, how)[name]
        assert resized(np.zeros(leaf.shape, leaf.dtype), old.grid, new.grid).shape == target.shape


@pytest.mark.parametrize('how', typing.get_args(PositionResize))
def test_resizing_columns_and_rows_is_resizing_the_table_that_they_make(how):
    old, new = (6, 4), (3, 9)
    rng = np.random.default_rng(0)
    params = {'pos_embedding_x': rng.normal(size=(1, 4, 5)).astype(np.float32)}
    params['pos_embedding_y'] = rng.normal(size=(1, 6, 5)).astype(np.float32)
    adapt = resizers('learned2d', 'stem', how)
    resized = {name: adapt[name](leaf, old, new) for name, leaf in params.items()}
    whole = as_array('learned2d', old, params, length=25, width=10)
    found = as_array('learned2d', new, resized, length=28, width=10)
    np.testing.assert_allclose(found, resize(whole, old, new, how=how), atol=1e-6)


def test_positions_of_each_layer_are_resized_like_those_of_the_stem():
    layers = np.stack([TABLE, 2 * TABLE])
    found = resizers('learned', 'every_layer', 'bicubic')['encoder/block/pos_embedding']
    one = resize(TABLE, (6, 6), (9, 5), how='bicubic')
    np.testing.assert_allclose(found(layers, (6, 6), (9, 5)), [one, 2 * one], rtol=1e-6)


@pytest.mark.parametrize('kind', ['relative', 'rope'])
def test_a_kind_that_adds_nothing_to_tokens_is_no_array(kind):
    with pytest.raises(UserError, match=f'{kind} positions are no array'):
        as_array(kind, (2, 2), {}, length=4, width=16)
