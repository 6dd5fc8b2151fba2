"""Checkpoints by name, from servers on this machine: found, resumed, checked, refused in words."""

import email.message
import errno
import hashlib
import http.client
import io
import pathlib
import socket
import ssl
import urllib.error
import urllib.request

import pytest

import vit_jax
from tests import reference, tiny
from tests.servers import web
from vit_jax import convert, visualize
from vit_jax.base.errors import MissingFile, UserError
from vit_jax.checkpoints import download, http_answers, names
from vit_jax.checkpoints.formats.inference import Hints
from vit_jax.checkpoints.formats.opening import open_checkpoint
from vit_jax.checkpoints.published import FILES, published
from vit_jax.models import parameter_count, variant
from vit_jax.parallel.processes import Job
from vit_jax.runs import experiment, training_run

DATA = bytes(range(256)) * 20
FILE = '/bucket/folder+x/file.npz'
NAME = f'gs:/{FILE}'


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A server of gs://, which has FILE, and an empty cache."""
    monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))
    monkeypatch.delenv('HF_HUB_OFFLINE', raising=False)
    monkeypatch.setattr(download, '_WAITS', (0.0, 0.0))
    with web.serving({FILE: web.stored(DATA)}) as server:
        monkeypatch.setenv('STORAGE_EMULATOR_HOST', server.url)
        yield server


def whole(tmp_path):
    """What the cache gives out: files without those that belong to a download."""
    files = [path for path in (tmp_path / 'cache').rglob('*') if path.is_file()]
    return [
        p for p in files if p.suffix not in ('.partial', '.etag', '.sha256') and p.stem[0] != '.'
    ]


def read(name=NAME):
    return pathlib.Path(names.local(name).path).read_bytes()


def test_a_file_is_downloaded_once_and_said_with_its_url_and_digest(server, tmp_path):
    found = names.local(NAME)
    path = pathlib.Path(found.path)
    assert path.read_bytes() == DATA and path.is_relative_to(tmp_path / 'cache')
    digest = hashlib.sha256(DATA).hexdigest()
    assert found.origin == (f'{server.url}{FILE}', f'SHA-256 {digest}')
    assert path.with_name('file.npz.sha256').read_text() == f'{digest}  file.npz\n'
    assert {one.name for one in path.parent.iterdir()} == {
        '.lock',
        path.name,
        f'{path.name}.sha256',
    }
    assert names.local(NAME) == found
    assert server.asked == [('GET', FILE, None)]


def test_a_download_that_is_cut_goes_on_where_it_stopped_as_often_as_something_comes(server):
    server.cuts = [1000, 1000, 1000, 1000]
    assert read() == DATA
    assert [asked[2] for asked in server.asked] == [None, *(f'bytes={i}000-' for i in range(1, 5))]


def test_a_download_goes_on_in_the_next_process(server, tmp_path):
    server.cuts = [1000, 0, 0]
    with pytest.raises(
        UserError, match=f'^{NAME.replace("+", ".")}: .*ended after 1,000 of 5,120 b'
    ):
        read()
    assert not whole(tmp_path)
    server.asked.clear()
    assert read() == DATA
    assert server.asked == [('GET', FILE, 'bytes=1000-')]


def test_of_a_file_that_has_changed_meanwhile_no_half_is_kept(server):
    server.cuts = [1000, 0, 0]
    with pytest.raises(UserError):
        read()
    server.answers[FILE] = web.stored(DATA[::-1])
    assert read() == DATA[::-1]


def cut(**headers):
    """The first 1,000 bytes of a file that is to be longer."""
    return web.raw(200, DATA[:1000], ETag='"v1"', Content_Length=len(DATA), **headers)


def rest(start=1000, stop=5120, total=5120, *, body=None, etag='"v1"', **headers):
    """A part of the file."""
    headers = {'Content_Range': f'bytes {start}-{stop - 1}/{total}', 'ETag': etag} | headers
    return web.raw(206, DATA[start:stop] if body is None else body, **headers)


