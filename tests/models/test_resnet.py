import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.networks import HYBRID
from vit_jax.base.tree_names import named_leaves
from vit_jax.models import Backbone, Compute, Regularization, ResNetConfig, build
from vit_jax.models.resnet import StdConv, max_pool

SMALL = ResNetConfig(image_size=(20, 14), backbone=Backbone(blocks=(2, 1), width=32), num_classes=3)


IMAGES = jax.random.normal(jax.random.key(1), (2, 20, 14, 3))


def made(config, scale=0.3, **options):
    model = build(config, **options)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return model, tiny.random_params(shapes, scale=scale)


def conv(x, kernel, stride):
    """A convolution with a standardized kernel: SAME, the odd pixel of padding at the end."""
    kernel = kernel - kernel.mean((0, 1, 2))
    kernel = kernel / (np.sqrt((kernel**2).mean((0, 1, 2))) + 1e-5)
    size, outputs = kernel.shape[0], [-(-side // stride) for side in x.shape[:2]]
    out = np.zeros((*outputs, kernel.shape[3]))
    before = [
        max(0, (o - 1) * stride + size - s) // 2 for o, s in zip(outputs, x.shape, strict=False)
    ]
    for i in range(outputs[0]):
        for j in range(outputs[1]):
            for a in range(size):
                for b in range(size):
                    row, column = i * stride + a - before[0], j * stride + b - before[1]
                    if 0 <= row < x.shape[0] and 0 <= column < x.shape[1]:
                        out[i, j] += x[row, column] @ kernel[a, b]
    return out


def group_norm(x, layer):
    """32 groups of neighboring channels, each normalized over the whole image."""
    groups = x.reshape(*x.shape[:2], 32, -1)
    groups = groups - groups.mean((0, 1, 3), keepdims=True)
    groups = groups / np.sqrt((groups**2).mean((0, 1, 3), keepdims=True) + 1e-6)
    return groups.reshape(x.shape) * layer['scale'] + layer['bias']


def pool_root(x):
    """3x3 with stride 2, SAME."""
    height, width = (-(-side // 2) for side in x.shape[:2])
    before = [
        max(0, (o - 1) * 2 + 3 - s) // 2 for o, s in zip((height, width), x.shape, strict=False)
    ]
    padded = np.full((2 * height + 3, 2 * width + 3, x.shape[2]), -np.inf)
    padded[before[0] : before[0] + x.shape[0], before[1] : before[1] + x.shape[1]] = x
    rows = [padded[2 * i : 2 * i + 3] for i in range(height)]
    return np.array([[r[:, 2 * j : 2 * j + 3].max((0, 1)) for j in range(width)] for r in rows])


def by_definition(params, image):
    """The feature map of one image in float64, from the text of the paper's code."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params['backbone'])
    x = conv(np.asarray(image, np.float64), p['conv_root']['kernel'], 2)
    x = pool_root(np.maximum(0, group_norm(x, p['norm_root'])))
    for stage, units in (('stage1', 2), ('stage2', 1)):
        for index in range(1, units + 1):
            unit = p[stage][f'unit{index}']
            stride = 2 if (stage, index) == ('stage2', 1) else 1
            y = np.maximum(0, group_norm(conv(x, unit['conv1']['kernel'], 1), unit['norm1']))
            y = np.maximum(0, group_norm(conv(y, unit['conv2']['kernel'], stride), unit['norm2']))
            y = group_norm(conv(y, unit['conv3']['kernel'], 1), unit['norm3'])
            if 'conv_proj' in unit:
                x = group_norm(conv(x, unit['conv_proj']['kernel'], stride), unit['norm_proj'])
            x = np.maximum(0, x + y)
    return x


@pytest.mark.gate
def test_the_resnet_is_the_one_of_the_papers_code():
    model, params = made(SMALL)
    expected = np.stack([by_definition(params, image).mean((0, 1)) for image in IMAGES])
    # float32 through nine standardized layers of up to 288 terms
    np.testing.assert_allclose(model.features(params, IMAGES), expected, rtol=2e-4, atol=2e-4)
    head = params['head']
    logits = expected @ head['kernel'] + head['bias']
    np.testing.assert_allclose(model.apply(params, IMAGES), logits, rtol=1e-3, atol=1e-3)


def test_the_epsilon_is_added_to_the_deviation():
    """Not to the variance, which would be 11 times larger with it here."""
    kernel = 1e-3 * np.random.default_rng(0).normal(size=(3, 3, 2, 4)).astype(np.float32)
    image = np.random.default_rng(1).normal(size=(5, 4, 2)).astype(np.float32)
    convolution = StdConv(features=4, size=3, compute=Compute(dtype='float32', layout='flat'))
    result = convolution.apply({'params': {'kernel': kernel}}, jnp.asarray(image)[None])[0]
    np.testing.assert_allclose(result, conv(image, kernel.astype(np.float64), 1), rtol=1e-4)


@pytest.mark.gate
@pytest.mark.parametrize('sides', [(6, 8), (7, 5)])
@pytest.mark.parametrize('stride', [1, 2])
@pytest.mark.parametrize('layer', ['conv', 'pool'])
def test_layouts_agree_in_outputs_and_gradients(layer, stride, sides):
    images = jax.random.normal(jax.random.key(0), (2, *sides, 3))

    def outputs_and_gradients(layout):
        compute = Compute(dtype='float32', layout=layout)
        conv = StdConv(features=4, size=1, stride=stride, compute=compute)
        variables = conv.init(jax.random.key(1), images)

        def run(variables, images):
            return max_pool(images, compute) if layer == 'pool' else conv.apply(variables, images)

        gradients = jax.grad(lambda *x: (run(*x) ** 2).sum(), argnums=(0, 1))
        return run(variables, images), gradients(variables, images)

    flat, batched = map(outputs_and_gradients, ('flat', 'batched'))
    for one, other in zip(*map(jax.tree.leaves, (flat, batched)), strict=True):
        # The gradient of a standardized kernel is a difference of larger numbers.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


def test_a_pixel_that_is_not_finite_is_not_lost_in_pooling():
    image = jnp.zeros((1, 4, 4, 1)).at[0, 2, 2].set(jnp.nan)
    pooled = max_pool(image, Compute(layout='flat'))
    np.testing.assert_array_equal(jnp.isnan(pooled)[0, :, :, 0], [[True, True], [True, True]])


@pytest.mark.gate
def test_every_leaf_learns_and_remat_changes_no_gradient():
    results = []
    for remat in 'none', 'dots', 'block':
        model, params = made(SMALL, compute=Compute(remat=remat))
        gradient = jax.jit(jax.grad(lambda p, m=model: m.apply(p, IMAGES).std()))(params)
        results.append(named_leaves(gradient))
    assert all(jnp.abs(leaf).max() > 1e-7 for leaf in results[0].values())
    for other in results[1:]:
        for name, leaf in other.items():
            np.testing.assert_allclose(leaf, results[0][name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    'make, message',
    [
        (lambda: Backbone(width=48), 'width=48'),
        (lambda: Backbone(blocks=(3, 0)), 'blocks='),
        (lambda: build(SMALL, regularization=Regularization(dropout=0.1)), 'dropout'),
        (lambda: dataclasses.replace(HYBRID, patch_size=(9, 9)).grid, 'patch_size='),
    ],
)
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
