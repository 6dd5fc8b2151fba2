"""How a model is computed: precision, memory and kernels, and what `auto` selects."""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from vit_jax.base import Record, require, require_between
from vit_jax.models.attention import LONG, OUTPUT, Implementation, supports_cudnn
from vit_jax.models.config import ModelConfig, ResNetConfig, ViTConfig
from vit_jax.models.positions import RELATIVE

Remat = Literal['none', 'dots', 'block']
POLICIES: tuple[Remat, ...] = get_args(Remat)  # from least to most recomputation
Layout = Literal['flat', 'batched']
LastBlock = Literal['whole', 'class_tokens']
# The share of the free memory that activations may take: memory is fragmented.
_SHARE = 0.8
_FUSED = {'cudnn': 'gpu', 'splash': 'tpu'}  # the platform of each fused kernel
# After a loop, a separate last block takes a third longer to compile and saves less the more blocks
# there are: 6 % of the estimated cycles of B/16 on a v5e; L/16 takes 3 % more.
_FEW_BLOCKS = 16


@dataclasses.dataclass(kw_only=True)
class Regularization(Record):
    """What training drops at random.

    Dropout follows every dense layer except the query, key and value projections, and the addition
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
    on GPUs and take longer to compile. If the head reads class tokens only,
    `last_block=class_tokens` computes the last block's queries, attention and MLP for these only;
    its keys and values are those of all tokens.
    """

    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # of activations and products
    remat: Remat | Literal['auto'] = 'auto'  # dots: all but products are recomputed; block: all
    unroll: int | Literal['auto'] = 'auto'  # blocks in one iteration of the loop
    attention: Implementation | Literal['auto'] = 'auto'  # cudnn: GPUs; splash: TPUs
    layout: Layout | Literal['auto'] = 'auto'  # flat: tokens are rows of one matrix
    last_block: LastBlock | Literal['auto'] = 'auto'  # class_tokens: only these are computed

    def check(self) -> None:
        require_between(self, 'unroll', low=1)

    def __str__(self) -> str:
        return ', '.join(f'{name}={value}' for name, value in vars(self).items())


# Plain XLA, without device-specific choices.
PORTABLE = Compute(
    dtype='float32', remat='none', unroll=1, attention='xla', layout='batched', last_block='whole'
)
# Computes a function's matrix products in full float32 precision. By default GPUs use TF32, and
# TPUs bfloat16.
with_exact_products = jax.default_matmul_precision('highest')


def has_fast_bfloat16(device: Any) -> bool:
    """Returns whether the device multiplies bfloat16 faster than float32.

    TPUs do, and NVIDIA GPUs of compute capability 8.0 (Ampere) or newer. AMD GPUs were not tested.
    """
    major = str(getattr(device, 'compute_capability', '')).partition('.')[0]
    return device.platform == 'tpu' or (major.isdecimal() and int(major) >= 8)


def resolve_compute(
    compute: Compute,
    model: ModelConfig,
    *,
    platform: str,
    regularization: Regularization | None = None,
    memory: float | None = None,
) -> Compute:
    """Replaces each `auto` by the fastest choice that fits into memory.

    Args:
      compute: The options.
      model: The architecture.
      platform: Platform of the devices, such as `cpu`, `gpu`, `tpu`.
      regularization: What training drops at random. If something is dropped, the last block is
        `whole`: the same is then dropped on all devices.
      memory: Bytes for one image's activations on a device. `math.inf`: unknown. None: the model is
        not trained.

    Returns:
      The options without `auto`. The dtype is float32 unless it is given.

    Raises:
      UserError: If the model or the platform does not support an option.
    """
    platform = 'gpu' if platform in ('cuda', 'rocm') else platform
    compute = _set_auto(compute, dtype='float32', layout='batched' if platform == 'tpu' else 'flat')
    if isinstance(model, ViTConfig):
        # A GPU is fastest without the copies of a loop.
        compute = _set_auto(compute, unroll=model.depth if platform == 'gpu' else 1)
        draws = regularization not in (None, Regularization())
        _check(compute, model, platform, draws=draws)
        few = model.depth <= max(_FEW_BLOCKS, int(compute.unroll))
        separate = few and model.num_tokens_read is not None and not draws
        attention = _fastest_attention(model, platform, compute.dtype)
        last_block = 'class_tokens' if separate else 'whole'
        compute = _set_auto(compute, attention=attention, last_block=last_block)
    compute = _set_auto(compute, unroll=1, attention='xla', last_block='whole')
    return _set_auto(compute, remat=_least_remat(model, compute, platform, memory))


def _set_auto(compute: Compute, **choices: Any) -> Compute:
    """Replaces `auto` in these fields."""
    values = {name: v for name, v in choices.items() if getattr(compute, name) == 'auto'}
    return dataclasses.replace(compute, **values)


