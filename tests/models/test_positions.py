import numpy as np
import pytest
import scipy.ndimage

from vit_jax.models.positions import resize, sincos2d

TABLE = np.random.default_rng(0).normal(size=(1, 1 + 6 * 6, 5)).astype(np.float32)


@pytest.mark.parametrize('new', [(6, 6), (12, 12), (4, 4), (9, 5), (1, 8)])
def test_resizing_is_scipys_zoom_and_keeps_the_class_token(new):
    resized = resize(TABLE, (6, 6), new)
    grid = TABLE[0, 1:].reshape(6, 6, 5)
    expected = scipy.ndimage.zoom(grid, (new[0] / 6, new[1] / 6, 1), order=1)
    np.testing.assert_allclose(resized[0, 1:].reshape(*new, 5), expected, atol=1e-6)
    np.testing.assert_array_equal(resized[:, 0], TABLE[:, 0])


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
