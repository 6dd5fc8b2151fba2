"""The ResNet of the paper: what stands before a hybrid's tokens, and a classifier of its own.

Bottleneck units with activation last and the stride on the 3x3 convolution, GroupNorm in place of
BatchNorm, weight-standardised convolutions (section 4.1, "ResNet (BiT)"; the numerics are those of
the paper's code). The pre-activation network of the BiT paper is another one.
"""

import dataclasses
import functools

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float, Record, require, require_between
from vit_jax.models import ops
from vit_jax.models.layers import Head, check_head, make_head
from vit_jax.models.options import Compute, rematerialized
from vit_jax.models.taps import seen, tap

GROUPS = 32  # of GroupNorm
LARGEST = 1_000_000  # of any size of a network: what is larger was not meant

# Units of each stage by the number of layers in a ResNet's name (26 is AugReg's).
DEPTHS = {
    '26': (2, 2, 2, 2),
    '50': (3, 4, 6, 3),
    '101': (3, 4, 23, 3),
    '152': (3, 8, 36, 3),
    '200': (3, 24, 36, 3),
}


@dataclasses.dataclass(kw_only=True)
class Backbone(Record):
    """The convolutions: a root that shrinks the image by 4, then stages of bottleneck units.

    Each stage has twice the channels of the one before and, but for the first, half its height
    and width. Its output has 4 times the channels of its 3x3 convolutions.
    """

    blocks: tuple[int, ...] = (3, 4, 6, 3)  # units of each stage; () is the root alone
    width: int = 64  # channels of the root and of the first stage's 3x3 convolutions

    def check(self) -> None:
        require_between(self, 'width', 'blocks', low=1, high=LARGEST)
        require(len(self.blocks) <= 8, f'blocks={self.blocks}: expected at most 8 stages')
        whole = self.width % GROUPS == 0
        require(whole, f'width={self.width} is not a multiple of {GROUPS} groups')

    @property
    def stride(self) -> int:
        """Pixels of the image, along a side, for one of the feature map."""
        return 2 ** (2 + max(0, len(self.blocks) - 1))

    @property
    def channels(self) -> int:
        """Channels of the feature map."""
        return self.width * 2 ** (len(self.blocks) + 1) if self.blocks else self.width

    def map_size(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """(height, width) of the feature map: every halving rounds up, as SAME padding does."""
        return -(-image_size[0] // self.stride), -(-image_size[1] // self.stride)


@dataclasses.dataclass(kw_only=True)
class ResNetConfig(Record):
    """A ResNet as a classifier: the architecture, and nothing else. Lengths are (height, width)."""

    image_size: tuple[int, int] = (224, 224)  # in pixels
    channels: int = 3  # of an image
    backbone: Backbone = dataclasses.field(default_factory=Backbone)  # all but the head
    num_classes: int | None = None  # None: no head, the outputs are the features
    head: Head = 'linear'  # or a function of your own, f(num_classes) -> flax module
    head_bias: float = 0.0  # the linear head's bias at initialisation

    def check(self) -> None:
        require_between(self, 'image_size', 'channels', 'num_classes', low=1, high=LARGEST)
        check_head(self.head, self.head_bias)

    @property
    def grid(self) -> tuple[int, int]:
        """(height, width) of the last feature map."""
        return self.backbone.map_size(self.image_size)


def standardised(kernel: Float[Array | np.ndarray, 'p q c d']) -> Float[Array, 'p q c d']:
    """The kernel with mean 0 and deviation 1 in each output channel, as convolutions use it."""
    kernel = jnp.asarray(kernel)
    kernel = kernel - kernel.mean((0, 1, 2), keepdims=True)
    return kernel / (kernel.std((0, 1, 2), keepdims=True) + 1e-5)


class StandardConv(nn.Module):
    """A convolution, SAME and without bias, whose kernel is standardised where it is used.

    Each output channel has mean 0 and deviation 1; the epsilon is added to the deviation, not to
    the variance. What is stored is the raw kernel.
    """

    features: int
    size: int
    compute: Compute
    stride: int = 1

    @nn.compact
    def __call__(self, x: Float[Array, 'b h w c']) -> Float[Array, 'b _ _ _']:
        shape = self.size, self.size, x.shape[-1], self.features
        kernel = self.param('kernel', nn.initializers.lecun_normal(), shape)
        kernel = standardised(kernel)
        x, kernel = x.astype(self.compute.dtype), kernel.astype(self.compute.dtype)
        return ops.convolution(x, kernel, self.stride, self.compute)


class Unit(nn.Module):
    """A bottleneck: 1x1, 3x3 and 1x1 convolutions beside a shortcut, activation last."""

    channels: int  # of the 3x3 convolution
    compute: Compute
    stride: int

    @nn.compact
    def __call__(self, x: Float[Array, 'b h w c']) -> Float[Array, 'b _ _ _']:
        conv = functools.partial(StandardConv, compute=self.compute)
        norm = functools.partial(nn.GroupNorm, GROUPS, epsilon=1e-6, dtype=self.compute.dtype)
        width, outputs, shortcut = self.channels, 4 * self.channels, x
        see = functools.partial(seen, self)
        if x.shape[-1] != outputs or self.stride != 1:
            shortcut = see('conv_proj', conv(outputs, 1, stride=self.stride, name='conv_proj')(x))
            shortcut = see('norm_proj', norm(name='norm_proj')(shortcut))
        y = see('conv1', conv(width, 1, name='conv1')(x))
        y = see('norm1', nn.relu(norm(name='norm1')(y)))
        y = see('conv2', conv(width, 3, stride=self.stride, name='conv2')(y))
        y = see('norm2', nn.relu(norm(name='norm2')(y)))
        y = see('conv3', conv(outputs, 1, name='conv3')(y))
        # Zero scale: at the beginning every unit is its shortcut.
        y = see('norm3', norm(name='norm3', scale_init=nn.initializers.zeros)(y))
        tap(self, 'residual', lambda: (shortcut, y))
        return see('out', nn.relu(shortcut + y))


class Stage(nn.Module):
    """Units at one resolution, which the first of them may halve.

    They are not scanned: a rolled loop made the gradient 7 times slower on CPUs, and compiling it
    took as long (R50x1 at 128 pixels, 2 cores).
    """

    units: int
    channels: int
    stride: int
    compute: Compute

    @nn.compact
    def __call__(self, x: Float[Array, 'b h w c']) -> Float[Array, 'b _ _ _']:
        unit = rematerialized(Unit, self.compute, by=nn.remat)
        for index in range(self.units):
            stride = self.stride if index == 0 else 1
            x = unit(self.channels, self.compute, stride, name=f'unit{index + 1}')(x)
        return x


class ResNet(nn.Module):
    """Images to the feature map of a backbone."""

    backbone: Backbone
    compute: Compute

    @nn.compact
    def __call__(self, images: Float[Array, 'b h w c']) -> Float[Array, 'b _ _ _']:
        width, compute = self.backbone.width, self.compute
        x = seen(self, 'conv_root', StandardConv(width, 7, compute, 2, name='conv_root')(images))
        norm = nn.GroupNorm(GROUPS, epsilon=1e-6, dtype=compute.dtype, name='norm_root')
        x = seen(self, 'norm_root', nn.relu(norm(x)))
        x = seen(self, 'root', ops.max_pool(x, compute))
        for index, units in enumerate(self.backbone.blocks):
            stride = 1 if index == 0 else 2
            stage = Stage(units, width * 2**index, stride, compute, name=f'stage{index + 1}')
            x = seen(self, f'stage{index + 1}', stage(x))
        return x


class ResNetClassifier(nn.Module):
    """Images to logits: the mean of the last feature map, and the head."""

    config: ResNetConfig
    compute: Compute

    def setup(self) -> None:
        config = self.config
        self.backbone = ResNet(config.backbone, self.compute)
        if config.num_classes is not None:
            self.head = make_head(config.head, config.num_classes, bias=config.head_bias)

    def __call__(self, images: Float[Array, 'b h w c']) -> Float[Array, 'b _']:
        x = self.features(images)
        return x if self.config.num_classes is None else self.head(x)

    def features(self, images: Float[Array, 'b h w c']) -> Float[Array, 'b _']:
        return self.backbone(images).astype(jnp.float32).mean((1, 2))
