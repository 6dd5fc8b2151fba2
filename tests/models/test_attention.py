import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models import attention

QUERY, KEY, VALUE = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8))


def test_attend_is_the_weights_times_the_values():
    weights = attention.attention_weights(QUERY, KEY)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    expected = jnp.einsum('bhqn,bnhk->bqhk', weights, VALUE)
    np.testing.assert_allclose(attention.attend(QUERY, KEY, VALUE), expected, atol=1e-6)


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
