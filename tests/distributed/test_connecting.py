"""Where a process finds its place: environments of schedulers, and addresses that are wrong."""

import ctypes
import socket

import jax
import pytest
from jax._src import distributed, xla_bridge
from jaxlib import _jax

from tests.hosts import free_port
from vit_jax.distributed import processes
from vit_jax.distributed.processes import Launch

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
GIVEN = {'coordinator_address': '127.0.0.1:4000', 'num_processes': 4, 'process_id': 3}
ALL = 'all'  # devices of the host


class Connecting(BaseException):
    """The coordinator's address and the number of this process, where it would connect."""


@pytest.fixture
def place(monkeypatch):
    """Address, number and devices of this process in an environment; None if it is alone."""
    state, listening = distributed.State(), []
    monkeypatch.setattr(distributed, 'global_state', state)
    monkeypatch.setattr(xla_bridge, 'backends_are_initialized', lambda: False)
    monkeypatch.setattr(ctypes.pythonapi, 'PyOS_setsig', lambda *_: None)

    def listen(address, count, **_):
        listening.append(address)

    def connecting(address, index, **_):
        raise Connecting(*listening or [address], index)

    monkeypatch.setattr(_jax, 'get_distributed_runtime_service', listen)
    monkeypatch.setattr(_jax, 'get_distributed_runtime_client', connecting)

    def connected(env, **launch):
        listening.clear()
        state.service = None
        jax.config.update('jax_cuda_visible_devices', ALL)
        with monkeypatch.context() as patch:
            for name in {**SLURM, **OPEN_MPI}:
                patch.delenv(name, raising=False)
            for name, value in env.items():
                patch.setenv(name, value)
            try:
                processes.connect(Launch(**launch))
            except Connecting as stopped:
                return *stopped.args, jax.config.values['jax_cuda_visible_devices']
            finally:
                jax.config.update('jax_cuda_visible_devices', ALL)

    return connected


def test_slurm_and_open_mpi_give_every_process_its_place_and_its_device(place):
    address, *own = place(SLURM)
    assert address.startswith('gpu07:') and own == [9, '1']
    address, *own = place(OPEN_MPI)
    assert address.startswith('10.96.0.1:') and own == [3, '1']


@pytest.mark.parametrize(
    'env',
    [
        SLURM | {'SLURM_STEP_TASKS_PER_NODE': '1(x16)'},
        SLURM | {'CUDA_VISIBLE_DEVICES': '3'},  # bound by srun
        OPEN_MPI | {'OMPI_COMM_WORLD_LOCAL_SIZE': '1'},
    ],
)
def test_a_process_that_is_alone_on_its_host_has_all_its_devices(place, env):
    assert place(env)[2] == ALL


def test_chosen_devices_are_taken(place):
    assert place(SLURM | {'JAX_LOCAL_DEVICE_IDS': '2,3'})[2] == '2,3'


def test_open_mpi_5_needs_the_flags(place):
    env = {name: value for name, value in OPEN_MPI.items() if 'orte' not in name}
    with pytest.raises(ValueError, match='^cluster: .*--coordinator_address'):
        place(env)
    assert place(env, **GIVEN) == ('127.0.0.1:4000', 3, ALL)


@pytest.mark.parametrize('absent', ['SLURM_STEP_NODELIST', 'SLURM_PROCID', 'SLURM_LOCALID'])
def test_an_incomplete_cluster_never_becomes_one_process(place, absent):
    env = {name: value for name, value in SLURM.items() if name != absent}
    with pytest.raises(ValueError, match='^cluster: .*srun'):
        place(env)
    assert place(env, distributed=False) is None


@pytest.mark.parametrize('count, why', [('many', 'invalid literal'), ('4', 'process_id=9')])
def test_variables_of_another_job_are_an_error(place, count, why):
    with pytest.raises(ValueError, match=f'^cluster: .*{why}'):
        place(SLURM | {'SLURM_NTASKS': count})


@pytest.mark.filterwarnings('ignore:.*kubernetes')
def test_a_tpu_slice_and_an_indexed_job_are_recognized(place):
    with pytest.raises(ValueError, match='^cluster: .*TPU'):
        place({'TPU_WORKER_HOSTNAMES': 'a,b,c,d', 'TPU_WORKER_ID': '1'})  # there is no TPU here
    job = {'KUBERNETES_SERVICE_HOST': '10.0.0.1', 'JOB_COMPLETION_INDEX': '2'}
    with pytest.raises(ValueError, match='^cluster: .*jax.k8s'):
        place(job)
    assert place(job, **GIVEN)[1] == 3


