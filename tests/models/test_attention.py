import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models import attention, fused_attention

QUERY, KEY, VALUE = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8))
OFFSETS = jax.random.normal(jax.random.key(2), (9, 4, 8))
QUERY_72 = jax.random.normal(jax.random.key(1), (3, 2, 5, 4, 72))


def test_attend_is_the_weights_times_the_values():
    weights = attention.attention_weights(QUERY, KEY)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    expected = jnp.einsum('bhqn,bnhk->bqhk', weights, VALUE)
    np.testing.assert_allclose(attention.attend(QUERY, KEY, VALUE), expected, atol=1e-6)


def by_definition(query, key, value, offsets):
    """q . (k + r) of every pair, with the vector r of its offset: an array (q n h k)."""
    queries, keys = query.shape[1], key.shape[1]
    of_pairs = offsets[np.arange(keys) - np.arange(queries)[:, None] + queries - 1]
    logits = jnp.einsum('bqhk,bqnhk->bhqn', query, key[:, None] + of_pairs)
    weights = jax.nn.softmax(logits / math.sqrt(query.shape[-1]), axis=-1)
    return jnp.einsum('bhqn,bnhk->bqhk', weights, value)


@pytest.mark.parametrize('queries', [5, pytest.param(3, marks=pytest.mark.full)])
def test_a_query_has_logits_of_the_offsets_to_all_keys(queries):
    query, offsets = QUERY[:, :queries], OFFSETS[: queries + 4]
    expected = by_definition(query, KEY, VALUE, offsets)
    found = attention.attend(query, KEY, VALUE, relative=offsets)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    weights = attention.attention_weights(query, KEY, offsets)
    mixed = jnp.einsum('bhqn,bnhk->bqhk', weights, VALUE)
    np.testing.assert_allclose(mixed, expected, atol=1e-6)


@pytest.mark.parametrize('relative', [None, OFFSETS], ids=['', 'relative'])
@pytest.mark.parametrize('queries', [5, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize('implementation', ['head_major', 'blockwise', 'padded'])
def test_each_way_to_compute_it_gives_the_same_result_and_gradient(
    implementation, queries, relative, monkeypatch
):
    monkeypatch.setattr(attention, '_BLOCK', 2)  # 5 queries: two blocks, and one in a third
    relative = None if relative is None else relative[: queries + 4]
    arguments = QUERY[:, :queries], KEY, VALUE, relative

    def of(implementation):
        def total(query, key, value, relative):
            options = {'relative': relative, 'implementation': implementation}
            mixed = attention.attend(query, key, value, **options)
            return mixed.std(), mixed

        wanted = range(4 if relative is not None else 3)
        return jax.grad(total, argnums=tuple(wanted), has_aux=True)(*arguments)

    (gradients, mixed), (expected, same) = of(implementation), of('xla')
    np.testing.assert_allclose(mixed, same, atol=1e-6)
    for one, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_the_gradient_of_relative_logits_is_that_of_their_definition():
    of_ways = [
        jax.grad(lambda *a, f=f: f(*a).std(), argnums=(0, 1, 2, 3))(QUERY, KEY, VALUE, OFFSETS)
        for f in (lambda q, k, v, r: attention.attend(q, k, v, relative=r), by_definition)
    ]
    for actual, expected in zip(*of_ways, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize('implementation', ['head_major', 'xla', 'padded'])
def test_logits_are_made_and_scaled_in_float32(implementation):
    """Half a percent of bfloat16's rounding of weights and result; rounded logits give 3 %."""
    low = [x.astype(jnp.bfloat16) for x in 9 * QUERY_72]
    exact = attention.attend(*(x.astype(jnp.float32) for x in low), implementation='xla')
    result = attention.attend(*low, implementation=implementation).astype(jnp.float32)
    assert jnp.abs(result - exact).max() < 0.005 * jnp.abs(exact).max()


OFFSETS_72 = jax.random.normal(jax.random.key(2), (9, 4, 72))


def test_logits_of_offsets_are_float32_too():
    low = [x.astype(jnp.bfloat16) for x in (*QUERY_72[:2], OFFSETS_72)]
    exact = attention.attention_weights(*(x.astype(jnp.float32) for x in low))
    np.testing.assert_allclose(attention.attention_weights(*low), exact, atol=1e-5)


@pytest.mark.parametrize('relative', [False, True])
def test_the_backward_pass_keeps_nothing_of_all_queries_by_all_keys_in_float32(relative):
    low = [x.astype(jnp.bfloat16) for x in (*QUERY_72, *([OFFSETS_72] if relative else []))]

    def attend(query, key, value, relative=None):
        return attention.attend(query, key, value, relative=relative, implementation='xla')

    pull = jax.vjp(attend, *low)[1]
    kept = [x.dtype.name for x in jax.tree.leaves(pull) if x.shape == (2, 4, 5, 5)]
    assert kept == ['bfloat16']


@pytest.mark.parametrize('implementation', ['head_major', 'xla'])
def test_what_it_gives_is_kept_once(implementation):
    keep = jax.checkpoint_policies.save_only_these_names(attention.MIXED)

    def attend(query, key, value):
        return attention.attend(query, key, value, implementation=implementation)

    pull = jax.vjp(jax.checkpoint(attend, policy=keep), QUERY, KEY, VALUE)[1]
    mixed = attend(QUERY, KEY, VALUE)
    kept = [x for x in jax.tree.leaves(pull) if x.size == mixed.size]
    assert len(kept) == 4  # queries, keys, values, and what it gives
    assert any(x.shape == mixed.shape and (x == mixed).all() for x in kept)


@pytest.mark.parametrize('relative', [False, True])
@pytest.mark.parametrize('queries, keys', [(2048, 2048), (2049, 1025)])
def test_no_program_for_a_long_sequence_has_all_queries_by_all_keys(queries, keys, relative):
    query, key = (jax.ShapeDtypeStruct((1, n, 2, 4), 'float32') for n in (queries, keys))
    offsets = jax.ShapeDtypeStruct((queries + keys - 1, 2, 4), 'float32')
    arguments = (query, key, key, offsets)[: 3 + relative]

    def total(query, key, value, relative=None):
        return attention.attend(query, key, value, relative=relative).sum()

    every = tuple(range(len(arguments)))
    program = str(jax.make_jaxpr(jax.grad(total, argnums=every))(*arguments))
    sizes = [math.prod(map(int, s.split(','))) for s in re.findall(r'f32\[([\d,]+)\]', program)]
    assert max(sizes) < queries * keys


def test_auto_is_no_fused_kernel_where_positions_are_relative(monkeypatch):
    monkeypatch.setattr(fused_attention, 'cudnn_compiles', lambda *_: True)
    found, expected = (
        attention.attend(QUERY, KEY, VALUE, relative=OFFSETS, implementation=implementation)
        for implementation in ('auto', 'xla')
    )
    np.testing.assert_array_equal(found, expected)
