"""The doctor stands in for a training: it takes its flags, and does what that does at its start."""

import json
import os

import pytest

import vit_jax
from tests import networks, tiny
from tests.hosts import hosts

TINY = '--config=tests/tiny_config.py'


def asked(folder, *flags, count=1, **more):
    """The exit codes, and what all processes said."""
    with hosts(folder, ['vit_jax.doctor', *flags], count, **more) as started:
        codes = [host.wait() for host in started]
        return codes, ''.join(host.text for host in started)


@pytest.mark.gate
def test_the_doctor_does_what_a_training_does_before_it_compiles(tmp_path):
    workdir = f'--workdir={tmp_path / "run"}'
    codes, text = asked(tmp_path, TINY, workdir, '--config.seed=3', '--watchdog_seconds=60')
    assert codes == [0] and text.endswith('all checks passed\n'), text
    for line in f'workdir     {tmp_path / "run"}: ', 'data        1,438 training images':
        assert f'\n{line}' in text
    kept = json.loads((tmp_path / 'run/config.json').read_text())
    assert kept['seed'] == 3 and not (tmp_path / 'run/checkpoints').exists()
    (tmp_path / 'run/checkpoints/5').mkdir(parents=True)  # of an experiment that has begun
    codes, text = asked(tmp_path, TINY, workdir, '--config.seed=4')
    assert codes == [1] and 'seed: 3 -> 4' in text and 'all checks passed' not in text
    codes, text = asked(tmp_path, workdir)
    assert codes == [1] and '--config is missing' in text


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A command nvidia-smi, on a host without jax's plugins for GPUs."""
    command = tmp_path / 'bin' / 'nvidia-smi'
    command.parent.mkdir()
    command.write_text('#!/bin/sh\n')
    command.chmod(0o755)
    monkeypatch.setenv('PATH', f'{command.parent}:{os.environ["PATH"]}')
    return command


def test_the_doctor_names_the_extra_that_a_gpu_needs(tmp_path, driver):
    codes, text = asked(tmp_path)
    assert codes == [1] and "pip install 'vit_jax[cuda]'" in text, text


@pytest.mark.gate
def test_the_doctor_tries_a_bucket_with_and_without_an_experiment(bucket, tmp_path):
    workdir = '--workdir=gs://bucket/run'
    codes, text = asked(tmp_path, workdir)
    assert codes == [0] and bucket.names() == [], text
    assert '\nworkdir     gs://bucket/run: ' in text
    codes, text = asked(tmp_path, workdir, TINY)
    assert codes == [0] and {*bucket.names()} == {'run/config.json', 'run/data_manifest.json.gz'}, (
        text
    )
    bucket.fault = lambda method, path: 403 if method == 'DELETE' else None
    codes, text = asked(tmp_path, workdir, TINY)
    assert codes == [1] and 'as the test wants it' in text  # the bucket names the permission


@pytest.mark.gate
def test_the_doctor_finds_that_a_checkpoint_does_not_fit(tmp_path):
    vit_jax.save(networks.loaded(tiny.model(depth=4)), tmp_path / 'deeper.npz')
    codes, text = asked(tmp_path, TINY, f'--config.start_from={tmp_path}/deeper.npz')
    assert codes == [1] and 'error: start_from: ' in text
    assert '\nstep        ' in text  # model and update fit


@pytest.mark.gate
def test_the_doctor_compares_the_trainings_of_two_hosts(tmp_path):
    flags = [f'--workdir={tmp_path / "0"}'], [f'--workdir={tmp_path / "1"}']
    codes, text = asked(tmp_path, TINY, count=2, each=flags.__getitem__)
    assert codes == [1, 1] and 'workdir: ' in text
