"""The Vision Transformer (equations 1 to 4): patches, blocks, pooling, head."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, assert_never

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Bool, Float, Int, Key, Scalar, is_off, require
from vit_jax.models import activation_sharding, positions
from vit_jax.models.attention import attend, attention_weights
from vit_jax.models.compute import Compute, Regularization, apply_remat
from vit_jax.models.config import Gelu, PositionsAt, ViTConfig
from vit_jax.models.heads import compute_logits
from vit_jax.models.masked_patches import Corruption, MaskedPatchHead
from vit_jax.models.positions import Kept, SharedPositions, Table, Tokens
from vit_jax.models.resnet import ResNet
from vit_jax.models.taps import COLLECTION, tap, tap_array

Images = Float[Array, 'b h w c']
FirstTokens = Float[Array, 'b r d']
# logits; features: input of the head; patches: outputs of each patch; tokens: encoded tokens
OutputKind = Literal['logits', 'features', 'patches', 'tokens']
_GELUS: dict[Gelu, Callable[[Array], Array]] = {
    'tanh': functools.partial(nn.gelu, approximate=True),
    'exact': functools.partial(nn.gelu, approximate=False),
    'quick': lambda x: x * nn.sigmoid(1.702 * x),
}


class Dense(nn.Module):
    """Dense layer over the last `axes` axes of each token, with the parameters of nn.DenseGeneral.

    With layout `flat`, the tokens of all images are rows of one matrix, and XLA sums bias gradients
    over one axis. To sum over two axes, XLA would first write the transposed tokens in float32.
    TPUs use layout `batched`: they tile the last two axes, so the reshape would copy the tokens.
    """

    features: tuple[int, ...]
    compute: Compute
    axes: int = 1
    use_bias: bool = True
    bias_init: Callable[..., Array] = nn.initializers.zeros

    @nn.compact
    def __call__(self, x: Float[Array, 'b n ...']) -> Float[Array, 'b n ...']:
        tokens, inputs = x.shape[: -self.axes], x.shape[-self.axes :]
        size, dtype = (math.prod(inputs), math.prod(self.features)), self.compute.dtype

        def init(key: Key[Array, '']) -> Array:  # Xavier with fan-in and fan-out of the matrix
            return nn.initializers.xavier_uniform()(key, size).reshape(*inputs, *self.features)

        x, kernel = x.astype(dtype), self.param('kernel', init).astype(dtype)
        bias = self.param('bias', self.bias_init, self.features) if self.use_bias else jnp.zeros(())
        if self.compute.layout == 'batched':
            return jnp.tensordot(x, kernel, self.axes) + bias.astype(dtype)
        rows = x.reshape(-1, size[0]) @ kernel.reshape(size) + bias.astype(dtype).reshape(-1)
        return rows.reshape(*tokens, *self.features)


class ViTModule(nn.Module):
    """Base class of the modules of a Vision Transformer."""

    config: ViTConfig
    regularization: Regularization
    compute: Compute

    def position_table(self, at: PositionsAt) -> Table | None:
        """Returns the positions to add at this place, or None."""
        config, prefix = self.config, self.config.num_class_tokens
        if config.positions_at != at:
            return None
        kind, grid, width = config.positions, config.grid, config.width
        return positions.make_table(kind, grid, width, class_tokens=prefix, param=self.param)

    def normalize(self, x: Float[Array, 'b ...'], name: str) -> Float[Array, 'b ...']:
        """Normalizes the last axis; with layout `flat`, tokens are rows as in `Dense`."""
        kind = nn.RMSNorm if self.config.norm == 'rms' else nn.LayerNorm
        norm = kind(epsilon=self.config.layer_norm_epsilon, dtype=self.compute.dtype, name=name)
        if self.compute.layout == 'batched' or x.ndim == 2:
            return norm(x)
        return norm(x.reshape(-1, *x.shape[2:])).reshape(x.shape)


class PatchEmbedding(ViTModule):
    """Projects each patch of an image or a feature map to a token (E in equation 1).

    This is a convolution whose stride is the kernel size, computed as a matrix product. The kernel
    has the shape of an `nn.Conv` kernel.
    """

    @nn.compact
    def __call__(self, images: Images) -> Tokens:
        (rows, columns), (p, q) = self.config.grid, self.config.patch_size
        (batch, *_, channels), width = images.shape, self.config.width
        kernel = self.param('kernel', nn.initializers.lecun_normal(), (p, q, channels, width))
        images = images[:, : rows * p, : columns * q]
        patches = images.reshape(batch, rows, p, columns, q, channels)
        patches, kernel = (x.astype(self.compute.dtype) for x in (patches, kernel))
        tokens = jnp.einsum('bipjqc,pqcd->bijd', patches, kernel)
        tokens = tokens.reshape(batch, rows * columns, width)
        if self.config.pre_norm:  # as in CLIP, without a bias
            return tokens
        bias = self.param('bias', nn.initializers.zeros, (width,))
        return tokens + bias.astype(self.compute.dtype)


class Dropout(nn.Module):
    """Dropout as in `nn.Dropout`, whose rate may also be traced."""

    rate: Scalar

    @nn.compact
    def __call__(self, x: Tokens) -> Tokens:
        if is_off(self.rate):
            return x
        keep = 1 - self.rate
        kept = jax.random.bernoulli(self.make_rng('dropout'), keep, x.shape)
        return jnp.where(kept, x / jnp.asarray(keep, x.dtype), 0)


class Attention(ViTModule):
    """Multi-head attention, in which tokens `x` attend to tokens `y`.

    It has the parameters of Flax's MultiHeadDotProductAttention. With `qk_norm`, normalized queries
    and keys keep the logits bounded (ViT-22B, section 2).
    """

    in_block: bool = True  # False: attention pooling

    @nn.compact
    def __call__(
        self, x: Float[Array, 'b q d'], y: Float[Array, 'b n d'], kept: Kept | None = None
    ) -> Float[Array, 'b q d']:
        config = self.config
        heads, size = config.num_heads, config.width // config.num_heads
        project = functools.partial(Dense, (heads, size), self.compute, use_bias=config.qkv_bias)
        query, key = project(name='query')(x), project(name='key')(y)
        value = project(name='value')(y)
        relative = None
        if self.in_block:
            if config.qk_norm:
                query = self.normalize(query, 'query_norm')
                key = self.normalize(key, 'key_norm')
            if config.positions in positions.ROTARY:
                counts = {'class_tokens': config.num_class_tokens, 'registers': config.registers}
                angles = positions.make_angles(config.positions, config.grid, size, **counts)
                prefix = config.num_prefix_tokens
                query, key = positions.rotate((query, key), angles, kept, prefix)
            if config.positions == 'relative':
                normal, offsets = nn.initializers.normal(0.02), 2 * y.shape[1] - 1
                relative = self.param('relative', normal, (offsets, heads, size))
                # If `x` has fewer tokens than `y`, they are the leading ones, and R starts at the
                # lowest offset of the last query.
                relative = relative[y.shape[1] - x.shape[1] :].astype(query.dtype)
        tap(self, 'weights', lambda: attention_weights(query, key, relative))
        kernel = self.compute.attention
        assert kernel != 'auto'  # resolved by `build`
        mixed = attend(query, key, value, relative=relative, implementation=kernel)
        mixed = tap_array(self, 'heads', mixed)
        out = Dense((config.width,), self.compute, axes=2, name='out')(mixed)
        return Dropout(self.regularization.dropout)(out)


class Mlp(ViTModule):
    """MLP of a block: two dense layers with a GELU between them.

    With `gelu=None` it is a SwiGLU ("GLU Variants Improve Transformer", equation 6, with biases):
    the output of the first layer is multiplied by the SiLU of a third layer.
    """

    @nn.compact
    def __call__(self, x: Tokens) -> Tokens:
        config, tiny = self.config, nn.initializers.normal(1e-6)
        dense = functools.partial(Dense, compute=self.compute, bias_init=tiny)
        drop = Dropout(self.regularization.dropout)
        hidden = dense((config.mlp_dim,), name='dense1')(x)
        if config.gelu is None:
            hidden = nn.silu(dense((config.mlp_dim,), name='gate')(x)) * hidden
        else:
            gelu = _GELUS[config.gelu]
            if self.compute.layout == 'flat':  # the backward pass needs only its input
                gelu = jax.checkpoint(gelu)
            hidden = gelu(hidden)
        hidden = tap_array(self, 'hidden', hidden)
        return drop(dense((config.width,), name='dense2')(drop(hidden)))


class PerBlock(NamedTuple):
    """Constants of one block, or of all blocks, stacked along a leading depth axis."""

    drop_rate: Float[Array, '*l']  # probability of stochastic depth
    has_skips: Bool[Array, '*l'] | None  # None: all blocks have skip connections


class Block(ViTModule):
    """Pre-norm encoder block: x + MSA(LN(x)), then x + MLP(LN(x)) (equations 2 and 3).

    A parallel block computes x + MSA(y) + MLP(y) with y = LN(x) (ViT-22B, section 2). A call takes
    the tokens, the block's `own` constants, and the positions that are `shared` by all blocks.
    """

    num_outputs: int | None = None  # number of leading tokens to compute; None: all

    @nn.compact
    def __call__(
        self, x: Tokens, own: PerBlock, shared: SharedPositions
    ) -> tuple[FirstTokens, None]:
        config, parts = self.config, (self.config, self.regularization, self.compute)
        for table in shared.table, self.position_table('every_layer'):
            x = positions.add(x, table, config.num_class_tokens, shared.kept)
        x = activation_sharding.keep_sharded(x)
        y = inputs = tap_array(self, 'norm1', self.normalize(x, 'norm1'))
        if self.num_outputs is not None:
            x, inputs = (self._materialize(tokens)[:, : self.num_outputs] for tokens in (x, y))

        attention = Attention(*parts, name='attention')(inputs, y, shared.kept)
        x = self._add_branch(x, attention, own, name='attention')
        if not config.parallel:
            inputs = tap_array(self, 'norm2', self.normalize(x, 'norm2'))
        mlp = Mlp(*parts, name='mlp')(inputs)
        x = self._add_branch(x, mlp, own, name='mlp')
        return tap_array(self, 'tokens', x), None

    def _materialize(self, x: Tokens) -> Tokens:
        """Forces XLA to write the tokens to memory before they are sliced.

        Otherwise, because of this slice, XLA on GPUs transposes the tokens of all blocks.
        """
        if self.compute.layout == 'batched':
            return x
        return jax.lax.optimization_barrier(x.reshape(-1, x.shape[-1])).reshape(x.shape)

    def _add_branch(self, x: Tokens, branch: Tokens, own: PerBlock, *, name: str) -> Tokens:
        """Returns x + branch, with LayerScale and stochastic depth."""
        config = self.config
        skip = x if own.has_skips is None else jnp.where(own.has_skips, x, 0)
        if config.layer_scale is not None:
            constant = nn.initializers.constant(config.layer_scale)
            branch = branch * self.param(f'{name}_scale', constant, (config.width,))
            branch = branch.astype(x.dtype)
        tap(self, f'{name}/out', lambda: branch)
        tap(self, f'{name}/residual', lambda: (skip, branch))
        if not is_off(self.regularization.stochastic_depth):
            branch = drop_branch(branch, own.drop_rate, key=self.make_rng('dropout'))
        return activation_sharding.keep_sharded(skip + branch)


def drop_branch(branch: Tokens, rate: Float[Array, ''], *, key: Key[Array, '']) -> Tokens:
    """Drops the branch of each example with probability `rate` (stochastic depth).

    The others are divided by 1 - rate ("Deep Networks with Stochastic Depth" instead multiplies by
    1 - rate in evaluation).
    """
    keep = 1 - rate
    kept = jax.random.bernoulli(key, keep, (branch.shape[0], 1, 1))
    return jnp.where(kept, branch / keep, 0).astype(branch.dtype)


class Encoder(ViTModule):
    """The blocks, with parameters stacked along the depth, and the final norm before pooling."""

    @nn.compact
    def __call__(
        self, x: Tokens, shared: SharedPositions, num_read: int | None = None
    ) -> FirstTokens:
        """Encodes tokens.

        Args:
          x: Tokens.
          shared: Positions that are the same in all blocks.
          num_read: Number of leading tokens that are read; None: all.

        Returns:
          All tokens, or only those that are read.
        """
        config = self.config
        rate, kind = self.regularization.stochastic_depth, self.regularization.stochastic_depth_kind
        first = rate if kind == 'constant' else 0
        own = PerBlock(jnp.linspace(first, rate, config.depth), None)
        if without := config.blocks_without_skips:
            own = own._replace(has_skips=~jnp.isin(jnp.arange(config.depth), jnp.array(without)))
        # Initialization and taps need all parameters and tokens.
        needs_all = self.is_initializing() or self.is_mutable_collection(COLLECTION)
        if needs_all or self.compute.last_block == 'whole':
            x = self._all_tokens(x, own, shared)
        else:
            x = self._first_tokens(x, own, shared, num_read)
        if config.final_norm == 'after_pool':
            return x
        return tap_array(self, 'norm', self.normalize(x, 'norm'))

    def _all_tokens(self, x: Tokens, own: PerBlock, shared: SharedPositions) -> Tokens:
        unroll = min(int(self.compute.unroll), self.config.depth)
        scan = nn.scan(
            apply_remat(Block, self.compute, in_loop=unroll == 1, wrap=nn.remat),
            variable_axes={True: 0},  # all variables are stacked along axis 0
            split_rngs={'params': True, 'dropout': True},
            in_axes=(0, nn.broadcast),
            length=self.config.depth,
            unroll=unroll,
        )
        blocks = scan(self.config, self.regularization, self.compute, name='block')
        return blocks(x, own, shared)[0]

    def _first_tokens(
        self, x: Tokens, own: PerBlock, shared: SharedPositions, num_read: int | None
    ) -> FirstTokens:
        """Like `_all_tokens`, but the last block computes only the tokens that are read.

        This saves 7 % of the multiply-adds of B/16. Dropout and stochastic depth prevent it.
        """
        depth, unroll = self.config.depth, int(self.compute.unroll)

        def run(x: Tokens, variables: Any, **options: Any) -> FirstTokens:
            params, own = variables
            block = Block(self.config, self.regularization, self.compute, parent=None, **options)
            return block.apply({'params': params}, x, own, shared)[0]

        stacked = self.variables['params']['block'], own
        leaves, tree = jax.tree.flatten(stacked)
        depths = {len(leaf) for leaf in leaves}
        wrong = f'encoder/block: parameters of {max(depths)} blocks; expected {depth} blocks'
        require(depths == {depth}, wrong)

        def take(i: Int[Array, '']) -> Any:
            index = functools.partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False)
            return jax.tree.map(index, stacked)

        if unroll < depth:
            # Blocks are indexed: a scan over slices would copy the parameters and their gradients.
            step = apply_remat(lambda x, i: run(x, take(i)), self.compute, in_loop=unroll == 1)
            x = jax.lax.fori_loop(0, depth - 1, lambda i, x: step(x, i), x, unroll=unroll)
            # The barrier hides that the index is constant. Otherwise XLA would put the gradient of
            # the last block in a separate buffer.
            last = take(jax.lax.optimization_barrier(jnp.int32(depth - 1)))
        else:
            # With a single unstack, the backward pass writes the gradient of each block once.
            parts = zip(*map(jnp.unstack, leaves), strict=True)
            *first, last = (jax.tree.unflatten(tree, part) for part in parts)
            for part in first:
                x = apply_remat(run, self.compute)(x, part)
        return run(x, last, num_outputs=num_read)


class AttentionPool(ViTModule):
    """Attention pooling with a learned query (Scaling Vision Transformers, section 3.2)."""

    @nn.compact
    def __call__(self, tokens: Tokens) -> Float[Array, 'b d']:
        parts = self.config, Regularization(), self.compute
        probe = self.param('probe', nn.initializers.xavier_uniform(), (1, 1, self.config.width))
        probe = tile_over_batch(probe, tokens)
        x = Attention(*parts, in_block=False, name='attention')(probe, tokens)
        y = self.normalize(x, 'norm')
        return (x + Mlp(*parts, name='mlp')(y))[:, 0]


def tile_over_batch(tokens: Float[Array | np.ndarray, '1 r d'], like: Tokens) -> FirstTokens:
    """Repeats learned tokens for each image of a batch."""
    return jnp.tile(tokens.astype(like.dtype), (like.shape[0], 1, 1))


class ViT(ViTModule):
    """Vision Transformer from images to an `OutputKind`.

    Without a head, it returns features in place of logits. `corruption` replaces patch embeddings.
    Only the patches `kept` are encoded; None: those that PatchDropout keeps.
    """

    head: nn.Module | None

    @nn.compact
    def __call__(
        self,
        images: Images,
        corruption: Corruption | None = None,
        kept: Kept | None = None,
        *,
        output: OutputKind = 'logits',
    ) -> Float[Array, '...']:
        config, parts = self.config, (self.config, self.regularization, self.compute)
        if config.backbone is not None:
            images = ResNet(config.backbone, self.compute, name='backbone')(images)
        x = PatchEmbedding(*parts, name='embedding')(images)
        if config.patch_outputs is not None:
            patch_head = MaskedPatchHead(config.patch_outputs, config.width, name='masked')
            if corruption is not None:
                x = patch_head.corrupt(x, corruption)
        x, kept = self._embed(x, kept)
        shared = SharedPositions(self.position_table('every_layer_shared'), kept)
        num_read = None if output == 'tokens' else config.num_tokens_read
        x = Encoder(*parts, name='encoder')(x, shared, num_read)
        if config.patch_outputs is not None and self.is_initializing():
            patch_head(x)  # creates its parameters
        if output == 'patches':
            x = x[:, config.num_prefix_tokens :]
        elif output != 'tokens':
            x = self._pool(x)
        if config.final_norm == 'after_pool':
            x = self.normalize(x, 'norm')
        if output == 'tokens':
            return x
        if output == 'patches':
            return activation_sharding.keep_sharded(patch_head(x))
        if config.representation_size is not None:
            size, dtype = config.representation_size, self.compute.dtype
            x = jnp.tanh(nn.Dense(size, dtype=dtype, name='pre_logits')(x))
        x = x.astype(jnp.float32)
        return x if output == 'features' else compute_logits(config, self.head, x)

    def _embed(
        self, x: Tokens, kept: Kept | None = None
    ) -> tuple[Float[Array, 'b m d'], Kept | None]:
        """Adds class tokens, positions and registers (equation 1). Registers have no positions.

        Returns:
          The tokens, and the indices of the patches that are encoded; None: all.
        """
        config, before = self.config, self.config.num_class_tokens
        zeros, normal = nn.initializers.zeros, nn.initializers.normal(0.02)
        names = ('cls', 'dist')[:before] if before <= 2 else ('cls',)
        shape = 1, before // max(1, len(names)), config.width
        cls_tokens = [self.param(name, zeros, shape) for name in names]
        if config.registers:  # not zeros: equal registers would stay equal
            registers = self.param('registers', normal, (1, config.registers, config.width))
        x = jnp.concatenate([*(tile_over_batch(token, x) for token in cls_tokens), x], axis=1)
        x = positions.add(x, self.position_table('stem'), before)
        if kept is None and self.regularization.patch_dropout > 0:
            patches = x.shape[1] - before
            count = self.regularization.num_kept(patches)
            kept = positions.draw_kept(self.make_rng('dropout'), (len(x), patches), count)
        if kept is not None:
            x = positions.keep_patches(x, kept, before)
        x = Dropout(self.regularization.dropout, name='dropout')(x)
        if config.registers:
            parts = x[:, :before], tile_over_batch(registers, x), x[:, before:]
            x = jnp.concatenate(parts, axis=1)
        if config.pre_norm:
            x = self.normalize(x, 'pre_norm')
        return tap_array(self, 'embedding', x), kept

    def _pool(self, tokens: Tokens) -> Float[Array, '...']:
        config = self.config
        patches = tokens[:, config.num_prefix_tokens :]
        match config.pool:
            case 'cls':
                return tokens[:, 0]  # equation 4
            case 'gap':
                return patches.mean(axis=1)
            case 'map':
                parts = config, self.regularization, self.compute
                return AttentionPool(*parts, name='pool')(patches)
            case 'none':
                return tokens
            case 'cls_gap':
                return jnp.concatenate([tokens[:, 0], patches.mean(axis=1)], axis=-1)
            case 'cls_dist':
                return jnp.concatenate([tokens[:, 0], tokens[:, 1]], axis=-1)
            case other:
                assert_never(other)
