"""The Vision Transformer: what it computes from images, and nothing about training it."""

import dataclasses
import functools
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.base.array_types import Array, Float
from vit_jax.base.errors import UserError
from vit_jax.base.records import Record
from vit_jax.models import attention, positions
from vit_jax.models.layers import zero_head
from vit_jax.models.options import (
    ActivationSharding,
    Compute,
    Regularization,
    rematerialized,
    unsharded,
)
from vit_jax.models.resnet import Backbone, ResNet

Pool = Literal['cls', 'gap', 'map', 'none']  # none: every token
Gelu = Literal['tanh', 'exact']


@dataclasses.dataclass(kw_only=True)
class ViTConfig(Record):
    """The architecture: all that decides which parameters there are and what they compute.

    Lengths in pixels are (height, width). The defaults are those of the paper's models. With a
    backbone it is the hybrid of section 3.1: patches are cut from its feature map.
    """

    image_size: tuple[int, int] = (224, 224)
    patch_size: tuple[int, int] = (16, 16)  # in pixels of the image, or of the feature map
    channels: int = 3
    backbone: Backbone | None = None
    width: int = 768
    depth: int = 12
    mlp_dim: int = 3072
    num_heads: int = 12
    num_classes: int | None = None  # None: no head, the outputs are the features
    pool: Pool = 'cls'  # none: every token
    final_norm: Literal['before_pool', 'after_pool'] = 'before_pool'
    representation_size: int | None = None  # width of the tanh layer before the head
    positions: Literal['learned', 'sincos2d', 'none'] = 'learned'
    gelu: Gelu = 'tanh'
    layer_norm_epsilon: float = 1e-6
    head_bias: float = 0.0  # the head's bias at initialisation

    @property
    def grid(self) -> tuple[int, int]:
        """Patches in (height, width). Raises UserError where they do not fill the image."""
        (height, width), (p, q), stride = self.image_size, self.patch_size, 1
        if self.backbone is not None:
            stride = self.backbone.stride
            height, width = self.backbone.map_size(self.image_size)
        if min(height, width, p, q) < 1 or height % p or width % q:
            near = max(1, round(height / max(1, p))) * p, max(1, round(width / max(1, q))) * q
            raise UserError(
                f'image_size={self.image_size} is not a multiple of patch_size={self.patch_size}'
                + (f' of a feature map {stride} times smaller' if stride > 1 else '')
                + f'; nearest: {(near[0] * stride, near[1] * stride)}'
            )
        return height // p, width // q

    @property
    def num_tokens(self) -> int:
        """Length of the sequence: the patches, and the class token where there is one."""
        return self.grid[0] * self.grid[1] + (self.pool == 'cls')


class Mlp(nn.Module):
    """Two dense layers with a GELU between them, applied to each token alone."""

    mlp_dim: int
    gelu: str
    dropout: float
    dtype: str

    @nn.compact
    def __call__(self, x: Float[Array, 'b n d'], deterministic: bool) -> Float[Array, 'b n d']:
        dense = functools.partial(
            nn.Dense,
            dtype=self.dtype,
            kernel_init=nn.initializers.xavier_uniform(),
            bias_init=nn.initializers.normal(1e-6),
        )
        drop = nn.Dropout(self.dropout, deterministic=deterministic)
        hidden = nn.gelu(dense(self.mlp_dim, name='dense1')(x), approximate=self.gelu == 'tanh')
        return drop(dense(x.shape[-1], name='dense2')(drop(hidden)))


class Attention(nn.Module):
    """Multi-head attention from one sequence to another."""

    num_heads: int
    dropout: float
    dtype: str
    implementation: str

    @nn.compact
    def __call__(
        self, x: Float[Array, 'b q d'], y: Float[Array, 'b n d'], deterministic: bool
    ) -> Float[Array, 'b q d']:
        width = x.shape[-1]
        dense = functools.partial(
            nn.DenseGeneral, dtype=self.dtype, kernel_init=nn.initializers.xavier_uniform()
        )
        heads = self.num_heads, width // self.num_heads
        query = dense(heads, name='query')(x)
        key = dense(heads, name='key')(y)
        value = dense(heads, name='value')(y)
        if self.is_mutable_collection('intermediates') and not self.is_initializing():
            weights = attention.attention_weights(query, key)
            self.sow('intermediates', 'weights', weights, reduce_fn=_latest)
            mixed = jnp.einsum('bhqn,bnhk->bqhk', weights.astype(value.dtype), value)
        else:
            mixed = attention.attend(query, key, value, implementation=self.implementation)
        out = dense(width, axis=(-2, -1), name='out')(mixed)
        return nn.Dropout(self.dropout, deterministic=deterministic)(out)


