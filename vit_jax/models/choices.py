"""What `auto` means in `Compute`: chosen for the devices, the network and the batch.

The reasons were measured: `python -m benchmarks.step`.
"""

import dataclasses
from typing import Any, NamedTuple

from vit_jax.models.attention import LONG
from vit_jax.models.options import POLICIES, Compute, Remat
from vit_jax.models.resnet import ResNetConfig
from vit_jax.models.vit import ViTConfig

# Of the memory that the state leaves, activations that are kept may take this: the compiler needs
# some for one block, and its arrays do not fill memory without gaps.
_SHARE = 0.8
_BYTES = {'float32': 4, 'bfloat16': 2}


_WHY = {
    'cpu': 'a CPU is fastest where little is kept in memory',
    'gpu': 'a GPU is fastest where no loop copies what it keeps',
}


class Training(NamedTuple):
    """What is trained on one device."""

    images: int  # at once
    memory: int | None  # bytes that activations may take; None where it is not known


class Choice(NamedTuple):
    """How a network is computed, with nothing left `auto` but the kernel of attention on a GPU."""

    compute: Compute
    why: str  # in a few words; '' where everything was said

    def __str__(self) -> str:
        fields = ', '.join(f'{name}={value}' for name, value in vars(self.compute).items())
        return fields + (f': {self.why}' if self.why else '')


def choose(
    compute: Compute,
    model: ViTConfig | ResNetConfig,
    *,
    platform: str,
    training: Training | None = None,
) -> Choice:
    """What is fastest on such devices and fits into their memory; `training` None: no gradients."""
    platform = 'gpu' if platform in ('cuda', 'rocm') else platform
    unrolled, attention = 1, {'cpu': 'head_major', 'gpu': 'auto'}.get(platform, 'xla')
    if isinstance(model, ViTConfig):
        unrolled = model.depth if platform == 'gpu' else 1
        attention = 'blockwise' if attention != 'auto' and model.num_tokens > LONG else attention
    best: dict[str, Any] = {
        'layout': 'batched' if platform == 'tpu' else 'flat',
        'unroll': unrolled,
        'attention': attention,
        'remat': 'none',
    }
    why = [_WHY[platform]] if platform in _WHY else []
    if training is not None and isinstance(model, ViTConfig):
        best['remat'] = _least_remat(model, compute, training)
        if best['remat'] != 'none':
            why.append('activations must fit into its memory')
        elif platform == 'cpu':
            best['remat'] = 'dots'
    open_ = {name: value for name, value in best.items() if getattr(compute, name) == 'auto'}
    return Choice(dataclasses.replace(compute, **open_), ', '.join(why) if open_ else '')


def _least_remat(model: ViTConfig, compute: Compute, training: Training) -> Remat:
    """The one that recomputes least, of those whose activations fit into memory."""
    kept = activations(model, compute)
    for remat in POLICIES[:-1]:
        needed = kept[remat] * training.images
        if training.memory is None or needed <= _SHARE * training.memory:
            return remat
    return POLICIES[-1]


def activations(model: ViTConfig, compute: Compute) -> dict[str, int]:
    """Bytes of one image's activations when the backward pass begins: an estimate.

    Each block keeps vectors of the width of a token and of the MLP's hidden layer; without a fused
    kernel also the weights of attention, before and after the softmax. The last block has all of
    its own, whatever is kept.
    """
    size, tokens = _BYTES[compute.dtype], model.num_tokens
    width, hidden = model.width, model.mlp_dim * (2 if model.gelu is None else 1)
    fused = compute.attention in ('cudnn', 'auto') and size == 2
    fused = fused or compute.attention == 'blockwise' or tokens > LONG
    weights = 0 if fused else model.num_heads * tokens**2 * (4 + size)
    all_of_it = tokens * (8 * width + 2 * hidden) * size + weights
    products, tokens_alone = tokens * (6 * width + hidden) * size, tokens * width * size
    each = {'none': all_of_it, 'dots': products, 'block': tokens_alone}
    return {remat: model.depth * kept + all_of_it for remat, kept in each.items()}
