"""What `auto` means in `Compute`: chosen for the devices, the network and the batch.

The reasons were measured on CPUs and on one GPU (`python -m benchmarks.peers`), and counted or
estimated in programs for GPUs and TPUs (`python -m benchmarks.step_program`).
"""

import dataclasses
from typing import Any, NamedTuple

from vit_jax.base import require
from vit_jax.models.attention import LONG, Implementation
from vit_jax.models.options import POLICIES, Compute, Regularization, Remat
from vit_jax.models.resnet import ResNetConfig
from vit_jax.models.vit_config import ViTConfig

# Of the memory that the state leaves, activations may take this: the compiler's arrays do not fill
# memory without gaps.
_SHARE = 0.8
_KERNELS = {'cudnn': 'gpu', 'splash': 'tpu'}  # the devices that each fused kernel is for
# After a loop, a last block of its own takes a third longer to compile, and saves the less the
# more blocks there are: on a v5e 6 % of the estimated cycles of B/16; L/16 takes 3 % more.
_FEW_BLOCKS = 16
_BYTES = {'float32': 4, 'bfloat16': 2}


class Load(NamedTuple):
    """What one device trains on: its number of images and its memory in bytes."""

    images: int  # at once
    memory: int | None  # bytes that activations may take; None where it is not known
    has_fast_bfloat16: bool = False  # are bfloat16 products faster than float32 ones?


class Choice(NamedTuple):
    """How a network is computed, with nothing left `auto` but the kernel of attention on a GPU."""

    compute: Compute
    why: str  # of some of them, in a few words; '' where nothing was left to choose

    def __str__(self) -> str:
        fields = ', '.join(f'{name}={value}' for name, value in vars(self.compute).items())
        return fields + (f' ({self.why})' if self.why else '')


def choose(
    compute: Compute,
    model: ViTConfig | ResNetConfig,
    *,
    platform: str,
    load: Load | None = None,
    regularization: Regularization | None = None,
) -> Choice:
    """What is fastest on such devices and fits into their memory; `load` None: without training.

    Training uses bfloat16 on devices with fast bfloat16 products. All other computation uses
    float32. Where something is dropped at random the last block is `whole`: what is dropped is then
    the same on all devices.

    Raises UserError for a way to compute attention that the network cannot have.
    """
    platform = 'gpu' if platform in ('cuda', 'rocm') else platform
    relative = isinstance(model, ViTConfig) and model.positions == 'relative'
    attention = {'cpu': 'head_major', 'gpu': 'padded' if relative else 'auto'}.get(platform, 'xla')
    best: dict[str, Any] = {
        'dtype': 'bfloat16' if load is not None and load.has_fast_bfloat16 else 'float32',
        'layout': 'batched' if platform == 'tpu' else 'flat',
        'unroll': 1,
        'attention': attention,
        'last_block': 'whole',
    }
    if isinstance(model, ViTConfig):
        _check_attention(compute, platform, relative=relative)
        best['unroll'] = model.depth if platform == 'gpu' else 1
        draws = regularization not in (None, Regularization())
        _check_last_block(compute, model, draws=draws)
        unroll = best['unroll'] if compute.unroll == 'auto' else compute.unroll
        is_worth_it = model.depth <= max(_FEW_BLOCKS, unroll)
        if model.num_tokens_read is not None and is_worth_it and not draws:
            best['last_block'] = 'class_tokens'
        if model.num_tokens > LONG and attention != 'auto':
            best['attention'] = 'splash' if platform == 'tpu' and not relative else 'blockwise'
    left = [name for name in (*best, 'remat') if getattr(compute, name) == 'auto']
    chosen = dataclasses.replace(compute, **{n: v for n, v in best.items() if n in left})
    why = []
    if 'dtype' in left and load is not None:
        is_faster = 'is' if load.has_fast_bfloat16 else 'is not known to be'
        why.append(f'dtype: bfloat16 {is_faster} faster on this {platform.upper()}')
    if 'unroll' in left and chosen.unroll != 1:
        why.append('unroll: a GPU is fastest where no loop copies what it keeps')
    if platform == 'gpu' and 'attention' in left and relative:
        why.append('attention: no fused kernel has relative positions')
    if 'last_block' in left and chosen.last_block == 'class_tokens':
        why.append('last_block: the head reads no patches')
    if 'remat' in left:
        remat, reason = _choose_remat(model, chosen, platform, load)
        chosen = dataclasses.replace(chosen, remat=remat)
        why += [f'remat: {reason}'] if reason else []
    return Choice(chosen, '; '.join(why))


