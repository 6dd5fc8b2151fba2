"""The Vision Transformer: what it computes from images, and nothing about training it."""

import dataclasses
import functools
from typing import Literal, assert_never

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.base import Array, Bool, Float, Record, require, require_between
from vit_jax.models import positions
from vit_jax.models.attention import Implementation, attend, attention_weights
from vit_jax.models.layers import Head, check_head, drop_branch, make_head
from vit_jax.models.options import ActivationSharding, Compute, Regularization, rematerialized
from vit_jax.models.positions import PositionKind
from vit_jax.models.resnet import LARGEST, Backbone, ResNet
from vit_jax.models.taps import seen, tap

Pool = Literal['cls', 'gap', 'map', 'none']  # none: every token
Gelu = Literal['tanh', 'exact']


@dataclasses.dataclass(kw_only=True)
class ViTConfig(Record):
    """The architecture: all that decides which parameters there are and what they compute.

    Lengths in pixels are (height, width). The defaults are those of the paper's models. With a
    backbone it is the hybrid of section 3.1: patches are cut from its feature map.
    """

    image_size: tuple[int, int] = (224, 224)  # in pixels
    patch_size: tuple[int, int] = (16, 16)  # in pixels of the image, or of the feature map
    channels: int = 3  # of an image
    backbone: Backbone | None = None
    width: int = 768  # of a token
    depth: int = 12  # blocks
    mlp_dim: int = 3072  # width of a block's hidden layer
    num_heads: int = 12  # of attention
    num_classes: int | None = None  # None: no head, the outputs are the features
    pool: Pool = 'cls'
    final_norm: Literal['before_pool', 'after_pool'] = 'before_pool'
    representation_size: int | None = None  # width of the tanh layer before the head
    positions: PositionKind = 'learned'
    gelu: Gelu = 'tanh'
    layer_norm_epsilon: float = 1e-6  # added to the variance
    blocks_without_skips: tuple[int, ...] = ()  # from 0 (Raghu et al., figure 8)
    head: Head = 'linear'
    head_bias: float = 0.0  # the linear head's bias at initialisation

    def check(self) -> None:
        """Sizes alone; whether patches fill the image is for `build`, as images may change."""
        sizes = 'image_size', 'patch_size', 'channels', 'width', 'depth', 'mlp_dim', 'num_heads'
        require_between(self, *sizes, 'num_classes', 'representation_size', low=1, high=LARGEST)
        require_between(self, 'layer_norm_epsilon', above=0, below=1)
        wrong = f'width={self.width} is not a multiple of num_heads={self.num_heads}'
        require(self.width % self.num_heads == 0, wrong)
        positions.check(self.positions, width=self.width)
        require_between(self, 'blocks_without_skips', low=0, below=self.depth)
        check_head(self.head, self.head_bias)

    @property
    def grid(self) -> tuple[int, int]:
        """Patches in (height, width). Raises UserError where they do not fill the image."""
        (height, width), (p, q), stride = self.image_size, self.patch_size, 1
        if self.backbone is not None:
            stride = self.backbone.stride
            height, width = self.backbone.map_size(self.image_size)
        wrong = f'image_size={self.image_size} is not a multiple of patch_size={self.patch_size}'
        wrong += f' of a feature map {stride} times smaller' if stride > 1 else ''
        near = max(1, round(height / p)) * p * stride, max(1, round(width / q)) * q * stride
        require(height % p == 0 and width % q == 0, f'{wrong}; nearest: {near}')
        return height // p, width // q

    @property
    def num_tokens(self) -> int:
        """Length of the sequence: the patches, and the class token where there is one."""
        return self.grid[0] * self.grid[1] + (self.pool == 'cls')


class Mlp(nn.Module):
    """Two dense layers with a GELU between them, applied to each token alone."""

    mlp_dim: int
    gelu: Gelu
    dropout: float
    dtype: str

    @nn.compact
    def __call__(self, x: Float[Array, 'b n d']) -> Float[Array, 'b n d']:
        glorot, tiny = nn.initializers.xavier_uniform(), nn.initializers.normal(1e-6)
        dense = functools.partial(nn.Dense, dtype=self.dtype, kernel_init=glorot, bias_init=tiny)
        drop = nn.Dropout(self.dropout, deterministic=False)
        approximate = {'tanh': True, 'exact': False}[self.gelu]
        hidden = nn.gelu(dense(self.mlp_dim, name='dense1')(x), approximate=approximate)
        hidden = seen(self, 'hidden', hidden)
        return drop(dense(x.shape[-1], name='dense2')(drop(hidden)))


