"""Compute options of a model (precision, memory, kernels), and what `auto` selects."""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from vit_jax.base import Record, UserError, is_off, require_between
from vit_jax.models.attention import LONG_SEQUENCE, SAVED, Implementation, supports_cudnn
from vit_jax.models.config import ModelConfig, ResNetConfig, ViTConfig
from vit_jax.models.positions import RELATIVE

Remat = Literal['none', 'dots', 'block']
POLICIES: tuple[Remat, ...] = get_args(Remat)  # ordered by recomputation, least first
Layout = Literal['flat', 'batched']
LastBlock = Literal['whole', 'class_tokens']
_MEMORY_FRACTION = 0.8  # fraction of the free memory for activations; fragmentation needs the rest
_KERNEL_PLATFORMS = {'cudnn': 'gpu', 'splash': 'tpu'}  # platform of each fused kernel
# If a loop has more blocks than this, `last_block=auto` becomes `whole`. A separate last block
# makes compilation a third longer, and saves less time in deeper models: on a v5e, B/16 takes 6 %
# fewer estimated cycles with it, L/16 takes 3 % more.
_FEW_BLOCKS = 16


@dataclasses.dataclass(kw_only=True)
class Regularization(Record):
    """Dropout, stochastic depth and PatchDropout, which act only in training.

    In each block, dropout follows the output layer of attention and both layers of the MLP. It is
    also applied once before the blocks, after positions are added (ViT paper, appendix B.1).
    Stochastic depth drops residual branches per example. Its probability grows linearly from 0 in
    the first block to `stochastic_depth` in the last, or is the same in all blocks (`constant`).

    PatchDropout (Liu et al. 2022; FLIP) removes patches after positions are added, so that the
    blocks compute fewer tokens. Each example keeps `(1 - patch_dropout)` of its patches, rounded,
    at random. Class tokens and registers are always kept.
    """

    dropout: float = 0.0  # dropout probability
    stochastic_depth: float = 0.0  # drop probability of residual branches in the last block
    stochastic_depth_kind: Literal['linear', 'constant'] = (
        'linear'  # constant: the same in all blocks
    )
    patch_dropout: float = 0.0  # fraction of the patches that are removed in training

    def check(self) -> None:
        require_between(self, 'dropout', 'stochastic_depth', low=0, high=0.999999)  # in float32
        require_between(self, 'patch_dropout', low=0, below=1)

    @property
    def is_random_in_blocks(self) -> bool:
        """Whether blocks draw random numbers."""
        return not (is_off(self.dropout) and is_off(self.stochastic_depth))

    def num_kept(self, patches: int) -> int:
        """Returns the number of patches that an example keeps in training."""
        return round((1 - self.patch_dropout) * patches)

    def num_tokens(self, model: ViTConfig) -> int:
        """Returns the sequence length in training."""
        patches = model.num_tokens - model.num_prefix_tokens
        return model.num_prefix_tokens + self.num_kept(patches)

    def check_model(self, model: ViTConfig) -> None:
        """Raises UserError if PatchDropout is on and the model does not support it."""
        if self.patch_dropout == 0:
            return
        field = f'regularization.patch_dropout={self.patch_dropout:g}'
        if model.patch_outputs is not None:
            raise UserError(
                f'{field}: not supported with patch_outputs (config.objective), which predicts all '
                'patches; set it to 0'
            )
        if model.positions in RELATIVE:
            raise UserError(
                f'{field}: not supported with positions={model.positions}, whose offsets need all '
                'patches; set it to 0'
            )
        patches = model.num_tokens - model.num_prefix_tokens
        if self.num_kept(patches) == 0:
            raise UserError(
                f'{field}: keeps no patch of {patches}; expected at least one; set a smaller rate'
            )


@dataclasses.dataclass(kw_only=True)
class Compute(Record):
    """Precision, memory and kernels; the model's function stays the same up to rounding.

    `dtype=auto` trains in bfloat16 on TPUs and on NVIDIA GPUs of compute capability 8.0 (Ampere) or
    newer, and in float32 on other devices. By default, `load`, `evaluate`, `predict` and `fewshot`
    compute in float32. Parameters, norm statistics, softmax and logits are always float32.

    `remat` selects what the backward pass recomputes: nothing (`none`), everything except products
    with parameters, convolutions and attention outputs (`dots`), or whole blocks (`block`).
    Unrolled blocks run faster on GPUs and take longer to compile. If the head reads class tokens
    only, `last_block=class_tokens` computes keys and values of the last block for all tokens, and
    its queries, attention and MLP for class tokens only.
    """

    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # of activations and matrix products
    remat: Remat | Literal['auto'] = 'auto'  # dots: all but matrix products; block: all
    unroll: int | Literal['auto'] = 'auto'  # blocks per iteration of the loop over blocks
    attention: Implementation | Literal['auto'] = 'auto'  # cudnn: only GPUs; splash: only TPUs
    layout: Layout | Literal['auto'] = 'auto'  # flat: tokens are rows of a matrix; batched: (b n d)
    last_block: LastBlock | Literal['auto'] = 'auto'  # class_tokens: outputs of class tokens only

    def check(self) -> None:
        require_between(self, 'unroll', low=1)

    def __str__(self) -> str:
        return ', '.join(f'{name}={value}' for name, value in vars(self).items())


