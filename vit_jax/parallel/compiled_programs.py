"""Compiled programs that are kept on the disk: started again, a program need not be compiled.

What is the same program jax decides (its persistent compilation cache: program, options, versions
and devices make the key). Here it is where they lie, that a file is whole or is not there, and that
they do not grow without end.
"""

import contextlib
import hashlib
import logging
import os
import pathlib
import platform
import tempfile

import jax
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

MOST_BYTES = 4 * 2**30  # of all kept programs; those that were not used for longest go first
_DIGEST = hashlib.sha256().digest_size


class KeptPrograms(CacheInterface):
    """The files of a folder, by key.

    Any failure is a program that is compiled again. jax's own files may be cut, by a kill or a full
    disk: each start then warns of them and compiles, and never mends them.
    """

    def __init__(self, folder: pathlib.Path, *, most_bytes: int = MOST_BYTES):
        self._path, self._most = folder, most_bytes
        self._failed = False

    def get(self, key: str) -> bytes | None:
        """What was kept; None where there is nothing, or nothing whole."""
        path = self._path / key
        try:
            data = path.read_bytes()
            if hashlib.sha256(data[_DIGEST:]).digest() == data[:_DIGEST]:
                os.utime(path)  # when it was last used
                return data[_DIGEST:]
            path.unlink()
        except OSError:
            pass
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keeps it, and makes room for it; warns once where that fails."""
        try:
            with tempfile.NamedTemporaryFile(dir=self._path, delete=False) as file:
                try:
                    file.write(hashlib.sha256(value).digest() + value)
                    file.close()
                    os.replace(file.name, self._path / key)
                except BaseException:
                    os.unlink(file.name)
                    raise
            self._make_room()
        except OSError as error:
            if not self._failed:
                logging.warning('compiled programs are not kept: %s', error)
            self._failed = True

    def _make_room(self) -> None:
        kept = [(entry.stat(), entry.path) for entry in os.scandir(self._path) if entry.is_file()]
        total = sum(found.st_size for found, _ in kept)
        for found, path in sorted(kept, key=lambda one: one[0].st_mtime_ns):
            if total <= self._most:
                break
            with contextlib.suppress(FileNotFoundError):  # another process makes room too
                os.unlink(path)
            total -= found.st_size


def keep(folder: pathlib.Path) -> pathlib.Path | None:
    """From here on compiled programs are kept in a part of this folder, which is returned.

    It is of this user alone, as who can write there can run code as the reader, and of processors
    like this one, for which they were compiled. Returns None, and warns, where it cannot be used.
    """
    user = str(os.getuid()) if hasattr(os, 'getuid') else 'user'
    place = folder / f'{user}-{_processor()}'
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = place.stat()
        if user.isdecimal() and (found.st_uid != os.getuid() or found.st_mode & 0o022):
            raise PermissionError(f'{place}: others can write there')
    except OSError as error:
        logging.warning('compiled programs are not kept: %s', error)
        return None
    compilation_cache.get_file_cache = lambda path: (KeptPrograms(pathlib.Path(path)), path)
    jax.config.update('jax_compilation_cache_dir', str(place))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)  # there are many small
    return place


def _processor() -> str:
    """A digest of what programs for this host's processor may use."""
    try:
        lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    except OSError:
        lines = []
    can = next((line for line in lines if line.startswith(('flags', 'Features'))), '')
    about = ' '.join([platform.machine(), platform.processor(), *sorted(can.split())])
    return hashlib.sha256(about.encode()).hexdigest()[:12]
