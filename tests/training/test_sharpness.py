import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax.base.errors import UserError
from vit_jax.training.losses import BatchSums, sum_examples
from vit_jax.training.sharpness import Sam, make_sharpener
from vit_jax.training.update import TrainState, make_update

GSAM = Sam(rho=0.6, rho_min=0.1, alpha=0.6)
X = jnp.array([[1.0, -2.0, 0.5], [0.0, 1.0, 3.0], [2.0, 1.0, -1.0]])
Y = jnp.array([1.0, -1.0, 0.5])
# Gradients (w, s) that `gsam_gradient` of big_vision returns for this loss (commit 0127fb6b, jax
# 0.10.2, on a CPU) by options and learning rate. The rate is at most 1 and 0.1 at the end.
BIG_VISION = [
    (Sam(rho=0.05), 1.0, [-0.24356113, 1.25331473, 3.96264505, 0.18938521]),
    (GSAM, 1.0, [-1.96320450, -1.10080647, -0.46386361, 2.16447926]),
    (GSAM, 0.28, [-0.78726053, 0.88604558, 3.72148466, 1.11473358]),
    (GSAM, 0.01, [-0.28506055, 1.22804022, 3.96460938, 0.26216269]),  # in the warmup
    (Sam(rho=0.6, alpha=0.3), 0.5, [-1.71977878, -0.70122671, 0.34829241, 1.87142229]),
]


@pytest.mark.parametrize('config, rate, expected', BIG_VISION)
def test_gradients_are_those_of_big_vision(config, rate, expected):
    def loss(params):
        return jnp.mean((jnp.tanh(X @ params['w']) * params['s'] - Y) ** 2)

    params = {'w': jnp.array([0.3, -0.2, 0.1]), 's': jnp.array(1.5)}
    rates = jnp.array([rate, 0.1])
    sharpen = make_sharpener(config, rates.__getitem__, peak=1.0, total_steps=1)
    found = sharpen(jax.grad(loss), params, jax.grad(loss)(params), jnp.asarray(0))
    # float32 rounding: the parts that GSAM subtracts are as large as the gradient.
    np.testing.assert_allclose([*found['w'], found['s']], expected, rtol=1e-5, atol=1e-6)


RNG = np.random.default_rng(0)
BATCH = {'x': jnp.asarray(RNG.normal(size=(8, 3)), jnp.float32), 'mask': jnp.ones(8, bool)}


def noisy_sums(params, batch, key):
    """A loss per example that is multiplied by random numbers, as by dropout of half of them."""
    outputs = jnp.tanh(batch['x'] @ params['w']) - params['s']
    if 'noise' in params:
        outputs = outputs * params['noise'] * jax.random.bernoulli(key, shape=outputs.shape)
    return sum_examples({'loss': outputs**2}, batch['mask'])


def make_step(loss_sums, config, **options):
    """A compiled SGD step with the learning rate 1, so that parameters move by the gradient."""
    schedule = optax.constant_schedule(1.0)
    sharpen = make_sharpener(config, schedule, peak=1.0, total_steps=1)
    return jax.jit(make_update(loss_sums, optax.sgd(1.0), schedule, sharpen=sharpen, **options))


def initial(**params):
    arrays = {name: jnp.asarray(value) for name, value in params.items()}
    return TrainState.initial(arrays, optax.sgd(1.0))


def test_parts_of_a_batch_share_one_perturbation():
    state, mask = initial(w=[0.3, -0.2, 0.1], s=1.5), BATCH['mask'].at[jnp.array([0, 3])].set(False)
    batch = BATCH | {'mask': mask}  # parts of unequal weight
    whole, expected = make_step(noisy_sums, GSAM)(state, batch)
    parts, metrics = make_step(noisy_sums, GSAM, accumulation_steps=4)(state, batch)
    # float32 sums in another order; the second pass starts from parameters that differ by it.
    chex.assert_trees_all_close(parts.params, whole.params, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(metrics, expected, rtol=1e-5)
    none, _ = make_step(noisy_sums, GSAM)(state, batch | {'mask': jnp.zeros(8, bool)})
    chex.assert_trees_all_equal(none.params, state.params)


@pytest.mark.parametrize('parts', [1, 4])
def test_both_passes_have_the_same_dropout_and_metrics_are_of_the_first(parts):
    state = initial(w=[0.3, -0.2, 0.1], s=1.5, noise=2.0)
    plain, expected = make_step(noisy_sums, None, accumulation_steps=parts)(state, BATCH)
    near, _ = make_step(noisy_sums, Sam(rho=1e-4), accumulation_steps=parts)(state, BATCH)
    far, metrics = make_step(noisy_sums, Sam(rho=1.0), accumulation_steps=parts)(state, BATCH)

    def distance(one):
        change = optax.tree.norm(optax.tree.sub(one.params, plain.params))
        return change / expected.scalars['gradient_norm']

    assert distance(near) < 1e-3 < 0.1 < distance(far)  # other dropout changes it by more than 0.1
    chex.assert_trees_all_close(metrics.sums, expected.sums, rtol=1e-6)


def root_sums(params, batch, key):
    """The loss sum of f - sqrt(1 - w), not finite if w is larger than 1."""
    loss = params['f'].sum() - jnp.sqrt(1 - params['w'])
    return BatchSums({'loss': loss}, jnp.ones((), jnp.int32), {})


def test_an_infinite_gradient_at_the_perturbed_parameters_skips_the_step():
    state = initial(w=0.95, f=[0.0])
    after, metrics = make_step(root_sums, Sam(rho=1.0))(state, {})
    assert metrics.scalars['skipped'] == 1 and np.isfinite(metrics.means['loss'])
    chex.assert_trees_all_equal(after.params, state.params)


def test_frozen_parameters_are_not_perturbed():
    """Otherwise w would move by less than rho, as f has a gradient too."""

    def freeze(params):
        return params | {'f': jax.lax.stop_gradient(params['f'])}

    state = initial(w=0.5, f=[0.0, 0.0])
    after, _ = make_step(root_sums, Sam(rho=0.3), stop_frozen_gradients=freeze)(state, {})
    np.testing.assert_allclose(after.params['w'], 0.5 - 0.5 / np.sqrt(1 - 0.5 - 0.3), rtol=1e-5)
    chex.assert_trees_all_equal(after.params['f'], state.params['f'])


@pytest.mark.parametrize(
    'values, name', [({'rho': -1.0}, 'rho=-1'), ({'rho_min': 0.1}, 'rho_min=0.1')]
)
def test_impossible_options_are_rejected(values, name):
    with pytest.raises(UserError, match=name):
        Sam(**values)
