"""Downloads remote checkpoints. Their names are:

    hf:OWNER/NAME[@REVISION]                    a repository of the Hugging Face Hub
    https://HOST/FILE[:SUBTREE][?QUERY][#sha256=DIGEST]
                                                a file, compared with the digest if it is given
    gs://BUCKET/FILE[:SUBTREE]                  a public file on Google Cloud Storage
    gs://BUCKET/FOLDER                          a work directory of vit_jax, read in place
    augreg:B/16, vit:L/16-in21k                 published files (published.csv)

Every other name is a local path and causes no network access. `huggingface_hub` downloads
repositories to its own cache. Files are downloaded to CACHE/DIGEST-OF-URL/FILE.

published.csv lists the checkpoints of two papers: addresses and sizes from the README of
vision_transformer. The suffix -in21k denotes a model pre-trained on ImageNet-21k. Models without it
were then fine-tuned on ImageNet, at 384 pixels or at the size in the name. The bucket of these
addresses has returned HTTP 403 for everyone since February 2026 (vision_transformer issue 321).
19 of 36 names also have a copy on the Hugging Face Hub, in timm's or transformers' format. An
AugReg name has a copy only if timm converted exactly this file, according to timm's source
(1.0.31); timm's other AugReg models have other hyperparameters. The copies of vit:...-in21k have no
head; the heads in the paper's files are all zeros. The address of a copy has a commit if a page of
the Hub shows that this commit contains the weights.
"""

import contextlib
import csv
import hashlib
import itertools
import logging
import os
import pathlib
import re
import shutil
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from vit_jax.base import (
    MissingFile,
    StorageError,
    UserError,
    atomic_write,
    hub,
    records,
    require,
)
from vit_jax.base.errors import format_error, redact_url
from vit_jax.base.files import cache_folder, open_file
from vit_jax.base.progress import progress_bar
from vit_jax.checkpoints.formats.array_files import (
    DESCRIPTIONS,
    ENDINGS,
    INDEX,
    WEIGHTS,
    DamagedFile,
)

_FOLDER = re.compile(r'gs://[^/?@]+/[^#?]*')
_ENDINGS = '|'.join(map(re.escape, ENDINGS))
_FILE = re.compile(  # the subtree comes before the query, because queries may contain colons
    rf'(?P<address>(?:https?|gs)://[^/?#\s@]+/[^?#\s]*?(?:{_ENDINGS}))(?::(?P<subtree>[^#?\s]+))?'
    r'(?P<query>[?][^#\s]*)?(?:#sha256=(?P<sha256>[0-9a-fA-F]{64}))?'
)
_EXPECTED = (
    'expected hf:OWNER/NAME[@REVISION], https://HOST/FILE[#sha256=DIGEST], gs://BUCKET/FILE, '
    f'augreg:NAME, vit:NAME or a local path; a FILE ends with one of {", ".join(ENDINGS)}'
)

_TIMEOUT_SECONDS = 60  # until a server that sends nothing counts as dead


class Published(NamedTuple):
    """Addresses and size of a published checkpoint."""

    address: str
    mebibytes: int  # from the README; 4 bytes per parameter
    copy: str | None = None  # a Hub repository with the same model; its digest is unknown


_TABLE = pathlib.Path(__file__).with_name('published.csv').read_text(encoding='utf-8').splitlines()
PUBLISHED = {  # by name
    row['name']: Published(row['address'], int(row['mebibytes']), row['copy'] or None)
    for row in csv.DictReader(_TABLE)
}


class Local(NamedTuple):
    """The local copy of a checkpoint."""

    path: str
    origin: tuple[str, ...] = ()  # lines with the URL, commit and digests of a download


def is_remote_name(name: str) -> bool:
    """Returns whether a name denotes a remote checkpoint."""
    return re.match('(?:hf|augreg|vit):|[A-Za-z][A-Za-z0-9+]+:/', name) is not None


def redact(name: str) -> str:
    """Returns the name without the user and query of a URL, which may contain secrets."""
    return redact_url(name) if is_remote_name(name) else name


def to_path(name: str) -> str:
    """Returns the name as a path, without a digest; `augreg:B/16` becomes `augreg-B-16`."""
    if name in PUBLISHED:
        return re.sub('[:/]', '-', name)
    return redact(name).partition('#sha256=')[0]


def require_local(path: str) -> None:
    """Raises UserError for a remote name."""
    require(not is_remote_name(path), f'{redact(path)}: cannot be written; expected a local path')


