"""Files and folders on a disk or on a Google Cloud Storage bucket (gs://BUCKET/FOLDER).

A path on a bucket is an epath.Path, which has the methods of pathlib. A bucket cannot rename,
append or lock. `usable` converts errors of disks and buckets into errors for the user.
"""

import contextlib
import errno
import importlib.util
import os
import pathlib
import re
import tempfile
import uuid
from collections.abc import Iterator
from typing import Any, TypeAlias

from etils import epath

from vit_jax.base import hub
from vit_jax.base.errors import (
    MissingFile,
    StorageError,
    TransientError,
    UserError,
    format_error,
    redact_url,
)

Path: TypeAlias = pathlib.Path | epath.Path  # of a file or folder, on a disk or a bucket

# Orbax and tensorstore misread glob patterns, backslashes, non-UTF-8 bytes, `x:/` and /gs/.
_UNSAFE_FOR_ORBAX = re.compile(r'[][*?\\\ud800-\udfff]|:(/|$)|^/(gs|s3)(/|$)')
# Paths that orbax and fsspec do not interpret as a glob pattern or as a URL with a query.
_BUCKET_PATH = re.compile(r'gs://[^/]+/+(?!/)[^][*?#\x00-\x1f\x7f]+')
# The file system does not support the operation.
NOT_SUPPORTED = errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL, also one of a store that is not supported."""
    return '://' in os.fspath(path)


def resolve_folder(path: str | os.PathLike[str]) -> Path:
    """Returns a folder as a path, absolute on a disk, or an epath.Path on a bucket.

    Raises UserError if the URL is not supported, or if gcsfs is not installed.
    """
    text = os.fspath(path)
    if not is_remote(text):
        return pathlib.Path(text).absolute()
    if not _BUCKET_PATH.fullmatch(text):
        raise UserError(
            f'{redact_url(text)}: expected a folder on a disk, or gs://BUCKET/FOLDER without any '
            'of ?#[]*'
        )
    if importlib.util.find_spec('gcsfs') is None:
        raise UserError(f"{text}: gcsfs is not installed; run pip install 'vit_jax[gs]'")
    import fsspec.config

    os.environ['EPATH_USE_TF'] = 'false'  # else epath uses TensorFlow if it is installed
    # Cached listings would be stale, because orbax and other hosts also write to the bucket.
    fsspec.config.conf.setdefault('gcs', {})['use_listings_cache'] = False
    return epath.Path(text)


def make_folder(path: str | os.PathLike[str]) -> None:
    """Creates a folder and its parents on a disk; does nothing on a bucket, which has no folders.

    Raises StorageError if the folder cannot be created.
    """
    if not is_remote(path):
        with usable(path):
            try:
                pathlib.Path(path).mkdir(parents=True, exist_ok=True)
            except FileExistsError as error:
                raise StorageError(f'{path}: not a folder') from error


@contextlib.contextmanager
def orbax_safe_path(folder: Path) -> Iterator[epath.Path]:
    """Yields a path of an existing folder that orbax does not misread: its own, or a symlink."""
    if is_remote(folder) or not _UNSAFE_FOR_ORBAX.search(os.fspath(folder)):
        yield epath.Path(folder)
        return
    with tempfile.TemporaryDirectory() as links:
        link = pathlib.Path(links) / 'folder'
        link.symlink_to(pathlib.Path(folder).absolute())
        yield epath.Path(link)


@contextlib.contextmanager
def usable(name: object, expected: str = '') -> Iterator[None]:
    """Converts exceptions within the context into a UserError that starts with `name`.

    Converts every OSError, every exception if `name` is a URL, and every exception if `expected` is
    given. Other exceptions are bugs and pass through. If an OSError names a file, the message
    starts with that file.

    Args:
      name: The file, folder, URL or flag of the user that is used in the context.
      expected: What `name` should have been, for the message.
    """
    ending = f'; expected {expected}' if expected else ''
    try:
        yield
    except (UserError, TransientError):
        raise
    except Exception as error:
        if is_remote(str(name)):  # the clients of buckets raise many exception types
            raise StorageError(f'{name}: {format_error(error)}') from error
        if isinstance(error, OSError):
            kind = MissingFile if isinstance(error, FileNotFoundError) else StorageError
            raise kind(f'{error.filename or name}: {error.strerror or error}') from error
        if not expected:
            raise
        why = f'{type(error).__name__}: {format_error(error)}'
        raise UserError(f'{name}: cannot be used ({why}){ending}') from error


def require_exists(file: Path) -> None:
    """Raises MissingFile if a file that a run has written to a disk no longer exists."""
    if not is_remote(file) and not file.exists():
        gone = f'workdir {file.parent}: the directory or its {file.name} was removed or renamed'
        raise MissingFile(f'{gone} during the run; restore it, or start again')


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk (fsync).

    Does nothing for a bucket, on Windows, and on file systems without fsync. Raises OSError.
    """
    if os.name == 'nt' or is_remote(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
    finally:
        os.close(descriptor)


def split_url(url: str) -> tuple[str, str]:
    """Splits gs://BUCKET/NAME or s3://BUCKET/NAME into the names of bucket and object.

    Of hf://OWNER/NAME@COMMIT/PATH, returns OWNER/NAME@COMMIT and PATH.
    """
    if url.startswith('hf://'):
        return hub.split_url(url)
    bucket, _, name = url.partition('://')[2].partition('/')
    return bucket, name


def bucket_and_name(path: str | Path) -> tuple[Any, str]:
    """Returns the google.cloud.storage bucket of a path, and the name of its object."""
    from google.cloud import storage

    bucket, name = split_url(os.fspath(path))
    return storage.Client(project=None).bucket(bucket), name  # objects need no project


def format_digest(size: int, crc32c: str) -> str:
    """Formats the digest of a file, which is the same on a disk and on a bucket."""
    return f'{size} bytes, CRC-32C {crc32c}'


def read_digests(folder: Path) -> dict[str, str]:
    """Returns the digests of all objects in a folder from the bucket's metadata, by name.

    Leaves out objects whose name ends in a slash: some programs create them to represent folders.
    """
    with usable(folder):
        bucket, name = bucket_and_name(folder)
        blobs = bucket.list_blobs(prefix=f'{name}/')
        return {
            blob.name.removeprefix(f'{name}/'): format_digest(blob.size, blob.crc32c)
            for blob in blobs
            if not blob.name.endswith('/')
        }


def move_bucket_folder(source: Path, target: Path) -> None:
    """Moves a folder on a bucket, object by object."""
    with usable(source):
        bucket, old = bucket_and_name(source)
        _, new = bucket_and_name(target)
        for blob in bucket.list_blobs(prefix=f'{old}/'):
            bucket.rename_blob(blob, new + blob.name.removeprefix(old))


def require_writable_bucket(folder: Path) -> None:
    """Checks that objects can be written, read, listed and deleted in a folder on a bucket.

    Raises StorageError with Google's message about a missing bucket, credential or permission.
    """
    with usable(folder):
        bucket, name = bucket_and_name(folder / f'.probe-{uuid.uuid4()}')
        probe = bucket.blob(name)
        probe.upload_from_string(b'', if_generation_match=0)
        probe.download_as_bytes()
        list(bucket.list_blobs(prefix=name))
        probe.upload_from_string(b'')  # overwriting needs the permission to delete
        probe.delete()
