"""Compares two ways to restore replicated parameters: python -m benchmarks.restore.

`restore_each` is what vit_jax does: every process reads all arrays. `restore_one` is orbax's
restore of a single replica: the first process reads and broadcasts. All processes are on one
machine, over loopback. With --cold the system forgets the files before each restore (needs root).
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
os.environ |= {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=1'

import jax  # noqa: E402
import numpy as np  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from tests.hosts import free_port  # noqa: E402
from vit_jax.checkpoints import store  # noqa: E402
from vit_jax.distributed import meshes  # noqa: E402
from vit_jax.distributed.meshes import MeshConfig  # noqa: E402
from vit_jax.distributed.processes import Job, LaunchConfig, connect  # noqa: E402


def restore_one(folder: pathlib.Path, like: Any, mesh: Mesh) -> Any:
    """Restores in the first process, which broadcasts to the others."""
    handler = ocp.type_handlers.SingleReplicaArrayHandler(replica_axis_index=0)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
    arguments = jax.tree.map(
        lambda x: ocp.type_handlers.SingleReplicaArrayRestoreArgs(
            sharding=x.sharding,
            global_shape=x.shape,
            dtype=x.dtype,
        ),
        like,
    )
    reader = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    return reader.restore(folder, args=ocp.args.PyTreeRestore(like, restore_args=arguments))


def restore_each(folder: pathlib.Path, like: Any, mesh: Mesh) -> Any:
    """Restores in each process, as `Checkpoints.restore` does."""
    arguments = ocp.checkpoint_utils.construct_restore_args(like)
    reader = store._array_handler()
    return reader.restore(folder, args=ocp.args.PyTreeRestore(like, restore_args=arguments))


def run(arguments: argparse.Namespace) -> None:
    """Saves arrays, and times both ways to restore them alternately, in one of the processes."""
    connect(
        LaunchConfig(
            coordinator_address=arguments.address,
            num_processes=arguments.processes,
            process_id=arguments.index,
        )
    )
    job = Job()
    mesh = meshes.make_mesh(MeshConfig())
    sharding = meshes.replicated(mesh)
    count = arguments.mib // 16
    host = {f'{n}': np.random.default_rng(n).random(2**22, np.float32) for n in range(count)}
    params = meshes.put(host, jax.tree.map(lambda _: sharding, host))
    folder = pathlib.Path(arguments.folder) / 'params'
    writer = ocp.PyTreeCheckpointHandler()
    ocp.Checkpointer(writer).save(folder, args=ocp.args.PyTreeSave(params))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), params)
    for turn in range(3):
        for restore in restore_each, restore_one:
            if arguments.cold and job.index == 0:
                subprocess.run('sync; echo 3 > /proc/sys/vm/drop_caches', shell=True, check=True)
            job.barrier('begin')
            began = time.monotonic()
            restored = restore(folder, like, mesh)
            jax.block_until_ready(restored)
            job.barrier('end')
            seconds = time.monotonic() - began
            assert all(
                np.array_equal(np.asarray(restored[name].addressable_data(0)), host[name])
                for name in host
            )
            if job.index == 0:
                print(f'{turn}  {restore.__name__:<14}{seconds:>7.2f} s', flush=True)
            del restored
    jax.distributed.shutdown()


def main() -> None:
    """Starts the processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--mib', type=int, default=512, help='size of the arrays')
    parser.add_argument('--processes', type=int, default=4)
    parser.add_argument('--cold', action='store_true')
    parser.add_argument('--index', type=int)
    parser.add_argument('--address')
    parser.add_argument('--folder')
    arguments = parser.parse_args()
    if arguments.index is not None:
        return run(arguments)
    with tempfile.TemporaryDirectory() as folder:
        words = [f'--address=127.0.0.1:{free_port()}', f'--folder={folder}']
        command = [sys.executable, '-m', 'benchmarks.restore', *sys.argv[1:], *words]
        started = [
            subprocess.Popen([*command, f'--index={index}'], cwd=ROOT)
            for index in range(arguments.processes)
        ]
        try:
            codes = [process.wait(1800) for process in started]
        finally:
            for process in started:
                process.kill()
    sys.exit(max(map(abs, codes)))


if __name__ == '__main__':
    main()
