"""Which processes form a job, and at which address: read from the environment, and checked.

jax aborts the process where an address or a port is wrong: here an error says so before.
"""

import contextlib
import dataclasses
import errno
import ipaddress
import os
import socket
import time
from typing import Any, NamedTuple

import jax

# Not public: `jax.distributed.initialize` reads the environment and acts on it in one call.
from jax._src import clusters as of_jax

from vit_jax.base import Record, UserError, require, require_between


@dataclasses.dataclass(kw_only=True)
class Launch(Record):
    """How a program is started. What is None is read from the environment."""

    distributed: bool = True  # False: one process, whatever the environment says
    coordinator_address: str | None = None  # host:port of process 0
    num_processes: int | None = None
    process_id: int | None = None
    start_seconds: float = 300.0  # to wait for the other processes
    heartbeat_seconds: float = 100.0  # without a sign of life, after which a process is dead
    watchdog_seconds: float = 1800.0  # without a step, an evaluated batch or another sign of work

    def check(self) -> None:
        require_between(self, 'start_seconds', 'heartbeat_seconds', 'watchdog_seconds', low=0.1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """One process among those of a job."""

    kind: str  # 'Slurm', ...
    coordinator_address: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None  # None: all devices of the host
    one_host: bool = True  # can all processes be on this host, as far as is known?

    def __post_init__(self) -> None:
        index, count, address = self.process_id, self.num_processes, self.coordinator_address
        expected = f'expected 0 to {count - 1}, of {count} processes'
        require(0 <= index < count, f'process_id={index}: {expected}')
        host, _, port = address.rpartition(':')
        usable = host != '' and port.isdecimal() and 0 < int(port) < 65536
        require(usable, f'coordinator_address={address}: expected HOST:PORT of process 0')


class _Kind(NamedTuple):
    """A kind of cluster."""

    name: str
    readers: tuple[type[of_jax.ClusterEnv], ...]  # jax's, of its environment variables
    advice: str  # what helps where they are incomplete
    needed: tuple[str, ...] = ()  # variables, besides those by which it is recognised


_SLURM = _Kind(
    'Slurm',
    (of_jax.SlurmCluster,),
    'start every process with srun',
    ('SLURM_STEP_NODELIST', 'SLURM_NTASKS', 'SLURM_PROCID', 'SLURM_LOCALID'),
)
_OPEN_MPI = _Kind(
    'Open MPI',
    (of_jax.OmpiCluster,),
    'Open MPI 5 does not say where process 0 is: add --coordinator_address=HOST:PORT',
    ('OMPI_MCA_orte_hnp_uri', 'OMPI_COMM_WORLD_RANK'),
)
_KUBERNETES = _Kind(
    'Kubernetes',
    (of_jax.K8sCluster,),
    "an indexed Job needs `pip install 'jax[k8s]'` and permission to read its pods; or give "
    '--coordinator_address, --num_processes and --process_id=$JOB_COMPLETION_INDEX',
)
_TPU = _Kind(
    'TPU',
    (of_jax.GceTpuCluster, of_jax.GkeTpuCluster),
    "this needs a TPU and `pip install 'vit_jax[tpu]'`",
    ('TPU_WORKER_HOSTNAMES', 'TPU_WORKER_ID'),
)


def _cluster_kind() -> _Kind | None:
    """The kind of cluster that this process belongs to; None where it is alone."""

    def count(name: str) -> int:
        return int(env[name]) if env.get(name, '').isdecimal() else 1

    env = os.environ
    hosts = env.get('TPU_PROCESS_ADDRESSES') or env.get('TPU_WORKER_HOSTNAMES') or ''
    on_gce = of_jax.GceTpuCluster.is_env_present()  # its metadata server knows the other hosts
    if len(hosts.split(',')) > 1 or count('MEGASCALE_NUM_SLICES') > 1 or on_gce:
        return _TPU
    if count('OMPI_COMM_WORLD_SIZE') > 1:
        return _OPEN_MPI
    if 'SLURM_JOB_ID' in env and max(count('SLURM_NTASKS'), count('SLURM_STEP_NUM_TASKS')) > 1:
        return _SLURM
    if 'KUBERNETES_SERVICE_HOST' in env and 'JOB_COMPLETION_INDEX' in env:
        return _KUBERNETES
    return None


def detect_cluster(launch: Launch) -> Cluster | None:
    """The place of this process in its job; None where it runs alone.

    Raises UserError where there is a cluster, but its description is incomplete: going on alone
    would be many runs that write the same directory.
    """
    if not launch.distributed:
        return None
    address = launch.coordinator_address or os.environ.get('JAX_COORDINATOR_ADDRESS')
    asked: dict[str, Any] = {'coordinator_address': address}
    asked |= {name: getattr(launch, name) for name in ('num_processes', 'process_id')}
    kind = _cluster_kind()
    missing = [f'--{name}' for name, value in asked.items() if value is None]
    if kind is None and len(missing) == len(asked):
        return None
    if kind is None:
        why = 'no cluster was recognised, so all three are needed'
        require(not missing, f'{", ".join(missing)} missing: {why}')
        return Cluster(kind='given', **asked)
    found: dict[str, Any] = {}
    if kind is _OPEN_MPI and address:  # every version gives the rest
        found['num_processes'] = int(os.environ['OMPI_COMM_WORLD_SIZE'])
        found['process_id'] = int(os.environ['OMPI_COMM_WORLD_RANK'])
    elif missing:
        *place, local = _by_jax(kind, launch.start_seconds)
        found = dict(zip(asked, place, strict=True), local_device_ids=_own_devices(local))
    found |= {name: value for name, value in asked.items() if value is not None}
    return Cluster(kind=kind.name, one_host=_one_host(kind), **found)


def _by_jax(kind: _Kind, seconds: float) -> tuple[Any, ...]:
    """Address, count, id and device of this process, as jax reads them."""
    present = next((reader for reader in kind.readers if reader.is_env_present()), None)
    incomplete = f'{kind.name} was recognised, but is incomplete'
    off = '--distributed=off runs one process alone'
    if present is None:
        absent = [name for name in kind.needed if name not in os.environ]
        what = f': {", ".join(absent)} not set' if absent else ''
        raise UserError(f'{incomplete}{what}; {kind.advice}; {off}')
    try:
        return of_jax.ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, present.name, int(seconds)
        )
    except Exception as error:  # requests, kubernetes, sockets, int: whatever they raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f'{incomplete}: {reason}; {kind.advice}; {off}') from error


