"""Files behind URLs, downloaded once into a cache, resumed where they were cut, and checked.

CACHE/DIGEST-OF-URL/NAME             a file that is whole
                   /NAME.sha256      its digest, as `sha256sum --check` takes it
                   /NAME.partial     the bytes that have come of another one
                   /NAME.etag        the version that they are of
"""

import base64
import contextlib
import hashlib
import http.client
import logging
import os
import pathlib
import shutil
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import google_crc32c
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from vit_jax.base import MissingFile, UnusableDisk, UserError, locking, require, sync, usable

_SECONDS = 30.0  # without a byte, after which a connection is given up
_WAITS = 1.0, 2.0, 4.0  # seconds, after attempts in a row that brought nothing
_PASSING = 408, 425, 429, 500, 502, 503, 504  # statuses of servers that may soon do better
_LOST = (
    ConnectionError,
    TimeoutError,
    ssl.SSLError,
    urllib.error.URLError,
    http.client.HTTPException,
)
_BLOCK = 2**20  # bytes
_AGAIN = 'the same command goes on where it stopped'

Told = Callable[[int, int | None], None]  # how many bytes have come, of how many


class Fetched(NamedTuple):
    """A file that was behind a URL, in the cache."""

    path: pathlib.Path
    sha256: str


def cache() -> pathlib.Path:
    """The folder of all downloads but the hub's: VIT_JAX_CACHE, or ~/.cache/vit_jax."""
    return pathlib.Path(os.environ.get('VIT_JAX_CACHE') or '~/.cache/vit_jax').expanduser()


def is_offline() -> bool:
    """Is the network forbidden, by the variable that the hub's own client reads?"""
    return os.environ.get('HF_HUB_OFFLINE', '').upper() in ('1', 'ON', 'YES', 'TRUE')


def shown(url: str) -> str:
    """A URL without its query, which may hold a secret."""
    return url.partition('?')[0]


def place(url: str) -> pathlib.Path:
    """Where the file behind a URL is kept, if it is."""
    return cache() / hashlib.sha256(url.encode()).hexdigest()[:16] / shown(url).rpartition('/')[2]


def fetched(url: str, *, sha256: str | None = None) -> Fetched:
    """The file behind a URL, from the cache, or else downloaded.

    It has the length and the checksums that the server declares (x-goog-hash) and the SHA-256 that
    is given; what has not is removed. Of several processes one downloads. Raises UserError, in one
    sentence: MissingFile where nothing is there, UnusableDisk where there is no room.
    """
    path = place(url)
    with _kept(path):
        if not path.exists():
            if is_offline():
                why = 'and HF_HUB_OFFLINE forbids to download it'
                raise MissingFile(f'{shown(url)}: not in the cache ({cache()}), {why}')
            path.parent.mkdir(parents=True, exist_ok=True)
            with (path.parent / '.lock').open('a') as lock:
                if not locking.locked(lock):
                    logging.warning('%s: another process downloads it; waiting', path.name)
                    locking.locked(lock, wait=True)
                if not path.exists():
                    _download(url, path, sha256)
    found = _verified(path)
    if sha256 not in (None, found):
        text = f'the copy in the cache has {found}; is the digest right? else remove {path}'
        raise UserError(f'{shown(url)}: expected the SHA-256 {sha256}, {text}')
    return Fetched(path, found)


def _download(url: str, path: pathlib.Path, sha256: str | None) -> None:
    """Brings the file to its path, which it gets when it is whole. Its folder is locked."""
    partial, waits = _beside(path, 'partial'), list(_WAITS)
    declared: dict[str, str] = {}  # checksums of the version that comes
    most = _size(partial)  # that has come so far
    with _bar(path.name) as told:
        while True:
            try:
                _attempt(url, path, told, declared, checked=sha256 is not None)
                break
            except _LOST as error:
                if _size(partial) > most:
                    most, waits = _size(partial), list(_WAITS)
                if not waits:
                    cause = getattr(error, 'reason', error)  # of a URLError
                    why = getattr(cause, 'strerror', None) or str(cause) or type(cause).__name__
                    text = f'{why}; once it can be reached, {_AGAIN}'
                    raise UserError(f'{shown(url)}: {text}') from error
            time.sleep(waits.pop(0))
    found = _digest(partial, hashlib.sha256())
    if 'crc32c' in declared:
        _require_same(url, path, 'CRC32C', declared['crc32c'], _crc32c(partial))
    if sha256 is not None:
        _require_same(url, path, 'SHA-256', sha256, found)
    _beside(path, 'sha256').write_text(_line(found, path))
    sync(partial)
    partial.replace(path)
    _beside(path, 'etag').unlink()


