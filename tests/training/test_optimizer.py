import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax.base.errors import UserError
from vit_jax.base.tree_names import named_leaves
from vit_jax.training.duration import Duration, TrainLength
from vit_jax.training.optimizer import (
    OPTIONS,
    OptimizerConfig,
    ScheduleConfig,
    check_optimizer,
    count_moments,
    make_optimizer,
    make_schedule,
)
from vit_jax.training.param_groups import make_param_groups

PARAMS = {'dense': {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)}, 'cls': jnp.ones(2)}
PARAMS |= {'encoder': {'block': {'kernel': jnp.ones((3, 2, 2))}}}
GRADIENT = jax.tree.map(lambda p: 3.0 * p, PARAMS)


def rates(steps, **changes):
    for name in 'warmup', 'cooldown', 'rsqrt_timescale':
        if isinstance(changes.get(name), int):
            changes[name] = Duration(steps=changes[name])
    config = ScheduleConfig(learning_rate=1.0, **changes)
    schedule = make_schedule(config, TrainLength(batch_size=10, num_images=50, total_steps=100))
    return [float(schedule(jnp.asarray(step))) for step in steps]


@pytest.mark.parametrize('kind', ['cosine', 'linear', 'rsqrt', 'constant'])
def test_the_rate_climbs_from_zero_to_its_peak_and_never_rises_again(kind):
    found = rates(range(101), kind=kind, warmup=10, cooldown=20)
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
    found = rates(steps, kind='rsqrt', rsqrt_timescale=50)
    np.testing.assert_allclose(found, [1, 1.5**-0.5, 2**-0.5, 3**-0.5], rtol=1e-6)


def test_a_timescale_of_no_step_is_refused():
    with pytest.raises(UserError, match='rsqrt_timescale.examples=4: expected at least one step'):
        rates([0], kind='rsqrt', rsqrt_timescale=Duration(examples=4))


def test_a_warmup_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match='config.schedule'):
        rates([0], warmup=90, cooldown=Duration(fraction=0.2))


def _places(array):
    """Counts its numbers from 1: gradients then change their direction, not only their norm."""
    return jnp.arange(1.0, array.size + 1).reshape(array.shape)


def updated(config, rate=0.5, steps=1, growth=1.0):
    optimizer = make_optimizer(
        config, lambda step: jnp.asarray(rate), make_param_groups(config, PARAMS)
    )
    params, state = PARAMS, optimizer.init(PARAMS)
    for step in range(steps):
        gradient = jax.tree.map(lambda g, step=step: g * growth ** (step * _places(g)), GRADIENT)
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_weight_decay_is_decoupled_and_on_kernels_only():
    plain, _ = updated(OptimizerConfig())
    decayed, _ = updated(OptimizerConfig(weight_decay=0.2))
    np.testing.assert_allclose(
        decayed['dense']['kernel'], plain['dense']['kernel'] - 0.5 * 0.2, rtol=1e-6
    )
    np.testing.assert_array_equal(decayed['dense']['bias'], plain['dense']['bias'])
    np.testing.assert_array_equal(decayed['cls'], plain['cls'])


