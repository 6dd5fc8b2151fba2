"""What does not change which network it is: how it is computed, and what training drops."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax

from vit_jax.base import Array, Record, require_between
from vit_jax.models.attention import MIXED, Implementation

Remat = Literal['none', 'dots', 'block']
POLICIES: tuple[Remat, ...] = 'none', 'dots', 'block'  # of rematerialisation, fastest first
Layout = Literal['flat', 'batched']
LastBlock = Literal['whole', 'read']


@dataclasses.dataclass(kw_only=True)
class Regularization(Record):
    """What is dropped at random while training.

    Dropout follows every dense layer but the query, key and value projections, and the addition
    of positions before the blocks (appendix B.1). Stochastic depth drops a residual branch of an
    example with a probability that grows linearly from 0 in the first block to the given one in
    the last.
    """

    dropout: float = 0.0  # the probability
    stochastic_depth: float = 0.0  # the probability in the last block

    def check(self) -> None:
        require_between(self, 'dropout', 'stochastic_depth', low=0, below=1)


@dataclasses.dataclass(kw_only=True)
class Compute(Record):
    """How the same function is computed: precision, memory, kernels.

    Parameters, statistics of the norms, softmax and logits are float32 whatever the dtype. `remat`
    decides what the backward pass recomputes: nothing, all but the large matrix products and
    convolutions (`dots`), or the whole block. Unrolled blocks run faster on GPUs, compile longer.
    `attention=blockwise` is for long sequences on any device. Where the head reads the class token
    alone, `last_block=read` computes the last block's queries, mixing and MLP for that token only.
    What is `auto` is chosen for the devices (models/choices.py).
    """

    dtype: Literal['float32', 'bfloat16'] = 'float32'  # of activations and products
    remat: Remat | Literal['auto'] = 'auto'  # dots: all but products is recomputed; block: all
    unroll: int | Literal['auto'] = 'auto'  # blocks in one iteration of the scan
    attention: Implementation = 'auto'  # cudnn, padded: GPUs; head_major: CPUs; splash: TPUs
    layout: Layout | Literal['auto'] = 'auto'  # of tokens in the layers that treat each alone
    last_block: LastBlock | Literal['auto'] = 'auto'  # read: only of tokens that the head reads

    @property
    def is_for_cpu(self) -> bool:
        """Is this computed in the ways that only CPUs are fast at? `head_major` says so."""
        return self.attention == 'head_major'

    @property
    def of_few_queries(self) -> 'Compute':
        """The same, with attention by XLA: fused kernels are made for many queries."""
        return self if self.is_for_cpu else dataclasses.replace(self, attention='xla')

    def check(self) -> None:
        if self.unroll != 'auto':
            require_between(self, 'unroll', low=1)


# Of a program that any device may be given, or none: nothing is chosen for one.
ANYWHERE = Compute(remat='none', unroll=1, attention='xla', layout='batched', last_block='whole')


def rematerialized(
    block: type[nn.Module], compute: Compute, *, in_loop: bool = False
) -> type[nn.Module]:
    """The block with the backward pass that `compute.remat` asks for."""
    rule = _recomputing(compute, in_loop)
    return block if rule is None else nn.remat(block, **rule)


def rematerialized_function(
    function: Callable[..., Array], compute: Compute, *, in_loop: bool = False
) -> Callable[..., Array]:
    """The same of a pure function."""
    rule = _recomputing(compute, in_loop)
    return function if rule is None else jax.checkpoint(function, **rule)


def _recomputing(compute: Compute, in_loop: bool) -> dict[str, Any] | None:
    """What remat is told; None: nothing is recomputed.

    XLA would merge the recomputation with the original one (common subexpressions) and keep what
    remat frees. Barriers prevent it; a rolled loop needs none: the two lie in different loops.
    """
    if compute.remat == 'none':
        return None
    policies = {'dots': _keep_products, 'block': jax.checkpoint_policies.nothing_saveable}
    return {'prevent_cse': not in_loop, 'policy': policies[compute.remat]}


def _keep_products(primitive: Any, *operands: Any, **params: Any) -> Any:
    """Keeps convolutions, matrix products with parameters, and what attention gives.

    Attention's own products have batch dimensions. Its weights are computed again.
    """
    policies = jax.checkpoint_policies
    dots, named = policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(MIXED)
    is_kept = dots(primitive, *operands, **params) or named(primitive, *operands, **params)
    return primitive.name == 'conv_general_dilated' or is_kept
