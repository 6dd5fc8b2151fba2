"""A network as pure functions of a plain dictionary of arrays."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.base.array_types import Array, Float, Key, Params
from vit_jax.base.errors import UserError
from vit_jax.models.options import ActivationSharding, Compute, Regularization, unsharded
from vit_jax.models.resnet import ResNetClassifier, ResNetConfig
from vit_jax.models.vit import ViT, ViTConfig

ModelConfig = ViTConfig | ResNetConfig


class Model(NamedTuple):
    """A network as pure functions of a plain dictionary of float32 arrays.

    init(key) -> params
    apply(params, images, key=None) -> logits, or features without a head; a key switches
        dropout and stochastic depth on
    features(params, images) -> what the head would be given
    capture(params, images) -> (logits, intermediates by name, blocks stacked in front)
    """

    config: ModelConfig
    init: Callable[[Key[Array, '']], Params]
    apply: Callable[..., Float[Array, '...']]
    features: Callable[[Params, Float[Array, 'b h w c']], Float[Array, '...']]
    capture: Callable[[Params, Float[Array, 'b h w c']], tuple[Array, dict[str, Any]]]


def build(
    config: ModelConfig,
    *,
    regularization: Regularization | None = None,
    compute: Compute | None = None,
    shard_activations: ActivationSharding = unsharded,
) -> Model:
    """The network of a configuration. Raises UserError where the sizes do not fit together.

    `shard_activations` is applied to the tokens (b n d) between the blocks.
    """
    _ = config.grid  # raises where the patches do not fill the image
    module = _module(
        config, regularization or Regularization(), compute or Compute(), shard_activations
    )
    shape = *config.image_size, config.channels

    def run(params: Params, images: Float[Array, 'b h w c'], **options: Any) -> Any:
        if images.shape[1:] != shape:
            raise UserError(f'images are {images.shape[1:]}, the model takes {shape}')
        return module.apply({'params': params}, images, **options)

    def init(key: Key[Array, '']) -> Params:
        return module.init(key, jnp.zeros((1, *shape), jnp.float32))['params']

    def apply(
        params: Params, images: Float[Array, 'b h w c'], key: Key[Array, ''] | None = None
    ) -> Float[Array, '...']:
        rngs = None if key is None else {'dropout': key}
        return run(params, images, deterministic=key is None, rngs=rngs)

    def features(params: Params, images: Float[Array, 'b h w c']) -> Float[Array, '...']:
        return run(params, images, method=module.features)

    def capture(
        params: Params, images: Float[Array, 'b h w c']
    ) -> tuple[Float[Array, '...'], dict[str, Any]]:
        logits, state = run(params, images, mutable=['intermediates'])
        return logits, state['intermediates']

    return Model(config, init, apply, features, capture)


def for_task(
    config: ModelConfig, *, num_classes: int, image_size: tuple[int, int] | None
) -> ModelConfig:
    """The network to fine-tune: its whole head is a single linear layer (section 3.2)."""
    changes: dict[str, Any] = {'num_classes': num_classes}
    if image_size is not None:
        changes['image_size'] = image_size
    if isinstance(config, ViTConfig):
        changes['representation_size'] = None
    return dataclasses.replace(config, **changes)


def _module(
    config: ModelConfig,
    regularization: Regularization,
    compute: Compute,
    shard_activations: ActivationSharding,
) -> nn.Module:
    if isinstance(config, ResNetConfig):
        if regularization != Regularization():
            raise UserError(f'a ResNet has neither dropout nor stochastic depth: {regularization}')
        return ResNetClassifier(config, compute)
    if config.width % config.num_heads:
        raise UserError(f'width={config.width} is not a multiple of num_heads={config.num_heads}')
    return ViT(config, regularization, compute, shard_activations)
