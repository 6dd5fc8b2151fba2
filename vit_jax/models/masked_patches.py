"""A Vision Transformer some of whose patches are corrupted, and that predicts what each shows."""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.base import Array, Bool, Float, Int
from vit_jax.models import on_mesh
from vit_jax.models.vit import Images, Tokens, ViT

PatchOutputs = Float[Array, 'b n k']
MASKED = 'masked'  # the folder of the parameters that nothing else has a use for


class Corruption(NamedTuple):
    """What takes the place of each patch's embedding."""

    masked: Bool[Array, 'b n']  # the mask token, where it is True
    source: Int[Array, 'b n']  # elsewhere the embedding of the patch of this number, or its own


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
        """The patches as the encoder is to see them."""
        taken = jnp.take_along_axis(patches, corruption.source[..., None], axis=1)
        token = self.token.astype(patches.dtype)
        return jnp.where(corruption.masked[..., None], token, taken)


class MaskedViT(ViT):
    """A ViT with a head of every patch; its features and logits are those of a ViT."""

    def setup(self) -> None:
        super().setup()
        assert self.config.patch_outputs is not None
        self.masked = MaskedPatches(self.config.patch_outputs, self.config.width)

    def __call__(self, images: Images) -> Float[Array, '...']:
        if self.is_initializing():  # parameters are made where they are used
            self.predict_patches(images, None)
        return super().__call__(images)

    def predict_patches(self, images: Images, corruption: Corruption | None) -> PatchOutputs:
        """The outputs for every patch, where the encoder saw the corrupted ones in their places."""
        patches = self.patches(images)
        if corruption is not None:
            patches = self.masked.corrupted(patches, corruption)
        tokens = self.encoder(self.embed(patches), self.shared)[:, self.config.prefix :]
        if self.config.final_norm == 'after_pool':
            tokens = self.norm(tokens)
        return on_mesh.keep_split(self.masked(tokens))
