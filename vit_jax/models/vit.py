"""The Vision Transformer (equations 1 to 4).

The first part is the model: its layers, the block, the encoder, and `ViT`, which joins them. The
second part, "Fast paths", exists only because XLA runs it faster. To read the model, it suffices to
know that `Dense` is a dense layer, that `slice_first_tokens` returns all tokens, except in a last
block that computes only class tokens, and that `run_blocks_for_first_tokens` applies all blocks.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Bool, Float, Int, Key, Params, Scalar, UserError, is_off
from vit_jax.models import activation_sharding, positions
from vit_jax.models.attention import attend, attention_weights
from vit_jax.models.compute import Compute, Regularization, apply_remat
from vit_jax.models.config import Gelu, PositionsAt, ViTConfig
from vit_jax.models.heads import compute_logits, pool_tokens
from vit_jax.models.masked_patches import Corruption, MaskedPatchHead
from vit_jax.models.positions import KeptPatches, SharedPositions, Table, Tokens
from vit_jax.models.resnet import ResNet
from vit_jax.models.taps import COLLECTION, tap, tap_array

M = TypeVar('M')
Images = Float[Array, 'b h w c']
FirstTokens = Float[Array, 'b r d']
LearnedTokens = Float[Array | np.ndarray, '1 _ d']
Queries = Float[Array, 'b q h k']
Keys = Float[Array, 'b n h k']
# logits; features: input of the head; patches: outputs of each patch; tokens: encoded tokens
OutputKind = Literal['logits', 'features', 'patches', 'tokens']
_GELUS: dict[Gelu, Callable[[Array], Array]] = {
    'tanh': functools.partial(nn.gelu, approximate=True),
    'exact': functools.partial(nn.gelu, approximate=False),
    'quick': lambda x: x * nn.sigmoid(1.702 * x),
}


class ViTModule(nn.Module):
    """Base class of the modules of a Vision Transformer."""

    config: ViTConfig
    regularization: Regularization
    compute: Compute

    def child(self, module: Callable[..., M], **options: Any) -> M:
        """Makes a submodule with the configuration of this module."""
        return module(
            config=self.config,
            regularization=self.regularization,
            compute=self.compute,
            **options,
        )

    def normalize(self, x: Float[Array, 'b ...'], name: str) -> Float[Array, 'b ...']:
        """Normalizes the last axis; with layout `flat`, tokens are rows as in `Dense`."""
        norm_class = nn.RMSNorm if self.config.norm == 'rms' else nn.LayerNorm
        epsilon = self.config.layer_norm_epsilon
        norm = norm_class(epsilon=epsilon, dtype=self.compute.dtype, name=name)
        if self.compute.layout == 'batched' or x.ndim == 2:
            return norm(x)
        return norm(x.reshape(-1, *x.shape[2:])).reshape(x.shape)

    def position_table(self, at: PositionsAt) -> Table | None:
        """Returns the positions to add at this place, or None."""
        config = self.config
        if config.positions_at != at:
            return None
        return positions.make_table(
            config.positions,
            config.grid,
            config.width,
            class_tokens=config.num_class_tokens,
            param=self.param,
        )


class PatchEmbedding(ViTModule):
    """Projects each patch of an image or a feature map to a token (E in equation 1).

    This is a convolution whose stride is the kernel size, computed as a matrix product. The kernel
    has the shape of an `nn.Conv` kernel.
    """

    @nn.compact
    def __call__(self, images: Images) -> Tokens:
        dtype = self.compute.dtype
        width = self.config.width
        rows, columns = self.config.grid
        p, q = self.config.patch_size
        batch, _, _, channels = images.shape
        kernel = self.param('kernel', nn.initializers.lecun_normal(), (p, q, channels, width))
        images = images[:, : rows * p, : columns * q]
        patches = images.reshape(batch, rows, p, columns, q, channels)
        tokens = jnp.einsum('bipjqc,pqcd->bijd', patches.astype(dtype), kernel.astype(dtype))
        tokens = tokens.reshape(batch, rows * columns, width)
        if self.config.pre_norm:  # as in CLIP, without a bias
            return tokens
        bias = self.param('bias', nn.initializers.zeros, (width,))
        return tokens + bias.astype(dtype)


class Attention(ViTModule):
    """Multi-head attention, in which tokens `x` attend to tokens `y` (equations 6 to 8).

    It has the parameters of Flax's MultiHeadDotProductAttention.
    """

    in_block: bool = True  # False: attention pooling

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'b q d'],
        y: Float[Array, 'b n d'],
        kept_patches: KeptPatches | None = None,
    ) -> Float[Array, 'b q d']:
        config = self.config
        head_shape = config.num_heads, config.width // config.num_heads
        project = functools.partial(Dense, head_shape, self.compute, use_bias=config.qkv_bias)
        query = project(name='query')(x)
        key = project(name='key')(y)
        value = project(name='value')(y)
        relative = None
        if self.in_block:
            query, key = self._normalize_and_rotate(query, key, kept_patches)
            if config.positions == 'relative':
                relative = self._relative_positions(query, key)
        tap(self, 'weights', lambda: attention_weights(query, key, relative))
        implementation = self.compute.attention
        assert implementation != 'auto'  # resolved by `build`
        heads = attend(query, key, value, relative=relative, implementation=implementation)
        heads = tap_array(self, 'heads', heads)
        out = Dense((config.width,), self.compute, axes=2, name='out')(heads)
        return Dropout(self.regularization.dropout)(out)

    def _normalize_and_rotate(
        self, query: Queries, key: Keys, kept_patches: KeptPatches | None
    ) -> tuple[Queries, Keys]:
        """Applies `qk_norm`, which bounds the logits (ViT-22B, section 2), and RoPE."""
        config = self.config
        if config.qk_norm:
            query = self.normalize(query, 'query_norm')
            key = self.normalize(key, 'key_norm')
        if config.positions in positions.ROTARY:
            angles = positions.make_angles(
                config.positions,
                config.grid,
                query.shape[-1],
                class_tokens=config.num_class_tokens,
                registers=config.registers,
            )
            num_prefix = config.num_prefix_tokens
            query, key = positions.rotate((query, key), angles, kept_patches, num_prefix)
        return query, key

    def _relative_positions(self, query: Queries, key: Keys) -> Float[Array, 'o h k']:
        """Returns one vector per offset between a query and a key (appendix D.4)."""
        num_queries = query.shape[1]
        num_keys, *head_shape = key.shape[1:]
        shape = 2 * num_keys - 1, *head_shape
        relative = self.param('relative', nn.initializers.normal(0.02), shape)
        # If there are fewer queries than keys, they are of the leading tokens, and the vectors
        # start at the lowest offset of the last query.
        return relative[num_keys - num_queries :].astype(query.dtype)


class Mlp(ViTModule):
    """MLP of a block: two dense layers with a GELU between them.

    With `gelu=None` it is a SwiGLU ("GLU Variants Improve Transformer", equation 6, with biases):
    the output of the first layer is multiplied by the SiLU of a third layer.
    """

    @nn.compact
    def __call__(self, x: Tokens) -> Tokens:
        config = self.config
        bias_init = nn.initializers.normal(1e-6)
        dense = functools.partial(Dense, compute=self.compute, bias_init=bias_init)
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


class Dropout(nn.Module):
    """Dropout as in `nn.Dropout`, whose rate may also be traced."""

    rate: Scalar

    @nn.compact
    def __call__(self, x: Tokens) -> Tokens:
        if is_off(self.rate):
            return x
        keep_rate = 1 - self.rate
        is_kept = jax.random.bernoulli(self.make_rng('dropout'), keep_rate, x.shape)
        return jnp.where(is_kept, x / jnp.asarray(keep_rate, x.dtype), 0)


class BlockConstants(NamedTuple):
    """Constants of one block, or of all blocks, stacked along a leading depth axis."""

    drop_rate: Float[Array, '*l']  # probability of stochastic depth
    has_skips: Bool[Array, '*l'] | None  # None: all blocks have skip connections


class Block(ViTModule):
    """Pre-norm encoder block (equations 2 and 3):

        x = x + MSA(LN(x))
        x = x + MLP(LN(x))

    A parallel block computes x + MSA(y) + MLP(y) with y = LN(x) (ViT-22B, section 2).
    """

    num_tokens_read: int | None = None  # number of leading tokens to compute; None: all

    @nn.compact
    def __call__(
        self, x: Tokens, constants: BlockConstants, shared_positions: SharedPositions
    ) -> tuple[FirstTokens, None]:
        """Computes the tokens; the second result is for `nn.scan`.

        Args:
          x: Tokens.
          constants: The block's drop rate, and whether it has skip connections.
          shared_positions: Positions that are the same in all blocks.
        """
        x = self._add_positions(x, shared_positions)
        y = tap_array(self, 'norm1', self.normalize(x, 'norm1'))
        x = slice_first_tokens(x, self.num_tokens_read, self.compute)
        inputs = slice_first_tokens(y, self.num_tokens_read, self.compute)

        attention = self.child(Attention, name='attention')
        msa = attention(inputs, y, shared_positions.kept_patches)
        x = self._add_branch(x, msa, constants, name='attention')
        if not self.config.parallel:
            inputs = tap_array(self, 'norm2', self.normalize(x, 'norm2'))
        mlp = self.child(Mlp, name='mlp')
        x = self._add_branch(x, mlp(inputs), constants, name='mlp')
        return tap_array(self, 'tokens', x), None

    def _add_positions(self, x: Tokens, shared_positions: SharedPositions) -> Tokens:
        """Adds positions to the input of the block (appendix D.4); most models add none."""
        for table in shared_positions.table, self.position_table('every_layer'):
            x = positions.add(x, table, self.config.num_class_tokens, shared_positions.kept_patches)
        return activation_sharding.keep_sharded(x)

    def _add_branch(
        self, x: Tokens, branch: Tokens, constants: BlockConstants, *, name: str
    ) -> Tokens:
        """Returns x + branch, with LayerScale and stochastic depth."""
        config = self.config
        skip = x if constants.has_skips is None else jnp.where(constants.has_skips, x, 0)
        if config.layer_scale is not None:
            scale_init = nn.initializers.constant(config.layer_scale)
            branch = branch * self.param(f'{name}_scale', scale_init, (config.width,))
            branch = branch.astype(x.dtype)
        tap(self, f'{name}/out', lambda: branch)
        tap(self, f'{name}/residual', lambda: (skip, branch))
        if not is_off(self.regularization.stochastic_depth):
            branch = drop_branch(branch, constants.drop_rate, key=self.make_rng('dropout'))
        return activation_sharding.keep_sharded(skip + branch)


def drop_branch(branch: Tokens, rate: Float[Array, ''], *, key: Key[Array, '']) -> Tokens:
    """Drops the branch of each example with probability `rate` (stochastic depth).

    The others are divided by 1 - rate ("Deep Networks with Stochastic Depth" instead multiplies by
    1 - rate in evaluation).
    """
    keep_rate = 1 - rate
    is_kept = jax.random.bernoulli(key, keep_rate, (branch.shape[0], 1, 1))
    return jnp.where(is_kept, branch / keep_rate, 0).astype(branch.dtype)


class Encoder(ViTModule):
    """The blocks, with parameters stacked along the depth, and the final norm before pooling."""

    @nn.compact
    def __call__(
        self, x: Tokens, shared_positions: SharedPositions, num_tokens_read: int | None = None
    ) -> FirstTokens:
        """Encodes tokens.

        Args:
          x: Tokens.
          shared_positions: Positions that are the same in all blocks.
          num_tokens_read: Number of leading tokens that are read; None: all.

        Returns:
          All tokens, or only those that are read.
        """
        constants = self._block_constants()
        if self._computes_all_tokens():
            x, _ = self._stack_blocks()(x, constants, shared_positions)
        else:
            x = run_blocks_for_first_tokens(self, x, constants, shared_positions, num_tokens_read)
        if self.config.final_norm == 'after_pool':
            return x
        return tap_array(self, 'norm', self.normalize(x, 'norm'))

    def _block_constants(self) -> BlockConstants:
        config = self.config
        last_rate = self.regularization.stochastic_depth
        is_constant = self.regularization.stochastic_depth_kind == 'constant'
        first_rate = last_rate if is_constant else 0
        drop_rate = jnp.linspace(first_rate, last_rate, config.depth)
        if not config.blocks_without_skips:
            return BlockConstants(drop_rate, has_skips=None)
        without_skips = jnp.array(config.blocks_without_skips)
        return BlockConstants(drop_rate, ~jnp.isin(jnp.arange(config.depth), without_skips))

    def _computes_all_tokens(self) -> bool:
        """Returns whether the last block is like the others; initialization and taps need it."""
        has_taps = self.is_mutable_collection(COLLECTION)
        return self.is_initializing() or has_taps or self.compute.last_block == 'whole'

    def _stack_blocks(self) -> Callable[..., tuple[Tokens, None]]:
        """Makes a module that applies all blocks in a loop, `compute.unroll` per iteration."""
        unroll = min(int(self.compute.unroll), self.config.depth)
        blocks = nn.scan(
            apply_remat(Block, self.compute, in_loop=unroll == 1, wrap=nn.remat),
            variable_axes={True: 0},  # all variables are stacked along axis 0
            split_rngs={'params': True, 'dropout': True},
            in_axes=(0, nn.broadcast),
            length=self.config.depth,
            unroll=unroll,
        )
        return self.child(blocks, name='block')


class AttentionPool(ViTModule):
    """Attention pooling with a learned query (Scaling Vision Transformers, section 3.2)."""

    @nn.compact
    def __call__(self, tokens: Tokens) -> Float[Array, 'b d']:
        probe = self.param('probe', nn.initializers.xavier_uniform(), (1, 1, self.config.width))
        probe = tile_over_batch(probe, tokens)
        x = self.child(Attention, in_block=False, name='attention')(probe, tokens)
        y = self.normalize(x, 'norm')
        return (x + self.child(Mlp, name='mlp')(y))[:, 0]


class ViT(ViTModule):
    """Vision Transformer that maps images to one of `OutputKind`.

    Without a head, it returns features in place of logits. `corruption` replaces patch embeddings.
    Only `kept_patches` are encoded; None: those that PatchDropout keeps.
    """

    head: nn.Module | None

    @nn.compact
    def __call__(
        self,
        images: Images,
        corruption: Corruption | None = None,
        kept_patches: KeptPatches | None = None,
        *,
        output: OutputKind = 'logits',
    ) -> Float[Array, '...']:
        config = self.config
        if config.backbone is not None:
            images = ResNet(config.backbone, self.compute, name='backbone')(images)
        x = self.child(PatchEmbedding, name='embedding')(images)
        if config.patch_outputs is not None:
            patch_head = MaskedPatchHead(config.patch_outputs, config.width, name='masked')
            if corruption is not None:
                x = patch_head.corrupt(x, corruption)
        x, kept_patches = self._embed(x, kept_patches)
        shared_positions = SharedPositions(self.position_table('every_layer_shared'), kept_patches)
        num_tokens_read = None if output == 'tokens' else config.num_tokens_read
        x = self.child(Encoder, name='encoder')(x, shared_positions, num_tokens_read)
        if config.patch_outputs is not None and self.is_initializing():
            patch_head(x)  # creates its parameters

        if output == 'tokens':
            return self._normalize_last(x)
        if output == 'patches':
            patches = self._normalize_last(x[:, config.num_prefix_tokens :])
            return activation_sharding.keep_sharded(patch_head(patches))
        features = self._compute_features(x)
        return features if output == 'features' else compute_logits(config, self.head, features)

    def _embed(
        self, patches: Tokens, kept_patches: KeptPatches | None
    ) -> tuple[Float[Array, 'b m d'], KeptPatches | None]:
        """Adds class tokens, positions and registers (equation 1). Registers have no positions.

        Returns:
          The tokens, and the indices of the patches that are encoded; None: all.
        """
        config = self.config
        num_prefix = config.num_class_tokens  # until the registers are inserted after them
        class_tokens = self._class_tokens()
        if config.registers:
            registers_shape = 1, config.registers, config.width
            normal = nn.initializers.normal(0.02)  # registers that start equal would stay equal
            registers = self.param('registers', normal, registers_shape)
        class_tokens = [tile_over_batch(token, patches) for token in class_tokens]
        x = jnp.concatenate([*class_tokens, patches], axis=1)
        x = positions.add(x, self.position_table('stem'), num_prefix)
        if kept_patches is None and self.regularization.patch_dropout > 0:
            batch, num_patches, _ = patches.shape
            num_kept = self.regularization.num_kept(num_patches)
            key = self.make_rng('dropout')
            kept_patches = positions.draw_kept(key, (batch, num_patches), num_kept)
        if kept_patches is not None:
            x = positions.keep_patches(x, kept_patches, num_prefix)
        x = Dropout(self.regularization.dropout, name='dropout')(x)
        if config.registers:
            parts = [x[:, :num_prefix], tile_over_batch(registers, x), x[:, num_prefix:]]
            x = jnp.concatenate(parts, axis=1)
        if config.pre_norm:
            x = self.normalize(x, 'pre_norm')
        return tap_array(self, 'embedding', x), kept_patches

    def _class_tokens(self) -> list[LearnedTokens]:
        """Makes the class tokens; the second of two is DeiT's distillation token."""
        zeros = nn.initializers.zeros
        count = self.config.num_class_tokens
        width = self.config.width
        if count == 0:
            return []
        if count == 2:
            return [self.param(name, zeros, (1, 1, width)) for name in ('cls', 'dist')]
        return [self.param('cls', zeros, (1, count, width))]

    def _normalize_last(self, x: Float[Array, 'b ...']) -> Float[Array, 'b ...']:
        """Applies the final norm, unless the encoder has applied it."""
        return self.normalize(x, 'norm') if self.config.final_norm == 'after_pool' else x

    def _compute_features(self, tokens: Tokens) -> Float[Array, 'b ...']:
        """Computes the input of the head, in float32."""
        config = self.config
        # Attention pooling has no dropout.
        attention_pool = AttentionPool(config, Regularization(), self.compute, name='pool')
        x = self._normalize_last(pool_tokens(config, tokens, attention_pool))
        if config.representation_size is not None:
            size = config.representation_size
            x = jnp.tanh(nn.Dense(size, dtype=self.compute.dtype, name='pre_logits')(x))
        return x.astype(jnp.float32)


