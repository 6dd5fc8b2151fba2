"""`Model.capture` computes only the named taps, and the same logits."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from vit_jax.base.errors import UserError
from vit_jax.models import Backbone, Compute, ResNetConfig

BACKBONE = Backbone(blocks=(1, 1), width=32)
HYBRID = {'image_size': (64, 48), 'patch_size': (2, 1), 'backbone': BACKBONE}
RESNET = ResNetConfig(image_size=(20, 14), backbone=BACKBONE, num_classes=3)
DOCUMENTED = (pathlib.Path(__file__).parents[2] / 'docs' / 'visualize.md').read_text()
_, _OF_VIT, _OF_RESNET = re.split(r'^\| in a .*$', DOCUMENTED, flags=re.MULTILINE)
VIT_TAPS, RESNET_TAPS = (
    set(re.findall(r'^\| `([^`]+)` \| [(t]', table, re.MULTILINE))
    for table in (_OF_VIT, _OF_RESNET)
)
# Models, and the names of all their taps.
EVERY = {
    'ViT': (tiny.model(pool='map'), VIT_TAPS),
    'hybrid': (tiny.model(**HYBRID), RESNET_TAPS | VIT_TAPS),
    'ResNet': (RESNET, RESNET_TAPS),
}


def made(config, **compute):
    model, params = tiny.built(config, compute=Compute(**compute))
    return model, params, tiny.images(config=config)


GATE = [('ResNet', 'float32', 1), ('ViT', 'bfloat16', 3), ('hybrid', 'bfloat16', 1)]
NIGHTLY = [
    ('ViT', 'float32', 1),
    ('ViT', 'bfloat16', 1),
    ('hybrid', 'float32', 1),
    ('ResNet', 'bfloat16', 1),
]


@pytest.mark.parametrize(
    'network, dtype, unroll',
    [
        *(pytest.param(*each, marks=pytest.mark.gate) for each in GATE),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in NIGHTLY),
    ],
)
def test_every_tap_is_captured_and_logits_stay_within_rounding(network, dtype, unroll):
    model, params, images = made(EVERY[network][0], dtype=dtype, unroll=unroll)
    names = names_of(model, params, images)
    logits, seen = jax.jit(model.capture, static_argnums=2)(params, images, names)
    expected = jax.jit(model.apply)(params, images)
    tolerance = 1e-5 if dtype == 'float32' else 3e-2
    np.testing.assert_allclose(logits, expected, rtol=tolerance, atol=tolerance)
    assert set(seen) == set(names)
    assert all(np.any(array) for array in jax.tree.leaves(seen))


def names_of(model, params, images):
    """All taps of a network: the message for a name that there is not lists them."""
    with pytest.raises(UserError) as refused:
        jax.eval_shape(lambda: model.capture(params, images, ['?']))
    return tuple(str(refused.value).partition('known: ')[2].split(', '))


@pytest.mark.parametrize(
    'network', ['ViT', 'ResNet', pytest.param('hybrid', marks=pytest.mark.gate)]
)
def test_the_tables_list_every_tap_and_no_other(network):
    config, table = EVERY[network]
    names = names_of(*made(config))
    found = {re.sub(r'unit\d', 'unitU', re.sub(r'stage\d', 'stageS', name)) for name in names}
    absent = {} if network == 'ViT' else {name for name in table if name.startswith('pool/')}
    assert found == table - {*absent}


@pytest.mark.gate
def test_functions_are_applied_within_the_blocks():
    """What they give is stacked; the whole tokens of all blocks are never in memory together."""
    model, params, images = made(tiny.model(depth=7))

    def norms(params, images):
        functions = {
            'tokens': lambda x: {'first': x[:, 0], 'norm': jnp.linalg.norm(x, axis=-1)},
            'mlp/residual': lambda pair: pair[0].sum() + pair[1].sum(),
        }
        return model.capture(params, images, functions)[1]

    def all_of_it(params, images):
        return model.capture(params, images, ['tokens'])[1]

    assert 'f32[7,2,5,16]' in str(jax.make_jaxpr(all_of_it)(params, images))
    assert 'f32[7,2,5,16]' not in str(jax.make_jaxpr(norms)(params, images))
    seen, (_, whole) = norms(params, images), model.capture(params, images, ['tokens'])
    np.testing.assert_array_equal(seen['tokens']['first'], whole['tokens'][:, :, 0])
    norm = np.linalg.norm(whole['tokens'], axis=-1)
    np.testing.assert_allclose(seen['tokens']['norm'], norm, rtol=1e-6)
    assert seen['mlp/residual'].shape == (7,)


def test_a_block_without_skips_forgets_what_it_was_given():
    """Its output is its MLP's alone; the other blocks keep their skip connections."""
    config = tiny.model(blocks_without_skips=(1,))
    model, params, images = made(config)
    names = 'attention/out', 'attention/residual', 'mlp/out', 'mlp/residual', 'tokens'
    _, seen = jax.jit(model.capture, static_argnums=2)(params, images, names)
    np.testing.assert_array_equal(seen['tokens'][1], seen['mlp/out'][1])
    assert not seen['mlp/residual'][0][1].any() and not seen['attention/residual'][0][1].any()
    for index in (0, 2):
        total = seen['mlp/residual'][0][index] + seen['mlp/out'][index]
        np.testing.assert_allclose(seen['tokens'][index], total, rtol=1e-6)


def test_what_is_not_named_is_neither_computed_nor_kept():
    config = tiny.model(depth=7)  # a number that nothing else has
    model, params, images = made(config, last_block='whole')

    def program(names):
        return str(jax.make_jaxpr(lambda p, x: model.capture(p, x, names))(params, images))

    nothing, tokens, weights = map(program, ([], ['tokens'], ['attention/weights']))
    assert 'f32[7,2,5,16]' in tokens and 'f32[7,2,5,16]' not in weights
    assert 'f32[7,2,2,5,5]' in weights and 'f32[7,2,2,5,5]' not in tokens
    exponentials = [text.count('= exp') for text in (nothing, tokens, weights)]
    assert exponentials[0] == exponentials[1] == exponentials[2] - 1  # one more softmax


def test_an_unknown_name_is_rejected_with_the_nearest():
    model, params, images = made(EVERY['ViT'][0])
    with pytest.raises(UserError, match="'token'.*'tokens'"):
        model.capture(params, images, ['token'])