# Plain XLA, which runs on every device.
PORTABLE = Compute(
    dtype='float32', remat='none', unroll=1, attention='xla', layout='batched', last_block='whole'
)
# Decorates a function so that its matrix products have full float32 precision. By default, GPUs use
# TF32 for them and TPUs bfloat16.
with_highest_precision = jax.default_matmul_precision('highest')


def has_fast_bfloat16(device: Any) -> bool:
    """Returns True for TPUs and for NVIDIA GPUs of compute capability 8.0 (Ampere) or newer.

    They multiply bfloat16 faster than float32. AMD GPUs were not tested.
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
    """Replaces each `auto` by the fastest option that fits into memory.

    Args:
      compute: Options, some of which may be `auto`.
      model: Architecture.
      platform: Platform of the devices, such as `cpu`, `gpu`, `tpu`.
      regularization: With dropout or stochastic depth, `last_block=auto` becomes `whole`, so that
        random draws do not depend on the device. PatchDropout lowers the memory estimate.
      memory: Bytes per device for the activations of one image; `math.inf` if unknown, None if the
        model is not trained.

    Returns:
      Options without `auto`. An `auto` dtype becomes float32.

    Raises:
      UserError: If the model or the platform does not support an option.
    """
    platform = 'gpu' if platform in ('cuda', 'rocm') else platform
    regularization = regularization or Regularization()
    layout = 'batched' if platform == 'tpu' else 'flat'
    compute = replace_auto(compute, dtype='float32', layout=layout)
    if isinstance(model, ViTConfig):
        # A rolled loop copies activations, which costs time on GPUs.
        compute = replace_auto(compute, unroll=model.depth if platform == 'gpu' else 1)
        is_random = regularization.is_random_in_blocks
        _check_supported(compute, model, platform, is_random=is_random)
        has_few_blocks = model.depth <= max(_FEW_BLOCKS, int(compute.unroll))
        splits_last_block = has_few_blocks and model.num_tokens_read is not None and not is_random
        attention = _fastest_attention(model, platform, compute.dtype)
        last_block = 'class_tokens' if splits_last_block else 'whole'
        compute = replace_auto(compute, attention=attention, last_block=last_block)
    # These options of a ViT have no effect on a ResNet.
    compute = replace_auto(compute, unroll=1, attention='xla', last_block='whole')
    remat = _least_remat(model, compute, regularization, platform, memory)
    return replace_auto(compute, remat=remat)


def replace_auto(compute: Compute, **choices: Any) -> Compute:
    """Replaces `auto` in the fields of `choices`."""
    values = {name: v for name, v in choices.items() if getattr(compute, name) == 'auto'}
    return dataclasses.replace(compute, **values) if values else compute


def _check_supported(compute: Compute, model: ViTConfig, platform: str, *, is_random: bool) -> None:
    """Raises UserError for unsupported options; dropout and stochastic depth set `is_random`."""
    kernel = compute.attention
    field = f'compute.attention={kernel}'
    remedy = 'set compute.attention=auto'
    needed = _KERNEL_PLATFORMS.get(kernel, platform)
    if platform != needed:
        raise UserError(f'{field}: expected a {needed.upper()}, got a {platform.upper()}; {remedy}')
    if kernel not in ('auto', 'xla') and model.positions in RELATIVE:
        raise UserError(f'{field}: not supported with positions={model.positions}; {remedy}')
    if kernel == 'cudnn' and compute.dtype != 'bfloat16':
        raise UserError(
            f'{field}: expected compute.dtype=bfloat16, got {compute.dtype}; set it, or {remedy}'
        )
    if compute.last_block == 'class_tokens':
        _check_class_tokens_suffice(model, is_random=is_random)


def _check_class_tokens_suffice(model: ViTConfig, *, is_random: bool) -> None:
    """Raises UserError if the model does not support `last_block=class_tokens`."""
    field = 'compute.last_block=class_tokens'
    remedy = 'set compute.last_block=auto'
    if model.num_tokens_read is None:
        raise UserError(
            f'{field}: the head reads patches (pool={model.pool}, '
            f'patch_outputs={model.patch_outputs}); {remedy}'
        )
    if is_random:
        raise UserError(f'{field}: not supported with dropout or stochastic depth; {remedy}')


def _fastest_attention(model: ViTConfig, platform: str, dtype: str) -> Implementation:
    if model.positions in RELATIVE:
        return 'xla'
    head_size = model.width // model.num_heads
    if platform == 'gpu' and supports_cudnn(model.num_tokens, model.num_heads, head_size, dtype):
        return 'cudnn'
    if model.num_tokens > LONG_SEQUENCE:
        return 'splash' if platform == 'tpu' else 'blockwise'
    return 'xla'


def _least_remat(
    model: ModelConfig,
    compute: Compute,
    regularization: Regularization,
    platform: str,
    memory: float | None,
) -> Remat:
    """Returns the fastest policy that fits, or the one that needs least memory if none does."""
    if memory is None:
        return 'none'
    # `dots` is the fastest policy on CPUs, and on TPUs with a loop: a step of B/16 on a v5e takes
    # 142 M estimated cycles with `dots`, 207 M with `none`.
    has_loop = isinstance(model, ViTConfig) and compute.unroll == 1
    fastest: Remat = 'dots' if platform == 'cpu' or (platform == 'tpu' and has_loop) else 'none'
    if isinstance(model, ResNetConfig):
        return fastest
    needed = activation_bytes(model, compute, regularization)
    candidates = POLICIES[POLICIES.index(fastest) :]
    fitting = (remat for remat in candidates if needed[remat] <= _MEMORY_FRACTION * memory)
    return next(fitting, POLICIES[-1])


def activation_bytes(
    model: ViTConfig, compute: Compute, regularization: Regularization | None = None
) -> dict[str, int]:
    """Estimates activation memory per image at the start of the backward pass, in bytes.

    For each token, a block stores 8 vectors of the token width and 2 of the MLP width. With layout
    `batched`, norms and GELU also store intermediates. With `attention=xla`, attention weights are
    stored. Each estimate includes all intermediates of the block where the backward pass
    starts. The convolutions of a hybrid are not counted.

    Returns:
      Bytes for each `remat` policy.
    """
    tokens = (regularization or Regularization()).num_tokens(model)
    size = jnp.dtype(compute.dtype).itemsize
    width = model.width
    hidden = model.mlp_dim * (2 if model.gelu is None else 1)
    weights = model.num_heads * tokens**2 * (8 + size) if compute.attention == 'xla' else 0
    vectors = 8 * width + 2 * hidden
    if compute.layout == 'batched':
        vectors = 17 * width + 5 * hidden
    one_block = tokens * vectors * size + weights
    products = 6 * width + hidden + (0 if compute.attention == 'cudnn' else width)
    saved = {'none': one_block, 'dots': tokens * products * size, 'block': tokens * width * size}
    blocks = model.depth - (compute.last_block == 'class_tokens')
    return {remat: blocks * saved[remat] + one_block for remat in POLICIES}


def apply_remat(
    block: Any, compute: Compute, *, in_loop: bool = False, wrap: Any = jax.checkpoint
) -> Any:
    """Applies the policy `compute.remat` to a block.

    Args:
      block: A function, or a module if `wrap` is `nn.remat`.
      compute: Options without `auto`.
      in_loop: Whether the block runs in a rolled loop. If not, barriers keep XLA's common
        subexpression elimination from undoing the recomputation.
      wrap: `jax.checkpoint` or `nn.remat`.
    """
    if compute.remat == 'none':
        return block
    policies = {'dots': _keep_products, 'block': jax.checkpoint_policies.nothing_saveable}
    return wrap(block, prevent_cse=not in_loop, policy=policies[compute.remat])


def _keep_products(primitive: Any, *operands: Any, **params: Any) -> Any:
    """Remat policy `dots`: saves convolutions, products with parameters, and attention outputs.

    The products inside attention have batch dimensions and are recomputed.
    """
    is_product = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    is_attention = jax.checkpoint_policies.save_only_these_names(SAVED)
    return (
        primitive.name == 'conv_general_dilated'
        or is_product(primitive, *operands, **params)
        or is_attention(primitive, *operands, **params)
    )
