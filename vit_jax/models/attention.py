"""Scaled dot-product attention with four implementations."""

import functools
import logging
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vit_jax.base.array_types import Array, Float
from vit_jax.models import activation_sharding

Queries = Float[Array, 'b q h k']
Keys = Float[Array, 'b n h k']
Values = Float[Array, 'b n h k']
Offsets = Float[Array, 'o h k']  # one vector per offset between query and key positions
Logits = Float[Array, 'b h q n']
Implementation = Literal['xla', 'blockwise', 'cudnn', 'splash']
LONG_SEQUENCE = 1024  # number of tokens above which `auto` avoids an array of attention weights
SAVED = 'attention'  # checkpoint_name of the output, for rematerialization policies
_MAX_QUERIES = 256  # largest number of queries per block of `blockwise`
_LANES = 128  # of a TPU vector register (splash)
_MAX_BLOCK = 1024  # largest block size of splash
_INTERPRET = False  # True runs the TPU kernel in an interpreter (tests on CPUs)


def attend(
    query: Queries,
    key: Keys,
    value: Values,
    *,
    relative: Offsets | None = None,
    implementation: Implementation = 'xla',
) -> Queries:
    """Computes softmax(Q K^T / sqrt(k)) V for each head (ViT paper, equations 6 and 7).

    Args:
      query: Shape (b q h k).
      key: Shape (b n h k).
      value: Shape (b n h k).
      relative: Relative position embeddings R (appendix D.4), one for each of the q + n - 1
        offsets: the logit of query i and key j is (Q_i . K_j + Q_i . R[j - i + q - 1]) / sqrt(k).
        Only `xla` supports them.
      implementation: `xla` runs on all devices. `blockwise` is `xla` on one block of queries at a
        time, without an array of all queries by all keys. `cudnn` is the fused kernel for GPUs,
        `splash` is jax's fused kernel for TPUs. `splash` falls back to `blockwise` on several
        devices without a mesh, and if a matmul precision is set. Attention with fewer queries than
        keys (class tokens) always uses `xla`.

    Returns:
      Array of shape (b q h k).
    """
    if query.shape[1] < key.shape[1]:
        implementation = 'xla'
    if implementation == 'splash':
        # The kernel's bfloat16 products do not support a higher matmul precision.
        if jax.default_matmul_precision.value or not activation_sharding.is_sharding_known():
            implementation = 'blockwise'
    assert relative is None or implementation == 'xla'
    match implementation:
        case 'cudnn':
            return _cudnn(query, key, value)
        case 'splash':
            scaled = query / math.sqrt(query.shape[-1])  # the kernel does not scale
            return activation_sharding.map_shards(_splash, scaled, key, value)
        case 'blockwise':
            return _blockwise(query, key, value)
        case 'xla':
            return _xla(query, key, value, relative)


def attention_weights(query: Queries, key: Keys, relative: Offsets | None = None) -> Logits:
    """Computes the attention weights of `attend` in float32; each row sums to one."""
    logits = jnp.einsum('bqhk,bnhk->bhqn', query, key, preferred_element_type=jnp.float32)
    if relative is not None:
        logits += _relative_logits(query, relative)
    return jax.nn.softmax(logits / math.sqrt(query.shape[-1]), axis=-1)


def _xla(query: Queries, key: Keys, value: Values, relative: Offsets | None = None) -> Queries:
    scale = math.sqrt(query.shape[-1])
    power_of_two = 2.0 ** math.floor(math.log2(scale))  # division by a power of 2 does not round
    query = query / power_of_two
    bias = None if relative is None else _relative_logits(query, relative)
    return _attend(query, key, value, bias, scale / power_of_two)


