"""Starts, stops and watches the processes of a job: all stop after the same step.

jax reads the environment variables of Slurm, Open MPI, Kubernetes and TPUs, connects the processes,
detects dead ones, and provides a key-value store. This module rejects an incompletely described
cluster, for which jax would run each process alone, and a port in use, with which jax would crash.

After a signal, or when a process fails or hangs, a notice in the key-value store tells all
processes to save and stop, or to exit at once with a reason. Exit code 75 asks the calling script
for a restart; 1 reports an error that a restart would repeat.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import itertools
import json
import os
import re
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax

# Private modules, for four reasons. The processes compare configurations before they initialize
# devices, but multihost_utils needs devices. jax's sync point for preemption handles only SIGTERM,
# and does so even before there is a state to save. jax's CPU collectives listen at the address of
# the host name, even if all processes run on one host. `_hash_devices` is the fourth reason.
from jax._src import cache_key, clusters, distributed, xla_bridge
from jaxlib import _jax

import vit_jax
from vit_jax.base import Record, UserError, raise_all, records, require, usable
from vit_jax.base.errors import format_error, is_out_of_memory

REQUEUE = 75  # exit code EX_TEMPFAIL: run the same command again
EXIT_INTERRUPTED = 130  # exit code after Ctrl-C in a shell
_CODES = {signal.SIGTERM: REQUEUE, signal.SIGHUP: REQUEUE, signal.SIGINT: EXIT_INTERRUPTED}
_NOTICE_SECONDS = 1.5  # seconds until all processes have read a notice
_UNLIMITED = 10**9  # timeout in milliseconds: watchdog and heartbeats limit the time instead
_NOTICE = 'vit_jax_notice'  # a key
# Folders of keys.
_TICKS = 'vit_jax_ticks'
_PACE = 'vit_jax_pace'
_CLUSTER = (
    "a launch by srun or mpirun, TPU hosts or Kubernetes (pip install 'jax[k8s]'), or all of "
    '--coordinator_address, --num_processes, --process_id; --distributed=off runs a single process'
)
_RESUME = 'the same command resumes from the newest checkpoint'
# Errors of gloo, NCCL and jax if another process has exited or is late.
_GONE = r'Gloo .* failed|NCCL .*(remote|network|system) error|^DEADLINE_EXCEEDED|^UNAVAILABLE'


@dataclasses.dataclass(kw_only=True)
class LaunchConfig(Record):
    """How the processes of a job find each other. The environment sets fields that are None."""

    distributed: bool = True  # False: a single process, whatever the environment contains
    coordinator_address: str | None = None  # HOST:PORT of process 0
    num_processes: int | None = None  # on all hosts
    process_id: int | None = None  # from 0
    start_seconds: float = 300.0  # time to wait for the other processes
    heartbeat_seconds: float = 100.0  # silence after which a process counts as dead
    watchdog_seconds: float = 1800.0  # exit if no step, evaluated batch or save ends in time


def connect(launch: LaunchConfig) -> None:
    """Connects this process to the other processes of its job, if there are any.

    If the coordinator's address is on loopback, all processes listen on loopback only.

    Raises:
      UserError: If the coordinator's port cannot be used, or if the environment announces a cluster
        but does not describe it. Each process would then train alone in the same directory.
      JaxRuntimeError: If another process exits or does not connect in time. jax may also abort.
    """
    address: Any = launch.coordinator_address or os.environ.get('JAX_COORDINATOR_ADDRESS')
    count: Any = launch.num_processes
    index: Any = launch.process_id
    is_described = any(value is not None for value in (address, count, index))
    if not launch.distributed or not (is_described or _announces_processes()):
        return
    devices: Any = [] if _has_own_devices() else None
    with usable('cluster', _CLUSTER):  # jax's cluster classes raise many exception types
        if None in (address, count, index):
            if clusters.GkeTpuCluster.is_env_present():
                _check_slice()
            detect: Any = clusters.ClusterEnv.auto_detect_unset_distributed_params
            address, count, index, devices = detect(
                address, count, index, devices, None, int(launch.start_seconds)
            )
        require(
            None not in (address, count, index) and 0 <= index < count,
            f'cluster: coordinator_address={address}, num_processes={count}, process_id={index}; '
            f'expected {_CLUSTER}',
        )
    with usable(f'coordinator_address={address}', 'HOST:PORT of process 0, a free port'):
        port = int(address.rpartition(':')[2])
        if index == 0:  # jax would crash if the port is in use
            socket.create_server(('', port)).close()
    print(f'connecting to process 0 at {address}', file=sys.stderr)
    ctypes.pythonapi.PyOS_setsig(signal.SIGABRT, _on_abort)
    jax.config.update('jax_enable_preemption_service', False)  # it would handle SIGTERM
    on_loopback = re.match(r'127\.|localhost:', address)
    jax.distributed.initialize(
        address,
        count,
        index,
        local_device_ids=devices or None,  # None: JAX_LOCAL_DEVICE_IDS, or all devices
        cluster_detection_method='deactivate',
        coordinator_bind_address=address if on_loopback else None,  # None: all interfaces
        initialization_timeout=int(launch.start_seconds),
        heartbeat_timeout_seconds=int(launch.heartbeat_seconds),
    )
    if on_loopback and jax.config.values['jax_cpu_collectives_implementation'] == 'gloo':
        gloo = _jax.make_gloo_tcp_collectives(distributed.global_state.client, hostname='127.0.0.1')
        xla_bridge.register_backend_factory('cpu', lambda: xla_bridge.make_cpu_client(gloo))
        # Only process 0 writes jax's compilation cache, and on CPUs the key depends on the process
        # (jax 0.10.2). Without this, the other processes would compile at each start.
        private: Any = cache_key
        original = private._hash_accelerator_config
        private._hash_accelerator_config = functools.partial(_hash_devices, original)


def _hash_devices(original: Callable[..., None], digest: Any, devices: Any) -> None:
    """Adds devices to a compilation cache key; for CPUs, only their instruction sets."""
    if devices.flat[0].platform != 'cpu':
        return original(digest, devices)
    with contextlib.suppress(OSError), open('/proc/cpuinfo', 'rb') as file:
        flags = next((line for line in file if line.startswith((b'flags', b'Features'))), b'')
        digest.update(flags)


def _check_slice() -> None:
    """Raises UserError if GKE's variables of TPU slices are incomplete or contradict each other.

    jax would treat a missing slice ID as slice 0 and wait for the other slices.
    """
    env = os.environ
    hosts = (env.get('TPU_PROCESS_ADDRESSES') or env['TPU_WORKER_HOSTNAMES']).split(',')
    counts = {'TPU_WORKER_ID': len(hosts)}
    num_slices = env.get('MEGASCALE_NUM_SLICES') or '1'
    if num_slices != '1':
        counts['MEGASCALE_SLICE_ID'] = int(num_slices)
        require(
            bool(env.get('MEGASCALE_COORDINATOR_ADDRESS')),
            'cluster: MEGASCALE_COORDINATOR_ADDRESS is not set; expected the address of slice 0',
        )
    for name, count in counts.items():
        value = env.get(name, '')
        require(
            value.isdecimal() and int(value) < count,
            f'cluster: {name}={value}; expected a number below {count}',
        )


def _announces_processes() -> bool:
    """Returns whether the environment variables of a cluster announce several processes."""
    env = os.environ
    counts = 'SLURM_NTASKS', 'OMPI_COMM_WORLD_SIZE', 'MEGASCALE_NUM_SLICES'
    tpu_hosts = env.get('TPU_PROCESS_ADDRESSES') or env.get('TPU_WORKER_HOSTNAMES') or ''
    are_counted = any((env.get(name) or '1') != '1' for name in counts)
    are_listed = ',' in tpu_hosts
    are_pods = {'KUBERNETES_SERVICE_HOST', 'JOB_COMPLETION_INDEX'} <= {*env}
    return are_counted or are_listed or are_pods or clusters.GceTpuCluster.is_env_present()


def _has_own_devices() -> bool:
    """Returns whether this process may use all devices that it sees.

    That is so if it is the only process on its host, or if CUDA_VISIBLE_DEVICES is a single device.
    Otherwise jax gives one device to each process of Slurm and Open MPI.
    """
    names = 'SLURM_STEP_TASKS_PER_NODE', 'OMPI_COMM_WORLD_LOCAL_SIZE'
    is_alone = any(re.match(r'1(\(|$)', os.environ.get(name, '')) for name in names)
    return is_alone or ',' not in os.environ.get('CUDA_VISIBLE_DEVICES', ',')


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(_: int) -> None:
    """Handles SIGABRT: prints the probable reason for which jax aborts, and exits."""
    print('another process is gone, late, or has the same --process_id', file=sys.stderr)
    os._exit(REQUEUE)


class Interrupted(Exception):
    """Raised after a signal, at the same step on all processes, so that they save and exit."""


_numbers = itertools.count()  # all processes call the functions below in the same order
_watched_jobs: list['Job'] = []


def share_work(
    name: str, keys: Sequence[str], make: Callable[[Sequence[str]], Iterable[bytes]]
) -> Iterator[bytes]:
    """Yields one part per key, in every process.

    Each process makes some of the parts and sends them to the others.

    Args:
      name: The name of the work.
      keys: The names of the parts, which are the same in all processes.
      make: Makes the parts of some keys, in order.
    """
    state: Any = distributed.global_state
    if state.client is None:
        yield from make(keys)
        return
    folder = f'vit_jax/{name}/{next(_numbers)}'
    own = keys[state.process_id :: state.num_processes]
    for key, part in zip(own, make(own), strict=True):
        state.client.key_value_set_bytes(f'{folder}/{key}', part)
    for key in keys:
        yield state.client.blocking_key_value_get_bytes(f'{folder}/{key}', _UNLIMITED)
    state.client.wait_at_barrier(folder, _UNLIMITED)
    if state.process_id == 0:
        state.client.key_value_delete(f'{folder}/')


def gather_texts(name: str, text: str) -> list[str]:
    """Returns the texts of all processes, in their order."""
    state: Any = distributed.global_state
    if state.client is None:
        return [text]
    folder = f'vit_jax/{name}/{next(_numbers)}'
    state.client.key_value_set(f'{folder}/{state.process_id}', text)
    return [
        str(state.client.blocking_key_value_get(f'{folder}/{index}', _UNLIMITED))
        for index in range(state.num_processes)
    ]


def keep_alive() -> None:
    """Restarts the time of the watchdog of this process, if it has one."""
    for job in _watched_jobs:
        job.reset_watchdog()


class Pace(NamedTuple):
    """Seconds per step of the slowest process, its name, and the median over all processes."""

    slowest: float
    name: str
    median: float


class Job:
    """A process of a job: process number `index` among `count` processes.

    `Job()` is a job with a single process, for use as a library and in tests. `join_job` connects
    several processes.
    """

    def __init__(self, launch: LaunchConfig | None = None):
        self._launch = launch or LaunchConfig()
        self._is_watched = launch is not None
        self._has_state = False
        self._ticks = 0
        self._stop_code = 0
        self._last_signal = 0
        self._deadline = float('inf')
        self._pace_step: int | None = None  # step of the last `compare_pace`
        self.started = vit_jax.STARTED
        self._keys = itertools.count()  # all processes use the keys in the same order
        self._connected = threading.Event()
        self._left = threading.Event()
        self._find_others()

    def _find_others(self) -> None:
        state: Any = distributed.global_state  # client: the key-value store; None for one process
        self.count = state.num_processes
        self.index = state.process_id
        self._store = state.client

    def __str__(self) -> str:
        return f'process {self.index} of {self.count} ({socket.gethostname()})'

    def require_equal(
        self, name: str, facts: Any, describe: Callable[[], list[str]] | None = None
    ) -> None:
        """Waits for all processes; raises UserError if their JSON values `facts` differ.

        Args:
          name: What is compared, for the message.
          facts: The JSON values of this process.
          describe: Describes the differences, if there are any; by default, fields are listed.
        """
        facts_json = json.dumps(facts)
        expected = json.loads(self.broadcast_text(name, lambda: facts_json))
        differences = records.differences(expected, json.loads(facts_json))
        if differences:
            if describe:
                differences = describe()
            if differences:
                raise_all([f'{name}: {self} differs from process 0:', *differences], shown=21)
        self.barrier(name)

    def broadcast_text(self, name: str, say: Callable[[], str]) -> str:
        """Broadcasts a text: returns on every process what `say` returns on process 0."""
        if self._store is None:
            return say()
        key = f'vit_jax/{name}/{next(self._keys)}'
        if self.index == 0:
            self._store.key_value_set(key, say())
        return str(self._store.blocking_key_value_get(key, _UNLIMITED))

    def compare_pace(self, step: int, seconds: float) -> Pace | None:
        """Publishes this process's seconds per step; compares the previous values of all processes.

        By now, every process has published its previous value. Returns None at the first report,
        on processes other than the first, and if there is only one process.
        """
        if self.count == 1:
            return None
        self._store.key_value_set(f'{_PACE}/{step}/{self.index}', json.dumps([seconds, str(self)]))
        previous_step = self._pace_step
        self._pace_step = step
        if self.index > 0 or previous_step is None:
            return None
        folder = f'{_PACE}/{previous_step}/'
        paces = [json.loads(pace) for _, pace in self._store.key_value_dir_get(folder)]
        self._store.key_value_delete(folder)
        slowest, name = max(paces)
        median = statistics.median_low(seconds for seconds, _ in paces)
        return Pace(slowest=slowest, name=name, median=median)

    def barrier(self, name: str) -> None:
        """Waits until all processes have called it; the watchdog limits the time."""
        if self._store is not None:
            self._store.wait_at_barrier(f'vit_jax/{name}/{next(self._keys)}', _UNLIMITED)

    def save_on_signals(self) -> None:
        """From this call on, signals raise Interrupted in `tick`; before it, they exit at once."""
        self._has_state = True

    @contextlib.contextmanager
    def saving_on_interrupt(self) -> Iterator[None]:
        """Makes the first Ctrl-C within the block stop `tick`, so that the caller can save.

        Does nothing in programs, which handle signals anyway, and outside of the main thread.
        """
        if self._is_watched or threading.current_thread() is not threading.main_thread():
            yield
            return
        earlier = signal.getsignal(signal.SIGINT)

        def stop(*_: Any) -> None:
            signal.signal(signal.SIGINT, earlier)
            self._stop(EXIT_INTERRUPTED)

        signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, earlier)

    def tick(self) -> None:
        """Reports progress. All processes must call it the same number of times.

        Raises:
          Interrupted: After a signal to any process, in the same call on all processes.
        """
        # `_stop` sets the code before it reads the ticks, so it counts a step that starts here.
        self._ticks += 1
        self.reset_watchdog()
        if self._stop_code and (self._store is None or self._ticks > self._find_last_tick()):
            raise Interrupted

    def _find_last_tick(self) -> int:
        """Waits until all processes have reported their ticks; returns the highest one."""
        keys = [f'{_TICKS}/{index}' for index in range(self.count)]
        return max(int(self._store.blocking_key_value_get(key, _UNLIMITED)) for key in keys)

    def tick_each(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches and calls `tick` before each."""
        for batch in batches:
            self.tick()
            yield batch

    def reset_watchdog(self) -> None:
        """Restarts the watchdog's time, after a step, a batch or a save."""
        # The first steps include compilation and connecting the devices.
        least = self._launch.start_seconds if self._ticks < 3 else 0.0
        seconds = max(self._launch.watchdog_seconds, least)
        now = time.monotonic()
        if self._is_watched and now <= self._deadline:  # after the deadline the process exits
            self._deadline = now + seconds
            # faulthandler also ends a process that holds the interpreter lock; `_watch` cannot.
            faulthandler.dump_traceback_later(seconds + 10, exit=True)

    def _connect(self) -> None:
        """Installs signal handlers and connects this process to the other processes of its job."""
        receiver, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.detach())
        for number in _CODES:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, lambda *_: None)
        self._attending = threading.Thread(target=self._watch, args=(receiver,), daemon=True)
        self._attending.start()
        _watched_jobs.append(self)
        self.reset_watchdog()
        connect(self._launch)
        self._find_others()
        self._connected.set()

    def _watch(self, wakeup: socket.socket) -> None:
        """Handles signals, notices and the deadline, in a thread: the main one may be compiling."""
        wakeup.settimeout(0.5)
        while not self._left.is_set():
            # The error: there is no notice, or process 0 has exited.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                if self._store is not None:
                    self._stop(**json.loads(self._store.key_value_try_get(_NOTICE)))
            if time.monotonic() > self._deadline:
                faulthandler.dump_traceback()
                time.sleep(_NOTICE_SECONDS)  # so that the other processes print their stacks, too
                why = 'no step, batch or save ended within --watchdog_seconds'
                self._stop(self._stop_code or REQUEUE, f'{self}: {why}; {_RESUME}')
            with contextlib.suppress(TimeoutError, KeyError):  # no signal, or not in _CODES
                self._on_signal(signal.Signals(wakeup.recv(1)[0]))

    def _on_signal(self, received: signal.Signals) -> None:
        """Makes all processes save and stop, or exit at once if there is nothing to save."""
        code = _CODES[received]
        why = ''
        if not self._has_state:
            self._connected.wait(10)  # seconds; else the other processes would wait for this one
            why = f'{self}: {received.name} before the first step; run the same command again'
        elif self._last_signal == received == signal.SIGINT:
            why = f'{self}: stopped by a second Ctrl-C without saving; {_RESUME}'
        self._last_signal = received
        self._stop(code, why)

    def _stop(self, code: int, why: str = '') -> None:
        """Exits all processes at once if `why` is given; otherwise all stop after the same step.

        That is the latest step that any process has started.
        """
        if why:
            print(why, file=sys.stderr)
            self._exit_all(code, why)
        if not self._stop_code:
            print('saving and exiting after this step; Ctrl-C again exits at once', file=sys.stderr)
            self._stop_code = code
            self._post_notice(code)

    def _exit_all(self, code: int, why: str) -> NoReturn:
        """Exits at once. The other processes print `why` and exit with the same code."""
        self._left.set()  # so that this process does not handle its own notice
        self._post_notice(code, why)
        if self.count > 1 and self.index == 0:
            time.sleep(_NOTICE_SECONDS)  # process 0 hosts the notices
        os._exit(code)

    def _post_notice(self, code: int, why: str = '') -> None:
        """Tells the other processes to save and stop or, with a reason, to exit at once."""
        # The error: there is a notice already, or process 0 has exited.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if self._store is not None:
                self._store.key_value_set(f'{_TICKS}/{self.index}', str(self._ticks), True)
                notice = json.dumps({'code': code, 'why': why})
                self._store.key_value_set(_NOTICE, notice, allow_overwrite=why != '')

    def _disconnect(self) -> None:
        """Waits for all processes, disconnects, and stops the watchdog."""
        self.barrier('the end')  # process 0 may still be completing a checkpoint
        self._left.set()
        self._attending.join()  # the interpreter aborts if it exits while a thread is inside jax
        faulthandler.cancel_dump_traceback_later()
        jax.distributed.shutdown()


