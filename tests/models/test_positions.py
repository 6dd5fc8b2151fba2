import jax
import numpy as np
import pytest

from tests import tiny
from vit_jax.models import build
from vit_jax.models.model import compute_position_table
from vit_jax.models.positions import make_angles, rotate, sincos2d


def test_rotated_queries_and_keys_know_how_far_apart_they_are_and_no_more():
    """Their products are the same for all pairs of patches as far apart (RoFormer, 3.2)."""
    grid, prefix = (3, 4), 2
    query, key = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    queries, keys = (jax.numpy.tile(x, (1, prefix + 12, 1, 1)) for x in (query, key))
    angles = make_angles('rope', grid, 8, class_tokens=1, registers=1)
    rotated = [np.asarray(x)[0, :, 0] for x in rotate((queries, keys), angles)]
    products = np.einsum('qk,nk->qn', *rotated)
    np.testing.assert_allclose(products[:prefix, :prefix], query @ key, rtol=1e-5)
    places = np.argwhere(np.ones(grid))
    among = products[prefix:, prefix:]
    for apart in (0, 0), (1, 0), (0, 2), (-1, 3):
        same = (places[None] - places[:, None] == apart).all(axis=-1)
        assert np.ptp(among[same]) < 1e-5
    assert np.ptp(among) > 0.1


def test_rotations_are_those_of_dinov3():
    """The formula of `DINOv3ViTRopePositionEmbedding` in transformers, with its base of 100."""
    angles = make_angles('rope', (2, 1), 16, class_tokens=0, registers=0)
    frequencies = 2 * np.pi / 100 ** np.arange(0, 1, 4 / 16)
    of_rows, of_column = np.outer([-0.5, 0.5], frequencies), np.zeros((2, 4))
    np.testing.assert_allclose(angles, np.tile(np.hstack([of_rows, of_column]), 2))


def test_rotations_are_those_of_vit5():
    """Row and column, with a base of 10,000 for patches and of 100 for the grid of registers."""
    angles = make_angles('learned_rope', (2, 1), 16, class_tokens=1, registers=4)
    exponents = np.arange(0, 1, 4 / 16)
    row, one = [np.zeros(4), 1 / 100**exponents], [np.zeros(4), 1 / 10_000**exponents]
    registers = [np.hstack([row[y], row[x]]) for y, x in np.ndindex(2, 2)]
    patches = [np.hstack([one[y], np.zeros(4)]) for y in range(2)]
    np.testing.assert_allclose(angles, np.tile([np.zeros(8), *registers, *patches], 2))


def test_sincos_neighbors_are_more_alike_than_strangers():
    table = sincos2d((5, 7), 32)
    assert table.shape == (35, 32)
    np.testing.assert_allclose((table**2).sum(1), 16, rtol=1e-6)  # sin^2 + cos^2, 16 pairs
    similarity = (table @ table[0]).reshape(5, 7)
    assert similarity[0, 0] > similarity[0, 1] > similarity[0, 3]
    assert similarity[0, 1] == pytest.approx(similarity[1, 0])


@pytest.mark.parametrize('pool', ['cls', pytest.param('gap', marks=pytest.mark.gate)])
@pytest.mark.parametrize('kind', ['sincos2d', 'learned2d', 'none'])
def test_every_kind_that_is_added_is_the_learned_one_with_its_array(kind, pool):
    config = tiny.model(positions=kind, pool=pool, image_size=(8, 12))
    fixed, learned = build(config), build(tiny.model(pool=pool, image_size=(8, 12)))
    params = tiny.random_params(jax.eval_shape(fixed.init, jax.random.key(0)))
    images = tiny.images(config=config)
    expected = jax.jit(fixed.apply)(params, images)
    table = compute_position_table(config, params)
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
        jax.jit(learned.apply)(params | {'pos_embedding': table}, images), expected
    )


@pytest.mark.parametrize(
    'kind, at',
    [
        ('learned', 'every_layer'),
        pytest.param('sincos2d', 'every_layer', marks=pytest.mark.gate),
        pytest.param('learned2d', 'every_layer_shared', marks=pytest.mark.gate),
    ],
)
def test_what_is_added_in_every_layer_is_seen_between_the_layers(kind, at):
    config = tiny.model(positions=kind, positions_at=at, registers=2, depth=2)
    model, params = tiny.built(config)
    names = 'embedding', 'tokens', 'attention/residual'
    seen = jax.jit(model.capture, static_argnums=2)(params, tiny.images(), names)[1]
    before = np.stack([seen['embedding'], seen['tokens'][0]])
    added = np.asarray(seen['attention/residual'][0] - before)
    for layer in range(config.depth):
        own = jax.tree.map(lambda leaf, n=layer: leaf[n], params['encoder']['block'])
        found = own if at == 'every_layer' else params
        table = compute_position_table(config, found)
        expected = np.insert(table[0], [1, 1], 0, axis=0)  # registers have no positions
        np.testing.assert_allclose(added[layer, 0], expected, atol=1e-6)


def test_fixed_sines_are_those_of_big_vision():
    """The first half encodes the column, the second half the row."""
    rows, columns = np.mgrid[:3, :5].reshape(2, -1, 1) / 10_000 ** (np.arange(4) / 3)
    angles = [np.sin(columns), np.cos(columns), np.sin(rows), np.cos(rows)]
    np.testing.assert_allclose(sincos2d((3, 5), 16), np.concatenate(angles, axis=-1), atol=1e-6)