def tile_over_batch(tokens: LearnedTokens, like: Tokens) -> FirstTokens:
    """Repeats learned tokens for each image of a batch."""
    return jnp.tile(tokens.astype(like.dtype), (like.shape[0], 1, 1))


# Fast paths: the layers and loops below equal plain ones up to rounding, in programs that XLA runs
# faster.


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
        dtype = self.compute.dtype
        token_shape = x.shape[: -self.axes]
        input_shape = x.shape[-self.axes :]
        matrix_shape = math.prod(input_shape), math.prod(self.features)

        def init_kernel(key: Key[Array, '']) -> Array:  # fan-in and fan-out are the matrix's
            matrix = nn.initializers.xavier_uniform()(key, matrix_shape)
            return matrix.reshape(*input_shape, *self.features)

        x = x.astype(dtype)
        kernel = self.param('kernel', init_kernel).astype(dtype)
        bias = self.param('bias', self.bias_init, self.features) if self.use_bias else jnp.zeros(())
        if self.compute.layout == 'batched':
            return jnp.tensordot(x, kernel, self.axes) + bias.astype(dtype)
        rows = x.reshape(-1, matrix_shape[0]) @ kernel.reshape(matrix_shape)
        rows = rows + bias.astype(dtype).reshape(-1)
        return rows.reshape(*token_shape, *self.features)