class Block(nn.Module):
    """A pre-LayerNorm encoder block: equations 2 and 3."""

    config: ViTConfig
    regularization: Regularization
    compute: Compute
    shard_activations: ActivationSharding

    @nn.compact
    def __call__(
        self, x: Float[Array, 'b n d'], drop_rate: Float[Array, ''], deterministic: bool
    ) -> tuple[Float[Array, 'b n d'], None]:
        config, dropout, dtype = self.config, self.regularization.dropout, self.compute.dtype
        norm = functools.partial(nn.LayerNorm, epsilon=config.layer_norm_epsilon, dtype=dtype)
        residual = functools.partial(self._drop_branch, drop_rate, deterministic)

        x = self.shard_activations(x)
        y = norm(name='norm1')(x)
        attention = Attention(
            config.num_heads, dropout, dtype, self.compute.attention, name='attention'
        )
        x = self.shard_activations(x + residual(attention(y, y, deterministic)))
        y = norm(name='norm2')(x)
        mlp = Mlp(config.mlp_dim, config.gelu, dropout, dtype, name='mlp')
        x = self.shard_activations(x + residual(mlp(y, deterministic)))
        self.sow('intermediates', 'tokens', x, reduce_fn=_latest)
        return x, None

    def _drop_branch(
        self, rate: Float[Array, ''], deterministic: bool, branch: Float[Array, 'b n d']
    ) -> Float[Array, 'b n d']:
        """The branch, or nothing, for each example: scaled so that its mean is the branch."""
        if deterministic or self.regularization.stochastic_depth == 0:
            return branch
        keep = 1 - rate
        kept = jax.random.bernoulli(self.make_rng('dropout'), keep, (branch.shape[0], 1, 1))
        return jnp.where(kept, branch / keep, 0).astype(branch.dtype)


class Encoder(nn.Module):
    """The blocks: one set of stacked parameters, applied by a scan; then the final LayerNorm."""

    config: ViTConfig
    regularization: Regularization
    compute: Compute
    shard_activations: ActivationSharding

    @nn.compact
    def __call__(self, x: Float[Array, 'b n d'], deterministic: bool) -> Float[Array, 'b n d']:
        depth = self.config.depth
        unroll = min(self.compute.unroll, depth)
        block = rematerialized(Block, self.compute, in_loop=unroll == 1, static_argnums=(3,))
        scan = nn.scan(
            block,
            variable_axes={'params': 0, 'intermediates': 0},
            split_rngs={'params': True, 'dropout': True},
            in_axes=(0, nn.broadcast),
            length=depth,
            unroll=unroll,
        )
        blocks = scan(
            self.config, self.regularization, self.compute, self.shard_activations, name='block'
        )
        x, _ = blocks(
            x, jnp.linspace(0, self.regularization.stochastic_depth, depth), deterministic
        )
        if self.config.final_norm == 'after_pool':
            return x
        epsilon, dtype = self.config.layer_norm_epsilon, self.compute.dtype
        return nn.LayerNorm(epsilon=epsilon, dtype=dtype, name='norm')(x)


class AttentionPool(nn.Module):
    """A learned query attends to all tokens (MAP head; Scaling Vision Transformers, 3.2)."""

    config: ViTConfig
    compute: Compute

    @nn.compact
    def __call__(self, tokens: Float[Array, 'b n d']) -> Float[Array, 'b d']:
        config, dtype = self.config, self.compute.dtype
        probe = self.param('probe', nn.initializers.xavier_uniform(), (1, 1, config.width))
        probe = jnp.tile(probe, (tokens.shape[0], 1, 1)).astype(tokens.dtype)
        attention = Attention(config.num_heads, 0.0, dtype, 'xla', name='attention')
        x = attention(probe, tokens, True)
        y = nn.LayerNorm(epsilon=config.layer_norm_epsilon, dtype=dtype, name='norm')(x)
        return (x + Mlp(config.mlp_dim, config.gelu, 0.0, dtype, name='mlp')(y, True))[:, 0]