def _check(compute: Compute, model: ViTConfig, platform: str, *, draws: bool) -> None:
    kernel, needed = compute.attention, _FUSED.get(compute.attention, platform)
    wrong, instead = f'compute.attention={kernel}:', 'set attention to auto'
    devices = f'needs a {needed.upper()}, got a {platform.upper()}'
    require(platform == needed, f'{wrong} {devices}; {instead}')
    fits = kernel in ('auto', 'xla') or model.positions not in RELATIVE
    require(fits, f'{wrong} does not support {model.positions} positions; {instead}')
    fits = kernel != 'cudnn' or compute.dtype == 'bfloat16'
    dtype = f'computes in bfloat16, got compute.dtype={compute.dtype}'
    require(fits, f'{wrong} {dtype}; {instead}, or dtype to bfloat16')
    if compute.last_block == 'class_tokens':
        wrong, instead = 'compute.last_block=class_tokens:', 'set last_block to auto'
        heads = f'heads read patches too (pool={model.pool}, patch_outputs={model.patch_outputs})'
        require(model.num_tokens_read is not None, f'{wrong} {heads}; {instead}')
        require(not draws, f'{wrong} dropout and stochastic depth need whole blocks; {instead}')


def _fastest_attention(model: ViTConfig, platform: str, dtype: str) -> Implementation:
    tokens, heads = model.num_tokens, model.num_heads
    if model.positions in RELATIVE:
        return 'xla'
    if platform == 'gpu' and supports_cudnn(tokens, heads, model.width // heads, dtype):
        return 'cudnn'
    if tokens > LONG:
        return 'splash' if platform == 'tpu' else 'blockwise'
    return 'xla'


def _least_remat(
    model: ModelConfig, compute: Compute, platform: str, memory: float | None
) -> Remat:
    """Returns the policy with the least recomputation that fits and is fast."""
    if memory is None:
        return 'none'
    # A CPU is fastest if little is kept in memory. So is a TPU with a loop: a step of B/16 on a v5e
    # takes 207 M estimated cycles, with `dots` 142 M.
    has_loop = isinstance(model, ViTConfig) and compute.unroll == 1
    fastest: Remat = 'dots' if platform == 'cpu' or (platform == 'tpu' and has_loop) else 'none'
    if isinstance(model, ResNetConfig):
        return fastest
    needed, candidates = activations(model, compute), POLICIES[POLICIES.index(fastest) :]
    fitting = (remat for remat in candidates if needed[remat] <= _SHARE * memory)
    return next(fitting, POLICIES[-1])


def activations(model: ViTConfig, compute: Compute) -> dict[str, int]:
    """Estimates the bytes of one image's activations when the backward pass starts, by `remat`.

    Each block keeps vectors of the width of a token and of the MLP's hidden layer, and without a
    fused kernel the weights of attention. With layout `batched`, norms and GELU also keep their
    intermediates. One whole block is in memory under every policy: the backward pass starts with
    it. The convolutions of a hybrid are not counted.
    """
    size, tokens, width = jnp.dtype(compute.dtype).itemsize, model.num_tokens, model.width
    hidden = model.mlp_dim * (2 if model.gelu is None else 1)
    weights = model.num_heads * tokens**2 * (8 + size) if compute.attention == 'xla' else 0
    vectors = 8 * width + 2 * hidden
    if compute.layout == 'batched':
        vectors = 17 * width + 5 * hidden
    one_block = tokens * vectors * size + weights
    products = 6 * width + hidden + (0 if compute.attention == 'cudnn' else width)
    kept = {'none': one_block, 'dots': tokens * products * size, 'block': tokens * width * size}
    blocks = model.depth - (compute.last_block == 'class_tokens')
    return {remat: blocks * kept[remat] + one_block for remat in POLICIES}


def rematerialized(
    block: Any, compute: Compute, *, in_loop: bool = False, by: Any = jax.checkpoint
) -> Any:
    """Returns the block with the backward pass of `compute.remat`.

    Args:
      block: A function, or a module if `by` is `nn.remat`.
      compute: The options.
      in_loop: Whether the block runs in a rolled loop. Elsewhere barriers keep XLA from merging
        the recomputation with the original computation (common subexpressions).
      by: The transformation.
    """
    if compute.remat == 'none':
        return block
    policies = {'dots': _keep_products, 'block': jax.checkpoint_policies.nothing_saveable}
    return by(block, prevent_cse=not in_loop, policy=policies[compute.remat])


def _keep_products(primitive: Any, *operands: Any, **params: Any) -> Any:
    """Keeps convolutions, products with parameters, and the output of attention.

    The products inside attention have batch dimensions and are recomputed.
    """
    policies = jax.checkpoint_policies
    dots, named = policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(OUTPUT)
    is_kept = dots(primitive, *operands, **params) or named(primitive, *operands, **params)
    return primitive.name == 'conv_general_dilated' or is_kept
