import operator
import pathlib

import jax
import numpy as np
import pytest

from vit_jax.analysis import cka
from vit_jax.base import UserError

DEVICES = 8
RNG = np.random.default_rng(0)
REFERENCE = pathlib.Path(__file__).parents[1] / 'fixtures' / 'cka.npz'


@pytest.fixture(scope='module')
def reference():
    with np.load(REFERENCE, allow_pickle=False) as file:
        return dict(file)


def grams(x):
    return jax.vmap(cka.centered_gram)(x)


def test_cka_is_the_references(reference):
    for pair in 'xy', 'xz', 'xx':
        found = cka.minibatch_cka(*(reference[name] for name in pair))
        assert found == pytest.approx(float(reference[f'cka_{pair}']), abs=1e-6)


@pytest.mark.gate
def test_hsic_is_the_papers_formula(reference):
    """Raghu et al. 2021, equation 3, of Grams that nobody has centered."""
    x, y = reference['x'][0], reference['y'][0]
    k, l = (z @ z.T * (1 - np.eye(64)) for z in (x, y))  # noqa: E741
    n, ones = 64, np.ones(64)
    expected = np.trace(k @ l) + (ones @ k @ ones) * (ones @ l @ ones) / ((n - 1) * (n - 2))
    expected = (expected - 2 / (n - 2) * ones @ k @ l @ ones) / (n * (n - 3))
    assert cka.hsic(grams(x[None]), grams(y[None]))[0, 0] == pytest.approx(expected, rel=1e-5)


def test_independent_features_are_not_alike_however_many_there_are():
    """With its diagonal, a Gram of more features than images is near the identity, and CKA near 1:
    0.85 for these sizes."""
    x, y = (RNG.normal(size=(4, 64, 400)) for _ in 'xy')
    assert abs(cka.minibatch_cka(x, y)) < 0.05


def test_rotation_scale_and_shift_change_nothing(reference):
    x = reference['x']
    rotation, _ = np.linalg.qr(RNG.normal(size=(30, 30)))
    changed = 7 * x @ rotation + RNG.normal(size=30)
    assert cka.minibatch_cka(x, changed) == pytest.approx(1, abs=1e-5)
    assert cka.minibatch_cka(changed, reference['y']) == pytest.approx(
        float(reference['cka_xy']), abs=1e-5
    )


def test_features_far_from_zero_keep_their_similarity(reference):
    """In float32, whose products of numbers near 1,000 have steps of 0.06."""
    shifted = reference['x'] + 1000
    found = cka.minibatch_cka(shifted, reference['y'])
    assert found == pytest.approx(float(reference['cka_xy']), abs=1e-4)


def test_the_order_of_images_matters_only_if_it_is_not_the_same(reference):
    x, y, order = reference['x'], reference['y'], RNG.permutation(64)
    expected = float(reference['cka_xy'])
    assert cka.minibatch_cka(x[:, order], y[:, order]) == pytest.approx(expected, abs=1e-6)
    assert abs(cka.minibatch_cka(x[:, order], y)) < 0.1


def test_a_centered_gram_has_rows_that_sum_to_zero_and_no_diagonal():
    gram = cka.centered_gram(RNG.normal(size=(9, 2, 3)).astype(np.float32))
    np.testing.assert_allclose(gram.sum(axis=0), 0, atol=1e-5)
    np.testing.assert_array_equal(np.diagonal(gram), 0)
    np.testing.assert_allclose(gram, gram.T, atol=1e-6)


@pytest.mark.gate
def test_all_pairs_of_layers_at_once_are_each_pair_alone():
    x = RNG.normal(size=(2, 3, 8, 5)).astype(np.float32)  # batches, layers, images, features
    x[:, 1] = np.cos(x[:, 0])
    terms = jax.jit(lambda x: cka.terms(grams(x), grams(x[1:])))
    found = cka.ratio(*jax.tree.map(operator.add, terms(x[0]), terms(x[1])))
    alone = [[cka.minibatch_cka(x[:, i], x[:, j]) for j in (1, 2)] for i in range(3)]
    np.testing.assert_allclose(found, alone, atol=1e-5)
    assert found[1, 0] == pytest.approx(1)


@pytest.mark.gate
def test_minibatches_of_several_devices_are_summed_as_those_of_one():
    x, y = RNG.normal(size=(2, 8, 1, 16, 5)).astype(np.float32)  # batches, layers, images
    y += x

    def terms(x, y):
        return jax.lax.psum(cka.terms(grams(x[0]), grams(y[0])), 'data')

    mesh, split = jax.sharding.Mesh(jax.devices(), 'data'), jax.P('data')
    summed = jax.shard_map(terms, mesh=mesh, in_specs=(split, split), out_specs=jax.P())
    expected = cka.minibatch_cka(x[:, 0], y[:, 0])
    assert cka.ratio(*jax.jit(summed)(x, y))[0, 0] == pytest.approx(expected, abs=1e-5)


def test_what_does_not_depend_on_the_image_has_no_cka(reference):
    """To the bit: its mean, rounded, is another number."""
    constant = np.broadcast_to(RNG.normal(size=30) * 100 + 0.1, (4, 64, 30))
    assert np.isnan(cka.minibatch_cka(constant, reference['x']))
    found = cka.ratio(np.ones((3, 2)), np.array([1.0, 0, -1]), np.array([4.0, -1]))
    np.testing.assert_array_equal(found, [[0.5, np.nan], [np.nan] * 2, [np.nan] * 2])


def test_too_few_or_other_images_are_refused():
    x = RNG.normal(size=(2, 3, 5))
    with pytest.raises(UserError, match=' 3 images'):
        cka.minibatch_cka(x, x)
    with pytest.raises(UserError, match=r'x .*\(2, 3, 5\).* y .*\(1, 3, 5\)'):
        cka.minibatch_cka(x, x[:1])
    with pytest.raises(UserError, match=r'x .*\(0, 3, 5\)'):
        cka.minibatch_cka(x[:0], x[:0])
