"""Standard output and error: closed pipes, log lines, and text from files."""

import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress


class _Outlasting:
    """A text stream that becomes the null device when it cannot be written any more."""

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


def outlive_readers() -> None:
    """Keeps the program running when stdout or stderr is closed, as by `| head -1`."""
    for name in 'stdout', 'stderr':
        stream = getattr(sys, name) or open(os.devnull, 'w')  # None: closed from the start
        setattr(sys, name, _Outlasting(stream))


def progress(**options: Any) -> Progress:
    """Returns progress bars on stderr, which are shown on a terminal only."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    return Progress(console=console, disable=not sys.stderr.isatty(), **options)


def printable(text: str) -> str:
    """Escapes control characters, so that a name cannot move the cursor or add a line."""
    return re.sub('[\x00-\x1f\x7f-\x9f]', lambda match: repr(match[0])[1:-1], text)


def report_unreadable(problems: Sequence[str], total: int) -> int:
    """Prints which of `total` images cannot be read; returns the exit code, 1 if there are any."""
    for problem in sorted(problems):
        print(f'unreadable: {printable(problem)}', file=sys.stderr)
    if problems:
        print(f'{len(problems):,} of {total:,} images cannot be read, left out', file=sys.stderr)
    return 1 if problems else 0


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


def _without_stack(record: logging.LogRecord) -> bool:
    """Shortens to one line what jax logs about a plugin that it cannot load."""
    record.exc_info = record.exc_text = None
    return True
