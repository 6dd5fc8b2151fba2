"""Files that are written whole or not at all, synced to the disk, locked; lines of JSON."""

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
    """Yields a file to write, which takes the place of `path` on success and is on the disk.

    Raises UnusableDisk or MissingFile if it cannot be written, and UserError if `path` is no file.
    """
    if is_remote(path):
        with tempfile.TemporaryDirectory() as folder:
            partial = pathlib.Path(folder) / path.name
            yield partial
            with reaching(path):
                path.write_bytes(partial.read_bytes())
        return
    with _partial_file(path) as partial:
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)  # safetensors makes files that only their owner can read
        sync(partial)
        partial.replace(path)
        sync(path.parent)


def require_writable(path: pathlib.Path) -> None:
    """Raises what `atomic_write` would, before there is anything to write; leaves no file."""
    with _partial_file(path) as partial:
        partial.unlink()


@contextlib.contextmanager
def _partial_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Makes a file next to `path`. Errors about it name `path` instead, or its missing folder."""
    require_regular(path)
    partial = path.with_name(path.name + '.partial')
    with usable(path if path.parent.is_dir() else path.parent):
        try:
            partial.touch()
            yield partial
        except OSError as error:
            if error.filename == str(partial):
                error.filename = None
            raise


def sync(path: Path) -> None:
    """Returns when the bytes of a file, or the names in a folder, are on the disk.

    A bucket has them once they are written; some file systems cannot promise it. Raises OSError.
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


def locked(file: IO[Any]) -> bool:
    """Locks a file until it is closed; returns False if another process has locked it.

    Returns True, with a warning, if the file system has no locks.
    """
    import fcntl  # not on Windows

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    """Returns the lines of a file that are JSON objects with these fields, of these types.

    Returns none if there is no file. Warns of other lines but the last: a killed run may have
    written half of it.
    """
    with reaching(path):
        require_regular(path)
        texts = path.read_bytes().splitlines() if path.exists() else []
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            fits = all(isinstance(line[name], kind) for name, kind in fields.items())
        except (ValueError, TypeError, KeyError, RecursionError):
            fits = False
        if fits:
            lines.append(line)
        elif number < len(texts):
            logging.warning('%s, line %d: damaged, left out', path, number)
    return lines