def _attempt(
    url: str, path: pathlib.Path, told: Told, declared: dict[str, str], *, checked: bool
) -> None:
    """Appends to the partial file what is missing of it, and notes the `declared` checksums.

    `checked`: another checksum is known. Raises one of _LOST where that may be tried again, which
    then goes on with what has come.
    """
    partial, etag = _beside(path, 'partial'), _beside(path, 'etag')
    version = etag.read_text() if etag.exists() else ''
    have = _size(partial) if version else 0
    headers = {'User-Agent': 'vit_jax', 'Accept-Encoding': 'identity'}
    headers |= {'Range': f'bytes={have}-', 'If-Range': version} if have else {}
    with _answer(url, headers, partial) as answer, partial.open('ab') as file:
        _require_file(url, answer)
        part = answer.headers.get('Content-Range', '')
        if answer.status != 206 or not (have and part.startswith(f'bytes {have}-')):
            file.truncate(0)
            have = 0
            declared.clear()
            require(answer.status == 200, f'{shown(url)}: answered HTTP {answer.status}')
        declared |= _declared(answer)
        etag.write_text(_strong(answer.headers.get('ETag', '')))
        total = None if answer.length is None else have + answer.length
        if total is None and not ('crc32c' in declared or checked):
            why = 'its server does not say how long it is, so that a part could be taken for all'
            raise UserError(f'{shown(url)}: {why}; add #sha256=DIGEST')
        _require_room(path, (total or have) - have)
        while (total is None or have < total) and (block := _received(answer)):
            file.write(block)
            file.flush()
            have += len(block)
            told(have, total)
        if total is not None and have < total:
            raise ConnectionError(f'ended after {have:,} of {total:,} bytes')
    if _size(partial) != have:  # locks do nothing on this disk, and another process wrote as well
        partial.unlink()
        raise ConnectionError('another process downloads it to the same place')


def _received(answer: Any) -> bytes:
    """What has come. Raises one of _LOST, whatever the network's error is: none is of the disk."""
    try:
        return bytes(answer.read1(_BLOCK))
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from error


