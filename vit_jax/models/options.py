"""What does not change which network it is: how it is computed, and what training drops."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import jax

from vit_jax.base import Record, require_between
from vit_jax.models.attention import MIXED, Implementation

Remat = Literal['none', 'dots', 'block']
POLICIES: tuple[Remat, ...] = get_args(Remat)  # what recomputes least comes first
Layout = Literal['flat', 'batched']
LastBlock = Literal['whole', 'class_tokens']
_T = TypeVar('_T', bound=Callable[..., Any])


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

    Parameters, statistics of the norms, softmax and logits are float32 whatever the dtype. With
    `auto`, training computes in bfloat16 on TPUs and on NVIDIA GPUs of compute capability 8.0
    (Ampere) or newer, and in float32 on other devices; `load`, `evaluate`, `predict` and `fewshot`
    compute in float32. `remat` decides what the backward pass recomputes: nothing, all but the
    large matrix products and convolutions (`dots`), or the whole block. Unrolled blocks run faster
    on GPUs and take longer to compile. `attention=blockwise` is for long sequences on any device.
    Where the head reads class tokens alone, `last_block=class_tokens` computes the last block's
    queries, attention and MLP for these only; its keys and values are those of all tokens. What is
    `auto` is chosen for the devices (models/choices.py).
    """

    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # of activations and products
    remat: Remat | Literal['auto'] = 'auto'  # dots: all but products are recomputed; block: all
    unroll: int | Literal['auto'] = 'auto'  # blocks in one iteration of the scan
    attention: Implementation = 'auto'  # cudnn, padded: GPUs; head_major: CPUs; splash: TPUs
    layout: Layout | Literal['auto'] = 'auto'  # of tokens in the layers that treat each alone
    last_block: LastBlock | Literal['auto'] = 'auto'  # class_tokens: for these alone

    @property
    def is_for_cpu(self) -> bool:
        """Is this computed in the ways that only CPUs are fast at? `head_major` says so."""
        return self.attention == 'head_major'

    @property
    def for_few_queries(self) -> 'Compute':
        """The same, with attention by XLA: fused kernels are made for many queries."""
        return self if self.is_for_cpu else dataclasses.replace(self, attention='xla')

    def check(self) -> None:
        if self.unroll != 'auto':
            require_between(self, 'unroll', low=1)


# Of a program that any device may be given, or none: nothing is chosen for one.
ANYWHERE = Compute(
    dtype='float32',
    remat='none',
    unroll=1,
    attention='xla',
    layout='batched',
    last_block='whole',
)


def rematerialized(
    block: _T, compute: Compute, *, in_loop: bool = False, by: Any = jax.checkpoint
) -> _T:
    """The block with the backward pass that `compute.remat` asks for.

    A block is a function; where it is a module, `by` is `nn.remat`.

    XLA would merge the recomputation with the original one (common subexpressions) and keep what
    remat frees. Barriers prevent it; a rolled loop needs none: the two lie in different loops.
    """
    if compute.remat == 'none':
        return block
    policies = {'dots': _keep_products, 'block': jax.checkpoint_policies.nothing_saveable}
    policy = policies[compute.remat]
    rematerialized_block: _T = by(block, prevent_cse=not in_loop, policy=policy)
    return rematerialized_block


def _keep_products(primitive: Any, *operands: Any, **params: Any) -> Any:
    """Keeps convolutions, matrix products with parameters, and what attention gives.

    Attention's own products have batch dimensions. Its weights are computed again.
    """
    policies = jax.checkpoint_policies
    dots, named = policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(MIXED)
    is_kept = dots(primitive, *operands, **params) or named(primitive, *operands, **params)
    return primitive.name == 'conv_general_dilated' or is_kept
