"""Heads: from features to the logits of classes."""

import dataclasses
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.base import Array, Float, Params, UserError, records, require
from vit_jax.models.config import ModelConfig, ViTConfig


class DistilledHead(nn.Module):
    """The mean of two heads, one on the class and one on the distillation token (DeiT)."""

    cls: nn.Module
    dist: nn.Module

    def __call__(self, features: Float[Array, 'b two_d']) -> Float[Array, 'b k']:
        cls, dist = jnp.split(features, 2, axis=-1)
        return (self.cls(cls) + self.dist(dist)) / 2


class CosineHead(nn.Module):
    """Scaled cosine similarities of the features and the vector of each class (CLIP), plus a bias.

    With `projection`, features are first projected to this width, that of the class vectors.
    """

    num_classes: int
    projection: int | None = None

    @nn.compact
    def __call__(self, features: Float[Array, 'b d']) -> Float[Array, 'b k']:
        if self.projection is not None:
            features = nn.Dense(self.projection, use_bias=False, name='projection')(features)
        size, init = (features.shape[-1], self.num_classes), nn.initializers.lecun_normal()
        kernel = self.param('kernel', init, size)
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
        one = dataclasses.replace(config, pool='cls')
        return DistilledHead(make_head(one), make_head(one))
    if callable(config.head):
        head = config.head(config.num_classes)
        text = f'model.head={records.text_of(config.head)}: returned {head!r:.80}'
        require(isinstance(head, nn.Module), f'{text}; expected a flax module')
        return head
    if config.head == 'linear':
        zeros, constant = nn.initializers.zeros, nn.initializers.constant(config.head_bias)
        return nn.Dense(config.num_classes, kernel_init=zeros, bias_init=constant)
    if cosine := re.fullmatch(r'cosine(?::(\d+))?', config.head):
        return CosineHead(config.num_classes, int(cosine[1]) if cosine[1] else None)
    expected = 'expected linear, cosine, cosine:WIDTH or f(num_classes) -> flax module'
    raise UserError(f'model.head={config.head!r}: {expected}')


def compute_logits(config: ModelConfig, head: Any, features: Float[Array, '*n d']) -> Array:
    """Applies a head; returns the features if there is none.

    Raises UserError if a function of the user made a head with other outputs.
    """
    if head is None:
        return features
    logits = head(features)
    expected = *features.shape[:-1], config.num_classes
    shape = getattr(logits, 'shape', type(logits).__name__)
    text = f'model.head={records.text_of(config.head)}: got logits {shape}'
    require(shape == expected, f'{text}; expected {expected}')
    return logits


def apply_heads(
    config: ModelConfig, params: Params, features: Float[Array, 'b d']
) -> list[Float[Array, 'b k']]:
    """Returns the logits of each head: one, or two with pool=cls_dist (class, distillation)."""
    if not isinstance(config, ViTConfig) or config.pool != 'cls_dist':
        parts = [(params, features)]
    else:
        config = dataclasses.replace(config, pool='cls')
        halves = jnp.split(features, 2, axis=-1)
        parts = [(params['cls'], halves[0]), (params['dist'], halves[1])]
    head = make_head(config)
    assert head is not None  # the parameters belong to a head
    return [head.apply({'params': own}, half) for own, half in parts]