@pytest.mark.parametrize(
    'part',
    [
        rest(body=DATA[:0:-1][: len(DATA) - 1000], etag='"v2"'),
        rest(etag='W/"v1"'),
        rest(total=len(DATA) + 1),
    ],
)
def test_a_part_of_another_version_is_not_appended(server, part):
    server.raw = [cut(), part]
    assert read() == DATA
    assert [asked[2] for asked in server.asked] == [None, 'bytes=1000-', None]


def test_a_server_may_give_less_than_is_asked_for_until_all_is_there(server, monkeypatch):
    monkeypatch.setattr(download, '_WAITS', (0.0,))  # for the one that is cut
    server.raw = [
        cut(),
        rest(1000, 1500, Content_Length=500),
        rest(1500, 1600),
        rest(1600, total='*'),
    ]
    assert read() == DATA
    assert [asked[2] for asked in server.asked[1:]] == [f'bytes={i}-' for i in (1000, 1500, 1600)]


@pytest.mark.parametrize(
    'part',
    [
        rest(1001),
        rest(999),
        rest(Content_Range='bytes 1000-1499'),
        rest(1000, 1500, Content_Length=4120, body=DATA[1000:]),
        rest(1000, 1500, body=DATA[1000:]),
        rest(1000, len(DATA) + 1),
        rest(1000, 1000, body=b''),
    ],
)
def test_a_part_that_contradicts_itself_is_refused_and_nothing_is_kept(server, tmp_path, part):
    server.raw = [cut(), part]
    with pytest.raises(UserError, match='answered HTTP 206|more came than was declared'):
        read()
    assert not whole(tmp_path) and read() == DATA
    assert server.asked[-1] == ('GET', FILE, None)


@pytest.mark.parametrize(
    ('headers', 'message'),
    [
        ({'Content_Encoding': 'gzip'}, r'comes encoded \(Content-Encoding\)'),
        ({'Content_Encoding': ['identity', 'br']}, r'comes encoded \(Content-Encoding\)'),
        ({'Transfer_Encoding': 'gzip'}, r'comes encoded \(Transfer-Encoding\)'),
        ({'Transfer_Encoding': 'gzip, chunked'}, r'comes encoded \(Transfer-Encoding\)'),
        ({'Content_Length': [100, len(DATA)]}, 'declares no length .*: expected one number'),
        ({'Content_Length': '5_120'}, 'declares no length'),
        ({'Content_Length': '+5120'}, 'declares no length'),
        ({'Content_Length': '-1'}, 'declares no length'),
        ({'Content_Length': '9' * 5000}, 'declares no length'),
    ],
)
def test_an_answer_in_another_form_or_without_one_length_is_refused(
    server, tmp_path, headers, message
):
    server.raw = [web.raw(200, DATA, **({'Content_Length': len(DATA)} | headers))]
    with pytest.raises(UserError, match=message):
        read()
    assert len(server.asked) == 1 and not [*tmp_path.rglob('file.npz*')]
    server.raw = [web.raw(200, DATA, Content_Encoding='identity', Content_Length=[5120, 5120])]
    assert read() == DATA


@pytest.mark.parametrize('headers', [{}, {'ETag': 'W/"weak"'}])
def test_where_versions_cannot_be_told_apart_it_begins_again(server, headers):
    server.answers[FILE] = web.Answer(DATA, headers)
    server.cuts = [1000]
    assert read() == DATA
    assert [asked[2] for asked in server.asked] == [None, None]


def test_another_part_than_the_one_that_was_asked_for_is_not_taken_for_it(server):
    server.answers[FILE] = web.Answer(DATA, {'ETag': '"x"', 'Content-Range': 'bytes 7-5119/5120'})
    server.cuts = [1000]
    with pytest.raises(UserError, match='answered HTTP 206'):
        read()


