"""Checkpoints by name, from a hub and a file server on this machine."""

import contextlib
import gzip
import hashlib
import importlib
import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

import vit_jax
from tests import reference, tiny
from tests.networks import contents, loaded
from tests.servers import web
from tests.servers.web import wait_until
from vit_jax import convert
from vit_jax.base.errors import MissingFile, UserError
from vit_jax.checkpoints import remote
from vit_jax.checkpoints.formats import google
from vit_jax.experiment.build import build_experiment, open_start
from vit_jax.models import count_params, variant

DATA = bytes(range(256)) * 20
DIGEST = hashlib.sha256(DATA).hexdigest()
FILE = '/bucket/folder+x/file.npz'
NAME = f'gs:/{FILE}'
FOLDER = pathlib.Path(reference.path('hf_vit'))
FILES = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
WEIGHTS = FILES['model.safetensors']
REST = {name: data for name, data in FILES.items() if name != 'model.safetensors'}


@contextlib.contextmanager
def environment(**variables):
    """Variables that are set within; huggingface_hub reads its own when it is imported."""
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        importlib.reload(constants)
        yield
    importlib.reload(constants)


@pytest.fixture
def server(tmp_path):
    """A server of gs://, which has FILE, and a hub with owner/name; the caches are empty."""
    answers = web.repository('owner/name', {'main': FILES}) | {FILE: web.Answer(DATA)}
    names = {'VIT_JAX_CACHE': 'cache', 'HF_HUB_CACHE': 'hub', 'HF_TOKEN_PATH': 'token'}
    places = {variable: str(tmp_path / name) for variable, name in names.items()}
    with web.serving(answers) as server:
        urls = {'STORAGE_EMULATOR_HOST': server.url, 'HF_ENDPOINT': server.url}
        with environment(**places, **urls, HF_HUB_OFFLINE='0'):
            yield server


def read(name=NAME):
    return pathlib.Path(remote.fetch(name).path).read_bytes()


def rejection(name, use=remote.fetch):
    with pytest.raises(UserError) as error:
        use(name)
    assert '\n' not in str(error.value)
    return str(error.value)


def test_a_file_is_downloaded_once_and_reported_with_its_url_and_digest(server, tmp_path):
    found = remote.fetch(NAME)
    path = pathlib.Path(found.path)
    assert path.read_bytes() == DATA and path.is_relative_to(tmp_path / 'cache')
    assert found.origin == (f'{server.url}{FILE}', f'SHA-256 {DIGEST}')
    assert remote.fetch(NAME) == found
    assert server.requests == [('GET', FILE)]


@pytest.mark.parametrize('cut', [0, len(DATA) - 1])
def test_a_part_is_never_taken_for_the_file(server, cut):
    server.cut = cut
    rejection(NAME)
    server.cut = None
    assert read() == DATA


def test_a_digest_in_the_name_is_compared(server):
    server.flipped = '.npz'
    assert DIGEST in rejection(f'{NAME}#sha256={DIGEST}')
    server.flipped = ''
    assert read(f'{NAME}#sha256={DIGEST.upper()}') == DATA
    assert DIGEST in rejection(f'{NAME}#sha256={"0" * 64}')
    assert read() == DATA
    pathlib.Path(remote.fetch(NAME).path).write_bytes(DATA[:-1] + b'?')  # damaged in the cache
    assert read(f'{NAME}#sha256={DIGEST}') == DATA


@pytest.mark.parametrize('status', [403, 404, 503])
def test_a_status_is_named_and_nothing_is_kept(server, status):
    answer, server.answers[FILE] = server.answers[FILE], web.Answer(b'no', status=status)
    assert f'{server.url}{FILE}: HTTP {status}' in rejection(NAME)
    server.answers[FILE] = answer
    assert read() == DATA


def test_what_would_fill_the_disk_is_not_downloaded(server, tmp_path):
    huge = {'Content-Length': str(10**15)}
    zipped = {'Content-Encoding': 'gzip'}
    for headers, text in (huge, '1,000,000,000,000,000 bytes'), (zipped, 'compressed (gzip)'):
        server.answers['/x.npz'] = web.Answer(gzip.compress(bytes(10**6)), headers)
        assert text in rejection(f'{server.url}/x.npz')
    assert not [path for path in tmp_path.rglob('*') if path.is_file()]


def test_a_download_that_cannot_be_opened_can_be_repaired_by_its_message(server):
    stored = pathlib.Path(reference.path('bigvision_map.npz')).read_bytes()
    middle = len(stored) // 2
    flipped = stored[:middle] + bytes([stored[middle] ^ 1]) + stored[middle + 1 :]
    for body in b'<html>Log in</html>', stored[:-5], flipped:
        server.answers['/x.npz'] = web.Answer(body, {'Content-Length': ''})
        text = rejection(f'{server.url}/x.npz', lambda name: vit_jax.load(name))
        path = re.search('; remove (.*/x.npz) to download it again$', text)
        assert path is not None, text
        pathlib.Path(path[1]).unlink()
    server.answers['/x.npz'] = web.Answer(
        pathlib.Path(reference.path('bigvision_map.npz')).read_bytes()
    )
    assert vit_jax.load(f'{server.url}/x.npz').params


