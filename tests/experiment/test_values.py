"""Runs that differ only in values share all compiled programs."""

import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests import tiny
from tests.hosts import ROOT, environment, hosts
from tests.test_fields import ADAM, AUGMENTED, MASKED, REGULARIZED
from vit_jax.data.loading import training_batches
from vit_jax.experiment import training_run
from vit_jax.experiment.build import build_experiment
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig

FILE = """
import dataclasses

from tests.test_fields import ADAM, AUGMENTED, REGULARIZED
from vit_jax.evaluation.probing import FewshotConfig
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import ScheduleConfig
from vit_jax.training.sharpness import Sam


def get_config(x):
    x = float(x)
    config = dataclasses.replace(
        REGULARIZED, optimizer=ADAM.optimizer, augmentation=AUGMENTED.augmentation,
        fewshot=FewshotConfig(shots=(1,), seeds=(0,)), start_from=None,
    )
    config.seed, config.total = int(100 * x), Duration(steps=int(20 * x))
    config.schedule = ScheduleConfig(kind='cosine' if x < 0.5 else 'linear', learning_rate=x)
    config.ema_decay = config.loss.label_smoothing = x
    config.regularization.dropout = config.regularization.stochastic_depth = x
    config.optimizer.weight_decay = config.optimizer.head_weight_decay = x
    config.optimizer.b1 = config.optimizer.b2 = config.optimizer.epsilon = x
    config.optimizer.clip_norm = config.optimizer.layer_decay = x
    config.optimizer.sharpness = Sam(rho=x, rho_min=x / 2, alpha=x)
    config.optimizer.lr_multipliers = (('head/bias', x),)
    for name in 'color_jitter', 'erasing', 'mixup', 'cutmix':
        setattr(config.augmentation, name, x)
    return config
"""


@pytest.mark.parametrize(
    'second',
    [
        pytest.param('first', marks=pytest.mark.gate),  # resumes
        pytest.param('second', marks=pytest.mark.nightly),
    ],
)
def test_a_process_with_other_values_compiles_nothing(second, tmp_path):
    (tmp_path / 'config.py').write_text(FILE)
    counts = []
    for x, run in (0.4, 'first'), (0.7, second):
        command = ['tests.counted', str(tmp_path / 'cache'), 'vit_jax.train']
        command += [f'--config={tmp_path}/config.py:{x}', f'--workdir={tmp_path}/{run}']
        with hosts(tmp_path, [*command, '--accept_config_changes']) as [host]:
            assert host.wait() == 0, host.text
            counts.append([*map(int, re.findall(r'compiled (\d+), loaded (\d+)', host.text)[-1])])
    (compiled, loaded), (compiled_again, loaded_again) = counts
    assert compiled > 0 and loaded == compiled_again == 0
    if second == 'first':
        assert 'resuming at step 8' in host.text and loaded_again > 0
    else:
        assert loaded_again == compiled


@pytest.mark.gate
def test_a_run_with_other_values_compiles_nothing_in_the_same_process(tmp_path):
    requests = []
    jax.monitoring.register_event_listener(lambda event, **_: requests.append(event))
    for seed in 0, 1:
        config = tiny.experiment(seed=seed, schedule=ScheduleConfig(learning_rate=0.1 + seed))
        training_run.train(config, str(tmp_path / f'{seed}'))
        compiled = [event for event in requests if 'compile_requests' in event]
        requests.clear()
    assert not compiled


def test_functions_of_the_user_are_traced_anew():
    """What they do may have changed, for example in a notebook."""

    def loss(logits, targets):
        return -(targets * logits).sum(axis=-1)

    one, other = (build_experiment(tiny.experiment(loss=loss)) for _ in range(2))
    assert one.functions is not other.functions


def test_parameters_that_are_frozen_by_rounding_have_functions_of_their_own():
    """1e-50 is 0 in float32."""
    one, other = (
        build_experiment(
            tiny.experiment(optimizer=OptimizerConfig(lr_multipliers=(('head/.*', x),)))
        )
        for x in (0.5, 1e-50)
    )
    assert one.functions is not other.functions


STUDY = """
from tests import tiny
from vit_jax.studies.config import Grid, Study

def get_config():
    rates = {str(rate): {'schedule.learning_rate': rate} for rate in (0.001, 0.1)}
    grids = {'all': Grid(axes={'rate': rates})}
    return Study(title='Rates', base=tiny.experiment(), grids=grids, seeds=(0, 1))
"""


@pytest.mark.nightly
def test_a_study_of_rates_and_seeds_compiles_one_step_and_one_evaluation(tmp_path):
    (tmp_path / 'study.py').write_text(STUDY)
    command = [sys.executable, '-m', 'vit_jax.study', f'--config={tmp_path}/study.py']
    command.append(f'--workdir={tmp_path}/out')
    env = environment() | {'JAX_COMPILATION_CACHE_DIR': str(tmp_path / 'cache')}
    text = subprocess.check_output(command, env=env, cwd=ROOT, timeout=600, text=True)
    assert text.startswith('4 runs to train; programs to compile: 1 training step, 1 evaluation\n')
    programs = [name.split('-')[0] for name in os.listdir(tmp_path / 'cache')]
    assert programs.count('jit_update') == programs.count('jit_step') == 1


@pytest.mark.parametrize(
    'config',
    [
        pytest.param(AUGMENTED, marks=pytest.mark.nightly),
        pytest.param(REGULARIZED, marks=pytest.mark.nightly),
        pytest.param(ADAM, marks=pytest.mark.gate),
        pytest.param(MASKED, marks=pytest.mark.nightly),
    ],
)
def test_an_update_gives_the_same_with_values_that_are_constants_of_the_program(config):
    experiment, state, update = tiny.compiled(config)
    loader = experiment.batches.make_loader(experiment.train_reader)
    batch = next(training_batches(loader, steps=range(1), batch_size=16, seed=0))
    state = state._replace(step=state.step + 5)  # past the warmup
    numbers = {name: x.item() for name, x in experiment.values.numbers.items()}
    constants = experiment.values._replace(numbers=numbers)
    kind = experiment.config.step_variants[0]
    same = jax.jit(lambda *inputs: experiment.functions.update(kind)(*inputs, constants))
    expected = jax.tree.map(np.asarray, same(state, batch))
    leaves = map(jax.tree.leaves, (update(state, batch), expected))
    for found, one in zip(*leaves, strict=True):
        np.testing.assert_allclose(found, one, rtol=1e-4, atol=1e-6)  # rounding
