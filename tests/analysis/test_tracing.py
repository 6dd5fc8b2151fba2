"""Activations may be bfloat16, and come from inside of a compiled program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.analysis import (
    attention,
    cka,
    filters,
    localisation,
    positions,
    receptive_field,
    residual,
)

TILES = {'grid': (2, 2), 'prefix': 1}
DISTANCE = functools.partial(attention.mean_distance, patch_size=(4, 4), **TILES)
CENTRES = functools.partial(receptive_field.receptive_fields, lambda x: x.mean((1, 2))[None])
CASES = {
    'centred_gram': (cka.centred_gram, (8, 3, 4)),
    'rollout': (attention.rollout, (2, 3, 4, 5, 5)),
    'mean_distance': (DISTANCE, (2, 3, 4, 5, 5)),
    'principal_components': (filters.principal_components, (2, 2, 3, 9)),
    'as_picture': (filters.as_picture, (9, 2, 2, 3)),
    'similarity': (functools.partial(positions.similarity, **TILES), (1, 5, 7)),
    'norm_ratio': (residual.norm_ratio, (2, 3, 4), (2, 3, 4)),
    'cosine': (residual.cosine, (2, 3, 4), (2, 3, 4)),
    'receptive_fields': (lambda x: CENTRES(x, jnp.zeros((2, 2), int)), (2, 4, 4, 3)),
    'localisation': (localisation.localisation, (8, 5, 3), (4, 8, 12)),
}


@pytest.mark.parametrize('name', CASES)
def test_activations_may_be_traced_and_what_is_computed_of_them_is_float32(name):
    function, *shapes = CASES[name]
    arrays = [jax.ShapeDtypeStruct((2, *shape), jnp.bfloat16) for shape in shapes]
    found = jax.tree.leaves(jax.eval_shape(jax.vmap(function), *arrays))
    assert {leaf.dtype for leaf in found} == {jnp.dtype('float32')}


@pytest.mark.full
@pytest.mark.parametrize('name', CASES)
def test_nothing_is_rounded_after_the_activations(name):
    function, *shapes = CASES[name]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    rounded = [jax.random.uniform(*pair, jnp.bfloat16) for pair in zip(keys, shapes, strict=True)]
    found = jax.jit(function)(*rounded)
    expected = jax.jit(function)(*(x.astype(jnp.float32) for x in rounded))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, expected
    )