class Attention(nn.Module):
    """Multi-head attention from one sequence to another.

    Flax's own MultiHeadDotProductAttention has the same parameters; here queries and keys are at
    hand for taps, and the kernel is chosen by `attend`.
    """

    num_heads: int
    dropout: float
    dtype: str
    implementation: Implementation

    @nn.compact
    def __call__(self, x: Float[Array, 'b q d'], y: Float[Array, 'b n d']) -> Float[Array, 'b q d']:
        width = x.shape[-1]
        glorot = nn.initializers.xavier_uniform()
        dense = functools.partial(nn.DenseGeneral, dtype=self.dtype, kernel_init=glorot)
        heads = self.num_heads, width // self.num_heads
        query = dense(heads, name='query')(x)
        key = dense(heads, name='key')(y)
        value = dense(heads, name='value')(y)
        tap(self, 'weights', lambda: attention_weights(query, key))
        mixed = attend(query, key, value, implementation=self.implementation)
        mixed = seen(self, 'heads', mixed)
        out = dense(width, axis=(-2, -1), name='out')(mixed)
        return nn.Dropout(self.dropout, deterministic=False)(out)


class Part(nn.Module):
    """What the network, its encoder, each block and the pooling are made from."""

    config: ViTConfig
    regularization: Regularization
    compute: Compute
    shard_activations: ActivationSharding


class Block(Part):
    """A pre-LayerNorm encoder block: equations 2 and 3, or without their skip connections."""

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'b n d'],
        drop_rate: Float[Array, ''],
        has_skips: Bool[Array, ''] | None,  # None: as all have them
    ) -> tuple[Float[Array, 'b n d'], None]:
        config, dropout, dtype = self.config, self.regularization.dropout, self.compute.dtype
        norm = functools.partial(nn.LayerNorm, epsilon=config.layer_norm_epsilon, dtype=dtype)

        def added(
            x: Float[Array, 'b n d'], branch: Float[Array, 'b n d'], *, name: str
        ) -> Float[Array, 'b n d']:
            skip = x if has_skips is None else jnp.where(has_skips, x, 0)
            tap(self, f'{name}/out', lambda: branch)
            tap(self, f'{name}/residual', lambda: (skip, branch))
            if self.regularization.stochastic_depth > 0:
                branch = drop_branch(branch, drop_rate, key=self.make_rng('dropout'))
            return self.shard_activations(skip + branch)

        x = self.shard_activations(x)
        y = seen(self, 'norm1', norm(name='norm1')(x))
        attention = Attention(
            config.num_heads, dropout, dtype, self.compute.attention, name='attention'
        )
        x = added(x, attention(y, y), name='attention')
        y = seen(self, 'norm2', norm(name='norm2')(x))
        mlp = Mlp(config.mlp_dim, config.gelu, dropout, dtype, name='mlp')
        x = added(x, mlp(y), name='mlp')
        return seen(self, 'tokens', x), None


class Encoder(Part):
    """The blocks: one set of stacked parameters, applied by a scan; then the final LayerNorm."""

    @nn.compact
    def __call__(self, x: Float[Array, 'b n d']) -> Float[Array, 'b n d']:
        config, compute, regularization = self.config, self.compute, self.regularization
        unroll = min(compute.unroll, config.depth)
        scan = nn.scan(
            rematerialized(Block, compute, in_loop=unroll == 1),
            variable_axes={True: 0},  # every collection, taps as well: the depth in front
            split_rngs={'params': True, 'dropout': True},
            length=config.depth,
            unroll=unroll,
        )
        blocks = scan(config, regularization, compute, self.shard_activations, name='block')
        drop_rates = jnp.linspace(0, regularization.stochastic_depth, config.depth)
        has_skips = None
        if config.blocks_without_skips:
            has_skips = ~jnp.isin(jnp.arange(config.depth), jnp.array(config.blocks_without_skips))
        x, _ = blocks(x, drop_rates, has_skips)
        if config.final_norm == 'after_pool':
            return x
        norm = nn.LayerNorm(epsilon=config.layer_norm_epsilon, dtype=compute.dtype, name='norm')
        return seen(self, 'norm', norm(x))


