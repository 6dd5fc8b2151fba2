"""Files behind URLs, downloaded once into a cache, resumed where they were cut, and checked.

CACHE/DIGEST-OF-URL/NAME             a file that is whole
                   /NAME.sha256      its digest, as `sha256sum --check` takes it
                   /NAME.partial     the bytes that have come of another one
                   /NAME.etag        the version that they are of: its ETag, its length
"""

import contextlib
import hashlib
import logging
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from vit_jax.base import MissingFile, UnusableDisk, UserError, atomic_files, sync, usable
from vit_jax.base.errors import shown_url
from vit_jax.checkpoints import digests, http_answers

_WAITS = 1.0, 2.0, 4.0  # seconds, after attempts in a row that brought nothing
_BLOCK = 2**20  # bytes
_LONGEST = 255 - len('.partial')  # bytes of a name in the cache: a disk takes 255
_AGAIN = 'the same command goes on where it stopped'

Told = Callable[[int, int | None], None]  # how many bytes have come, of how many


class Fetched(NamedTuple):
    """A file that was behind a URL, in the cache."""

    path: pathlib.Path
    sha256: str


def cache() -> pathlib.Path:
    """The folder of all downloads but the hub's: VIT_JAX_CACHE, or vit_jax in the user's own cache,
    which is XDG_CACHE_HOME, or ~/.cache.
    """
    users = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or '')
    if not users.is_absolute():  # such a one has to be ignored
        users = pathlib.Path('~/.cache')
    return pathlib.Path(os.environ.get('VIT_JAX_CACHE') or users / 'vit_jax').expanduser()


def is_offline() -> bool:
    """Is the network forbidden, by the variable that the hub's own client reads?"""
    return os.environ.get('HF_HUB_OFFLINE', '').upper() in ('1', 'ON', 'YES', 'TRUE')


def place(url: str) -> pathlib.Path:
    """Where the file behind a URL is kept, if it is."""
    name = shown_url(url).rpartition('/')[2][-_LONGEST:]  # in ASCII
    return cache() / hashlib.sha256(url.encode()).hexdigest()[:16] / name


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
                raise MissingFile(f'{shown_url(url)}: not in the cache ({cache()}), {why}')
            path.parent.mkdir(parents=True, exist_ok=True)
            with (path.parent / '.lock').open('a') as lock:
                if not atomic_files.locked(lock):
                    logging.warning('%s: another process downloads it; waiting', path.name)
                    atomic_files.locked(lock, wait=True)
                if not path.exists():
                    _download(url, path, sha256)
    found = _verified(path)
    if sha256 not in (None, found):
        text = f'the copy in the cache has {found}; is the digest right? else remove {path}'
        raise UserError(f'{shown_url(url)}: expected the SHA-256 {sha256}, {text}')
    return Fetched(path, found)


def _download(url: str, path: pathlib.Path, sha256: str | None) -> None:
    """Brings the file to its path, which it gets when it is whole. Its folder is locked."""
    partial, waits = _beside(path, 'partial'), list(_WAITS)
    declared: dict[str, str] = {}  # checksums of the version that comes
    most = _size(partial)  # that has come so far
    with _bar(path.name) as told:
        while True:
            try:
                if _attempt(url, path, told, declared, checked=sha256 is not None):
                    break
                continue
            except http_answers.LOST as error:
                if _size(partial) > most:
                    most, waits = _size(partial), list(_WAITS)
                if not waits:
                    text = f'{http_answers.why(error)}; once it can be reached, {_AGAIN}'
                    raise UserError(f'{shown_url(url)}: {text}') from error
            time.sleep(waits.pop(0))
    found = _digest(partial, hashlib.sha256())
    if 'crc32c' in declared:
        _require_same(url, path, 'CRC32C', declared['crc32c'], digests.crc32c(partial))
    if sha256 is not None:
        _require_same(url, path, 'SHA-256', sha256, found)
    _beside(path, 'sha256').write_text(_line(found, path))
    sync(partial)
    partial.replace(path)
    _beside(path, 'etag').unlink()


def _attempt(
    url: str, path: pathlib.Path, told: Told, declared: dict[str, str], *, checked: bool
) -> bool:
    """Appends to the partial file what comes of the rest, and notes the `declared` checksums.

    `checked`: another checksum is known. Is the file whole then? A server may give less than was
    asked for. Raises one of LOST where that may be tried again, which goes on with what has come.
    """
    partial, version = _beside(path, 'partial'), _noted(path)
    have = _size(partial) if version.etag else 0
    with _forgetting(path), http_answers.opened(url, have, version) as answer:
        start, stop, version = http_answers.part(url, answer, have, version)
        if not start:
            declared.clear()
        declared |= http_answers.checksums(answer)
        total = version.total
        if total is None and not ('crc32c' in declared or checked):
            why = 'its server does not say how long it is, so that a part could be taken for all'
            raise UserError(f'{shown_url(url)}: {why}; add #sha256=DIGEST')
        with partial.open('ab') as file:
            if not start:
                file.truncate(0)
            _beside(path, 'etag').write_text(f'{version.etag}\n{total or ""}')
            _require_room(path, (total or start) - start)
            have = start
            while block := http_answers.received(answer):
                if stop is not None and have + len(block) > stop:
                    raise http_answers.Unfit(f'{shown_url(url)}: more came than was declared')
                file.write(block)
                file.flush()
                have += len(block)
                told(have, total)
    if stop is not None and have < stop:
        raise ConnectionError(f'ended after {have:,} of {total:,} bytes')
    if _size(partial) != have:  # locks do nothing on this disk, and another process wrote as well
        partial.unlink()
        raise ConnectionError('another process downloads it to the same place')
    return total in (None, have)


def _noted(path: pathlib.Path) -> http_answers.Version:
    """The version that the partial file is of."""
    note = _beside(path, 'etag')
    etag, _, total = (note.read_text(errors='replace') if note.exists() else '').partition('\n')
    return http_answers.Version(
        http_answers.strong(etag), int(total) if total.isdecimal() else None
    )


@contextlib.contextmanager
def _forgetting(path: pathlib.Path) -> Iterator[None]:
    """Around an attempt: removes what has come where nothing that comes can be appended to it."""
    try:
        yield
    except (http_answers.Anew, http_answers.Unfit):
        _beside(path, 'partial').unlink(missing_ok=True)
        _beside(path, 'etag').unlink(missing_ok=True)
        raise


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
        have = 0
        with contextlib.suppress(OSError):  # the same may be raised again
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
        raise UserError(f'{shown_url(url)}: {text}, or ask for its digest where it is from')


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


@contextlib.contextmanager
def _bar(name: str) -> Iterator[Told]:
    """A bar on a terminal, and a function that moves it."""
    columns = TextColumn('{task.description}', markup=False), BarColumn(), DownloadColumn()
    more = TransferSpeedColumn(), TimeRemainingColumn()
    hidden = not sys.stderr.isatty()
    with Progress(*columns, *more, console=Console(stderr=True), disable=hidden) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
