"""Names of checkpoints that are elsewhere, and the local copies that they become.

    hf:OWNER/NAME[@REVISION]               a repository of the Hugging Face Hub
    https://HOST/FILE[:SUBTREE][?QUERY][#sha256=DIGEST]
                                           a file, which is checked where its digest is given
    gs://BUCKET/FILE[:SUBTREE]             a public file of Google Cloud Storage
    gs://BUCKET/FOLDER                     a work directory of ours, which is read in place
    augreg:B/16, vit:L/16-in21k            files of the papers (checkpoints/published.py)

Everything else is a local path, for which the network is not touched.
"""

import logging
import os
import re
import urllib.parse
from typing import NamedTuple

from vit_jax.base import UnusableDisk, UserError, require
from vit_jax.base.errors import shown_url
from vit_jax.checkpoints import download, hub, published
from vit_jax.checkpoints.formats.array_files import ENDINGS

_KINDS = 'hf', 'augreg', 'vit'
_HUB = re.compile(r'hf:([\w.-]+/[\w.-]+)(?:@([^@?\s]+))?')
_ENDS = '|'.join(re.escape(ending) for ending in ENDINGS)
_DIGEST = '#sha256=(?P<sha256>[0-9a-fA-F]{64})'
_FILE = re.compile(  # a subtree stands before the query, which may hold colons
    rf'(?P<address>(?:https?|gs)://[^/?#\s@]+/[^?#\s]*?(?:{_ENDS}))(?::(?P<subtree>[^#?\s]+))?'
    rf'(?P<query>[?][^#\s]*)?(?:{_DIGEST})?'
)

_NO_QUERY = 'expected gs://BUCKET/FILE, without a question mark'


class Local(NamedTuple):
    """What a name stands for."""

    path: str  # on this machine
    origin: tuple[str, ...] = ()  # where it was downloaded from and what exactly, line by line


def is_elsewhere(name: str) -> bool:
    """Is it a name of something that is not on this machine?"""
    return re.match(rf'(?:{"|".join(_KINDS)}):|[A-Za-z][A-Za-z0-9+]+:/', name) is not None


def _is_folder(name: str) -> bool:
    """Is it a work directory of ours on a bucket, which is read in place (base/storage.py)?"""
    return re.fullmatch(r'gs://[^/?@]+/[^#?]*', name) is not None and _FILE.fullmatch(name) is None


def as_path(name: str) -> str:
    """The name as a path: `shown`, no digest; the short name of a published file as one word."""
    if name in published.FILES:
        return re.sub('[:/]', '-', name)
    return shown(name).partition('#')[0] if is_elsewhere(name) else name


def shown(name: str) -> str:
    """The name without the query and the user of a URL, which may be secrets; its digest stays."""
    if not is_elsewhere(name):
        return name
    digest = re.search(f'{_DIGEST}$', name) if '?' in name else None
    return shown_url(name) + (digest[0] if digest else '')


def local(name: str) -> Local:
    """The local path of a name, of which what is not in a cache is downloaded.

    A local path is itself. Raises UserError in one sentence that begins with the name.
    """
    if not is_elsewhere(name):
        return Local(name)
    try:
        if _is_folder(name):
            require(not download.is_offline(), 'HF_HUB_OFFLINE forbids to read it')
            return Local(name)
        if name.startswith('hf:'):
            return _of_hub(name)
        if name.partition(':')[0] in _KINDS:
            return _published(name)
        return _file(name)
    except UserError as error:
        text = str(error).removeprefix(f'{shown(name)}: ')
        raise type(error)(f'{shown(name)}: {text}') from error


def local_file(name: str) -> str:
    """The local path of a file that holds no weights, and may have any ending; `#sha256=` too."""
    if not is_elsewhere(name):
        return name
    fits = name.startswith(('gs://', 'https://'))
    require(fits, f'{shown(name)}: expected a local file, or one of gs:// or https://')
    address, mark, digest = name.partition('#sha256=')
    return str(download.fetch(_https(address), sha256=digest.lower() if mark else None).path)


