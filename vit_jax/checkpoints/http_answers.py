"""One request for a file behind a URL, and its answer: which bytes of which version it holds.

What a server says in words is shown nowhere: it may repeat the URL, whose query may be a secret.
"""

import http
import http.client
import re
import ssl
import urllib.error
import urllib.request
from typing import Any, NamedTuple

from vit_jax.base import MissingFile, UserError, require
from vit_jax.base.errors import shown_url

LOST = (
    ConnectionError,
    TimeoutError,
    ssl.SSLError,
    urllib.error.URLError,
    http.client.HTTPException,
)  # what is raised where the same request may soon do better
_PASSING = 408, 425, 429, 500, 502, 503, 504  # statuses of servers that may soon do better
_LEADING = 301, 302, 303, 307, 308  # statuses that lead elsewhere
_SECONDS = 30.0  # without a byte, after which a connection is given up
_BLOCK = 2**20  # bytes
_RANGE = re.compile(r'bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)')


class Anew(ConnectionError):
    """What has come is no part of what is there: to be asked for from its beginning."""


class Unfit(UserError):
    """A part that is not the one that was asked for, as is what would come after it."""


class Version(NamedTuple):
    """What is known of the file that comes."""

    etag: str = ''  # '': none, so that it cannot be resumed
    total: int | None = None  # bytes


class Part(NamedTuple):
    """Which bytes of a file an answer holds."""

    start: int
    stop: int | None  # None: all there are
    version: Version