def test_a_server_that_never_gets_to_the_end_is_given_up(server):
    server.answers[FILE] = web.Answer(DATA)
    server.cuts = [500, 600, 500, 600, 500, 600, 500, 600]
    with pytest.raises(UserError, match='ended after .* of 5,120 bytes; once it can be reached'):
        read()


@pytest.mark.parametrize('given', [False, True])
def test_a_flipped_bit_is_refused_and_nothing_of_the_file_is_left(server, tmp_path, given):
    """By the checksum that Google's servers declare, or by the one in the name."""
    server.answers[FILE] = web.Answer(DATA) if given else web.stored(DATA)
    server.flipped = True
    name = f'{NAME}#sha256={hashlib.sha256(DATA).hexdigest().upper()}' if given else NAME
    expected = 'SHA-256' if given else 'CRC32C'
    with pytest.raises(UserError, match=f'expected the {expected} .*, what came has .*: removed'):
        read(name)
    assert not [path for path in (tmp_path / 'cache').rglob('file.npz*')]
    server.flipped = False
    assert read(name) == DATA


def test_a_bit_that_was_flipped_in_the_cache_is_noticed(server, tmp_path):
    path = pathlib.Path(names.local(NAME).path)
    path.write_bytes(DATA[:-1] + b'?')
    with pytest.raises(UserError, match='damaged since it was downloaded, and removed'):
        read()
    assert read() == DATA
    path.write_bytes(b'')
    path.with_name('file.npz.sha256').unlink()
    with pytest.raises(UserError, match='damaged since'):
        read()


@pytest.mark.parametrize(
    ('status', 'message'),
    [
        (401, 'HTTP 401: it is not public: download it with what has access, and name that file'),
        (403, 'HTTP 403: it is not public, or not there: download it with what has access'),
        (404, r'HTTP 404: nothing is there; is the name right\?'),
        (418, 'HTTP 418: the server says .*eapot'),
    ],
)
def test_a_refusal_is_one_sentence_and_asked_for_once(server, tmp_path, status, message):
    server.refusals = [status]
    with pytest.raises(UserError, match=f'^{NAME.replace("+", ".")}: {server.url}.*: {message}'):
        read()
    assert len(server.asked) == 1 and not whole(tmp_path)


def test_a_server_that_is_busy_is_asked_again(server):
    server.refusals = [503, 429]
    assert read() == DATA
    server.refusals = [500] * 9
    with pytest.raises(UserError, match='HTTP 500 Internal Server Error; once it can be reached'):
        read(NAME.replace('file', 'other'))


def test_a_server_that_claims_more_than_it_has_is_not_believed(server, tmp_path):
    server.claims = 7
    with pytest.raises(UserError, match='ended (after 5,120 of 5,127|before the length)'):
        read()
    assert not whole(tmp_path)
    server.claims = 10**15
    with pytest.raises(OSError, match='no room for 953,674,316 MiB more of file.npz, .* are free'):
        read()
    server.claims = -7
    with pytest.raises(UserError, match='expected the CRC32C'):
        read()
    assert not whole(tmp_path)


def test_without_a_length_only_a_checksum_says_what_is_whole(server):
    server.answers[FILE] = web.Answer(DATA, {'Content-Length': ''})
    with pytest.raises(UserError, match='does not say how long it is.*; add #sha256=DIGEST'):
        read()
    assert read(f'{NAME}#sha256={hashlib.sha256(DATA).hexdigest()}') == DATA


def test_a_full_disk_is_said_with_what_to_do(server, tmp_path, monkeypatch):
    class Full(io.FileIO):
        def write(self, block):
            super().write(block[:100])
            raise OSError(errno.ENOSPC, 'No space left on device')

    def opened(path, mode='r', **how):
        return Full(path, mode) if path.suffix == '.partial' else open_as(path, mode, **how)

    open_as = pathlib.Path.open
    monkeypatch.setattr(pathlib.Path, 'open', opened)
    said = (
        'No space left on device after 100 bytes of file.npz; make room, and .*; VIT_JAX_CACHE=DIR'
    )
    with pytest.raises(OSError, match=said):
        read()
    assert len(server.asked) == 1 and not whole(tmp_path)


