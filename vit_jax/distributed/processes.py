"""The processes of a job: they start together, stop after the same step, and exit together.

jax.distributed connects the processes, notices when one is gone, and stores texts under keys. Two
texts are notices to all: `stop`, after a signal to any process, and `end`, with the reason of a
process that fails or hangs. Exit code 75 asks a script for a restart; 1 reports an error that a
restart would repeat.
"""

import contextlib
import ctypes
import faulthandler
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
from typing import Any, Literal, NoReturn, TypeVar

import jax

# Not public. The processes compare facts before they touch a device, which multihost_utils needs.
# Its preemption sync point takes SIGTERM only, also before there is a state to save.
from jax._src.distributed import global_state

from vit_jax.base import UserError, records
from vit_jax.distributed.clusters import Launch, connect, detect_cluster

REQUEUE = 75  # EX_TEMPFAIL: start the same command again
INTERRUPTED = 130  # the exit code of a shell's command after Ctrl-C
_CODES = {signal.SIGTERM: REQUEUE, signal.SIGHUP: REQUEUE, signal.SIGINT: INTERRUPTED}
_STOPPING = 100.0  # seconds from a signal to the end of a step, unless steps are longer
_TELLING = 1.5  # seconds until all processes have read a notice
_NOTICES, _TICKS = 'vit_jax_notices', 'vit_jax_ticks'  # folders of keys
_RESUME = 'the same command resumes from the newest checkpoint'
# What gloo, NCCL and jax report if another process is gone or late.
_GONE = r'Gloo .* failed|NCCL .*(remote|network|system) error|(GetKeyValue\(\)|Barrier) timed out'
T = TypeVar('T')


class Interrupted(Exception):
    """After a signal all processes are at the same step, to save and exit."""


class Differs(UserError):
    """The facts of this process are not those of process 0."""


