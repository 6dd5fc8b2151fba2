"""Models as pure functions of parameters, with their parameter and operation counts."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from vit_jax.base import Array, Float, Key, Params, UserError, records
from vit_jax.models import positions, taps
from vit_jax.models.compute import PORTABLE, Compute, LastBlock, Regularization, resolve_compute
from vit_jax.models.config import ModelConfig, ViTConfig
from vit_jax.models.heads import make_head
from vit_jax.models.masked_patches import Corruption, PatchOutputs
from vit_jax.models.positions import KeptPatches, Tokens
from vit_jax.models.resnet import ResNetClassifier
from vit_jax.models.vit import Images, ViT

Outputs = Float[Array, '...']
DropoutKey = Key[Array, ''] | None


class Model(NamedTuple):
    """A model as pure functions; `params` is a nested dictionary of float32 arrays.

    - init(key) -> params
    - apply(params, images, key=None) -> logits, or features without a head. Images (b h w c) are
      normalized floats. A key enables dropout, stochastic depth and PatchDropout.
    - features(params, images, key=None) -> input of the head
    - predict_patches(params, images, corruption=None, key=None) -> outputs for each patch (b n k)
      of the corrupted images. Requires `patch_outputs`.
    - encode(params, images, kept_patches, key=None) -> encoded tokens (b m d): class tokens,
      registers and the patches with the indices `kept_patches` (b p), which ascend. Other patches
      are not computed.
    - capture(params, images, names) -> (output of `apply`, intermediate arrays by name). The arrays
      are called taps. docs/visualize.md lists them; an example is `attention/weights`. Only the
      named taps are computed.
      If `names` maps names to functions, each tap is reduced by its function, block by block.
      Raises UserError for an unknown name. If `capture` is jitted, its output may differ from
      `apply` in the last bits.
    - compute, platform: the options with which the model was built, without `auto`
    """

    config: ModelConfig
    init: Callable[[Key[Array, '']], Params]
    apply: Callable[..., Outputs]
    features: Callable[..., Outputs]
    predict_patches: Callable[..., PatchOutputs]
    encode: Callable[..., Tokens]
    capture: Callable[..., tuple[Outputs, dict[str, Any]]]
    compute: Compute
    platform: str


def build(
    config: ModelConfig,
    *,
    regularization: Regularization | None = None,
    compute: Compute | None = None,
    platform: str | None = None,
) -> Model:
    """Builds the model of a configuration.

    Args:
      config: Architecture.
      regularization: Dropout, stochastic depth and PatchDropout; None: none of them.
      compute: Precision, memory and kernels; `auto` is resolved for the platform.
      platform: Platform of the devices; None: jax's default.

    Returns:
      The model. Activation sharding follows the mesh in jax's context (activation_sharding.py).

    Raises:
      UserError: If the configuration is not consistent, or an option is not supported.
    """
    return build_validated(
        records.validate_copy(config, where='model'),  # fields may have been changed
        regularization=records.validate_copy(
            regularization or Regularization(), where='regularization'
        ),
        compute=records.validate_copy(compute or Compute(), where='compute'),
        platform=platform,
    )


def build_validated(
    config: ModelConfig,
    *,
    regularization: Regularization | None = None,
    compute: Compute | None = None,
    platform: str | None = None,
) -> Model:
    """Builds a model from validated records, whose numbers can be traced by jax (see `build`)."""
    platform = platform or jax.default_backend()
    regularization = regularization or Regularization()
    compute = compute or Compute()
    compute = resolve_compute(compute, config, platform=platform, regularization=regularization)
    shape = *config.image_size, config.channels
    module = make_module(config, Regularization(), compute)
    training_module = make_module(config, regularization, compute)

    def apply(params: Params, images: Images, key: DropoutKey = None, **options: Any) -> Any:
        if images.shape[1:] != shape:
            raise UserError(
                f'images: got (height, width, channels) {images.shape[1:]}; expected {shape}'
            )
        if key is None:
            return module.apply({'params': params}, images, **options)
        return training_module.apply({'params': params}, images, rngs={'dropout': key}, **options)

    def predict_patches(
        params: Params, images: Images, corruption: Corruption | None = None, key: DropoutKey = None
    ) -> PatchOutputs:
        records.require(has_patch_outputs(config), 'predict_patches: patch_outputs is not set')
        return apply(params, images, key, corruption=corruption, output='patches')

    def encode(
        params: Params, images: Images, kept_patches: KeptPatches, key: DropoutKey = None
    ) -> Tokens:
        assert isinstance(config, ViTConfig)
        return apply(params, images, key, kept_patches=kept_patches, output='tokens')

    def capture(
        params: Params, images: Images, names: taps.TapSelection
    ) -> tuple[Outputs, dict[str, Any]]:
        captured = taps.capture(lambda: apply(params, images, mutable=[taps.COLLECTION])[1], names)
        return apply(params, images), captured

    init = functools.partial(init_params, config)
    features = functools.partial(apply, output='features')
    return Model(
        config=config,
        init=init,
        apply=apply,
        features=features,
        predict_patches=predict_patches,
        encode=encode,
        capture=capture,
        compute=compute,
        platform=platform,
    )


def has_patch_outputs(config: ModelConfig) -> bool:
    """Returns whether the model has outputs per patch."""
    return isinstance(config, ViTConfig) and config.patch_outputs is not None


def make_module(config: ModelConfig, regularization: Regularization, compute: Compute) -> Any:
    """Makes the Flax module of a model; `compute` must not contain `auto`."""
    if isinstance(config, ViTConfig):
        regularization.check_model(config)
        return ViT(config, regularization, compute, make_head(config))
    if regularization != Regularization():
        raise UserError(
            f'{regularization}: a ResNet supports no dropout, stochastic depth or PatchDropout'
        )
    return ResNetClassifier(config, compute, make_head(config))


def position_table_axes(config: ViTConfig) -> dict[str, tuple[bool, bool]]:
    """Maps the name of each learned position table to (depends on row, depends on column)."""
    learned = positions.LEARNED.get(config.positions, {})
    module = 'encoder/block/' if config.positions_at == 'every_layer' else ''
    return {module + name: axes for name, axes in learned.items()}


def compute_position_table(config: ViTConfig, params: Params) -> Float[np.ndarray, '1 m d']:
    """Computes the position embeddings that are added to class tokens and patches.

    Args:
      config: Architecture.
      params: Position parameters by name, as in `positions.LEARNED`.

    Raises:
      UserError: If positions are not added to tokens, but used in attention.
    """
    kind = config.positions
    if kind == 'none':
        return np.zeros((1, config.num_tokens - config.registers, config.width), np.float32)
    table = positions.make_table(
        kind,
        config.grid,
        config.width,
        class_tokens=config.num_class_tokens,
        param=lambda name, *_: params[name],
    )
    records.require(table is not None, f'positions={kind}: used in attention, without embeddings')
    return np.asarray(table)


def init_params(config: ModelConfig, key: Key[Array, '']) -> Params:
    """Initializes parameters. They do not depend on compute options, and PORTABLE compiles fast."""
    images = jnp.zeros((1, *config.image_size, config.channels), jnp.float32)
    return make_module(config, Regularization(), PORTABLE).init(key, images)['params']


_SHAPES: dict[str, Params] = {}  # results of `abstract_params`


def abstract_params(config: ModelConfig) -> Params:
    """Returns the shape and dtype of each parameter, without computing it.

    A model is traced once, because tracing takes a tenth of the time that a small run needs to
    start. A model with a function as head is traced each time, because the function may change.
    """
    key = repr(config)
    if key not in _SHAPES or callable(config.head):
        _SHAPES[key] = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    return jax.tree.map(lambda leaf: leaf, _SHAPES[key])  # the caller may change the dictionaries


def feature_width(config: ModelConfig) -> int:
    """Returns the width of the head's input."""
    image = jax.ShapeDtypeStruct((1, *config.image_size, config.channels), jnp.float32)
    features = build(config, compute=PORTABLE).features  # on any device
    return jax.eval_shape(features, abstract_params(config), image).shape[-1]


