"""Files and folders, on a disk or on a bucket (gs://BUCKET/FOLDER).

A bucket cannot rename, append or lock. A path there is an epath.Path, which has the methods of
pathlib. `atomic_write` writes a file whole or not at all, in both places. `usable` turns the errors
of both into errors for the user.
"""

import contextlib
import errno
import importlib.util
import json
import logging
import os
import pathlib
import re
import tempfile
import uuid
from collections.abc import Iterator
from typing import IO, Any, TypeAlias

from etils import epath

from vit_jax.base.errors import MissingFile, UnusableDisk, UserError, one_line, shown_url

Path: TypeAlias = pathlib.Path | epath.Path  # of a file or folder, on a disk or a bucket

# Orbax and tensorstore misread patterns, a backslash, bytes that are no text, `x:/` and /gs/.
_MISREAD = re.compile(r'[][*?\\\ud800-\udfff]|:(/|$)|^/(gs|s3)(/|$)')
# What orbax and fsspec do not take for a pattern or a query in the path of an object.
_ON_BUCKET = re.compile(r'gs://[^/]+/+(?!/)[^][*?#\x00-\x1f\x7f]+')
_PARTIAL = '.partial'  # ends the name of a file that is not yet whole
_NOT_SUPPORTED = errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK  # by the file system


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is on a bucket or another store, which may not be supported."""
    return '://' in os.fspath(path)


def folder(path: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a folder. Raises UserError for a store that is not supported."""
    text = os.fspath(path)
    if not is_remote(text):
        return pathlib.Path(text).absolute()
    if not _ON_BUCKET.fullmatch(text):
        expected = 'expected a folder on a disk, or gs://BUCKET/FOLDER without any of ?#[]*'
        raise UserError(f'{shown_url(text)}: {expected}')
    if importlib.util.find_spec('gcsfs') is None:
        raise UserError(f"{text}: Google Cloud Storage needs: pip install 'vit_jax[gs]'")
    import fsspec.config

    os.environ['EPATH_USE_TF'] = 'false'  # else epath goes through TensorFlow if that is installed
    # Listings are not kept: orbax and other hosts write there too.
    fsspec.config.conf.setdefault('gcs', {})['use_listings_cache'] = False
    return epath.Path(text)


def make_folder(path: str | os.PathLike[str]) -> None:
    """Makes a folder and those above it, on a disk; a bucket needs none. Raises UnusableDisk."""
    if not is_remote(path):
        with usable(path):
            pathlib.Path(path).mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def named_plainly(folder: Path) -> Iterator[epath.Path]:
    """Yields a name of an existing folder that orbax does not misread: its own, or a link to it."""
    if is_remote(folder) or not _MISREAD.search(os.fspath(folder)):
        yield epath.Path(folder)
        return
    with tempfile.TemporaryDirectory() as links:
        link = pathlib.Path(links) / 'folder'
        link.symlink_to(pathlib.Path(folder).absolute())
        yield epath.Path(link)


@contextlib.contextmanager
def usable(name: object, expected: str = '') -> Iterator[None]:
    """Converts errors raised while using something that the user named into a UserError.

    Converts each OSError, all errors about a path on a bucket, and all errors if `expected` says
    what a parser expects. Other errors are faults of the program and pass.
    """
    ending = f'; expected {expected}' if expected else ''
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_remote(str(name)):  # three clients raise many kinds
            raise UnusableDisk(f'{name}: {one_line(error)}') from error
        if isinstance(error, OSError):
            kind = MissingFile if isinstance(error, FileNotFoundError) else UnusableDisk
            place = str(error.filename or name).removesuffix(_PARTIAL)
            raise kind(f'{place}: {error.strerror or error}{ending}') from error
        if not expected:
            raise
        why = f'{type(error).__name__}: {one_line(error)}'
        raise UserError(f'{name}: cannot be read ({why}){ending}') from error


def require_kept(file: Path) -> None:
    """Raises MissingFile if a file of a run on a disk, or its directory, was removed."""
    if not is_remote(file) and not file.exists():
        gone = f'workdir {file.parent}: {file.name} is gone: it, or the directory, was removed or'
        raise MissingFile(f'{gone} renamed while the run went on; put it back, or begin again')


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[pathlib.Path]:
    """Yields a file to write, which takes the place of `path` on success and is on the disk.

    Raises UnusableDisk or MissingFile if it cannot be written, and UserError if `path` is no file.
    """
    if is_remote(path):
        with tempfile.TemporaryDirectory() as folder:
            partial = pathlib.Path(folder) / path.name
            yield partial
            with usable(path):
                path.write_bytes(partial.read_bytes())
        return
    if os.path.exists(path) and not os.path.isfile(path):  # as root, a device would be replaced
        raise UserError(f'{path}: expected a file, not a folder, a pipe or a device')
    partial = path.with_name(path.name + _PARTIAL)
    with usable(path):
        partial.touch()
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)  # safetensors makes files that only their owner can read
        sync(partial)
        partial.replace(path)
        sync(path.parent)


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
        if error.errno not in _NOT_SUPPORTED:
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
    with usable(path):
        texts = path.read_bytes().splitlines() if path.exists() else []
    lines = []
    for number, text in enumerate(texts, 1):
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            line = json.loads(text)
            if all(isinstance(line[name], kind) for name, kind in fields.items()):
                lines.append(line)
                continue
        if number < len(texts):
            logging.warning('%s, line %d: damaged, left out', path, number)
    return lines


def bucket_and_name(path: Path) -> tuple[Any, str]:
    """Returns the bucket of a path, as google.cloud.storage has it, and the name of its object."""
    from google.cloud import storage

    bucket, _, name = os.fspath(path).removeprefix('gs://').partition('/')
    return storage.Client(project=None).bucket(bucket), name  # objects need no project


def digest_of(size: int, crc32c: str) -> str:
    """What tells that a file has changed, on a disk and on a bucket."""
    return f'{size} bytes, CRC-32C {crc32c}'


def read_digests(folder: Path) -> dict[str, str]:
    """Returns the digests of all objects in a folder, which the bucket states; reads no object.

    An object whose name ends in a slash stands for a folder, as some programs create them.
    """
    with usable(folder):
        bucket, name = bucket_and_name(folder)
        blobs = bucket.list_blobs(prefix=f'{name}/')
        return {
            blob.name.removeprefix(f'{name}/'): digest_of(blob.size, blob.crc32c)
            for blob in blobs
            if not blob.name.endswith('/')
        }


def move(source: Path, target: Path) -> None:
    """Moves a folder on a bucket, object by object."""
    with usable(source):
        (bucket, name), (_, place) = bucket_and_name(source), bucket_and_name(target)
        for blob in bucket.list_blobs(prefix=f'{name}/'):
            bucket.rename_blob(blob, place + blob.name.removeprefix(name))


def require_usable(folder: Path) -> None:
    """Does with an object of its own what a run does in a folder on a bucket.

    Raises UnusableDisk with Google's words about the bucket, the credentials or the permission
    that is missing.
    """
    with usable(folder):
        bucket, name = bucket_and_name(folder / f'.probe-{uuid.uuid4()}')
        probe = bucket.blob(name)
        probe.upload_from_string(b'', if_generation_match=0)
        probe.download_as_bytes()
        list(bucket.list_blobs(prefix=name))
        probe.upload_from_string(b'')  # this too needs the permission to delete
        probe.delete()
