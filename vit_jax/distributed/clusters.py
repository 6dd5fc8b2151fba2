"""Finds the processes of a job in the environment, and connects this process to the others.

jax reads the variables of Slurm, Open MPI, Kubernetes and TPUs. This module rejects an incomplete
cluster, where jax would start one process alone, and a wrong address, where jax would crash.
"""

import dataclasses
import os
import re
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

# Not public. `jax.distributed.initialize` reads the environment and acts on it in one call, and
# jax's CPU devices listen at the address of the host's name, whatever network that belongs to.
from jax._src import clusters, distributed, xla_bridge
from jaxlib import _jax

from vit_jax.base import Record, UserError, require, require_between


@dataclasses.dataclass(kw_only=True)
class Launch(Record):
    """How a program is started. The environment fills in what is None."""

    distributed: bool = True  # False: one process, whatever the environment contains
    coordinator_address: str | None = None  # HOST:PORT of process 0
    num_processes: int | None = None
    process_id: int | None = None
    start_seconds: float = 300.0  # to wait for the other processes
    heartbeat_seconds: float = 100.0  # without a sign of life, after which a process is dead
    watchdog_seconds: float = 1800.0  # without a step, an evaluated batch or a save

    def check(self) -> None:
        require_between(self, 'start_seconds', 'heartbeat_seconds', 'watchdog_seconds', low=0.1)


class Cluster(NamedTuple):
    """The place of this process among the processes of its job."""

    coordinator_address: str
    num_processes: int
    process_id: int
    local_device_ids: Sequence[int] | None  # None: all devices of the host


def detect_cluster(launch: Launch) -> Cluster | None:
    """Returns the place of this process in its job, or None if it runs alone.

    Raises:
      UserError: If the environment announces a cluster but does not describe it. Each process
        would become a run of its own that writes to the same directory.
    """
    address = launch.coordinator_address or os.environ.get('JAX_COORDINATOR_ADDRESS')
    place: list[Any] = [address, launch.num_processes, launch.process_id]
    announced, device_ids = _announces_processes(), None
    if not launch.distributed or (place == [None] * 3 and not announced):
        return None
    if announced and None in place:
        detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
        try:
            *place, device_ids = detect(
                place[0], place[1], place[2], None, None, int(launch.start_seconds)
            )
        except Exception as error:  # of requests, kubernetes, sockets or int
            raise UserError(f'cluster: {type(error).__name__}: {error}') from error
    require(
        None not in place,
        'cluster: incomplete; expected a start by srun, by mpirun, on TPU hosts, or in Kubernetes '
        "with pip install 'jax[k8s]'; else give --coordinator_address, --num_processes and "
        '--process_id, or --distributed=off to run one process alone',
    )
    address, count, index = place
    require(0 <= index < count, f'process_id={index}: expected 0 to {count - 1}')
    return Cluster(address, count, index, None if _has_own_devices() else device_ids)


def _announces_processes() -> bool:
    """Returns whether variables of a cluster say that there are several processes."""
    env = os.environ
    counts = 'SLURM_NTASKS', 'OMPI_COMM_WORLD_SIZE', 'MEGASCALE_NUM_SLICES'
    tpu_hosts = env.get('TPU_PROCESS_ADDRESSES') or env.get('TPU_WORKER_HOSTNAMES') or ''
    return (
        any(env.get(name, '1') != '1' for name in counts)
        or ',' in tpu_hosts
        or {'KUBERNETES_SERVICE_HOST', 'JOB_COMPLETION_INDEX'} <= {*env}
        or clusters.GceTpuCluster.is_env_present()
    )


def _has_own_devices() -> bool:
    """Returns whether this process is alone on its host, or sees one device only.

    jax gives one device to each process of Slurm and Open MPI, and leaves the others idle.
    """
    names = 'SLURM_STEP_TASKS_PER_NODE', 'SLURM_TASKS_PER_NODE', 'OMPI_COMM_WORLD_LOCAL_SIZE'
    tasks = next((os.environ[name] for name in names if name in os.environ), '')
    visible = os.environ.get('CUDA_VISIBLE_DEVICES', ',')
    return re.match(r'1(\(|$)', tasks) is not None or ',' not in visible


def connect(cluster: Cluster, launch: Launch) -> None:
    """Connects this process to the others.

    Process 0 listens at the coordinator's address only, and CPU devices at the address of their
    host in the network that leads there: on loopback if the coordinator's address is.

    Raises:
      UserError: If process 0 cannot listen there.
    """
    address = cluster.coordinator_address
    host, _, port = address.rpartition(':')
    try:
        found = socket.getaddrinfo(host.strip('[]'), int(port), type=socket.SOCK_STREAM)
        family, *_, place = found[0]
        if cluster.process_id == 0:
            socket.create_server((place[0], int(port)), family=family).close()
        with socket.socket(family, socket.SOCK_DGRAM) as unsent:  # UDP connects without a packet
            unsent.connect(place)
            own_address = unsent.getsockname()[0]
    except (OSError, ValueError, OverflowError) as error:
        expected = 'expected HOST:PORT of process 0, a free port'
        raise UserError(f'coordinator_address={address}: {error}; {expected}') from error
    jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM
    jax.distributed.initialize(
        **cluster._asdict(),
        cluster_detection_method='deactivate',
        coordinator_bind_address=os.environ.get('JAX_COORDINATOR_BIND_ADDRESS', address),
        initialization_timeout=int(launch.start_seconds),
        heartbeat_timeout_seconds=int(launch.heartbeat_seconds),
        shutdown_timeout_seconds=int(launch.heartbeat_seconds),
    )
    if jax.config.values['jax_cpu_collectives_implementation'] == 'gloo':
        client = distributed.global_state.client
        gloo = _jax.make_gloo_tcp_collectives(client, hostname=own_address)
        xla_bridge.register_backend_factory('cpu', lambda: xla_bridge.make_cpu_client(gloo))
