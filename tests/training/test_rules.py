import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import tiny
from tests.networks import RESNET
from vit_jax.base import UserError, tree_names
from vit_jax.models import build
from vit_jax.training.optimizer import OPTIONS, OptimizerConfig, make_optimizer
from vit_jax.training.param_groups import make_param_groups

MODEL = build(tiny.model(depth=3))
SHAPES = jax.eval_shape(MODEL.init, jax.random.key(0))
PARAMS = tiny.random_params(SHAPES)


PLAIN = {'kind': 'sgd', 'momentum': 0.0}


def rules(**changes):
    return make_param_groups(OptimizerConfig(**changes), SHAPES)


def lr_factors(**changes):
    return tree_names.named_leaves(rules(**changes).lr_factors)


def slope_of(made):
    """The gradient of the sum of all parameters."""
    return jax.grad(
        lambda p: sum(leaf.sum() for leaf in jax.tree.leaves(made.stop_frozen_gradients(p)))
    )


def moved(steps=1, **changes):
    """How far each parameter is moved by gradients of 1 at rate 1, without moments."""
    config = OptimizerConfig(**(changes if 'kind' in changes else PLAIN | changes))
    made = make_param_groups(config, SHAPES)
    optimizer = make_optimizer(config, lambda step: jnp.asarray(1.0), made)

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(slope_of(made)(params), state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, jax.jit(optimizer.init)(PARAMS)
    for _ in range(steps):
        params, state = step(params, state)
    return tree_names.named_leaves(
        jax.tree.map(lambda new, old: np.asarray(new - old), params, PARAMS)
    )


@pytest.mark.gate
def test_layers_learn_slower_the_further_they_are_from_the_head():
    found = moved(layer_decay=0.5)
    tolerance = {'atol': 1e-5}  # float32 parameters of size 1 were subtracted
    for name in 'embedding/kernel', 'embedding/bias', 'pos_embedding', 'cls':
        np.testing.assert_allclose(found[name], -(0.5**4), **tolerance)
    block = found['encoder/block/mlp/dense1/kernel']
    for layer, power in enumerate([3, 2, 1]):
        np.testing.assert_allclose(block[layer], -(0.5**power), **tolerance)
    for name in 'encoder/norm/scale', 'head/kernel':
        np.testing.assert_allclose(found[name], -1, **tolerance)


def test_learning_rates_are_multiplied_by_name():
    found = moved(lr_multipliers=(('head/.*', 10.0), ('.*/bias', 0.5)))
    np.testing.assert_allclose(found['head/kernel'], -10, rtol=1e-5)
    np.testing.assert_allclose(found['head/bias'], -5, rtol=1e-5)
    np.testing.assert_allclose(found['embedding/bias'], -0.5, rtol=1e-5)
    np.testing.assert_allclose(found['cls'], -1, rtol=1e-5)


@pytest.mark.parametrize('kind', OPTIONS)
def test_what_is_frozen_does_not_move_by_a_bit_nor_has_moments(kind):
    options = {'kind': kind, 'weight_decay': 0.1, 'momentum': 0.9 if kind == 'sgd' else None}
    found = moved(3, frozen=('pos_embedding', 'embedding/.*'), **options)
    for name, change in found.items():
        frozen = name == 'pos_embedding' or name.startswith('embedding/')
        assert (change == 0).all() == frozen, name
    made = rules(frozen=('pos_embedding',), **options)
    state = make_optimizer(OptimizerConfig(**options), lambda s: 1.0, made).init(PARAMS)
    assert not any('pos_embedding' in name for name in tree_names.named_leaves(state))
    assert any('cls' in name for name in tree_names.named_leaves(state))
    assert re.search('1 of 24 .* 80 .*pos_embedding', made.report[0])


def test_the_head_alone_learns():
    found = moved(2, trained_blocks=0, kind='adamw')
    assert {name for name, change in found.items() if change.any()} == {'head/kernel', 'head/bias'}
    assert ' 170 ' in rules(trained_blocks=0).report[0]


@pytest.mark.parametrize('kind', ['adamw', 'muon', 'lamb'])
def test_the_last_blocks_learn_with_all_that_follows(kind):
    found = moved(2, trained_blocks=1, kind=kind, weight_decay=0.1)
    for name, change in found.items():
        if name.startswith('encoder/block/'):
            assert not change[:2].any() and change[2].all(), name
        else:
            assert change.any() == name.startswith(('encoder/norm', 'head')), name


@pytest.mark.gate
def test_what_is_frozen_has_no_gradient_and_no_part_in_its_norm():
    made = rules(trained_blocks=1, frozen=('head/bias',))
    slope = jax.jit(slope_of(made))(PARAMS)
    for name, leaf in tree_names.named_leaves(slope).items():
        learned = jnp.broadcast_to(tree_names.named_leaves(made.trained)[name], leaf.shape)
        np.testing.assert_array_equal(leaf, learned.astype(jnp.float32), err_msg=name)
    clipped = moved(trained_blocks=0, clip_norm=1.0)
    size = np.sqrt(sum((change**2).sum() for change in clipped.values()))
    assert size == pytest.approx(1.0, rel=1e-4)


def test_head_and_body_decay_apart():
    body, head = (
        moved(weight_decay=0.1, head_weight_decay=3.0)[f'{name}/kernel'] + 1
        for name in ('embedding', 'head')
    )
    params = tree_names.named_leaves(PARAMS)
    np.testing.assert_allclose(body, -0.1 * params['embedding/kernel'], atol=1e-6)
    np.testing.assert_allclose(head, -3.0 * params['head/kernel'], atol=1e-5)
    assert [*rules(head_weight_decay=3.0).decayed] == ['head_weight_decay']


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'frozen': ('postions',)}, 'postions'),
        ({'lr_multipliers': (('haed/.*', 2.0),)}, 'haed'),
        ({'lr_multipliers': (('head/.*', -1.0),)}, 'lr_multipliers'),
        ({'weight_decay': 0.1, 'decay_pattern': 'kernle'}, 'kernle'),
        ({'head_weight_decay': 1.0, 'decay_pattern': 'embedding/kernel'}, 'embedding/kernel'),
        ({'trained_blocks': 4}, 'trained_blocks=4'),
    ],
)
def test_a_rule_that_matches_nothing_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        rules(**changes)


