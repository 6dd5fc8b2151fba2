import numpy as np
import pytest
import sklearn.decomposition

from vit_jax.analysis import filters

RNG = np.random.default_rng(0)
KERNEL = RNG.normal(size=(2, 3, 2, 40)) * np.linspace(1, 5, 12).reshape(2, 3, 2, 1) + 2


@pytest.mark.full
def test_components_are_those_of_scikit_learn_up_to_sign():
    pca = sklearn.decomposition.PCA(5).fit(KERNEL.reshape(12, 40).T)
    found, shares = map(np.asarray, filters.principal_components(KERNEL, 5))
    signs = np.sign((found.reshape(5, 12) * pca.components_).sum(axis=1))
    np.testing.assert_allclose(found.reshape(5, 12).T * signs, pca.components_.T, atol=1e-4)
    np.testing.assert_allclose(shares, pca.explained_variance_ratio_, rtol=1e-5)


@pytest.mark.full
def test_a_kernel_of_the_other_sign_has_the_same_components():
    found = np.asarray(filters.principal_components(KERNEL)[0])
    np.testing.assert_allclose(filters.principal_components(-KERNEL)[0], found, atol=1e-5)
    flat = found.reshape(len(found), -1)
    assert (flat.max(axis=1) == np.abs(flat).max(axis=1)).all()


@pytest.mark.full
@pytest.mark.parametrize('width, there', [(40, 12), (13, 12), (12, 11), (5, 4), (1, 0)])
def test_there_are_no_more_components_than_differences_of_filters(width, there):
    found, shares = map(np.asarray, filters.principal_components(KERNEL[..., :width], 28))
    assert found.shape == (there, 2, 3, 2)
    flat = found.reshape(there, 12)
    np.testing.assert_allclose(flat @ flat.T, np.eye(there), atol=1e-5)
    if there:
        assert shares.sum() == pytest.approx(1, rel=1e-5)


def test_pictures_reach_from_black_to_white_each_alone():
    pictures = filters.as_picture(
        np.stack([KERNEL[..., 0], 9 * KERNEL[..., 1], 0 * KERNEL[..., 2]])
    )
    assert pictures.min(axis=(1, 2, 3)).tolist() == [0, 0, 0]
    np.testing.assert_allclose(pictures.max(axis=(1, 2, 3)), [1, 1, 0], rtol=1e-6)
    assert pictures.max() <= 1
    order = np.argsort(KERNEL[..., 0], axis=None)
    assert (np.diff(np.asarray(pictures[0]).reshape(-1)[order]) > 0).all()
