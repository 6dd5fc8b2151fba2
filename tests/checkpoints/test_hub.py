"""Checkpoints of the Hugging Face Hub by name, from a hub on this machine."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

import vit_jax
from tests import reference, tiny
from tests.networks import contents, loaded
from tests.servers import web
from vit_jax.base.errors import MissingFile, UserError
from vit_jax.checkpoints import hub, names, published
from vit_jax.checkpoints.formats import google
from vit_jax.experiment.build import open_start

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = pathlib.Path(reference.path('hf_vit'))
FILES = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
IMAGES = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
WEIGHTS = FILES['model.safetensors']
REST = {name: data for name, data in FILES.items() if name != 'model.safetensors'}


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A hub with owner/name, and an empty cache."""
    from huggingface_hub import constants

    with web.serving(web.repository('owner/name', {'main': FILES})) as server:
        for name, value in {
            'ENDPOINT': server.url,
            'HUGGINGFACE_CO_URL_TEMPLATE': server.url + '/{repo_id}/resolve/{revision}/{filename}',
            'HF_HUB_CACHE': str(tmp_path / 'hub'),
            'HF_TOKEN_PATH': str(tmp_path / 'token'),
            'HF_HUB_OFFLINE': False,
        }.items():
            monkeypatch.setattr(constants, name, value)
        yield server


def add(server, revisions, name='owner/name'):
    server.answers |= web.repository(name, revisions)


def fetched(server):
    """The files that were downloaded."""
    return {path.rpartition('/')[2] for method, path in server.requests if '/resolve/' in path}


def test_a_network_of_the_hub_is_the_one_in_the_folder_that_was_uploaded(server):
    network = vit_jax.load('hf:owner/name')
    assert network == vit_jax.load(FOLDER)
    name, commit, digest, layout = network.report[:4]
    assert name == 'hf:owner/name'
    assert commit == f'{server.url}/owner/name, commit {web.commit_of(FILES)}'
    assert re.fullmatch('model.safetensors: SHA-256 [0-9a-f]{64}', digest)
    assert network.origin == (commit, digest) and layout.startswith('huggingface layout')
    with pytest.raises(UserError, match='hf:owner/other: expected a local path to write to'):
        vit_jax.save(network, 'hf:owner/other')


def test_a_training_says_what_exactly_it_began_from(server):
    start = open_start(tiny.experiment(start_from='hf:owner/name', model=None))
    assert start.report[: len(start.origin)] == list(start.origin) and len(start.origin) == 2


def test_a_revision_is_a_branch_a_tag_a_pull_request_or_a_commit(server):
    other = FILES | {'config.json': FILES['config.json'] + b'\n'}
    add(server, {'v1': other, 'refs/pr/1': FILES})
    commit = web.commit_of(other)
    one, two = (names.local(f'hf:owner/name@{revision}') for revision in ('v1', commit))
    assert one == two and one.path.endswith(commit)
    assert names.local('hf:owner/name@refs/pr/1') == names.local('hf:owner/name')
    server.requests.clear()
    assert names.local(f'hf:owner/name@{commit}') == two
    assert not server.requests  # a commit that is in the cache stays what it is


def test_main_may_move_and_what_it_was_stays_in_the_cache(server):
    before = names.local('hf:owner/name')
    add(server, {'main': FILES | {'config.json': FILES['config.json'] + b' '}})
    assert names.local('hf:owner/name').path != before.path
    assert names.local(f'hf:owner/name@{web.commit_of(FILES)}') == before


def test_only_what_is_read_is_downloaded(server):
    more = {
        'preprocessor_config.json': b'{}',
        'tf_model.h5': b'1',
        'flax_model.msgpack': b'2',
        'pytorch_model.bin': b'3',
    }
    add(server, {'main': FILES | more | {'README.md': b'4', 'open_clip_model.safetensors': b'5'}})
    vit_jax.load('hf:owner/name')
    assert fetched(server) == {*FILES, 'preprocessor_config.json'}


