"""A limit in time that a process had: what passes while it is suspended does not count."""

import threading
import time
from collections.abc import Callable

_LOOK = 0.5  # seconds between two looks at the clock


class Countdown:
    """Calls `act`, in a thread of its own, when its seconds have passed without a restart.

    A stopped process (SIGSTOP, a suspended job, a sleeping machine) goes on as if no time had
    passed. The thread is a Python one: where something keeps the interpreter's lock it waits too.
    """

    def __init__(self, act: Callable[[float], None]):
        self._act, self._lock = act, threading.Lock()
        self._seconds = self._left = float('inf')
        self._thread: threading.Thread | None = None
        self._ended = False

    @property
    def runs(self) -> bool:
        """Was it started, and neither cancelled nor done?"""
        return self._left < float('inf')

    def restart(self, seconds: float) -> None:
        """Gives it so many seconds from now."""
        with self._lock:
            if self._ended:
                return
            self._seconds = self._left = seconds
            if self._thread is None:
                self._thread = threading.Thread(target=self._count, daemon=True)
                self._thread.start()

    def cancel(self) -> None:
        """It does nothing until it is restarted."""
        with self._lock:
            self._left = float('inf')

    def end(self) -> None:
        """It does nothing any more, and cannot be restarted."""
        with self._lock:
            self._ended, self._left = True, float('inf')

    def _count(self) -> None:
        while True:
            before = time.monotonic()
            time.sleep(min(_LOOK, max(0.01, self._left)))
            with self._lock:
                self._left -= min(time.monotonic() - before, 2 * _LOOK)
                over = self._left <= 0
                if over:
                    self._left = float('inf')
            if over:
                self._act(self._seconds)