def _check_attention(compute: Compute, platform: str, *, relative: bool) -> None:
    wrong, needed = f'compute.attention={compute.attention}: ', _KERNELS.get(compute.attention)
    if needed is not None:
        no_such = f'a kernel of {needed.upper()}s, here is a {platform.upper()}; say auto'
        require(platform == needed, wrong + no_such)
        require(not relative, f'{wrong}it has no relative positions; say auto or blockwise')


def _check_last_block(compute: Compute, model: ViTConfig, *, draws: bool) -> None:
    if compute.last_block == 'class_tokens':
        wrong = 'compute.last_block=class_tokens: '
        heads = f'heads read patches too (pool={model.pool}, patch_outputs={model.patch_outputs})'
        require(model.num_tokens_read is not None, f'{wrong}{heads}; say auto')
        dropped = 'dropout and stochastic depth are drawn for whole blocks; say auto'
        require(not draws, wrong + dropped)


def _choose_remat(
    model: ViTConfig | ResNetConfig, compute: Compute, platform: str, load: Load | None
) -> tuple[Remat, str]:
    """Chooses what the backward pass recomputes; returns it and the reason, '' if there is none."""
    if load is None:
        return 'none', ''
    slow_loop = False
    if isinstance(model, ViTConfig):
        if (fits := _least_remat(model, compute, load)) != 'none':
            return fits, 'activations have to fit into memory'
        # A step of B/16 on a v5e takes 207 M estimated cycles; with `dots` 142 M.
        slow_loop = platform == 'tpu' and compute.unroll == 1
    if platform == 'cpu' or slow_loop:
        return 'dots', f'a {platform.upper()} is fastest where little is kept in memory'
    return 'none', ''


def _least_remat(model: ViTConfig, compute: Compute, load: Load) -> Remat:
    """The one that recomputes least, of those whose activations fit into memory."""
    needed = activations(model, compute)
    for remat in POLICIES[:-1]:
        if load.memory is None or needed[remat] * load.images <= _SHARE * load.memory:
            return remat
    return POLICIES[-1]


def resolve_gpu_attention(compute: Compute, model: ViTConfig | ResNetConfig) -> Compute:
    """Replaces `attention=auto` with the kind that a GPU with cuDNN's attention would use.

    cuDNN requires a head size that is a multiple of 8. All GPUs support sizes up to 128.
    """
    if compute.attention != 'auto' or not isinstance(model, ViTConfig):
        return compute
    attention: Implementation = 'blockwise' if model.num_tokens > LONG else 'padded'
    head_size = model.width // model.num_heads
    if compute.dtype == 'bfloat16' and head_size % 8 == 0 and head_size <= 128:
        attention = 'cudnn'
    return dataclasses.replace(compute, attention=attention)


def activations(model: ViTConfig, compute: Compute) -> dict[str, int]:
    """Bytes of one image's activations when the backward pass begins: an estimate, by `remat`.

    Each block keeps vectors of the width of a token and of the MLP's hidden layer; without a fused
    kernel also the weights of attention, before, in and after the softmax; of `padded` only after
    it. With tokens that are no rows, norms and GELU keep what they compute on the way. Whatever is
    kept, all of one block is there too: the backward pass begins with it. What a hybrid's
    convolutions keep is not counted.
    """
    size, tokens, width = _BYTES[compute.dtype], model.num_tokens, model.width
    hidden = model.mlp_dim * (2 if model.gelu is None else 1)
    way = resolve_gpu_attention(compute, model).attention
    has_weights = way not in (*_KERNELS, 'blockwise')
    weights = model.num_heads * tokens**2 if has_weights else 0
    flat = compute.layout == 'flat'
    all_of_it = 8 * width + 2 * hidden if flat else 17 * width + 5 * hidden
    one_block = tokens * all_of_it * size + weights * (8 + size)
    kept_block = one_block - 8 * weights if way == 'padded' else one_block
    vectors = 6 if way == 'cudnn' else 7  # the seventh is what attention gives
    products = tokens * (vectors * width + hidden) * size
    block_input = tokens * width * size
    each = {'none': kept_block, 'dots': products, 'block': block_input}
    blocks = model.depth - 1 if compute.last_block == 'class_tokens' else model.depth
    return {remat: blocks * kept + one_block for remat, kept in each.items()}