@pytest.mark.parametrize(
    ('own', 'users', 'expected'),
    [
        ('/own', '/users', '/own'),
        ('', '/users', '/users/vit_jax'),
        ('', '', '/home/she/.cache/vit_jax'),
        ('', 'users', '/home/she/.cache/vit_jax'),  # the standard: absolute, or ignored
    ],
)
def test_the_cache_is_where_it_was_said_or_in_the_users_own(own, users, expected, monkeypatch):
    monkeypatch.setenv('HOME', '/home/she')
    monkeypatch.setenv('VIT_JAX_CACHE', own)
    monkeypatch.setenv('XDG_CACHE_HOME', users)
    assert download.cache() == pathlib.Path(expected)


def test_a_cache_that_cannot_be_written_is_said_with_what_to_do(server, monkeypatch):
    monkeypatch.setenv('VIT_JAX_CACHE', '/dev/null')
    with pytest.raises(OSError, match='/dev/null/.*: Not a directory; VIT_JAX_CACHE=DIR is'):
        read()


def test_what_a_network_loses_is_no_fault_of_the_disk(server, monkeypatch):
    def unreachable(*_):
        raise OSError(errno.EHOSTUNREACH, 'No route to host')

    monkeypatch.setattr(http.client.HTTPResponse, 'read1', unreachable)
    with pytest.raises(UserError, match='No route to host; once it can be reached, the same'):
        read()


def test_a_certificate_that_is_not_accepted_is_said_at_once(server, monkeypatch):
    asked = []

    def refused(*_, **__):
        asked.append(_)
        error = ssl.SSLCertVerificationError(1, 'certificate verify failed')
        error.verify_message = 'self-signed certificate'  # as the system sets it
        raise urllib.error.URLError(error)

    monkeypatch.setattr(urllib.request.OpenerDirector, 'open', refused)
    with pytest.raises(UserError, match='is not accepted: self-signed certificate; SSL_CERT_FILE='):
        read()
    assert len(asked) == 1


def test_the_secret_in_a_url_is_said_and_kept_nowhere(server, tmp_path):
    data = pathlib.Path(reference.path('google_vit_token_prelogits.npz')).read_bytes()
    server.answers['/a.npz'] = web.stored(data)
    name = f'{server.url}/a.npz?key=secret#sha256={hashlib.sha256(data).hexdigest()}'
    network = vit_jax.load(name)
    assert network.report[0] == name.replace('?key=secret', '')
    vit_jax.save(network, tmp_path / 'b.safetensors', 'timm')
    assert b'secret' not in (tmp_path / 'b.safetensors').read_bytes()
    decided = experiment.decide(tiny.experiment(start_from=name, model=None))
    assert decided.config.start_from == network.report[0]
    with pytest.raises(UserError) as error:
        names.local(f'{server.url}/b.npz?key=secret#sha256={"0" * 64}')
    assert 'secret' not in str(error.value)


@pytest.mark.parametrize(
    'answer',
    [
        b'HTTP/1.1 418 secret\r\n\r\n',
        b'HTTP/1.1 999 secret\r\n\r\n',
        b'lalala secret\r\n\r\n',
        b'HTTP/9 secret\r\n\r\n',
        web.raw(302, Location='foo://x/?secret', Content_Length=0),
        web.raw(302, Location='http://[::1/?secret', Content_Length=0),
        web.raw(302, Location='http://host:secret/', Content_Length=0),
        web.raw(302, Location='/b.npz?secret', Content_Length=0),
    ],
)
def test_what_a_server_says_in_words_is_not_repeated(server, answer):
    server.raw = [answer] * 20
    with pytest.raises(UserError) as refused:
        names.local(f'{server.url}/b.npz?key=secret#sha256={"0" * 64}')
    text = str(refused.value)
    assert 'secret' not in text and '\n' not in text and f'{server.url}/b.npz' in text


