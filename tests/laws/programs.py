"""Trains in processes of its own, as a user does: commands in, files out.

The commands and files stay the same whatever is rewritten underneath.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import vit_jax

ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 600  # seconds for one start
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


class Process:
    """One process of a training, and its output."""

    def __init__(self, command, environment, log):
        self.log = log
        with log.open('a') as output:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def wait(self):
        """Returns the exit code: minus the signal where one ended the process."""
        return self._process.wait(LIMIT)

    @property
    def running(self):
        return self._process.poll() is None

    def signal(self, number):
        self._process.send_signal(number)


def free_port():
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def training(workdir, *, processes=1, devices=1, values=None, flags=()):
    """Starts `python -m vit_jax.train`; what is still running is killed at the end.

    Args:
      workdir: The work directory.
      processes: Number of processes.
      devices: Number of CPU devices of each process.
      values: Configuration fields in addition to TINY.
      flags: More flags.
    """
    command = [sys.executable, '-m', 'vit_jax.train', '--config=configs/pretrain/cifar10.py']
    command += [f'--workdir={workdir}', *flags]
    fields = TINY | (values or {})
    command += [f'--config.{name}={value}' for name, value in fields.items()]
    xla_flags = re.sub(r'(?<=device_count=)\d+', str(devices), os.environ['XLA_FLAGS'])
    environment = os.environ | {'XLA_FLAGS': xla_flags, 'PYTHONPATH': str(ROOT)}
    address = f'127.0.0.1:{free_port()}'
    started = []
    try:
        for index in range(processes):
            place = [f'--coordinator_address={address}', f'--num_processes={processes}']
            place = [*place, f'--process_id={index}'] if processes > 1 else []
            log = pathlib.Path(f'{workdir}-{index}.log')
            started.append(Process([*command, *place], environment, log))
        yield started
    finally:
        for process in started:
            process.signal(signal.SIGKILL)
            process.wait()


def train(workdir, **options):
    """Trains to the end."""
    with training(workdir, **options) as started:
        codes = [process.wait() for process in started]
    assert codes == [0] * len(codes), started[0].log.read_text()


def wait_for_step(workdir, step, process):
    """Returns when metrics.jsonl has reached the step, or the process has exited."""
    while process.running and max((line['step'] for line in metrics(workdir)), default=-1) < step:
        time.sleep(0.005)


def metrics(workdir):
    """The lines of metrics.jsonl, without clock times."""
    path = pathlib.Path(workdir) / 'metrics.jsonl'
    clocked = 'time', 'run', 'seconds', 'images_per_second', 'skipped'
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for text in lines:
        with contextlib.suppress(json.JSONDecodeError):  # a line that is being written
            found.append({k: v for k, v in json.loads(text).items() if k not in clocked})
    return found


def losses(workdir):
    """The training losses by step."""
    return {line['step']: line['loss'] for line in metrics(workdir) if line['kind'] == 'train'}


def params(workdir):
    """The trained parameters."""
    return vit_jax.load(str(workdir)).params
