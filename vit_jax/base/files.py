"""Writes files completely or not at all, and reads files within limits.

`atomic_write` replaces a file only when the new contents are complete. `open_file` rejects pipes
and devices, which may block or never end. `Limit` bounds what is read, so that a wrong file cannot
fill the memory.
"""

import codecs
import contextlib
import enum
import errno
import glob
import io
import json
import logging
import os
import pathlib
import re
import secrets
import stat
import tarfile
from collections.abc import Iterator
from typing import IO, Any

from etils import epath

from vit_jax.base.storage import NOT_SUPPORTED, Path, is_remote, sync, usable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_PARTIAL = '.vit_jax-partial'  # suffix of a file that is being written
_DESCRIPTORS = re.compile('/dev/fd|/proc/.*/fd')  # folders whose entries are open files


def _escape(error: UnicodeError) -> tuple[bytes, int]:
    """Returns what is written for characters that an encoding lacks.

    File names need not be Unicode: their bytes, which Python represents by surrogates, are written
    as they are. Other characters are written as `\\xe9` or `\\u732b`.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    parts = []
    for letter in error.object[error.start : error.end]:
        is_byte = '\udc80' <= letter <= '\udcff'
        parts.append(letter.encode('ascii', 'surrogateescape' if is_byte else 'backslashreplace'))
    return b''.join(parts), error.end


ESCAPE = 'vit_jax.escape'  # name of an error handler for encoding text
codecs.register_error(ESCAPE, _escape)


class Limit(enum.IntEnum):
    """Upper bounds of input sizes, well above real files."""

    IMAGE_BYTES = 2**30
    IMAGE_PIXELS = 2**28  # the default: 0.8 GB as RGB. Phone cameras have up to 200 megapixels
    IMAGE_PIXELS_BY_USER = 2**30  # the largest limit that a user may set
    PNG_CHUNKS = 2**18  # pixels are usually split into chunks of 8 kB or more
    METADATA_BYTES = 2**24  # of a text in a PNG after decompression; longer ones are not read
    JSON_BYTES = 2**26  # an index of shards of a model has 0.1 MB, labels of ImageNet have 1 MB
    TABLE_BYTES = 2**32  # a line of a table has about 60 bytes
    TEXT_BYTES = 2**26  # a file of class names
    HEADER_BYTES = 2**24  # of a safetensors file; 160,000 arrays
    PICKLE_BYTES = 2**26  # of a PyTorch file without its tensors
    MODEL_SIDE = 2**12  # pixels of a side of the images that a checkpoint's processor produces
    RESIZED_PIXELS = 2**28  # of an image that is resized before it is cropped


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Yields a binary file whose contents replace `path` if no error is raised.

    On a disk, contents are written to a file with a unique name in the same folder, synced, and
    renamed. If `path` is a link to a file, the file that it names is replaced. Pipes, terminals,
    devices, and links to open files, such as /dev/stdout, are written directly.

    Raises:
      StorageError or MissingFile: If the file cannot be written; the message starts with `path`.
    """
    if is_remote(path):
        contents = io.BytesIO()
        yield contents
        with usable(path):
            path.write_bytes(contents.getvalue())
        return
    if is_special(path):
        with usable(path):
            file = _open_special(path)
        with io.BufferedWriter(file) as buffer:
            yield buffer
        return
    with usable(path):
        with contextlib.suppress(FileNotFoundError):
            os.stat(path)  # raises OSError for a loop of links
        target = os.path.realpath(path)
    _remove_abandoned(target)
    with _create_partial(path, target) as (buffer, partial):
        yield buffer
        with _naming(path):
            buffer.flush()
            sync(pathlib.Path(partial))
            os.replace(partial, target)
            sync(pathlib.Path(target).parent)


class _Output(io.FileIO):
    """A file that is written; its errors name the path of the user."""

    def __init__(self, file: str | int, mode: str, path: Path):
        super().__init__(file, mode)
        self._path = path

    def write(self, contents: Any) -> int:
        with usable(self._path):
            return super().write(contents) or 0


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Converts an OSError, which may name a partial file, into a StorageError that names `path`."""
    with usable(path):
        try:
            yield
        except OSError as error:
            error.filename = os.fspath(path)
            raise


def is_special(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a pipe, a terminal, a device, or a descriptor such as /dev/fd/1."""
    is_other = os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
    return is_other or _find_descriptor(path) is not None


