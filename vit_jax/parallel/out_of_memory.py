"""The end of a process that gets no more memory."""

import queue
import sys
import threading
from collections.abc import Callable
from typing import Any


def when_exhausted(act: Callable[[str], object]) -> None:
    """Calls `act` with a sentence where a thread finds no memory to begin, or a callback to run.

    Python only prints that, and what waits for the thread or callback would wait for ever.
    """

    def watch() -> None:
        while not issubclass((found := unraised.get()).exc_type, MemoryError):
            sys.__unraisablehook__(found)
            del found  # the object whose end raised it
        act(
            'out of memory, where a thread or a callback was to begin: give this process more '
            '(ulimit -v); the same command goes on from the newest checkpoint'
        )

    unraised = queue.SimpleQueue[Any]()
    sys.unraisablehook = unraised.put  # written in C: a function in Python would need memory
    threading.Thread(target=watch, daemon=True).start()
