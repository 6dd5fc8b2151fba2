"""The Vision Transformer: what it computes from images, and nothing about training it."""

import functools
from collections.abc import Callable
from typing import Any, assert_never

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Bool, Float
from vit_jax.models import on_mesh, ops, positions
from vit_jax.models.attention import attend, attention_weights
from vit_jax.models.layers import (
    DistilledHead,
    Mlp,
    PatchEmbedding,
    drop_branch,
    make_head,
)
from vit_jax.models.options import Compute, Regularization, rematerialized
from vit_jax.models.positions import PositionsAt, Table
from vit_jax.models.resnet import ResNet
from vit_jax.models.stacked import Step, in_turn
from vit_jax.models.taps import needs_everything, seen, tap
from vit_jax.models.vit_config import ViTConfig


class Attention(nn.Module):
    """Multi-head attention from one sequence to another, or from its first tokens to all.

    Flax's own MultiHeadDotProductAttention has the same parameters; here queries and keys are at
    hand for taps, and the kernel is chosen by `attend`. With norms of queries and keys logits
    cannot grow without end (ViT-22B, section 2).
    """

    num_heads: int
    dropout: float
    compute: Compute
    use_bias: bool = True  # of queries, keys and values
    qk_norm: Callable[..., nn.Module] | None = None
    relative: bool = False  # are there logits of offsets?

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'b q d'],
        y: Float[Array, 'b n d'],
        rotate: Callable[[Array], Array] = lambda x: x,  # of queries and keys, by their positions
    ) -> Float[Array, 'b q d']:
        width = x.shape[-1]
        dense = functools.partial(ops.Dense, compute=self.compute)
        heads = self.num_heads, width // self.num_heads
        names = 'query', 'key', 'value'
        layers = [dense(heads, use_bias=self.use_bias, name=name) for name in names]
        if x is y and self.compute.is_for_cpu:
            query, key, value = ops.side_by_side(x, layers)
        else:
            query, key, value = (layer(of) for layer, of in zip(layers, (x, y, y), strict=True))
        if self.qk_norm is not None:
            query = self.qk_norm(name='query_norm')(query)
            key = self.qk_norm(name='key_norm')(key)
        query, key = rotate(query), rotate(key)
        offsets = None
        if self.relative:
            shape = 2 * y.shape[1] - 1, *heads
            offsets = self.param('relative', nn.initializers.normal(0.02), shape)
            # Fewer queries are the first ones: R begins at the offset of the last of them to key 0.
            offsets = offsets[y.shape[1] - x.shape[1] :].astype(query.dtype)
        tap(self, 'weights', lambda: attention_weights(query, key, offsets))
        kernel = self.compute.attention
        mixed = attend(query, key, value, relative=offsets, implementation=kernel)
        mixed = seen(self, 'heads', mixed)
        out = ops.apart(dense((width,), axes=2, name='out')(mixed), self.compute)
        return nn.Dropout(self.dropout, deterministic=False)(out)


class Part(nn.Module):
    """What the network, its encoder, each block and the pooling are made from."""

    config: ViTConfig
    regularization: Regularization
    compute: Compute

    @property
    def norm_layer(self) -> Callable[..., nn.Module]:
        """Makes its norms, by name."""
        return functools.partial(
            ops.norm, self.config.norm, self.compute, self.config.layer_norm_epsilon
        )

    def position_table(self, at: PositionsAt) -> Table | None:
        """What is added there, of parameters of this module; None: nothing."""
        config = self.config
        if config.positions_at != at:
            return None
        sizes = {'length': config.num_tokens - config.registers, 'width': config.width}
        return positions.table(config.positions, config.grid, self.param, **sizes)