def would_replace(path: str | os.PathLike[str]) -> bool:
    """Returns whether writing this path would replace something that exists."""
    return os.path.lexists(path) and not is_special(path)


def _find_descriptor(path: str | os.PathLike[str]) -> tuple[str, str] | None:
    """Follows links until one is an entry of /proc/PID/fd; returns this folder and the entry."""
    try:
        place = os.path.abspath(path)
    except FileNotFoundError:  # the current folder was removed
        return None
    for _ in range(40):  # the limit of Linux
        folder = os.path.realpath(os.path.dirname(place))
        name = os.path.basename(place)
        if _DESCRIPTORS.fullmatch(folder):
            return folder, name
        if not os.path.islink(place):
            return None
        place = os.path.join(folder, os.readlink(place))
    return None


def _open_special(path: Path) -> _Output:
    """Opens a pipe, device or open file for writing, without truncating it."""
    folder, name = _find_descriptor(path) or ('', '')
    if folder in ('/dev/fd', f'/proc/{os.getpid()}/fd') and name.isdecimal():
        print(end='', flush=True)
        return _Output(os.dup(int(name)), 'wb', path)  # shares the position in the file
    return _Output(os.fspath(path), 'ab', path)


@contextlib.contextmanager
def _create_partial(path: Path, target: str) -> Iterator[tuple[IO[bytes], str]]:
    """Creates and locks a file next to the target; removes it unless it has been renamed."""
    while True:
        name = f'{_partial_prefix(target)}{secrets.token_hex(4)}{_PARTIAL}'
        with _naming(path):
            file = _Output(name, 'xb', path)
        if try_lock(file) is not False and os.fstat(file.fileno()).st_nlink:
            break
        file.close()  # another writer has removed it as abandoned before it was locked
    with contextlib.suppress(OSError):  # a new file, or one of another user
        os.fchmod(file.fileno(), stat.S_IMODE(os.stat(target).st_mode))
    try:
        with io.BufferedWriter(file) as buffer:
            yield buffer, name
    finally:
        with contextlib.suppress(OSError):  # usually, because it was renamed
            os.unlink(name)


def _partial_prefix(target: str) -> str:
    folder, name = os.path.split(target)
    return os.path.join(folder, os.fsdecode(os.fsencode(name)[:200]) + '.')  # names have 255 bytes


def _remove_abandoned(target: str) -> None:
    """Removes unlocked partial files of this target, which killed writers left behind.

    Removes none on file systems without locks, where the writers may be running.
    """
    pattern = f'{glob.escape(_partial_prefix(target))}{"[0-9a-f]" * 8}{_PARTIAL}'
    for path in glob.glob(pattern):
        with contextlib.suppress(OSError), open_file(path, 'r+b') as file:
            if try_lock(file):
                os.unlink(path)


def try_lock(file: IO[Any]) -> bool | None:
    """Tries to lock a file until it is closed; returns False if another process has locked it.

    Returns None if the file system does not support locks.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        return None
    return True


def write_bytes(path: Path, contents: bytes) -> None:
    """Writes a file of these bytes, atomically."""
    with atomic_write(path) as file:
        file.write(contents)


def write_text(path: Path, text: str) -> None:
    """Writes a text file in UTF-8, atomically."""
    write_bytes(path, text.encode('utf-8', ESCAPE))


def write_json(path: Path, values: Any) -> None:
    """Writes values as indented JSON, atomically."""
    write_bytes(path, format_json(values))


def format_json(values: Any) -> bytes:
    """Formats values as indented JSON."""
    return (json.dumps(values, indent=2) + '\n').encode()


def open_file(path: str | os.PathLike[str], mode: str = 'rb', **options: Any) -> Any:
    """Opens a file without waiting for it; `options` are passed to `open`.

    Raises OSError, also for a folder, a pipe or a device; `usable` shows its text to the user.
    """
    require_file(path)
    options = ({} if 'b' in mode else {'encoding': 'utf-8-sig'}) | options
    return open(path, mode, opener=_open_without_waiting, **options)


def require_file(path: str | os.PathLike[str]) -> None:
    """Raises OSError unless a path is a file or a link to a file."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, 'a pipe or device; expected a file', os.fspath(path))


