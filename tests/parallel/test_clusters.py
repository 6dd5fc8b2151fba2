"""Where a process finds its place: environments of schedulers, addresses that are wrong."""

import socket

import pytest

from tests.hosts import free_port
from vit_jax.parallel import clusters
from vit_jax.parallel.clusters import Cluster, Launch

SLURM = {
    'SLURM_JOB_ID': '4096',
    'SLURM_STEP_NODELIST': 'gpu[07-08]',
    'SLURM_NTASKS': '16',
    'SLURM_PROCID': '9',
    'SLURM_LOCALID': '1',
    'SLURM_STEP_NUM_NODES': '2',
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


def test_slurm_gives_every_process_its_place_and_its_device(find):
    found = find(SLURM)
    assert found.kind == 'Slurm' and (found.num_processes, found.process_id) == (16, 9)
    assert found.coordinator_address.startswith('gpu07:') and not found.one_host
    assert found.local_device_ids == (1,)


def test_a_process_that_is_alone_on_its_host_has_all_its_devices(find):
    assert find(SLURM | {'SLURM_STEP_TASKS_PER_NODE': '1(x16)'}).local_device_ids is None
    assert find(SLURM | {'CUDA_VISIBLE_DEVICES': '3'}).local_device_ids is None  # bound by srun
    assert find(OPEN_MPI | {'OMPI_COMM_WORLD_LOCAL_SIZE': '1'}).local_device_ids is None


def test_open_mpi_gives_every_process_its_place(find):
    found = find(OPEN_MPI)
    assert found.kind == 'Open MPI' and (found.num_processes, found.process_id) == (4, 3)
    assert found.coordinator_address.startswith('10.96.0.1:') and found.local_device_ids == (1,)


def test_open_mpi_5_needs_the_address_alone(find):
    env = {name: value for name, value in OPEN_MPI.items() if 'orte' not in name}
    with pytest.raises(
        ValueError, match='Open MPI was recognised, but is incomplete.*--coordinator_ad'
    ):
        find(env)
    found = find(env, coordinator_address='10.0.0.1:4000')
    assert (found.num_processes, found.process_id) == (4, 3)


@pytest.mark.parametrize('absent', ['SLURM_STEP_NODELIST', 'SLURM_PROCID', 'SLURM_LOCALID'])
def test_an_incomplete_cluster_never_becomes_one_process(find, absent):
    env = {name: value for name, value in SLURM.items() if name != absent}
    with pytest.raises(ValueError, match=f'Slurm .* is incomplete: {absent} not set; .*srun'):
        find(env)
    assert find(env, distributed=False) is None


def test_a_tpu_slice_and_an_indexed_job_are_recognised(find):
    hosts = {'TPU_WORKER_HOSTNAMES': 'a,b,c,d', 'TPU_WORKER_ID': '1'}
    with pytest.raises(ValueError, match='TPU was recognised, but is incomplete'):
        find(hosts)  # as there is no TPU here
    job = {'KUBERNETES_SERVICE_HOST': '10.0.0.1', 'JOB_COMPLETION_INDEX': '2'}
    with pytest.warns(UserWarning, match='kubernetes'):
        with pytest.raises(
            ValueError, match='Kubernetes was recognised, but is incomplete.*jax.k8s'
        ):
            find(job)
    place = {'coordinator_address': '10.0.0.1:4000', 'num_processes': 4, 'process_id': 2}
    assert find(job, **place).kind == 'Kubernetes'


def test_alone_is_alone(find):
    assert find({}) is None
    assert find({'SLURM_JOB_ID': '7', 'SLURM_NTASKS': '1'}) is None
    assert find({'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_WORKER_ID': '0'}) is None
    assert find({'KUBERNETES_SERVICE_HOST': '10.0.0.1'}) is None


@pytest.mark.parametrize(
    'launch, message',
    [
        ({'num_processes': 2}, '--coordinator_address, --process_id missing'),
        ({'coordinator_address': 'a:1', 'num_processes': 2, 'process_id': 2}, 'expected 0 to 1'),
        ({'coordinator_address': 'a', 'num_processes': 2, 'process_id': 0}, 'expected HOST:PORT'),
        ({'coordinator_address': 'a:0', 'num_processes': 2, 'process_id': 0}, 'expected HOST:PORT'),
        ({'coordinator_address': 'a:x', 'num_processes': 2, 'process_id': 0}, 'expected HOST:PORT'),
    ],
)
def test_what_is_told_is_checked(find, launch, message):
    with pytest.raises(ValueError, match=message):
        find({}, **launch)


def place(address, process_id=0, **values):
    return Cluster(
        kind='given',
        coordinator_address=address,
        num_processes=2,
        process_id=process_id,
        **values,
    )


def test_the_coordinator_listens_at_its_address_and_nowhere_else():
    port = free_port()
    assert clusters.wait_for_coordinator(place(f'127.0.0.1:{port}'), 1.0) == f'127.0.0.1:{port}'
    assert clusters.wait_for_coordinator(place(f'localhost:{port}'), 1.0) in (
        f'127.0.0.1:{port}',
        f'[::1]:{port}',
    )


def test_an_address_that_is_wrong_is_said_before_jax_aborts():
    with socket.socket() as taken:
        taken.bind(('127.0.0.1', 0))
        taken.listen()
        address = f'127.0.0.1:{taken.getsockname()[1]}'
        with pytest.raises(ValueError, match=f'{address}: is taken, perhaps by another run'):
            clusters.wait_for_coordinator(place(address), 1.0)
        assert (
            clusters.wait_for_coordinator(place(address, process_id=1), 1.0) == address
        )  # it is answered
    with pytest.raises(ValueError, match='nothing answers there after 0.3 s'):
        clusters.wait_for_coordinator(place(address, process_id=1), 0.3)
    with pytest.raises(ValueError, match='192.0.2.1:4000: is not an address of'):
        clusters.wait_for_coordinator(place('192.0.2.1:4000'), 1.0)
    with pytest.raises(ValueError, match='no.such.host.invalid cannot be resolved'):
        clusters.wait_for_coordinator(place('no.such.host.invalid:4000'), 1.0)
    with pytest.raises(ValueError, match='localhost:4000 is .* loops back'):
        clusters.wait_for_coordinator(place('localhost:4000', one_host=False), 1.0)