class Block(Part):
    """A pre-LayerNorm encoder block: equations 2 and 3, or without their skip connections.

    The parallel one is y = LN(x), x + Attention(y) + MLP(y) (ViT-22B, section 2).
    """

    num_outputs: int | None = None  # only the first so many tokens are computed; None: all

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'b n d'],
        drop_rate: Float[Array, ''],
        has_skips: Bool[Array, ''] | None,  # None: as all have them
        shared: Table | None,  # positions that every block adds, the same; None: there are none
    ) -> tuple[Float[Array, 'b r d'], None]:
        config, dropout, compute = self.config, self.regularization.dropout, self.compute
        norm = self.norm_layer

        def added(
            x: Float[Array, 'b n d'], branch: Float[Array, 'b n d'], *, name: str
        ) -> Float[Array, 'b n d']:
            skip = x if has_skips is None else jnp.where(has_skips, x, 0)
            if config.layer_scale is not None:
                constant = nn.initializers.constant(config.layer_scale)
                branch = branch * self.param(f'{name}_scale', constant, (config.width,))
                branch = branch.astype(x.dtype)
            tap(self, f'{name}/out', lambda: branch)
            tap(self, f'{name}/residual', lambda: (skip, branch))
            if self.regularization.stochastic_depth > 0:
                branch = drop_branch(branch, drop_rate, key=self.make_rng('dropout'))
            return on_mesh.keep_split(skip + branch)

        for table in shared, self.position_table('every_layer'):
            x = positions.add(x, table, before=config.positioned_prefix)
        x = on_mesh.keep_split(x)
        y = seen(self, 'norm1', norm(name='norm1')(x))
        z = y
        if self.num_outputs is not None:
            x, z = (ops.first_tokens(of, self.num_outputs, compute) for of in (x, y))
        qk_norm, relative = norm if config.qk_norm else None, config.positions == 'relative'
        heads = config.num_heads, dropout, compute, config.qkv_bias, qk_norm, relative
        attention = Attention(*heads, name='attention')
        head = config.width // config.num_heads
        rotate = positions.rotation(config.positions, config.grid, config.prefix, head)
        x = added(x, attention(z, y, rotate), name='attention')
        if not config.parallel:
            z = seen(self, 'norm2', norm(name='norm2')(x))
        mlp = Mlp(config.mlp_dim, config.gelu, dropout, compute, name='mlp')
        x = added(x, mlp(z), name='mlp')
        return seen(self, 'tokens', x), None


# What each of the l blocks has of its own besides parameters: the rate at which its branches are
# dropped, and whether it has skip connections (None: all have).
PerBlock = tuple[Float[Array, 'l'], Bool[Array, 'l'] | None]


class Encoder(Part):
    """The blocks, whose parameters are stacked, in a scan; then the final norm, if before pooling.

    With `read`, the caller uses the first so many tokens alone, and is perhaps given no others.
    """

    @nn.compact
    def __call__(
        self, x: Float[Array, 'b n d'], shared: Table | None, *, read: int | None = None
    ) -> Float[Array, 'b r d']:
        config = self.config
        drop_rates = jnp.linspace(0, self.regularization.stochastic_depth, config.depth)
        has_skips = None
        if config.blocks_without_skips:
            has_skips = ~jnp.isin(jnp.arange(config.depth), jnp.array(config.blocks_without_skips))
        per_block = drop_rates, has_skips
        if read is None or self.compute.last_block == 'whole' or needs_everything(self):
            x = self._all_tokens(x, per_block, shared)
        else:
            x = self._first_tokens(x, per_block, shared, read)
        if config.final_norm == 'after_pool':
            return x
        return seen(self, 'norm', self.norm_layer(name='norm')(x))

    def _all_tokens(
        self, x: Float[Array, 'b n d'], per_block: PerBlock, shared: Table | None
    ) -> Float[Array, 'b n d']:
        assert self.compute.unroll != 'auto'  # `build` chose
        unroll = min(self.compute.unroll, self.config.depth)
        scan = nn.scan(
            rematerialized(Block, self.compute, in_loop=unroll == 1, by=nn.remat),
            variable_axes={True: 0},  # every collection, taps as well: the depth in front
            split_rngs={'params': True, 'dropout': True},
            in_axes=(0, 0, nn.broadcast),
            length=self.config.depth,
            unroll=unroll,
        )
        blocks = scan(self.config, self.regularization, self.compute, name='block')
        return blocks(x, *per_block, shared)[0]

    def _first_tokens(
        self, x: Float[Array, 'b n d'], per_block: PerBlock, shared: Table | None, count: int
    ) -> Float[Array, 'b r d']:
        """As `_all_tokens`, but only the first `count`: the last block computes no others.

        Flax's scan would have all blocks do the same. Here nothing is dropped at random.
        """

        def step(compute: Compute, num_outputs: int | None = None) -> Step:
            block = Block(self.config, self.regularization, compute, num_outputs, parent=None)

            def apply(x: Float[Array, 'b n d'], own: Any) -> Float[Array, 'b r d']:
                params, *others = own
                return block.apply({'params': params}, x, *others, shared)[0]

            return apply

        each, last = step(self.compute), step(self.compute.for_few_queries, count)
        stacked = self.variables['params']['block'], *per_block
        return in_turn(each, last, x, stacked, depth=self.config.depth, compute=self.compute)


class AttentionPool(Part):
    """A learned query attends to all tokens (MAP head; Scaling Vision Transformers, 3.2)."""

    @nn.compact
    def __call__(self, tokens: Float[Array, 'b n d']) -> Float[Array, 'b d']:
        config, compute = self.config, self.compute
        probe = self.param('probe', nn.initializers.xavier_uniform(), (1, 1, config.width))
        probe = jnp.tile(probe, (tokens.shape[0], 1, 1)).astype(tokens.dtype)
        few = compute.for_few_queries
        attention = Attention(config.num_heads, 0.0, few, config.qkv_bias, name='attention')
        x = attention(probe, tokens)
        y = self.norm_layer(name='norm')(x)
        return (x + Mlp(config.mlp_dim, config.gelu, 0.0, compute, name='mlp')(y))[:, 0]


