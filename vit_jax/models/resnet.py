"""The ResNet of the ViT paper, as backbone of a hybrid and as classifier.

It has post-activation bottleneck units with the stride on the 3x3 convolution, GroupNorm instead of
BatchNorm, and weight-standardized convolutions (section 4.1, "ResNet (BiT)"; numerics as in the
paper's code). The pre-activation ResNet of the BiT paper is not implemented.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float
from vit_jax.models.compute import Compute, apply_remat
from vit_jax.models.config import GROUPS, Backbone, ResNetConfig
from vit_jax.models.heads import compute_logits
from vit_jax.models.taps import tap, tap_array

FeatureMap = Float[Array, 'b h w c']
Activation = Float[Array, 'b _ _ _']
Kernel = Float[Array, 'p q c d']


def standardize(kernel: Kernel | Float[np.ndarray, 'p q c d']) -> Kernel:
    """Standardizes each output channel to mean 0 and standard deviation 1."""
    kernel = jnp.asarray(kernel)
    kernel = kernel - kernel.mean((0, 1, 2), keepdims=True)
    return kernel / (kernel.std((0, 1, 2), keepdims=True) + 1e-5)


class StdConv(nn.Module):
    """SAME convolution without bias, whose kernel is standardized (weight standardization).

    The parameter is the raw kernel. Epsilon is added to the standard deviation, not the variance.
    """

    features: int
    size: int
    compute: Compute
    stride: int = 1

    @nn.compact
    def __call__(self, x: FeatureMap) -> Activation:
        shape = self.size, self.size, x.shape[-1], self.features
        kernel = standardize(self.param('kernel', nn.initializers.lecun_normal(), shape))
        dtype = self.compute.dtype
        return _convolution(x.astype(dtype), kernel.astype(dtype), self.stride, self.compute)


def _convolution(x: FeatureMap, kernel: Kernel, stride: int, compute: Compute) -> Activation:
    """Computes a SAME convolution without bias.

    With layout `flat`, 1x1 convolutions are matrix products, whose backward pass is 10 times faster
    on CPUs. Strided ones are products on CPUs only, where this saves 13 % of a step of
    configs/pretrain/cifar10_hybrid.py. On GPUs, XLA aborts the process if it fuses a strided slice
    into a product (openxla/xla issue 47381, open with jax 0.12.0). The barrier prevents this
    fusion.
    """

    def product(x: FeatureMap, kernel: Kernel) -> Activation:
        if stride > 1:
            x = jax.lax.optimization_barrier(x[:, ::stride, ::stride])
        return (x.reshape(-1, x.shape[-1]) @ kernel[0, 0]).reshape(*x.shape[:3], -1)

    def convolution(x: FeatureMap, kernel: Kernel) -> Activation:
        strides = stride, stride
        axes = 'NHWC', 'HWIO', 'NHWC'
        return jax.lax.conv_general_dilated(x, kernel, strides, 'SAME', dimension_numbers=axes)

    if compute.layout == 'batched' or kernel.shape[:2] != (1, 1):
        return convolution(x, kernel)
    if stride == 1:
        return product(x, kernel)
    return jax.lax.platform_dependent(x, kernel, cpu=product, default=convolution)


def max_pool(x: FeatureMap, compute: Compute) -> Activation:
    """Computes SAME max-pooling of 3x3 windows with stride 2.

    With layout `flat`, it is the maximum of nine shifted arrays, whose gradient is divided among
    equal maxima. This saves 5 % of a step of configs/pretrain/cifar10_hybrid.py on a CPU, as the
    gradient of XLA's pooling is slow. `_convolution` explains the barrier.
    """
    if compute.layout == 'batched':
        return nn.max_pool(x, (3, 3), (2, 2), 'SAME')
    sides = jax.lax.padtype_to_pads(x.shape[1:3], (3, 3), (2, 2), 'SAME')
    padded = jnp.pad(x, ((0, 0), *sides, (0, 0)), constant_values=-jnp.inf)
    rows, columns = x.shape[1:3]
    shifted = [padded[:, i : i + rows : 2, j : j + columns : 2] for i in range(3) for j in range(3)]
    return jax.lax.optimization_barrier(functools.reduce(jnp.maximum, shifted))


class Unit(nn.Module):
    """Bottleneck: 1x1, 3x3 and 1x1 convolutions plus a shortcut, then the activation."""

    channels: int  # output channels of the 3x3 convolution
    compute: Compute
    stride: int

    @nn.compact
    def __call__(self, x: FeatureMap) -> Activation:
        conv = functools.partial(StdConv, compute=self.compute)
        norm = functools.partial(nn.GroupNorm, GROUPS, epsilon=1e-6, dtype=self.compute.dtype)
        width = self.channels
        outputs = 4 * width
        offer = functools.partial(tap_array, self)
        shortcut = x
        if x.shape[-1] != outputs or self.stride != 1:
            shortcut = offer('conv_proj', conv(outputs, 1, stride=self.stride, name='conv_proj')(x))
            shortcut = offer('norm_proj', norm(name='norm_proj')(shortcut))
        y = offer('conv1', conv(width, 1, name='conv1')(x))
        y = offer('norm1', nn.relu(norm(name='norm1')(y)))
        y = offer('conv2', conv(width, 3, stride=self.stride, name='conv2')(y))
        y = offer('norm2', nn.relu(norm(name='norm2')(y)))
        y = offer('conv3', conv(outputs, 1, name='conv3')(y))
        # With zero scale, each unit equals its shortcut at initialization.
        y = offer('norm3', norm(name='norm3', scale_init=nn.initializers.zeros)(y))
        tap(self, 'residual', lambda: (shortcut, y))
        return offer('out', nn.relu(shortcut + y))


class Stage(nn.Module):
    """Units at one resolution; the first unit may halve it.

    Units are not scanned: a rolled loop makes the gradient 7 times slower on CPUs and does not
    compile faster (R50x1 at 128 pixels, 2 cores).
    """

    units: int
    channels: int
    stride: int
    compute: Compute

    @nn.compact
    def __call__(self, x: FeatureMap) -> Activation:
        unit = apply_remat(Unit, self.compute, wrap=nn.remat)
        for index in range(self.units):
            stride = self.stride if index == 0 else 1
            x = unit(self.channels, self.compute, stride, name=f'unit{index + 1}')(x)
        return x


class ResNet(nn.Module):
    """Backbone from images to the last feature map."""

    backbone: Backbone
    compute: Compute

    @nn.compact
    def __call__(self, images: FeatureMap) -> Activation:
        width = self.backbone.width
        compute = self.compute
        x = tap_array(self, 'conv_root', StdConv(width, 7, compute, 2, name='conv_root')(images))
        norm = nn.GroupNorm(GROUPS, epsilon=1e-6, dtype=compute.dtype, name='norm_root')
        x = tap_array(self, 'norm_root', nn.relu(norm(x)))
        x = tap_array(self, 'root', max_pool(x, compute))
        for index, units in enumerate(self.backbone.blocks):
            stride = 1 if index == 0 else 2
            stage = Stage(units, width * 2**index, stride, compute, name=f'stage{index + 1}')
            x = tap_array(self, f'stage{index + 1}', stage(x))
        return x


class ResNetClassifier(nn.Module):
    """ResNet from images to logits: backbone, global average pooling, head."""

    config: ResNetConfig
    compute: Compute
    head: nn.Module | None

    @nn.compact
    def __call__(self, images: FeatureMap, *, output: str = 'logits') -> Float[Array, 'b _']:
        x = ResNet(self.config.backbone, self.compute, name='backbone')(images)
        x = x.astype(jnp.float32).mean((1, 2))
        return x if output == 'features' else compute_logits(self.config, self.head, x)