@functools.partial(jax.custom_jvp, nondiff_argnums=(4,))
def _attend(query: Queries, key: Keys, value: Values, bias: Logits | None, scale: float) -> Queries:
    """Computes softmax((Q K^T + bias) / scale) V; the scale is 1 for heads of size 64.

    The JVP is written by hand, as in fused kernels: it uses the rounded weights, and subtracts
    m sum_j w_j dl_j (symbols: see the JVP) once per query, not once per query and key. On a v5e, a
    step of B/16 takes 142 M estimated cycles, and 153 M with `jax.nn.dot_product_attention`
    (`python -m benchmarks.step_program --topology=v5e:2x2 --model=B/16 --batch=64`).
    """
    return _attention_parts(query, key, value, bias, scale)[0]


def _attention_parts(
    query: Queries, key: Keys, value: Values, bias: Logits | None, scale: float
) -> tuple[Queries, Logits, Float[Array, 'b h q 1']]:
    """Computes the attention output, the weights exp(logits - max), and their sums over keys."""
    f32 = jnp.float32
    logits = jnp.einsum('bqhk,bnhk->bhqn', query, key, preferred_element_type=f32)
    logits = (logits if bias is None else logits + bias) / scale
    largest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    weights = jnp.exp(logits - largest).astype(query.dtype)
    total = weights.sum(-1, keepdims=True, dtype=f32)
    sums = jnp.einsum('bhqn,bnhk->bhqk', weights, value, preferred_element_type=f32)
    output = (sums / total).astype(query.dtype).transpose(0, 2, 1, 3)
    return checkpoint_name(output, SAVED), weights, total


@_attend.defjvp
def _(scale: float, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    """Computes the JVP of `_attend`: output m, logits l, weights w = exp(l - max l), s = sum w.

    dm = d(sum_j w_j v_j / s) = (sum_j w_j (v_j dl_j + dv_j) - m sum_j w_j dl_j) / s.
    """
    query, key, value, bias = primals
    d_query, d_key, d_value, d_bias = tangents
    output, weights, total = _attention_parts(query, key, value, bias, scale)
    d_logits = jnp.einsum('bqhk,bnhk->bhqn', d_query, key)
    d_logits += jnp.einsum('bqhk,bnhk->bhqn', query, d_key)
    if bias is not None:
        d_logits += d_bias.astype(d_logits.dtype)
    d_weights, d_total = _weight_tangents(weights, d_logits, scale)
    d_sums = jnp.einsum('bhqn,bnhk->bhqk', d_weights, value)
    d_sums += jnp.einsum('bhqn,bnhk->bhqk', weights, d_value)
    d_output = d_sums.astype(jnp.float32).transpose(0, 2, 1, 3)
    d_output -= output.astype(jnp.float32) * d_total.transpose(0, 2, 1, 3)
    return output, (d_output / total.transpose(0, 2, 1, 3)).astype(output.dtype)


# The checkpoint lets the backward pass keep the rounded weights only, without a float32 copy.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _weight_tangents(
    weights: Logits, d_logits: Logits, scale: float
) -> tuple[Logits, Float[Array, 'b h q 1']]:
    """Computes the tangents of the unnormalized weights and of their sums over the keys."""
    tangent = weights.astype(jnp.float32) * (d_logits.astype(jnp.float32) / scale)
    return tangent.astype(weights.dtype), tangent.sum(-1, keepdims=True)


