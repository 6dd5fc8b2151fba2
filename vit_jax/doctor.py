"""Says what a program would find on this host, and tries it: python -m vit_jax.doctor.

Started like a training (same flags, on every host) it meets the other processes, compares
packages and code, counts devices, and adds up one number of each device, within --seconds. With
--config it opens the data, traces the step, and reads the checkpoint to start from, as a training
does before it compiles; with --workdir it sees that the directory is shared, can be written and
belongs to no other experiment. --workdir=gs://BUCKET/FOLDER alone tries all that a run needs there.
"""

import argparse
import contextlib
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import UserError, counted, records, require, storage
from vit_jax.checkpoints import digests
from vit_jax.checkpoints.store import FOLDER
from vit_jax.cli import app
from vit_jax.data import image_decoding
from vit_jax.distributed import clusters, meshes
from vit_jax.distributed.processes import Job, joined_job
from vit_jax.experiment import fingerprint, training_run
from vit_jax.experiment.build import build_experiment
from vit_jax.models import parameter_count

_INSTALL = "pip install 'vit_jax[cuda]' (CUDA 12) or 'vit_jax[cuda13]'"
_ON_CPU = (
    'a GPU is here, but jax computes on the CPU; expected a driver of at least 525 for CUDA 12, of '
    "580 for CUDA 13, jax's plugin in the version of jaxlib, and no JAX_PLATFORMS=cpu"
)


def main(arguments: argparse.Namespace) -> int:
    """Prints what was found. Raises UserError with the first thing that is wrong."""
    launch, workdir = app.launch(arguments), arguments.workdir
    alone = workdir is not None and arguments.config is None
    wrong = f'--workdir={workdir}: of which experiment? --config is missing'
    require(not alone or storage.is_remote(workdir), wrong)
    _say('host', f'{socket.gethostname()}, {platform.system()}, {os.cpu_count()} cores')
    _say('versions', ', '.join(f'{name} {v}' for name, v in fingerprint.packages().items()))
    _say('decoding', image_decoding.describe_decoder())
    _say('cluster', str(clusters.detect_cluster(launch) or 'none detected: one process'))
    gpus = _count_gpus()
    with joined_job(launch, app.report) as job:
        app.prepare_devices(arguments, processes=job.count)
        folder = jax.config.values['jax_compilation_cache_dir']
        is_kept = folder and jax.config.values['jax_enable_compilation_cache']
        _say('compiled', f'cache of compiled programs: {folder if is_kept else "none"}')
        _check_devices(job, arguments.seconds, gpus)
        if arguments.config is not None:
            _check_training(job, arguments)
        elif alone:
            storage.require_usable(storage.folder(workdir))
            _say('workdir', f'{workdir}: objects can be written, read, listed and removed')
    _say('result', 'all is well')
    return 0


def _say(name: str, text: str) -> None:
    print(f'{name:<12}{text}', flush=True)


def _count_gpus() -> int:
    """Returns the number of NVIDIA GPUs. Raises UserError if jax lacks what they need."""
    gpus = list[str]()
    if shutil.which('nvidia-smi') is not None:
        command = ['nvidia-smi', '--query-gpu=driver_version,name', '--format=csv,noheader']
        found = subprocess.run(command, capture_output=True, text=True, timeout=30)
        problem = found.stdout.strip() or found.stderr.strip()
        require(found.returncode == 0, f'nvidia-smi: {problem}')
        gpus = found.stdout.splitlines()
    if gpus:
        _say('driver', f'{len(gpus)} x NVIDIA {gpus[0]}')
        plugins = [importlib.util.find_spec(f'jax_cuda{cuda}_plugin') for cuda in (12, 13)]
        require(any(plugins), f"a GPU is here, jax's plugin for it is not: {_INSTALL}")
    return len(gpus)


def _check_devices(job: Job, seconds: float, gpus: int) -> None:
    """Compares the hosts, then lets all devices compute one sum."""
    limit = threading.Timer(seconds, _give_up, (job, seconds))
    limit.daemon = True
    limit.start()
    job.require_same('packages and code', fingerprint.installed())
    local, everyone = jax.local_devices(), jax.devices()
    kind = local[0].device_kind
    _say('devices', f'{len(local)} x {kind} here, {len(everyone)} in all processes')
    require(not gpus or local[0].platform != 'cpu', _ON_CPU)
    job.require_same('devices', {'of each process': len(local), 'kind': kind})
    began = time.monotonic()
    mesh = meshes.make_mesh(meshes.MeshConfig())
    ones = meshes.put(np.ones(len(everyone), np.float32), meshes.batch_sharding(mesh))
    total = jax.jit(jnp.sum, out_shardings=meshes.replicated(mesh))(ones)
    if float(total) != len(everyone):
        raise UserError(f'the sum over {len(everyone)} devices is {float(total)}')
    limit.cancel()
    _say('collective', f'sum over {len(everyone)} devices in {time.monotonic() - began:.1f} s')


def _check_training(job: Job, arguments: argparse.Namespace) -> None:
    """Does what the training does before it compiles."""
    config, begun = arguments.config, False
    with contextlib.ExitStack() as stack:
        if arguments.workdir is None:
            job.require_same('configuration', records.to_dict(config))
            experiment = build_experiment(config)
        else:
            opened = training_run.open_run(
                config,
                arguments.workdir,
                job,
                accept_changes=arguments.accept_config_changes,
                accept_data=arguments.accept_data_changes,
            )
            experiment, workdir, _ = stack.enter_context(opened)
            folder = workdir.folder
            _say('workdir', f'{folder}: can be written')
            begun = bool(digests.steps(folder / FOLDER))
        model, count = experiment.model.config, len(experiment.train.source)
        classes = counted(len(experiment.train.source.class_names), 'class')
        _say('data', f'{counted(count, "training image")}, {classes}')
        _say('model', f'{parameter_count(model):,} parameters, {meshes.describe(experiment.mesh)}')
        _say('length', counted(experiment.length.total_steps, 'step'))
        job.reset_watchdog()
        training_run.lower_update(experiment, training_run.abstract_state(experiment))
        _say('step', 'network, loss and update fit each other')
        if experiment.start is not None and not begun:
            job.reset_watchdog()
            experiment.transferred(experiment.start, jax.eval_shape(experiment.init).params)
            _say('start_from', f'{experiment.start.path} fits the model')


def _give_up(job: Job, seconds: float) -> None:
    why = 'a process is not started, or the hosts cannot reach each other (firewall, networks)'
    job.end(1, f'no answer of all devices within {seconds:g} s: {why}')


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the program."""
    parser = app.new_parser('doctor', __doc__)
    text = 'that all devices may take for one sum (60)'
    parser.add_argument('--seconds', type=float, default=60.0, metavar='S', help=text)
    app.add_job(parser, required=False)
    return parser


if __name__ == '__main__':
    app.run(main, make_parser(), on_devices=False)
