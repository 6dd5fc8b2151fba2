"""Standard output and standard error: closed pipes, log lines, progress bars, escaped text."""

import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from vit_jax.base import StorageError
from vit_jax.base.files import ESCAPE

# Control characters, separators of lines, and marks of the writing direction.
_CONTROLS = '[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]'


class _Stream:
    """A text stream that is redirected to /dev/null once writing to it fails.

    With `is_needed`, the failure is raised as StorageError, or, with `is_read`, as BrokenPipeError
    if nobody reads the stream any more.
    """

    def __init__(self, stream: Any, name: str, *, is_needed: bool):
        self._stream = stream
        self._name = name
        self._is_needed = self.is_read = is_needed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if isinstance(error, BrokenPipeError):
                if self.is_read:
                    raise
            elif self._is_needed:
                raise StorageError(f'{self._name}: {error.strerror}') from error
        return len(text)


def set_up(*, only_prints: bool = False) -> None:
    """Prepares stdout, stderr and logging.

    A program that only prints exits if stdout is closed, as by `| head`; others keep running.
    """
    for name in 'stdout', 'stderr':
        stream = getattr(sys, name) or open(os.devnull, 'w')  # None: closed when Python started
        if hasattr(stream, 'reconfigure'):
            stream.reconfigure(errors=ESCAPE)
        is_needed = only_prints and name == 'stdout'
        setattr(sys, name, _Stream(stream, name, is_needed=is_needed))
    _configure_logging()
    sys.excepthook = _print_exception


def ignore_closed_pipes() -> None:
    """Keeps the program running after stdout is closed, as by `| head -1`."""
    if isinstance(sys.stdout, _Stream):
        sys.stdout.is_read = False


def escape_controls(text: str) -> str:
    """Escapes characters with which a file name could move the cursor or reorder text."""
    return re.sub(_CONTROLS, lambda match: ascii(match[0])[1:-1], text)


def report_unreadable(problems: Sequence[str], total: int) -> int:
    """Prints these messages about unreadable images; returns the exit code, 1 if there are any."""
    for problem in sorted(problems):
        print(f'unreadable: {escape_controls(problem)}', file=sys.stderr)
    if problems:
        print(f'{len(problems):,} of {total:,} images cannot be read; skipped', file=sys.stderr)
    return 1 if problems else 0


def _configure_logging() -> None:
    """Configures logging: warnings are lines on stderr; the program itself reports errors."""
    for level in logging.WARNING, logging.ERROR, logging.CRITICAL:
        logging.addLevelName(level, logging.getLevelName(level).lower())
    logging.basicConfig(level=logging.WARNING, format='%(levelname)s: %(message)s', force=True)
    # orbax logs an error for each array that it cannot write, and also raises the first one.
    for name in 'absl', 'asyncio':
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger('jax._src.xla_bridge').addFilter(_drop_traceback)
    logging.getLogger('huggingface_hub').propagate = False  # has its own handler


def _print_exception(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Prints an uncaught exception; ignores tensorstore's exceptions after a failed write."""
    if not (kind is RuntimeError and str(error) == 'Event loop is closed'):
        sys.__excepthook__(kind, error, trace)


def _drop_traceback(record: logging.LogRecord) -> bool:
    """Drops the traceback of jax's message about a plugin that it cannot load."""
    record.exc_info = record.exc_text = None
    return True
