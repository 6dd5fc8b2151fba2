import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax.training.optimizer import (
    OptimizerConfig,
    ScheduleConfig,
    make_optimizer,
    make_schedule,
)

PARAMS = {'dense': {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)}, 'cls': jnp.ones(2)}
GRADIENT = jax.tree.map(lambda p: 3.0 * p, PARAMS)


def rates(steps, **changes):
    schedule = make_schedule(ScheduleConfig(learning_rate=1.0, **changes), total_steps=100)
    return [float(schedule(jnp.asarray(step))) for step in steps]


@pytest.mark.parametrize('kind', ['cosine', 'linear', 'rsqrt', 'constant'])
def test_the_rate_climbs_from_zero_to_its_peak_and_never_rises_again(kind):
    found = rates(range(101), kind=kind, warmup_steps=10, cooldown_steps=20)
    assert found[0] == 0 and found[5] == pytest.approx(0.5, abs=0.01)
    assert found[10] == pytest.approx(1.0) == max(found)
    assert all(later <= before for before, later in zip(found[10:], found[11:], strict=False))
    assert found[100] == pytest.approx(0, abs=1e-7)


def test_decays_are_their_formulas():
    steps = [0, 25, 50, 100]
    np.testing.assert_allclose(
        rates(steps, kind='cosine'), [1, (1 + np.cos(np.pi / 4)) / 2, 0.5, 0], atol=1e-7
    )
    np.testing.assert_allclose(
        rates(steps, kind='linear'), [1, 0.7500025, 0.500005, 1e-5], rtol=1e-6
    )
    found = rates(steps, kind='rsqrt', rsqrt_timescale_steps=50)
    np.testing.assert_allclose(found, [1, 1.5**-0.5, 2**-0.5, 3**-0.5], rtol=1e-6)


def test_a_warmup_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match='warmup_steps=90 and cooldown_steps=20 do not fit'):
        rates([0], warmup_steps=90, cooldown_steps=20)


def updated(config, rate=0.5, steps=1):
    optimizer = make_optimizer(config, lambda step: jnp.asarray(rate), PARAMS)
    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(steps):
        updates, state = optimizer.update(GRADIENT, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_weight_decay_is_decoupled_and_on_kernels_only():
    plain, _ = updated(OptimizerConfig())
    decayed, _ = updated(OptimizerConfig(weight_decay=0.2))
    np.testing.assert_allclose(
        decayed['dense']['kernel'], plain['dense']['kernel'] - 0.5 * 0.2, rtol=1e-6
    )
    for untouched in ('bias',):
        np.testing.assert_array_equal(decayed['dense'][untouched], plain['dense'][untouched])
    np.testing.assert_array_equal(decayed['cls'], plain['cls'])


def test_the_decay_rule_can_be_another_one_and_must_match():
    decayed, _ = updated(OptimizerConfig(weight_decay=0.2, decayed='cls|.*bias'))
    plain, _ = updated(OptimizerConfig())
    assert (decayed['cls'] < plain['cls']).all()
    with pytest.raises(ValueError, match="'kernle' matches no parameter; there are cls"):
        updated(OptimizerConfig(weight_decay=0.2, decayed='kernle'))


def test_adam_and_momentum_are_their_formulas():
    params, _ = updated(OptimizerConfig(epsilon=0.0), steps=3)
    np.testing.assert_allclose(
        params['cls'], 1 - 3 * 0.5, rtol=1e-4
    )  # sign; 1 - 0.999 in float32 has 4 digits
    params, _ = updated(OptimizerConfig(kind='sgd', momentum=0.5), steps=2)
    np.testing.assert_allclose(params['cls'], 1 - 0.5 * 3 * (1 + 1.5), rtol=1e-6)


@pytest.mark.parametrize('kind', ['adamw', 'sgd'])
def test_only_the_first_moment_is_kept_in_bfloat16_when_asked(kind):
    _, state = updated(OptimizerConfig(kind=kind, moment_dtype='bfloat16'))
    dtypes = [leaf.dtype.name for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert dtypes.count('bfloat16') == 3
    assert dtypes.count('float32') == (3 if kind == 'adamw' else 0)


def test_clipping_bounds_the_norm_of_the_whole_gradient():
    config = OptimizerConfig(kind='sgd', momentum=0.0, clip_norm=2.0)
    params, _ = updated(config, rate=1.0)
    moved = jax.tree.map(lambda new, old: old - new, params, PARAMS)
    assert float(optax.tree.norm(moved)) == pytest.approx(2.0)
