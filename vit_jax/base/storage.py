"""Folders on a disk and on a bucket (gs://BUCKET/FOLDER), which cannot rename, append or lock.

A path on a bucket is an epath.Path, which has the methods of pathlib. An object is written whole or
not at all.
"""

import contextlib
import importlib.util
import logging
import os
import pathlib
import re
import tempfile
import uuid
from collections.abc import Iterator
from typing import Any, TypeAlias

from etils import epath

from vit_jax.base.errors import MissingFile, UnusableDisk, UserError, one_line, shown_url

Path: TypeAlias = pathlib.Path | epath.Path  # of a file or folder, on a disk or a bucket

# Orbax and tensorstore read a pattern, a backslash, `x:/` and /gs/ in a path in their own way.
_PLAIN = re.compile(r'(?!/(gs|s3|az|hf)(/|$))(?!.*:(/|$))[^][*?\\\ud800-\udfff]*', re.DOTALL)
# What orbax and fsspec do not take for a pattern or a query in the path of an object.
_ON_BUCKET = re.compile(r'gs://[^/]+/+(?!/)[^][*?#\x00-\x1f\x7f]+')


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is on a bucket or another store, which may not be supported."""
    return '://' in os.fspath(path)


def folder(path: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a folder. Raises UserError for a store that is not supported."""
    text = os.fspath(path)
    if not is_remote(text) and not re.match('(gs|s3|https?):/', text):
        return pathlib.Path(text).absolute()
    if not _ON_BUCKET.fullmatch(text):
        expected = 'expected a folder on a disk, or gs://BUCKET/FOLDER without any of ?#[]*'
        advice = 'in place of S3 take a file system that all hosts mount, such as FSx for Lustre'
        raise UserError(f'{shown_url(text)}: {expected}; {advice}')
    if importlib.util.find_spec('gcsfs') is None:
        raise UserError(f"{text}: Google Cloud Storage needs: pip install 'vit_jax[gs]'")
    import fsspec.config

    for name in 'gcsfs', 'fsspec':  # what they log they raise too
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Else epath goes through TensorFlow if that is installed; it may have been asked before.
    os.environ['EPATH_USE_TF'] = 'false'
    with contextlib.suppress(AttributeError):  # there is no public way
        epath.gpath._is_tf_installed.cache_clear()
    # Listings are not kept: orbax and other hosts write there too.
    fsspec.config.conf.setdefault('gcs', {})['use_listings_cache'] = False
    return epath.Path(text)


@contextlib.contextmanager
def named_plainly(folder: Path) -> Iterator[epath.Path]:
    """Yields a name of an existing folder that orbax does not misread: its own, or a link to it."""
    if is_remote(folder) or _PLAIN.fullmatch(os.fspath(folder)):
        yield epath.Path(folder)
        return
    with tempfile.TemporaryDirectory() as links:
        link = pathlib.Path(links) / 'folder'
        link.symlink_to(pathlib.Path(folder).absolute())
        yield epath.Path(link)


@contextlib.contextmanager
def reaching(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns what the clients of a bucket raise into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # three clients raise many kinds
        if not is_remote(path):
            raise
        raise UnusableDisk(f'{path}: {one_line(error)}') from error


def require_kept(file: Path) -> None:
    """Raises MissingFile if a file of a run on a disk, or its directory, was removed."""
    if not is_remote(file) and not file.exists():
        gone = f'workdir {file.parent}: {file.name} is gone: it, or the directory, was removed or'
        raise MissingFile(f'{gone} renamed while the run went on; put it back, or begin again')


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
    with reaching(folder):
        bucket, name = bucket_and_name(folder)
        blobs = bucket.list_blobs(prefix=f'{name}/')
        return {
            blob.name.removeprefix(f'{name}/'): digest_of(blob.size, blob.crc32c)
            for blob in blobs
            if not blob.name.endswith('/')
        }


def move(source: Path, target: Path) -> None:
    """Moves a folder on a bucket, object by object."""
    with reaching(source):
        (bucket, name), (_, place) = bucket_and_name(source), bucket_and_name(target)
        for blob in bucket.list_blobs(prefix=f'{name}/'):
            bucket.rename_blob(blob, place + blob.name.removeprefix(name))


def require_usable(folder: Path) -> None:
    """Does with an object of its own what a run does in a folder on a bucket.

    Raises UnusableDisk with Google's words about the bucket, the credentials or the permission
    that is missing.
    """
    with reaching(folder):
        bucket, name = bucket_and_name(folder / f'.probe-{uuid.uuid4()}')
        probe = bucket.blob(name)
        probe.upload_from_string(b'', if_generation_match=0)
        probe.download_as_bytes()
        list(bucket.list_blobs(prefix=name))
        probe.upload_from_string(b'')  # this too needs the permission to delete
        probe.delete()
