"""What `Model.capture` promises: only what is named, and logits that it does not change."""

import jax
import numpy as np
import pytest

from tests import tiny
from vit_jax.base.errors import UserError
from vit_jax.models import Backbone, Compute, ResNetConfig, build

BACKBONE = Backbone(blocks=(1, 1), width=32)
HYBRID = {'image_size': (64, 48), 'patch_size': (2, 1), 'backbone': BACKBONE}
EVERY = {
    'ViT': (tiny.model(pool='map'), ('tokens', 'attention/weights', 'pool/attention/weights')),
    'hybrid': (tiny.model(**HYBRID), ('stage1', 'stage2', 'tokens', 'attention/weights')),
    'ResNet': (
        ResNetConfig(image_size=(20, 14), backbone=BACKBONE, num_classes=3),
        ('stage1', 'stage2'),
    ),
}


def made(config, **compute):
    model = build(config, compute=Compute(**compute))
    params = tiny.random_params(jax.eval_shape(model.init, jax.random.key(0)))
    return model, params, tiny.images(config=config)


FULL = [(network, dtype, 1) for network in EVERY for dtype in ('float32', 'bfloat16')]
FULL.append(('ViT', 'bfloat16', 3))


@pytest.mark.parametrize(
    'network, dtype, unroll',
    [
        ('ResNet', 'float32', 1),
        *(pytest.param(*each, marks=pytest.mark.full) for each in FULL),
    ],
)
def test_logits_are_those_without_capture_to_the_bit(network, dtype, unroll):
    config, names = EVERY[network]
    model, params, images = made(config, dtype=dtype, unroll=unroll)
    logits, seen = jax.jit(model.capture, static_argnums=2)(params, images, names)
    np.testing.assert_array_equal(logits, jax.jit(model.apply)(params, images))
    assert set(seen) == set(names)
    assert all(np.any(array) for array in seen.values())


def test_blocks_lie_along_the_first_axis_and_the_last_one_gives_the_features():
    config = tiny.model(pool='none', num_classes=None, depth=4)
    model, params, images = made(config)
    features, seen = model.capture(params, images, ['tokens', 'attention/weights'])
    assert seen['tokens'].shape == (4, 2, 4, config.width)
    assert seen['attention/weights'].shape == (4, 2, config.num_heads, 4, 4)
    np.testing.assert_allclose(seen['attention/weights'].sum(-1), 1, rtol=1e-6)
    norm = params['encoder']['norm']
    last = jax.nn.standardize(seen['tokens'][-1], epsilon=config.layer_norm_epsilon)
    np.testing.assert_allclose(last * norm['scale'] + norm['bias'], features, atol=1e-5)


def test_the_weights_are_those_that_mix_the_values():
    """Zero keys: every query sees every token alike."""
    model, params, images = made(tiny.model())
    key = params['encoder']['block']['attention']['key']
    params['encoder']['block']['attention']['key'] = jax.tree.map(np.zeros_like, key)
    _, seen = model.capture(params, images, ['attention/weights'])
    np.testing.assert_allclose(seen['attention/weights'], 1 / 5, rtol=1e-6)


def test_what_is_not_named_is_neither_computed_nor_kept():
    model, params, images = made(tiny.model(depth=7))  # a number that nothing else has

    def program(names):
        return str(jax.make_jaxpr(lambda p, x: model.capture(p, x, names))(params, images))

    nothing, tokens, weights = map(program, ([], ['tokens'], ['attention/weights']))
    assert 'f32[7,2,5,16]' in tokens and 'f32[7,2,5,16]' not in weights
    assert 'f32[7,2,2,5,5]' in weights and 'f32[7,2,2,5,5]' not in tokens
    exponentials = [text.count('= exp') for text in (nothing, tokens, weights)]
    assert exponentials[0] == exponentials[1] == exponentials[2] - 1  # one more softmax


@pytest.mark.parametrize(
    'config, name, message',
    [
        (EVERY['ViT'][0], 'token', "no 'token' here; did you mean 'tokens'"),
        (EVERY['ViT'][0], 'params', "no 'params' here; known: attention/weights, pool"),
        (EVERY['ResNet'][0], 'tokens', "no 'tokens' here; known: stage1, stage2"),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_are_there(config, name, message):
    model, params, images = made(config)
    with pytest.raises(UserError, match=message):
        model.capture(params, images, [name])