def require_here(path: str) -> None:
    """Raises UserError for a name where only a local path can be written."""
    require(not is_elsewhere(path), f'{shown(path)}: expected a local path to write to')


def _published(name: str) -> Local:
    """The file of a paper, or its copy where the server of the first is closed, and says so."""
    file = published.published(name)
    try:
        return _file(file.address)
    except UnusableDisk:
        raise
    except UserError as error:  # it is closed, cannot be reached, or is not in the cache
        if file.copy is None:
            text = 'no copy of it is known; python -m vit_jax.augreg lists the names that have one'
            raise type(error)(f'{error}; {text}') from error
        why = f'{file.address}: {str(error).partition(": ")[2]}'
    logging.warning('%s; trying %s', why, file.copy)
    try:
        found = _of_hub(file.copy)
    except UserError as error:
        raise type(error)(f'{why}; and its copy, {file.copy}: {error}') from error
    text = f'{why}; used the copy {file.copy}, which was not compared with that file'
    return found._replace(origin=(text, *found.origin))


def _of_hub(name: str) -> Local:
    match = _HUB.fullmatch(name)
    if match is None:
        raise UserError('expected hf:OWNER/NAME or hf:OWNER/NAME@REVISION')
    found = hub.snapshot(match[1], match[2])
    digests = (f'{file}: SHA-256 {digest}' for file, digest in found.weights.items())
    return Local(str(found.folder), (f'{found.url}, commit {found.commit}', *digests))


def _file(name: str) -> Local:
    """The copy of the file that a URL names."""
    match = _FILE.fullmatch(name)
    if match is None:
        raise UserError(_what_is_wrong(name))
    address, subtree, sha256 = match['address'], match['subtree'], match['sha256']
    plain = address.startswith('http://') and sha256 is None
    require(not plain, 'anyone on the way could change it: https://, or #sha256=DIGEST at the end')
    url = _https(address + (match['query'] or ''))
    found = download.fetch(url, sha256=sha256 and sha256.lower())
    path = f'{found.path}:{subtree}' if subtree else str(found.path)
    return Local(path, (shown_url(url), f'SHA-256 {found.sha256}'))


def _https(address: str) -> str:
    """The URL of an address: of gs://BUCKET/FILE where anyone can read it.

    STORAGE_EMULATOR_HOST is another server for these, as in Google's own clients.
    """
    if not address.startswith('gs://'):
        return urllib.parse.quote(address, safe="!#$%&'()*+,/:;=?@[]~")
    require('?' not in address, f'{shown(address)}: {_NO_QUERY}')
    server = os.environ.get('STORAGE_EMULATOR_HOST') or 'https://storage.googleapis.com'
    server = server if '://' in server else f'http://{server}'
    return f'{server.rstrip("/")}/{urllib.parse.quote(address.removeprefix("gs://"), safe="/+")}'


def _what_is_wrong(name: str) -> str:
    """Why a name with `:/` in it is none that can be read, and what would be right."""
    plain = shown(name)
    scheme, address = plain.split(':/', 1)
    address = address.removeprefix('/')
    if not name.startswith(f'{scheme}://'):
        return f'expected {scheme}://{address}, as text: a pathlib.Path takes one / away'
    if scheme == 's3':
        return f'not read from there: `aws s3 cp {plain} FILE`, and name that file'
    if scheme == 'file':
        return f'a local path has no file://: {address}'
    if scheme not in ('https', 'http', 'gs'):
        return 'expected hf:OWNER/NAME, https://HOST/FILE, gs://BUCKET/FILE or a local path'
    if re.match('[a-z]+://[^/?#]*@', name):
        return 'no user is sent: download it with what has access, and name that file'
    if scheme == 'gs' and '?' in name:
        return _NO_QUERY
    if '#' in name and re.search(f'{_DIGEST}$', name) is None:
        return 'after # there is only sha256= and its 64 hexadecimal digits'
    if match := re.match(r'https://huggingface\.co/([\w.-]+/[\w.-]+)/?$', name):
        return f'expected hf:{match[1]}'
    return f'expected a file that ends with {", ".join(ENDINGS)}'