SECRETS = [
    'https://127.0.0.1:1/f.npz?se=2027-01-01T00:00:00Z&sig=secret',
    'https://127.0.0.1:1/f.npz?a=1?sig=secret:secret',
    'https://127.0.0.1:1/f.npz?sig=secret#secret',
    'https://127.0.0.1:1/f.npz?sig=secret#sha256=secret',
    'https:/h/f.npz?sig=secret',
    'https://user:secret@127.0.0.1:1/f.npz',
    'https://user:secret?x@h/f.npz',
    'https:/user:secret@h/f.npz',
    'https://127.0.0.1:secret/f.npz',
    'https://127.0.0.1:1/f.zip?sig=secret',
    's3://bucket/f.npz?sig=secret:secret',
    'file:///tmp/f.npz?secret',
    'ftp://user:secret@h/x?secret',
    'hf:a/b?x:secret',
    'hf:a/b@main?x:secret',
    'gs://b/work?k=1:secret',
    'gs://b/f.npz?k=1:secret',
    'augreg:B/16?secret',
]


@pytest.mark.parametrize('name', SECRETS)
def test_what_may_be_a_secret_in_a_name_is_shown_nowhere(name, server, monkeypatch):
    monkeypatch.setattr(download, '_WAITS', ())
    for said in (
        names.shown(name),
        names.as_path(name),
        refusal(names.local, name),
        refusal(names.require_here, name),
        refusal(names.local_file, name),
    ):
        assert 'secret' not in said and '\n' not in said
    assert not server.asked


def refusal(function, name):
    with pytest.raises(UserError) as refused:
        function(name)
    return str(refused.value)


def test_a_subtree_stands_before_a_query_which_may_hold_colons(server):
    server.answers['/a.npz'] = web.stored(DATA)
    digest = f'#sha256={hashlib.sha256(DATA).hexdigest()}'
    name = f'{server.url}/a.npz:img?se=00:00:00Z&sig=secret'
    assert names.local(name + digest).path.endswith('/a.npz:img')
    assert names.shown(name + digest) == f'{server.url}/a.npz:img{digest}'
    assert names.as_path(name + digest) == f'{server.url}/a.npz:img'
    asked = []
    fetched = download.fetched
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, 'fetched', lambda url, **_: asked.append(url) or fetched(url))
        names.local(f'{server.url}/a.npz?se=00:00:00Z{digest}')
    assert asked == [f'{server.url}/a.npz?se=00:00:00Z']


def test_a_name_that_is_too_long_for_a_disk_is_downloaded(server):
    file = f'/bucket/{"a" * 300}.npz'
    server.answers[file] = web.stored(DATA)
    assert read(f'gs:/{file}') == DATA
    with pytest.raises(MissingFile, match='nothing is there'):
        read(f'gs://bucket/{"b" * 300}.npz')


def test_a_cache_whose_name_is_too_long_is_said_with_what_to_do(server, monkeypatch, tmp_path):
    monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / ('a' * 300)))
    with pytest.raises(OSError, match='File name too long; VIT_JAX_CACHE=DIR is another place'):
        read()


def test_a_web_page_is_no_checkpoint(server):
    server.answers[FILE] = web.Answer(b'<html>', {'Content-Type': 'text/html; charset=utf-8'})
    with pytest.raises(UserError, match='a web page; take the link that downloads the file'):
        read()


