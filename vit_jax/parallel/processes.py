"""The processes of a job: they begin together, agree, notice when one is gone, and end together.

jax.distributed does the work. What is added: a process that fails says so to the others, one that
hangs is ended with the stacks of its threads, and SIGTERM, SIGHUP or Ctrl-C, to any process, become
one common moment to stop.
"""

import collections
import contextlib
import faulthandler
import functools
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any, NoReturn, TypeVar

import jax
import psutil

# Not public, without a public equal: jax.experimental.multihost_utils talks through devices, which
# must not be touched before the processes agree; its preemption sync point knows SIGTERM alone.
from jax._src.distributed import global_state

from vit_jax.base import UserError, records
from vit_jax.parallel.clusters import Launch, detect_cluster
from vit_jax.parallel.connecting import awaiting, connect
from vit_jax.parallel.countdown import Countdown
from vit_jax.parallel.out_of_memory import when_exhausted

REQUEUE = 75  # EX_TEMPFAIL: start the same command again
INTERRUPTED = 130  # the code of a shell's command that Ctrl-C ended
_SIGNALS = [getattr(signal, n) for n in ('SIGTERM', 'SIGINT', 'SIGHUP') if hasattr(signal, n)]
_END, _STOP = 'vit_jax/end', 'vit_jax/stop'
_LAST_WORDS = 0.5  # seconds
# What gloo, NCCL and jax say where the other side of a connection is gone.
_GONE = r'Connection (closed|reset) by peer|Connection refused|Broken pipe|remote process exited'
_PATIENCE = 60.0  # seconds from a signal to the end of a step, where steps are no longer
_FIRST = 3  # ticks, of which the steps may take as long as starting does
T = TypeVar('T')


class Interrupted(Exception):
    """A signal came, and every process is at the same place: save, and stop."""


class Differs(UserError):
    """This process has other facts than process 0: which, and what they are there and here."""


