import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import tiny
from vit_jax.data.image_preprocessing import Preprocessing, normalize
from vit_jax.models import Regularization
from vit_jax.training.losses import BatchSums, LossConfig, make_loss
from vit_jax.training.update import DROP, TrainState, key_for, make_loss_sums, make_update

RNG = np.random.default_rng(0)
BATCH = {
    'images': jnp.asarray(RNG.integers(0, 256, (8, 8, 8, 3), np.uint8)),
    'labels': jnp.asarray(RNG.integers(0, tiny.CLASSES, 8)),
    'mask': jnp.ones(8, bool),
}


def loss_sums_of(model):
    return make_loss_sums(
        model.apply, make_loss(LossConfig()), lambda images: normalize(images, Preprocessing())
    )


@functools.cache
def start(parts, dropout):
    """A state with random parameters, and its compiled SGD step."""
    model, params = tiny.built(tiny.model(), regularization=Regularization(dropout=dropout))
    optimizer = optax.sgd(0.1)
    state = TrainState.initial(params, optimizer, with_ema=False)
    schedule = optax.constant_schedule(0.1)
    update = make_update(loss_sums_of(model), optimizer, schedule, accumulation_steps=parts)
    return state, jax.jit(update)


def step(batch, *, parts=1, dropout=0.0):
    """The state and metrics after a step on a batch."""
    state, update = start(parts, dropout)
    return update(state, batch)


@pytest.mark.gate
def test_parts_of_a_batch_give_the_update_of_the_whole():
    mask = BATCH['mask'].at[jnp.array([0, 3])].set(False)  # parts of unequal weight
    whole, expected = step(BATCH | {'mask': mask})
    accumulated, metrics = step(BATCH | {'mask': mask}, parts=2)
    chex.assert_trees_all_close(
        accumulated.params, whole.params, rtol=1e-7, atol=1e-6
    )  # float32 sums in another order
    chex.assert_trees_all_close(metrics, expected, rtol=1e-5)


@pytest.mark.gate
def test_each_part_has_dropout_of_its_own():
    """Part i is every k-th example from i on, and its number is folded into the key."""
    _, metrics = step(BATCH, dropout=0.5, parts=4)
    model, params = tiny.built(tiny.model(), regularization=Regularization(dropout=0.5))
    sums = jax.jit(loss_sums_of(model))
    parts = [jax.tree.map(lambda x, i=i: x[i::4], BATCH) for i in range(4)]
    key = key_for(0, DROP, 0)
    losses = [sums(params, part, jax.random.fold_in(key, i)) for i, part in enumerate(parts)]
    expected = sum(float(part.sums['loss']) for part in losses)
    assert metrics.sums['loss'] == pytest.approx(expected, rel=1e-5)


@pytest.mark.gate
def test_a_masked_example_changes_nothing():
    mask = BATCH['mask'].at[5].set(False)
    other = BATCH['images'].at[5].set(255 - BATCH['images'][5])
    one, expected = step(BATCH | {'mask': mask})
    two, metrics = step(
        BATCH | {'mask': mask, 'images': other, 'labels': BATCH['labels'].at[5].add(1)}
    )
    chex.assert_trees_all_close(one.params, two.params, rtol=0)
    chex.assert_trees_all_close(metrics, expected, rtol=0)
    assert expected.num_examples == 7
    without = jax.tree.map(lambda x: jnp.delete(x, 5, axis=0), BATCH)
    chex.assert_trees_all_close(step(without)[0].params, one.params, rtol=1e-7, atol=1e-6)


@pytest.mark.gate
def test_a_batch_of_masked_examples_only_moves_nothing():
    state, metrics = step(BATCH | {'mask': jnp.zeros(8, bool)})
    assert metrics.means['loss'] == metrics.num_examples == metrics.scalars['gradient_norm'] == 0
    chex.assert_trees_all_close(state.params, tiny.random_params(state.params), rtol=0)


