import numpy as np

from vit_jax.analysis import residual

RNG = np.random.default_rng(0)


def test_the_ratio_is_that_of_lengths_token_by_token_or_place_by_place():
    lengths = RNG.uniform(1, 9, size=(2, 3, 4))
    branch = RNG.normal(size=(2, 3, 4, 5))
    skip = branch[..., ::-1] * lengths[..., None]
    np.testing.assert_allclose(residual.norm_ratio(skip, branch), lengths, rtol=1e-5)


def test_a_branch_that_adds_nothing_has_an_infinite_ratio_and_no_direction():
    skip, branch = np.ones((1, 3)), np.zeros((1, 3))
    assert residual.norm_ratio(skip, branch) == np.inf
    assert residual.norm_ratio(branch, skip) == 0
    assert np.isnan(residual.norm_ratio(branch, branch)).all()
    assert np.isnan(residual.cosine(branch, skip)).all()


def test_a_branch_at_right_angles_to_the_skip_makes_half_a_right_angle_with_the_sum():
    skip, branch = np.array([[3.0, 0, 4]]), np.array([[0.0, 5, 0]])
    np.testing.assert_allclose(residual.cosine(branch, skip + branch), np.sqrt(0.5), rtol=1e-6)
    np.testing.assert_allclose(residual.cosine(branch, -2 * branch), -1, rtol=1e-6)
