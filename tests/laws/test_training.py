"""The step is the state: kills, signals, devices and processes do not change a training."""

import signal

import chex
import numpy as np
import pytest

from tests.laws.programs import losses, metrics, params, train, training, wait_for_step

REQUEUE, INTERRUPTED = 75, 130  # exit codes: "start the same command again", and after Ctrl-C


@pytest.fixture(scope='module')
def taught(tmp_path_factory):
    """Values of a training with a teacher, a map of features in its state, and SAM."""
    teacher = tmp_path_factory.mktemp('laws') / 'teacher'
    train(teacher, values={'total.steps': 20})
    values = {'distillation.teacher': teacher, 'distillation.kind': 'features'}
    # Without an average of parameters, only the checkpoint's own entry has the map.
    values |= {'model.width': 16, 'accumulation_steps': 2, 'ema_decay': 'none'}
    values |= {'optimizer.sharpness': 'Sam', 'optimizer.sharpness.rho_min': 0.01}
    return values | {'optimizer.sharpness.alpha': 0.5, 'patch_dropout_until.steps': 20}


@pytest.fixture(scope='module')
def whole(tmp_path_factory, taught):
    """An uninterrupted training on one device, with Muon and a teacher."""
    workdir = tmp_path_factory.mktemp('laws') / 'whole'
    train(workdir, values=taught)
    return workdir


@pytest.mark.gate
def test_a_run_that_is_killed_and_stopped_ends_with_the_same_bits(whole, taught, tmp_path):
    workdir = tmp_path / 'run'
    for number, step, code in [
        (signal.SIGKILL, 15, -9),
        (signal.SIGINT, 30, INTERRUPTED),
        (signal.SIGHUP, 45, REQUEUE),
    ]:
        with training(workdir, values=taught) as (process,):
            wait_for_step(workdir, step, process)
            process.signal(number)
            assert process.wait() == code
    train(workdir, values=taught)
    chex.assert_trees_all_equal(params(workdir), params(whole))
    assert metrics(workdir) == metrics(whole)


@pytest.mark.nightly
@pytest.mark.parametrize(
    'processes, devices, mesh', [(1, 8, {'fsdp': 2, 'tensor': 2, 'fsdp_min_mb': 0.0}), (2, 2, {})]
)
def test_losses_do_not_depend_on_devices_and_processes(
    processes, devices, mesh, whole, taught, tmp_path
):
    values = taught | {f'mesh.{name}': value for name, value in mesh.items()}
    train(tmp_path / 'run', processes=processes, devices=devices, values=values)
    found, expected = losses(tmp_path / 'run'), losses(whole)
    assert found.keys() == expected.keys()
    # Sums over devices are taken in another order: rounding, which grows from step to step.
    for until, rtol in (10, 1e-6), (60, 1e-4):
        kept = [step for step in expected if step <= until]
        np.testing.assert_allclose(
            [found[step] for step in kept], [expected[step] for step in kept], rtol=rtol
        )


@pytest.mark.nightly
def test_batches_depend_on_seed_and_step_alone(tmp_path):
    """The schedule depends on the length of a run, its first batches and draws do not."""
    constant = {'schedule.kind': 'constant', 'log_every_steps': 1, 'patch_dropout_until.steps': 15}
    train(tmp_path / 'short', values=constant | {'total.steps': 20})
    train(tmp_path / 'seed', values=constant | {'total.steps': 20, 'seed': 1})
    train(tmp_path / 'long', values=constant | {'total.steps': 40, 'eval_every_steps': 7})
    short, long, seed = (losses(tmp_path / name) for name in ('short', 'long', 'seed'))
    assert [long[step] for step in short] == [*short.values()]
    # The head is zero until the warmup's first step above 0, whatever the seed.
    assert all(short[step] != seed[step] for step in short if step > 2)
