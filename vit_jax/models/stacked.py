"""Blocks in turn, whose parameters lie stacked in one array each."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.base import Array, Float, Int, require
from vit_jax.models.options import Compute, rematerialized_function

Step = Callable[[Array, Any], Array]  # of tokens (b n d) and a block's own parameters


def in_turn(
    each: Step,
    last: Step,
    x: Float[Array, 'b n d'],
    stacked: Any,
    *,
    depth: int,
    compute: Compute,
) -> Float[Array, 'b r d']:
    """`x` through `each`, with every slice of the stacked arrays but the last; then through `last`.

    Raises UserError for arrays of another depth.
    """
    others = {len(leaf) for leaf in jax.tree.leaves(stacked)} - {depth}
    require(not others, f'encoder/block: parameters of {others} blocks, the network has {depth}')
    assert compute.unroll != 'auto'  # `build` chose
    unroll = min(compute.unroll, depth)
    if unroll == depth:
        return _cut(rematerialized_function(each, compute), last, x, stacked, depth)

    def own(i: Int[Array, '']) -> Any:
        take = functools.partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False)
        return jax.tree.map(take, stacked)

    def numbered(x: Float[Array, 'b n d'], i: Int[Array, '']) -> Float[Array, 'b n d']:
        return each(x, own(i))

    # By a number that the loop carries: of `stacked[:-1]` XLA would write a copy, and of its
    # gradient another array than of that of the last; of S/16, 155 MB more.
    step = rematerialized_function(numbered, compute, in_loop=unroll == 1)
    (x, i), _ = jax.lax.scan(
        lambda carry, _: ((step(*carry), carry[1] + 1), None),
        (x, jnp.int32(0)),
        length=depth - 1,
        unroll=unroll,
    )
    return last(x, own(i))


def _cut(
    each: Step, last: Step, x: Float[Array, 'b n d'], stacked: Any, depth: int
) -> Float[Array, 'b r d']:
    """Without a loop: the arrays are cut in two, so that gradients are written once, side by side.

    By numbers each block's gradient would be added to the others: 47 MB an image of L/16.
    """
    leaves, structure = jax.tree.flatten(stacked)
    cut = [jax.lax.split(leaf, (depth - 1, 1)) for leaf in leaves]
    first, own = (jax.tree.unflatten(structure, part) for part in zip(*cut, strict=True))
    x, _ = jax.lax.scan(lambda x, own: (each(x, own), None), x, first, unroll=True)
    return last(x, jax.tree.map(lambda leaf: leaf[0], own))