class Job:
    """This process among those of its job; `Job()` runs alone, as in a library or a test."""

    def __init__(self, launch: Launch | None = None):
        self._launch, self._is_watched = launch or Launch(), launch is not None
        self.count, self.index = int(global_state.num_processes), int(global_state.process_id)
        self._store: Any = global_state.client  # of texts; None if this process runs alone
        self._wait_ms = int(1000 * self._launch.start_seconds)
        self._keys = itertools.count()  # all processes use them in the same order
        self._connected, self._left = threading.Event(), threading.Event()
        self._phase, self._ticks = 'starting', 0
        self._last_signal: signal.Signals | None = None
        self._stop_code = 0
        self._stop_at = self._deadline = math.inf
        self._last_tick, self._longest_step = time.monotonic(), 0.0
        self._agreeing = threading.Lock()  # held while the processes agree when to stop

    @property
    def _name(self) -> str:
        return f'process {self.index} of {self.count} ({socket.gethostname()})'

    def require_same(
        self, name: str, facts: dict[str, Any], describe: Callable[[Any], list[str]] | None = None
    ) -> None:
        """Waits for all processes and compares their facts, which are JSON values.

        `describe` returns a line for each difference from its argument, the facts of process 0.
        Raises Differs with these lines.
        """
        text = json.dumps(facts)
        theirs = json.loads(self.from_process_0(name, lambda: text))
        changes = describe(theirs) if describe else records.differences(theirs, json.loads(text))
        if changes:
            lines = '\n'.join(f'  {line}' for line in changes[:20])
            raise Differs(f'{name}: {self._name} differs from process 0:\n{lines}')
        self.barrier(name)

    def from_process_0(self, name: str, say: Callable[[], str]) -> str:
        """Returns on every process the text that `say` returns on process 0."""
        if self._store is None:
            return say()
        key = f'vit_jax/{name}/{next(self._keys)}'
        if self.index == 0:
            self._store.key_value_set(key, say())
        return str(self._store.blocking_key_value_get(key, self._wait_ms))

    def barrier(self, name: str, *, seconds: float | None = None) -> None:
        """Waits until all processes are here, for at most `seconds` (None: `start_seconds`)."""
        if self._store is not None:
            wait_ms = self._wait_ms if seconds is None else int(1000 * seconds)
            self._store.wait_at_barrier(f'vit_jax/{name}/{next(self._keys)}', wait_ms)

    def enter(self, phase: Literal['stepping', 'saving']) -> None:
        """Says what a signal waits for: the next tick, or the last save.

        Before the first call, when there is no state to save, it waits for nothing.
        """
        self._phase, self._last_tick = phase, time.monotonic()
        self.reset_watchdog()

    def tick(self) -> None:
        """Reports that work goes on. All processes call it equally often.

        Raises:
          Interrupted: In the same call on all processes, after a signal to any of them.
        """
        now = time.monotonic()
        self._longest_step = max(self._longest_step, now - self._last_tick)
        self._last_tick = now
        with self._agreeing:
            self._ticks += 1
        self.reset_watchdog()
        if self._ticks >= self._stop_at:
            self.enter('saving')
            raise Interrupted

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
        seconds = self._launch.watchdog_seconds
        if self._ticks < 3:  # these include compiling and connecting the devices
            seconds = max(seconds, self._launch.start_seconds)
        if self._phase == 'stepping' and self._stop_code:
            seconds = min(seconds, max(_STOPPING, 2 * self._longest_step))
        now = time.monotonic()
        if self._is_watched and now <= self._deadline:  # one that has passed ends the process
            self._deadline = now + seconds
            # It ends a process whose interpreter is locked, which `_attend` cannot.
            faulthandler.dump_traceback_later(seconds + 10, exit=True)

    def end(self, code: int, why: str, *, stacks: bool = False) -> NoReturn:
        """Exits at once. All processes say why, show their stacks, and exit with the same code."""
        why = f'{self._name}: {why}'
        self._tell('end', [self.index, code, why, stacks])
        self._exit(code, why, stacks)

    def _exit(self, code: int, why: str = '', stacks: bool = False) -> NoReturn:
        if stacks:
            faulthandler.dump_traceback()
        if why:
            print(why, file=sys.stderr, flush=True)
        if self.count > 1 and self.index == 0:
            time.sleep(_TELLING)  # the notices end with this process
        with contextlib.suppress(OSError, ValueError):  # a closed stdout
            sys.stdout.flush()
        os._exit(code)

    def _leave(self) -> None:
        """Ends the watch and the connection; what follows in this process is not watched."""
        self._deadline = math.inf
        faulthandler.cancel_dump_traceback_later()
        if self.count > 1:
            self._left.set()
            self._attending.join()  # a thread within jax would abort the end of the interpreter
            jax.distributed.shutdown()

    def _attend(self, wakeup: socket.socket) -> None:
        """Waits for signals, notices and the deadline, in a thread, as the main one may compile."""
        wakeup.settimeout(0.5)
        while not self._left.is_set():
            with contextlib.suppress(TimeoutError):
                self._on_signal(signal.Signals(wakeup.recv(1)[0]))
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 is gone
                self._read_notices()
            if time.monotonic() > self._deadline:
                why = 'no step, batch or save ended in time (--watchdog_seconds, or after a signal)'
                self.end(self._stop_code or REQUEUE, f'{why}; {_RESUME}', stacks=True)

    def _on_signal(self, received: signal.Signals) -> None:
        if (code := _CODES.get(received)) is None:
            return
        if self._phase == 'starting':
            self._connected.wait(10)  # seconds; else the other processes would wait for this one
            self.end(code, f'{received.name} before the first step; run the same command again')
        if self._last_signal == received == signal.SIGINT:
            self.end(code, f'Ctrl-C again: nothing is saved; {_RESUME}')
        self._last_signal = received
        self._tell('stop', code)
        if self._store is None and not self._stop_code:
            self._stop(code)

    def _tell(self, kind: str, notice: Any) -> None:
        """Leaves a notice for all processes; the first of its kind counts."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # told before, or process 0 is gone
            if self._store is not None:
                self._store.key_value_set(f'{_NOTICES}/{kind}', json.dumps(notice))

    def _read_notices(self) -> None:
        notices = {} if self._store is None else dict(self._store.key_value_dir_get(_NOTICES))
        if end := notices.get(f'{_NOTICES}/end'):
            sender, *notice = json.loads(end)
            if sender != self.index:
                self._exit(*notice)
        if (stop := notices.get(f'{_NOTICES}/stop')) and not self._stop_code:
            self._stop(int(stop))

    def _stop(self, code: int) -> None:
        """Agrees with the other processes to stop after the step of the foremost one."""
        print('saves after this step; Ctrl-C again exits at once', file=sys.stderr, flush=True)
        self._stop_code = code
        self.reset_watchdog()
        with self._agreeing:
            ticks = [self._ticks]
            if self._store is not None:
                self._store.key_value_set(f'{_TICKS}/{self.index}', str(self._ticks))
                self._store.wait_at_barrier(_TICKS, int(1000 * _STOPPING))
                ticks = [int(text) for _, text in self._store.key_value_dir_get(_TICKS)]
            self._stop_at = max(ticks) + 1

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
        cluster = detect_cluster(self._launch)
        if cluster is not None and cluster.num_processes > 1:
            self.count, self.index = cluster.num_processes, cluster.process_id
            text = f'{self._name} connects to {cluster.coordinator_address}'
            print(text, file=sys.stderr, flush=True)
            self._abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._on_abort)
            ctypes.pythonapi.PyOS_setsig(signal.SIGABRT, self._abort)
            connect(cluster, self._launch)
            self._store = global_state.client
        self._connected.set()

    def _on_abort(self, _: int) -> None:
        """Exits with the probable reason where jax aborts."""
        why = 'as it does if another process or its host is gone'
        if not self._connected.is_set():
            why = 'as not all processes came, or two have the same --process_id; '
            why += 'expected a --coordinator_address that all hosts reach'
        print(f'{self._name}: jax aborts, {why}', file=sys.stderr, flush=True)
        os._exit(REQUEUE)

    def _fail(self, error: Exception, report: Callable[[BaseException], int]) -> NoReturn:
        """Prints why this process fails, and ends all processes."""
        if self.count > 1 and re.search(_GONE, str(error)):
            time.sleep(_TELLING)  # the other process may be about to say why
            self.end(REQUEUE, f'another process is gone or late: {str(error).splitlines()[0]}')
        code = report(error)
        # A restart would repeat errors of the input and of arithmetic.
        others = code if isinstance(error, UserError | ArithmeticError) else REQUEUE
        why = f'{self._name}: {type(error).__name__}: {error}'
        self._tell('end', [self.index, others, why, False])
        self._exit(code)


@contextlib.contextmanager
def joined_job(launch: Launch, report: Callable[[BaseException], int]) -> Iterator[Job]:
    """Gives the job of this process. An exception within ends all processes of the job.

    `report` prints the exception and returns the exit code.
    """
    job, stopped = Job(launch), ''
    try:
        job._join()
        try:
            yield job
        except Interrupted as interrupted:
            stopped = f'{interrupted}\n{_RESUME} (exit code {job._stop_code})\n'
        job.barrier('the end', seconds=launch.watchdog_seconds)  # process 0 completes a checkpoint
        job._leave()
    except Exception as error:
        job._fail(error, report)
    if stopped:
        print(stopped if job.index == 0 else '', end='', flush=True)
        os._exit(job._stop_code)