def opened(url: str, have: int, version: Version) -> Any:
    """The open answer to a request for what comes after the bytes that are here.

    Raises UserError where trying again is of no use, else one of LOST.
    """
    headers = {'User-Agent': 'vit_jax', 'Accept-Encoding': 'identity'}
    headers |= {'Range': f'bytes={have}-', 'If-Range': version.etag} if have else {}
    try:
        request = urllib.request.Request(url, headers=headers)
        return urllib.request.build_opener(_Redirects).open(request, timeout=_SECONDS)
    except urllib.error.HTTPError as error:
        raise _refusal(url, error.code) from error
    except urllib.error.URLError as error:
        if not isinstance(error.reason, ssl.SSLCertVerificationError):
            raise
        text = f'its certificate is not accepted: {error.reason.verify_message}'
        raise UserError(f'{shown_url(url)}: {text}; SSL_CERT_FILE=FILE names your own') from error
    except (http.client.InvalidURL, ValueError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        text = 'it, or what it leads to, is not a URL: expected https://HOST[:PORT]/FILE'
        raise UserError(f'{shown_url(url)}: {text}') from error
    except OSError as error:  # while it waits for an answer
        raise ConnectionError(error.strerror or str(error)) from error


def _refusal(url: str, code: int) -> Exception:
    """What is to be raised for a status that is not one of success."""
    if code in _PASSING:
        return ConnectionError(f'HTTP {code} {_phrase(code)}')
    if code == 416:
        return Anew('ended before the length that its server had declared')
    text = {
        401: 'it is not public',
        403: 'it is not public, or not there',
        404: 'nothing is there; is the name right?',
    }.get(code, f'the server says {_phrase(code)!r}')
    if code in (401, 403):
        text += ': download it with what has access, and name that file'
    if code in _LEADING:
        text = (
            'it leads in a circle, or to no https:// address; take the link that it is to lead to'
        )
    kind = MissingFile if code in (401, 403, 404) else UserError
    return kind(f'{shown_url(url)}: HTTP {code}: {text}')


def _phrase(code: int) -> str:
    """What a status means, in the words of the standard."""
    return http.HTTPStatus(code).phrase if code in {*http.HTTPStatus} else 'no status of HTTP'


def why(error: BaseException) -> str:
    """Why nothing came, of one of LOST, as a part of a sentence."""
    cause = getattr(error, 'reason', error)  # of a URLError
    if isinstance(cause, http.client.IncompleteRead):
        return 'the connection ended too early'
    if isinstance(cause, http.client.HTTPException) and not isinstance(cause, ConnectionError):
        return 'what answers there does not speak HTTP'
    return getattr(cause, 'strerror', None) or str(cause) or type(cause).__name__


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Raises UserError where https:// leads to http://, or either to another scheme."""

    def redirect_request(self, req: Any, *answer: Any) -> Any:
        *_, url = answer
        if req.full_url.startswith('https:') and not url.lower().startswith('https:'):
            text = 'leads to http://, where anyone on the way could change it'
            raise UserError(f'{shown_url(req.full_url)}: {text}')
        if not url.lower().startswith(('https:', 'http:')):  # urllib itself would take ftp:
            raise UserError(f'{shown_url(req.full_url)}: leads to no https:// address')
        return super().redirect_request(req, *answer)


def part(url: str, answer: Any, have: int, version: Version) -> Part:
    """Which bytes an answer to `opened` holds: those that are missing, or all.

    Raises UserError for what is not a file as it is, Anew for a part of another version, and Unfit
    for one that contradicts the request or itself.
    """
    _require_file(url, answer)
    length, etag = _length(url, answer), answer.headers.get('ETag', '').strip()
    if answer.status == 200:
        return Part(0, length, Version(strong(etag), length))
    match = _RANGE.fullmatch(answer.headers.get('Content-Range', '').strip())
    if answer.status != 206 or not have or match is None:
        raise Unfit(f'{shown_url(url)}: answered HTTP {answer.status}, not with what is missing')
    first, last = int(match[1]), int(match[2])
    total = version.total if match[3] == '*' else int(match[3])
    if total is None or version.total not in (None, total) or etag not in ('', version.etag):
        raise Anew('changes while it is downloaded')
    if not first == have <= last < total or length not in (None, last + 1 - first):
        raise Unfit(f'{shown_url(url)}: answered HTTP 206 with another part than was asked for')
    return Part(have, last + 1, version._replace(total=total))


def received(answer: Any) -> bytes:
    """What has come. Raises one of LOST, whatever the network's error is: none is of the disk."""
    try:
        return bytes(answer.read1(_BLOCK))
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from error


def checksums(answer: Any) -> dict[str, str]:
    """The checksums of the whole file that are declared, in base64, by name."""
    values = ','.join(answer.headers.get_all('x-goog-hash', []))
    return dict(one.strip().split('=', 1) for one in values.split(',') if '=' in one)


def _require_file(url: str, answer: Any) -> None:
    """Raises UserError for an answer that is no file, or one in another form."""
    if answer.headers.get_content_type() == 'text/html':
        raise UserError(f'{shown_url(url)}: a web page; take the link that downloads the file')
    for name, plain in ('Content-Encoding', 'identity'), ('Transfer-Encoding', 'chunked'):
        found = {value.strip().lower() for value in answer.headers.get_all(name, [])}
        text = f'comes encoded ({name}), which was not asked for; take a link to the file as it is'
        require(found <= {'', plain}, f'{shown_url(url)}: {text}')


def _length(url: str, answer: Any) -> int | None:
    """How many bytes are to come, if that is said. Raises UserError for what is no number."""
    values = ','.join(answer.headers.get_all('Content-Length', []))
    if not values or answer.headers.get('Transfer-Encoding'):  # which says it instead (RFC 9112)
        return None
    lengths = {value.strip() for value in values.split(',')}
    if len(lengths) > 1 or not re.fullmatch('[0-9]{1,18}', min(lengths)):
        text = 'expected one number, in digits; download it with another program'
        raise UserError(f'{shown_url(url)}: its server declares no length (Content-Length): {text}')
    return int(min(lengths))


def strong(etag: str) -> str:
    """The ETag if it tells every byte (RFC 9110, 8.8.1); else nothing can be resumed: ''."""
    return etag if re.fullmatch('"[\x21\x23-\x7e\x80-\xff]*"', etag) else ''
