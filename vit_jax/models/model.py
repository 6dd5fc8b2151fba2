"""A network as pure functions of a plain dictionary of arrays, and what it costs."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from vit_jax.base import Array, Float, Key, Params, records
from vit_jax.models import positions, taps
from vit_jax.models.compute import PORTABLE, Compute, LastBlock, Regularization, resolve_compute
from vit_jax.models.config import ModelConfig, ViTConfig
from vit_jax.models.masked_patches import Corruption, PatchOutputs
from vit_jax.models.resnet import ResNetClassifier
from vit_jax.models.vit import Images, ViT, make_head

Outputs = Float[Array, '...']
Dropout = Key[Array, ''] | None


class Model(NamedTuple):
    """A network as pure functions of a plain dictionary of float32 arrays.

    - init(key) -> params
    - apply(params, images, key=None) -> logits, or features without a head; a key switches
      dropout and stochastic depth on
    - features(params, images) -> the input of the head
    - predict_patches(params, images, corruption=None, key=None) -> outputs for each patch (b n k)
      of the corrupted images; requires `patch_outputs`
    - capture(params, images, names) -> the output of `apply`, and an array for each of these
      taps, such as `attention/weights` (docs/visualize.md lists them); other taps are not
      computed. If `names` maps names to functions, each tap is reduced by its function, one block
      after the other. Raises UserError for an unknown name. Compiled in one program, the logits
      may differ from those of `apply` in the last bits.
    """

    config: ModelConfig
    init: Callable[[Key[Array, '']], Params]
    apply: Callable[..., Outputs]
    features: Callable[[Params, Images], Outputs]
    predict_patches: Callable[..., PatchOutputs]
    capture: Callable[..., tuple[Outputs, dict[str, Any]]]


def build(
    config: ModelConfig,
    *,
    regularization: Regularization | None = None,
    compute: Compute | None = None,
    platform: str | None = None,
) -> Model:
    """Builds the model of a configuration.

    Args:
      config: The architecture.
      regularization: What training drops at random; None: nothing.
      compute: How it is computed; `auto` is resolved for the platform (models/compute.py).
      platform: The platform of the devices; None: jax's default.

    Returns:
      The model. Activation sharding follows the mesh in jax's context (models/on_mesh.py).

    Raises:
      UserError: If the sizes do not fit together.
    """
    config = records.checked(config, where='model')  # fields may have been assigned since
    compute = records.checked(compute or Compute(), where='compute')
    regularization = records.checked(regularization or Regularization(), where='regularization')
    platform = platform or jax.default_backend()
    compute = resolve_compute(compute, config, platform=platform, regularization=regularization)
    shape = *config.image_size, config.channels
    module = make_module(config, Regularization(), compute)
    training = make_module(config, regularization, compute)

    def apply(params: Params, images: Images, key: Dropout = None, **options: Any) -> Any:
        wrong = f'images are {images.shape[1:]}, the model takes {shape}'
        records.require(images.shape[1:] == shape, wrong)
        if key is None:
            return module.apply({'params': params}, images, **options)
        return training.apply({'params': params}, images, rngs={'dropout': key}, **options)

    def predict_patches(
        params: Params, images: Images, corruption: Corruption | None = None, key: Dropout = None
    ) -> PatchOutputs:
        records.require(has_patch_outputs(config), 'predict_patches: expected patch_outputs')
        return apply(params, images, key, corruption=corruption, output='patches')

    def capture(
        params: Params, images: Images, names: taps.Wanted
    ) -> tuple[Outputs, dict[str, Any]]:
        seen = taps.capture(lambda: apply(params, images, mutable=[taps.COLLECTION])[1], names)
        return apply(params, images), seen

    init = functools.partial(init_params, config)
    features = functools.partial(apply, output='features')
    return Model(config, init, apply, features, predict_patches, capture)


def has_patch_outputs(config: ModelConfig) -> bool:
    """Returns whether the model has a head that all patches share."""
    return isinstance(config, ViTConfig) and config.patch_outputs is not None


def make_module(config: ModelConfig, regularization: Regularization, compute: Compute) -> Any:
    """Makes the Flax module of a model. `compute` has no `auto`."""
    if isinstance(config, ViTConfig):
        return ViT(config, regularization, compute, make_head(config))
    unknown = f'a ResNet has neither dropout nor stochastic depth: {regularization}'
    records.require(regularization == Regularization(), unknown)
    return ResNetClassifier(config, compute, make_head(config))


def position_tables(config: ViTConfig) -> dict[str, tuple[bool, bool]]:
    """Maps the name of each learned table to (depends on the row, depends on the column)."""
    learned = positions.LEARNED.get(config.positions, {})
    place = 'encoder/block/' if config.positions_at == 'every_layer' else ''
    return {place + name: axes for name, axes in learned.items()}


def position_array(config: ViTConfig, params: Params) -> Float[np.ndarray, '1 m d']:
    """Returns what is added to class tokens and patches as an array, from parameters by name.

    Raises:
      UserError: If the positions act in attention.
    """
    kind, prefix, width = config.positions, config.positioned_prefix, config.width
    if kind == 'none':
        return np.zeros((1, config.num_tokens - config.registers, width), np.float32)
    table = positions.table(
        kind, config.grid, width, prefix=prefix, param=lambda name, *_: params[name]
    )
    records.require(table is not None, f'positions={kind}: act in attention, they have no table')
    return np.asarray(table)


def init_params(config: ModelConfig, key: Key[Array, '']) -> Params:
    """Draws parameters. They do not depend on how the model is computed; PORTABLE compiles fast."""
    images = jnp.zeros((1, *config.image_size, config.channels), jnp.float32)
    return make_module(config, Regularization(), PORTABLE).init(key, images)['params']


def abstract_params(config: ModelConfig) -> Params:
    """Returns the shape and type of each parameter."""
    return jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))


def parameter_count(config: ModelConfig) -> int:
    """Returns the number of parameters (table 1)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config)))


