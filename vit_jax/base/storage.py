"""Folders of this machine, and on a store of objects, which cannot rename, append or lock.

A path there, `gs://BUCKET/FOLDER`, is an epath.Path, which has the methods of pathlib. An object is
written whole or not at all; for the rest of what a run needs there is something else here.
"""

import contextlib
import importlib.util
import logging
import os
import pathlib
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from etils import epath

from vit_jax.base.errors import (
    MissingFile,
    UnusableDisk,
    UserError,
    shown_text,
    shown_url,
)

Path: TypeAlias = pathlib.Path | epath.Path  # of a file or folder, here or on a store

_ROLES = 'roles/storage.objectAdmin and roles/storage.legacyBucketReader have all that is needed'
# Orbax and tensorstore read a pattern, a backslash, `x:/` and /gs/ in a path in their own way.
_PLAIN = re.compile(r'(?!/(gs|s3|az|hf)(/|$))(?!.*:(/|$))[^][*?\\\ud800-\udfff]*', re.DOTALL)
_ELSEWHERE = (
    'only gs://BUCKET/FOLDER (Google Cloud Storage) can be used like a folder; in place of S3 take '
    'a file system that all hosts mount, such as FSx for Lustre or EFS'
)


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Is it on a store, whether or not that can be used?"""
    return '://' in os.fspath(path)


def folder(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a folder. Raises UserError for a store that cannot be used."""
    text = os.fspath(path)
    if match := re.match('(gs|s3|https?):/(?!/)', text):
        lost = f'expected {match[1]}://, as text: a pathlib.Path takes one / away'
        raise UserError(f'{shown_url(text)}: {lost}')
    if not is_remote(text):
        return pathlib.Path(text).absolute()
    if not re.fullmatch(r'gs://[^/]+/+[^/].*', text, re.DOTALL):
        raise UserError(f'{shown_url(text)}: {_ELSEWHERE}')
    if wrong := re.search(r'[][*?#\x00-\x1f\x7f]', text):
        raise UserError(
            f'{text!r}: expected a path without {wrong[0]!r}, which orbax misreads there'
        )
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
    """Around the use of a path: what the clients of a store raise becomes a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # there are three clients, each with kinds of its own
        if not is_remote(path):
            raise
        reason = ' '.join(shown_text(str(error)).split())[:300] or type(error).__name__
        raise UnusableDisk(f'{path}: {reason}') from error


def require_kept(file: Path) -> None:
    """Raises MissingFile where a file of a run, or its whole directory, is there no more.

    Of one on a store its Lease says so.
    """
    if not is_remote(file) and not file.exists():
        gone = f'workdir {file.parent}: {file.name} is gone: it, or the directory, was removed or'
        raise MissingFile(f'{gone} renamed while the run went on; put it back, or begin again')


def checksums(folder: Path) -> dict[str, str]:
    """What the store says of every object below a folder there; nothing is read."""
    with reaching(folder):
        system, root = _file_system(folder)
        found = system.find(root, detail=True)
        return {
            name.removeprefix(f'{root}/'): digest_of(one['size'], one['crc32c'])
            for name, one in found.items()
        }


def digest_of(size: int, crc32c: str) -> str:
    """What is kept of a file, here and on a store, to notice damage."""
    return f'{size} bytes, CRC-32C {crc32c}'


def remove_tree(folder: Path) -> None:
    """Removes a folder and everything in it."""
    with reaching(folder):
        epath.Path(folder).rmtree()


def move(source: Path, target: Path) -> None:
    """Moves a folder on a store, object by object."""
    with reaching(source):
        system, root = _file_system(source)
        system.mv(root, _file_system(target)[1], recursive=True)


def _file_system(path: Path) -> tuple[Any, str]:
    import fsspec

    return fsspec.core.url_to_fs(os.fspath(path))


def require_usable(folder: Path) -> None:
    """Tries with an object of its own what a run does in a folder on a store.

    Raises UserError that names what is missing: the bucket, a permission, credentials.
    """
    from google.api_core import exceptions
    from google.cloud import storage

    bucket, _, name = os.fspath(folder).removeprefix('gs://').partition('/')
    with reaching(folder):
        client = storage.Client(project=None)  # which objects do not need
        probe = client.bucket(bucket).blob(f'{name}/.probe-{uuid.uuid4()}')

    def write() -> None:
        probe.upload_from_string(b'', if_generation_match=probe.generation or 0)

    def write_on_condition() -> None:
        try:
            probe.upload_from_string(b'another', if_generation_match=0)
        except exceptions.PreconditionFailed:
            return
        raise UserError(f'{folder}: this store does not write on conditions, so that none holds it')

    tried: list[tuple[str, Callable[[], Any]]] = [
        ('buckets.get', lambda: client.get_bucket(bucket)),
        ('objects.create', write),
        ('objects.create', write_on_condition),
        ('objects.get', probe.download_as_bytes),
        ('objects.list', lambda: list(client.list_blobs(bucket, prefix=probe.name))),
        ('objects.delete', write),  # what replaces an object deletes that
        ('objects.delete', lambda: probe.delete(if_generation_match=probe.generation)),
    ]
    for permission, attempt in tried:
        with reaching(folder):
            try:
                attempt()
            except exceptions.NotFound as error:
                raise MissingFile(f'{folder}: there is no bucket {bucket}') from error
            except exceptions.Forbidden as error:
                missing = f'permission storage.{permission} is missing on {bucket}; {_ROLES}'
                said = error.message.partition(': ')[2][:200]  # after method and URL
                raise UnusableDisk(f'{folder}: {missing} ({said})') from error
