import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax.base import UserError
from vit_jax.training.duration import TrainLength
from vit_jax.training.losses import BatchSums, sum_examples
from vit_jax.training.optimizer import ScheduleConfig, look_up, make_schedule
from vit_jax.training.sharpness import Sam, make_radius, make_sharpener
from vit_jax.training.update import TrainState, make_update

GSAM = Sam(rho=0.6, rho_min=0.1, alpha=0.6)
X, Y = jnp.array([[1.0, -2, 0.5], [0, 1, 3], [2, 1, -1]]), jnp.array([1.0, -1, 0.5])
PARAMS = {'w': jnp.array([0.3, -0.2, 0.1]), 's': jnp.array(1.5)}
# Gradients (w, s) that `gsam_gradient` of big_vision returns for this loss (commit 0127fb6b, jax
# 0.10.2, on a CPU) by options and learning rate. The rate is at most 1 and 0.1 at the end.
BIG_VISION = [
    (Sam(rho=0.05), 1.0, [-0.24356113, 1.25331473, 3.96264505, 0.18938521]),
    (GSAM, 1.0, [-1.96320450, -1.10080647, -0.46386361, 2.16447926]),
    (GSAM, 0.28, [-0.78726053, 0.88604558, 3.72148466, 1.11473358]),
    (GSAM, 0.01, [-0.28506055, 1.22804022, 3.96460938, 0.26216269]),  # in the warmup
]


def sharpener(config, *rates):
    """For a run with these learning rates, the last one after its end, and a peak of 1."""
    steps = np.arange(len(rates))
    radius = make_radius(config, np.array(rates).__getitem__, peak=1.0, total_steps=len(rates) - 1)
    return make_sharpener(config, look_up(jnp.asarray(radius(steps))))


@pytest.mark.gate
@pytest.mark.parametrize('config, rate, expected', BIG_VISION)
def test_gradients_are_those_of_big_vision(config, rate, expected):
    gradient = jax.grad(lambda p: jnp.mean((jnp.tanh(X @ p['w']) * p['s'] - Y) ** 2))
    sharpen = sharpener(config, rate, 0.1)
    sharpened = sharpen(lambda p, *_: (gradient(p), BatchSums({}, Y, {})), jnp.array(0))
    found, _ = sharpened(PARAMS, {}, jax.random.key(0))
    # float32 rounding: the parts that GSAM subtracts are as large as the gradient.
    np.testing.assert_allclose([*found['w'], found['s']], expected, rtol=1e-5, atol=1e-6)


BATCH = {'x': jnp.sin(jnp.arange(24.0)).reshape(8, 3), 'mask': jnp.ones(8, bool)}


def noisy_sums(params, batch, key):
    """A loss whose outputs are zero at random if `noise` is 1, as with dropout."""
    kept = jax.random.bernoulli(key, shape=batch['mask'].shape) | (params['noise'] == 0)
    outputs = jnp.tanh(batch['x'] @ params['w']) - params['s']
    return sum_examples({'loss': (outputs * kept) ** 2}, batch['mask'])


def root_sums(params, batch, key):
    """The loss f - sqrt(1 - w), not finite if w is larger than 1."""
    return BatchSums({'loss': params['f'] - jnp.sqrt(1 - params['w'])}, jnp.array(1), {})


def step(loss_sums, config, params, batch=BATCH, **options):
    """Returns the change of the parameters, minus the gradient, and the metrics of an SGD step."""
    schedule = optax.linear_schedule(1.0, 0.1, 1)  # 1 in the first step
    params = jax.tree.map(jnp.asarray, params)
    sharpen = config and sharpener(config, 1.0, 0.1)
    update = make_update(loss_sums, optax.sgd(1.0), schedule, sharpen=sharpen, **options)
    after, metrics = jax.jit(update)(TrainState.initial(params, optax.sgd(1.0)), batch)
    return optax.tree.sub(after.params, params), metrics


def test_a_perturbation_that_cannot_follow_the_rate_is_rejected():
    length = TrainLength(batch_size=1, num_images=1, total_steps=1)
    for peak in 1.0, 0.01, 0.001:
        schedule = make_schedule(ScheduleConfig(kind='constant', learning_rate=peak), length)
        with pytest.raises(UserError, match=r'optimizer\.sharpness'):
            make_radius(GSAM, schedule, peak=peak, total_steps=1)
    assert make_radius(Sam(), schedule, peak=peak, total_steps=1)(0) == Sam().rho


@pytest.mark.gate
def test_parts_of_a_batch_share_one_perturbation():
    params = PARAMS | {'noise': 0.0}
    batch = BATCH | {'mask': jnp.arange(8) % 3 > 0}  # parts of unequal weight
    whole, parts = (step(noisy_sums, GSAM, params, batch, accumulation_steps=n) for n in (1, 4))
    chex.assert_trees_all_close(parts, whole, rtol=1e-5, atol=1e-6)  # sums in another order
    nothing, metrics = step(noisy_sums, GSAM, params, batch | {'mask': jnp.zeros(8, bool)})
    assert optax.tree.norm(nothing) == 0 == metrics.scalars['skipped']


@pytest.mark.gate
def test_both_passes_have_the_same_dropout_and_metrics_are_of_the_first():
    params = PARAMS | {'noise': 1.0}
    configs = None, Sam(rho=1e-4), Sam(rho=1.0)
    steps = [step(noisy_sums, config, params, accumulation_steps=4) for config in configs]
    plain, near, far = (np.asarray(change['w']) for change, _ in steps)
    # Other dropout changes the gradient by more than 0.1.
    assert abs(near - plain).max() < 1e-3 < 0.1 < abs(far - plain).max()
    assert steps[2][1].sums == steps[0][1].sums


def test_frozen_parameters_are_not_perturbed_and_infinite_gradients_skip_the_step():
    params = {'w': 0.5, 'f': 0.0}
    freeze = {'stop_frozen_gradients': lambda p: p | {'f': jax.lax.stop_gradient(p['f'])}}
    change, _ = step(root_sums, Sam(rho=0.3), params, **freeze)
    # If f took a part of the perturbation, w would move by less than rho.
    np.testing.assert_allclose(change['w'], -0.5 / np.sqrt(1 - 0.5 - 0.3), rtol=1e-5)
    change, metrics = step(root_sums, Sam(rho=0.6), params, **freeze)
    assert metrics.scalars['skipped'] == 1 and np.isfinite(metrics.means['loss'])
    assert optax.tree.norm(change) == 0
