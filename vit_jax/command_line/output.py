"""Output that nobody reads any more, that a disk has no room for, or that is text of others."""

import contextlib
import errno
import io
import logging
import os
import re
import sys
from typing import Any

from vit_jax.base.errors import UnusableDisk


class _Outlasting(io.FileIO):
    """A file descriptor that becomes the null device when it cannot be written."""

    def write(self, data: object) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            # Not where a reader went away, or stdout was closed from the start.
            if error.errno not in (errno.EPIPE, errno.EIO, errno.EBADF):
                with contextlib.suppress(OSError):
                    os.write(2, f'error: output is lost: {error.strerror}\n'.encode())
            _drop(self.fileno())
            return super().write(data)  # type: ignore[arg-type]


class _Required(io.FileIO):
    """A file descriptor that raises UnusableDisk when it cannot be written, whoever reads it."""

    def write(self, data: object) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            raise
        except OSError as error:
            _drop(self.fileno())  # what is left is not tried again at the exit
            why = 'closed' if error.errno == errno.EBADF else error.strerror
            raise UnusableDisk(f'standard output: {why}') from error


def _drop(descriptor: int) -> None:
    """What is written to it from here on is lost, that of C++ code too."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def printable(text: str) -> str:
    """The text with its control characters escaped: a name cannot move the cursor or add a line."""
    return re.sub('[\x00-\x1f\x7f-\x9f]', lambda found: repr(found[0])[1:-1], text)


def log_in_lines() -> None:
    """A warning is a line on stderr; libraries leave errors to this program."""
    for level in logging.WARNING, logging.ERROR, logging.CRITICAL:
        logging.addLevelName(level, logging.getLevelName(level).lower())
    logging.basicConfig(level=logging.WARNING, format='%(levelname)s: %(message)s', force=True)
    # Of each array that orbax cannot write these say so; the first is raised, which is enough.
    for name in 'absl', 'asyncio':
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger('jax._src.xla_bridge').addFilter(_without_stack)
    logging.getLogger('huggingface_hub').propagate = False  # it prints its warnings itself
    sys.unraisablehook = _said_unless_late


def _without_stack(record: logging.LogRecord) -> bool:
    """Leaves a line of what jax says about a plugin that cannot be loaded."""
    record.exc_info = record.exc_text = None
    return True


def _said_unless_late(error: Any) -> None:
    """Prints exceptions that are raised where no caller can catch them.

    Does not print the error of a tensorstore read if another read has already failed.
    """
    if 'Event loop is closed' not in str(error.exc_value):
        sys.__unraisablehook__(error)


def replace_missing_streams() -> None:
    """What the program was started without, stdout or stderr, is the null device from here on."""
    for name in 'stdout', 'stderr':
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, 'w'))


def outlive_readers() -> None:
    """From here on stdout and stderr are dropped, each from the moment on when it breaks."""
    replace_missing_streams()
    for name in 'stdout', 'stderr':
        _replace(name, _Outlasting)


def require_stdout() -> None:
    """From here on it is an error that stdout cannot be written, or was closed from the start."""
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), 'r')
    replace_missing_streams()
    _replace('stdout', _Required)


def _replace(name: str, kind: type[io.FileIO]) -> None:
    """Makes stdout or stderr a stream of this kind, on the same descriptor."""
    stream = getattr(sys, name)
    stream.flush()
    try:
        raw = kind(stream.fileno(), 'w', closefd=False)
    except io.UnsupportedOperation:  # kept in memory
        return
    raw.replaced = stream  # type: ignore[attr-defined]  # which would close the descriptor
    buffer = io.BufferedWriter(raw)
    text = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True)
    setattr(sys, name, text)
