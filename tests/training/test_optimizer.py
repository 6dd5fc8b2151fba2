"""Schedules, and every named optimizer against optax alone."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax.base.errors import UserError
from vit_jax.checkpoints.store import Checkpoints
from vit_jax.distributed.meshes import MeshConfig, batch_sharding, jit_on, make_mesh, replicated
from vit_jax.distributed.sharding_rules import shardings_for
from vit_jax.training import muon
from vit_jax.training.duration import Duration, TrainLength
from vit_jax.training.losses import BatchSums
from vit_jax.training.optimizer import (
    OPTIONS,
    OptimizerConfig,
    ScheduleConfig,
    check_optimizer,
    count_moments,
    look_up,
    make_optimizer,
    make_schedule,
    tabulate,
)
from vit_jax.training.param_groups import make_param_groups
from vit_jax.training.update import TrainState, make_update

DEVICES = 8
PARAMS = {'dense': {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)}, 'cls': jnp.ones(2)}
PARAMS |= {'encoder': {'block': {'kernel': jnp.ones((3, 2, 2))}}}
GRADIENT = jax.tree.map(lambda p: 3.0 * p, PARAMS)


def rates(steps, **changes):
    for name in 'warmup', 'cooldown', 'rsqrt_timescale':
        if isinstance(changes.get(name), int):
            changes[name] = Duration(steps=changes[name])
    config = ScheduleConfig(learning_rate=1.0, **changes)
    schedule = make_schedule(config, TrainLength(batch_size=10, num_images=50, total_steps=100))
    return [*look_up(tabulate(schedule, 100))(jnp.asarray(steps))]


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


def test_the_decay_is_between_the_warmup_and_the_last_step():
    steps = [20, 60, 100]
    np.testing.assert_allclose(rates(steps, kind='cosine', warmup=20), [1, 0.5, 0], atol=1e-7)
    found = rates(steps, kind='linear', warmup=20, linear_end=0.2)
    np.testing.assert_allclose(found, [1, 0.6, 0.2], rtol=1e-6)
    found = rates(steps, kind='rsqrt', warmup=20, rsqrt_timescale=40)
    np.testing.assert_allclose(found, [1, 2**-0.5, 3**-0.5], rtol=1e-6)


def test_a_timescale_of_no_step_is_refused():
    with pytest.raises(UserError, match='rsqrt_timescale.examples=4: expected at least one step'):
        rates([0], kind='rsqrt', rsqrt_timescale=Duration(examples=4))


def test_a_warmup_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match='config.schedule'):
        rates([0], warmup=90, cooldown=Duration(fraction=0.2))


RATE, DECAY, STEPS = 0.1, 0.2, 3
RNG = np.random.default_rng(0)
SHAPES = {
    'cls': (1, 1, 40),
    'embedding/kernel': (32, 31),  # Adafactor factors sides of at least 32
    'encoder/block/mlp/dense1/kernel': (32, 40, 48),  # the depth is no side of a matrix
    'encoder/block/mlp/dense1/bias': (32, 48),
    'head/kernel': (40, 32),
    'head/bias': (32,),
}
LEAVES = {name: jnp.asarray(RNG.normal(size=shape), 'float32') for name, shape in SHAPES.items()}
# Signs and sizes differ between steps and places: otherwise no option of a sign update matters.
GRADIENTS = {
    name: jnp.stack([RNG.normal(size=shape) * size for size in (1, 9, 3)]).astype('float32')
    for name, shape in SHAPES.items()
}


def moved(optimizer, params, gradients):
    """The parameters after the steps along the first axis of the gradients."""

    def step(carry, gradient):
        params, state = carry
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, optimizer.init(params)), gradients)[0][0]


def optimizer_of(kind, **options):
    config = OptimizerConfig(kind=kind, weight_decay=DECAY, **options)
    schedule = optax.constant_schedule(RATE)
    return make_optimizer(config, schedule, make_param_groups(config, LEAVES))


@functools.cache
def moved_by(kind, **options):
    """The leaves after STEPS steps of a kind with these options."""
    return jax.jit(functools.partial(moved, optimizer_of(kind, **options)))(LEAVES, GRADIENTS)


def by_muon(name, decay):
    if name != 'encoder/block/mlp/dense1/kernel':
        return optax.adamw(RATE, weight_decay=decay)
    return optax.contrib.muon(RATE, consistent_rms=0.2, weight_decay=decay)


def by_lamb(name, decay):
    return optax.lamb(RATE, weight_decay=decay) if decay else optax.adam(RATE, eps=1e-6)


def by_sgd(name, decay):
    trace, decayed = optax.trace(0.9), optax.add_decayed_weights(decay)
    return optax.chain(trace, decayed, optax.scale_by_learning_rate(RATE))


def by_adafactor(name, decay):
    """Scaling Vision Transformers, section 3.4."""
    options = {'multiply_by_parameter_scale': False, 'clipping_threshold': None}
    options |= {'min_dim_size_to_factor': 32, 'momentum': 0.9, 'weight_decay_rate': RATE * decay}
    return optax.adafactor(RATE, **options)


# optax's optimizer for a parameter of the given name and weight decay. Parameters of blocks are
# passed layer by layer.
ALONE = {
    'adamw': lambda name, decay: optax.adamw(RATE, weight_decay=decay),
    'sgd': by_sgd,
    'adafactor': by_adafactor,
    'muon': by_muon,
    'lamb': by_lamb,
}


@pytest.mark.parametrize('kind', OPTIONS)
def test_each_leaf_moves_as_by_optax_alone_and_kernels_decay(kind):
    if kind not in ALONE:
        row = "optax's own optimizer of a leaf, with OPTIONS's defaults and this weight decay"
        pytest.fail(f'kind={kind}: no row in ALONE, tests/training/test_optimizer.py; add {row}')

    def alone(params, gradients):
        results = {}
        for name, leaf in params.items():
            optimizer = ALONE[kind](name, DECAY if name.endswith('kernel') else 0.0)
            move = functools.partial(moved, optimizer)
            is_block = name.startswith('encoder/block')
            move = jax.vmap(move, in_axes=(0, 1)) if is_block else move
            results[name] = move(leaf, gradients[name])
        return results

    expected = jax.jit(alone)(LEAVES, GRADIENTS)
    for name, leaf in moved_by(kind).items():
        # Covers rounding of float32 parameters up to 4, and of Muon's updates of 0.06: each of five
        # iterations multiplies the smallest singular values and their rounding by 3.44, so 3e-5.
        atol = 4e-6 if kind == 'muon' and re.fullmatch(muon.MATRIX, name) else 1e-6
        np.testing.assert_allclose(leaf, expected[name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize('kind', OPTIONS)
def test_each_option_of_an_optimizer_matters_and_its_default_is_in_the_table(kind):
    default = moved_by(kind)
    for name, value in OPTIONS[kind].items():
        chex.assert_trees_all_equal(moved_by(kind, **{name: value}), default)
        changed = moved_by(kind, **{name: 0.5})
        assert any(not np.array_equal(changed[leaf], default[leaf]) for leaf in default), name


WEIGHTS = RNG.permutation(np.linspace(0.5, 1.5, 16)).astype('float32')  # their mean is 1


def linear_sums(params, batch, key):
    """A loss whose gradients are in the batch: those of each example."""
    parts = [(params[name] * gradient).sum() for name, gradient in batch['gradients'].items()]
    return BatchSums({'loss': sum(parts)}, batch['mask'].sum(), {})


@functools.cache
def trained(kind):
    """The state after STEPS steps on eight devices, in two parts of a batch; its shardings."""
    optimizer, schedule = optimizer_of(kind), optax.constant_schedule(RATE)
    update = make_update(linear_sums, optimizer, schedule, accumulation_steps=2)
    config = MeshConfig(fsdp=2, tensor=2, fsdp_min_mb=0.0)
    mesh, state = make_mesh(config), TrainState.initial(LEAVES, optimizer)
    shardings = shardings_for(state, mesh, config)
    step = jit_on(update, mesh, out_shardings=(shardings, replicated(mesh)))
    state = jax.device_put(state, shardings)
    for number in range(STEPS):
        rows = {name: np.multiply.outer(WEIGHTS, g[number]) for name, g in GRADIENTS.items()}
        batch = {'gradients': rows, 'mask': np.ones(len(WEIGHTS), bool)}
        state, _ = step(state, jax.device_put(batch, batch_sharding(mesh)))
    return state, shardings


@pytest.mark.parametrize('kind', OPTIONS)
def test_devices_and_parts_of_a_batch_do_not_change_the_update(kind):
    state, shardings = trained(kind)
    assert any(any(sharding.spec) for sharding in shardings.params.values())
    for name, leaf in moved_by(kind).items():
        # Rounding of means in another order, which Muon's iterations multiply by up to 480.
        np.testing.assert_allclose(state.params[name], leaf, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize('kind', OPTIONS)
def test_a_state_is_restored_to_the_bit(kind, tmp_path):
    state, shardings = trained(kind)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(STEPS, *state.split(), {}, {})
    checkpoints.wait()
    params, training, _ = checkpoints.restore(STEPS, state.split(), shardings.split())
    checkpoints.close()
    chex.assert_trees_all_equal(TrainState.join(params, training), state)


def updated(config, rate=0.5):
    """The parameters and the state after one step."""
    optimizer = make_optimizer(
        config, lambda step: jnp.asarray(rate), make_param_groups(config, PARAMS)
    )
    updates, state = optimizer.update(GRADIENT, optimizer.init(PARAMS), PARAMS)
    return optax.apply_updates(PARAMS, updates), state


@pytest.mark.parametrize('kind', OPTIONS)
def test_only_the_first_moment_is_kept_in_bfloat16_when_asked(kind):
    config = OptimizerConfig(kind=kind, weight_decay=0.1, moment_dtype='bfloat16')
    _, state = updated(config)
    dtypes = [leaf.dtype.name for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert dtypes.count('bfloat16') == 4
    # muon: its coefficients too
    others = 4 if kind == 'muon' else 4 * (count_moments(config, PARAMS) - 1)
    assert kind == 'adafactor' or dtypes.count('float32') == others


@pytest.mark.parametrize(
    'config, values, name',
    [
        (OptimizerConfig, {'momentum': 0.9}, 'momentum=0.9: .* got kind=adamw'),
        (OptimizerConfig, {'kind': 'sgd', 'b2': 0.9}, 'b2=0.9: .* got kind=sgd'),
        (OptimizerConfig, {'clip_norm': -1.0}, 'clip_norm=-1.0'),
        (OptimizerConfig, {'kind': 'lamb', 'momentum': 0.9}, 'momentum=0.9: .* got kind=lamb'),
        (OptimizerConfig, {'kind': optax.lion, 'b1': 0.9}, 'b1=0.9: .* got kind=optax'),
        (
            OptimizerConfig,
            {'kind': optax.lion, 'weight_decay': 0.1},
            'weight_decay=0.1: .* got kind=optax',
        ),
        (
            OptimizerConfig,
            {'kind': optax.lion, 'moment_dtype': 'bfloat16'},
            'moment_dtype=bfloat16',
        ),
        (ScheduleConfig, {'linear_end': 0.0}, 'linear_end=0.0: .* got kind=cosine'),
        (
            ScheduleConfig,
            {'rsqrt_timescale': Duration(steps=5)},
            'rsqrt_timescale: .* got kind=cosine',
        ),
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


def test_adafactor_stores_rows_and_columns_of_large_matrices():
    """Their momentum is whole; the other leaves have a second moment of the same size."""
    config = OptimizerConfig(kind='adafactor')
    for name, shape in SHAPES.items():
        factored = name in ('head/kernel', 'encoder/block/mlp/dense1/kernel')
        leaf = {name: jax.ShapeDtypeStruct(shape, 'float32')}
        assert count_moments(config, leaf) == (1 if factored else 2), name