@pytest.mark.parametrize('name', ['pytorch_model.bin', 'open_clip_model.safetensors'])
def test_other_weights_are_taken_where_there_are_no_usual_ones(server, name):
    add(server, {'main': {name: WEIGHTS, 'open_clip_config.json': b'{}', 'other.bin': b'1'}})
    found = names.local('hf:owner/name')
    assert fetched(server) == {name, 'open_clip_config.json'} and name in found.origin[1]


def test_shards_are_downloaded_with_their_index(server):
    shards = {f'model-0000{i}-of-00002.safetensors': bytes([i]) for i in (1, 2)}
    add(server, {'main': REST | shards | {'model.safetensors.index.json': b'{}'}})
    assert len(names.local('hf:owner/name').origin) == 4
    assert fetched(server) == {*shards, *REST, 'model.safetensors.index.json'}


def test_a_flipped_bit_is_refused_and_removed_though_the_client_took_it(server, tmp_path):
    server.flipped = '.safetensors'
    with pytest.raises(UserError, match=f'^hf:owner/name: {server.url}.* not the digest that the'):
        names.local('hf:owner/name')
    assert not [*(tmp_path / 'hub').rglob('snapshots/*/*.safetensors')]
    server.flipped = ''
    assert vit_jax.load('hf:owner/name') == vit_jax.load(FOLDER)
    next((tmp_path / 'hub').rglob('model.safetensors')).write_bytes(WEIGHTS[:-1] + b'!')
    with pytest.raises(UserError, match='model.safetensors: not the digest'):
        names.local('hf:owner/name')


def test_of_a_mirror_that_declares_no_digests_the_files_are_taken_as_they_are(server):
    for path, answer in server.answers.items():
        if '/resolve/' in path:
            headers = {'ETag': f'"{len(answer.body)}"', 'X-Repo-Commit': web.commit_of(FILES)}
            server.answers[path] = answer._replace(headers=headers)
    assert vit_jax.load('hf:owner/name') == vit_jax.load(FOLDER)


@pytest.mark.parametrize(
    ('answer', 'message'),
    [
        (web.refused(404, 'RepoNotFound'), 'no such repository, or a private one: `hf auth login`'),
        (web.refused(401, 'RepoNotFound'), 'no such repository, or a private one: `hf auth login`'),
        (web.refused(401, 'GatedRepo'), 'gated: accept its terms on that page, then `hf auth'),
        (web.refused(403, 'GatedRepo'), 'gated: accept its terms on that page, then `hf auth'),
        (web.refused(401, ''), 'HTTP 401: not public: `hf auth login`, or HF_TOKEN=...'),
        (web.refused(403, ''), 'HTTP 403: not public: `hf auth login`, or HF_TOKEN=...'),
        (web.refused(404, 'RevisionNotFound'), "no such branch, tag or commit: 'dev'"),
        (web.refused(500, ''), 'the hub answers HTTP 500'),
        (web.Answer(b'<html>'), 'Expecting value: line 1 column 1'),
        (web.Answer(b'[]'), ''),
        (web.Answer(b'{}'), ''),
    ],
)
def test_a_refusal_is_one_sentence(server, answer, message):
    server.answers['/api/models/owner/name/revision/dev'] = answer
    with pytest.raises(UserError) as refused:
        names.local('hf:owner/name@dev')
    text = str(refused.value)
    assert text.startswith(f'hf:owner/name@dev: {server.url}/owner/name: ')
    assert message in text and '\n' not in text and 'mozilla' not in text


def test_a_repository_without_weights_is_refused(server):
    add(server, {'main': {'README.md': b'1', 'config.json': b'{}'}})
    with pytest.raises(
        MissingFile, match=r'no weights at commit \w+: expected one of model.safetensors, '
    ):
        names.local('hf:owner/name')


