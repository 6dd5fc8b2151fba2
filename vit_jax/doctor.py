"""Says what a program would find on this host, and tries it: python -m vit_jax.doctor.

Started like a training (same flags, on every host) it meets the other processes, compares
packages and code, counts devices, and adds up one number of each device, within --seconds. With
--config it does what a training does before its first step, but for compiling: it traces the step,
network and loss with it; where that has yet to begin it reads all test images and the checkpoint to
start from; with --workdir it sees that the directory is shared, can be written and belongs to no
other experiment. --workdir=gs://BUCKET/FOLDER alone tries there all that a run would need.
"""

import argparse
import contextlib
import glob
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import threading
import time
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import UserError, counted, records, storage
from vit_jax.checkpoints import digests
from vit_jax.checkpoints.store import FOLDER
from vit_jax.cli import app
from vit_jax.data import image_decoding, loading
from vit_jax.distributed import clusters, meshes
from vit_jax.distributed.processes import Job, joined_job
from vit_jax.experiment import compilation, fingerprint, training_run
from vit_jax.experiment.build import Experiment, build_experiment, eval_loaders
from vit_jax.models import parameter_count

# The oldest NVIDIA driver of each major version of CUDA (NVIDIA, CUDA compatibility, table 1).
_LEAST_DRIVER = {'12': 525, '13': 580}
_EXTRAS = {'12': 'cuda', '13': 'cuda13'}


def main(arguments: argparse.Namespace) -> int:
    """Prints what was found. Raises UserError with the first thing that is wrong."""
    launch = app.launch(arguments)
    alone = arguments.workdir is not None and arguments.config is None
    if alone and not storage.is_remote(arguments.workdir):
        raise UserError(f'--workdir={arguments.workdir}: of which experiment? --config is missing')
    _say('host', f'{socket.gethostname()}, {platform.system()}, {os.cpu_count()} cores')
    _say('versions', ', '.join(f'{name} {v}' for name, v in fingerprint.packages().items()))
    _say('decoding', image_decoding.describe_decoder())
    text = 'none recognised: one process'
    if cluster := clusters.detect_cluster(launch):
        text = f'process {cluster.process_id} of {cluster.num_processes}'
        text += f', coordinator {cluster.coordinator_address}'
        text += f', devices of this process: {cluster.local_device_ids or "all"}'
    _say('cluster', text)
    gpus = _check_accelerator()
    with joined_job(launch, app.reporter(arguments)) as job:
        meshes.require_devices()
        _say('compiled', f'cache of compiled programs: {app.keep_programs(arguments, job)}')
        _check_together(job, arguments.seconds, gpus)
        if arguments.config is not None:
            _check_training(job, arguments)
        elif alone:
            folder = storage.folder(arguments.workdir)
            storage.require_usable(folder)
            _say('workdir', f'{folder}: objects can be written, read, listed and removed')
    _say('result', 'all is well')
    return 0


def _say(name: str, text: str) -> None:
    print(f'{name:<12}{text}', flush=True)