@contextlib.contextmanager
def join_job(launch: LaunchConfig, report: Callable[[BaseException], int]) -> Iterator[Job]:
    """Connects this process to its job: `with join_job(LaunchConfig(), report) as job:`.

    An exception within the block ends all processes of the job.

    Args:
      launch: How the processes find each other.
      report: Prints an exception and returns the exit code.

    Yields:
      The job of this process.
    """
    job = Job(launch)
    try:
        job._connect()
        yield job
        job._disconnect()
    except Interrupted as interrupted:
        print(f'{interrupted}\n{_RESUME} (exit code {job._stop_code})', flush=True)
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process has exited
            job._disconnect()
        os._exit(job._stop_code)
    except Exception as error:
        is_alone = distributed.global_state.num_processes == 1  # job.count may not be set yet
        if not is_alone and re.search(_GONE, str(error)):
            time.sleep(_NOTICE_SECONDS)  # the other process may be about to send its reason
            job._stop(REQUEUE, f'{job}: another process is gone: {format_error(error)}')
        code = report(error)
        # A restart would repeat errors of the input, of arithmetic (NotFiniteError) and of memory.
        is_lasting = (
            is_alone or isinstance(error, UserError | ArithmeticError) or is_out_of_memory(error)
        )
        job._exit_all(code if is_lasting else REQUEUE, f'{job}: {format_error(error, limit=4000)}')
