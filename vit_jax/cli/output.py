"""Standard output and standard error: closed pipes, log lines, progress bars, escaped text."""

import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress


class _ForgivingStream:
    """A text stream that is redirected to /dev/null once writing to it fails."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        return len(text)


def set_up(*, only_prints: bool = False) -> None:
    """Prepares stdout, stderr and logging.

    A program that only prints exits if stdout is closed, as by `| head`; others keep running.
    """
    if not only_prints:
        ignore_closed_pipes()
    if hasattr(sys.stdout, 'reconfigure'):  # file names need not be Unicode
        sys.stdout.reconfigure(errors='surrogateescape')
    _configure_logging()


def ignore_closed_pipes() -> None:
    """Keeps the program running after stdout or stderr is closed, as by `| head -1`."""
    for name in 'stdout', 'stderr':
        stream = getattr(sys, name) or open(os.devnull, 'w')  # None: closed when Python started
        setattr(sys, name, _ForgivingStream(stream))


def progress_bar(**options: Any) -> Progress:
    """Returns progress bars on stderr, shown only on a terminal."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    return Progress(console=console, disable=not sys.stderr.isatty(), **options)


def escape_controls(text: str) -> str:
    """Escapes control characters, so that a file name cannot move the cursor or add a line."""
    return re.sub('[\x00-\x1f\x7f-\x9f]', lambda match: repr(match[0])[1:-1], text)


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


def _drop_traceback(record: logging.LogRecord) -> bool:
    """Drops the traceback of jax's message about a plugin that it cannot load."""
    record.exc_info = record.exc_text = None
    return True
