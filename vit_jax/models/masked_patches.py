"""Mask token, head and patches of images for masked patch prediction (appendix B.1.2)."""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.base import Array, Bool, Float, Int, Num
from vit_jax.models.positions import Tokens

PatchOutputs = Float[Array, 'b n k']
MASKED = 'masked'  # name of the parameters that only masked patch prediction uses


class Corruption(NamedTuple):
    """Replacements of patch embeddings."""

    masked: Bool[Array, 'b n']  # True: replaced by the mask token
    source: Int[Array, 'b n']  # otherwise, index of the patch whose embedding is used


class MaskedPatchHead(nn.Module):
    """The mask token, and a linear head that is applied to each patch."""

    outputs: int
    width: int

    def setup(self) -> None:
        self.token = self.param('token', nn.initializers.normal(0.02), (1, 1, self.width))
        self.head = nn.Dense(self.outputs, kernel_init=nn.initializers.zeros)

    def __call__(self, tokens: Tokens) -> PatchOutputs:
        return self.head(tokens.astype(jnp.float32))

    def corrupt(self, patches: Tokens, corruption: Corruption) -> Tokens:
        """Applies a corruption to patch embeddings."""
        sources = jnp.take_along_axis(patches, corruption.source[..., None], axis=1)
        token = self.token.astype(patches.dtype)
        return jnp.where(corruption.masked[..., None], token, sources)


def cut_patches(
    images: Num[Array, 'b h w c'], grid: tuple[int, int], patch_size: tuple[int, int]
) -> Num[Array, 'b n p q c']:
    """Splits images into patches, in row-major order; `patch_size` is (height, width) in pixels."""
    rows, columns = grid
    p, q = patch_size
    batch, _, _, channels = images.shape
    images = images[:, : rows * p, : columns * q]
    patches = images.reshape(batch, rows, p, columns, q, channels).swapaxes(2, 3)
    return patches.reshape(batch, rows * columns, p, q, channels)