def test_a_file_that_is_listed_and_not_there_is_said(server):
    commit = web.commit_of(FILES)
    del server.answers[f'/owner/name/resolve/{commit}/model.safetensors']
    with pytest.raises(UserError, match='hf:owner/name: .*: the hub answers HTTP 404'):
        names.local('hf:owner/name')


def test_offline_what_is_in_the_cache_is_enough_and_nothing_is_asked(server, monkeypatch):
    from huggingface_hub import constants

    found = names.local('hf:owner/name')
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    server.requests.clear()
    assert names.local('hf:owner/name') == found
    with pytest.raises(MissingFile, match='not whole in the cache .*, and HF_HUB_OFFLINE forbids'):
        names.local('hf:owner/other')
    assert not server.requests


def test_where_the_hub_cannot_be_reached_the_cache_is_enough(server, monkeypatch):
    from huggingface_hub import constants

    found = names.local('hf:owner/name')
    with socket.socket() as unheard:
        unheard.bind(('127.0.0.1', 0))
        url = 'http://{}:{}'.format(*unheard.getsockname())
        monkeypatch.setattr(constants, 'ENDPOINT', url)
        assert names.local('hf:owner/name').path == found.path
        with pytest.raises(
            MissingFile, match='not whole in the cache .*, and the hub cannot be reached'
        ):
            names.local('hf:owner/other')


def test_the_user_and_the_query_of_an_address_are_said_nowhere(server, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, 'ENDPOINT', server.url.replace('//', '//me:secret@'))
    try:
        assert 'secret' not in str(names.local('hf:owner/name').origin)
    except UserError as error:
        assert 'secret' not in str(error)


def test_without_the_hubs_client_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setattr(hub.importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(UserError, match=r"hf:o/n: this needs .*: pip install 'vit_jax\[hub\]'"):
        names.local('hf:o/n')


@pytest.mark.full
def test_a_file_of_a_hub_that_is_cut_is_not_kept(server, tmp_path):
    server.cut = 100
    with pytest.raises(UserError, match='^hf:owner/name: '):
        names.local('hf:owner/name')
    assert not [*(tmp_path / 'hub').rglob('snapshots/*/*')]
    server.cut = None
    assert vit_jax.load('hf:owner/name') == vit_jax.load(FOLDER)


def environment(server, tmp_path, **more):
    own = {'HF_ENDPOINT': server.url, 'HF_HOME': str(tmp_path / 'home'), 'JAX_PLATFORMS': 'cpu'}
    own |= {'STORAGE_EMULATOR_HOST': server.url, 'VIT_JAX_CACHE': str(tmp_path / 'cache')}
    return os.environ | own | {'PYTHONPATH': str(ROOT)} | more


@pytest.mark.full
def test_for_a_local_path_nothing_is_asked_and_no_client_is_imported(tmp_path):
    program = f"""
import socket, sys
def refuse(*_): raise AssertionError('a connection')
socket.socket.connect = socket.getaddrinfo = refuse
import vit_jax, vit_jax.evaluate, vit_jax.train
vit_jax.load({str(FOLDER)!r})
assert not {{'huggingface_hub', 'httpx', 'httpx2', 'requests'}} & {{*sys.modules}}
"""
    run = [sys.executable, '-c', program]
    subprocess.run(run, check=True, env=os.environ | {'PYTHONPATH': str(ROOT)}, timeout=120)


@pytest.mark.full
def test_programs_take_names_and_say_what_they_took(tmp_path):
    with web.serving(web.repository('owner/name', {'main': FILES})) as server:
        out = tmp_path / 'copy.safetensors'
        command = [sys.executable, '-m', 'vit_jax.convert', 'hf:owner/name', str(out)]
        run = ran(command, server, tmp_path)
        assert run.returncode == 0, run.stderr
        assert f'commit {web.commit_of(FILES)}' in run.stdout and not run.stderr
        command[3:] = 'hf:owner/other', str(tmp_path / 'other.npz')
        run = ran(command, server, tmp_path)
        assert run.returncode == 1
        assert run.stderr.startswith('error: hf:owner/other: ') and run.stderr.count('\n') == 1


def ran(command, server, tmp_path):
    return subprocess.run(
        command, env=environment(server, tmp_path), capture_output=True, text=True, timeout=120
    )


def twins(folder):
    """One small network as each place holds it: a bucket, timm's repository, transformers' one."""
    vit = loaded(tiny.model(representation_size=None), google.GOOGLE)
    vit_jax.save(vit, folder / 'paper.npz')
    vit_jax.save(vit, folder / 'x.safetensors', 'timm')
    vit_jax.save(vit, folder / 'hf', 'huggingface')
    said = json.loads((folder / 'hf/config.json').read_text())
    # As in the published repositories: not what the paper's network was trained with.
    said |= {'hidden_act': 'gelu', 'layer_norm_eps': 1e-12}
    prepared = {'input_size': [3, 8, 8], 'mean': [0.5] * 3, 'std': [0.5] * 3, 'crop_pct': 0.9}
    arguments = {'num_heads': vit.config.num_heads, 'img_size': 8}
    timm = {'architecture': 'vit_small_patch16_384', 'model_args': arguments}
    timm |= {'pretrained_cfg': prepared, 'num_classes': tiny.CLASSES}
    repositories = {}
    for owner, path, config in (
        ('timm', folder / 'x.safetensors', timm),
        ('google', folder / 'hf/model.safetensors', said),
    ):
        bare = safetensors.numpy.save(contents(path))  # without our card
        files = {'config.json': json.dumps(config).encode(), 'model.safetensors': bare}
        repositories[owner] = files
    return (folder / 'paper.npz').read_bytes(), repositories


PUBLISHED = 'augreg:S/16', 'augreg:Ti/16-in21k', 'vit:B/16-224', 'vit:L/16'
ANSWERS = [(name, status) for name in PUBLISHED for status in (401, 403, 404)]
QUICK = {('augreg:S/16', 403), ('vit:L/16', 404)}
ANSWERS_MARKED = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.full) for case in ANSWERS
]


