"""Attention by kernels of libraries: cuDNN's on GPUs, jax's splash attention on TPUs."""

import functools
import logging
import math
from typing import Literal

import jax
import jax.numpy as jnp

from vit_jax.base.array_types import Array, Float
from vit_jax.models import on_mesh

_LANES = 128  # of a TPU's vector registers: what splash takes is a multiple of it
_BLOCK = 1024  # queries and keys at most in one block of splash
_INTERPRET = False  # tests on a CPU set it: the kernel is for TPUs alone


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


def splash(
    query: Float[Array, 'b q h k'],
    key: Float[Array, 'b n h k'],
    value: Float[Array, 'b n h k'],
    *,
    kept_as: str,  # by this name rematerialisation may keep what the backward pass needs
) -> Float[Array, 'b q h k']:
    """Attention by jax's kernel for TPUs, forward and backward without any array of q by n.

    The compiler cannot split a kernel: each device calls it with its own examples and heads. It
    takes queries that are divided by sqrt(k), and so these are rounded once more, where k is no
    power of 4.
    """
    query = query / math.sqrt(query.shape[-1])
    mixed = functools.partial(_splash, kept_as=kept_as)
    return on_mesh.on_each_device(mixed, query, key, value)


def _splash(
    query: Float[Array, 'b q h k'],
    key: Float[Array, 'b n h k'],
    value: Float[Array, 'b n h k'],
    *,
    kept_as: str,
) -> Float[Array, 'b q h k']:
    # Imported here, as only TPUs need it. jax has no public way to its kernels.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    (queries, heads), keys = query.shape[1:3], key.shape[1]
    (of_queries, padded_queries), (of_keys, padded_keys) = map(_blocks, (queries, keys))
    everything = masks.FullMask((padded_queries, padded_keys))
    attend = kernels.make_splash_mha(
        masks.MultiHeadMask([everything] * heads),
        block_sizes=kernels.BlockSizes(
            block_q=of_queries,
            block_kv=of_keys,
            block_kv_compute=of_keys,
            block_q_dkv=of_queries,
            block_kv_dkv=of_keys,
            block_kv_dkv_compute=of_keys,
            block_q_dq=of_queries,
            block_kv_dq=of_keys,
            # With 64 features side by side half of each register, and of the memory that queries,
            # keys and values take, would be empty.
            q_layout=kernels.QKVLayout.SEQ_MINOR,
            k_layout=kernels.QKVLayout.SEQ_MINOR,
            v_layout=kernels.QKVLayout.SEQ_MINOR,
        ),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=kept_as,
        interpret=_INTERPRET,
    )
    segments = None
    if padded_keys > keys:  # the keys of another segment than the queries' are not seen
        is_padding = jnp.arange(padded_keys) >= keys
        segments = kernels.SegmentIds(
            q=jnp.zeros(padded_queries, jnp.int32), kv=is_padding.astype(jnp.int32)
        )
    padded = [
        jnp.pad(x.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, length - x.shape[1]), (0, 0)))
        for x, length in ((query, padded_queries), (key, padded_keys), (value, padded_keys))
    ]
    mixed = jax.vmap(functools.partial(attend, segment_ids=segments))(*padded)
    return mixed[:, :, :queries].transpose(0, 2, 1, 3)


def _blocks(length: int) -> tuple[int, int]:
    """The size of the blocks for a sequence of this length, and their sizes together.

    As large as may be, since each takes some time of its own, and as even as can be.
    """
    count = -(-length // _BLOCK)
    size = -(-length // (count * _LANES)) * _LANES
    return size, count * size