class ViT(Part):
    """Images to logits: equations 1 to 4, with the head of the configuration."""

    def setup(self) -> None:
        config, zeros, norm = self.config, nn.initializers.zeros, self.norm_layer
        if config.backbone is not None:
            self.backbone = ResNet(config.backbone, self.compute)
        self.embedding = PatchEmbedding(
            config.patch_size, config.width, self.compute.dtype, use_bias=not config.pre_norm
        )
        if config.positioned_prefix > 0:
            self.cls = self.param('cls', zeros, (1, 1, config.width))
        if config.positioned_prefix > 1:
            self.dist = self.param('dist', zeros, (1, 1, config.width))
        if config.registers:  # equal ones would stay equal
            normal = nn.initializers.normal(0.02)
            self.registers = self.param('registers', normal, (1, config.registers, config.width))
        self.positions = self.position_table('stem')
        self.shared = self.position_table('every_layer_shared')
        self.dropout = nn.Dropout(self.regularization.dropout, deterministic=False)
        if config.pre_norm:
            self.pre_norm = norm()
        parts = config, self.regularization, self.compute
        self.encoder = Encoder(*parts)
        if config.pool == 'map':
            self.pool = AttentionPool(*parts)
        if config.final_norm == 'after_pool':
            self.norm = norm()
        if config.representation_size is not None:
            self.pre_logits = nn.Dense(config.representation_size, dtype=self.compute.dtype)
        if config.num_classes is not None:
            head = functools.partial(
                make_head, config.head, config.num_classes, bias=config.head_bias
            )
            self.head = DistilledHead(head) if config.pool == 'cls_dist' else head()

    def __call__(self, images: Float[Array, 'b h w c']) -> Float[Array, '...']:
        x = self.features(images)
        return x if self.config.num_classes is None else self.head(x)

    def features(self, images: Float[Array, 'b h w c']) -> Float[Array, '...']:
        """What the head is given: the pooled tokens, after the tanh layer where there is one."""
        read = self.config.num_tokens_read
        x = self._pooled(self._encoded(self._patches(images), read=read))
        if self.config.final_norm == 'after_pool':
            x = self.norm(x)
        if self.config.representation_size is not None:
            x = jnp.tanh(self.pre_logits(x))
        return x.astype(jnp.float32)

    def _patches(self, images: Float[Array, 'b h w c']) -> Float[Array, 'b n d']:
        return self.embedding(images if self.config.backbone is None else self.backbone(images))

    def _encoded(
        self, patches: Float[Array, 'b n d'], *, read: int | None = None
    ) -> Float[Array, 'b r d']:
        return self.encoder(self._embedded(patches), self.shared, read=read)

    def _embedded(self, x: Float[Array, 'b n d']) -> Float[Array, 'b m d']:
        """All tokens with their positions: equation 1. Registers come after, and have none."""
        before = self.config.positioned_prefix
        for token in ('dist', 'cls')[2 - before :]:
            x = jnp.concatenate([self._for_each(x, getattr(self, token)), x], axis=1)
        x = self.dropout(positions.add(x, self.positions, before=before))
        if self.config.registers:
            registers = self._for_each(x, self.registers)
            x = jnp.concatenate([x[:, :before], registers, x[:, before:]], axis=1)
        if self.config.pre_norm:
            x = self.pre_norm(x)
        return seen(self, 'embedding', x)

    def _for_each(
        self, x: Float[Array, 'b n d'], tokens: Float[Array | np.ndarray, '1 r d']
    ) -> Float[Array, 'b r d']:
        """The learned tokens for each image of the batch."""
        return jnp.tile(tokens.astype(x.dtype), (x.shape[0], 1, 1))

    def _pooled(self, tokens: Float[Array, 'b n d']) -> Float[Array, '...']:
        patches = tokens[:, self.config.prefix :]
        match self.config.pool:
            case 'cls':
                return tokens[:, 0]  # equation 4
            case 'gap':
                return patches.mean(axis=1)
            case 'map':
                return self.pool(patches)
            case 'none':
                return tokens
            case 'cls_gap':
                return jnp.concatenate([tokens[:, 0], patches.mean(axis=1)], axis=-1)
            case 'cls_dist':
                return jnp.concatenate([tokens[:, 0], tokens[:, 1]], axis=-1)
            case other:
                assert_never(other)