def test_what_began_with_tls_must_not_end_without():
    asked, none = urllib.request.Request('https://host/x.npz'), email.message.Message()
    follow = http_answers._Redirects().redirect_request
    assert follow(asked, None, 302, 'Found', none, 'https://other/x.npz') is not None
    with pytest.raises(UserError, match='leads to http://, where anyone on the way could change'):
        follow(asked, None, 302, 'Found', none, 'http://host/x.npz')
    plain = urllib.request.Request('http://host/x.npz')
    assert follow(plain, None, 302, 'Found', none, 'HTTPS://other/x.npz') is not None
    with pytest.raises(UserError, match='http://host/x.npz: leads to no https:// address$'):
        follow(plain, None, 302, 'Found', none, 'ftp://host/x.npz?secret')


def test_of_a_note_that_was_not_written_whole_the_download_begins_again(server, tmp_path):
    server.cuts = [1000, 0, 0]
    with pytest.raises(UserError):
        read()
    next((tmp_path / 'cache').rglob('*.etag')).write_bytes(b'"\xff')
    server.asked.clear()
    assert read() == DATA and server.asked == [('GET', FILE, None)]


def test_offline_what_is_in_the_cache_is_enough_and_nothing_is_asked(server, monkeypatch, tmp_path):
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    with pytest.raises(MissingFile, match='not in the cache .*, and HF_HUB_OFFLINE forbids'):
        read()
    monkeypatch.setenv('HF_HUB_OFFLINE', '0')
    read()
    asked = len(server.asked)
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    assert read() == DATA and len(server.asked) == asked == 1
    with pytest.raises(UserError, match='^gs://bucket/run: HF_HUB_OFFLINE forbids to read it$'):
        names.local('gs://bucket/run')


def test_where_no_server_can_be_reached_one_sentence_says_so(server, monkeypatch):
    with socket.socket() as unheard:
        unheard.bind(('127.0.0.1', 0))
        monkeypatch.setenv('STORAGE_EMULATOR_HOST', '{}:{}'.format(*unheard.getsockname()))
        with pytest.raises(UserError, match='Connection refused; once it can be reached'):
            read()


def test_a_subtree_and_a_digest_may_stand_behind_a_file(server):
    path, digest = names.local(NAME).path, hashlib.sha256(DATA).hexdigest()
    assert names.local(f'{NAME}:img').path == f'{path}:img'
    assert names.local(f'{NAME}:img#sha256={digest}').path == f'{path}:img'
    assert names.local(f'{server.url}{FILE}#sha256={digest}').path == path  # safe without TLS
    assert names.local(f'{server.url}{FILE}?secret=1#sha256={digest}').origin[0].endswith('.npz')
    with pytest.raises(UserError, match='expected the SHA-256 0000'):
        names.local(f'{NAME}#sha256={"0" * 64}')


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('hf:name', 'expected hf:OWNER/NAME or hf:OWNER/NAME@REVISION'),
        ('hf://owner/name', 'expected hf:OWNER/NAME'),
        ('hf:owner/name@', 'expected hf:OWNER/NAME'),
        ('augreg:b/16', "did you mean 'augreg:B/16'?"),
        ('augreg:B/17', "did you mean 'augreg:B/16'?"),
        ('vit:L/16-in22k', "did you mean 'vit:L/16-in21k'?"),
        ('s3://bucket/file.npz', '`aws s3 cp s3://bucket/file.npz FILE`, and name that file'),
        ('http://host/file.npz', 'anyone on the way could change it: https://, or #sha256=DIGEST'),
        ('https://host/file.zip', 'expected a file that ends with .safetensors, .npz, '),
        ('https://host/file.npz#sha256=12', 'after # there is only sha256= and its 64 hexadecimal'),
        ('https://huggingface.co/owner/name', 'expected hf:owner/name'),
        ('https:/host/file.npz', 'expected https://host/file.npz, as text: a pathlib.Path takes'),
        ('file:///tmp/file.npz', 'a local path has no file://: /tmp/file.npz'),
        ('ftp://host/file.npz', 'expected hf:OWNER/NAME, https://HOST/FILE, gs://BUCKET/FILE or'),
        ('https://[host/file.npz', 'not a URL: '),
    ],
)
def test_a_name_that_cannot_be_meant_is_refused_with_what_would_be_right(name, message, server):
    with pytest.raises(UserError) as refused:
        names.local(name)
    text = str(refused.value)
    assert text.startswith(f'{name}: ') and message in text and '\n' not in text
    assert not server.asked


