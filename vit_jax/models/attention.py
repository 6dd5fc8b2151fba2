"""Scaled dot-product attention: one function, several ways to compute it."""

import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vit_jax.base.array_types import Array, Float, Int
from vit_jax.models import fused_attention, on_mesh

Implementation = Literal['auto', 'xla', 'cudnn', 'padded', 'head_major', 'splash', 'blockwise']
LONG = 1024  # tokens; for more, the weights of all queries together would fill the memory
_BLOCK = 256  # queries at most
MIXED = 'mixed'  # the name by which rematerialisation may keep what attention gives


class _Way(NamedTuple):
    """How XLA computes it: first the sums, by how queries, keys and values lie in memory."""

    logits: str
    by_offset: str  # logits of queries and vectors of offsets
    mixed: str  # of exponentials and values
    divisor: float = 1.0  # of logits
    lengths: tuple[int, int] | None = None  # `padded`: of queries and keys without the padding


_BQHK = _Way('bqhk,bnhk->bhqn', 'bqhk,ohk->bhqo', 'bhqn,bnhk->bhqk')
_BHQK = _Way('bhqk,bhnk->bhqn', 'bhqk,ohk->bhqo', 'bhqn,bhnk->bhqk')


def attend(
    query: Float[Array, 'b q h k'],
    key: Float[Array, 'b n h k'],
    value: Float[Array, 'b n h k'],
    *,
    relative: Float[Array, 'o h k'] | None = None,
    implementation: Implementation = 'auto',
) -> Float[Array, 'b q h k']:
    """softmax(Q K^T / sqrt(k)) V for each head (equations 6 and 7 of the paper's appendix A).

    With `relative` positions (appendix D.4) the logit of query i and key j is
    (Q_i . K_j + Q_i . R[j - i + q - 1]) / sqrt(k): `relative` is R, a vector for each of the
    q + n - 1 offsets. No fused kernel has them.

    `xla` lets the compiler fuse what it can, `cudnn` calls the fused GPU kernel, and `auto` takes
    cuDNN where it compiles for these shapes, forward and backward, and XLA otherwise: on GPUs
    `padded`, XLA for lengths that are multiples of 8, as products of matrices need them there.
    `head_major` is XLA with the tokens of a head side by side in memory, for CPUs: elsewhere it is
    slower. `blockwise` is XLA for some queries after the other, so that there never is an array of
    all queries by all keys: `auto` takes it for long sequences. `splash` is jax's fused kernel for
    TPUs, without forward derivatives; on several devices without a mesh (models/on_mesh.py), and
    where another precision of products is asked for, it is `blockwise`.
    """
    if implementation == 'auto':
        shapes = query.shape[1:], key.shape[1:]
        fused = relative is None and fused_attention.cudnn_compiles(*shapes, query.dtype.name)
        short: Implementation = 'padded' if jax.default_backend() == 'gpu' else 'xla'
        implementation = 'cudnn' if fused else 'blockwise' if key.shape[1] > LONG else short
    if implementation == 'cudnn':
        assert relative is None  # `choose` refused it
        return fused_attention.attend_at_even_lengths(query, key, value, implementation='cudnn')
    if implementation == 'splash':
        assert relative is None
        # The kernel has no bfloat16 products of a higher precision, and would be told it too.
        if on_mesh.is_known() and jax.default_matmul_precision.value is None:
            return fused_attention.splash(query, key, value, kept_as=MIXED)
        implementation = 'blockwise'
    if implementation == 'blockwise':
        return _attend_blockwise(query, key, value, relative)
    query, divisor = _divided(query)
    if implementation == 'xla':
        return _mixed(query, key, value, relative, _BQHK._replace(divisor=divisor))
    way = _BHQK._replace(divisor=divisor)
    if implementation == 'padded':
        way = way._replace(lengths=(query.shape[1], key.shape[1]))
        query, key, value, relative = _padded(query, key, value, relative)
    query, key, value = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
    return _mixed(query, key, value, relative, way)


def _padded(
    query: Float[Array, 'b q h k'],
    key: Float[Array, 'b n h k'],
    value: Float[Array, 'b n h k'],
    relative: Float[Array, 'o h k'] | None,
) -> tuple[Array, Array, Array, Array | None]:
    """Lengths filled up to multiples of 8 with zeros, and 8 features of ones after the values'.

    A GPU's products of matrices have such sides: XLA would fill up each operand anew. The product
    with ones is the sum of the exponentials.
    """
    if relative is not None:  # offsets begin at that of the last query to the first key
        relative = jnp.pad(relative, ((-query.shape[1] % 8, -key.shape[1] % 8), (0, 0), (0, 0)))
    query, key, value = (
        jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0), (0, 0))) for x in (query, key, value)
    )
    value = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, 8)), constant_values=1)
    return query, key, value, relative