@pytest.mark.gate
def test_gradients_are_those_of_the_mean_loss():
    model, params = tiny.built(tiny.model())

    def mean_loss(params):
        logits = model.apply(params, normalize(BATCH['images'], Preprocessing()))
        return optax.softmax_cross_entropy_with_integer_labels(logits, BATCH['labels']).mean()

    loss, gradient = jax.jit(jax.value_and_grad(mean_loss))(params)
    state, metrics = step(BATCH)
    assert metrics.means['loss'] == pytest.approx(float(loss), rel=1e-6)
    assert metrics.scalars['gradient_norm'] == pytest.approx(
        float(optax.tree.norm(gradient)), rel=1e-5
    )
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
    assert metrics.scalars['parameter_norm'] == pytest.approx(
        float(optax.tree.norm(moved)), rel=1e-6
    )
    chex.assert_trees_all_close(state.params, moved, rtol=1e-7, atol=1e-6)


def linear_sums(params, batch, key):
    return BatchSums({'loss': (params['w'] * batch['x']).sum()}, jnp.ones((), jnp.int32), {})


@pytest.mark.parametrize('poison', ['loss', 'gradient'])
def test_an_update_that_is_not_finite_changes_the_number_of_the_step_alone(poison):
    """With momentum, so that the optimizer has a state; the next good batch is learned again."""
    optimizer = optax.adam(0.1)

    def loss_sums(params, batch, key=None):
        x = params['w'] * batch['x']
        broken = jnp.sqrt(jnp.where(batch['bad'], params['w'] * 0, 1.0))  # the gradient is infinite
        total = x.sum() + (broken.sum() if poison == 'gradient' else 0)
        total = total + jnp.where(batch['bad'] & (poison == 'loss'), jnp.nan, 0.0)
        return BatchSums({'loss': total}, jnp.ones((), jnp.int32), {})

    update = jax.jit(
        make_update(loss_sums, optimizer, lambda step: jnp.asarray(0.1), ema_rate=0.25)
    )
    params = {'w': jnp.ones(3)}
    state = TrainState.initial(params, optimizer, with_ema=True)
    good, bad = ({'x': jnp.arange(3.0), 'bad': jnp.asarray(bad)} for bad in (False, True))
    state, metrics = update(state, good)
    assert metrics.scalars['skipped'] == 0
    np.testing.assert_allclose(state.ema_params['w'], 0.75 + 0.25 * state.params['w'])
    after, metrics = update(state, bad)
    assert metrics.scalars['skipped'] == 1 and after.step == state.step + 1
    norms = metrics.scalars['parameter_norm'], optax.tree.norm(state.params)
    np.testing.assert_allclose(*norms, rtol=1e-6)  # of the parameters that stay
    chex.assert_trees_all_equal(after._replace(step=state.step), state)
    once_more, metrics = update(after, good)
    assert metrics.scalars['skipped'] == 0
    plain, _ = update(state, good)
    chex.assert_trees_all_equal(once_more._replace(step=plain.step), plain)


def test_a_skipped_step_has_its_place_in_the_schedule():
    def schedule(step):
        return step + 1.0

    optimizer = optax.sgd(schedule)
    update = jax.jit(make_update(linear_sums, optimizer, schedule))
    state = TrainState.initial({'w': jnp.ones(3)}, optimizer, with_ema=False)
    for x in 1.0, jnp.nan, 1.0:
        before = state.params['w']
        batch = {'x': jnp.full(3, x), 'mask': jnp.ones(3, bool)}
        state, metrics = update(state, batch)
    np.testing.assert_allclose(before - state.params['w'], metrics.scalars['learning_rate'])
    assert metrics.scalars['learning_rate'] == 3


def test_the_average_of_a_schedule_free_optimizer_is_evaluated():
    """At a constant rate it is the mean of the iterates of SGD, from the given parameters on."""
    optimizer = optax.chain(optax.identity(), optax.contrib.schedule_free_sgd(0.1))
    state = jax.jit(lambda params: TrainState.initial(params, optimizer))({'w': jnp.ones(3)})
    update = jax.jit(make_update(linear_sums, optimizer, lambda step: jnp.asarray(0.1)))
    for x in 1.0, 1.0, jnp.nan, 1.0:
        state, metrics = update(state, {'x': jnp.full(3, x), 'mask': jnp.ones(3, bool)})
    gradient = float(metrics.scalars['gradient_norm']) / np.sqrt(3)
    np.testing.assert_allclose(state.eval_params['w'], 1 - 0.1 * gradient * 2, rtol=1e-6)
    assert not np.allclose(state.params['w'], state.eval_params['w'])
    params, rest = state.split()
    chex.assert_trees_all_equal(TrainState.join(params, rest), state)
