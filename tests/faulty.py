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
import optax
import psutil

from vit_jax import train
from vit_jax.base import held_objects
from vit_jax.checkpoints import remote
from vit_jax.checkpoints.store import Checkpoints
from vit_jax.cli import app
from vit_jax.data import loading
from vit_jax.data.sources import arrays
from vit_jax.distributed.processes import Job
from vit_jax.evaluation.evaluator import Evaluator
from vit_jax.experiment import fingerprint, training_run


def at_tick(number, index, act):
    """Acts once, when a step begins."""
    tick = Job.tick

    def ticking(job):
        if job._ticks == number and index in (None, job.index):
            act()
        tick(job)

    Job.tick = ticking


def forever():
    while True:
        time.sleep(1)


def slow(number, index):
    """Every step takes so many milliseconds more."""
    tick = Job.tick

    def ticking(job):
        time.sleep(number / 1000)
        tick(job)

    Job.tick = ticking


def hang(number, index):
    at_tick(number, index, forever)


def hang_loader(number, index):
    load = loading.ImageReader.examples

    def loading_then_hanging(reader, draws, pool):
        if index in (None, jax.process_index()) and any(d and d.epoch > 0 for d in draws):
            forever()
        return load(reader, draws, pool)

    loading.ImageReader.examples = loading_then_hanging


def stalled_images(number, index):
    """Every so-manieth training image is never read to its end."""
    example = loading.ImageReader.example

    def stalling(reader, ref):
        stalls = len(reader.source) > 1000 and ref.index % number == 0
        return forever() if stalls else example(reader, ref)

    loading.ImageReader.example = stalling


def hang_barrier(number, index):
    wait = Job.barrier

    def waiting(job, name):
        if index in (None, job.index):
            forever()
        wait(job, name)

    Job.barrier = waiting


def fail(number, index):
    def act():
        raise RuntimeError('the disk is on fire')

    at_tick(number, index, act)


def die(number, index):
    at_tick(number, index, lambda: os.kill(os.getpid(), signal.SIGKILL))


def slow_compile(number, index):
    lower_update = training_run.lower_update

    def lowering(*arguments):
        time.sleep(number if index in (None, jax.process_index()) else 0)
        return lower_update(*arguments)

    training_run.lower_update = lowering


def slow_evaluation(number, index):
    evaluate = Evaluator.evaluate

    def slowed(evaluator, *arguments, watch):
        def delayed(batches):
            for batch in watch(batches):
                time.sleep(number / 1000)
                yield batch

        return evaluate(evaluator, *arguments, watch=delayed)

    Evaluator.evaluate = slowed


def slow_save(number, index):
    save = Checkpoints.save

    def saving(checkpoints, *arguments):
        save(checkpoints, *arguments)
        time.sleep(number / 1000)

    Checkpoints.save = saving


def slow_wait(number, index):
    """Waiting for what is saved takes so many milliseconds more, and is said."""
    wait = Checkpoints.wait

    def waiting(checkpoints):
        print('waiting for the last save', flush=True)
        time.sleep(number / 1000)
        wait(checkpoints)

    Checkpoints.wait = waiting


def stalled_disk(number, index):
    """No directory is renamed any more once the step is reached: saving never ends."""
    at_tick(number, index, lambda: setattr(os, 'rename', lambda *_: forever()))


def broken(state, index):
    """The state with NaN for the parameters that this process holds, or another of this job."""

    def broken_leaf(leaf):
        there = index in (None, jax.process_index())
        shards = [s.data * jnp.nan if there else s.data for s in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)

    return state._replace(params=jax.tree.map(broken_leaf, state.params))


def on_update(number, act):
    """One step is `act(update, state, batch)` instead."""
    fit_whole = training_run.fit

    def fit(update, *arguments, **more):
        def acting(state, batch):
            if int(state.step) == number:
                return act(update, state, batch)
            return update(state, batch)

        return fit_whole(acting, *arguments, **more)

    training_run.fit = fit


def nan(number, index):
    """The device computes NaN, once."""

    def act(update, state, batch):
        whole = jax.tree.map(jnp.copy, state)
        after, metrics = update(broken(state, index), batch)
        norm = optax.tree.norm(whole.params)
        scalars = metrics.scalars | {'parameter_norm': norm}
        return whole._replace(step=after.step), metrics._replace(scalars=scalars)

    on_update(number, act)


def nan_memory(number, index):
    """The parameters in the device's memory are NaN from then on."""
    on_update(number, lambda update, state, batch: update(broken(state, index), batch))


def full_disk(number, index):
    """From the save of this step on no file can grow beyond 8 kB."""
    save = Checkpoints.save

    def saving(checkpoints, step, *rest):
        if step == number:
            checkpoints.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        save(checkpoints, step, *rest)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    Checkpoints.save = saving


def full_memory(number, index):
    """From that step on the process gets no more memory than it has."""

    def act():
        held = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (held, resource.RLIM_INFINITY))

    at_tick(number, index, act)


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
    of_run = fingerprint.of_run

    def other(config, path):
        facts = of_run(config, path)
        if index in (None, jax.process_index()):
            facts['packages']['numpy'] = '0.0.1'
            facts['code']['training/loop.py'] = 'changed'
        return facts

    fingerprint.of_run = other


def own_downloads(number, index):
    """Each process has a cache of its own, as hosts have."""
    cache = remote.cache
    remote.cache = lambda: cache() / str(jax.process_index())


def other_labels(number, index):
    """Every image in memory has the label after its own."""
    array_source = arrays.array_source

    def relabelled(images, labels, class_names, **more):
        if index in (None, jax.process_index()):
            labels = (labels + 1) % len(class_names)
        return array_source(images, labels, class_names, **more)

    arrays.array_source = relabelled


if __name__ == '__main__':
    faults = sys.argv.pop(1)
    for fault in faults.split(','):
        name, *numbers = fault.split(':')
        step, process = (*map(int, numbers), None, None)[:2]
        globals()[name](step, process)
    app.run_job(train.main, train.make_parser())