def slice_first_tokens(x: Tokens, count: int | None, compute: Compute) -> FirstTokens:
    """Returns the first `count` tokens; None: all.

    With layout `flat`, a barrier forces XLA to write the tokens to memory before they are sliced.
    Otherwise, because of this slice, XLA on GPUs transposes the tokens of all blocks.
    """
    if count is None:
        return x
    if compute.layout == 'flat':
        x = jax.lax.optimization_barrier(x.reshape(-1, x.shape[-1])).reshape(x.shape)
    return x[:, :count]


BlockVariables = tuple[Params, BlockConstants]
RunBlock = Callable[[Tokens, BlockVariables], Tokens]


def run_blocks_for_first_tokens(
    encoder: Encoder,
    x: Tokens,
    constants: BlockConstants,
    shared_positions: SharedPositions,
    num_tokens_read: int | None,
) -> FirstTokens:
    """Applies all blocks; the last block computes only the tokens that are read.

    This saves 7 % of the multiply-adds of B/16. Dropout and stochastic depth prevent it.
    """
    depth = encoder.config.depth
    stacked = encoder.variables['params']['block'], constants
    depths = {len(leaf) for leaf in jax.tree.leaves(stacked)}
    if depths != {depth}:
        raise UserError(
            f'encoder/block: parameters of {max(depths)} blocks; expected {depth} blocks'
        )
    block = encoder.child(Block, parent=None)
    last_block = encoder.child(Block, parent=None, num_tokens_read=num_tokens_read)

    def run(block: Block, x: Tokens, variables: BlockVariables) -> FirstTokens:
        params, constants = variables
        x, _ = block.apply({'params': params}, x, constants, shared_positions)
        return x

    run_blocks = _run_blocks_in_loop if int(encoder.compute.unroll) < depth else _run_blocks_in_turn
    x, last_variables = run_blocks(functools.partial(run, block), x, stacked, encoder.compute)
    return run(last_block, x, last_variables)


