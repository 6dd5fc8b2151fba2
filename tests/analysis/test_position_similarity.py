import numpy as np
import pytest

from vit_jax.analysis import positions
from vit_jax.base import UserError

RNG = np.random.default_rng(0)


def test_a_position_is_wholly_like_itself_and_its_multiples():
    table = RNG.normal(size=(1, 2 + 6, 5))
    table[0, 2 + 4] = -3 * table[0, 2]  # row 1, column 1 of 2x3
    found = positions.similarity(table, (2, 3), prefix=2)
    assert found.shape == (2, 3, 2, 3)
    np.testing.assert_allclose(np.einsum('rcrc->rc', found), 1, atol=1e-6)
    assert found[0, 0, 1, 1] == pytest.approx(-1)
    expected = table[0, 3] @ table[0, 7] / np.linalg.norm(table[0, 3]) / np.linalg.norm(table[0, 7])
    assert found[0, 1, 1, 2] == pytest.approx(expected, abs=1e-6)
    np.testing.assert_array_equal(found, positions.similarity(table[0], (2, 3), prefix=2))


def test_an_embedding_of_zero_is_like_none():
    table = np.ones((6, 5))
    table[1] = 0
    found = np.asarray(positions.similarity(table, (2, 3), prefix=0))
    assert np.isnan(found[0, 1]).all() and np.isnan(found).sum() == 11


def test_rows_that_are_not_prefix_and_grid_are_refused():
    with pytest.raises(UserError, match='7 tokens: expected prefix=0 and 2x3 patches'):
        positions.similarity(np.ones((7, 4)), (2, 3), prefix=0)
