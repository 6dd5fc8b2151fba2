"""Masked patch prediction: patches are corrupted, and the model predicts what each shows."""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.base import Array, Bool, Float, Int

Tokens = Float[Array, 'b n d']
PatchOutputs = Float[Array, 'b n k']
MASKED = 'masked'  # the folder of the parameters that nothing else uses


class Corruption(NamedTuple):
    """What replaces the embedding of each patch."""

    masked: Bool[Array, 'b n']  # where True, the mask token
    source: Int[Array, 'b n']  # elsewhere the embedding of the patch with this number


class MaskedPatches(nn.Module):
    """The mask token, and the linear head that all patches share (appendix B.1.2)."""

    outputs: int
    width: int

    def setup(self) -> None:
        self.token = self.param('token', nn.initializers.normal(0.02), (1, 1, self.width))
        self.head = nn.Dense(self.outputs, kernel_init=nn.initializers.zeros)

    def __call__(self, tokens: Tokens) -> PatchOutputs:
        return self.head(tokens.astype(jnp.float32))

    def corrupted(self, patches: Tokens, corruption: Corruption) -> Tokens:
        """Returns the patches that the encoder sees."""
        source = jnp.take_along_axis(patches, corruption.source[..., None], axis=1)
        token = self.token.astype(patches.dtype)
        return jnp.where(corruption.masked[..., None], token, source)