def test_a_killed_download_leaves_nothing_once_the_file_is_there(server, tmp_path):
    server.answers[FILE] = web.Answer(DATA[:3], {'Content-Length': str(len(DATA))})
    code = f'from vit_jax.checkpoints import remote; remote.fetch({NAME!r})'
    process = subprocess.Popen([sys.executable, '-c', code])
    wait_until(lambda: list(tmp_path.rglob('*-partial')))
    process.kill()
    process.wait()
    server.answers[FILE] = web.Answer(DATA)
    assert read() == DATA
    assert not list(tmp_path.rglob('*-partial'))


def test_another_host_and_a_connection_without_encryption_are_announced(server, caplog):
    read()
    (warning,) = caplog.messages
    assert f'{server.url}{FILE}' in warning and 'without encryption' in warning
    caplog.clear()
    other_host = f'http://localhost:{server.server_port}{FILE}?token=secret'
    server.answers['/moved.npz'] = web.Answer(b'', {'Location': other_host}, 302)
    assert read(f'{server.url}/moved.npz') == DATA
    assert 'localhost' in caplog.messages[0] and len(caplog.messages) == 2
    assert 'secret' not in caplog.text
    caplog.clear()
    read()  # from the cache
    assert not caplog.messages


def test_without_a_server_the_cache_is_enough(server, monkeypatch):
    found = remote.fetch(NAME)
    server.server_close()
    assert remote.fetch(NAME) == found
    assert rejection('gs://bucket/other.npz').startswith('gs://bucket/other.npz: ')


@pytest.mark.parametrize('own, users', [('/own', '/users'), ('', '/users'), ('', '')])
def test_the_cache_is_in_the_given_folder_or_in_the_users_cache(own, users, monkeypatch):
    monkeypatch.setenv('HOME', '/home/she')
    monkeypatch.setenv('VIT_JAX_CACHE', own)
    monkeypatch.setenv('XDG_CACHE_HOME', users)
    expected = own or f'{users or "/home/she/.cache"}/vit_jax'
    assert remote.cache_folder() == pathlib.Path(expected)


def test_a_cache_that_cannot_be_written_is_named(server, monkeypatch):
    monkeypatch.setenv('VIT_JAX_CACHE', '/dev/null')
    with pytest.raises(OSError, match='/dev/null.*VIT_JAX_CACHE'):
        read()


def test_a_subtree_stands_before_a_query_which_may_contain_colons(server):
    path = remote.fetch(NAME).path
    assert remote.fetch(f'{NAME}:img').path == f'{path}:img'
    server.answers['/a.npz'] = web.Answer(DATA)
    name = f'{server.url}/a.npz:img?se=00:00:00Z&sig=secret'
    assert remote.fetch(f'{name}#sha256={DIGEST}').path.endswith('/a.npz:img')
    assert remote.to_path(name) == remote.redact(name) == f'{server.url}/a.npz:img'


SECRETS = [
    'https://127.0.0.1:1/f.npz?se=2027-01-01T00:00:00Z&sig=secret',
    'https://127.0.0.1:1/f.npz?sig=secret#secret',
    'https:/h/f.npz?sig=secret',
    'https://user:secret@127.0.0.1:1/f.npz',
    's3://bucket/f.npz?sig=secret:secret',
    'ftp://user:secret@h/x?secret',
    'hf:a/b@main?x:secret',
    'gs://b/work?k=1:secret',
    'augreg:B/16?secret',
]


@pytest.mark.parametrize('name', SECRETS)
def test_a_secret_in_a_name_is_in_no_message(name, server):
    messages = rejection(name), rejection(name, remote.require_local)
    assert not any('secret' in text for text in (*messages, remote.redact(name)))


def test_a_secret_in_a_url_is_in_no_file(server, tmp_path):
    data = pathlib.Path(reference.path('google_vit_token_prelogits.npz')).read_bytes()
    server.answers['/a.npz'] = web.Answer(data)
    name = f'{server.url}/a.npz?key=secret#sha256={hashlib.sha256(data).hexdigest()}'
    network = vit_jax.load(name)
    assert network.report[0] == f'{server.url}/a.npz'
    vit_jax.save(network, tmp_path / 'b.safetensors', 'timm')
    assert b'secret' not in (tmp_path / 'b.safetensors').read_bytes()
    decided = build_experiment(tiny.experiment(start_from=name, model=None))
    assert decided.export_config()['start_from'] == network.report[0]


