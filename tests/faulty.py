"""vit_jax.train with something wrong: python -m tests.faulty FAULT[,FAULT...] FLAGS.

A fault is NAME:NUMBER or NAME:NUMBER:PROCESS, on that process or on all. `slow` (milliseconds for
each step), `barriers` (prints their names), `other_packages` and AT_STEP patch nothing: the job
that `train` is given has them. Each fault in PATCHES replaces one function or constant, and a
program has one of them at most.
"""

import os
import resource
import shutil
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp

from tests.steps import hang, raise_error
from vit_jax import train
from vit_jax.base import bucket_lease
from vit_jax.checkpoints.store import Checkpoints
from vit_jax.cli import app
from vit_jax.data import loading
from vit_jax.distributed.processes import Job
from vit_jax.experiment import training_run

hanging = threading.Event()  # a thread of `hang_loader` hangs
jobs = []  # the job of this process


def fill_disk():
    """No file can grow beyond 8 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def remove_workdir():
    (folder,) = (text.partition('=')[2] for text in sys.argv if text.startswith('--workdir='))
    shutil.rmtree(folder, ignore_errors=True)


def fail_after_hang():
    """Fails when a thread of this process hangs."""
    hanging.wait()
    raise_error()


AT_STEP = {  # what happens once, when the step of this number starts
    'hang': hang,
    'fail': raise_error,
    'fail_after_hang': fail_after_hang,
    'die': lambda: os.kill(os.getpid(), signal.SIGKILL),
    'full_disk': fill_disk,
    'gone': remove_workdir,
}


class FaultyJob(Job):
    """The job of this process, and its faults."""

    def __init__(self, job, faults):
        self.__dict__ = job.__dict__
        self.faults = {name: n for name, n, index in faults if index in (None, job.index)}
        jobs.append(self)

    def tick(self):
        time.sleep(self.faults.get('slow', 0) / 1000)
        for name, number in self.faults.items():
            if name in AT_STEP and number == self._ticks:
                AT_STEP[name]()
        super().tick()

    def barrier(self, name):
        if 'barriers' in self.faults:
            print(f'waiting at {name}', flush=True)
        super().barrier(name)

    def require_equal(self, name, facts, *describe):
        if 'other_packages' in self.faults and 'packages' in facts:
            facts['packages']['numpy'] = '0.0.1'
            facts['code']['training/loop.py'] = 'changed'
        super().require_equal(name, facts, *describe)


def replacing(owner, name):
    """Replaces a function or method by the decorated one, which is given the original first."""
    original = getattr(owner, name)

    def decorate(replacement):
        setattr(owner, name, lambda *a, **more: replacement(original, *a, **more))

    return decorate


def is_here(index):
    return index in (None, jax.process_index())


def hang_loader(number, index):
    @replacing(loading.ImageReader, 'examples')
    def _(load, reader, examples, *more, **options):
        if is_here(index) and examples.epoch.any():
            hanging.set()
            hang()
        return load(reader, examples, *more, **options)


def stalled_images(number, index):
    """Every `number`th training image is never read to its end."""

    @replacing(loading.ImageReader, '_read_rows')
    def _(read, reader, rows, examples, *more):
        stalls = len(reader.source) > 1000 and (examples.index[rows] % number == 0).any()
        return hang() if stalls else read(reader, rows, examples, *more)


def slow_compile(number, index):
    @replacing(training_run, 'lower_update')
    def _(lower_update, *arguments):
        if is_here(index):
            print('compiling slowly', flush=True)
            time.sleep(number)
        return lower_update(*arguments)


def uncached_compile(number, index):
    """XLA compiles what no cache has, and prints when it starts."""
    jax.config.update('jax_enable_compilation_cache', False)

    @replacing(jax.stages.Lowered, 'compile')
    def _(compile_lowered, lowered, *arguments):
        print('XLA compiles', flush=True)
        return compile_lowered(lowered, *arguments)


def slow_wait(number, index):
    """Waiting for the save of step `number` is printed, and ends 2 s after a signal."""

    @replacing(Checkpoints, 'wait')
    def _(wait, checkpoints):
        if checkpoints.latest_step == number:
            print(f'waiting for the save of step {number}', flush=True)
            while not jobs[0]._stop_code:
                time.sleep(0.05)
            time.sleep(2)  # longer than a process that exits at once takes (1.5 s)
        wait(checkpoints)


def stalled_disk(number, index):
    """The checkpoint of step `number` never gets its name: saving does not end."""

    @replacing(os, 'rename')
    def _(rename, source, target, **more):
        stalls = os.fspath(target).endswith(f'/checkpoints/{number}')
        return hang() if stalls else rename(source, target, **more)


def nan_memory(number, index):
    """Before this step, the parameters that a process has in its memory become NaN."""

    def broken(leaf):
        shards = [s.data * (jnp.nan if is_here(index) else 1) for s in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)

    @replacing(training_run.loop, 'fit')
    def _(fit, update, *arguments, **more):
        def acting(step, state, *arguments):
            if step == number:
                state = state._replace(params=jax.tree.map(broken, state.params))
            return update(step, state, *arguments)

        return fit(acting, *arguments, **more)


def lease(number, index):
    """A lease of a bucket is for `number` milliseconds."""
    bucket_lease.LEASE = number / 1000


PATCHES = [
    hang_loader,
    stalled_images,
    slow_compile,
    uncached_compile,
    slow_wait,
    stalled_disk,
    nan_memory,
    lease,
]


def main(arguments, job):
    return train.main(arguments, FaultyJob(job, faults))


if __name__ == '__main__':
    given = [(*fault.split(':'), None)[:3] for fault in sys.argv.pop(1).split(',')]
    faults = [(name, int(number), index and int(index)) for name, number, index in given]
    patches = [
        (patch, *numbers)
        for patch in PATCHES
        for name, *numbers in faults
        if name == patch.__name__
    ]
    assert len(patches) <= 1, f'{patches}: expected one at most'
    for patch, *numbers in patches:
        patch(*numbers)
    app.run_job(main, train.make_parser())
