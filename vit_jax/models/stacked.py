"""Blocks in turn, whose parameters lie stacked in one array each."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.base import Array, Float, Int, require
from vit_jax.models.options import Compute, rematerialized_function


def in_turn(
    each: Callable[[Array, Any], Array],
    last: Callable[[Array, Any], Array],
    x: Float[Array, 'b n d'],
    stacked: Any,
    *,
    depth: int,
    compute: Compute,
) -> Float[Array, 'b r d']:
    """`x` through `each`, with every slice of the stacked arrays but the last; then through `last`.

    Slices are taken by a number that the loop carries. Of `stacked[:-1]` XLA would write a copy,
    and of its gradient another array than of that of the last: of S/16, 155 MB more.
    """
    others = {len(leaf) for leaf in jax.tree.leaves(stacked)} - {depth}
    require(not others, f'encoder/block: parameters of {others} blocks, the network has {depth}')
    assert compute.unroll != 'auto'  # `build` chose

    def own(i: Int[Array, '']) -> Any:
        take = functools.partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False)
        return jax.tree.map(take, stacked)

    def step(x: Float[Array, 'b n d'], i: Int[Array, '']) -> Float[Array, 'b n d']:
        return each(x, own(i))

    step = rematerialized_function(step, compute, in_loop=compute.unroll == 1)
    carry = x, jnp.int32(0)
    if depth > 1:
        carry, _ = jax.lax.scan(
            lambda carry, _: ((step(*carry), carry[1] + 1), None),
            carry,
            length=depth - 1,
            unroll=min(compute.unroll, depth - 1),
        )
    x, i = carry
    return last(x, own(i))
