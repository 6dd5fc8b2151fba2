"""Layers on tokens as rows against Flax's own."""

import dataclasses
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from vit_jax.base.tree_names import named_leaves
from vit_jax.models import Compute, build, ops

KEY = jax.random.key(0)
TOKENS = jax.random.normal(KEY, (2, 5, 6))
FLAT = Compute(dtype='float32', layout='flat', remat='none')
BATCHED = Compute(dtype='float32', layout='batched')
FOR_CPU = dataclasses.replace(FLAT, attention='head_major')


def applied(layer, x, params=None):
    """The parameters, what the layer gives, and its gradients by parameters and input."""
    params = layer.init(KEY, x) if params is None else params

    def total(params, x):
        return (layer.apply(params, x) ** 2).sum()

    return params, layer.apply(params, x), jax.grad(total, argnums=(0, 1))(params, x)


@pytest.mark.parametrize('compute', [FLAT, BATCHED, FOR_CPU])
@pytest.mark.parametrize(
    'shape, features, axes', [((2, 5, 6), (3, 4), 1), ((2, 5, 2, 3), (8,), 2), ((2, 5, 6), (4,), 1)]
)
def test_a_dense_layer_is_flaxs(compute, shape, features, axes):
    x, bias = jax.random.normal(KEY, shape), nn.initializers.normal(1.0)
    own = ops.Dense(features, compute, axes=axes, bias_init=bias)
    glorot = nn.initializers.xavier_uniform()
    flax = nn.DenseGeneral(features, axis=range(-axes, 0), kernel_init=glorot, bias_init=bias)
    params, *results = applied(own, x)
    expected, *others = applied(flax, x)
    for name, leaf in named_leaves(expected).items():  # to the bit: a seed means the same network
        np.testing.assert_array_equal(named_leaves(params)[name], leaf)
    for one, other in zip(jax.tree.leaves(results), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ('kind', 'flax', 'names'),
    [('layer', nn.LayerNorm, ('scale', 'bias')), ('rms', nn.RMSNorm, ('scale',))],
)
def test_a_norm_is_flaxs(kind, flax, names):
    params = {'params': {name: jnp.arange(6.0) / (1 + i) for i, name in enumerate(names)}}
    own = applied(ops.norm(kind, FLAT, 1e-6), TOKENS, params)
    other = applied(flax(epsilon=1e-6), TOKENS, params)
    for one, expected in zip(jax.tree.leaves(own), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('sides', [(6, 8), (7, 5)])
@pytest.mark.parametrize('function', ['pointwise', 'pointwise, every second', 'pool'])
def test_what_is_flat_in_a_resnet_is_xlas_convolution_and_pooling(function, sides):
    images = jax.random.normal(KEY, (2, *sides, 3))
    kernel = jax.random.normal(jax.random.key(1), (1, 1, 3, 4))

    def run(images, kernel, compute):
        if function == 'pool':
            return ops.max_pool(images, compute)
        return ops.convolution(images, kernel, 2 if 'second' in function else 1, compute)

    def both(compute):
        gradients = jax.grad(lambda *x: (run(*x, compute) ** 2).sum(), argnums=(0, 1))
        return run(images, kernel, compute), gradients(images, kernel)

    for one, other in zip(*map(jax.tree.leaves, (both(FLAT), both(BATCHED))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_pixel_that_is_not_finite_is_not_lost_in_pooling():
    image = jnp.zeros((1, 4, 4, 1)).at[0, 2, 2].set(jnp.nan)
    np.testing.assert_array_equal(
        jnp.isnan(ops.max_pool(image, FLAT))[0, :, :, 0], [[True, True], [True, True]]
    )


class Several(nn.Module):
    at_once: bool

    @nn.compact
    def __call__(self, x):
        bias = nn.initializers.normal(1.0)
        sizes = 3, 1, 4
        layers = [ops.Dense((2, k), FLAT, bias_init=bias, name=f'layer{k}') for k in sizes]
        made = ops.side_by_side(x, layers) if self.at_once else [layer(x) for layer in layers]
        return jnp.concatenate(made, axis=-1)


def test_layers_side_by_side_are_those_apart():
    params, *apart = applied(Several(at_once=False), TOKENS)
    together = applied(Several(at_once=True), TOKENS, params)[1:]
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_kernel_that_narrows_is_made_transposed_on_a_cpu():
    def shapes_of_products(compute):
        layer = ops.Dense((4,), compute, use_bias=False)
        params, x = layer.init(KEY, TOKENS), TOKENS.reshape(-1, 6)
        program = jax.jit(jax.grad(lambda p: layer.apply(p, x).std())).lower(params).compile()
        return re.findall(r'f32\[(\d+,\d+)\]\S* dot\(', program.as_text())

    assert '4,6' in shapes_of_products(FOR_CPU)
    assert '6,4' in shapes_of_products(FLAT)


@pytest.mark.full
@pytest.mark.parametrize('compute', [FLAT, FOR_CPU])
def test_forward_derivatives_are_there_as_well(compute):
    """What keeps little for the backward pass is no obstacle to a Hessian or a Jacobian."""
    model = build(tiny.model(), compute=compute)
    params, image = model.init(KEY), tiny.images(1)
    _, along = jax.jvp(lambda x: model.features(params, x), (image,), (image,))
    near = model.features(params, image * 1.001) - model.features(params, image * 0.999)
    np.testing.assert_allclose(along, near / 0.002, atol=1e-2)


def test_a_sum_apart_is_not_made_by_the_product_before_it_and_is_the_same():
    kernel = jax.random.normal(KEY, (6, 6))

    def total(x, *, compute):
        return ((x + ops.apart(jnp.tanh(x @ kernel), compute)) ** 2).sum()

    one, other = (functools.partial(total, compute=compute) for compute in (FLAT, BATCHED))
    np.testing.assert_array_equal(jax.grad(one)(TOKENS), jax.grad(other)(TOKENS))
    barriers = [str(jax.make_jaxpr(f)(TOKENS)).count('optimization_barrier') for f in (one, other)]
    assert barriers == [1, 0]
    program = jax.jit(jax.grad(one)).lower(TOKENS).as_text()
    assert program.count('optimization_barrier') == 1  # none on the way back
