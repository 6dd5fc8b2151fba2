import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from vit_jax.models import Compute, Corruption, build

CONFIG = tiny.model(num_classes=None, image_size=(8, 16), patch_outputs=5)  # a grid 2x4
OWN = jnp.tile(jnp.arange(8), (2, 1))
NONE = jnp.zeros((2, 8), bool)


BUILT = {}


def predicted(corruption, config=CONFIG, images=None):
    if repr(config) not in BUILT:
        model, params = tiny.built(config)
        BUILT[repr(config)] = jax.jit(functools.partial(model.predict_patches, params))
    images = tiny.images(config=config) if images is None else images
    return np.asarray(BUILT[repr(config)](images, corruption))


@pytest.mark.gate
def test_a_head_of_patches_and_a_mask_token_leave_features_and_logits_as_they_are():
    whole = Compute(last_block='whole')  # a head of patches reads all of it
    plain, masked = build(tiny.model(), compute=whole), build(tiny.model(patch_outputs=5))
    params = jax.jit(masked.init)(jax.random.key(0))
    assert jax.tree.map(jnp.shape, params.pop('masked')) == {
        'token': (1, 1, 16),
        'head': {'kernel': (16, 5), 'bias': (5,)},
    }
    own = jax.jit(plain.init)(jax.random.key(0))
    assert jax.tree.structure(params) == jax.tree.structure(own)
    random = tiny.random_params(params)
    with_masked = random | {'masked': {}}
    for name in 'apply', 'features':
        expected = getattr(plain, name)(random, tiny.images())
        np.testing.assert_array_equal(getattr(masked, name)(with_masked, tiny.images()), expected)


@pytest.mark.gate
def test_of_masked_patches_nothing_is_seen():
    everything = predicted(Corruption(~NONE, OWN))
    np.testing.assert_allclose(everything[0], everything[1], rtol=1e-5, atol=1e-5)
    assert not np.allclose(everything[0, 0], everything[0, 1])  # positions are still there
    third = NONE.at[:, 3].set(True)
    images = tiny.images(config=CONFIG)
    hidden = images.at[:, :4, 12:].set(7.0)  # the patch of this number
    one, two = (predicted(Corruption(third, OWN), images=x) for x in (images, hidden))
    np.testing.assert_array_equal(one, two)
    assert not np.allclose(predicted(None, images=hidden), predicted(None, images=images))


@pytest.mark.gate
@pytest.mark.parametrize('final_norm', ['before_pool', 'after_pool'])
def test_a_patch_in_anothers_place_is_seen_there(final_norm):
    """Positions are added afterwards: without any, outputs go with the patches."""
    config = tiny.model(
        num_classes=None,
        image_size=(8, 16),
        patch_outputs=5,
        positions='none',
        final_norm=final_norm,
        registers=2,
    )
    order = jnp.array([3, 1, 0, 2, 7, 6, 5, 4])
    moved = predicted(Corruption(NONE, jnp.tile(order, (2, 1))), config)
    np.testing.assert_allclose(moved, predicted(None, config)[:, order], rtol=1e-4, atol=1e-5)