def _check_accelerator() -> int:
    """The number of GPUs. Raises UserError where jax can use none, and one is here or requested."""
    gpus, platforms = _nvidia_gpus(), jax.config.values['jax_platforms'] or ''
    plugins = [n for n in _LEAST_DRIVER if importlib.util.find_spec(f'jax_cuda{n}_plugin')]
    how = "pip install 'vit_jax[cuda]' (CUDA 12) or 'vit_jax[cuda13]'"
    if not gpus and {'cuda', 'gpu'} & {*platforms.split(',')}:
        missing = [] if plugins else [f"jax's part for CUDA ({how})"]
        if os.path.exists('/proc/driver/nvidia/version'):
            missing.append('a GPU: the NVIDIA driver is loaded, but nvidia-smi lists none')
        else:
            missing.append('the NVIDIA driver (nvidia-smi, /proc/driver/nvidia)')
        raise UserError(f'JAX_PLATFORMS={platforms}: this host lacks {" and ".join(missing)}')
    if gpus:
        driver, _, name = gpus[0].partition(', ')
        _say('driver', f'NVIDIA {driver}: {len(gpus)} x {name}')
        if not plugins:
            raise UserError(f"a GPU is here, jax's part for it is not: {how}")
        cuda, least = plugins[-1], _LEAST_DRIVER[plugins[-1]]
        if int(driver.split('.')[0]) < least:
            raise UserError(f'driver {driver} is too old for CUDA {cuda}: {least} or newer')
        plugin, jaxlib = metadata.version(f'jax-cuda{cuda}-plugin'), metadata.version('jaxlib')
        if plugin.split('.')[:2] != jaxlib.split('.')[:2]:
            wrong = f'jax-cuda{cuda}-plugin {plugin} does not belong to jaxlib {jaxlib}'
            raise UserError(f"{wrong}: pip install -U 'vit_jax[{_EXTRAS[cuda]}]'")
    tpus = [*glob.glob('/dev/accel*'), *glob.glob('/dev/vfio/[0-9]*')]
    if tpus and importlib.util.find_spec('libtpu') is None and not gpus:
        _say('devices', f'{tpus[0]} may be a TPU; libtpu is not installed (vit_jax[tpu])')
    return len(gpus)


def _nvidia_gpus() -> list[str]:
    """Driver and name of each GPU that the driver knows; none without a driver."""
    if shutil.which('nvidia-smi') is None:
        return []
    command = ['nvidia-smi', '--query-gpu=driver_version,name', '--format=csv,noheader']
    found = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if found.returncode:
        raise UserError(f'nvidia-smi: {found.stdout.strip() or found.stderr.strip()}')
    return found.stdout.split('\n')[:-1]


def _check_together(job: Job, seconds: float, gpus: int) -> None:
    """Compares the hosts, then lets all devices compute one sum."""
    limit = threading.Timer(seconds, _give_up, (job, seconds))
    limit.daemon = True
    limit.start()
    job.require_same('packages and code', fingerprint.installed())
    local, everyone = jax.local_devices(), jax.devices()
    kind = local[0].device_kind
    _say('devices', f'{len(local)} x {kind} here, {len(everyone)} in all processes')
    if gpus and local[0].platform == 'cpu':
        raise UserError('a GPU is here, but jax computes on the CPU: is JAX_PLATFORMS set?')
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
        compilation.lower_update(experiment, compilation.abstract_state(experiment))
        _say('step', 'network, loss and update fit each other')
        _read(experiment, job, begun=begun)


def _read(experiment: Experiment, job: Job, *, begun: bool) -> None:
    """Reads what a training reads before its first step: test images, the arrays of start_from."""
    job.reset_watchdog()
    unread = eval_loaders(experiment)
    if begun:
        return
    with loading.read_beside(unread, index=job.index, count=job.count) as wait:
        wait()
    if experiment.start is not None:
        job.reset_watchdog()
        experiment.transferred(experiment.start, jax.eval_shape(experiment.init).params)
    skipped = experiment.config.loader.on_unreadable == 'skip'
    found = (
        'were not all read: on_unreadable=skip leaves out what cannot be'
        if skipped
        else 'can be read'
    )
    _say('images', f'those to test on {found}; vit_jax.inspect_data reads all')


def _give_up(job: Job, seconds: float) -> None:
    why = 'a process is not started, or the hosts cannot reach each other (firewall, networks)'
    job.end(1, f'no answer of all devices within {seconds:g} s: {why}')


if __name__ == '__main__':
    parser = app.new_parser('doctor', __doc__)
    text = 'that all devices may take for one sum (60)'
    parser.add_argument('--seconds', type=float, default=60.0, metavar='S', help=text)
    app.add_job(parser, required=False)
    app.run(main, parser)
