"""What a network costs, without computing it: parameters and multiply-adds."""

import math

import jax

from vit_jax.models.model import ModelConfig, build
from vit_jax.models.resnet import Backbone, ResNetConfig
from vit_jax.models.vit import ViTConfig


def parameter_count(config: ModelConfig) -> int:
    """The number of parameters (table 1)."""
    params = jax.eval_shape(build(config).init, jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def multiply_adds(config: ModelConfig) -> int:
    """Multiply-adds of one image's forward pass, in matrix products and convolutions only.

    With epochs * images * 3 * 2 * multiply_adds as floating-point operations, the compute of
    table 6 comes out: the backward pass costs two forward ones, a multiply-add two operations.
    """
    if isinstance(config, ResNetConfig):
        convolutions = _backbone(config.backbone, config.image_size, config.channels)
        return convolutions + config.backbone.channels * (config.num_classes or 0)
    return _vit(config)


def _vit(config: ViTConfig) -> int:
    tokens, width, mlp_dim = config.num_tokens, config.width, config.mlp_dim
    patches, channels, convolutions = math.prod(config.grid), config.channels, 0
    if config.backbone is not None:
        convolutions = _backbone(config.backbone, config.image_size, channels)
        channels = config.backbone.channels
    embedding = patches * math.prod(config.patch_size) * channels * width
    block = 4 * tokens * width**2 + 2 * tokens**2 * width + 2 * tokens * width * mlp_dim
    pool = 0
    if config.pool == 'map':  # one query; keys and values of every token
        pool = 2 * width**2 + 2 * tokens * width**2 + 2 * tokens * width + 2 * width * mlp_dim
    outputs = tokens if config.pool == 'none' else 1
    features = config.representation_size or width
    pre_logits = width * features if config.representation_size else 0
    head = features * (config.num_classes or 0)
    return convolutions + embedding + config.depth * block + pool + outputs * (pre_logits + head)


def _backbone(backbone: Backbone, image_size: tuple[int, int], channels: int) -> int:
    """Multiply-adds of the convolutions, without those that meet only padding.

    So counts XLA, and so comes table 6 out to 1 % (counted with the padding, ResNets are 3 to 4 %
    above it).
    """
    total = _convolution(image_size, 7, 2, channels * backbone.width)
    size: tuple[int, ...] = tuple(-(-side // 4) for side in image_size)
    inputs = backbone.width
    for index, units in enumerate(backbone.blocks):
        width = backbone.width * 2**index
        for unit in range(units):
            stride = 2 if unit == 0 and index > 0 else 1
            total += _convolution(size, 1, 1, inputs * width)
            total += _convolution(size, 3, stride, width * width)
            if unit == 0:
                total += _convolution(size, 1, stride, inputs * 4 * width)
            size = tuple(-(-side // stride) for side in size)
            total += _convolution(size, 1, 1, width * 4 * width)
            inputs = 4 * width
    return total


def _convolution(size: tuple[int, ...], kernel: int, stride: int, channel_pairs: int) -> int:
    """Multiply-adds of one SAME convolution whose kernel joins this many pairs of channels."""
    return channel_pairs * math.prod(_taps(side, kernel, stride) for side in size)


def _taps(side: int, kernel: int, stride: int) -> int:
    """Along one axis, how often the kernel's taps fall on the input and not on its padding."""
    outputs = -(-side // stride)
    before = max(0, (outputs - 1) * stride + kernel - side) // 2
    starts = range(-before, outputs * stride - before, stride)
    return sum(0 <= start + tap < side for start in starts for tap in range(kernel))