@pytest.mark.parametrize('name, status', ANSWERS_MARKED)
def test_a_published_name_is_the_same_network_from_every_address(
    server, name, status, tmp_path, monkeypatch
):
    paper, repositories = twins(tmp_path)
    file, bucket = published.FILES[name], '/' + published.FILES[name].address.removeprefix('gs://')
    monkeypatch.setenv('STORAGE_EMULATOR_HOST', server.url)
    monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))
    repository, at, _ = file.copy.removeprefix('hf:').partition('@')
    files = repositories[repository.partition('/')[0]]
    add(server, {'main': files}, repository)
    if at:  # the commit of the files here
        file = file._replace(copy=f'hf:{repository}@{web.commit_of(files)}')
        monkeypatch.setitem(published.FILES, name, file)
    server.answers[bucket] = web.refused(status, '')
    copy = vit_jax.load(name)
    assert file.address in copy.report[1] and file.copy in copy.report[1]
    assert f'{server.url}/{repository}, commit' in copy.report[2]
    server.answers[bucket] = web.Answer(paper)
    original = vit_jax.load(name)
    assert original == copy and original.origin != copy.origin
    np.testing.assert_array_equal(original.logits(IMAGES), copy.logits(IMAGES))


def test_a_published_name_without_a_copy_says_which_have_one(server, monkeypatch, tmp_path):
    monkeypatch.setenv('STORAGE_EMULATOR_HOST', server.url)
    monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))
    with pytest.raises(MissingFile, match='augreg:B/16: .*HTTP 404.*no copy of it is known'):
        names.local('augreg:B/16')
    with pytest.raises(MissingFile, match='augreg:S/16: .*HTTP 404.*and its copy.*no such repos'):
        names.local('augreg:S/16')