class AttentionPool(Part):
    """A learned query attends to all tokens (MAP head; Scaling Vision Transformers, 3.2)."""

    @nn.compact
    def __call__(self, tokens: Float[Array, 'b n d']) -> Float[Array, 'b d']:
        config, dtype = self.config, self.compute.dtype
        probe = self.param('probe', nn.initializers.xavier_uniform(), (1, 1, config.width))
        probe = jnp.tile(probe, (tokens.shape[0], 1, 1)).astype(tokens.dtype)
        x = Attention(config.num_heads, 0.0, dtype, 'xla', name='attention')(probe, tokens)
        y = nn.LayerNorm(epsilon=config.layer_norm_epsilon, dtype=dtype, name='norm')(x)
        return (x + Mlp(config.mlp_dim, config.gelu, 0.0, dtype, name='mlp')(y))[:, 0]


class ViT(Part):
    """Images to logits: equations 1 to 4, with the head of the configuration."""

    def setup(self) -> None:
        config = self.config
        if config.backbone is not None:
            self.backbone = ResNet(config.backbone, self.compute)
        self.embedding = PatchEmbedding(config.patch_size, config.width, self.compute.dtype)
        if config.pool == 'cls':
            self.cls = self.param('cls', nn.initializers.zeros, (1, 1, config.width))
        self.positions = positions.Positions(config.positions, config.grid)
        nn.share_scope(self, self.positions)  # its parameters have no folder of their own
        self.dropout = nn.Dropout(self.regularization.dropout, deterministic=False)
        parts = config, self.regularization, self.compute, self.shard_activations
        self.encoder = Encoder(*parts)
        if config.pool == 'map':
            self.pool = AttentionPool(*parts)
        if config.final_norm == 'after_pool':
            self.norm = nn.LayerNorm(epsilon=config.layer_norm_epsilon, dtype=self.compute.dtype)
        if config.representation_size is not None:
            self.pre_logits = nn.Dense(config.representation_size, dtype=self.compute.dtype)
        if config.num_classes is not None:
            self.head = make_head(config.head, config.num_classes, bias=config.head_bias)

    def __call__(self, images: Float[Array, 'b h w c']) -> Float[Array, '...']:
        x = self.features(images)
        return x if self.config.num_classes is None else self.head(x)

    def features(self, images: Float[Array, 'b h w c']) -> Float[Array, '...']:
        """What the head is given: the pooled tokens, after the tanh layer where there is one."""
        x = images if self.config.backbone is None else self.backbone(images)
        x = self.embedding(x)
        if self.config.pool == 'cls':  # equation 1: the class token comes first
            cls = jnp.tile(self.cls.astype(x.dtype), (x.shape[0], 1, 1))
            x = jnp.concatenate([cls, x], axis=1)
        x = seen(self, 'embedding', self.dropout(self.positions(x)))
        x = self._pooled(self.encoder(x))
        if self.config.final_norm == 'after_pool':
            x = self.norm(x)
        if self.config.representation_size is not None:
            x = jnp.tanh(self.pre_logits(x))
        return x.astype(jnp.float32)

    def _pooled(self, tokens: Float[Array, 'b n d']) -> Float[Array, '...']:
        match self.config.pool:
            case 'cls':
                return tokens[:, 0]  # equation 4
            case 'gap':
                return tokens.mean(axis=1)
            case 'map':
                return self.pool(tokens)
            case 'none':
                return tokens
            case other:
                assert_never(other)


class PatchEmbedding(nn.Module):
    """Each patch of an image or a feature map projected to one token: the E of equation 1.

    A convolution whose stride is its size (the kernel has the shape of `nn.Conv`'s), written as the
    one matrix product that it is: as fast on CPUs, and no matter of cuDNN's convolutions on GPUs.
    """

    patch_size: tuple[int, int]
    width: int
    dtype: str

    @nn.compact
    def __call__(self, images: Float[Array, 'b h w c']) -> Float[Array, 'b n d']:
        batch, height, width, channels = images.shape
        p, q = self.patch_size
        kernel = self.param('kernel', nn.initializers.lecun_normal(), (p, q, channels, self.width))
        bias = self.param('bias', nn.initializers.zeros, (self.width,))
        patches = images.reshape(batch, height // p, p, width // q, q, channels)
        patches, kernel = patches.astype(self.dtype), kernel.astype(self.dtype)
        tokens = jnp.einsum('bipjqc,pqcd->bijd', patches, kernel)
        return tokens.reshape(batch, -1, self.width) + bias.astype(self.dtype)
