"""Another head than the linear one: a function, and nothing else needs to know its inside."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest

from tests import tiny
from vit_jax.base import records
from vit_jax.base.errors import UserError
from vit_jax.checkpoints.transfer import for_task, has_trained_head, head_params, transfer
from vit_jax.models import Backbone, ResNetConfig, ViTConfig, build, multiply_adds


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
PARAMS = {
    f'head/layers_{i}/{leaf}': shape
    for i, shapes in ((0, ((16, 7), (7,))), (2, ((7, 10), (10,))))
    for leaf, shape in zip(('kernel', 'bias'), shapes, strict=True)
}


@pytest.mark.full
@pytest.mark.parametrize('config', NETWORKS.values(), ids=NETWORKS)
def test_a_function_gives_the_head_and_logits_are_what_it_computes(config):
    model, params = tiny.built(config)
    head = two_layers(config.num_classes)
    images = tiny.images(config=config)
    expected = head.apply({'params': params['head']}, model.features(params, images))
    np.testing.assert_allclose(model.apply(params, images), expected, rtol=1e-5, atol=1e-5)
    assert {name.split('/')[0] for name in head_params(params)} == {'head'}


def initial(config):
    return jax.device_get(jax.jit(build(config).init)(jax.random.key(0)))


@pytest.mark.full
def test_the_parameters_of_a_head_are_found_whatever_they_are_called():
    params = initial(NETWORKS['ViT'])
    assert {name: leaf.shape for name, leaf in head_params(params).items()} == PARAMS
    assert head_params(initial(tiny.model(num_classes=None))) == {}


@pytest.mark.full
def test_a_head_is_trained_when_no_matrix_of_it_is_zero():
    for config in NETWORKS['ViT'], tiny.model(head_bias=-3.0):
        params = initial(config)
        assert not has_trained_head(params)
        assert has_trained_head(tiny.random_params(params))
    assert not has_trained_head({'cls': np.ones((1, 1, 4))})


def test_the_cost_of_any_head_is_counted():
    without = multiply_adds(tiny.model(num_classes=None))
    assert multiply_adds(tiny.model()) - without == 16 * 10
    assert multiply_adds(NETWORKS['ViT']) - without == 16 * 7 + 7 * 10


@pytest.mark.full
def test_fine_tuning_replaces_any_head_by_a_linear_one():
    old = NETWORKS['ViT']
    new = for_task(old, num_classes=4, image_size=None)
    result = transfer(initial(old), old=old, new=new, fresh=initial(new))
    assert {*head_params(result.params)} == {'head/kernel', 'head/bias'}
    assert 'head: reset to zero, for 4 classes' in result.report


def test_a_configuration_names_the_function_that_text_cannot_hold():
    config = NETWORKS['ViT']
    plain = records.to_dict(config)
    assert plain['head'] == {'function': 'tests.models.test_heads:two_layers'}
    again = records.from_dict(ViTConfig, plain, where='model')
    features = dataclasses.replace(again, num_classes=None)
    assert not head_params(jax.eval_shape(build(features).init, jax.random.key(0)))
    with pytest.raises(UserError, match='two_layers is not in the file'):
        jax.eval_shape(build(again).init, jax.random.key(0))
    with pytest.raises(UserError, match='head_bias=-1.0: only the linear head has one'):
        tiny.model(head=two_layers, head_bias=-1.0)
