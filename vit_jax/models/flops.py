"""What a network costs, without computing it: parameters and multiply-adds."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

from vit_jax.base import Array, Params
from vit_jax.models.compute import PORTABLE, LastBlock, Regularization
from vit_jax.models.config import ModelConfig, ViTConfig
from vit_jax.models.model import abstract_params, make_module
from vit_jax.models.vit import Images


def parameter_count(config: ModelConfig) -> int:
    """The number of parameters (table 1)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config)))


def multiply_adds(config: ModelConfig, *, last_block: LastBlock = 'whole') -> int:
    """Multiply-adds of one image's forward pass, in matrix products and convolutions only.

    Table 6 is epochs * images * 3 * 2 times as many operations: the backward pass costs two forward
    ones, a multiply-add two. Counted in the traced program: a new layer needs no formula here. With
    a head of each patch it is the pass that predicts these. With `last_block=class_tokens` what
    such a last block leaves out is not counted.
    """
    compute = dataclasses.replace(PORTABLE, last_block=last_block)  # a fused kernel hides its own
    module = make_module(config, Regularization(), compute)

    def forward(params: Params, images: Images) -> Array:
        if isinstance(config, ViTConfig) and config.patch_outputs is not None:
            return module.apply({'params': params}, images, None, method='predict_patches')
        return module.apply({'params': params}, images)

    params = abstract_params(config)
    image = jax.ShapeDtypeStruct((1, *config.image_size, config.channels), np.float32)
    return _count(jax.make_jaxpr(forward)(params, image).jaxpr)


def _count(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        params, name = equation.params, equation.primitive.name
        inner = [_count(called) for called in jaxprs_in_params(params)]
        if name == 'dot_general':
            (contracted, _), _ = params['dimension_numbers']
            left, output = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += math.prod(output) * math.prod(left[axis] for axis in contracted)
        elif name == 'conv_general_dilated':
            total += _convolution(equation)
        elif name == 'cond':
            total += max(inner)
        elif name == 'while' and any(inner):
            raise NotImplementedError('multiply-adds in a loop of unknown length')
        else:
            total += sum(inner) * (params['length'] if name == 'scan' else 1)
    return total


def _convolution(equation: Any) -> int:
    """Multiply-adds, but those that meet only padding (3 % of a ResNet's), as XLA counts them."""
    params, specs = equation.params, equation.params['dimension_numbers']
    image, kernel = (v.aval.shape for v in equation.invars)
    output = equation.outvars[0].aval.shape
    batch, features, *output_axes = specs.out_spec
    inputs_of_a_group = kernel[specs.rhs_spec[1]]
    total = output[batch] * output[features] * inputs_of_a_group
    for i, axis in enumerate(output_axes):
        starts = params['window_strides'][i] * np.arange(output[axis]) - params['padding'][i][0]
        taps = params['rhs_dilation'][i] * np.arange(kernel[specs.rhs_spec[2 + i]])
        at, spread = starts[:, None] + taps, params['lhs_dilation'][i]
        last = (image[specs.lhs_spec[2 + i]] - 1) * spread
        total *= int(np.sum((at >= 0) & (at <= last) & (at % spread == 0)))
    return total
