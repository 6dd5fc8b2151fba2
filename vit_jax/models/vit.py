"""The Vision Transformer: what it computes from images, and nothing about training it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax import records
from vit_jax.models import attention, positions
from vit_jax.typing import Array, Float, Key, Params


@dataclasses.dataclass(kw_only=True)
class ViTConfig:
    """The architecture: all that decides which parameters there are and what they compute.

    Lengths in pixels are (height, width). The defaults are those of the paper's models.
    """

    image_size: tuple[int, int] = (224, 224)
    patch_size: tuple[int, int] = (16, 16)
    channels: int = 3
    width: int = 768
    depth: int = 12
    mlp_dim: int = 3072
    num_heads: int = 12
    num_classes: int | None = None  # None: no head, the outputs are the features
    pool: str = records.choice('cls', 'gap', 'map', 'none')  # none: every token
    representation_size: int | None = None  # width of the tanh layer before the head
    positions: str = records.choice('learned', 'sincos2d', 'none')
    gelu: str = records.choice('tanh', 'exact')
    layer_norm_epsilon: float = 1e-6
    head_bias: float = 0.0  # the head's bias at initialisation

    @property
    def grid(self) -> tuple[int, int]:
        """Patches in (height, width). Raises ValueError where they do not fill the image."""
        (height, width), (p, q) = self.image_size, self.patch_size
        if min(height, width, p, q) < 1 or height % p or width % q:
            near = max(1, round(height / max(1, p))) * p, max(1, round(width / max(1, q))) * q
            raise ValueError(
                f'image_size={self.image_size} is not a multiple of patch_size={self.patch_size}; '
                f'nearest: {near}'
            )
        return height // p, width // q

    @property
    def num_tokens(self) -> int:
        """Length of the sequence: the patches, and the class token where there is one."""
        return self.grid[0] * self.grid[1] + (self.pool == 'cls')


@dataclasses.dataclass(kw_only=True)
class Regularization:
    """What is dropped at random while training.

    Dropout follows every dense layer but the query, key and value projections, and the addition
    of positions (appendix B.1). Stochastic depth drops a residual branch of an example with a
    probability that grows linearly from 0 in the first block to the given one in the last.
    """

    dropout: float = 0.0
    stochastic_depth: float = 0.0


@dataclasses.dataclass(kw_only=True)
class Compute:
    """How the same function is computed: precision, memory, kernels.

    Parameters, LayerNorm statistics, softmax and logits are float32 whatever the dtype. `remat`
    decides what the backward pass recomputes: nothing, all but the large matrix products
    (`dots`), or the whole block. `unroll` is the number of blocks in one iteration of the scan:
    unrolled blocks run faster on GPUs, at the cost of compile time.
    """

    dtype: str = records.choice('float32', 'bfloat16')
    remat: str = records.choice('none', 'dots', 'block')
    unroll: int = 1
    attention: str = records.choice(*attention.IMPLEMENTATIONS)


class Model(NamedTuple):
    """A network as pure functions of a plain dictionary of float32 arrays.

    init(key) -> params
    apply(params, images, key=None) -> logits, or features without a head; a key switches
        dropout and stochastic depth on
    features(params, images) -> what the head would be given
    capture(params, images) -> (logits, intermediates by name, blocks stacked in front)
    """

    config: ViTConfig
    init: Callable[[Key[Array, '']], Params]
    apply: Callable[..., Float[Array, '...']]
    features: Callable[[Params, Float[Array, 'b h w c']], Float[Array, '...']]
    capture: Callable[[Params, Float[Array, 'b h w c']], tuple[Array, dict[str, Any]]]


def build(
    config: ViTConfig,
    *,
    regularization: Regularization | None = None,
    compute: Compute | None = None,
) -> Model:
    """The network of a configuration. Raises ValueError where the sizes do not fit together."""
    if config.width % config.num_heads:
        raise ValueError(f'width={config.width} is not a multiple of num_heads={config.num_heads}')
    _ = config.grid  # raises where the patches do not fill the image
    module = ViT(
        config=config,
        regularization=regularization or Regularization(),
        compute=compute or Compute(),
    )
    example = jax.ShapeDtypeStruct((1, *config.image_size, config.channels), jnp.float32)

    def init(key: Key[Array, '']) -> Params:
        return module.init(key, jnp.zeros(example.shape, example.dtype))['params']

    def apply(
        params: Params, images: Float[Array, 'b h w c'], key: Key[Array, ''] | None = None
    ) -> Float[Array, '...']:
        rngs = None if key is None else {'dropout': key}
        return module.apply({'params': params}, images, deterministic=key is None, rngs=rngs)

    def features(params: Params, images: Float[Array, 'b h w c']) -> Float[Array, '...']:
        return module.apply({'params': params}, images, method=module.features)

    def capture(
        params: Params, images: Float[Array, 'b h w c']
    ) -> tuple[Float[Array, '...'], dict[str, Any]]:
        logits, state = module.apply({'params': params}, images, mutable=['intermediates'])
        return logits, state['intermediates']

    return Model(config, init, apply, features, capture)


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

    @nn.compact
    def __call__(
        self, x: Float[Array, 'b n d'], drop_rate: Float[Array, ''], deterministic: bool
    ) -> tuple[Float[Array, 'b n d'], None]:
        config, dropout, dtype = self.config, self.regularization.dropout, self.compute.dtype
        norm = functools.partial(nn.LayerNorm, epsilon=config.layer_norm_epsilon, dtype=dtype)
        residual = functools.partial(self._drop_branch, drop_rate, deterministic)

        y = norm(name='norm1')(x)
        attention = Attention(
            config.num_heads, dropout, dtype, self.compute.attention, name='attention'
        )
        x = x + residual(attention(y, y, deterministic))
        y = norm(name='norm2')(x)
        mlp = Mlp(config.mlp_dim, config.gelu, dropout, dtype, name='mlp')
        x = x + residual(mlp(y, deterministic))
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
    """The blocks, one set of stacked parameters applied by a scan, and the final LayerNorm."""

    config: ViTConfig
    regularization: Regularization
    compute: Compute

    @nn.compact
    def __call__(self, x: Float[Array, 'b n d'], deterministic: bool) -> Float[Array, 'b n d']:
        depth, unroll = self.config.depth, min(self.compute.unroll, self.config.depth)
        policy = {
            'none': jax.checkpoint_policies.everything_saveable,
            'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            'block': jax.checkpoint_policies.nothing_saveable,
        }[self.compute.remat]
        block = Block
        if self.compute.remat != 'none':
            # Inside a rolled loop the compiler cannot merge the recomputation with the original.
            block = nn.remat(Block, policy=policy, prevent_cse=unroll > 1, static_argnums=(3,))
        scan = nn.scan(
            block,
            variable_axes={'params': 0, 'intermediates': 0},
            split_rngs={'params': True, 'dropout': True},
            in_axes=(0, nn.broadcast),
            length=depth,
            unroll=unroll,
        )
        blocks = scan(self.config, self.regularization, self.compute, name='block')
        x, _ = blocks(
            x, jnp.linspace(0, self.regularization.stochastic_depth, depth), deterministic
        )
        return nn.LayerNorm(
            epsilon=self.config.layer_norm_epsilon, dtype=self.compute.dtype, name='norm'
        )(x)


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

    def setup(self) -> None:
        config = self.config
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
        self.encoder = Encoder(config, self.regularization, self.compute)
        if config.pool == 'map':
            self.pool = AttentionPool(config, self.compute)
        if config.representation_size is not None:
            self.pre_logits = nn.Dense(config.representation_size, dtype=self.compute.dtype)
        if config.num_classes is not None:
            # Zero, so that fine-tuning starts from uniform predictions (section 3.2).
            self.head = nn.Dense(
                config.num_classes,
                kernel_init=nn.initializers.zeros,
                bias_init=nn.initializers.constant(config.head_bias),
            )

    def __call__(
        self, images: Float[Array, 'b h w c'], deterministic: bool = True
    ) -> Float[Array, '...']:
        x = self.features(images, deterministic)
        return x if self.config.num_classes is None else self.head(x)

    def features(
        self, images: Float[Array, 'b h w c'], deterministic: bool = True
    ) -> Float[Array, '...']:
        """What the head is given: the pooled tokens, after the tanh layer where there is one."""
        expected = (*self.config.image_size, self.config.channels)
        if images.shape[1:] != expected:
            raise ValueError(f'images are {images.shape[1:]}, the model takes {expected}')
        x = self._with_positions(self.embedding(images))
        x = self.dropout(x, deterministic=deterministic)
        x = self._pooled(self.encoder(x, deterministic))
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
    """Each patch of the image projected to one token: the E of equation 1."""

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