@pytest.mark.parametrize('name', ['s3://bucket/index.csv', 'hf:owner/name', 'http://h/x.csv'])
def test_an_index_is_a_local_file_or_one_of_a_bucket(name, server):
    server.answers['/bucket/index.csv'] = web.stored(b'1')
    assert pathlib.Path(names.local_file('gs://bucket/index.csv')).read_bytes() == b'1'
    with pytest.raises(UserError, match='expected the SHA-256 0000'):
        names.local_file(f'gs://bucket/index.csv#sha256={"0" * 64}')
    with pytest.raises(UserError, match=f'{name}: expected a local file, or one of gs:// or https'):
        names.local_file(name)


def test_a_local_path_is_itself(tmp_path):
    for path in (
        'x.npz',
        '/a/b',
        'C:\\x',
        'C:/x',
        'x.npz:img',
        'x.npz:/img',
        'a/b',
        '',
        'vit',
        'hf',
        'gs://b/run',
        'gs://b/run:1',
    ):
        assert names.local(path) == names.Local(path)


def test_a_network_is_not_written_to_a_name():
    with pytest.raises(UserError, match='gs://b/x.npz: expected a local path to write to'):
        convert.main(convert._parser().parse_args(['x.npz', 'gs://b/x.npz']))


def test_what_came_and_is_no_checkpoint_is_said_with_where_it_is_and_came_from(server, tmp_path):
    with pytest.raises(UserError) as refused:
        vit_jax.load(NAME)
    text = str(refused.value)
    assert text.startswith(f'{tmp_path}/cache/') and 'neither npz, nor safetensors' in text
    assert text.endswith(
        f'; it came from {server.url}{FILE}: remove it to have it downloaded again'
    )


def test_figures_of_a_network_are_called_as_its_name_is():
    short, hub, url = 'augreg:B/16', 'hf:owner/name', f'{NAME}:img#sha256={"0" * 64}'
    assert visualize._names([short, hub]) == ['augreg-B-16', 'name']
    assert visualize._names([url]) == ['file_img']


@pytest.mark.full
def test_all_hosts_must_begin_from_the_same_files(tmp_path, monkeypatch):
    asked = {}
    start = open_checkpoint(str(reference.path('hf_vit')), Hints())._replace(origin=('URL', 'SHA'))
    monkeypatch.setattr(experiment, 'open_start', lambda config: start)
    monkeypatch.setattr(Job, 'require_same', lambda job, name, facts: asked.update({name: facts}))
    config = tiny.experiment(start_from='hf:owner/name', model=None)
    with training_run.agreed(config, str(tmp_path), Job()):
        pass
    assert asked['what is decided']['origin'] == ['URL', 'SHA']


@pytest.mark.full
@pytest.mark.parametrize('name', FILES)
def test_a_published_file_is_as_large_as_the_network_of_its_name(name):
    """4 bytes a parameter: how the README of vision_transformer came by its numbers."""
    collection, _, rest = name.partition(':')
    pretrained = rest.endswith('-in21k')
    named = rest.removesuffix('-in21k').removesuffix('-224')
    side = 224 if pretrained or rest.endswith('-224') else 384
    config = variant(named, image_size=(side, side), num_classes=21_843 if pretrained else 1000)
    if collection == 'vit' and pretrained:  # which have a hidden layer in their head
        config = variant(
            named,
            image_size=(side, side),
            num_classes=21_843,
            representation_size=config.width,
        )
    size = 4 * parameter_count(config) / 2**20
    assert abs(published(name).mebibytes - size) < 1
