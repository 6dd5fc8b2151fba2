"""Files behind URLs, downloaded once into a cache and checked.

CACHE/DIGEST-OF-URL/NAME             the whole file
                   /NAME.sha256      its digest, in the format of `sha256sum --check`
"""

import hashlib
import os
import pathlib
import sys
from typing import Any, NamedTuple

from vit_jax.base import MissingFile, UnusableDisk, UserError, require
from vit_jax.base.errors import shown_url

_BLOCK = 2**20  # bytes
_LONGEST = 255 - len('.sha256')  # bytes of a file name in the cache: a disk allows 255
_ELSEWHERE = 'download it with a program that has access, and give the path of the file'
_STATUS = {
    401: f'it is not public: {_ELSEWHERE}',
    403: f'it is not public, or does not exist: {_ELSEWHERE}',
    404: 'nothing is there; is the name right?',
}
_OTHER_STATUS = 'the server does not send the file; try again later'


class Fetched(NamedTuple):
    """A downloaded file in the cache."""

    path: pathlib.Path
    sha256: str


def cache() -> pathlib.Path:
    """Returns the folder of all downloads except those of the hub.

    It is VIT_JAX_CACHE, or vit_jax in the user's own cache (XDG_CACHE_HOME, or ~/.cache).
    """
    users = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or '')
    if not users.is_absolute():  # the standard says to ignore it
        users = pathlib.Path('~/.cache')
    return pathlib.Path(os.environ.get('VIT_JAX_CACHE') or users / 'vit_jax').expanduser()


def is_offline() -> bool:
    """Does the variable of the hub's client forbid to use the network?"""
    return os.environ.get('HF_HUB_OFFLINE', '').upper() in ('1', 'ON', 'YES', 'TRUE')


def place(url: str) -> pathlib.Path:
    """Returns the path in the cache for the file behind a URL."""
    name = shown_url(url).rpartition('/')[2][-_LONGEST:]  # in ASCII
    return cache() / hashlib.sha256(url.encode()).hexdigest()[:16] / name


def fetch(url: str, *, sha256: str | None = None) -> Fetched:
    """Returns the file behind a URL, from the cache or downloaded.

    A cached file is compared with the digest of its download, and downloaded again if it differs.

    Args:
      url: The URL. Its query may be a secret: no message shows it.
      sha256: The expected digest.

    Raises:
      MissingFile: If there is no such file, or if it is not in the cache of an offline host.
      UnusableDisk: If the cache cannot be written.
      UserError: If the download fails or has another digest.
    """
    import pooch  # takes a while, and is needed for downloads only
    import requests

    path, shown = place(url), shown_url(url)

    def download(_: str, partial: str, __: Any) -> None:
        if is_offline():
            why = f'not in the cache ({cache()}), and HF_HUB_OFFLINE forbids to download it'
            raise MissingFile(f'{shown}: {why}')
        _download(url, partial, has_digest=sha256 is not None)
        received = pooch.file_hash(partial)
        text = f'expected the SHA-256 {sha256}, received {received}; the file was not kept'
        require(sha256 in (None, received), f'{shown}: {text}')
        note = pathlib.Path(f'{partial}.sha256')
        note.write_text(f'{received}  {path.name}\n')
        note.replace(_note(path))  # at once: other processes may download the same file

    pooch.get_logger().setLevel('WARNING')
    try:
        digest = _cached_digest(path)
        if digest is None or sha256 not in (None, digest):
            pooch.retrieve(url, sha256, path.name, path.parent, downloader=download)
            digest = _note(path).read_text().split()[0]
        return Fetched(path, digest)
    except UserError:
        raise
    except (requests.RequestException, ValueError) as error:
        raise UserError(f'{shown}: {_reason(error)}') from error
    except OSError as error:
        text = f'{error.filename or path.parent}: {error.strerror or error}'
        raise UnusableDisk(f'{text}; VIT_JAX_CACHE=DIR sets another cache') from error


def _cached_digest(path: pathlib.Path) -> str | None:
    """Returns the SHA-256 of a cached file. Removes a file that is not as it was downloaded."""
    import pooch

    if not path.exists():
        return None
    digest = str(pooch.file_hash(path))
    if _note(path).exists() and _note(path).read_text().split()[:1] == [digest]:
        return digest
    path.unlink()
    return None


def _note(path: pathlib.Path) -> pathlib.Path:
    """Returns the path of the note with the digest, which is written before the file."""
    return path.with_name(f'{path.name}.sha256')


def _download(url: str, partial: str, *, has_digest: bool) -> None:
    """Writes the file behind a URL. Raises UserError for an answer that cannot be the file."""
    import pooch

    shown = shown_url(url)

    def check(answer: Any, **_: Any) -> None:
        safe = answer.url.startswith('https:') or not url.startswith('https:')
        require(safe, f'{shown}: leads to http://, where anyone on the way could change it')
        if answer.is_redirect:
            return
        if (status := answer.status_code) != 200:
            kind = MissingFile if status in _STATUS else UserError
            raise kind(f'{shown}: HTTP {status}: {_STATUS.get(status, _OTHER_STATUS)}')
        web_page = answer.headers.get('Content-Type', '').startswith('text/html')
        require(not web_page, f'{shown}: a web page; take the link that downloads the file')
        ends = 'Content-Length' in answer.headers or 'Transfer-Encoding' in answer.headers
        unknown = 'its length is unknown, so a part could pass for all; add #sha256=DIGEST'
        require(ends or has_digest, f'{shown}: {unknown}')

    pooch.HTTPDownloader(
        progressbar=sys.stderr.isatty(),
        chunk_size=_BLOCK,
        headers={'User-Agent': 'vit_jax', 'Accept-Encoding': 'identity'},
        hooks={'response': check},
    )(url, partial, None)


def _reason(error: Exception) -> str:
    """Says why a download failed, without the words of `requests`, which repeat the URL."""
    import requests

    if isinstance(error, requests.exceptions.SSLError):
        return 'its certificate is not accepted; REQUESTS_CA_BUNDLE=FILE names your own'
    if isinstance(error, ValueError | requests.TooManyRedirects):
        return (
            'it, or what it leads to, is not the URL of a file: expected https://HOST[:PORT]/FILE'
        )
    cause: BaseException | None = error
    while cause is not None and not getattr(cause, 'strerror', None):
        cause = cause.__cause__ or cause.__context__
    why = getattr(cause, 'strerror', None) or 'the connection failed or ended too early'
    return f'{why}; the same command tries again'
