"""Checkpoints by name, from a server on this machine: found, checked, rejected in one sentence."""

import concurrent.futures
import hashlib
import pathlib
import socket

import pytest
import requests

import vit_jax
from tests import reference, tiny
from tests.servers import web
from vit_jax import convert
from vit_jax.base.errors import MissingFile, UserError
from vit_jax.checkpoints import download, names
from vit_jax.checkpoints.published import FILES, published
from vit_jax.experiment.build import build_experiment
from vit_jax.models import parameter_count, variant

DATA = bytes(range(256)) * 20
DIGEST = hashlib.sha256(DATA).hexdigest()
FILE = '/bucket/folder+x/file.npz'
NAME = f'gs:/{FILE}'


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A server of gs://, which has FILE, and an empty cache."""
    monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))
    monkeypatch.delenv('HF_HUB_OFFLINE', raising=False)
    with web.serving({FILE: web.Answer(DATA)}) as server:
        monkeypatch.setenv('STORAGE_EMULATOR_HOST', server.url)
        yield server


def downloaded(tmp_path):
    return [path for path in (tmp_path / 'cache').rglob('*') if path.is_file()]


def read(name=NAME):
    return pathlib.Path(names.local(name).path).read_bytes()


def refusal(function, name=NAME):
    with pytest.raises(UserError) as refused:
        function(name)
    text = str(refused.value)
    assert '\n' not in text
    return text


def test_a_file_is_downloaded_once_and_named_with_its_url_and_digest(server, tmp_path):
    found = names.local(NAME)
    path = pathlib.Path(found.path)
    assert path.read_bytes() == DATA and path.is_relative_to(tmp_path / 'cache')
    assert found.origin == (f'{server.url}{FILE}', f'SHA-256 {DIGEST}')
    note = path.with_name('file.npz.sha256')
    assert note.read_text() == f'{DIGEST}  file.npz\n'
    assert sorted(downloaded(tmp_path)) == [path, note]
    assert names.local(NAME) == found
    assert server.requests == [('GET', FILE)]


@pytest.mark.parametrize('cut', [0, 1000, len(DATA) - 1])
def test_a_part_is_never_taken_for_the_file(server, tmp_path, cut):
    server.cut = cut
    assert 'the same command tries again' in refusal(read)
    assert not downloaded(tmp_path)
    server.cut = None
    assert read() == DATA


def test_without_a_length_only_a_digest_tells_what_is_whole(server):
    server.answers[FILE] = web.Answer(DATA, {'Content-Length': '', 'Connection': 'close'})
    assert 'its length is unknown' in refusal(read)
    assert read(f'{NAME}#sha256={DIGEST}') == DATA


def test_a_file_with_another_digest_is_not_kept(server, tmp_path):
    server.flipped = '.npz'
    assert f'expected the SHA-256 {DIGEST}, received' in refusal(read, f'{NAME}#sha256={DIGEST}')
    assert not [path for path in downloaded(tmp_path) if path.suffix == '.npz']
    server.flipped = ''
    assert read(f'{NAME}#sha256={DIGEST.upper()}') == DATA


@pytest.mark.parametrize('damaged', [DATA[:-1] + b'?', DATA[:100], b''])
@pytest.mark.parametrize('noted', [True, False])
def test_a_file_that_was_damaged_in_the_cache_is_downloaded_again(server, damaged, noted):
    path = pathlib.Path(names.local(NAME).path)
    path.write_bytes(damaged)
    if not noted:
        path.with_name('file.npz.sha256').write_text('')
    assert read() == DATA and len(server.requests) == 2


def test_a_wrong_digest_does_not_remove_the_file_from_the_cache(server):
    assert read() == DATA
    assert f'received {DIGEST}' in refusal(read, f'{NAME}#sha256={"0" * 64}')
    assert read() == DATA and len(server.requests) == 2


def test_two_that_want_the_same_file_at_once_both_get_it(server):
    server.seconds = 0.3
    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert [*pool.map(read, [NAME] * 4)] == [DATA] * 4


@pytest.mark.parametrize(
    ('status', 'message'),
    [
        (401, 'HTTP 401: it is not public: download it with a program that has access'),
        (403, 'HTTP 403: it is not public, or does not exist: download it with'),
        (404, 'HTTP 404: nothing is there; is the name right?'),
        (418, 'HTTP 418: '),
        (503, 'HTTP 503: the server does not send the file; try again later'),
    ],
)
def test_a_refusal_is_one_sentence(server, tmp_path, status, message):
    server.answers[FILE] = web.Answer(status=status)
    assert refusal(read).startswith(f'{NAME}: {server.url}{FILE}: {message}')
    assert not downloaded(tmp_path)


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


@pytest.mark.parametrize('cache', ['/dev/null', '/dev/full/x', f'/tmp/{"a" * 300}'])
def test_a_cache_that_cannot_be_written_is_named_with_what_to_do(server, monkeypatch, cache):
    monkeypatch.setenv('VIT_JAX_CACHE', cache)
    with pytest.raises(OSError, match='VIT_JAX_CACHE=DIR sets another cache'):
        read()


