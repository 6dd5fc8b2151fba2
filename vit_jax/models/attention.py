"""Scaled dot-product attention: one function, several ways to compute it."""

import functools
import logging
import math
from typing import Literal

import jax
import jax.numpy as jnp

from vit_jax.base.array_types import Array, Float

Implementation = Literal['auto', 'xla', 'cudnn']


def attend(
    query: Float[Array, 'b q h k'],
    key: Float[Array, 'b n h k'],
    value: Float[Array, 'b n h k'],
    *,
    implementation: Implementation = 'auto',
) -> Float[Array, 'b q h k']:
    """softmax(Q K^T / sqrt(k)) V for each head (equations 6 and 7 of the paper's appendix A).

    `xla` lets the compiler fuse what it can, `cudnn` calls the fused GPU kernel, and `auto` takes
    cuDNN where it compiles for these shapes, forward and backward, and XLA otherwise.
    """
    if implementation == 'auto':
        fused = cudnn_compiles(query.shape[1:], key.shape[1:], query.dtype.name)
        implementation = 'cudnn' if fused else 'xla'
    if implementation == 'cudnn':
        return attend_at_even_lengths(query, key, value, implementation='cudnn')
    return jax.nn.dot_product_attention(query, key, value, implementation='xla')


def attention_weights(
    query: Float[Array, 'b q h k'], key: Float[Array, 'b n h k']
) -> Float[Array, 'b h q n']:
    """The weights that `attend` gives to each key: float32, every row sums to one."""
    logits = jnp.einsum('bqhk,bnhk->bhqn', query, key, preferred_element_type=jnp.float32)
    return jax.nn.softmax(logits / math.sqrt(query.shape[-1]), axis=-1)


def attend_at_even_lengths(
    query: Float[Array, 'b q h k'],
    key: Float[Array, 'b n h k'],
    value: Float[Array, 'b n h k'],
    *,
    implementation: Literal['xla', 'cudnn'],  # xla: so that a machine without a GPU can test it
) -> Float[Array, 'b q h k']:
    """Attention over sequences padded to an even length: cuDNN does not train at odd ones.

    The padding is hidden by sequence lengths, not by a mask, which the kernel would have to read.
    """
    attention = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
    (batch, queries), keys = query.shape[:2], key.shape[1]
    if queries % 2 == 0 and keys % 2 == 0:
        return attention(query, key, value)
    even = [jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (query, key, value)]
    lengths = [jnp.full(batch, length, jnp.int32) for length in (queries, keys)]
    mixed = attention(*even, query_seq_lengths=lengths[0], key_value_seq_lengths=lengths[1])
    return mixed[:, :queries]


@functools.cache
def cudnn_compiles(query_shape: tuple[int, ...], key_shape: tuple[int, ...], dtype: str) -> bool:
    """Does the fused kernel, with its gradient, compile here? Says so once where it does not."""
    if jax.default_backend() != 'gpu' or dtype == 'float32':
        return False
    query, key = (jax.ShapeDtypeStruct((1, *shape), dtype) for shape in (query_shape, key_shape))

    def total(query: Array, key: Array, value: Array) -> Array:
        return attend_at_even_lengths(query, key, value, implementation='cudnn').sum()

    try:
        jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(query, key, key).compile()
    except Exception as error:  # jax raises several kinds; any of them means: not here
        reason = str(error).strip().splitlines()[0]
        logging.warning('attention: no cuDNN for queries %s, using XLA: %s', query_shape, reason)
        return False
    logging.info('attention: cuDNN for queries %s, %s', query_shape, dtype)
    return True
