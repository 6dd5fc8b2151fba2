"""The processes of a job: they start together, stop after the same step, and exit together.

jax reads the variables of Slurm, Open MPI, Kubernetes and TPUs, connects the processes, notices
when one is gone, and stores texts under keys. This module rejects an incomplete cluster, where jax
would start one process alone, and a wrong address, where jax would crash. One text is a notice to
all processes: to save and stop, after a signal to any of them, or to exit at once, with the reason
of a process that fails or hangs. Exit code 75 asks a script for a restart; 1 reports an error that
a restart would repeat.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import itertools
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

import jax

# Not public. The processes compare facts before they touch a device, which multihost_utils needs.
# jax's sync point for preemption takes SIGTERM only, also before there is a state to save. jax's
# CPU devices listen at the address of the host's name, whatever network that belongs to.
from jax._src import clusters, distributed, xla_bridge
from jaxlib import _jax

from vit_jax.base import Record, UserError, records, refuse, require, require_between, usable
from vit_jax.base.errors import one_line

REQUEUE = 75  # EX_TEMPFAIL: start the same command again
INTERRUPTED = 130  # the exit code of a shell's command after Ctrl-C
_CODES = {signal.SIGTERM: REQUEUE, signal.SIGHUP: REQUEUE, signal.SIGINT: INTERRUPTED}
_NOTICING = 1.5  # seconds until all processes have read a notice
_UNLIMITED = 10**9  # milliseconds: the watchdog and the heartbeats limit the time
_NOTICE, _TICKS = 'vit_jax_notice', 'vit_jax_ticks'  # a key, and a folder of keys
_CLUSTER = (
    'a start by srun, by mpirun, on TPU hosts, or in Kubernetes with pip install '
    "'jax[k8s]'; else give --coordinator_address, --num_processes and --process_id, or "
    '--distributed=off to run one process alone'
)
_RESUME = 'the same command resumes from the newest checkpoint'
# What gloo, NCCL and jax report if another process is gone or late.
_GONE = r'Gloo .* failed|NCCL .*(remote|network|system) error|^DEADLINE_EXCEEDED|^UNAVAILABLE'
T = TypeVar('T')


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


def connect(launch: Launch) -> None:
    """Connects this process to the others of its job, if it has any, and completes `launch`.

    Process 0 listens at the coordinator's address only, or at JAX_COORDINATOR_BIND_ADDRESS. CPU
    devices listen at the address of their host in the network that leads to the coordinator: on
    loopback, if it is there.

    Raises:
      UserError: If process 0 cannot listen there, or if the environment announces a cluster but
        does not describe it: each process would become a run of its own, in the same directory.
      JaxRuntimeError: If another process is gone or does not come in time; jax may also abort.
    """
    address = launch.coordinator_address or os.environ.get('JAX_COORDINATOR_ADDRESS')
    place = address, launch.num_processes, launch.process_id
    if not launch.distributed or (place == (None, None, None) and not _announces_processes()):
        return
    devices: Any = [] if _has_own_devices() else None
    with usable('cluster', _CLUSTER):  # each of jax's clusters raises its own errors
        if None in place:
            detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
            found = detect(*place, devices, None, int(launch.start_seconds))
            place, devices = found[:3], found[3]
        address, count, index = place
        if address is None or count is None or index is None:
            text = f'address {address}, num_processes={count}, process_id={index}'
            raise UserError(f'cluster: found {text}; expected {_CLUSTER}')
    wrong = f'cluster: process_id={index}: expected 0 to {count - 1} (num_processes={count})'
    require(0 <= index < count, wrong)
    launch.coordinator_address, launch.num_processes, launch.process_id = place
    with usable(f'coordinator_address={address}', 'HOST:PORT of process 0, a free port'):
        own_ip = _find_own_ip(address)
        listens_at = os.environ.get('JAX_COORDINATOR_BIND_ADDRESS', own_ip and address)
        if index == 0:  # jax would crash
            everywhere = f'0.0.0.0:{address.rpartition(":")[2]}'
            family, own = _resolve(listens_at or everywhere)
            socket.create_server(own, family=family).close()
    print(f'connects to process 0 at {address}', file=sys.stderr)
    ctypes.pythonapi.PyOS_setsig(signal.SIGABRT, _on_abort)
    jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM
    jax.distributed.initialize(
        *place,
        local_device_ids=devices or None,  # None: JAX_LOCAL_DEVICE_IDS, or all
        cluster_detection_method='deactivate',
        coordinator_bind_address=listens_at,  # None: on all networks
        initialization_timeout=int(launch.start_seconds),
        heartbeat_timeout_seconds=int(launch.heartbeat_seconds),
    )
    if jax.config.values['jax_cpu_collectives_implementation'] == 'gloo':
        gloo = _jax.make_gloo_tcp_collectives(distributed.global_state.client, hostname=own_ip)
        xla_bridge.register_backend_factory('cpu', lambda: xla_bridge.make_cpu_client(gloo))


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
    """Returns whether this process is alone on its host, or sees chosen devices only.

    jax gives one device to each process of Slurm and Open MPI, and leaves the others idle.
    """
    names = 'SLURM_STEP_TASKS_PER_NODE', 'SLURM_TASKS_PER_NODE', 'OMPI_COMM_WORLD_LOCAL_SIZE'
    tasks = next((os.environ[name] for name in names if name in os.environ), '')
    is_bound = ',' not in os.environ.get('CUDA_VISIBLE_DEVICES', ',')
    is_bound |= 'JAX_LOCAL_DEVICE_IDS' in os.environ
    return is_bound or re.match(r'1(\(|$)', tasks) is not None


def _find_own_ip(address: str) -> str | None:
    """Returns the IP of this host in the network that leads to HOST:PORT; None if it is unknown.

    HOST may be a name that is not known yet, such as that of a pod that has not started. A Debian
    host resolves its own name to 127.0.1.1, which no other host reaches.
    """
    with contextlib.suppress(socket.gaierror):
        family, place = _resolve(address)
        if not place[0].startswith('127.') or re.match(r'127\.|localhost:', address):
            with socket.socket(family, socket.SOCK_DGRAM) as unsent:  # UDP needs no packet
                unsent.connect(place)
                return str(unsent.getsockname()[0])
    return None


def _resolve(address: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    host, _, port = address.rpartition(':')
    found = socket.getaddrinfo(host.strip('[]'), int(port), type=socket.SOCK_STREAM)
    family, *_, place = found[0]
    return family, (str(place[0]), int(port))


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(_: int) -> None:
    """Exits with the probable reason where jax aborts."""
    why = 'is gone, did not come in time, or has the --process_id of this one'
    print(f'jax aborts: another process {why}', file=sys.stderr)
    os._exit(REQUEUE)


class Interrupted(Exception):
    """After a signal all processes are at the same step, to save and exit."""


class Job:
    """This process among those of its job; `Job()` runs alone, as in a library or a test."""

    def __init__(self, launch: Launch | None = None):
        self._launch, self._is_watched = launch or Launch(), launch is not None
        self._has_state, self._ticks, self._stop_code = False, 0, 0
        self._last_signal, self._deadline = 0, math.inf
        self._keys = itertools.count()  # all processes use them in the same order
        self._connected, self._left = threading.Event(), threading.Event()
        self._store: Any = distributed.global_state.client  # of texts; None in a single process

    @property
    def count(self) -> int:
        """The number of processes."""
        return int(distributed.global_state.num_processes)

    @property
    def index(self) -> int:
        """The number of this process."""
        return int(distributed.global_state.process_id)

    def __str__(self) -> str:
        place = self._launch.process_id, self._launch.num_processes  # before it has connected, too
        name = 'process' if None in place else 'process {} of {}'.format(*place)
        return f'{name} ({socket.gethostname()})'

    def require_same(
        self, name: str, facts: dict[str, Any], describe: Callable[[Any], list[str]] | None = None
    ) -> None:
        """Waits for all processes and compares their facts, which are JSON values.

        `describe` returns a line for each difference from its argument, the facts of process 0.
        Raises UserError with these lines.
        """
        text = json.dumps(facts)
        theirs = json.loads(self.from_process_0(name, lambda: text))
        changes = describe(theirs) if describe else records.differences(theirs, json.loads(text))
        if changes:
            refuse([f'{name}: {self} differs from process 0:', *changes], shown=21)
        self.barrier(name)

    def from_process_0(self, name: str, say: Callable[[], str]) -> str:
        """Returns on every process the text that `say` returns on process 0."""
        if self._store is None:
            return say()
        key = f'vit_jax/{name}/{next(self._keys)}'
        if self.index == 0:
            self._store.key_value_set(key, say())
        return str(self._store.blocking_key_value_get(key, _UNLIMITED))

    def barrier(self, name: str) -> None:
        """Waits until all processes are here; the watchdog limits the time."""
        if self._store is not None:
            self._store.wait_at_barrier(f'vit_jax/{name}/{next(self._keys)}', _UNLIMITED)

    def save_on_signals(self) -> None:
        """From now on a signal interrupts a tick; before, with no state to save, it ends all."""
        self._has_state = True
        self.reset_watchdog()

    def tick(self) -> None:
        """Reports that work goes on. All processes call it equally often.

        Raises:
          Interrupted: In the same call on all processes, after a signal to any of them.
        """
        # `_heed` sets the code before it reads the ticks: a step that starts here is among them.
        self._ticks += 1
        self.reset_watchdog()
        if self._stop_code and self._ticks > self._last_tick:
            raise Interrupted

    @functools.cached_property
    def _last_tick(self) -> int:
        """The highest tick of any process; waits until all have reported theirs."""
        if self._store is None:
            return 0
        keys = [f'{_TICKS}/{index}' for index in range(self.count)]
        return max(int(self._store.blocking_key_value_get(key, _UNLIMITED)) for key in keys)

    def tick_each(self, batches: Iterable[T]) -> Iterator[T]:
        """Yields the batches, with a tick before each; the first one when all processes have one.

        gloo connects devices at their first common work, and waits for 30 s only.
        """
        for number, batch in enumerate(batches):
            if number == 0:
                self.barrier('the first batch')
            self.tick()
            yield batch

    def reset_watchdog(self) -> None:
        """Gives this process its full time again, as a step, a batch or a save has ended."""
        seconds, now = self._launch.watchdog_seconds, time.monotonic()
        if self._ticks < 3:  # these include compiling and connecting the devices
            seconds = max(seconds, self._launch.start_seconds)
        if self._is_watched and now <= self._deadline:  # one that has passed ends the process
            self._deadline = now + seconds
            # It ends a process whose interpreter is locked, which `_attend` cannot.
            faulthandler.dump_traceback_later(seconds + 10, exit=True)

    def end(self, code: int, why: str, *, stacks: bool = False, printed: bool = False) -> NoReturn:
        """Exits at once. All processes say why, show their stacks, and exit with the same code."""
        self._left.set()  # its own notice does not end it
        self._tell(code, why, stacks)
        if stacks:
            faulthandler.dump_traceback()
        if not printed:
            print(why, file=sys.stderr)
        if self.count > 1 and self.index == 0:
            time.sleep(_NOTICING)  # the notices end with this process
        os._exit(code)

    def _tell(self, code: int, why: str = '', stacks: bool = False) -> None:
        """Tells the other processes to exit and why, or, without a reason, to save and stop."""
        notice = json.dumps({'code': code, 'why': why, 'stacks': stacks})
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # told before, or process 0 is gone
            if self._store is not None:
                self._store.key_value_set(_NOTICE, notice, allow_overwrite=why != '')

    def _join(self) -> None:
        """Takes signals, and connects this process to the others of its job, if it has any."""
        faulthandler.enable()
        ours, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.detach(), warn_on_full_buffer=False)
        for number in _CODES:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, lambda *_: None)
        self._attending = threading.Thread(target=self._attend, args=(ours,), daemon=True)
        self._attending.start()
        self.reset_watchdog()
        connect(self._launch)
        self._store = distributed.global_state.client
        self._connected.set()

    def _attend(self, wakeup: socket.socket) -> None:
        """Waits for signals, notices and the deadline, in a thread, as the main one may compile."""
        wakeup.settimeout(0.5)
        while not self._left.is_set():
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # none, or process 0 is gone
                if self._store is not None:
                    self._heed(**json.loads(self._store.key_value_try_get(_NOTICE)))
            if time.monotonic() > self._deadline:
                why = 'no step, batch or save ended in time (--watchdog_seconds)'
                self.end(self._stop_code or REQUEUE, f'{self}: {why}; {_RESUME}', stacks=True)
            with contextlib.suppress(TimeoutError, jax.errors.JaxRuntimeError):
                if (received := signal.Signals(wakeup.recv(1)[0])) in _CODES:
                    self._on_signal(received)

    def _on_signal(self, received: signal.Signals) -> None:
        why = ''
        if not self._has_state:
            self._connected.wait(10)  # seconds; else the other processes would wait for this one
            why = f'{self}: {received.name} before the first step; run the same command again'
        elif self._last_signal == received == signal.SIGINT:
            why = f'{self}: Ctrl-C again: nothing is saved; {_RESUME}'
        self._last_signal = received
        self._heed(_CODES[received], why)

    def _heed(self, code: int, why: str = '', stacks: bool = False) -> None:
        """Exits if `why` is given; else all processes stop after the step of the foremost."""
        if why:
            self.end(code, why, stacks=stacks)
        if self._stop_code:
            return
        print('saves after this step; Ctrl-C again exits at once', file=sys.stderr)
        self._stop_code = code
        self._tell(code)
        if self._store is not None:
            self._store.key_value_set(f'{_TICKS}/{self.index}', str(self._ticks))

    def _leave(self) -> None:
        """Waits for all processes and disconnects; what follows is not watched."""
        self.barrier('the end')  # process 0 may still complete a checkpoint
        self._deadline = math.inf
        faulthandler.cancel_dump_traceback_later()
        if self._store is not None:
            self._left.set()
            self._attending.join()  # a thread within jax would abort the end of the interpreter
            jax.distributed.shutdown()


@contextlib.contextmanager
def joined_job(launch: Launch, report: Callable[[BaseException], int]) -> Iterator[Job]:
    """Gives the job of this process. An exception within ends all processes of the job.

    `report` prints the exception and returns the exit code.
    """
    job = Job(launch)
    try:
        job._join()
        try:
            yield job
        except Interrupted as interrupted:
            if job.index == 0:
                print(f'{interrupted}\n{_RESUME} (exit code {job._stop_code})', flush=True)
            job._leave()
            os._exit(job._stop_code)
        job._leave()
    except Exception as error:
        if job.count > 1 and re.search(_GONE, str(error)):
            time.sleep(_NOTICING)  # the other process may be about to say why
            job.end(REQUEUE, f'{job}: another process is gone: {one_line(error)}')
        code = report(error)
        # A restart would repeat errors of the input and of arithmetic.
        if job.count > 1 and not isinstance(error, UserError | ArithmeticError):
            code = REQUEUE
        why = error if isinstance(error, UserError) else one_line(error)
        job.end(code, f'{job}: {why}', printed=True)
