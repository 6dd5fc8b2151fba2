"""Training with random patch sizes (FlexiViT), and evaluations at other sizes."""

import dataclasses
import math
import unittest

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vit_jax
from tests import tiny
from tests.networks import RESNET
from vit_jax.base import UserError
from vit_jax.checkpoints.transfer import adapt, build_at_patch_size
from vit_jax.config import EvalConfig
from vit_jax.data.sources.opening import make_opener
from vit_jax.distributed.processes import Job
from vit_jax.experiment import training_run
from vit_jax.experiment.build import build_experiment
from vit_jax.models import Regularization
from vit_jax.training.duration import Duration
from vit_jax.training.objectives import MaskedPatches
from vit_jax.training.update import draw_patch_size

SIZES = 2, 4, 8
EVALS = {
    'model': EvalConfig(split='test[:50]'),
    'patch_2': EvalConfig(split='test[:50]', patch_size=2),
    'again_2': EvalConfig(split='test[:30]', patch_size=2),
    'patch_8': EvalConfig(split='test[:50]', patch_size=8),
}


def experiment(**changes):
    values = {'patch_sizes': SIZES, 'evals': EVALS, 'eval_split': 'test', 'eval_batch_size': 16}
    model = tiny.model(num_classes=None, depth=1, pool='gap')
    values |= {'model': model, 'checkpoint_every_steps': 2, 'eval_every_steps': 100}
    return tiny.experiment(**(values | changes))


@pytest.mark.parametrize('size', [2, 8])
@pytest.mark.parametrize('values', [{'positions_at': 'every_layer'}, {'positions': 'learned2d'}])
def test_parameters_are_resized_in_a_traced_function_as_by_numpy(values, size):
    old = tiny.model(registers=2, position_resize='bilinear_edges', **values)
    new = dataclasses.replace(old, patch_size=(size, size))
    params = jax.tree.map(np.asarray, tiny.built(old)[1])
    found = jax.jit(lambda params: adapt(params, old=old, new=new).params)(params)
    chex.assert_trees_all_close(found, adapt(params, old=old, new=new).params, atol=1e-6)


def test_sizes_are_drawn_uniformly_from_seed_and_step():
    steps = 3000
    draws = [draw_patch_size(SIZES, 0, step) for step in range(steps)]
    assert draws != [draw_patch_size(SIZES, 1, step) for step in range(steps)]
    deviation = math.sqrt(1 / 3 * 2 / 3 / steps)
    for size in SIZES:
        assert abs(draws.count(size) / steps - 1 / 3) < 4 * deviation


def test_the_first_kind_of_step_has_the_longest_sequence():
    """It is the one that `plan` compiles, and that determines `remat`."""
    rate = 0.25
    config = experiment(
        regularization=Regularization(patch_dropout=rate), patch_dropout_until=Duration(steps=5)
    )
    built = build_experiment(config)
    kinds, length = built.config.step_variants, built.length
    assert len(set(kinds)) == 6 and kinds[0] == (2, 0.0)
    used = {config.step_variant(step, length) for step in range(10)}
    assert used <= {*kinds}
    assert {config.step_variant(step, length).patch_dropout for step in range(5)} == {rate}
    assert {config.step_variant(step, length).patch_dropout for step in range(5, 10)} == {0.0}


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A trained run, and the programs that were compiled for it."""
    folder = str(tmp_path_factory.mktemp('flexible'))
    with jax.log_compiles(), unittest.TestCase().assertLogs('jax') as logs:
        run = training_run.train(experiment(), folder)
    return run, [line for line in logs.output if 'Finished XLA compilation' in line]


@pytest.mark.gate
def test_each_size_is_compiled_once(trained):
    """Also the evaluations: two of them have the same size."""
    programs = trained[1]
    assert sum('jit(update)' in line for line in programs) == len(SIZES)
    assert sum('jit(step)' in line for line in programs) == 3  # the model's, 2 and 8


@pytest.mark.gate
def test_a_killed_and_resumed_run_has_the_same_bits(trained, tmp_path):
    def kill(tick):
        if tick == 8:
            raise RuntimeError('the power is out')

    with pytest.raises(RuntimeError, match='the power'):
        training_run.train(experiment(), str(tmp_path), job=tiny.WatchedJob(kill))
    resumed = training_run.train(experiment(), str(tmp_path), job=Job())
    chex.assert_trees_all_equal(resumed.state, trained[0].state)
    assert resumed.evals == trained[0].evals


@pytest.mark.gate
@pytest.mark.parametrize('name, size', [('model', None), ('patch_2', 2), ('patch_8', 8)])
def test_an_evaluation_measures_the_model_that_load_resizes(trained, name, size):
    run, _ = trained
    loaded = vit_jax.load(str(run.folder), patch_size=size)
    source = make_opener()('digits', 'test[:50]')
    read = [source.read(index) for index in range(50)]
    images = np.stack([loaded.preprocess(image) for image, _ in read])
    logits, labels = loaded.logits(images), np.array([label for _, label in read])
    model = build_at_patch_size(run.experiment.model.config, size)
    found = jax.jit(model.apply)(run.state.eval_params, jnp.asarray(images))
    np.testing.assert_allclose(found, logits, atol=1e-6)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    assert run.evals[name]['loss'] == pytest.approx(float(losses.mean()), rel=1e-6)


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'model': RESNET}, 'patch_size.*ResNet'),
        ({'model': tiny.model(positions='relative')}, 'expected one of learned, learned2d'),
        ({'patch_sizes': (3,)}, 'patch_size=3: .* expected one of 1, 2, 4, 8'),
        ({'patch_sizes': (16,)}, 'patch_size=16: .* expected one of 1, 2, 4, 8'),
        ({'patch_sizes': (), 'evals': {'x': EvalConfig(patch_size=5)}}, 'patch_size=5'),
        ({'patch_sizes': (2, 2)}, 'patch_sizes=.*expected distinct'),
        ({'evals': {}, 'objective': MaskedPatches()}, 'patch_sizes: .*objective'),
        (
            {'patch_sizes': (), 'objective': MaskedPatches()},
            'evals.patch_2.patch_size: .*objective',
        ),
    ],
)
def test_what_has_no_other_sizes_is_rejected(changes, message):
    with pytest.raises(UserError, match=message):
        build_experiment(experiment(**changes))