def multiply_adds(config: ModelConfig, *, last_block: LastBlock = 'whole') -> int:
    """Counts the multiply-adds of one image's forward pass, in products and convolutions only.

    Table 6 is epochs * images * 3 * 2 times as many operations: the backward pass costs two forward
    passes, and a multiply-add two operations. With `patch_outputs` it is the pass that predicts
    these. The traced program is counted: a new layer needs no formula here.
    """
    compute = dataclasses.replace(PORTABLE, last_block=last_block)  # a fused kernel hides its own
    model = build(config, compute=compute)
    forward = model.predict_patches if has_patch_outputs(config) else model.apply
    image = jax.ShapeDtypeStruct((1, *config.image_size, config.channels), jnp.float32)
    return _count(jax.make_jaxpr(forward)(abstract_params(config), image).jaxpr)


def _count(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        params, name = equation.params, equation.primitive.name
        if name == 'dot_general':
            (contracted, _), _ = params['dimension_numbers']
            left, output = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += math.prod(output) * math.prod(left[axis] for axis in contracted)
        elif name == 'conv_general_dilated':
            total += _count_convolution(equation)
        else:
            times = params['length'] if name == 'scan' else 1
            total += times * sum(_count(called) for called in jaxprs_in_params(params))
    return total


def _count_convolution(equation: Any) -> int:
    """Counts multiply-adds, except those of padding, which are 3 % of a ResNet's.

    Axes are those of Flax: (batch, ..., inputs) and (..., inputs, outputs).
    """
    image, kernel = (x.aval.shape for x in equation.invars)
    batch, *outputs, channels = equation.outvars[0].aval.shape
    strides, padding = equation.params['window_strides'], equation.params['padding']
    total = batch * channels * kernel[-2]
    for axis, count in enumerate(outputs):
        starts = strides[axis] * np.arange(count)[:, None] - padding[axis][0]
        read = starts + np.arange(kernel[axis])
        total *= int(np.sum((read >= 0) & (read < image[1 + axis])))
    return total