def _relative_logits(query: Queries, relative: Offsets) -> Logits:
    """Computes the logits of relative positions: Q_i . R[j - i + q - 1] for query i and key j."""
    logits = jnp.einsum('bqhk,ohk->bhqo', query, relative, preferred_element_type=jnp.float32)
    *outer, queries, offsets = logits.shape
    # The logits are padded by one column and flattened, and the first q - 1 numbers are dropped.
    # Rows of `offsets` numbers then start one offset earlier than their previous row.
    rows = jnp.pad(logits, ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(*outer, -1)
    rows = rows[..., queries - 1 : queries - 1 + queries * offsets]
    return rows.reshape(*outer, queries, offsets)[..., : offsets - queries + 1]


def _blockwise(query: Queries, key: Keys, value: Values) -> Queries:
    """Attends with one block of queries at a time; the backward pass recomputes each block."""
    batch, queries, *head = query.shape
    count = -(-queries // _MAX_QUERIES)
    size = -(-queries // count)
    padding = count * size - queries
    query = jnp.pad(query, ((0, 0), (0, padding), (0, 0), (0, 0)))
    blocks = jnp.moveaxis(query.reshape(batch, count, size, *head), 1, 0)
    output = jax.lax.map(jax.checkpoint(lambda block: _xla(block, key, value)), blocks)
    return jnp.moveaxis(output, 0, 1).reshape(batch, count * size, *head)[:, :queries]


def _cudnn(query: Queries, key: Keys, value: Values) -> Queries:
    """Attends with cuDNN; pads odd lengths by one token, because cuDNN cannot train at them.

    The padding is excluded by sequence lengths. A mask would cost more, as the kernel reads it.
    """
    attention = functools.partial(jax.nn.dot_product_attention, implementation='cudnn')
    batch, length = query.shape[:2]
    if length % 2 == 0:
        return attention(query, key, value)
    padded = [jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (query, key, value)]
    lengths = jnp.full(batch, length, jnp.int32)
    output = attention(*padded, query_seq_lengths=lengths, key_value_seq_lengths=lengths)
    return output[:, :length]


@functools.cache
def supports_cudnn(tokens: int, heads: int, head_size: int, dtype: str) -> bool:
    """Returns whether a GPU can train with cuDNN's attention at these sizes.

    The head size must be a multiple of 8, at most 128, in bfloat16. If this process has a GPU, the
    kernel and its gradient are compiled as a test, and the reason for a failure is logged.
    """
    if dtype != 'bfloat16' or head_size % 8 or head_size > 128:
        return False
    if jax.default_backend() != 'gpu':
        return True
    array = jax.ShapeDtypeStruct((1, tokens, heads, head_size), dtype)

    gradient = jax.grad(lambda *arrays: _cudnn(*arrays).sum(), argnums=(0, 1, 2))
    try:
        jax.jit(gradient).lower(array, array, array).compile()
    except Exception as error:  # jax raises several types
        reason = str(error).strip().splitlines()[0]
        logging.warning('cuDNN attention is not used for %s tokens: %s', tokens, reason)
        return False
    return True


def _splash(query: Queries, key: Keys, value: Values) -> Queries:
    """Attends with jax's TPU kernel, which creates no array of all queries by all keys."""
    # Imported lazily because only TPUs need it. jax has no public path to its kernels.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = query.shape[1:3]
    block, padded_length = _block_sizes(length)
    names = 'q', 'q_dkv', 'q_dq', 'kv', 'kv_compute', 'kv_dkv', 'kv_dkv_compute', 'kv_dq'
    blocks: dict[str, Any] = {f'block_{name}': block for name in names}
    # The sequence is the last axis: 64 head features would fill only half of each register.
    layouts: dict[str, Any] = {f'{name}_layout': kernels.QKVLayout.SEQ_MINOR for name in 'qkv'}
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([masks.FullMask((padded_length, padded_length))] * heads),
        block_sizes=kernels.BlockSizes(**blocks, **layouts),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=SAVED,
        interpret=_INTERPRET,
    )
    segments = None
    padding = padded_length - length
    if padding:  # queries attend only to keys of their own segment
        is_padding = (jnp.arange(padded_length) >= length).astype(jnp.int32)
        segments = kernels.SegmentIds(q=jnp.zeros_like(is_padding), kv=is_padding)
    padded = [
        jnp.pad(x.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, padding), (0, 0)))
        for x in (query, key, value)
    ]
    output = jax.vmap(functools.partial(kernel, segment_ids=segments))(*padded)
    return output[:, :, :length].transpose(0, 2, 1, 3)


def _block_sizes(length: int) -> tuple[int, int]:
    """Returns the block size, the same for all blocks of a sequence, and the padded length."""
    count = -(-length // _MAX_BLOCK)
    size = -(-length // (count * _LANES)) * _LANES
    return size, count * size