def _answer(url: str, headers: dict[str, str], partial: pathlib.Path) -> Any:
    """The open connection. Raises UserError where trying again is of no use."""
    try:
        request = urllib.request.Request(url, headers=headers)
        return urllib.request.build_opener(_Redirects).open(request, timeout=_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code in _PASSING:
            raise ConnectionError(f'HTTP {error.code} {error.reason}') from error
        if error.code == 416:  # what has come is no part of what is there
            partial.unlink()
            raise ConnectionError('ended before the length that its server had declared') from error
        text = {
            401: 'it is not public',
            403: 'it is not public, or not there',
            404: 'nothing is there; is the name right?',
        }.get(error.code, f'the server says {error.reason!r}')
        if error.code in (401, 403):
            text += ': download it with what has access, and name that file'
        kind = MissingFile if error.code == 404 else UserError
        raise kind(f'{shown(url)}: HTTP {error.code}: {text}') from error
    except urllib.error.URLError as error:
        if not isinstance(error.reason, ssl.SSLCertVerificationError):
            raise
        text = f'its certificate is not accepted: {error.reason.verify_message}'
        raise UserError(f'{shown(url)}: {text}; SSL_CERT_FILE=FILE names your own') from error
    except (http.client.InvalidURL, ValueError) as error:
        raise UserError(f'{shown(url)}: not a URL: {error}') from error
    except OSError as error:  # while it waits for an answer
        raise ConnectionError(error.strerror or str(error)) from error


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Raises UserError where https:// leads to http://, at whichever step."""

    def redirect_request(self, req: Any, *answer: Any) -> Any:
        *_, url = answer
        if req.full_url.startswith('https:') and not url.startswith('https:'):
            text = 'leads to http://, where anyone on the way could change it'
            raise UserError(f'{shown(req.full_url)}: {text}')
        return super().redirect_request(req, *answer)


def _require_file(url: str, answer: Any) -> None:
    """Raises UserError for an answer that is no file."""
    if answer.headers.get_content_type() == 'text/html':
        raise UserError(f'{shown(url)}: a web page; take the link that downloads the file')


def _declared(answer: Any) -> dict[str, str]:
    """The checksums of the whole file, in base64, by name."""
    values = ','.join(answer.headers.get_all('x-goog-hash', []))
    return dict(one.strip().split('=', 1) for one in values.split(',') if '=' in one)


def _strong(etag: str) -> str:
    """The ETag if it tells every byte (RFC 9110, 8.8.1); else nothing can be resumed: ''."""
    return etag if etag.startswith('"') else ''


def _require_room(path: pathlib.Path, more: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if more > free:
        text = f'{more / 2**20:,.0f} MiB more of {path.name}, {free / 2**20:,.0f} MiB are free'
        raise UnusableDisk(f'{path.parent}: no room for {text}; VIT_JAX_CACHE=DIR is another place')


@contextlib.contextmanager
def _kept(path: pathlib.Path) -> Iterator[None]:
    """Around what is written to the cache, of which an OSError becomes UnusableDisk."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        have = _size(_beside(path, 'partial'))
        came = f' after {have:,} bytes of {path.name}; make room, and {_AGAIN}' if have else ''
        place = 'VIT_JAX_CACHE=DIR is another place'
        raise UnusableDisk(f'{path.parent}: {error.strerror}{came}; {place}') from error


def _verified(path: pathlib.Path) -> str:
    """The digest of a file in the cache. What is not as it was downloaded is removed: UserError."""
    with usable(path):
        found, noted = _digest(path, hashlib.sha256()), _beside(path, 'sha256')
        if not noted.exists() or noted.read_text() != _line(found, path):
            _remove(path)
            again = 'and removed; the same command downloads it again'
            raise UserError(f'{path}: damaged since it was downloaded, {again}')
    return found


def _require_same(url: str, path: pathlib.Path, kind: str, expected: str, found: str) -> None:
    """Raises UserError for another checksum, and leaves nothing of the file."""
    if expected != found:
        _remove(path)
        text = f'expected the {kind} {expected}, what came has {found}: removed; try again'
        raise UserError(f'{shown(url)}: {text}, or ask for its digest where it is from')


def _line(sha256: str, path: pathlib.Path) -> str:
    return f'{sha256}  {path.name}\n'


def _remove(path: pathlib.Path) -> None:
    for one in path, *(_beside(path, ending) for ending in ('partial', 'etag', 'sha256')):
        one.unlink(missing_ok=True)


def _beside(path: pathlib.Path, ending: str) -> pathlib.Path:
    return path.with_name(f'{path.name}.{ending}')


def _size(path: pathlib.Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _digest(path: pathlib.Path, empty: Any) -> str:
    with path.open('rb') as file:
        return hashlib.file_digest(file, lambda: empty).hexdigest()


def _crc32c(path: pathlib.Path) -> str:
    checksum = google_crc32c.Checksum()
    with path.open('rb') as file:
        while block := file.read(_BLOCK):
            checksum.update(block)
    return base64.b64encode(checksum.digest()).decode()


@contextlib.contextmanager
def _bar(name: str) -> Iterator[Told]:
    """A bar on a terminal, and a function that moves it."""
    columns = TextColumn('{task.description}'), BarColumn(), DownloadColumn()
    more = TransferSpeedColumn(), TimeRemainingColumn()
    hidden = not sys.stderr.isatty()
    with Progress(*columns, *more, console=Console(stderr=True), disable=hidden) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