def _attend_blockwise(
    query: Float[Array, 'b q h k'],
    key: Float[Array, 'b n h k'],
    value: Float[Array, 'b n h k'],
    relative: Float[Array, 'o h k'] | None,
) -> Float[Array, 'b q h k']:
    batch, queries, *head = query.shape
    count = -(-queries // _BLOCK)
    size = -(-queries // count)  # as even as can be, so that little is padded
    padding = (0, count * size - queries)
    query = jnp.pad(query, ((0, 0), padding, (0, 0), (0, 0)))
    blocks = jnp.moveaxis(query.reshape(batch, count, size, *head), 1, 0)
    starts = None
    if relative is not None:  # where its offsets begin: the later the queries, the earlier
        relative = jnp.pad(relative, (padding[::-1], (0, 0), (0, 0)))
        starts = jnp.arange(count)[::-1] * size

    @jax.checkpoint  # the backward pass makes the weights of a block again
    def mixed(
        block: Float[Array, 'b q h k'], start: Int[Array, ''] | None
    ) -> Float[Array, 'b q h k']:
        offsets = None
        if relative is not None and start is not None:
            offsets = jax.lax.dynamic_slice_in_dim(relative, start, size + key.shape[1] - 1)
        return attend(block, key, value, relative=offsets, implementation='xla')

    found = jnp.moveaxis(jax.lax.map(lambda each: mixed(*each), (blocks, starts)), 0, 1)
    return found.reshape(batch, count * size, *head)[:, :queries]


def attention_weights(
    query: Float[Array, 'b q h k'],
    key: Float[Array, 'b n h k'],
    relative: Float[Array, 'o h k'] | None = None,
) -> Float[Array, 'b h q n']:
    """The weights that `attend` gives to each key: float32, every row sums to one."""
    query, divisor = _divided(query)
    way = _BQHK._replace(divisor=divisor)
    return jax.nn.softmax(_logits(query, key, relative, way), axis=-1)


def _divided(query: Float[Array, '... k']) -> tuple[Float[Array, '... k'], float]:
    """The queries divided by a power of two, and what is left of sqrt(k) to divide logits by.

    The power of two takes no rounding, and k numbers of a query in place of n. What is left is 1
    for the usual 64 features of a head, else less than 2.
    """
    mantissa, exponent = math.frexp(math.sqrt(query.shape[-1]))
    return query / 2 ** (exponent - 1), 2 * mantissa


@functools.partial(jax.custom_jvp, nondiff_argnums=(4,))
def _mixed(
    query: Float[Array, '...'],
    key: Float[Array, '...'],
    value: Float[Array, '...'],
    relative: Float[Array, 'o h k'] | None,
    way: _Way,
) -> Float[Array, 'b q h k']:
    """The values, mixed by the weights; by XLA, in the rounding of fused kernels.

    Exponentials, and derivatives of logits, are rounded to the type of the query before the
    products that they enter; sums are float32. The division by the sum of the exponentials comes
    last: k numbers of each query are divided in place of n.
    """
    return _mixed_by(query, key, value, relative, way)[0]


def _mixed_by(
    query: Float[Array, '...'],
    key: Float[Array, '...'],
    value: Float[Array, '...'],
    relative: Float[Array, 'o h k'] | None,
    way: _Way,
) -> tuple[Float[Array, 'b q h k'], Float[Array, 'b h p n'], Float[Array, 'b h q 1']]:
    """The mixed values, the exponentials, and the sum of these over the keys.

    Of the exponentials p and n count padded queries and keys too.
    """
    logits = _logits(query, key, relative, way)
    largest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))  # it cancels
    exponentials = jnp.exp(logits - largest).astype(query.dtype)
    if way.lengths is not None:  # else a GPU writes them in float32 too, to read them for the sum
        exponentials = jax.lax.optimization_barrier(exponentials)
    sums = jnp.einsum(way.mixed, exponentials, value, preferred_element_type=jnp.float32)
    if way.lengths is None:
        total = exponentials.sum(-1, keepdims=True, dtype=jnp.float32)
    else:
        sums = sums[:, :, : way.lengths[0]]
        total = sums[..., -1:]  # the product with the column of ones
    mixed = (sums[..., : query.shape[-1]] / total).astype(query.dtype).transpose(0, 2, 1, 3)
    if way.lengths is not None:  # else the backward pass reads the sums, in float32
        rows = mixed.reshape(-1, math.prod(mixed.shape[2:]))  # in the order that is read next
        mixed = jax.lax.optimization_barrier(rows).reshape(mixed.shape)
    return checkpoint_name(mixed, MIXED), exponentials, total


