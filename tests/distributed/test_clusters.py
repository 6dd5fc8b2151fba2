"""Where a process finds its place: environments of schedulers, and addresses that are wrong."""

import socket

import jax
import pytest

from tests.hosts import free_port
from vit_jax.distributed import clusters
from vit_jax.distributed.clusters import Cluster, Launch

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


@pytest.fixture
def find(monkeypatch):
    """`clusters.detect_cluster` in an environment."""

    def found(env, **launch):
        with monkeypatch.context() as patch:
            for name in {**SLURM, **OPEN_MPI}:
                patch.delenv(name, raising=False)
            for name, value in env.items():
                patch.setenv(name, value)
            return clusters.detect_cluster(Launch(**launch))

    return found


def test_slurm_and_open_mpi_give_every_process_its_place_and_its_device(find):
    address, *place = find(SLURM)
    assert address.startswith('gpu07:') and place == [16, 9, [1]]
    address, *place = find(OPEN_MPI)
    assert address.startswith('10.96.0.1:') and place == [4, 3, [1]]


def test_a_process_that_is_alone_on_its_host_has_all_its_devices(find):
    assert find(SLURM | {'SLURM_STEP_TASKS_PER_NODE': '1(x16)'}).local_device_ids is None
    assert find(SLURM | {'CUDA_VISIBLE_DEVICES': '3'}).local_device_ids is None  # bound by srun
    assert find(OPEN_MPI | {'OMPI_COMM_WORLD_LOCAL_SIZE': '1'}).local_device_ids is None


def test_open_mpi_5_needs_the_flags(find):
    env = {name: value for name, value in OPEN_MPI.items() if 'orte' not in name}
    with pytest.raises(ValueError, match='incomplete.*--coordinator_address'):
        find(env)
    place = {'coordinator_address': '10.0.0.1:4000', 'num_processes': 4, 'process_id': 3}
    assert find(env, **place) == Cluster('10.0.0.1:4000', 4, 3, None)


@pytest.mark.parametrize('absent', ['SLURM_STEP_NODELIST', 'SLURM_PROCID', 'SLURM_LOCALID'])
def test_an_incomplete_cluster_never_becomes_one_process(find, absent):
    env = {name: value for name, value in SLURM.items() if name != absent}
    with pytest.raises(ValueError, match='incomplete; .*srun'):
        find(env)
    assert find(env, distributed=False) is None


def test_variables_of_another_job_are_an_error(find):
    with pytest.raises(ValueError, match='invalid literal'):
        find(SLURM | {'SLURM_NTASKS': 'many'})
    with pytest.raises(ValueError, match='process_id=9: expected 0 to 3'):
        find(SLURM | {'SLURM_NTASKS': '4'})


def test_a_tpu_slice_and_an_indexed_job_are_recognized(find):
    with pytest.raises(ValueError, match='incomplete; .*TPU'):
        find({'TPU_WORKER_HOSTNAMES': 'a,b,c,d', 'TPU_WORKER_ID': '1'})  # there is no TPU here
    job = {'KUBERNETES_SERVICE_HOST': '10.0.0.1', 'JOB_COMPLETION_INDEX': '2'}
    with pytest.warns(UserWarning, match='kubernetes'):
        with pytest.raises(ValueError, match='incomplete; .*jax.k8s'):
            find(job)
    place = {'coordinator_address': '10.0.0.1:4000', 'num_processes': 4, 'process_id': 2}
    assert find(job, **place) == Cluster('10.0.0.1:4000', 4, 2, None)


def test_alone_is_alone(find):
    assert find({}) is None
    assert find({'SLURM_JOB_ID': '7', 'SLURM_NTASKS': '1'}) is None
    assert find({'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_WORKER_ID': '0'}) is None
    assert find({'KUBERNETES_SERVICE_HOST': '10.0.0.1'}) is None


def test_flags_are_checked(find):
    with pytest.raises(ValueError, match='--coordinator_address'):
        find({}, num_processes=2)
    with pytest.raises(ValueError, match='expected 0 to 1'):
        find({}, coordinator_address='a:1', num_processes=2, process_id=2)


@pytest.fixture
def bound(monkeypatch):
    """The address that process 0 would listen at, where it would connect."""

    def initialized(**options):
        raise InterruptedError(options['coordinator_bind_address'])

    def connect(address, process_id=0):
        with pytest.raises(InterruptedError) as stopped:
            clusters.connect(Cluster(address, 2, process_id, None), Launch())
        return str(stopped.value)

    monkeypatch.setattr(jax.distributed, 'initialize', initialized)
    return connect


def test_the_coordinator_listens_at_its_address_and_nowhere_else(bound):
    for host in '127.0.0.1', 'localhost':
        address = f'{host}:{free_port()}'
        assert bound(address) == address


def test_a_wrong_address_is_reported_before_jax_crashes(bound):
    with socket.create_server(('127.0.0.1', 0)) as taken:
        address = f'127.0.0.1:{taken.getsockname()[1]}'
        with pytest.raises(
            ValueError, match=f'{address}: .*already in use.*; expected .* free port'
        ):
            bound(address)
        assert bound(address, process_id=1) == address
    for address in 'a', 'a:x', '192.0.2.1:4000', 'no.such.host.invalid:4000', '127.0.0.1:99999':
        with pytest.raises(
            ValueError, match=f'coordinator_address={address}: .*expected HOST:PORT'
        ):
            bound(address)