@pytest.mark.parametrize(
    'env',
    [
        {},
        {'SLURM_JOB_ID': '7', 'SLURM_NTASKS': '1'},
        {'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_WORKER_ID': '0'},
        {'KUBERNETES_SERVICE_HOST': '10.0.0.1'},
    ],
)
def test_alone_is_alone(place, env):
    assert place(env) is None


def test_flags_are_checked(place):
    with pytest.raises(ValueError, match='--coordinator_address'):
        place({}, num_processes=2)
    with pytest.raises(ValueError, match='process_id=4'):
        place({}, **GIVEN | {'process_id': 4})


@pytest.mark.parametrize('host', ['127.0.0.1', 'localhost'])
def test_the_coordinator_listens_at_its_address_and_nowhere_else(place, host):
    address = f'{host}:{free_port()}'
    assert place({}, **GIVEN | {'coordinator_address': address, 'process_id': 0})[0] == address


@pytest.mark.parametrize('env', [SLURM, OPEN_MPI])
def test_so_it_does_at_a_detected_address(place, env):
    first = {'SLURM_PROCID': '0', 'SLURM_STEP_NODELIST': 'localhost', 'OMPI_COMM_WORLD_RANK': '0'}
    first['OMPI_MCA_orte_hnp_uri'] = OPEN_MPI['OMPI_MCA_orte_hnp_uri'].replace('10.96', '127.0')
    port = free_port()
    first['JAX_COORDINATOR_PORT'] = str(port)
    address, *_ = place(env | {name: first[name] for name in first if name in env or 'JAX' in name})
    assert address in (f'localhost:{port}', f'127.0.0.1:{port}')


def test_a_name_that_other_hosts_resolve_differently_does_not_bind_to_loopback(place, monkeypatch):
    """Debian's /etc/hosts has 127.0.1.1 for the host's own name."""
    resolve = socket.getaddrinfo

    def resolve_own(host, *arguments, **more):
        return resolve('127.0.1.1' if host == 'gpu07' else host, *arguments, **more)

    monkeypatch.setattr(socket, 'getaddrinfo', resolve_own)
    port = str(free_port())
    address, *_ = place(SLURM | {'SLURM_PROCID': '0', 'JAX_COORDINATOR_PORT': port})
    assert address == f'[::]:{port}'
    chosen = {'JAX_COORDINATOR_BIND_ADDRESS': f'127.0.0.1:{port}'}
    address, *_ = place(SLURM | chosen | {'SLURM_PROCID': '0', 'JAX_COORDINATOR_PORT': port})
    assert address == f'127.0.0.1:{port}'


def test_a_wrong_address_is_reported_before_jax_crashes(place):
    with socket.create_server(('127.0.0.1', 0)) as taken:
        address = f'127.0.0.1:{taken.getsockname()[1]}'
        with pytest.raises(
            ValueError, match=f'{address}: .*already in use.*; expected .*free port'
        ):
            place({}, coordinator_address=address, num_processes=2, process_id=0)
        place({}, coordinator_address=address, num_processes=2, process_id=1)
        env = {'JAX_COORDINATOR_BIND_ADDRESS': address}
        with pytest.raises(ValueError, match='already in use'):
            place(
                env, coordinator_address=f'127.0.0.1:{free_port()}', num_processes=2, process_id=0
            )
    for address in 'a', 'a:x', '127.0.0.1:99999':
        for index in 0, 1:
            with pytest.raises(ValueError, match=f'coordinator_address={address}: .*HOST:PORT'):
                place({}, coordinator_address=address, num_processes=2, process_id=index)
    with pytest.raises(ValueError, match='coordinator_address=192.0.2.1:4000: .*HOST:PORT'):
        place({}, coordinator_address='192.0.2.1:4000', num_processes=2, process_id=0)


@pytest.mark.parametrize('index', [0, 1])
def test_a_name_that_is_not_known_yet_is_waited_for(place, index):
    address = f'no.such.host.invalid:{free_port()}'
    found = place({}, coordinator_address=address, num_processes=2, process_id=index)
    assert found[0] == (address if index else address.replace('no.such.host.invalid', '[::]'))