def test_what_has_a_name_of_its_own_is_an_input_and_not_the_head():
    """A new kind of embedding must not learn at the head's rate, nor with the last blocks."""
    shapes = SHAPES | {'rotary': {'frequencies': SHAPES['cls']}, 'norm': SHAPES['head']}
    for changes, embedding, last in (
        ({'layer_decay': 0.5}, 0.5**4, 1),
        ({'trained_blocks': 1}, 0, 1),
    ):
        found = tree_names.named_leaves(
            make_param_groups(OptimizerConfig(**changes), shapes).lr_factors
        )
        assert found['rotary/frequencies'] == embedding and found['norm/bias'] == last


def test_rules_about_layers_need_layers():
    shapes = jax.eval_shape(build(RESNET).init, jax.random.key(0))
    for changes in {'layer_decay': 0.9}, {'trained_blocks': 1}:
        with pytest.raises(ValueError, match=[*changes][0]):
            make_param_groups(OptimizerConfig(**changes), shapes)


@pytest.mark.parametrize('changes', [{'trained_blocks': 0}, {'head_weight_decay': 0.1}])
def test_rules_about_the_head_need_a_head(changes):
    shapes = jax.eval_shape(build(tiny.model(num_classes=None)).init, jax.random.key(0))
    ((name, value),) = changes.items()
    with pytest.raises(UserError, match=f'config.optimizer.{name}={value}: the model has no head'):
        make_param_groups(OptimizerConfig(**changes), shapes)


def test_the_head_of_patches_is_a_head_and_the_mask_token_an_input():
    masked = build(tiny.model(num_classes=None, patch_outputs=7))
    shapes = jax.eval_shape(masked.init, jax.random.key(0))
    slower = make_param_groups(OptimizerConfig(layer_decay=0.5), shapes).lr_factors
    assert slower['masked']['head']['kernel'] == 1 and slower['masked']['token'] == 0.5**4
    alone = make_param_groups(OptimizerConfig(trained_blocks=0), shapes)
    assert '119 parameters' in alone.report[0]
    decayed = make_param_groups(OptimizerConfig(head_weight_decay=3.0), shapes)
    assert 'masked/head/kernel' in decayed.report[0]
