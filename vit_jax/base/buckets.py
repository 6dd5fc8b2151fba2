"""Lists the files of a bucket (gs://BUCKET/NAME or s3://BUCKET/NAME), and reads their bytes.

A data set of the Hugging Face Hub, hf://OWNER/NAME@COMMIT, is like a bucket that never changes.

Each reply is compared with the version of its file in the listing, so that a file that is replaced
during a run is detected.
"""

import datetime
import importlib.util
import logging
import os
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from vit_jax.base import hub
from vit_jax.base.errors import (
    MissingFile,
    StorageError,
    TransientError,
    UserError,
    format_error,
)
from vit_jax.base.ranges import RangeReader
from vit_jax.base.storage import bucket_and_name, split_url, usable

# How obstore repeats a request that fails for a passing reason.
_RETRIES: dict[str, Any] = {
    'max_retries': 8,
    'retry_timeout': datetime.timedelta(minutes=3),
    'backoff': {
        'init_backoff': datetime.timedelta(seconds=1),
        'max_backoff': datetime.timedelta(seconds=32),
        'base': 2,
    },
}
_TIMEOUT = 120.0  # seconds for one reply
_WAIT = 60.0  # seconds after a server has limited the number of requests
_WAITS = 10


class BucketFile(NamedTuple):
    """A file of a bucket; its version changes when it is replaced."""

    url: str
    size: int
    version: str


def list_folder(url: str) -> tuple[list[BucketFile], list[str]]:
    """Lists the files in a folder of a bucket, and the URLs of its subfolders, both sorted.

    Raises StorageError, for example if the bucket does not exist or credentials are missing.
    """
    _require_packages(url)
    list_store = {'gs': _list_gs, 's3': _list_s3, 'hf': _list_hub}[_scheme(url)]
    with usable(url):
        files, folders = list_store(url.rstrip('/'))
    return sorted(files), sorted(folders)


def _require_packages(url: str) -> None:
    extra = {'gs': 'gs', 's3': 's3', 'hf': 'hub'}[_scheme(url)]
    for package in ['gcsfs', 'obstore'] if extra == 'gs' else ['obstore']:
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"{url}: {package} is not installed; run pip install 'vit_jax[{extra}]'"
            )


def _scheme(url: str) -> str:
    return url.partition('://')[0]


def _list_hub(url: str) -> tuple[list[BucketFile], list[str]]:
    files, folders = hub.list_folder(url)
    return [BucketFile(file, size, '') for file, size in files], folders


def _list_gs(url: str) -> tuple[list[BucketFile], list[str]]:
    """Lists a folder with Google's client, because obstore lists no generations."""
    bucket, name = bucket_and_name(url)
    listing = bucket.list_blobs(
        prefix=f'{name}/' if name else '',
        delimiter='/',
        fields='items(name,size,generation),prefixes,nextPageToken',
    )
    try:
        files = [
            BucketFile(f'gs://{bucket.name}/{blob.name}', int(blob.size), str(blob.generation))
            for blob in listing
            if not blob.name.endswith('/')  # represents a folder
        ]
    except Exception as error:
        code = getattr(error, 'code', None)
        if isinstance(code, int) and (code == 429 or code >= 500):
            raise TransientError(f'{url}: {format_error(error)}') from error
        raise
    return files, [f'gs://{bucket.name}/{folder.rstrip("/")}' for folder in listing.prefixes]


def _list_s3(url: str) -> tuple[list[BucketFile], list[str]]:
    bucket, name = split_url(url)
    try:
        listing = _open_store(url).list_with_delimiter(name or None)
    except Exception as error:
        raise StorageError(
            f'{url}: {_describe(error)}; set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and '
            'AWS_REGION, or AWS_SKIP_SIGNATURE=true for public data'
        ) from error
    files = [
        BucketFile(f's3://{bucket}/{found["path"]}', found['size'], str(found['e_tag']))
        for found in listing['objects']
        if found['path'] != name  # represents the folder
    ]
    return files, [f's3://{bucket}/{folder}' for folder in listing['common_prefixes']]


def read_bucket_file(url: str) -> bytes | None:
    """Reads a small file completely; returns None if it does not exist."""
    _, name = split_url(url)
    try:
        contents, _ = _get(_open_store(url), name, url)
    except MissingFile:
        return None
    return bytes(contents)