class ViT(nn.Module):
    """Images to logits: equations 1 to 4, with the head of the configuration."""

    config: ViTConfig
    regularization: Regularization
    compute: Compute
    shard_activations: ActivationSharding = unsharded

    def setup(self) -> None:
        config = self.config
        if config.backbone is not None:
            self.backbone = ResNet(config.backbone, self.compute)
        self.embedding = PatchEmbedding(config.patch_size, config.width, self.compute.dtype)
        if config.pool == 'cls':
            self.cls = self.param('cls', nn.initializers.zeros, (1, 1, config.width))
        if config.positions == 'learned':
            self.pos_embedding = self.param(
                'pos_embedding',
                nn.initializers.normal(0.02),
                (1, config.num_tokens, config.width),
            )
        self.dropout = nn.Dropout(self.regularization.dropout)
        self.encoder = Encoder(config, self.regularization, self.compute, self.shard_activations)
        if config.pool == 'map':
            self.pool = AttentionPool(config, self.compute)
        if config.final_norm == 'after_pool':
            epsilon = config.layer_norm_epsilon
            self.norm = nn.LayerNorm(epsilon=epsilon, dtype=self.compute.dtype)
        if config.representation_size is not None:
            self.pre_logits = nn.Dense(config.representation_size, dtype=self.compute.dtype)
        if config.num_classes is not None:
            self.head = zero_head(config.num_classes, config.head_bias)

    def __call__(
        self, images: Float[Array, 'b h w c'], deterministic: bool = True
    ) -> Float[Array, '...']:
        x = self.features(images, deterministic)
        return x if self.config.num_classes is None else self.head(x)

    def features(
        self, images: Float[Array, 'b h w c'], deterministic: bool = True
    ) -> Float[Array, '...']:
        """What the head is given: the pooled tokens, after the tanh layer where there is one."""
        x = images if self.config.backbone is None else self.backbone(images)
        x = self._with_positions(self.embedding(x))
        x = self.dropout(x, deterministic=deterministic)
        x = self._pooled(self.encoder(x, deterministic))
        if self.config.final_norm == 'after_pool':
            x = self.norm(x)
        if self.config.representation_size is not None:
            x = jnp.tanh(self.pre_logits(x))
        return x.astype(jnp.float32)

    def _with_positions(self, patches: Float[Array, 'b n d']) -> Float[Array, 'b m d']:
        """Equation 1: the class token is put before the patches, then positions are added."""
        config, x = self.config, patches
        if config.positions == 'sincos2d':
            x = x + positions.sincos2d(config.grid, config.width).astype(x.dtype)[None]
        if config.pool == 'cls':
            cls = jnp.tile(self.cls.astype(x.dtype), (x.shape[0], 1, 1))
            x = jnp.concatenate([cls, x], axis=1)
        if config.positions == 'learned':
            x = x + self.pos_embedding.astype(x.dtype)
        return x

    def _pooled(self, tokens: Float[Array, 'b n d']) -> Float[Array, '...']:
        match self.config.pool:
            case 'cls':
                return tokens[:, 0]  # equation 4
            case 'gap':
                return tokens.mean(axis=1)
            case 'map':
                return self.pool(tokens)
            case _:
                return tokens


class PatchEmbedding(nn.Module):
    """Each patch of an image or a feature map projected to one token: the E of equation 1."""

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
        tokens = jnp.einsum(
            'bipjqc,pqcd->bijd', patches.astype(self.dtype), kernel.astype(self.dtype)
        )
        return tokens.reshape(batch, -1, self.width) + bias.astype(self.dtype)


def _latest(_: Any, value: Array) -> Array:
    """Keep what was captured as an array, not as a tuple of calls."""
    return value
