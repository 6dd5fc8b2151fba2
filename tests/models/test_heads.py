"""Another head than the linear one: a function, and nothing else needs to know its inside."""

import dataclasses
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from vit_jax.base import records
from vit_jax.base.errors import UserError
from vit_jax.checkpoints.transfer import head_params
from vit_jax.models import Backbone, ResNetConfig, ViTConfig, apply_heads, build, count_params


def two_layers(num_classes):
    zeros = nn.initializers.zeros
    return nn.Sequential([nn.Dense(7), nn.relu, nn.Dense(num_classes, kernel_init=zeros)])


NETWORKS = {
    'ViT': tiny.model(head=two_layers),
    'ResNet': ResNetConfig(
        image_size=(20, 14),
        backbone=Backbone(blocks=(1,), width=32),
        num_classes=tiny.CLASSES,
        head=two_layers,
    ),
}


@pytest.mark.gate
@pytest.mark.parametrize('config', NETWORKS.values(), ids=NETWORKS)
def test_a_function_gives_the_head_and_logits_are_what_it_computes(config):
    model, params = tiny.built(config)
    head = two_layers(config.num_classes)
    images = tiny.images(config=config)
    expected = head.apply({'params': params['head']}, model.features(params, images))
    np.testing.assert_allclose(model.apply(params, images), expected, rtol=1e-5, atol=1e-5)
    assert {name.split('/')[0] for name in head_params(params)} == {'head'}


def test_a_configuration_names_the_function_that_text_cannot_hold():
    config = NETWORKS['ViT']
    plain = records.to_dict(config)
    assert plain['head'] == {'function': 'tests.models.test_heads:two_layers'}
    again = records.from_dict(ViTConfig, plain, where='model')
    features = dataclasses.replace(again, num_classes=None)
    assert not head_params(jax.eval_shape(build(features).init, jax.random.key(0)))
    with pytest.raises(UserError, match='two_layers'):
        jax.eval_shape(build(again).init, jax.random.key(0))
    with pytest.raises(UserError, match='head_bias=-1.0'):
        tiny.model(head=two_layers, head_bias=-1.0)


@pytest.mark.gate
def test_each_of_two_heads_reads_its_own_token():
    model, params = tiny.built(tiny.model(depth=1, pool='cls_dist'))
    features = jnp.concatenate([jnp.ones((1, 16)), jnp.zeros((1, 16))], axis=1)
    weights = {'kernel': jnp.ones((16, tiny.CLASSES)), 'bias': jnp.zeros(tiny.CLASSES)}
    cls, dist = apply_heads(model.config, {'cls': weights, 'dist': weights}, features)
    assert (cls == 16).all() and (dist == 0).all()
    images = tiny.images(config=model.config)
    both = apply_heads(model.config, params['head'], model.features(params, images))
    np.testing.assert_allclose(sum(both) / 2, model.apply(params, images), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', NETWORKS)
@pytest.mark.parametrize('change', [-3, 1])
def test_a_function_whose_head_has_another_number_of_outputs_is_rejected(name, change):
    config = dataclasses.replace(NETWORKS[name], head=lambda k: nn.Dense(k + change))
    outputs = tiny.CLASSES + change
    text = re.escape(f'got logits (1, {outputs}); expected (1, {tiny.CLASSES})')
    with pytest.raises(UserError, match=f'model.head=.*{text}'):
        count_params(config)


@pytest.mark.parametrize(
    'head, text',
    [
        (lambda k: 3, 'returned 3; expected a flax module'),
        (lambda k: nn.Dense, 'expected a flax module'),
        (lambda k: nn.Sequential([nn.Dense(k), lambda x: (x, x)]), r'got logits tuple; expected'),
    ],
)
def test_a_function_that_makes_no_head_is_rejected(head, text):
    with pytest.raises(UserError, match=f'model.head=.*{text}'):
        count_params(tiny.model(head=head))


def test_a_function_that_has_changed_gives_other_parameters():
    """As in a notebook, where the head is defined again or depends on a variable."""
    widths = [4]

    def head(num_classes):
        return nn.Sequential([nn.Dense(widths[0]), nn.Dense(num_classes)])

    config = tiny.model(head=head)
    narrow = count_params(config)
    widths[0] = 8
    assert count_params(config) == narrow + 4 * (16 + 1) + 4 * tiny.CLASSES
