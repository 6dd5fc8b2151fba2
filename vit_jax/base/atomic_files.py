"""Files on a disk: written whole or not at all, or by lines, synced, locked."""

import contextlib
import errno
import json
import logging
import os
import pathlib
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any

from vit_jax.base.errors import require_regular, usable
from vit_jax.base.storage import Path, is_remote, reaching

# What numpy and zipfile raise for an npz that is damaged, wherever it is.
DAMAGED_NPZ: tuple[type[Exception], ...] = (OSError, EOFError, ValueError, KeyError, RuntimeError)
DAMAGED_NPZ += zipfile.BadZipFile, zlib.error
_NOT_SUPPORTED = errno.EINVAL, errno.ENOTSUP, errno.ENOSYS  # by the file system


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[pathlib.Path]:
    """The file to write; it takes the place of `path` when nothing went wrong, and is on the disk.

    Raises UnusableDisk or MissingFile where it cannot be written.
    """
    if is_remote(path):
        with tempfile.TemporaryDirectory() as here:
            partial = pathlib.Path(here) / path.name
            partial.touch()
            yield partial
            with reaching(path):
                path.write_bytes(partial.read_bytes())
        return
    with _started(path) as partial:
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)  # safetensors makes files that only their owner can read
        sync(partial)
        partial.replace(path)
        sync(path.parent)


def require_writable(path: pathlib.Path) -> None:
    """Raises what `atomic_write` would, before there is anything to write; leaves no file."""
    with _started(path) as partial:
        partial.unlink()


@contextlib.contextmanager
def _started(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Makes the partial file. Errors about it name `path` instead, or its missing folder."""
    partial = path.with_name(path.name + '.partial')
    with usable(path):
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            partial.touch()
            yield partial
        except OSError as error:
            if error.filename == str(partial):
                error.filename = str(path if path.parent.is_dir() else path.parent)
            raise


def sync(path: Path) -> None:
    """Returns when the bytes of a file, or the names in a folder, are on the disk.

    Nothing is promised where the system has no such thing; a store has it when it is written.
    Raises OSError.
    """
    if os.name == 'nt' or is_remote(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
    finally:
        os.close(descriptor)


def locked(file: IO[Any], *, wait: bool = False) -> bool:
    """Locks a file until it is closed; returns False if another process has locked it.

    Returns True, with a warning, if the system has no locks there.
    """
    try:
        import fcntl  # not on Windows
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (*_NOT_SUPPORTED, errno.ENOLCK):
            raise
        logging.warning('%s: no locks here; see that no other run writes there', file.name)
    return True


def write_json(path: Path, values: Any) -> None:
    """Writes JSON, to be read by people too."""
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(values, indent=2) + '\n')


def read_json_lines(path: Path, **fields: Any) -> list[dict[str, Any]]:
    """The lines of a file of JSON objects which have these fields, of these types.

    There are none where there is no file. The last line of a killed run may be half a line; any
    other that is left out is warned of.
    """
    with reaching(path):
        require_regular(path)
        texts = path.read_bytes().splitlines() if path.exists() else []
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        known = isinstance(line, dict) and fields.keys() <= line.keys()
        if known and all(isinstance(line[name], kind) for name, kind in fields.items()):
            lines.append(line)
        elif number < len(texts):
            logging.warning('%s, line %d: damaged, left out', path, number)
    return lines