def fetch(name: str) -> Local:
    """Returns the local copy of a checkpoint; downloads it if it is not in the cache.

    Raises:
      UserError: If the name is invalid or the download fails; the message starts with the name.
    """
    if not is_remote_name(name):
        return Local(name)
    try:
        if match := hub.NAME.fullmatch(name):
            return _download_repository(match['repository'], match['revision'])
        if match := _FILE.fullmatch(name):
            return _download_file(match)
        if name.startswith(('augreg:', 'vit:')):
            return _download_published(name)
        require(_FOLDER.fullmatch(name) is not None, _EXPECTED)
        return Local(name)
    except UserError as error:
        text = str(error).removeprefix(f'{redact(name)}: ')
        raise type(error)(f'{redact(name)}: {text}') from error


def _download_published(name: str) -> Local:
    """Downloads the published file, or its copy on the Hub if that fails.

    Raises MissingFile for an unknown name.
    """
    if name not in PUBLISHED:
        raise MissingFile(
            f'unknown name; {records.closest(name, PUBLISHED)} (docs/checkpoint_names.md lists all)'
        )
    file = PUBLISHED[name]
    try:
        return fetch(file.address)
    except StorageError:
        raise
    except UserError as error:
        if file.copy is None:
            raise
        why = str(error)
    logging.warning('%s; now downloading the copy %s', why, file.copy)
    downloaded = fetch(file.copy)
    text = f'{why}; using the copy {file.copy}, which was not compared with the original file'
    return downloaded._replace(origin=(text, *downloaded.origin))


def _download_repository(repository: str, revision: str | None) -> Local:
    """Downloads the weights and JSON files of a repository on the Hugging Face Hub."""
    try:
        from huggingface_hub import constants, snapshot_download
    except ImportError as error:
        raise UserError("needs huggingface_hub; run pip install 'vit_jax[hub]'") from error
    url = redact_url(f'{constants.ENDPOINT}/{repository}')
    for file in WEIGHTS:  # the first kind of weights that the repository has
        stem, _, ending = file.partition('.')
        weights = [file, f'{file}{INDEX}', f'{stem}-*-of-*.{ending}']
        patterns = [*DESCRIPTIONS, *weights]
        try:
            place = snapshot_download(repository, revision=revision, allow_patterns=patterns)
        except Exception as error:  # the client raises many types
            hint = ''
            if type(error).__name__ == 'RepositoryNotFoundError':
                hint = '; data sets belong to --config.data'
            raise UserError(f'{url}: {format_error(error)}{hint}') from error
        folder = pathlib.Path(place)
        revision = folder.name  # the same commit for all kinds of weights, as a branch may move
        if paths := sorted(path for pattern in weights for path in folder.glob(pattern)):
            digests = [f'{path.name}: SHA-256 {_verified_digest(path)}' for path in paths]
            return Local(place, (f'{url}, commit {revision}', *digests))
    raise MissingFile(f'{url}, commit {revision}: no weights; expected one of {[*WEIGHTS]}')


