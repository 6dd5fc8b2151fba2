"""The processes of a job: they begin together, agree, notice when one is gone, and end together.

jax.distributed does the work. What is added: a process that fails says so to the others, one that
hangs is ended with the stacks of its threads, and SIGTERM becomes one common moment to stop.
"""

import collections
import contextlib
import faulthandler
import functools
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

import jax
import psutil

# Not public, and without a public equal: jax.experimental.multihost_utils talks through devices,
# which must not be touched before the processes agree, and its preemption sync point is jax's own,
# which orbax reaches too, with the numbers of its steps.
from jax._src.distributed import global_state
from jaxlib import _jax

from vit_jax.base import UserError, records
from vit_jax.parallel.clusters import Cluster, Launch, detect_cluster, wait_for_coordinator

REQUEUE = 75  # EX_TEMPFAIL: start the same command again
_END = 'vit_jax/end'
_SAY_AFTER, _LAST_WORDS = 10.0, 0.5  # seconds
_FIRST = 3  # ticks, of which the steps may take as long as starting does
T = TypeVar('T')


class Interrupted(Exception):
    """SIGTERM came, and every process is at the same place: save, and stop."""


class Differs(UserError):
    """This process has other facts than process 0: which, and what they are there and here."""


class Job:
    """This process among those of its job; `Job()` is one alone, as in a library or a test."""

    def __init__(self, launch: Launch | None = None):
        self._launch = launch
        self._wait_ms = int(1000 * (launch or Launch()).start_seconds)
        self._asked = threading.Event()  # to stop
        self._ticks = 0
        self._times = collections.Counter[str]()  # that each name was told or waited for
        self._saves = False  # is there a state worth keeping?
        self._preemption: Any = None

    @property
    def count(self) -> int:
        """How many processes the job has."""
        return int(global_state.num_processes)

    @property
    def index(self) -> int:
        """The number of this process, from 0."""
        return int(global_state.process_id)

    @property
    def _client(self) -> Any:
        return global_state.client

    def require_same(
        self, name: str, facts: dict[str, Any], describe: Callable[[Any], list[str]] | None = None
    ) -> None:
        """Returns when all processes are here with the same facts (JSON values); else Differs.

        `describe` says in lines how those of process 0, its argument, differ from the ones here.
        """
        describe = describe or functools.partial(_field_differences, facts)
        theirs = json.loads(self.from_process_0(name, lambda: json.dumps(facts)))
        if changes := describe(theirs):
            lines = '\n'.join(f'  {line}' for line in changes[:20])
            raise Differs(f'{name}: {_process_name()} differs from process 0:\n{lines}')
        self.barrier(name)

    def from_process_0(self, name: str, say: Callable[[], str]) -> str:
        """The text that `say` gives on process 0, on every process; the others wait for it."""
        if self.count == 1:
            return say()
        key = self._key('told', name)
        if self.index == 0:
            self._client.key_value_set(key, say())
        return str(self._client.blocking_key_value_get(key, self._wait_ms))

    def barrier(self, name: str) -> None:
        """Returns when all processes have come here. UserError names who is missing."""
        if self.count == 1:
            return
        try:
            self._client.wait_at_barrier(self._key('barrier', name), self._wait_ms)
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).splitlines()[0]
            raise UserError(f'not every process came to {name!r}: {reason}') from error

    def _key(self, kind: str, name: str) -> str:
        """A key not used before, the same on all processes, as they ask in the same order."""
        key = f'vit_jax/{kind}/{name}'
        self._times[key] += 1
        return f'{key}/{self._times[key]}'

    @property
    def age(self) -> float:
        """Seconds since the program was started; 0 for a job within another program.

        The smaller of two: a process is older where a shell became it (`exec`), Python where a
        server forked it. Python's is that of `logging`, imported before everything that takes long.
        """
        if self._launch is None:
            return 0.0
        python = logging.makeLogRecord({}).relativeCreated / 1000
        process = time.time() - psutil.Process().create_time()
        if hasattr(time, 'CLOCK_BOOTTIME'):  # Linux knows the moment of booting to the second only
            process += time.clock_gettime(time.CLOCK_BOOTTIME) - (time.time() - psutil.boot_time())
        return max(0.0, min(python, process))

    def stop_gracefully_from_here(self) -> None:
        """From here on SIGTERM waits for the next `heartbeat`: there is a state worth keeping."""
        self._saves = True
        self.reset_watchdog()
        if self._launch is not None and self.count > 1:
            # Takes SIGTERM over: the processes agree on the tick at which they stop.
            self._preemption = _jax.create_preemption_sync_manager()
            self._preemption.initialize(self._client)

    def heartbeat(self) -> None:
        """Says that work goes on. Raises Interrupted on the call at which all processes stop.

        Every process must call it equally often.
        """
        self._ticks += 1
        self.reset_watchdog()
        manager = self._preemption
        if self._asked.is_set() or (manager and manager.reached_sync_point(self._ticks)):
            raise Interrupted

    def reset_watchdog(self) -> None:
        """Gives the watchdog its full time again."""
        if self._launch is not None:
            seconds = self._launch.watchdog_seconds
            if self._ticks < _FIRST:  # to start, to compile, and to connect all processes
                seconds = max(seconds, self._launch.start_seconds)
            faulthandler.dump_traceback_later(seconds, exit=True)

    def with_heartbeat(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches, with a `heartbeat` before each."""
        for batch in batches:
            self.heartbeat()
            yield batch

    def end(self, code: int, message: str) -> NoReturn:
        """Ends this process and, through the store, all others, who say why; at once."""
        with contextlib.suppress(Exception):  # the store may be what is gone, or there is none
            self._tell_end(code, message)
        self._leave(code)

    def _tell_end(self, code: int, message: str) -> None:
        said = {'code': code, 'index': self.index, 'process': _process_name(), 'message': message}
        self._client.key_value_set(_END, json.dumps(said), allow_overwrite=True)

    def _leave(self, code: int) -> NoReturn:
        """Ends the process without waiting for anyone."""
        sys.stdout.flush()
        sys.stderr.flush()
        if self.count > 1 and self.index == 0:
            # Without the store of this one the others would abort, before they have read why.
            time.sleep(_LAST_WORDS)
        os._exit(code)

    def finish(self, listener: threading.Thread) -> None:
        """Waits for all processes to come here, and disconnects this one."""
        self.barrier('the end')
        if self.index == 0:
            self._tell_end(0, 'done')
        listener.join(self._wait_ms / 1000)  # a thread within jax would abort the interpreter's end
        faulthandler.cancel_dump_traceback_later()
        if self._preemption is not None:
            self._preemption.shutdown()
        jax.distributed.shutdown()

    def _listen(self) -> None:
        """Waits for the end of another process, and ends this one."""
        while True:
            try:
                said = json.loads(self._client.blocking_key_value_get(_END, 3_600_000))
            except jax.errors.JaxRuntimeError as error:
                if 'DEADLINE' in str(error):
                    continue
                return  # the store is gone: jax will end this process
            if said['code'] and said['index'] != self.index:
                _say(f'{said["process"]} ended: {said["message"]}')
                self._leave(said['code'])
            return

    def _on_signal(self, wakeup: socket.socket) -> None:
        """SIGTERM: before there is anything to keep the process ends, else it stops soon."""
        while number := wakeup.recv(1):
            if number[0] == signal.SIGTERM:
                if not self._saves:
                    text = 'SIGTERM before anything was trained: nothing is lost, start again'
                    _say(text)
                    self.end(REQUEUE, text)
                self._asked.set()


def _field_differences(ours: Any, theirs: Any) -> list[str]:
    return [f'{line} here' for line in records.differences(theirs, json.loads(json.dumps(ours)))]


def _process_name() -> str:
    return f'process {global_state.process_id} ({socket.gethostname()})'


def _say(text: str) -> None:
    print(f'{_process_name()}: {text}', file=sys.stderr, flush=True)


@contextlib.contextmanager
def joined_job(launch: Launch, report: Callable[[BaseException], int]) -> Iterator[Job]:
    """The job that this process belongs to; when one process fails, all of them end.

    Raises UserError where the coordinator cannot be reached. What is raised within one of several
    processes is printed by `report`, which returns the exit code, and ends the job.
    """
    job = Job(launch)
    faulthandler.enable()  # an abort, by jax for example, shows what every thread did
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.signal(signal.SIGTERM, lambda *_: None)  # the thread sees it, also while jax compiles
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=job._on_signal, args=(ours,), daemon=True).start()
    job.reset_watchdog()
    cluster = detect_cluster(launch)
    if cluster is None or cluster.num_processes == 1:
        try:
            yield job
        finally:
            faulthandler.cancel_dump_traceback_later()
        return
    _initialize(cluster, launch)
    listener = threading.Thread(target=job._listen, daemon=True)
    listener.start()
    try:
        yield job
    except SystemExit as error:
        if error.code != REQUEUE:  # which all processes reach together
            job.end(1, 'its own output says why')
        job.finish(listener)
        raise
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            time.sleep(2 * _LAST_WORDS)  # of another process, which may be the cause
            _say('is another process gone? Its output says why')
        job.end(report(error), f'{type(error).__name__}: {error}')
    else:
        job.finish(listener)


def _initialize(cluster: Cluster, launch: Launch) -> None:
    """Connects to the other processes. Ends this one, with a reason, where they do not come."""
    bind = wait_for_coordinator(cluster, launch.start_seconds)
    index, count, address = cluster.process_id, cluster.num_processes, cluster.coordinator_address

    def give_up() -> None:
        text = f'error: process {index}: of {count} processes not all came to {address} within'
        text += f' {launch.start_seconds:.0f} s; which were started, and with which process_id?'
        print(text, file=sys.stderr, flush=True)
        os._exit(1)

    waits = f'process {index} of {count} waits at {address} for the others'
    say = functools.partial(print, waits, file=sys.stderr, flush=True)
    timers = threading.Timer(_SAY_AFTER, say), threading.Timer(launch.start_seconds, give_up)
    for timer in timers:
        timer.daemon = True
        timer.start()
    # jax's own manager would take SIGTERM from here on; `stop_gracefully_from_here` makes ours.
    jax.config.update('jax_enable_preemption_service', False)
    logging.getLogger('jax._src.distributed').setLevel(logging.ERROR)
    jax.distributed.initialize(
        address,
        count,
        index,
        local_device_ids=cluster.local_device_ids,
        cluster_detection_method='deactivate',
        initialization_timeout=int(launch.start_seconds) + 30,
        heartbeat_timeout_seconds=int(launch.heartbeat_seconds),
        shutdown_timeout_seconds=int(launch.heartbeat_seconds),
        coordinator_bind_address=bind,
    )
    for timer in timers:
        timer.cancel()
