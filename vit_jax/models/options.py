"""What does not change which network it is: how it is computed, and what training drops."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax

from vit_jax.base.array_types import Array
from vit_jax.base.records import Record

Remat = Literal['none', 'dots', 'block']


@dataclasses.dataclass(kw_only=True)
class Regularization(Record):
    """What is dropped at random while training.

    Dropout follows every dense layer but the query, key and value projections, and the addition
    of positions (appendix B.1). Stochastic depth drops a residual branch of an example with a
    probability that grows linearly from 0 in the first block to the given one in the last.
    """

    dropout: float = 0.0
    stochastic_depth: float = 0.0


@dataclasses.dataclass(kw_only=True)
class Compute(Record):
    """How the same function is computed: precision, memory, kernels.

    Parameters, statistics of the norms, softmax and logits are float32 whatever the dtype. `remat`
    decides what the backward pass recomputes: nothing, all but the large matrix products and
    convolutions (`dots`), or the whole block. `unroll` is the number of blocks in one iteration
    of the scan: unrolled blocks run faster on GPUs, at the cost of compile time.
    """

    dtype: Literal['float32', 'bfloat16'] = 'float32'
    remat: Remat = 'none'
    unroll: int = 1
    attention: Literal['auto', 'xla', 'cudnn'] = 'auto'


# Says of an array (b ...) where its examples lie: the program that knows the devices gives it, so
# that the compiler brings parameters to the examples, and not the other way round.
ActivationSharding = Callable[[Array], Array]


def unsharded(x: Array) -> Array:
    """The array, of which nothing is said."""
    return x


def rematerialized(
    block: type[nn.Module],
    compute: Compute,
    *,
    in_loop: bool = False,
    static_argnums: tuple[int, ...] = (),
) -> type[nn.Module]:
    """The block with the backward pass that `compute.remat` asks for.

    Inside a rolled loop the compiler cannot merge the recomputation with the original by itself;
    elsewhere it is kept from that. `static_argnums` counts the module itself as 0.
    """
    if compute.remat == 'none':
        return block
    return nn.remat(
        block, policy=_policy(compute), prevent_cse=not in_loop, static_argnums=static_argnums
    )


def _policy(compute: Compute) -> Callable[..., Any]:
    if compute.remat == 'block':
        return jax.checkpoint_policies.nothing_saveable
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def policy(primitive: Any, *operands: Any, **params: Any) -> Any:
        return primitive.name == 'conv_general_dilated' or dots(primitive, *operands, **params)

    return policy
