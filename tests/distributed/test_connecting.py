"""Where a process finds its place: environments of schedulers, and addresses that are wrong.

The variables of Slurm 22.05 and Open MPI 4.1 and 5.0 come from real jobs, the variables of GKE from
its documentation.
"""

import ctypes
import signal
import socket

import jax
import pytest
from jax._src.clusters import cloud_tpu_cluster, cluster

from tests.hosts import free_port
from vit_jax.base import UserError
from vit_jax.distributed import processes
from vit_jax.distributed.processes import LaunchConfig

SLURM = {
    'SLURM_JOB_ID': '4096',
    'SLURM_STEP_NODELIST': 'gpu[07-08]',
    'SLURM_NTASKS': '16',
    'SLURM_PROCID': '9',
    'SLURM_LOCALID': '1',
    'SLURM_STEP_TASKS_PER_NODE': '8(x2)',
    'CUDA_VISIBLE_DEVICES': '0,1,2,3,4,5,6,7',
}
OPEN_MPI = {
    'OMPI_MCA_orte_hnp_uri': '1531576320.0;tcp://10.96.0.1,10.148.0.1:34911',
    'OMPI_COMM_WORLD_SIZE': '4',
    'OMPI_COMM_WORLD_RANK': '3',
    'OMPI_COMM_WORLD_LOCAL_RANK': '1',
    'OMPI_COMM_WORLD_LOCAL_SIZE': '2',
}
OPEN_MPI_5 = {
    'OMPI_COMM_WORLD_SIZE': '2',
    'OMPI_COMM_WORLD_RANK': '1',
    'OMPI_COMM_WORLD_LOCAL_RANK': '1',
    'OMPI_COMM_WORLD_LOCAL_SIZE': '2',
    'OMPI_VERSION': '5.0.11',
    'PMIX_NAMESPACE': 'prterun-vm-27019@1',
    'PMIX_RANK': '1',
    'PMIX_SERVER_URI41': 'prterun-vm-27019@0.0;tcp4://127.0.0.1:58069',
}
KUBERNETES = {'KUBERNETES_SERVICE_HOST': '10.0.0.1', 'JOB_COMPLETION_INDEX': '2'}
GKE = KUBERNETES | {
    'TPU_SKIP_MDS_QUERY': 'true',
    'TPU_WORKER_ID': '2',
    'TPU_WORKER_HOSTNAMES': ','.join(f'vit-slice-1-{n}.vit' for n in range(4)),
}
SLICES = GKE | {
    'MEGASCALE_NUM_SLICES': '2',
    'MEGASCALE_SLICE_ID': '1',
    'MEGASCALE_COORDINATOR_ADDRESS': 'vit-slice-0-0.vit:8080',
}
GIVEN = {'coordinator_address': '127.0.0.1:4000', 'num_processes': 4, 'process_id': 3}
ALL = None  # devices of the host
HANDLER = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(('PyOS_getsig', ctypes.pythonapi))


class Connecting(BaseException):
    """What jax is told: address, number of this process, its devices, where it listens."""


@pytest.fixture
def place(monkeypatch):
    """The arguments of Connecting for a process in an environment; None if it is alone."""

    def initialize(address, _, index, *, local_device_ids, coordinator_bind_address, **more):
        raise Connecting(address, index, local_device_ids, coordinator_bind_address)

    monkeypatch.setattr(jax.distributed, 'initialize', initialize)
    handler = HANDLER(signal.SIGABRT)

    def connected(env, **launch):
        with monkeypatch.context() as patch:
            is_tpu = 'TPU_SKIP_MDS_QUERY' in env
            patch.setattr(cloud_tpu_cluster, 'running_in_cloud_tpu_vm', is_tpu)
            patch.setattr(cluster, 'running_in_cloud_tpu_vm', is_tpu)
            patch.setattr(cloud_tpu_cluster.socket, 'gethostbyname', lambda name: '10.0.0.2')
            patch.setattr(cloud_tpu_cluster, 'get_metadata', lambda key: ('not found', 404))
            for name in {**SLURM, **OPEN_MPI}:
                patch.delenv(name, raising=False)
            for name, value in env.items():
                patch.setenv(name, value)
            try:
                processes.connect(LaunchConfig(**launch))
            except Connecting as stopped:
                return stopped.args

    yield connected
    ctypes.pythonapi.PyOS_setsig(signal.SIGABRT, ctypes.c_void_p(handler))


