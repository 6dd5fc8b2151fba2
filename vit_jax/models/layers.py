"""Layers around attention: patches, the MLP of a block, heads; branches dropped at random."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float, Key, Params, require, tree_names
from vit_jax.models import ops
from vit_jax.models.options import Compute
from vit_jax.models.taps import seen

# `linear`, or a function: the number of classes -> a Flax module from features to logits, without
# a name. Its parameters are whatever lies below `head/`.
Head = Literal['linear'] | Callable[..., Any]
Gelu = Literal['tanh', 'exact', 'quick']
_GELUS: dict[Gelu, Callable[[Array], Array]] = {
    'tanh': functools.partial(nn.gelu, approximate=True),
    'exact': functools.partial(nn.gelu, approximate=False),
    'quick': lambda x: x * nn.sigmoid(1.702 * x),
}


def check_head(head: Head, bias: float) -> None:
    """Raises UserError for the bias of a head that is a function, and sets its own."""
    require(math.isfinite(bias), f'head_bias={bias}: expected a finite number')
    require(head == 'linear' or bias == 0, f'head_bias={bias}: only the linear head has one')


def make_head(head: Head, num_classes: int, *, bias: float) -> nn.Module:
    """The last layer. A linear one begins at zero: so fine-tuning begins uniform (section 3.2)."""
    if head == 'linear':
        zeros, constant = nn.initializers.zeros, nn.initializers.constant(bias)
        return nn.Dense(num_classes, kernel_init=zeros, bias_init=constant)
    return head(num_classes)


class DistilledHead(nn.Module):
    """The mean of two heads: of the class token, and of the distillation token beside it (DeiT)."""

    make: Callable[[], nn.Module]

    def setup(self) -> None:
        self.cls, self.dist = self.make(), self.make()

    def __call__(self, features: Float[Array, 'b two_d']) -> Float[Array, 'b k']:
        cls, dist = jnp.split(features, 2, axis=-1)
        return (self.cls(cls) + self.dist(dist)) / 2


def head_params(params: Params) -> dict[str, Any]:
    """The parameters of the head by their whole names; none for a network without a head."""
    named = tree_names.named_leaves(params)
    return {name: leaf for name, leaf in named.items() if name.startswith('head/')}


def has_trained_head(params: Params) -> bool:
    """Is there a head, and no matrix of zeros in it, through which nothing of an image comes?"""
    head = head_params(params).values()
    return bool(head) and all(np.any(leaf) for leaf in head if leaf.ndim > 1)


def drop_branch(
    branch: Float[Array, 'b n d'], rate: Float[Array, ''], *, key: Key[Array, '']
) -> Float[Array, 'b n d']:
    """Stochastic depth: zero for each example with this probability, else branch / (1 - rate).

    The mean is the branch ("Deep Networks with Stochastic Depth", scaled while training).
    """
    keep = 1 - rate
    kept = jax.random.bernoulli(key, keep, (branch.shape[0], 1, 1))
    return jnp.where(kept, branch / keep, 0).astype(branch.dtype)


class Mlp(nn.Module):
    """Two dense layers, applied to each token alone, with a GELU between them.

    Without a GELU it is a SwiGLU ("GLU Variants Improve Transformer", equation 6, with biases): a
    third layer, after its SiLU, multiplies what the first one gives.
    """

    mlp_dim: int
    gelu: Gelu | None
    dropout: float
    compute: Compute

    @nn.compact
    def __call__(self, x: Float[Array, 'b n d']) -> Float[Array, 'b n d']:
        tiny = nn.initializers.normal(1e-6)
        dense = functools.partial(ops.Dense, compute=self.compute, bias_init=tiny)
        drop = nn.Dropout(self.dropout, deterministic=False)
        hidden = dense((self.mlp_dim,), name='dense1')(x)
        if self.gelu is None:
            hidden = nn.silu(dense((self.mlp_dim,), name='gate')(x)) * hidden
        else:
            hidden = ops.recomputed(_GELUS[self.gelu], self.compute)(hidden)
        hidden = seen(self, 'hidden', hidden)
        out = dense((x.shape[-1],), name='dense2')(drop(hidden))
        return drop(ops.apart(out, self.compute))


class PatchEmbedding(nn.Module):
    """Each patch of an image or a feature map projected to one token: the E of equation 1.

    A convolution whose stride is its size (the kernel has the shape of `nn.Conv`'s), written as the
    one matrix product that it is: as fast on CPUs, and no matter of cuDNN's convolutions on GPUs.
    """

    patch_size: tuple[int, int]
    width: int
    dtype: str
    use_bias: bool

    @nn.compact
    def __call__(self, images: Float[Array, 'b h w c']) -> Float[Array, 'b n d']:
        batch, height, width, channels = images.shape
        p, q = self.patch_size
        kernel = self.param('kernel', nn.initializers.lecun_normal(), (p, q, channels, self.width))
        rows, columns = height // p, width // q
        images = images[:, : rows * p, : columns * q]
        patches = images.reshape(batch, rows, p, columns, q, channels)
        patches, kernel = patches.astype(self.dtype), kernel.astype(self.dtype)
        tokens = jnp.einsum('bipjqc,pqcd->bijd', patches, kernel)
        tokens = tokens.reshape(batch, rows * columns, self.width)
        if not self.use_bias:
            return tokens
        bias = self.param('bias', nn.initializers.zeros, (self.width,))
        return tokens + bias.astype(self.dtype)