def _verified_digest(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file from the Hub. Raises UserError if the Hub declares another.

    The client compares only lengths. Its cache links the file to one named by the declared digest.
    """
    digest = _digest(path)
    blob = path.resolve()
    is_declared = re.fullmatch('[0-9a-f]{64}', blob.name) is not None
    if is_declared and digest != blob.name:
        raise UserError(
            f'{path.name}: expected the SHA-256 {blob.name}, got {digest}; '
            f'remove {blob} to download it again'
        )
    return digest


def _download_file(match: re.Match[str]) -> Local:
    """Downloads the file that a match of _FILE names."""
    path, digest = fetch_url(match['address'] + (match['query'] or ''), match['sha256'])
    subtree = f':{match["subtree"]}' if match['subtree'] else ''
    origin = redact_url(_public_url(match['address'])), f'SHA-256 {digest}'
    return Local(f'{path}{subtree}', origin)


def fetch_url(url: str, sha256: str | None = None) -> tuple[pathlib.Path, str]:
    """Downloads a URL to the cache, unless it is there.

    Args:
      url: An https://, http:// or gs:// address.
      sha256: The expected digest. A cached file with another digest is downloaded again.

    Returns:
      The path in the cache, and the SHA-256 of the file.

    Raises:
      StorageError: If the cache cannot be written.
      UserError: If the download fails; nothing is left in the cache then.
    """
    import requests  # slow to import, and needed only for downloads

    url = _public_url(url)
    shown = redact_url(url)
    name = os.fsencode(shown.rpartition('/')[2])[-200:].decode('utf-8', 'ignore')  # of 255 bytes
    path = cache_folder() / hashlib.sha256(url.encode()).hexdigest()[:16] / name
    expected = sha256.lower() if sha256 else None
    try:
        if path.exists() and (digest := _digest(path)) == (expected or digest):
            return path, digest
        path.parent.mkdir(parents=True, exist_ok=True)
        # A compressed response could expand to more than the free space.
        headers = {'Accept-Encoding': 'identity'}
        with requests.get(url, stream=True, timeout=_TIMEOUT_SECONDS, headers=headers) as response:
            response.raise_for_status()
            require(response.status_code == 200, f'{shown}: HTTP {response.status_code}')
            _warn_of_redirects([url, *(each.url for each in (*response.history, response))])
            return path, _download(response, path, expected)
    except requests.RequestException as error:
        raise _make_request_error(error, shown) from error
    except StorageError as error:
        raise StorageError(f'{error}; VIT_JAX_CACHE=DIR sets another cache') from error
    except UserError:
        raise
    except OSError as error:
        text = f'{error.filename or path}: {error.strerror or error}'
        raise StorageError(f'{text}; VIT_JAX_CACHE=DIR sets another cache') from error
    except ValueError as error:
        raise UserError(f'{shown}: {format_error(error)}') from error


def _make_request_error(error: Any, shown: str) -> UserError:
    """Returns the error for a failed request, whose own message would repeat the query."""
    response = error.response
    why = type(error).__name__ if response is None else f'HTTP {response.status_code}'
    advice = 'try again, or download it with another program and pass its path'
    return UserError(f'{shown}: {why}; {advice}')


def _warn_of_redirects(urls: Sequence[str]) -> None:
    """Logs a warning for each other host that is contacted, and if a connection has no TLS."""
    parts = [urllib.parse.urlsplit(url) for url in urls]
    for before, after in itertools.pairwise(parts):
        if after.hostname != before.hostname:
            logging.warning('%s: redirected to the host %s', redact_url(urls[0]), after.hostname)
    if any(part.scheme == 'http' for part in parts):
        logging.warning('%s: downloaded without encryption (http://)', redact_url(urls[0]))


def _download(response: Any, path: pathlib.Path, expected: str | None) -> str:
    """Writes the body of a response to a file; returns its SHA-256.

    Raises ValueError if the body is compressed, incomplete, or has another digest than `expected`.
    """
    encoding = response.headers.get('Content-Encoding', '').lower()
    if encoding not in ('', 'identity', 'aws-chunked'):
        raise ValueError(f'the response is compressed ({encoding}); expected an uncompressed file')
    free = shutil.disk_usage(path.parent).free
    declared = response.headers.get('Content-Length', '')
    size = int(declared) if declared.isdecimal() else None
    if size is not None and size > free:
        raise StorageError(f'{path}: needs {size:,} bytes; the disk has {free:,} bytes free')
    digest = hashlib.sha256()
    written = 0
    with progress_bar(transient=True) as bar, atomic_write(path) as file:
        task = bar.add_task(path.name, total=size)
        for block in _read_blocks(response):
            file.write(block)
            digest.update(block)
            written += len(block)
            bar.update(task, completed=written)
        if size is not None and written != size:
            raise ValueError(f'got {written:,} of {size:,} bytes; try again')
        if expected not in (None, digest.hexdigest()):
            raise ValueError(f'expected the SHA-256 {expected}, got {digest.hexdigest()}')
    return digest.hexdigest()


def _read_blocks(response: Any) -> Iterator[bytes]:
    """Yields the body of a response; raises UserError if the connection breaks."""
    import requests

    try:
        yield from response.iter_content(2**20)
    except requests.RequestException as error:
        raise _make_request_error(error, redact_url(response.url)) from error


def _digest(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file."""
    with open_file(path) as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


@contextlib.contextmanager
def suggest_new_download(path: str) -> Iterator[None]:
    """Adds to an error about a damaged file in the cache how to download it again."""
    try:
        yield
    except DamagedFile as error:
        if not pathlib.Path(path).is_relative_to(cache_folder()):
            raise
        raise DamagedFile(f'{error}; remove {path} to download it again') from error


def _public_url(address: str) -> str:
    """Converts a gs:// address to its public https:// URL; returns other addresses unchanged.

    As in Google's clients, STORAGE_EMULATOR_HOST replaces the server for gs://.
    """
    if not address.startswith('gs://'):
        return address
    server = os.environ.get('STORAGE_EMULATOR_HOST') or 'https://storage.googleapis.com'
    return f'{server.rstrip("/")}/{address.removeprefix("gs://")}'
