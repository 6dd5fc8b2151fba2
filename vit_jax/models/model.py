"""A network as pure functions of a plain dictionary of arrays."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.core.scope import DenyList

from vit_jax.base import Array, Float, Key, Params, UserError, records
from vit_jax.models.options import ActivationSharding, Compute, Regularization
from vit_jax.models.resnet import ResNetClassifier, ResNetConfig
from vit_jax.models.vit import ViT, ViTConfig

ModelConfig = ViTConfig | ResNetConfig


class Model(NamedTuple):
    """A network as pure functions of a plain dictionary of float32 arrays.

    init(key) -> params
    apply(params, images, key=None) -> logits, or features without a head; a key switches
        dropout and stochastic depth on
    features(params, images) -> what the head would be given
    capture(params, images, names) -> the logits of `apply` to the bit, and an array for each name
        `tokens`: after each block, (layers, b, n, d)
        `attention/weights`: float32, (layers, b, heads, q, n), rows sum to one
        `pool/attention/weights`: those of the pooling `map`, (b, heads, 1, n)
        `stage1`, `stage2`, ...: feature maps of a ResNet or a hybrid's backbone, (b, h, w, c)
        Only what is named is computed and kept. Raises UserError for another name.
    """

    config: ModelConfig
    init: Callable[[Key[Array, '']], Params]
    apply: Callable[..., Float[Array, '...']]
    features: Callable[[Params, Float[Array, 'b h w c']], Float[Array, '...']]
    capture: Callable[..., tuple[Float[Array, '...'], dict[str, Array]]]


def build(
    config: ModelConfig,
    *,
    regularization: Regularization | None = None,
    compute: Compute | None = None,
    shard_activations: ActivationSharding = lambda x: x,
) -> Model:
    """The network of a configuration. Raises UserError where the sizes do not fit together.

    `shard_activations` is applied to the tokens (b n d) between the blocks.
    """
    config = records.checked(config, where='model')  # fields may have been assigned since
    compute = records.checked(compute or Compute(), where='compute')
    regularization = records.checked(regularization or Regularization(), where='regularization')
    _ = config.grid  # raises where the patches do not fill the image
    shape = *config.image_size, config.channels
    if isinstance(config, ViTConfig):  # outside training nothing is dropped
        module = ViT(config, Regularization(), compute, shard_activations)
        training = ViT(config, regularization, compute, shard_activations)
    else:
        unknown = f'a ResNet has neither dropout nor stochastic depth: {regularization}'
        records.require(regularization == Regularization(), unknown)
        module = training = ResNetClassifier(config, compute)

    def run(params: Params, images: Float[Array, 'b h w c'], **options: Any) -> Any:
        if images.shape[1:] != shape:
            raise UserError(f'images are {images.shape[1:]}, the model takes {shape}')
        network = training if 'rngs' in options else module
        return network.apply({'params': params}, images, **options)

    def init(key: Key[Array, '']) -> Params:
        return module.init(key, jnp.zeros((1, *shape), jnp.float32))['params']

    def apply(
        params: Params, images: Float[Array, 'b h w c'], key: Key[Array, ''] | None = None
    ) -> Float[Array, '...']:
        return run(params, images, **({} if key is None else {'rngs': {'dropout': key}}))

    def features(params: Params, images: Float[Array, 'b h w c']) -> Float[Array, '...']:
        return run(params, images, method=module.features)

    def capture(
        params: Params, images: Float[Array, 'b h w c'], names: Iterable[str]
    ) -> tuple[Float[Array, '...'], dict[str, Array]]:
        taps = _taps(lambda kept: run(params, images, mutable=kept)[1], names)
        return apply(params, images), taps

    return Model(config, init, apply, features, capture)


def _taps(forward: Callable[[Any], dict[str, Any]], names: Iterable[str]) -> dict[str, Array]:
    """The taps of these names, from a forward pass that gives the collections it is asked for."""

    def kept(collections: Any) -> dict[str, Array]:
        return {name: jax.tree.leaves(v)[0] for name, v in forward(collections).items()}

    every, names = jax.eval_shape(lambda: kept(DenyList('params'))), list(names)
    for name in names:
        if name not in every:
            raise UserError(f'capture: no {name!r} here; {records.nearest(name, every)}')
    # A forward pass of its own, in a branch of which the compiler cannot know that it is always
    # taken. In one pass with the logits it changed their last bits (ResNets; unrolled blocks in
    # bfloat16), as other operations are fused; and XLA drops optimization barriers on CPUs.
    return jax.lax.cond(
        jax.lax.rng_uniform(0.0, 1.0, shape=()) < 2,
        lambda: kept(names),
        lambda: {name: jnp.zeros(every[name].shape, every[name].dtype) for name in names},
    )


def for_task(
    config: ModelConfig, *, num_classes: int, image_size: tuple[int, int] | None
) -> ModelConfig:
    """The network to fine-tune: its whole head is a single linear layer (section 3.2)."""
    changes: dict[str, Any] = {'num_classes': num_classes, 'head': 'linear'}
    if isinstance(config, ViTConfig):
        changes['representation_size'] = None
    return dataclasses.replace(config, image_size=image_size or config.image_size, **changes)
