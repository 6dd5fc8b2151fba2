"""Runs blocks one after another, whose parameters are stacked along a leading axis."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.base import Array, Float, Int, require
from vit_jax.models.options import Compute, rematerialized

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
    found = ' and '.join(map(str, sorted(others)))
    wrong = f'encoder/block: parameters of {found} blocks, the network has {depth}'
    require(not others, wrong)
    assert compute.unroll != 'auto'  # `build` chose
    unroll = min(compute.unroll, depth)
    if depth == 1:  # `jax.disable_jit` has no scan of nothing
        return last(x, jax.tree.map(lambda leaf: leaf[0], stacked))
    if unroll == depth:
        return _without_loop(rematerialized(each, compute), last, x, stacked, depth)

    def own(i: Int[Array, '']) -> Any:
        take = functools.partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False)
        return jax.tree.map(take, stacked)

    def numbered(x: Float[Array, 'b n d'], i: Int[Array, '']) -> Float[Array, 'b n d']:
        return each(x, own(i))

    # Indexed by a counter that the loop carries. A scan over `stacked[:-1]` would copy the
    # parameters, and keep their gradients in another array than those of the last block: 155 MB
    # more of S/16. A scan over `jnp.arange` does the same.
    step = rematerialized(numbered, compute, in_loop=unroll == 1)
    (x, i), _ = jax.lax.scan(
        lambda carry, _: ((step(*carry), carry[1] + 1), None),
        (x, jnp.int32(0)),
        length=depth - 1,
        unroll=unroll,
    )
    return last(x, own(i))


def _without_loop(
    each: Step, last: Step, x: Float[Array, 'b n d'], stacked: Any, depth: int
) -> Float[Array, 'b r d']:
    """The stacked arrays are split in two, and the gradient of each block is written once.

    Indexed, as in a loop, it would be added to an array of the gradients of all blocks: 62 MB an
    image more of L/16, 128 images, on a GPU.
    """
    leaves, structure = jax.tree.flatten(stacked)
    parts = [jax.lax.split(leaf, (depth - 1, 1)) for leaf in leaves]
    first, own = (jax.tree.unflatten(structure, part) for part in zip(*parts, strict=True))
    x, _ = jax.lax.scan(lambda x, own: (each(x, own), None), x, first, unroll=True)
    return last(x, jax.tree.map(lambda leaf: leaf[0], own))