def _open_without_waiting(path: str, flags: int) -> int:
    # Reading some files in /proc would wait for the next event.
    return os.open(path, flags | getattr(os, 'O_NONBLOCK', 0), 0o666)


def read_file(path: Path | str, limit: int) -> bytes:
    """Reads a file of at most `limit` bytes. Raises OSError, also for larger files."""
    if is_remote(path):
        path = epath.Path(path)
        size = path.stat().length
        _require_size(path, size, limit)
        return path.read_bytes()
    require_file(path)
    # A file object would double the time that a small file takes.
    binary = getattr(os, 'O_BINARY', 0)  # on Windows
    descriptor = _open_without_waiting(os.fspath(path), os.O_RDONLY | binary)
    blocks = []
    length = 0
    try:
        size = os.fstat(descriptor).st_size
        _require_size(path, size, limit)
        is_complete = False
        while not is_complete and length <= limit:
            blocks.append(os.read(descriptor, size - length + 1 if size else 2**16))
            length += len(blocks[-1])
            is_complete = not blocks[-1] or length == size > 0  # a file in /proc has the size 0
    except BlockingIOError:  # a file in /proc that has no further data yet
        pass
    finally:
        os.close(descriptor)
    _require_size(path, length, limit)
    return b''.join(blocks)


def _require_size(path: Path | str, size: int, limit: int) -> None:
    if size > limit:
        text = f'{size:,} bytes; expected at most {limit:,}'
        raise OSError(errno.EFBIG, text, os.fspath(path))


def cache_folder() -> pathlib.Path:
    """Returns the folder of downloads, indexes and programs: VIT_JAX_CACHE or ~/.cache/vit_jax."""
    users = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    return pathlib.Path(os.environ.get('VIT_JAX_CACHE') or f'{users}/vit_jax').expanduser()


def read_range(descriptor: int, length: int, offset: int) -> bytes:
    """Reads a part of an open file from any thread. Returns fewer bytes only if the file ends."""
    blocks = [os.pread(descriptor, length, offset)]
    read = len(blocks[0])
    while read < length and blocks[-1]:  # network file systems may return fewer bytes
        blocks.append(os.pread(descriptor, length - read, offset + read))
        read += len(blocks[-1])
    return b''.join(blocks)


def require_tar_end(file: io.BufferedIOBase, archive: tarfile.TarFile) -> None:
    """Raises tarfile.ReadError unless an archive that was read ends with an empty block.

    tarfile takes a damaged or missing header for the end of the archive.
    """
    file.seek(archive.offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f'damaged or cut off at byte {archive.offset:,}')


def read_text(path: Path | str, limit: int = Limit.TEXT_BYTES) -> str:
    """Reads a file of text in UTF-8, with or without a byte order mark."""
    return read_file(path, limit).decode('utf-8-sig')


def decode_path(path: str) -> str:
    """Returns a path as text in UTF-8, in which names have the same letters in every locale.

    With a locale that is not UTF-8, Python decodes the names of files by another encoding.
    """
    return os.fsencode(path).decode('utf-8', 'surrogateescape')


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Parses JSON in UTF-8. Raises ValueError, also for JSON that is nested too deeply."""
    try:
        return json.loads(text, **options)
    except RecursionError as error:
        raise ValueError('JSON that is nested too deeply') from error


def read_json(path: Path | str, **options: Any) -> Any:
    """Reads a JSON file. Raises OSError or ValueError if it cannot be read."""
    return parse_json(read_file(path, Limit.JSON_BYTES), **options)


def read_json_lines(path: Path, **fields: Any) -> list[dict[str, Any]]:
    """Returns the lines of a file that are JSON objects with these fields of these types.

    Returns an empty list if the file does not exist. Other lines are skipped with a warning,
    except the last one, which a killed run may have written in part.
    """
    with usable(path):
        texts = read_file(path, Limit.TABLE_BYTES).splitlines() if path.exists() else []
    lines = []
    for number, text in enumerate(texts, 1):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            line = parse_json(text)
            if all(isinstance(line[name], kind) for name, kind in fields.items()):
                lines.append(line)
                continue
        if number < len(texts):
            logging.warning('%s, line %d: ignored, because it is damaged', path, number)
    return lines