def test_the_secret_in_a_url_is_shown_and_kept_nowhere(server, tmp_path):
    data = pathlib.Path(reference.path('google_vit_token_prelogits.npz')).read_bytes()
    server.answers['/a.npz'] = web.Answer(data)
    name = f'{server.url}/a.npz?key=secret#sha256={hashlib.sha256(data).hexdigest()}'
    network = vit_jax.load(name)
    assert network.report[0] == name.replace('?key=secret', '')
    vit_jax.save(network, tmp_path / 'b.safetensors', 'timm')
    assert b'secret' not in (tmp_path / 'b.safetensors').read_bytes()
    decided = build_experiment(tiny.experiment(start_from=name, model=None))
    assert decided.recorded_config()['start_from'] == network.report[0]


@pytest.mark.parametrize(
    'answer',
    [
        b'HTTP/1.1 418 secret\r\n\r\n',
        b'HTTP/1.1 999 secret\r\n\r\n',
        b'lalala secret\r\n\r\n',
        web.raw(302, Location='foo://x/?secret', Content_Length=0),
        web.raw(302, Location='http://[::1/?secret', Content_Length=0),
        web.raw(302, Location='http://host:secret/', Content_Length=0),
        web.raw(302, Location='/b.npz?secret', Content_Length=0),
        web.raw(200, b'secret', Content_Length=6),
    ],
)
def test_the_words_of_a_server_are_not_repeated(server, answer):
    server.raw = answer
    text = refusal(names.local, f'{server.url}/b.npz?key=secret#sha256={"0" * 64}')
    assert 'secret' not in text and f'{server.url}/b.npz' in text


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
def test_what_may_be_a_secret_in_a_name_is_shown_nowhere(name, server):
    for said in (
        names.shown(name),
        names.as_path(name),
        refusal(names.local, name),
        refusal(names.require_here, name),
        refusal(names.local_file, name),
    ):
        assert 'secret' not in said and '\n' not in said
    assert not server.requests


def test_a_subtree_stands_before_a_query_which_may_hold_colons(server):
    server.answers['/a.npz'] = web.Answer(DATA)
    name = f'{server.url}/a.npz:img?se=00:00:00Z&sig=secret'
    digest = f'#sha256={DIGEST}'
    assert names.local(name + digest).path.endswith('/a.npz:img')
    assert names.shown(name + digest) == f'{server.url}/a.npz:img{digest}'
    assert names.as_path(name + digest) == f'{server.url}/a.npz:img'


def test_a_web_page_is_no_checkpoint(server):
    server.answers[FILE] = web.Answer(b'<html>', {'Content-Type': 'text/html; charset=utf-8'})
    with pytest.raises(UserError, match='a web page; take the link that downloads the file'):
        read()


def test_what_began_with_tls_must_not_end_without(server, monkeypatch):
    get = requests.get
    plain = server.url.replace('http:', 'https:', 1)

    def redirected(url, **options):
        """As if a server with TLS had answered with a redirection to one without."""
        return get(url.replace('https:', 'http:', 1), **options)

    monkeypatch.setattr(requests, 'get', redirected)
    assert 'leads to http://' in refusal(read, f'{plain}{FILE}#sha256={DIGEST}')


def test_offline_what_is_in_the_cache_is_enough_and_nothing_is_asked(server, monkeypatch, tmp_path):
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    with pytest.raises(MissingFile, match='not in the cache .*, and HF_HUB_OFFLINE forbids'):
        read()
    monkeypatch.setenv('HF_HUB_OFFLINE', '0')
    read()
    count = len(server.requests)
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    assert read() == DATA and len(server.requests) == count == 1
    with pytest.raises(UserError, match='^gs://bucket/run: HF_HUB_OFFLINE forbids to read it$'):
        names.local('gs://bucket/run')


def test_where_no_server_can_be_reached_one_sentence_says_so(server, monkeypatch):
    with socket.socket() as unheard:
        unheard.bind(('127.0.0.1', 0))
        monkeypatch.setenv('STORAGE_EMULATOR_HOST', '{}:{}'.format(*unheard.getsockname()))
        with pytest.raises(UserError, match='Connection refused; the same command tries again'):
            read()


def test_a_subtree_and_a_digest_may_stand_behind_a_file(server):
    path, digest = names.local(NAME).path, DIGEST
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
        ('https://[host/file.npz', 'is not the URL of a file: '),
    ],
)
def test_a_name_that_cannot_be_meant_is_refused_with_what_would_be_right(name, message, server):
    with pytest.raises(UserError) as refused:
        names.local(name)
    text = str(refused.value)
    assert text.startswith(f'{name}: ') and message in text and '\n' not in text
    assert not server.requests


@pytest.mark.parametrize('name', ['s3://bucket/index.csv', 'hf:owner/name', 'http://h/x.csv'])
def test_an_index_is_a_local_file_or_one_of_a_bucket(name, server):
    server.answers['/bucket/index.csv'] = web.Answer(b'1')
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
        convert.main(convert.make_parser().parse_args(['x.npz', 'gs://b/x.npz']))


def test_what_came_and_is_no_checkpoint_is_said_with_where_it_is_and_came_from(server, tmp_path):
    with pytest.raises(UserError) as refused:
        vit_jax.load(NAME)
    text = str(refused.value)
    assert text.startswith(f'{tmp_path}/cache/') and 'neither npz, nor safetensors' in text
    assert text.endswith(
        f'; it came from {server.url}{FILE}: remove it to have it downloaded again'
    )


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
            named, image_size=(side, side), num_classes=21_843, representation_size=config.width
        )
    size = 4 * parameter_count(config) / 2**20
    assert abs(published(name).mebibytes - size) < 1