def count_params(config: ModelConfig) -> int:
    """Returns the number of parameters (ViT paper, table 1)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config)))


def count_multiply_adds(
    config: ModelConfig,
    *,
    last_block: LastBlock = 'whole',
    regularization: Regularization | None = None,
) -> int:
    """Counts the multiply-adds of a forward pass of one image, in products and convolutions.

    The traced program is counted, so new layers need no formula. With `patch_outputs`, the forward
    pass is `predict_patches`. The operations of a training run (ViT paper, table 6) are 3 * 2 *
    epochs * images times as many: a backward pass costs two forward passes, and a multiply-add is
    two operations.

    With `regularization`, the training pass is counted; PatchDropout makes it cheaper.
    """
    compute = dataclasses.replace(PORTABLE, last_block=last_block)  # fused kernels hide products
    model = build(config, compute=compute, regularization=regularization)
    forward = model.predict_patches if has_patch_outputs(config) else model.apply
    if regularization is not None:
        forward = functools.partial(forward, key=jax.random.key(0))
    image = jax.ShapeDtypeStruct((1, *config.image_size, config.channels), jnp.float32)
    return count_products(forward, abstract_params(config), image)


def count_products(function: Callable[..., Any], *arguments: Any) -> int:
    """Counts the multiply-adds in products and convolutions of a function, which is traced."""
    return _count_in_jaxpr(jax.make_jaxpr(function)(*arguments).jaxpr)


def _count_in_jaxpr(jaxpr: Any) -> int:
    """Counts the multiply-adds of a traced program."""
    total = 0
    for equation in jaxpr.eqns:
        params = equation.params
        name = equation.primitive.name
        if name == 'dot_general':
            (contracted, _), _ = params['dimension_numbers']
            left = equation.invars[0].aval.shape
            output = equation.outvars[0].aval.shape
            total += math.prod(output) * math.prod(left[axis] for axis in contracted)
        elif name == 'conv_general_dilated':
            total += _count_convolution(equation)
        else:
            times = params['length'] if name == 'scan' else 1
            total += times * sum(_count_in_jaxpr(called) for called in jaxprs_in_params(params))
    return total


def _count_convolution(equation: Any) -> int:
    """Counts multiply-adds, except products with padding (3 % of a ResNet's multiply-adds).

    Axes are ordered as in Flax: (batch, ..., inputs) and (..., inputs, outputs).
    """
    image, kernel = (x.aval.shape for x in equation.invars)
    batch, *outputs, channels = equation.outvars[0].aval.shape
    strides = equation.params['window_strides']
    padding = equation.params['padding']
    total = batch * channels * kernel[-2]
    for axis, count in enumerate(outputs):
        starts = strides[axis] * np.arange(count)[:, None] - padding[axis][0]
        indices = starts + np.arange(kernel[axis])
        total *= int(np.sum((indices >= 0) & (indices < image[1 + axis])))
    return total


def apply_final_norm(config: ViTConfig, params: Params, tokens: Tokens) -> Tokens:
    """Applies the final norm of a model to the tokens of any block, in float32."""
    norm_class = nn.RMSNorm if config.norm == 'rms' else nn.LayerNorm
    norm = norm_class(epsilon=config.layer_norm_epsilon)
    module_params = params if config.final_norm == 'after_pool' else params['encoder']
    return norm.apply({'params': module_params['norm']}, tokens)
