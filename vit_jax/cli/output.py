"""Standard output and error: closed pipes, log lines, and text from files."""

import io
import logging
import os
import re
import sys
from typing import Any


class _Outlasting(io.FileIO):
    """A file descriptor that becomes the null device when it cannot be written any more."""

    def write(self, data: object) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return super().write(data)  # type: ignore[arg-type]


def printable(text: str) -> str:
    """Escapes control characters, so that a name cannot move the cursor or add a line."""
    return re.sub('[\x00-\x1f\x7f-\x9f]', lambda found: repr(found[0])[1:-1], text)


def log_in_lines() -> None:
    """Prints each warning as a line on stderr, and leaves errors to the program."""
    for level in logging.WARNING, logging.ERROR, logging.CRITICAL:
        logging.addLevelName(level, logging.getLevelName(level).lower())
    logging.basicConfig(level=logging.WARNING, format='%(levelname)s: %(message)s', force=True)
    # orbax logs an error for each array that it cannot write; the first is raised anyway.
    for name in 'absl', 'asyncio':
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger('jax._src.xla_bridge').addFilter(_without_stack)
    logging.getLogger('huggingface_hub').propagate = False  # it prints its warnings itself
    sys.unraisablehook = _print_unless_late


def _without_stack(record: logging.LogRecord) -> bool:
    """Shortens to one line what jax logs about a plugin that it cannot load."""
    record.exc_info = record.exc_text = None
    return True


def _print_unless_late(error: Any) -> None:
    """Prints exceptions that no code can catch.

    Skips errors of tensorstore reads that finish after another read has failed.
    """
    if 'Event loop is closed' not in str(error.exc_value):
        sys.__unraisablehook__(error)


def outlive_readers() -> None:
    """Keeps the program running when stdout or stderr is closed, as by `| head -1`."""
    for name in 'stdout', 'stderr':
        stream = getattr(sys, name)
        if stream is None:  # closed from the start
            setattr(sys, name, open(os.devnull, 'w'))
            continue
        stream.flush()
        try:
            buffer = io.BufferedWriter(_Outlasting(stream.fileno(), 'w', closefd=False))
        except io.UnsupportedOperation:  # in memory
            continue
        text = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True)
        setattr(sys, name, text)