@pytest.mark.parametrize(
    'env, host, index, devices',
    [
        (SLURM, 'gpu07', 9, [1]),
        (SLURM | {'SLURM_STEP_TASKS_PER_NODE': '1(x16)'}, 'gpu07', 9, ALL),
        (SLURM | {'CUDA_VISIBLE_DEVICES': '3'}, 'gpu07', 9, ALL),  # bound by srun
        (OPEN_MPI, '10.96.0.1', 3, [1]),
        (OPEN_MPI | {'OMPI_COMM_WORLD_LOCAL_SIZE': '1'}, '10.96.0.1', 3, ALL),
        (GKE, 'vit-slice-1-0.vit', 2, ALL),
        (GKE | {'TPU_PROCESS_ADDRESSES': 'a:8476,b:8476,c:8476'}, 'a', 2, ALL),
        (SLICES, 'vit-slice-0-0.vit', 6, ALL),
    ],
)
def test_a_scheduler_gives_each_process_its_place_and_its_devices(place, env, host, index, devices):
    """A process that is alone on its host has all devices of the host."""
    address, *own = place(env)
    assert address.startswith(f'{host}:') and own == [index, devices, None]
    assert place(env, distributed=False) is None


@pytest.mark.filterwarnings('ignore:.*kubernetes')
@pytest.mark.parametrize(
    'env, name',
    [
        (SLURM | {'SLURM_NTASKS': 'many'}, 'many'),
        (SLURM | {'SLURM_NTASKS': '4'}, 'process_id=9'),  # variables of another job
        ({'SLURM_NTASKS': '16', 'SLURM_JOB_ID': '4096'}, 'srun'),
        (  # a batch script without srun
            {'SLURM_NTASKS': '2', 'SLURM_JOB_ID': '1', 'SLURM_PROCID': '0', 'SLURM_LOCALID': '0'},
            'srun',
        ),
        (OPEN_MPI_5, '--coordinator_address'),
        ({'TPU_WORKER_HOSTNAMES': 'a,b,c,d', 'TPU_WORKER_ID': '1'}, 'TPU'),  # there is no TPU here
        (KUBERNETES, 'jax.k8s'),
        (GKE | {'TPU_WORKER_ID': '4'}, 'TPU_WORKER_ID=4; expected a number below 4'),
        ({name: value for name, value in GKE.items() if name != 'TPU_WORKER_ID'}, 'TPU_WORKER_ID='),
        (SLICES | {'TPU_WORKER_ID': '5'}, 'TPU_WORKER_ID=5'),  # else the place of another process
        (SLICES | {'MEGASCALE_SLICE_ID': '2'}, 'MEGASCALE_SLICE_ID=2; expected a number below 2'),
        (GKE | {'MEGASCALE_NUM_SLICES': '2'}, 'MEGASCALE_COORDINATOR_ADDRESS is not set'),
        (SLICES | {'MEGASCALE_SLICE_ID': ''}, 'MEGASCALE_SLICE_ID='),
        (SLICES | {'MEGASCALE_NUM_SLICES': 'two'}, 'two'),
    ],
)
def test_an_incomplete_cluster_never_becomes_one_process(place, env, name):
    with pytest.raises(UserError, match=f'^cluster: .*{name}'):
        place(env)
    assert place(env, **GIVEN)[:3] == ('127.0.0.1:4000', 3, ALL)
    assert place(env, distributed=False) is None


@pytest.mark.parametrize(
    'env',
    [
        {},
        {'SLURM_JOB_ID': '7', 'SLURM_NTASKS': '1'},
        OPEN_MPI_5 | {'OMPI_COMM_WORLD_SIZE': '1'},
        {'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_WORKER_ID': '0'},
        {'KUBERNETES_SERVICE_HOST': '10.0.0.1'},
    ],
)
def test_alone_is_alone(place, env):
    assert place(env) is None


def test_the_coordinator_listens_on_loopback_only_if_its_address_is_there(place):
    """Otherwise jax listens on all networks, or at JAX_COORDINATOR_BIND_ADDRESS."""
    for host, there in ('127.0.0.1', True), ('localhost', True), ('no.such.host.invalid', False):
        address = f'{host}:{free_port()}'
        found = place({}, coordinator_address=address, num_processes=2, process_id=0)
        assert found[3] == (address if there else None)


def test_wrong_flags_are_rejected_before_jax_crashes(place):
    with pytest.raises(UserError, match='--coordinator_address'):
        place({}, num_processes=2)
    with pytest.raises(UserError, match='process_id=4'):
        place({}, **GIVEN | {'process_id': 4})
    for address in 'a', 'a:x':
        with pytest.raises(UserError, match=f'coordinator_address={address}: '):
            place({}, coordinator_address=address, num_processes=2, process_id=1)
    with socket.create_server(('127.0.0.1', 0)) as server:
        address = f'127.0.0.1:{server.getsockname()[1]}'
        with pytest.raises(UserError, match=f'coordinator_address={address}'):
            place({}, coordinator_address=address, num_processes=2, process_id=0)
        assert place({}, coordinator_address=address, num_processes=2, process_id=1)[1] == 1