def _own_devices(local: list[int] | None) -> tuple[int, ...] | None:
    """The devices of this process: one where its host has several processes, else None for all.

    jax would give a process that is alone on its host one device, and leave the others idle.
    """
    env = os.environ
    tasks = env.get('SLURM_STEP_TASKS_PER_NODE') or env.get('SLURM_TASKS_PER_NODE') or ''
    alone = tasks.partition('(')[0] == '1' or env.get('OMPI_COMM_WORLD_LOCAL_SIZE') == '1'
    bound = len(env.get('CUDA_VISIBLE_DEVICES', ',').split(',')) == 1
    return None if alone or bound or local is None else tuple(local)


def _one_host(kind: _Kind) -> bool:
    env = os.environ
    if kind is _SLURM:
        return env.get('SLURM_STEP_NUM_NODES', env.get('SLURM_JOB_NUM_NODES', '1')) == '1'
    if kind is _OPEN_MPI:
        return env.get('OMPI_COMM_WORLD_LOCAL_SIZE') == env.get('OMPI_COMM_WORLD_SIZE')
    return False


def wait_for_coordinator(cluster: Cluster, seconds: float) -> str:
    """The address that process 0 binds, once the coordinator's address is known to work.

    Process 0 tries whether it can listen there; the others wait, up to `seconds`, until something
    does. Raises UserError that says what is wrong.
    """
    address, here = cluster.coordinator_address, socket.gethostname()
    ip, port = _resolved(address)
    if ipaddress.ip_address(ip).is_loopback and not cluster.one_host:
        raise UserError(
            f'coordinator {address} is {ip} on {here}, which loops back to this host: the others '
            f'cannot come. Mend the name in /etc/hosts, or give --coordinator_address=IP:PORT'
        )
    if cluster.process_id == 0:
        _check_free(ip, port, address)
    else:
        _wait_for(ip, port, address, seconds)
    bind = f'[{ip}]:{port}' if ':' in ip else f'{ip}:{port}'
    return os.environ.get('JAX_COORDINATOR_BIND_ADDRESS', bind)


def address_here(cluster: Cluster) -> str:
    """The address of this host on the network that leads to the coordinator."""
    ip, port = _resolved(cluster.coordinator_address)
    with socket.socket(_family(ip), socket.SOCK_DGRAM) as unsent:  # UDP connects without a word
        unsent.connect((ip, port))
        return str(unsent.getsockname()[0])


def _resolved(address: str) -> tuple[str, int]:
    """The IP address and the port of HOST:PORT."""
    host, _, port = address.rpartition(':')
    host = host.strip('[]')
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        why = f'{host} cannot be resolved on {socket.gethostname()}: {error.strerror}'
        raise UserError(f'coordinator_address={address}: {why}') from error
    return str(found[0][4][0]), int(port)


def _family(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ':' in ip else socket.AF_INET


def _check_free(ip: str, port: int, address: str) -> None:
    try:
        with socket.socket(
            _family(ip)
        ) as listener:  # which does not listen, so that nobody is answered
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((ip, port))
    except OSError as error:
        why = {
            errno.EADDRINUSE: 'is taken, perhaps by another run: choose another port',
            errno.EADDRNOTAVAIL: f'is not an address of {socket.gethostname()}, where process 0 is',
        }.get(error.errno or 0, f'cannot be listened at: {error.strerror}')
        raise UserError(f'coordinator_address={address}: {why}') from error


def _wait_for(ip: str, port: int, address: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((ip, port), timeout=1):
            return
        time.sleep(0.1)
    why = f'nothing answers there after {seconds:g} s; is process 0 started, and the port open?'
    raise UserError(f'coordinator_address={address}: {why}')


def require_devices() -> None:
    """Raises UserError where JAX_PLATFORMS names devices that jax cannot use."""
    if not (platforms := jax.config.values['jax_platforms']):
        return
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # of CUDA's plugin without a driver
        reason = str(error).partition(' (set JAX_')[0]
        known = 'list of known backends' in reason  # in which jax looks for `gpu` as rocm
        why = f' ({reason})' if reason and not known else ''
        advice = 'python -m vit_jax.doctor says what is missing, and JAX_PLATFORMS=cpu uses the CPU'
        raise UserError(
            f'JAX_PLATFORMS={platforms}: jax finds no such device{why}; {advice}'
        ) from error