class Job:
    """This process among those of its job; `Job()` is one alone, as in a library or a test."""

    def __init__(self, launch: Launch | None = None):
        self._launch = launch
        self._wait_ms = int(1000 * (launch or Launch()).start_seconds)
        self._ticks = 0
        self._moving = threading.Lock()  # held while it is agreed on at which tick all stop
        self._stop_at: int | None = None
        self._asked = futures.Future[None]()  # to stop
        self._waiting = futures.ThreadPoolExecutor(1)  # one thread: without memory none can begin
        self._code = REQUEUE
        self._pace, self._since = 0.0, time.monotonic()  # the longest step, the last tick
        self._times = collections.Counter[str]()  # that each name was told or waited for
        self._saves = False  # is there a state worth keeping?
        self._stopper: threading.Thread | None = None
        self._watchdog, self._patience = Countdown(self._on_hang), Countdown(self._on_stall)

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
        """The text that `say` gives on process 0, on every process. UserError where it is late."""
        if self.count == 1:
            return say()
        key = self._key('told', name)
        if self.index == 0:
            self._client.key_value_set(key, say())
        with awaiting(name):
            return str(self._client.blocking_key_value_get(key, self._wait_ms))

    def barrier(self, name: str) -> None:
        """Returns when all processes have come here. UserError names who is missing."""
        if self.count > 1:
            with awaiting(name):
                self._client.wait_at_barrier(self._key('barrier', name), self._wait_ms)

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
        """From here on signals wait for the next `heartbeat`: there is a state worth keeping."""
        self._saves = True
        self._since = time.monotonic()
        self.reset_watchdog()
        if self._launch is not None and self.count > 1:
            self._stopper = threading.Thread(target=self._agree_to_stop, daemon=True)
            self._stopper.start()

    def heartbeat(self) -> None:
        """Says that work goes on. Raises Interrupted on the call at which all processes stop.

        Every process must call it equally often.
        """
        now = time.monotonic()
        self._pace, self._since = max(self._pace, now - self._since), now
        with self._moving:
            self._ticks += 1
            stop = self._stop_at is not None and self._ticks >= self._stop_at
        self.reset_watchdog()
        if stop:
            self.steps_ended()
            raise Interrupted
        if self._patience.runs:
            self._be_patient()

    def steps_ended(self) -> None:
        """From here on a stop is not waited for: what remains, as to save, takes its time."""
        self._patience.end()

    def reset_watchdog(self) -> None:
        """Gives the watchdog its full time again."""
        if self._launch is not None:
            seconds = self._launch.watchdog_seconds
            if self._ticks < _FIRST:  # to start, to compile, and to connect all processes
                seconds = max(seconds, self._launch.start_seconds)
            self._watchdog.restart(seconds)

    def interruptibly(self, wait: Callable[[], T]) -> T:
        """What `wait` gives. Raises Interrupted when a process alone is asked to stop meanwhile.

        `wait` is then left behind in its thread. One of several processes cannot stop on its own.
        """
        if self._launch is None or self.count > 1:
            return wait()
        result = self._waiting.submit(wait)
        first: list[futures.Future[Any]] = [result, self._asked]
        futures.wait(first, return_when=futures.FIRST_COMPLETED)
        if result.done():
            return result.result()
        self.steps_ended()
        raise Interrupted

    def awaited(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches, of which the first comes when all processes have theirs.

        gloo connects devices at their first common work, and waits for 30 s only.
        """
        iterator = iter(batches)
        batch = self.interruptibly(lambda: next(iterator, None))
        self.barrier('the first batch')
        while batch is not None:
            yield batch
            batch = self.interruptibly(lambda: next(iterator, None))

    def with_heartbeat(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches, `awaited`, with a `heartbeat` before each."""
        for batch in self.awaited(batches):
            self.heartbeat()
            yield batch

    def end(self, code: int, message: str) -> NoReturn:
        """Ends this process and, through the store, all others, who say why; at once."""
        with contextlib.suppress(Exception):  # the store may be what is gone, or there is none
            self._tell_end(code, message)
        self._leave(code)

    def _tell_end(self, code: int, message: str) -> None:
        end = {'code': code, 'index': self.index, 'process': _process_name(), 'message': message}
        self._client.key_value_set(_END, json.dumps(end), allow_overwrite=True)

    def _leave(self, code: int) -> NoReturn:
        """Ends the process without waiting for anyone."""
        sys.stdout.flush()
        sys.stderr.flush()
        if self.count > 1 and self.index == 0:
            # Without the store of this one the others would abort, before they have read why.
            time.sleep(_LAST_WORDS)
        os._exit(code)

    def _stopped(self, stop: Interrupted) -> NoReturn:
        """Ends the process, when all is saved; a thread that waits for a disk is left behind."""
        if self.index == 0:
            what = 'requeue' if self._code == REQUEUE else 'interrupted'
            print(f'{stop}\nthe same command goes on (exit code {self._code}: {what})', flush=True)
        os._exit(self._code)

    def finish(self, listener: threading.Thread) -> None:
        """Waits for all processes to come here, and disconnects this one."""
        self.barrier('the end')
        if self.index == 0:
            self._tell_end(0, 'done')
            self._ask_to_stop(0)
        for thread in listener, self._stopper:  # one within jax would abort the interpreter's end
            if thread is not None:
                thread.join(self._wait_ms / 1000)
        self._watchdog.cancel()
        self._patience.cancel()
        jax.distributed.shutdown()

    def _listen(self) -> None:
        """Waits for the end of another process, and ends this one."""
        end = json.loads(self._awaited_value(_END) or '{"code": 0}')
        if end['code'] and end['index'] != self.index:
            _say(f'{end["process"]} ended: {end["message"]}')
            self._leave(end['code'])

    def _awaited_value(self, key: str) -> str | None:
        """What any process tells under a key, whenever it does; None where the store is gone."""
        while True:
            try:
                return str(self._client.blocking_key_value_get(key, 3_600_000))
            except jax.errors.JaxRuntimeError as error:
                if 'DEADLINE' not in str(error):
                    return None  # jax will end this process

    def _ask_to_stop(self, code: int) -> None:
        """Asks all processes, this one too; 0: nobody will ask any more."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # somebody has asked before
            self._client.key_value_set(_STOP, str(code))

    def _agree_to_stop(self) -> None:
        """Waits until a process is asked to stop; all then stop after the step of the foremost."""
        code = int(self._awaited_value(_STOP) or 0)
        if code == 0:
            return
        self._code = code
        self._be_patient()
        with self._moving, contextlib.suppress(jax.errors.JaxRuntimeError):  # one is gone
            self._client.key_value_set(f'{_STOP}/{self.index}', str(self._ticks))
            keys = [f'{_STOP}/{index}' for index in range(self.count)]
            ticks = [self._client.blocking_key_value_get(key, self._wait_ms) for key in keys]
            self._stop_at = max(map(int, ticks)) + 1

    def _on_signals(self, wakeup: socket.socket) -> None:
        """Before there is anything to keep a signal ends the process, else it stops soon.

        A second Ctrl-C ends it at once.
        """
        interrupted = False
        while True:
            number = wakeup.recv(1)[0]
            if number not in _SIGNALS:
                continue
            if number == signal.SIGINT and interrupted:
                _say('ended at once: the same command goes on from the newest checkpoint')
                os._exit(INTERRUPTED)
            interrupted |= number == signal.SIGINT
            code = INTERRUPTED if number == signal.SIGINT else REQUEUE
            if not self._saves:
                name = signal.Signals(number).name
                text = f'{name}: stopped before the first step; run the same command again'
                self._say_and_end(code, text)
            if interrupted:
                _say('interrupted: stops after this step, and saves; Ctrl-C again ends at once')
            if self.count > 1:
                self._ask_to_stop(code)
            elif not self._asked.done():
                self._be_patient()
                self._code, self._stop_at = code, 0
                self._asked.set_result(None)

    def _be_patient(self) -> None:
        self._patience.restart(max(_PATIENCE, 2 * self._pace))

    def _on_stall(self, seconds: float) -> None:
        text = f'no step ended within {seconds:.0f} s of being asked to stop: ended without saving'
        text += '; the same command goes on from the newest checkpoint'
        self._say_and_end(self._code, text)

    def _say_and_end(self, code: int, text: str) -> NoReturn:
        _say(text)
        self.end(code, text)

    def _on_hang(self, seconds: float) -> None:
        _say(f'no sign of work for {seconds:g} s (--watchdog_seconds); what every thread does:')
        faulthandler.dump_traceback()
        self._leave(1)


def _field_differences(ours: Any, theirs: Any) -> list[str]:
    return [f'{line} here' for line in records.differences(theirs, json.loads(json.dumps(ours)))]


def _process_name() -> str:
    return f'process {global_state.process_id} ({socket.gethostname()})'


def _say(text: str) -> None:
    print(f'{_process_name()}: {text}', file=sys.stderr, flush=True)


@contextlib.contextmanager
def joined_job(launch: Launch, report: Callable[[BaseException], int]) -> Iterator[Job]:
    """The job that this process belongs to; when one process fails, all of them end.

    Raises UserError where the coordinator cannot be reached. What is raised within is printed by
    `report`, whose exit code ends the process at once, and all others.
    """
    job = Job(launch)
    faulthandler.enable()  # an abort, by jax for example, shows what every thread did
    _take_signals(job)
    when_exhausted(functools.partial(job._say_and_end, 1))
    job.reset_watchdog()
    cluster = detect_cluster(launch)
    if cluster is None or cluster.num_processes == 1:
        try:
            yield job
        except Interrupted as stop:
            job._stopped(stop)
        except Exception as error:  # a thread that is stalled, or never began, is not waited for
            job._leave(report(error))
        finally:
            job._watchdog.cancel()
        return
    connect(cluster, launch)
    listener = threading.Thread(target=job._listen, daemon=True)
    listener.start()
    try:
        yield job
    except Interrupted as stop:  # which all processes reach together
        job.finish(listener)
        job._stopped(stop)
    except BaseException as error:
        job.end(report(_cause(error)), f'{type(error).__name__}: {error}')
    else:
        job.finish(listener)


def _take_signals(job: Job) -> None:
    """Gives signals to a thread of the job, which sees them also while jax compiles."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)
    threading.Thread(target=job._on_signals, args=(ours,), daemon=True).start()


def _cause(error: BaseException) -> BaseException:
    """The error to report: a sentence where another process of the job is gone."""
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return error
    time.sleep(2 * _LAST_WORDS)  # another process may be about to say why
    if found := re.search(_GONE, str(error)):
        gone = UserError(f'another process is gone, its output says why ({found[0]})')
        gone.__cause__ = error
        return gone
    return error
