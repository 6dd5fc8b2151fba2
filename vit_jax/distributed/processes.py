"""The processes of a job: they start together, stop after the same step, and exit together.

jax reads the variables of Slurm, Open MPI, Kubernetes and TPUs, connects the processes, notices
when one is gone, and stores texts under keys. This module rejects an incomplete cluster, where jax
would start one process alone, and a port in use, where jax would crash. One text is a notice to
all processes: to save and stop, after a signal to any of them, or to exit at once, with the reason
of a process that fails or hangs. Exit code 75 asks a script for a restart; 1 reports an error that
a restart would repeat.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import jax

# Not public. The processes compare facts before they touch a device, which multihost_utils needs.
# jax's sync point for preemption takes SIGTERM only, also before there is a state to save. jax's
# CPU devices listen at the address of the host's name, also if all processes are on one host.
from jax._src import clusters, distributed, xla_bridge
from jaxlib import _jax

from vit_jax.base import Record, UserError, records, refuse, require, usable
from vit_jax.base.errors import one_line

REQUEUE = 75  # EX_TEMPFAIL: start the same command again
INTERRUPTED = 130  # the exit code of a shell's command after Ctrl-C
_CODES = {signal.SIGTERM: REQUEUE, signal.SIGHUP: REQUEUE, signal.SIGINT: INTERRUPTED}
_NOTICING = 1.5  # seconds until all processes have read a notice
_UNLIMITED = 10**9  # milliseconds: the watchdog and the heartbeats limit the time
_NOTICE, _TICKS = 'vit_jax_notice', 'vit_jax_ticks'  # a key, and a folder of keys
_CLUSTER = (
    "a start by srun, by mpirun, on TPU hosts, or in Kubernetes (pip install 'jax[k8s]'); else "
    '--coordinator_address, --num_processes and --process_id; --distributed=off runs one process'
)
_RESUME = 'the same command resumes from the newest checkpoint'
# What gloo, NCCL and jax report if another process is gone or late.
_GONE = r'Gloo .* failed|NCCL .*(remote|network|system) error|^DEADLINE_EXCEEDED|^UNAVAILABLE'
Compare = Callable[[Any], list[str]]  # a line for each difference from the facts of process 0


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


def connect(launch: Launch) -> None:
    """Connects this process to the others of its job, if it has any.

    If the coordinator's address is on loopback, all processes listen there only.

    Raises:
      UserError: If the coordinator's port cannot be used, or if the environment announces a cluster
        but does not describe it: each process would become a run of its own, in the same directory.
      JaxRuntimeError: If another process is gone or does not come in time; jax may also abort.
    """
    address = launch.coordinator_address or os.environ.get('JAX_COORDINATOR_ADDRESS')
    place: tuple[Any, Any, Any] = address, launch.num_processes, launch.process_id
    if not launch.distributed or (place == (None, None, None) and not _announces_processes()):
        return
    devices: Any = [] if _has_own_devices() else None
    with usable('cluster', _CLUSTER):  # each of jax's clusters raises its own errors
        if None in place:
            detect: Any = clusters.ClusterEnv.auto_detect_unset_distributed_params
            found = detect(*place, devices, None, int(launch.start_seconds))
            place, devices = found[:3], found[3]
        address, count, index = place
        text = f'coordinator_address={address}, num_processes={count}, process_id={index}'
        require(None not in place and 0 <= index < count, f'cluster: {text}; expected {_CLUSTER}')
    with usable(f'coordinator_address={address}', 'HOST:PORT of process 0, a free port'):
        port = int(address.rpartition(':')[2])
        if index == 0:  # jax would crash
            socket.create_server(('', port)).close()
    print(f'connects to process 0 at {address}', file=sys.stderr)
    ctypes.pythonapi.PyOS_setsig(signal.SIGABRT, _on_abort)
    jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM
    on_loopback = re.match(r'127\.|localhost:', address)
    jax.distributed.initialize(
        *place,
        local_device_ids=devices or None,  # None: JAX_LOCAL_DEVICE_IDS, or all
        cluster_detection_method='deactivate',
        coordinator_bind_address=address if on_loopback else None,  # None: on all networks
        initialization_timeout=int(launch.start_seconds),
        heartbeat_timeout_seconds=int(launch.heartbeat_seconds),
    )
    if on_loopback and jax.config.values['jax_cpu_collectives_implementation'] == 'gloo':
        gloo = _jax.make_gloo_tcp_collectives(distributed.global_state.client, hostname='127.0.0.1')
        xla_bridge.register_backend_factory('cpu', lambda: xla_bridge.make_cpu_client(gloo))


def _announces_processes() -> bool:
    """Returns whether variables of a cluster say that there are several processes."""
    env, counts = os.environ, ('SLURM_NTASKS', 'OMPI_COMM_WORLD_SIZE', 'MEGASCALE_NUM_SLICES')
    tpu_hosts = env.get('TPU_PROCESS_ADDRESSES') or env.get('TPU_WORKER_HOSTNAMES') or ''
    are_counted = any(env.get(name, '1') != '1' for name in counts) or ',' in tpu_hosts
    are_pods = {'KUBERNETES_SERVICE_HOST', 'JOB_COMPLETION_INDEX'} <= {*env}
    return are_counted or are_pods or clusters.GceTpuCluster.is_env_present()


def _has_own_devices() -> bool:
    """Returns whether this process is alone on its host, or sees chosen devices only.

    jax gives one device to each process of Slurm and Open MPI, and leaves the others idle.
    """
    names = 'SLURM_STEP_TASKS_PER_NODE', 'OMPI_COMM_WORLD_LOCAL_SIZE'
    is_alone = any(re.match(r'1(\(|$)', os.environ.get(name, '')) for name in names)
    return is_alone or ',' not in os.environ.get('CUDA_VISIBLE_DEVICES', ',')


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(_: int) -> None:
    """Exits with the probable reason where jax aborts."""
    print('another process is gone, late, or has the same --process_id', file=sys.stderr)
    os._exit(REQUEUE)


class Interrupted(Exception):
    """After a signal all processes are at the same step, to save and exit."""


class Job:
    """This process among the `count` processes of its job; its `index` is its number.

    `Job()` runs alone, as in a library or a test.
    """

    def __init__(self, launch: Launch | None = None):
        self._launch, self._is_watched = launch or Launch(), launch is not None
        self._has_state, self._ticks, self._stop_code = False, 0, 0
        self._last_signal, self._deadline = 0, float('inf')
        self._keys = itertools.count()  # all processes use them in the same order
        self._connected, self._left = threading.Event(), threading.Event()
        self._find_others()

    def _find_others(self) -> None:
        state: Any = distributed.global_state  # its client is a store of texts, or None if alone
        self.count, self.index, self._store = state.num_processes, state.process_id, state.client

    def __str__(self) -> str:
        return f'process {self.index} of {self.count} ({socket.gethostname()})'

    def require_same(self, name: str, facts: Any, describe: Compare | None = None) -> None:
        """Waits for all processes. Raises UserError if their facts, JSON values, differ."""
        text = json.dumps(facts)
        theirs = json.loads(self.from_process_0(name, lambda: text))
        changes = describe(theirs) if describe else records.differences(theirs, json.loads(text))
        refuse([f'{name}: {self} differs from process 0:', *changes] if changes else [], shown=21)
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

    def tick(self) -> None:
        """Reports that work goes on. All processes call it equally often.

        Raises:
          Interrupted: In the same call on all processes, after a signal to any of them.
        """
        # `_heed` sets the code before it reads the ticks: a step that starts here is among them.
        self._ticks += 1
        self.reset_watchdog()
        if self._stop_code and (self._store is None or self._ticks > self._find_last_tick()):
            raise Interrupted

    def _find_last_tick(self) -> int:
        """Returns the highest tick of any process; waits until all have reported theirs."""
        keys = [f'{_TICKS}/{index}' for index in range(self.count)]
        return max(int(self._store.blocking_key_value_get(key, _UNLIMITED)) for key in keys)

    def tick_each(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches, with a tick before each."""
        for batch in batches:
            self.tick()
            yield batch

    def reset_watchdog(self) -> None:
        """Gives this process its full time again, as a step, a batch or a save has ended."""
        # The first steps include compiling and connecting the devices.
        least = self._launch.start_seconds if self._ticks < 3 else 0.0
        now, seconds = time.monotonic(), max(self._launch.watchdog_seconds, least)
        if self._is_watched and now <= self._deadline:  # one that has passed ends the process
            self._deadline = now + seconds
            # It ends a process whose interpreter is locked, which `_attend` cannot.
            faulthandler.dump_traceback_later(seconds + 10, exit=True)

    def _join(self) -> None:
        """Takes signals, and connects this process to the others of its job, if it has any."""
        ours, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.detach())
        for number in _CODES:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, lambda *_: None)
        self._attending = threading.Thread(target=self._attend, args=(ours,), daemon=True)
        self._attending.start()
        self.reset_watchdog()
        connect(self._launch)
        self._find_others()
        self._connected.set()

    def _attend(self, wakeup: socket.socket) -> None:
        """Waits for signals, notices and the deadline, in a thread, as the main one may compile."""
        wakeup.settimeout(0.5)
        while not self._left.is_set():
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # none, or process 0 is gone
                if self._store is not None:
                    self._heed(**json.loads(self._store.key_value_try_get(_NOTICE)))
            if time.monotonic() > self._deadline:
                faulthandler.dump_traceback()
                time.sleep(_NOTICING)  # the others show their stacks too
                why = 'no step, batch or save ended in time (--watchdog_seconds)'
                self._heed(self._stop_code or REQUEUE, f'{self}: {why}; {_RESUME}')
            with contextlib.suppress(TimeoutError, KeyError):  # none, or not one of _CODES
                self._on_signal(signal.Signals(wakeup.recv(1)[0]))

    def _on_signal(self, received: signal.Signals) -> None:
        """Tells all processes to save and stop, or to exit at once if there is nothing to save."""
        code, why = _CODES[received], ''
        if not self._has_state:
            self._connected.wait(10)  # seconds; else the other processes would wait for this one
            why = f'{self}: {received.name} before the first step; run the same command again'
        elif self._last_signal == received == signal.SIGINT:
            why = f'{self}: Ctrl-C again: nothing is saved; {_RESUME}'
        self._last_signal = received
        self._heed(code, why)

    def _heed(self, code: int, why: str = '') -> None:
        """Exits if `why` is given; else all processes stop after the step of the foremost."""
        if why:
            print(why, file=sys.stderr)
            self._exit_all(code, why)
        if not self._stop_code:
            print('saves after this step; Ctrl-C again exits at once', file=sys.stderr)
            self._stop_code = code
            self._tell(code)

    def _exit_all(self, code: int, why: str) -> NoReturn:
        """Exits at once. The other processes say why, and exit with the same code."""
        self._left.set()  # its own notice does not end it
        self._tell(code, why)
        if self.count > 1 and self.index == 0:
            time.sleep(_NOTICING)  # the notices end with this process
        os._exit(code)

    def _tell(self, code: int, why: str = '') -> None:
        """Tells the other processes to save and stop or, with a reason, to exit at once."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # told before, or process 0 is gone
            if self._store is not None:
                self._store.key_value_set(f'{_TICKS}/{self.index}', str(self._ticks), True)
                notice = json.dumps({'code': code, 'why': why})
                self._store.key_value_set(_NOTICE, notice, allow_overwrite=why != '')

    def _leave(self) -> None:
        """Waits for all processes and disconnects; what follows is not watched."""
        self.barrier('the end')  # process 0 may still complete a checkpoint
        self._left.set()
        self._attending.join()  # a thread within jax would abort the end of the interpreter
        faulthandler.cancel_dump_traceback_later()
        jax.distributed.shutdown()


@contextlib.contextmanager
def joined_job(launch: Launch, report: Callable[[BaseException], int]) -> Iterator[Job]:
    """Gives the job of this process. An exception within ends all processes of the job.

    `report` prints the exception and returns the exit code.
    """
    job = Job(launch)
    try:
        job._join()
        yield job
        job._leave()
    except Interrupted as interrupted:
        print(f'{interrupted}\n{_RESUME} (exit code {job._stop_code})', flush=True)
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process is gone by now
            job._leave()
        os._exit(job._stop_code)
    except Exception as error:
        is_alone = distributed.global_state.num_processes == 1  # the job may not be joined yet
        if not is_alone and re.search(_GONE, str(error)):
            time.sleep(_NOTICING)  # the other process may be about to say why
            job._heed(REQUEUE, f'{job}: another process is gone: {one_line(error)}')
        code = report(error)
        # A restart would repeat errors of the input and of arithmetic.
        is_lasting = is_alone or isinstance(error, UserError | ArithmeticError)
        job._exit_all(code if is_lasting else REQUEUE, f'{job}: {one_line(error, limit=4000)}')