@pytest.mark.parametrize(
    'name, expected',
    [
        ('hf:name', 'hf:OWNER/NAME'),
        ('augreg:B/17', "'augreg:B/16'"),
        ('s3://bucket/file.npz', 'local path'),
        ('https://host/file.zip', '.safetensors'),
        ('https://host/file.npz#sha256=12', '#sha256=DIGEST'),
        ('https:/host/file.npz', 'https://HOST/FILE'),
        ('https://[host/file.npz', ''),
    ],
)
def test_a_name_without_a_meaning_is_rejected(name, expected, server):
    text = rejection(name)
    assert text.startswith(f'{name}: ') and expected in text
    assert not server.requests


LOCAL = 'x.npz', '/a/b', 'C:\\x', 'C:/x', 'x.npz:img', 'a/b', '', 'vit', 'hf', 'gs://b/run'


@pytest.mark.parametrize('path', LOCAL)
def test_a_path_and_a_work_directory_on_a_bucket_stay_as_they_are(path):
    assert remote.fetch(path) == remote.Local(path)


def test_a_checkpoint_is_not_written_to_a_remote_name():
    with pytest.raises(UserError, match='gs://b/x.npz'):
        convert.main(convert.make_parser().parse_args(['x.npz', 'gs://b/x.npz']))
    with pytest.raises(UserError, match='hf:owner/other'):
        vit_jax.save(loaded(tiny.model()), 'hf:owner/other')


WITH_HIDDEN_LAYER = 'vit:B/16-in21k'  # in its head


@pytest.mark.parametrize(
    'name',
    [
        WITH_HIDDEN_LAYER,
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in remote.PUBLISHED
            if name != WITH_HIDDEN_LAYER
        ),
    ],
)
def test_a_published_file_is_as_large_as_the_network_of_its_name(name):
    """4 bytes a parameter: so the README of vision_transformer states sizes."""
    collection, _, rest = name.partition(':')
    pretrained = rest.endswith('-in21k')
    size = rest.removesuffix('-in21k').removesuffix('-224')
    side = 224 if pretrained or rest.endswith('-224') else 384
    config = variant(size, image_size=(side, side), num_classes=21_843 if pretrained else 1000)
    if collection == 'vit' and pretrained:  # whose heads have a hidden layer
        config.representation_size = config.width
    mebibytes = 4 * count_params(config) / 2**20
    assert abs(remote.PUBLISHED[name].mebibytes - mebibytes) < 1


def add(server, revisions, name='owner/name'):
    server.answers |= web.repository(name, revisions)


def downloaded(server):
    return {path.rpartition('/')[2] for _, path in server.requests if '/resolve/' in path}


def test_a_repository_is_the_network_in_the_folder_that_was_uploaded(server):
    network = vit_jax.load('hf:owner/name')
    assert network == vit_jax.load(FOLDER)
    commit = f'{server.url}/owner/name, commit {web.commit_of(FILES)}'
    digest = f'model.safetensors: SHA-256 {hashlib.sha256(WEIGHTS).hexdigest()}'
    assert network.report[:3] == ('hf:owner/name', commit, digest)
    start = open_start(tiny.experiment(start_from='hf:owner/name', model=None))
    assert start.report[:2] == [commit, digest]


def test_a_revision_is_a_branch_or_a_commit_which_is_used_without_a_request(server):
    other = FILES | {'config.json': FILES['config.json'] + b'\n'}
    add(server, {'v1': other, 'refs/pr/1': FILES})
    commit = web.commit_of(other)
    found = remote.fetch('hf:owner/name@v1')
    assert found.path.endswith(commit)
    assert remote.fetch('hf:owner/name@refs/pr/1') == remote.fetch('hf:owner/name') != found
    server.requests.clear()
    assert remote.fetch(f'hf:owner/name@{commit}') == found
    assert not server.requests


SHARDS = {f'model-0000{i}-of-00002.safetensors': bytes([i]) for i in (1, 2)}
SHARDS |= {'model.safetensors.index.json': b'{}'}


@pytest.mark.parametrize(
    'weights, others',
    [
        ({'model.safetensors': WEIGHTS}, ['pytorch_model.bin', 'open_clip_model.safetensors']),
        ({'open_clip_model.safetensors': WEIGHTS}, ['pytorch_model.bin']),
        ({'pytorch_model.bin': WEIGHTS}, ['other.bin', 'tf_model.h5']),
        (SHARDS, ['pytorch_model.bin']),
    ],
)
def test_one_kind_of_weights_and_the_descriptions_are_downloaded(server, weights, others):
    add(server, {'main': REST | weights | dict.fromkeys([*others, 'README.md'], b'1')})
    found = remote.fetch('hf:owner/name')
    assert downloaded(server) == {*REST, *weights}
    assert len(found.origin) == 1 + len(weights)