@pytest.mark.parametrize('kind', OPTIONS)
def test_only_the_first_moment_is_kept_in_bfloat16_when_asked(kind):
    config = OptimizerConfig(kind=kind, weight_decay=0.1, moment_dtype='bfloat16')
    _, state = updated(config)
    dtypes = [leaf.dtype.name for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert dtypes.count('bfloat16') == 4
    # muon: its coefficients too
    others = 4 if kind == 'muon' else 4 * (count_moments(config, PARAMS) - 1)
    assert kind == 'adafactor' or dtypes.count('float32') == others


@pytest.mark.parametrize('kind', OPTIONS)
def test_each_option_of_an_optimizer_matters_and_its_default_is_in_the_table(kind):
    def bits(**given):
        config = OptimizerConfig(kind=kind, weight_decay=0.1, **given)
        return updated(config, steps=3, growth=3.0)[0]

    default = bits()
    for name, value in OPTIONS[kind].items():
        chex.assert_trees_all_equal(bits(**{name: value}), default)
        changed = bits(**{name: 0.5})
        leaf = 'encoder/block/kernel' if (kind, name) == ('muon', 'momentum') else 'cls'
        assert not np.array_equal(named_leaves(changed)[leaf], named_leaves(default)[leaf]), name


@pytest.mark.parametrize(
    'config, values, name',
    [
        (OptimizerConfig, {'momentum': 0.9}, 'momentum=0.9: kind=adamw'),
        (OptimizerConfig, {'kind': 'sgd', 'b2': 0.9}, 'b2=0.9: kind=sgd'),
        (OptimizerConfig, {'clip_norm': -1.0}, 'clip_norm=-1.0'),
        (OptimizerConfig, {'kind': 'lamb', 'momentum': 0.9}, 'momentum=0.9: kind=lamb'),
        (OptimizerConfig, {'kind': optax.lion, 'b1': 0.9}, 'b1=0.9: kind=optax'),
        (
            OptimizerConfig,
            {'kind': optax.lion, 'weight_decay': 0.1},
            'weight_decay=0.1: kind=optax',
        ),
        (
            OptimizerConfig,
            {'kind': optax.lion, 'moment_dtype': 'bfloat16'},
            'moment_dtype=bfloat16',
        ),
        (ScheduleConfig, {'linear_end': 0.0}, 'linear_end=0.0: kind=cosine'),
        (ScheduleConfig, {'rsqrt_timescale': Duration(steps=5)}, 'rsqrt_timescale: kind=cosine'),
        (ScheduleConfig, {'learning_rate': float('inf')}, 'learning_rate=inf'),
    ],
)
def test_an_option_without_effect_or_sense_is_rejected(config, values, name):
    with pytest.raises(UserError, match=name):
        config(**values)


def test_a_function_is_the_optimizer_within_clipping_frozen_parameters_and_factors():
    changes = {'clip_norm': 1.0, 'lr_multipliers': (('dense/.*', 0.5),), 'frozen': ('cls',)}
    found, state = updated(OptimizerConfig(kind=optax.sgd, **changes))
    step = 0.5 / np.sqrt(sum(param.size for param in jax.tree.leaves(PARAMS)))  # rate, gradient
    np.testing.assert_allclose(found['encoder']['block']['kernel'], 1 - step, rtol=1e-6)
    np.testing.assert_allclose(found['dense']['kernel'], 1 - step / 2, rtol=1e-6)
    np.testing.assert_array_equal(found['cls'], PARAMS['cls'])
    kernel = jax.ShapeDtypeStruct((9,), 'float32')
    assert count_moments(OptimizerConfig(kind=optax.lion), {'kernel': kernel}) == 1


def in_dense(tree):
    """A mask of optax that selects by name."""
    nothing = jax.tree.map(lambda _: False, tree)
    return nothing | {'dense': jax.tree.map(lambda _: True, tree['dense'])}


def test_an_optimizer_function_may_mask_parameters_by_name():
    config = OptimizerConfig(kind=lambda rate: optax.masked(optax.sgd(rate), in_dense))
    assert count_moments(config, PARAMS) == 0
    found, _ = updated(config)
    assert not np.array_equal(found['dense']['bias'], PARAMS['dense']['bias'])


def free(**options):
    return lambda rate: optax.contrib.schedule_free_sgd(0.1, **options)


@pytest.mark.parametrize(
    'config, with_ema',
    [
        ({'kind': lambda rate: optax.masked(free()(rate), in_dense)}, False),
        ({'kind': free(b1=0.0)}, False),
        ({'kind': lambda rate: optax.lbfgs()}, False),
        ({'kind': 'muon', 'frozen': ('encoder/.*',)}, False),
        ({'kind': 'lamb'}, False),
        ({'kind': lambda schedule: None}, False),
        ({'kind': optax.contrib.schedule_free_sgd}, True),
        ({'kind': optax.contrib.schedule_free_sgd, 'frozen': ('cls',)}, False),
        ({'kind': optax.contrib.schedule_free_sgd, 'lr_multipliers': (('cls', 0.1),)}, False),
    ],
)
def test_an_optimizer_that_cannot_work_is_rejected(config, with_ema):
    config = OptimizerConfig(**config)
    groups = make_param_groups(config, PARAMS)
    with pytest.raises(UserError, match='optimizer.kind'):
        optimizer = make_optimizer(config, lambda step: jnp.asarray(1.0), groups)
        check_optimizer(optimizer, groups, PARAMS, with_ema=with_ema)


def adafactor(gradients, *, b2=0.999, momentum=0.9, factored=True):
    """Scaling Vision Transformers, section 3.4: updates of one parameter, written out in float64.

    Second moments as the mean over rows and columns; no update clipping, no parameter scale.
    """
    rows = columns = whole = average = 0.0
    for step, gradient in enumerate(gradients, 1):
        decay = min(b2, 1 - step**-0.8)
        square = gradient.astype(np.float64) ** 2 + 1e-30
        rows = decay * rows + (1 - decay) * square.mean(axis=-1)
        columns = decay * columns + (1 - decay) * square.mean(axis=-2)
        whole = decay * whole + (1 - decay) * square
        outer = rows[..., :, None] * columns[..., None, :] / rows.mean(axis=-1)[..., None, None]
        update = gradient / np.sqrt(outer if factored else whole)
        average = momentum * average + (1 - momentum) * update
    return average


@pytest.mark.parametrize(
    'name, shape, factored',
    [
        ('head/kernel', (32, 40), True),
        ('head/small', (32, 31), False),
        ('encoder/block/mlp/dense1/kernel', (33, 40, 50), True),
        ('encoder/block/mlp/dense1/bias', (33, 40), False),  # 33 layers are no side of a matrix
    ],
)
def test_adafactor_is_its_formula_and_the_depth_is_no_side_of_a_matrix(name, shape, factored):
    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=shape).astype(np.float32) for _ in range(5)]
    params = {name: np.zeros(shape, np.float32)}
    config = OptimizerConfig(kind='adafactor')
    optimizer = make_optimizer(
        config, lambda step: jnp.asarray(1.0), make_param_groups(config, params)
    )
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update({name: gradient}, state, params)
    expected = adafactor(gradients, factored=factored)
    np.testing.assert_allclose(updates[name], -expected, rtol=2e-5, atol=1e-6)
    kept = sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim)
    assert (kept < 1.5 * np.prod(shape)) == factored  # the momentum, and rows and columns