def write_bucket_file(url: str, contents: bytes) -> None:
    """Writes a small file. Raises StorageError."""
    _, name = split_url(url)
    try:
        _open_store(url).put(name, contents)
    except Exception as error:
        raise StorageError(f'{url}: {_describe(error)}') from error


def _get(store: Any, name: str, where: str, **options: Any) -> tuple[memoryview, dict[str, Any]]:
    """Reads a file, or a range, without Python's lock. Returns its bytes and its metadata.

    A request that fails for a passing reason is repeated.

    Args:
      store: The bucket.
      name: The name of the file in the bucket.
      where: What is read, for messages.
      **options: Options of the request.

    Raises:
      MissingFile: If the file does not exist.
      StorageError: If reading is not permitted.
      TransientError: For all other reasons.
    """
    import obstore.exceptions as failures

    try:
        reply = store.get(name, options=options)
        return memoryview(reply.bytes()), reply.meta
    except FileNotFoundError as error:
        raise MissingFile(f'{where}: does not exist') from error
    except (failures.PermissionDeniedError, failures.UnauthenticatedError) as error:
        raise StorageError(f'{where}: {_describe(error)}') from error
    except Exception as error:  # obstore has many types
        raise TransientError(f'{where}: {_describe(error)}') from error


def _open_store(url: str) -> Any:
    """Opens a bucket, or the server that STORAGE_EMULATOR_HOST or AWS_ENDPOINT_URL names."""
    from obstore.store import GCSStore, HTTPStore, S3Store

    bucket, _ = split_url(url)
    scheme = _scheme(url)
    headers: dict[str, str] = {}
    if scheme == 'hf':
        server, headers = hub.address(url)
    else:
        variable = {'gs': 'STORAGE_EMULATOR_HOST', 's3': 'AWS_ENDPOINT_URL'}[scheme]
        server = os.environ.get(variable, '')
    options: Any = {
        'retry_config': _RETRIES,
        'client_options': {
            'timeout': datetime.timedelta(seconds=_TIMEOUT),
            'allow_http': server.startswith('http://'),
            'default_headers': headers,
        },
    }
    with usable(url):
        if scheme == 'hf':
            return HTTPStore(server, **options)
        if scheme == 's3':
            return S3Store(bucket, **options)
        if server:
            options['config'] = {'base_url': server}
            options['credential_provider'] = lambda: {'token': 'none', 'expires_at': None}
        return GCSStore(bucket, **options)


def _describe(error: Exception) -> str:
    """Returns the reason in an error of obstore, without XML and details for programmers."""
    text = re.split(r'\s+Debug source:', str(error))[0]
    text = re.sub(r'<\?xml.*<Message>(.*)</Message>.*', r'\1', text, flags=re.DOTALL)
    return ' '.join(text.split())


class BucketReader(RangeReader):
    """Reads ranges of files in one bucket."""

    def __init__(self, files: Sequence[BucketFile]):
        super().__init__([file.size for file in files])
        self.files = files
        self._store = _open_store(files[0].url)
        self._warned = -_WAIT  # the time of the last warning

    def fetch(self, number: int, start: int, stop: int) -> memoryview:
        file = self.files[number]
        if start == stop:
            return memoryview(b'')
        _, name = split_url(file.url)
        where = f'{file.url}: bytes {start:,} to {stop:,}'
        try:
            contents, state = self._get_within_limits(name, where, (start, stop))
        except MissingFile as error:
            raise TransientError(f'{file.url}: was deleted') from error
        version = {'gs': state['version'], 's3': state['e_tag'], 'hf': ''}[_scheme(file.url)]
        if str(version) != file.version:
            raise TransientError(f'{file.url}: was replaced; run the same command again')
        if len(contents) != stop - start:
            raise TransientError(f'{where}: got {len(contents):,} bytes')
        return contents

    def _get_within_limits(
        self, name: str, where: str, span: tuple[int, int]
    ) -> tuple[memoryview, dict[str, Any]]:
        """Reads a range; waits for minutes if the server limits the number of requests."""
        for _ in range(_WAITS):
            try:
                return _get(self._store, name, where, range=span)
            except TransientError as error:
                if '429 Too Many Requests' not in str(error):
                    raise
                with self._lock:
                    if time.monotonic() - self._warned > _WAIT:
                        self._warned = time.monotonic()
                        logging.warning('%s; waits for %d s', error, _WAIT)
                time.sleep(_WAIT)
        return _get(self._store, name, where, range=span)