def test_a_flipped_bit_is_noticed_although_the_client_compares_lengths_only(server):
    server.flipped = '.safetensors'
    blob = pathlib.Path(rejection('hf:owner/name').partition('remove ')[2].split()[0])
    server.flipped = ''
    blob.unlink()
    assert vit_jax.load('hf:owner/name') == vit_jax.load(FOLDER)


@pytest.mark.parametrize(
    'answer',
    [
        web.error(404, 'RepoNotFound'),
        web.error(403, 'GatedRepo'),
        web.error(401, ''),
        web.error(404, 'RevisionNotFound'),
        web.error(500, ''),
        web.Answer(b'<html>'),
        web.Answer(b'{}'),
    ],
)
def test_an_answer_without_a_repository_is_one_sentence(server, answer):
    server.answers['/api/models/owner/name/revision/dev'] = answer
    text = rejection('hf:owner/name@dev')
    assert text.startswith(f'hf:owner/name@dev: {server.url}/owner/name: ')


def test_a_repository_without_weights_is_rejected(server):
    add(server, {'main': {'README.md': b'1', 'config.json': b'{}'}})
    with pytest.raises(MissingFile, match='owner/name.*model.safetensors'):
        remote.fetch('hf:owner/name')


def test_offline_the_hubs_cache_is_enough(server):
    found = remote.fetch('hf:owner/name')
    server.requests.clear()
    with environment(HF_HUB_OFFLINE='1'):
        assert remote.fetch('hf:owner/name') == found
        assert 'hf:owner/other' in rejection('hf:owner/other')
    assert not server.requests


def twins(folder):
    """One small network as each place has it: a bucket, timm's repository, transformers' one."""
    vit = loaded(tiny.model(representation_size=None), google.GOOGLE)
    vit_jax.save(vit, folder / 'paper.npz')
    vit_jax.save(vit, folder / 'x.safetensors', 'timm')
    vit_jax.save(vit, folder / 'hf', 'huggingface')
    # As in the published repositories: not the activation with which the network was trained.
    described = json.loads((folder / 'hf/config.json').read_text())
    described |= {'hidden_act': 'gelu', 'layer_norm_eps': 1e-12}
    prepared = {'input_size': [3, 8, 8], 'mean': [0.5] * 3, 'std': [0.5] * 3, 'crop_pct': 0.9}
    arguments = {'num_heads': vit.config.num_heads, 'img_size': 8}
    timm = {'architecture': 'vit_small_patch16_384', 'model_args': arguments}
    timm |= {'pretrained_cfg': prepared, 'num_classes': tiny.CLASSES}
    repositories = {}
    for owner, path, config in (
        ('timm', folder / 'x.safetensors', timm),
        ('google', folder / 'hf/model.safetensors', described),
    ):
        bare = safetensors.numpy.save(contents(path))  # without our card
        files = {'config.json': json.dumps(config).encode(), 'model.safetensors': bare}
        repositories[owner] = files
    return (folder / 'paper.npz').read_bytes(), repositories


@pytest.mark.parametrize(
    'name',
    [
        'augreg:S/16',
        'vit:L/16',
        pytest.param('augreg:Ti/16-in21k', marks=pytest.mark.gate),
        pytest.param('vit:B/16-224', marks=pytest.mark.gate),
    ],
)
def test_a_published_name_is_the_same_network_from_each_address(
    server, name, tmp_path, monkeypatch
):
    paper, repositories = twins(tmp_path)
    file = remote.PUBLISHED[name]
    bucket = '/' + file.address.removeprefix('gs://')
    repository, pinned, _ = file.copy.removeprefix('hf:').partition('@')
    files = repositories[repository.partition('/')[0]]
    add(server, {'main': files}, repository)
    if pinned:  # to the commit of the files here
        file = file._replace(copy=f'hf:{repository}@{web.commit_of(files)}')
        monkeypatch.setitem(remote.PUBLISHED, name, file)
    server.answers[bucket] = web.error(403, '')
    copy = vit_jax.load(name)
    assert file.address in copy.report[1] and file.copy in copy.report[1]
    assert f'{server.url}/{repository}, commit' in copy.report[2]
    server.answers[bucket] = web.Answer(paper)
    original = vit_jax.load(name)
    assert original == copy and original.origin != copy.origin
    images = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
    np.testing.assert_array_equal(original.logits(images), copy.logits(images))


@pytest.mark.parametrize('name', ['augreg:B/16', 'augreg:S/16'])  # without and with a copy
def test_a_published_name_that_no_server_has_is_rejected(server, name):
    assert rejection(name).startswith(f'{name}: ')
