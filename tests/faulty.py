"""vit_jax.train with something wrong: python -m tests.faulty FAULT[,FAULT...] FLAGS.

A fault is NAME:STEP or NAME:STEP:PROCESS; it happens at that step, on that process or on all.
"""

import os
import resource
import shutil
import signal
import sys
import time

import jax
import jax.numpy as jnp

from vit_jax import train
from vit_jax.base import held_objects
from vit_jax.checkpoints.store import Checkpoints
from vit_jax.cli import app
from vit_jax.data import loading
from vit_jax.distributed.processes import Job
from vit_jax.evaluation.evaluator import Evaluator
from vit_jax.experiment import training_run, workdirs


def replacing(owner, name):
    """Replaces a function or method by the decorated one, which is given the original first."""
    original = getattr(owner, name)

    def decorate(replacement):
        setattr(owner, name, lambda *a, **more: replacement(original, *a, **more))

    return decorate


def at_tick(number, index, act):
    """Acts once, when a step begins."""

    @replacing(Job, 'tick')
    def _(tick, job):
        if job._ticks == number and index in (None, job.index):
            act()
        tick(job)


def is_here(index):
    return index in (None, jax.process_index())


def forever():
    while True:
        time.sleep(1)


def slow(number, index):
    """Every step takes `number` milliseconds longer."""

    @replacing(Job, 'tick')
    def _(tick, job):
        time.sleep(number / 1000)
        tick(job)


def hang(number, index):
    at_tick(number, index, forever)


def hang_loader(number, index):
    @replacing(loading.ImageReader, 'examples')
    def _(load, reader, draws, pool):
        if is_here(index) and any(d and d.epoch > 0 for d in draws):
            forever()
        return load(reader, draws, pool)


def stalled_images(number, index):
    """Every `number`th training image is never read to its end."""

    @replacing(loading.ImageReader, 'example')
    def _(example, reader, ref):
        stalls = len(reader.source) > 1000 and ref.index % number == 0
        return forever() if stalls else example(reader, ref)


def fail(number, index):
    def act():
        raise RuntimeError('the disk is on fire')

    at_tick(number, index, act)


def die(number, index):
    at_tick(number, index, lambda: os.kill(os.getpid(), signal.SIGKILL))


def slow_compile(number, index):
    @replacing(training_run, 'lower_update')
    def _(lower_update, *arguments):
        time.sleep(number if is_here(index) else 0)
        return lower_update(*arguments)


def slow_evaluation(number, index):
    @replacing(Evaluator, 'evaluate')
    def _(evaluate, evaluator, *arguments, watch):
        def delayed(batches):
            for batch in watch(batches):
                time.sleep(number / 1000)
                yield batch

        return evaluate(evaluator, *arguments, watch=delayed)


def slow_save(number, index):
    @replacing(Checkpoints, 'save')
    def _(save, *arguments):
        save(*arguments)
        time.sleep(number / 1000)


def slow_wait(number, index):
    """Waiting for the last save takes `number` milliseconds longer, and is printed."""

    @replacing(Checkpoints, 'wait')
    def _(wait, checkpoints):
        print('waiting for the last save', flush=True)
        time.sleep(number / 1000)
        wait(checkpoints)


def stalled_disk(number, index):
    """No directory is renamed any more once the step is reached: saving never ends."""
    at_tick(number, index, lambda: setattr(os, 'rename', lambda *_: forever()))


def broken(state, index):
    """The state with NaN for the parameters that this process holds, or another of this job."""

    def broken_leaf(leaf):
        shards = [s.data * (jnp.nan if is_here(index) else 1) for s in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)

    return state._replace(params=jax.tree.map(broken_leaf, state.params))


def on_update(number, act):
    """One step is `act(update, state, batch)` instead."""

    @replacing(training_run, 'fit')
    def _(fit, update, *arguments, **more):
        def acting(state, batch):
            if int(state.step) == number:
                return act(update, state, batch)
            return update(state, batch)

        return fit(acting, *arguments, **more)


def nan_memory(number, index):
    """The parameters in the device's memory are NaN from then on."""
    on_update(number, lambda update, state, batch: update(broken(state, index), batch))


def full_disk(number, index):
    """From the save of this step on no file can grow beyond 8 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    @replacing(Checkpoints, 'save')
    def _(save, checkpoints, step, *rest):
        if step == number:
            checkpoints.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        save(checkpoints, step, *rest)


def gone(number, index):
    """The work directory is removed when that step begins."""
    (folder,) = (text.partition('=')[2] for text in sys.argv if text.startswith('--workdir='))
    at_tick(number, index, lambda: shutil.rmtree(folder, ignore_errors=True))


def lease(number, index):
    """That of a store is for so many milliseconds."""
    held_objects.LEASE, held_objects.HEARTBEAT = number / 1000, number / 4000


def upload(number, index):
    """Lines are on a store after so many milliseconds."""
    held_objects.UPLOAD = number / 1000


def other_packages(number, index):
    @replacing(workdirs, 'run_settings')
    def _(run_settings, config, path):
        facts = run_settings(config, path)
        if is_here(index):
            facts['packages']['numpy'] = '0.0.1'
            facts['code']['training/loop.py'] = 'changed'
        return facts


if __name__ == '__main__':
    faults = sys.argv.pop(1)
    for fault in faults.split(','):
        name, *numbers = fault.split(':')
        step, process = (*map(int, numbers), None, None)[:2]
        globals()[name](step, process)
    app.run_job(train.main, train.make_parser())
