"""Checks devices, data and work directory before training: python -m vit_jax.doctor.

Run it on every host with the flags of vit_jax.train. It connects the processes, compares packages
and code between hosts, and sums one number per device. With --config it opens the data, traces the
training step and reads the checkpoint of config.start_from, as training does before it compiles.
If the images are in a bucket, it measures how fast they are read.
With --workdir it also checks that the directory is shared, writable and not used by another
experiment. --workdir=gs://BUCKET/FOLDER without --config checks the permissions that a run needs.
"""

import argparse
import contextlib
import os
import platform
import shutil
import socket
import time

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import plural, records, require, storage
from vit_jax.checkpoints import digests
from vit_jax.checkpoints.card import package_versions
from vit_jax.checkpoints.store import FOLDER
from vit_jax.cli import app
from vit_jax.data import image_decoding, inspection
from vit_jax.distributed import meshes
from vit_jax.distributed.processes import Job, join_job
from vit_jax.experiment import training_run, workdirs
from vit_jax.experiment.build import Experiment, build_experiment
from vit_jax.models import count_params

# Dense bfloat16 operations per second, as published by Google and NVIDIA, by jax's device_kind.
PEAK_FLOPS = {
    'NVIDIA A100-SXM4-40GB': 312e12,
    'NVIDIA A100-SXM4-80GB': 312e12,
    'NVIDIA H100 80GB HBM3': 989e12,
    'NVIDIA H200': 989e12,
    'TPU v4': 275e12,
    'TPU v5 lite': 197e12,
    'TPU v5': 459e12,
    'TPU v5p': 459e12,
    'TPU v6 lite': 918e12,
}
_ON_CPU = (
    "this host has NVIDIA GPUs, but jax uses the CPU: pip install 'vit_jax[cuda]' (CUDA 12, driver "
    "525 or newer) or 'vit_jax[cuda13]' (driver 580 or newer), and unset JAX_PLATFORMS=cpu"
)


def main(arguments: argparse.Namespace) -> int:
    """Prints a row per check. Raises UserError at the first failed check."""
    launch = app.parse_launch(arguments)
    workdir = arguments.workdir
    only_workdir = workdir is not None and arguments.config is None
    require(
        not only_workdir or storage.is_remote(workdir),
        f'--workdir={workdir}: --config is missing; pass the --config of the experiment',
    )
    _say('host', f'{socket.gethostname()}, {platform.system()}, {os.cpu_count()} cores')
    _say('versions', ', '.join(f'{name} {v}' for name, v in package_versions().items()))
    _say('decoding', image_decoding.describe_decoder())
    with join_job(launch, app.report) as job:
        _say('cluster', str(job) if job.count > 1 else 'none detected, one process')
        app.prepare_devices(processes=job.count)
        _check_devices(job)
        if arguments.config is not None:
            _check_training(job, arguments)
        elif only_workdir:
            storage.require_writable_bucket(storage.resolve_folder(workdir))
            _say('workdir', f'{workdir}: objects can be written, read, listed and removed')
    _say('result', 'all checks passed')
    return 0


def _say(name: str, text: str) -> None:
    print(f'{name:<12}{text}', flush=True)


def _check_devices(job: Job) -> None:
    """Compares software and devices between hosts, then sums one number per device."""
    job.require_equal('packages and code', workdirs.describe_software())
    local_devices = jax.local_devices()
    count = jax.device_count()
    kind = local_devices[0].device_kind
    _say('devices', f'{len(local_devices)} x {kind} in this process, {count} in total')
    # A host with an NVIDIA driver has this command.
    require(local_devices[0].platform != 'cpu' or shutil.which('nvidia-smi') is None, _ON_CPU)
    job.require_equal('devices', {'per process': len(local_devices), 'kind': kind})
    start = time.monotonic()
    mesh = meshes.make_mesh(meshes.MeshConfig())
    ones = meshes.put(np.ones(count, np.float32), meshes.batch_sharding(mesh))
    total = float(jax.jit(jnp.sum, out_shardings=meshes.replicated(mesh))(ones))
    require(total == count, f'sum over devices: got {total}; expected {count}')
    _say('collective', f'sum over {count} devices in {time.monotonic() - start:.1f} s')


def _check_training(job: Job, arguments: argparse.Namespace) -> None:
    """Runs the checks that a training runs before it compiles."""
    config = arguments.config
    has_begun = False
    with contextlib.ExitStack() as stack:
        if arguments.workdir is None:
            job.require_equal('configuration', records.to_dict(config))
            experiment = build_experiment(config)
        else:
            run = training_run.open_run(
                config,
                arguments.workdir,
                job,
                accept_changes=arguments.accept_config_changes,
                accept_data=arguments.accept_data_changes,
            )
            opened_run = stack.enter_context(run)
            experiment = opened_run.experiment
            folder = opened_run.workdir.folder
            _say('workdir', f'{folder}: writable')
            has_begun = bool(digests.list_steps(folder / FOLDER))
        source = experiment.train_reader.source
        images = plural(len(source), 'training image')
        classes = plural(len(source.class_names), 'class')
        _say('data', f'{images}, {classes}')
        if source.places is not None:
            _check_bucket(experiment)
        num_params = count_params(experiment.model.config)
        _say('model', f'{num_params:,} parameters, {meshes.format_mesh(experiment.mesh)}')
        _say('length', plural(experiment.length.total_steps, 'step'))
        job.reset_watchdog()
        state = training_run.abstract_state(experiment)
        training_run.lower_update(experiment, state)
        _say('step', 'traced (model, loss and optimizer update)')
        start = experiment.start_from
        if start is not None and not has_begun:
            job.reset_watchdog()
            experiment.transfer_params(start, state.params)
            _say('start_from', f'{start.path} fits the model')


def _check_bucket(experiment: Experiment) -> None:
    """Measures how fast this process reads training images that are read in blocks."""
    source = experiment.train_reader.source
    speed = inspection.measure_bucket(source)
    place = 'bucket' if storage.is_remote(source.data) else 'disk'
    _say(
        place,
        f'{speed.bytes_per_second / 1e6:,.0f} MB/s, {speed.images_per_second:,.0f} images/s; '
        f'{1000 * speed.latency:,.0f} ms for one image',
    )
    peak = PEAK_FLOPS.get(jax.local_devices()[0].device_kind)
    if peak is None:
        return
    multiply_adds = experiment.task.count_multiply_adds(experiment.config, experiment.model.config)
    # A multiply-add is two operations; a training step needs three times those of its forward pass.
    rate = 0.5 * peak * jax.local_device_count() / (6 * multiply_adds)
    answer = 'can' if speed.images_per_second >= rate else 'cannot'
    _say('', f'the {place} {answer} feed this process at half of its peak, {rate:,.0f} images/s')


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of the program."""
    return app.new_job_parser('doctor', __doc__, required=False)


if __name__ == '__main__':
    app.run(main, make_parser(), on_devices=False)
