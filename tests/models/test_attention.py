import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models import attention

QUERY, KEY, VALUE = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8))
QUERY_72 = jax.random.normal(jax.random.key(1), (3, 2, 5, 4, 72))


def test_attend_is_the_weights_times_the_values():
    weights = attention.attention_weights(QUERY, KEY)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    expected = jnp.einsum('bhqn,bnhk->bqhk', weights, VALUE)
    np.testing.assert_allclose(attention.attend(QUERY, KEY, VALUE), expected, atol=1e-6)


@pytest.mark.parametrize('implementation', ['head_major', 'blockwise'])
def test_each_way_to_compute_it_gives_the_same_result_and_gradient(implementation, monkeypatch):
    monkeypatch.setattr(attention, '_BLOCK', 2)  # 5 queries: two blocks, and one in a third
    ways = [functools.partial(attention.attend, implementation=i) for i in (implementation, 'xla')]
    results = [way(QUERY, KEY, VALUE) for way in ways]
    np.testing.assert_allclose(*results, atol=1e-6)
    gradients = [
        jax.grad(lambda *a, f=f: f(*a).std(), argnums=(0, 1, 2))(QUERY, KEY, VALUE) for f in ways
    ]
    for expected, actual in zip(*gradients, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize('implementation', ['head_major', 'xla'])
def test_logits_are_made_and_scaled_in_float32(implementation):
    """Half a percent of bfloat16's rounding of weights and result; rounded logits give 3 %."""
    low = [x.astype(jnp.bfloat16) for x in 9 * QUERY_72]
    exact = attention.attend(*(x.astype(jnp.float32) for x in low), implementation='xla')
    result = attention.attend(*low, implementation=implementation).astype(jnp.float32)
    assert jnp.abs(result - exact).max() < 0.005 * jnp.abs(exact).max()


def test_the_backward_pass_keeps_nothing_of_all_queries_by_all_keys_in_float32():
    low = [x.astype(jnp.bfloat16) for x in QUERY_72]
    pull = jax.vjp(functools.partial(attention.attend, implementation='xla'), *low)[1]
    kept = [x.dtype.name for x in jax.tree.leaves(pull) if x.shape[-2:] == (5, 5)]
    assert kept == ['bfloat16']


@pytest.mark.parametrize('queries, keys', [(2048, 2048), (2049, 1025)])
def test_no_program_for_a_long_sequence_has_all_queries_by_all_keys(queries, keys):
    query, key = (jax.ShapeDtypeStruct((1, n, 2, 4), 'float32') for n in (queries, keys))

    def total(query, key, value):
        return attention.attend(query, key, value).sum()

    program = str(jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(query, key, key))
    sizes = [math.prod(map(int, s.split(','))) for s in re.findall(r'f32\[([\d,]+)\]', program)]
    assert max(sizes) < queries * keys


@pytest.mark.full
@pytest.mark.parametrize('queries', [5, 1, 4])
def test_padding_to_an_even_length_changes_neither_result_nor_gradient(queries):
    """What cuDNN is given at odd lengths, computed by XLA."""

    def plain(query, key, value):
        return jax.nn.dot_product_attention(query, key, value)

    def padded(query, key, value):
        return attention.attend_at_even_lengths(query, key, value, implementation='xla')

    arguments = QUERY[:, :queries], KEY, VALUE
    np.testing.assert_allclose(padded(*arguments), plain(*arguments), atol=1e-6)
    gradients = [
        jax.grad(lambda *a, f=f: f(*a).std(), argnums=(0, 1, 2))(*arguments)
        for f in (plain, padded)
    ]
    for expected, actual in zip(*gradients, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_auto_falls_back_aloud_where_cudnn_does_not_compile(monkeypatch, caplog):
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')  # this machine has no cuDNN
    attention.cudnn_compiles.cache_clear()
    low = [x.astype(jnp.bfloat16) for x in (QUERY, KEY, VALUE)]
    result = attention.attend(*low, implementation='auto')
    np.testing.assert_array_equal(result, attention.attend(*low, implementation='xla'))
    assert 'no cuDNN for queries (5, 4, 8), using XLA' in caplog.text
    attention.cudnn_compiles.cache_clear()
