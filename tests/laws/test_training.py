"""The step is the state: kills, signals, devices and processes do not change a training.

The tests use only commands and files, so they do not depend on the implementation.
"""

import signal

import numpy as np
import pytest

from tests.hosts import assert_same, hosts, result
from vit_jax.checkpoints.digests import list_steps

REQUEUE, INTERRUPTED = 75, 130  # exit codes: "start the same command again", and after Ctrl-C
# A ViT of two blocks that draws random numbers.
TINY = {
    'data': 'digits',
    'model.image_size': '8,8',
    'model.patch_size': '2,2',
    'model.width': 32,
    'model.depth': 2,
    'model.mlp_dim': 64,
    'model.num_heads': 2,
    'regularization.dropout': 0.1,
    'regularization.stochastic_depth': 0.1,
    'regularization.patch_dropout': 0.25,
    'augmentation.mixup': 0.2,
    'ema_decay': 0.9,
    'compute.dtype': 'float32',
    'total.steps': 60,
    'schedule.warmup.steps': 10,
    'batch_size': 32,
    'eval_batch_size': 8,
    'eval_split': 'test[:50]',
    'eval_every_steps': 20,
    'checkpoint_every_steps': 10,
    'log_every_steps': 2,
    'fewshot': 'none',
}


def training(folder, values=None, processes=1, devices=1, program=('vit_jax.train',)):
    """Starts the processes of one training in FOLDER/run."""
    folder.mkdir(exist_ok=True)
    fields = TINY | (values or {})
    command = [*program, '--config=configs/pretrain/cifar10.py', f'--workdir={folder}/run']
    command += [f'--config.{name}={value}' for name, value in fields.items()]
    return hosts(folder, command, processes, devices=devices)


def train(folder, values=None, **options):
    """Trains to the end in FOLDER/run."""
    with training(folder, values, **options) as started:
        codes = [host.wait() for host in started]
    assert codes == [0] * len(codes), '\n'.join(host.text for host in started)


def losses(folder):
    """The training losses by step."""
    _, lines = result(folder)
    return {line['step']: line['loss'] for line in lines if line['kind'] == 'train'}


@pytest.fixture(scope='module')
def taught(tmp_path_factory):
    """Values of a training with a teacher, a map of features in its state, and SAM."""
    teacher = tmp_path_factory.mktemp('laws') / 'teacher'
    train(teacher, {'total.steps': 20})
    values = {'distillation.teacher': teacher / 'run', 'distillation.kind': 'features'}
    # Without an average of parameters, only the checkpoint's own entry has the map.
    values |= {'model.width': 16, 'accumulation_steps': 2, 'ema_decay': 'none'}
    values |= {'optimizer.sharpness': 'Sam', 'optimizer.sharpness.rho_min': 0.01}
    return values | {'optimizer.sharpness.alpha': 0.5, 'patch_dropout_until.steps': 20}


@pytest.fixture(scope='module')
def whole(tmp_path_factory, taught):
    """An uninterrupted training on one device, with Muon and a teacher."""
    folder = tmp_path_factory.mktemp('laws') / 'whole'
    train(folder, taught)
    return folder


@pytest.mark.nightly
def test_a_run_that_is_killed_and_stopped_ends_with_the_same_bits(whole, taught, tmp_path):
    # The run handles a signal in less than 14 steps of 50 ms (0.7 s). The next signal is due later,
    # and so is the end of the run.
    slow = 'tests.faulty', 'slow:50'
    with training(tmp_path, taught, program=slow) as (host,):
        host.wait_until(lambda: 10 in list_steps(tmp_path / 'run/checkpoints'), 'a checkpoint')
        host.signal(signal.SIGKILL)
        assert host.wait() == -signal.SIGKILL
    for number, step, code in (signal.SIGINT, 32, INTERRUPTED), (signal.SIGHUP, 46, REQUEUE):
        with training(tmp_path, taught, program=slow) as (host,):
            host.wait_for('reported', step)
            host.signal(number)
            assert host.wait() == code
        assert 'resuming at step' in host.text
    train(tmp_path, taught)
    assert_same(result(tmp_path), result(whole))


@pytest.mark.nightly
@pytest.mark.parametrize(
    'processes, devices, mesh', [(1, 8, {'fsdp': 2, 'tensor': 2, 'fsdp_min_mb': 0.0}), (2, 2, {})]
)
def test_losses_do_not_depend_on_devices_and_processes(
    processes, devices, mesh, whole, taught, tmp_path
):
    values = taught | {f'mesh.{name}': value for name, value in mesh.items()}
    train(tmp_path, values, processes=processes, devices=devices)
    found, expected = losses(tmp_path), losses(whole)
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
    train(tmp_path / 'short', constant | {'total.steps': 20})
    train(tmp_path / 'seed', constant | {'total.steps': 20, 'seed': 1})
    train(tmp_path / 'long', constant | {'total.steps': 40, 'eval_every_steps': 7})
    short, long, seed = (losses(tmp_path / name) for name in ('short', 'long', 'seed'))
    assert [long[step] for step in short] == [*short.values()]
    # The head is zero until the warmup's first step above 0, whatever the seed.
    assert all(short[step] != seed[step] for step in short if step > 2)
