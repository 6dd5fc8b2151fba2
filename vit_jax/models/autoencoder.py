"""The decoder of masked autoencoders (He et al. 2021)."""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.base import Array, Float, Key, Params
from vit_jax.models import positions
from vit_jax.models.compute import PORTABLE, Compute, Regularization
from vit_jax.models.config import ViTConfig
from vit_jax.models.masked_patches import PatchOutputs
from vit_jax.models.positions import KeptPatches, SharedPositions
from vit_jax.models.vit import Dense, Encoder, tile_over_batch


class Decoder(NamedTuple):
    """A decoder as pure functions; `params` is a nested dictionary of float32 arrays.

    - init(key) -> params
    - apply(params, tokens, kept_patches) -> outputs of all patches (b n k). `tokens` are the
      encoded class tokens, registers and `kept_patches`.
    """

    init: Callable[[Key[Array, '']], Params]
    apply: Callable[..., PatchOutputs]


class DecoderModule(nn.Module):
    """A decoder of all patches: blocks and a linear head.

    Its inputs are encoded tokens at visible patches and mask tokens at the others. The prefix
    tokens are decoded too, but have no outputs.
    """

    config: ViTConfig  # the blocks, with the num_prefix_tokens of the encoder
    outputs: int  # per patch
    compute: Compute

    @nn.compact
    def __call__(self, tokens: Float[Array, 'b m d'], kept_patches: KeptPatches) -> PatchOutputs:
        config = self.config
        num_prefix = config.num_prefix_tokens
        num_patches = config.grid[0] * config.grid[1]
        x = Dense((config.width,), self.compute, name='embedding')(tokens)
        mask_token = self.param('mask_token', nn.initializers.normal(0.02), (1, 1, config.width))
        patches = positions.restore_patches(
            x[:, num_prefix:], kept_patches, tile_over_batch(mask_token, x), num_patches
        )
        x = jnp.concatenate([x[:, :num_prefix], patches], axis=1)
        table = positions.make_table(
            config.positions,
            config.grid,
            config.width,
            class_tokens=config.num_class_tokens,
            param=self.param,
        )
        x = positions.add(x, table, config.num_class_tokens)
        encoder = Encoder(config, Regularization(), self.compute, name='encoder')
        x = encoder(x, SharedPositions(table=None, kept_patches=None))
        return nn.Dense(self.outputs, name='head')(x[:, num_prefix:].astype(jnp.float32))


def build_decoder(config: ViTConfig, *, width: int, outputs: int, compute: Compute) -> Decoder:
    """Builds a decoder.

    Args:
      config: The blocks, with the image, patch size, class tokens and registers of the encoder.
      width: Width of the encoder's tokens.
      outputs: Outputs per patch.
      compute: Precision, memory and kernels, without `auto`.
    """

    def init(key: Key[Array, '']) -> Params:
        tokens = jnp.zeros((1, config.num_prefix_tokens + 1, width))
        kept_patches = jnp.zeros((1, 1), jnp.int32)
        return DecoderModule(config, outputs, PORTABLE).init(key, tokens, kept_patches)['params']

    def apply(
        params: Params, tokens: Float[Array, 'b m d'], kept_patches: KeptPatches
    ) -> PatchOutputs:
        module = DecoderModule(config, outputs, compute)
        return module.apply({'params': params}, tokens, kept_patches)

    return Decoder(init, apply)
