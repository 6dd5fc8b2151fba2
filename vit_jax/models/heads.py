"""From encoded tokens to logits: pooling (equation 4) and heads."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, assert_never

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.base import Array, Float, Params, UserError, records
from vit_jax.models.config import ModelConfig, ViTConfig
from vit_jax.models.positions import Tokens


def pool_tokens(
    config: ViTConfig, tokens: Tokens, attention_pool: Callable[[Tokens], Array]
) -> Float[Array, 'b ...']:
    """Pools encoded tokens (`config.pool`).

    Args:
      config: Architecture.
      tokens: Encoded tokens; patches may be missing if the pooling does not read them.
      attention_pool: Pools patches with a learned query.
    """
    patches = tokens[:, config.num_prefix_tokens :]
    match config.pool:
        case 'cls':
            return tokens[:, 0]
        case 'gap':
            return patches.mean(axis=1)
        case 'map':
            return attention_pool(patches)
        case 'none':
            return tokens
        case 'cls_gap':
            return jnp.concatenate([tokens[:, 0], patches.mean(axis=1)], axis=-1)
        case 'cls_dist':
            return jnp.concatenate([tokens[:, 0], tokens[:, 1]], axis=-1)
        case other:
            assert_never(other)


class DistilledHead(nn.Module):
    """The mean of two heads, one on the class and one on the distillation token (DeiT)."""

    cls: nn.Module
    dist: nn.Module

    def __call__(self, features: Float[Array, 'b two_d']) -> Float[Array, 'b k']:
        cls, dist = jnp.split(features, 2, axis=-1)
        return (self.cls(cls) + self.dist(dist)) / 2


class CosineHead(nn.Module):
    """Scaled cosine similarities of the features and the vector of each class (CLIP), plus a bias.

    With `projection`, features are first projected to this width, the width of the class vectors.
    """

    num_classes: int
    projection: int | None = None

    @nn.compact
    def __call__(self, features: Float[Array, 'b d']) -> Float[Array, 'b k']:
        if self.projection is not None:
            features = nn.Dense(self.projection, use_bias=False, name='projection')(features)
        shape = features.shape[-1], self.num_classes
        kernel = self.param('kernel', nn.initializers.lecun_normal(), shape)
        scale = self.param('scale', nn.initializers.constant(1 / 0.07), ())  # as CLIP starts
        bias = self.param('bias', nn.initializers.zeros, ())
        return scale * (_to_unit_length(features, 1) @ _to_unit_length(kernel, 0)) + bias


def _to_unit_length(x: Float[Array, 'n m'], axis: int) -> Float[Array, 'n m']:
    """Divides the vectors along an axis by their length; vectors of zeros stay zero."""
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x**2, axis, keepdims=True), 1e-24))


def make_head(config: ModelConfig) -> nn.Module | None:
    """Makes the head. A linear head starts at zero, with uniform predictions (section 3.2)."""
    if config.num_classes is None:
        return None
    if isinstance(config, ViTConfig) and config.pool == 'cls_dist':
        half = dataclasses.replace(config, pool='cls')
        return DistilledHead(cls=make_head(half), dist=make_head(half))
    if callable(config.head):
        head = config.head(config.num_classes)
        if not isinstance(head, nn.Module):
            field = f'model.head={records.text_of(config.head)}'
            raise UserError(f'{field}: returned {head!r:.80}; expected a flax module')
        return head
    if config.head == 'linear':
        return nn.Dense(
            config.num_classes,
            kernel_init=nn.initializers.zeros,
            bias_init=nn.initializers.constant(config.head_bias),
        )
    if cosine := re.fullmatch(r'cosine(?::(\d+))?', config.head):
        projection = int(cosine[1]) if cosine[1] else None
        return CosineHead(config.num_classes, projection)
    raise UserError(
        f'model.head={config.head!r}: expected linear, cosine, cosine:WIDTH or '
        'f(num_classes) -> flax module'
    )


def compute_logits(config: ModelConfig, head: Any, features: Float[Array, '*n d']) -> Array:
    """Applies a head; returns the features if there is none.

    Raises UserError if a function of the user made a head with other outputs.
    """
    if head is None:
        return features
    logits = head(features)
    expected = *features.shape[:-1], config.num_classes
    shape = getattr(logits, 'shape', type(logits).__name__)
    if shape != expected:
        field = f'model.head={records.text_of(config.head)}'
        raise UserError(f'{field}: got logits {shape}; expected {expected}')
    return logits


def apply_heads(
    config: ModelConfig, params: Params, features: Float[Array, 'b d']
) -> list[Float[Array, 'b k']]:
    """Returns the logits of each head: one, or two with pool=cls_dist (class, distillation)."""
    if not isinstance(config, ViTConfig) or config.pool != 'cls_dist':
        return [_apply_head(config, params, features)]
    config = dataclasses.replace(config, pool='cls')
    cls, dist = jnp.split(features, 2, axis=-1)
    return [_apply_head(config, params['cls'], cls), _apply_head(config, params['dist'], dist)]


def _apply_head(
    config: ModelConfig, params: Params, features: Float[Array, 'b d']
) -> Float[Array, 'b k']:
    head = make_head(config)
    assert head is not None  # the parameters belong to a head
    return head.apply({'params': params}, features)