@_mixed.defjvp
def _(
    way: _Way,
    primals: tuple[Array, Array, Array, Array | None],
    tangents: tuple[Array, Array, Array, Array | None],
) -> tuple[Array, Array]:
    """Of sum_j e_j v_j / s, with e the exponentials of logits l, s their sum and m the quotient:
    (sum_j e_j (v_j dl_j + dv_j) - m sum_j e_j dl_j) / s.
    """
    (query, key, value, relative), (of_query, of_key, of_value, of_relative) = primals, tangents
    mixed, exponentials, total = _mixed_by(query, key, value, relative, way)
    logits = jnp.einsum(way.logits, of_query, key)
    logits += jnp.einsum(way.logits, query, of_key)
    if relative is not None:
        offsets = jnp.einsum(way.by_offset, of_query, relative)
        logits += _by_key(offsets + jnp.einsum(way.by_offset, query, of_relative))
    of_exponentials, of_total = _of_exponentials(exponentials, logits, way.divisor)
    of_sums = [
        jnp.einsum(way.mixed, of_exponentials, value),
        jnp.einsum(way.mixed, exponentials, of_value),
    ]
    queries, features = mixed.shape[1], mixed.shape[3]
    of_sums = [x[:, :, :queries, :features] for x in of_sums]
    of_total = of_total[:, :, :queries]
    # Given `mixed` as it is, the checkpoint within would keep a second copy of it.
    of_mixed = _of_quotient(mixed.transpose(0, 2, 1, 3), of_sums, total, of_total)
    return mixed, of_mixed.transpose(0, 2, 1, 3)


# What the next two are given is kept for the backward pass, not what they make float32 of it.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _of_exponentials(
    exponentials: Float[Array, 'b h q n'], logits: Float[Array, 'b h q n'], divisor: float
) -> tuple[Float[Array, 'b h q n'], Float[Array, 'b h q 1']]:
    """Derivatives of the exponentials, and of their sum, from those of logits."""
    change = exponentials.astype(jnp.float32) * (logits.astype(jnp.float32) / divisor)
    return change.astype(exponentials.dtype), change.sum(-1, keepdims=True)


@functools.partial(jax.checkpoint, prevent_cse=False)
def _of_quotient(
    quotient: Float[Array, 'b h q k'],
    of_dividend: list[Float[Array, 'b h q k']],
    divisor: Float[Array, 'b h q 1'],
    of_divisor: Float[Array, 'b h q 1'],
) -> Float[Array, 'b h q k']:
    """The derivative of a quotient, from those of the summands of its dividend."""
    total = sum(part.astype(jnp.float32) for part in of_dividend)
    change = (total - quotient.astype(jnp.float32) * of_divisor) / divisor
    return change.astype(quotient.dtype)


def _logits(
    query: Float[Array, '...'],
    key: Float[Array, '...'],
    relative: Float[Array, 'o h k'] | None,
    way: _Way,
) -> Float[Array, 'b h q n']:
    """Of queries that are divided by the other part of sqrt(k); float32, -inf for padding."""
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    logits = einsum(way.logits, query, key)
    if relative is not None:
        logits += _by_key(einsum(way.by_offset, query, relative))
    logits /= way.divisor
    keys = logits.shape[-1] if way.lengths is None else way.lengths[1]
    if keys == logits.shape[-1]:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < keys, logits, -jnp.inf)


def _by_key(by_offset: Float[Array, 'b h q o']) -> Float[Array, 'b h q n']:
    """From each query's logits of all q + n - 1 offsets those of the n keys: x[i, j - i + q - 1].

    Where one column is added and q - 1 numbers are left out at the beginning, rows of the length of
    before begin one number earlier in each row.
    """
    *outer, queries, offsets = by_offset.shape
    padded = jnp.pad(by_offset, ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(*outer, -1)
    moved = padded[..., queries - 1 : queries - 1 + queries * offsets]
    return moved.reshape(*outer, queries, offsets)[..., : offsets - queries + 1]