def _run_blocks_in_loop(
    run_block: RunBlock, x: Tokens, stacked: BlockVariables, compute: Compute
) -> tuple[Tokens, BlockVariables]:
    """Applies all blocks except the last in a loop, and returns the variables of the last.

    Blocks are indexed: a scan over slices would copy the parameters and their gradients.
    """
    unroll = int(compute.unroll)
    last = len(jax.tree.leaves(stacked)[0]) - 1

    def variables_of(index: Int[Array, '']) -> BlockVariables:
        take = functools.partial(jax.lax.dynamic_index_in_dim, index=index, keepdims=False)
        return jax.tree.map(take, stacked)

    def run_indexed(x: Tokens, index: Int[Array, '']) -> Tokens:
        return run_block(x, variables_of(index))

    run_indexed = apply_remat(run_indexed, compute, in_loop=unroll == 1)
    x = jax.lax.fori_loop(0, last, lambda index, x: run_indexed(x, index), x, unroll=unroll)
    # The barrier hides that the index is constant. Otherwise XLA would put the gradient of the last
    # block in a separate buffer.
    return x, variables_of(jax.lax.optimization_barrier(jnp.int32(last)))


def _run_blocks_in_turn(
    run_block: RunBlock, x: Tokens, stacked: BlockVariables, compute: Compute
) -> tuple[Tokens, BlockVariables]:
    """Does what `_run_blocks_in_loop` does without a loop, if all blocks are unrolled.

    With a single unstack, the backward pass writes the gradient of each block once.
    """
    leaves, structure = jax.tree.flatten(stacked)
    leaves_of_blocks = zip(*map(jnp.unstack, leaves), strict=True)
    *first_blocks, last_block = (
        jax.tree.unflatten(structure, leaves) for leaves in leaves_of_blocks
    )
    for variables in first_blocks:
        x = apply_remat(run_block, compute)(x, variables)
    return x, last_block
