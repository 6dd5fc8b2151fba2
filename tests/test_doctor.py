"""The doctor stands in for a training: it takes its flags, and does what that does at its start."""

import argparse
import itertools
import json
from importlib import metadata

import cv2
import jax
import numpy as np
import pytest

import vit_jax
from tests import networks, tiny
from tests.hosts import hosts
from vit_jax import doctor
from vit_jax.base import UserError
from vit_jax.distributed.processes import Job

TINY = '--config=tests/tiny_config.py'


def asked(folder, *flags, count=1, **more):
    """The exit codes, and what all processes said."""
    with hosts(folder, ['vit_jax.doctor', *flags], count, **more) as started:
        codes = [host.wait() for host in started]
        return codes, ''.join(host.text for host in started)


@pytest.mark.full
def test_the_doctor_does_what_a_training_does_before_it_compiles(tmp_path):
    workdir = f'--workdir={tmp_path / "run"}'
    codes, text = asked(tmp_path, TINY, workdir, '--config.seed=3', '--watchdog_seconds=60')
    assert codes == [0] and text.endswith('result      all is well\n'), text
    for line in f'workdir     {tmp_path / "run"}: ', 'data        1,438 training images':
        assert f'\n{line}' in text
    kept = json.loads((tmp_path / 'run/config.json').read_text())
    assert kept['seed'] == 3 and not (tmp_path / 'run/checkpoints').exists()
    (tmp_path / 'run/checkpoints/5').mkdir(parents=True)  # of an experiment that has begun
    codes, text = asked(tmp_path, TINY, workdir, '--config.seed=4')
    assert codes == [1] and 'seed: 3 -> 4' in text and 'all is well' not in text
    codes, text = asked(tmp_path, TINY, '--config.data=nowhere')
    assert codes == [1] and "error: data='nowhere': no such folder" in text
    codes, text = asked(tmp_path, workdir)
    assert codes == [1] and '--config is missing' in text


@pytest.mark.parametrize(
    'driver, plugin, version, wrong',
    [
        ('550.54', None, None, r"pip install 'vit_jax\[cuda\]' \(CUDA 12\) or 'vit_jax\[cuda13"),
        ('520.61', '12', None, 'driver 520.61 is too old for CUDA 12: 525 or newer'),
        ('550.54', '13', None, 'driver 550.54 is too old for CUDA 13: 580 or newer'),
        ('580.65', '12', '0.1.2', r"0.1.2 does not .*: pip install -U 'vit_jax\[cuda\]'"),
        ('580.65', '13', '0.1.2', r"0.1.2 does not .*: pip install -U 'vit_jax\[cuda13\]'"),
        ('580.65', '13', metadata.version('jaxlib'), None),
    ],
)
def test_the_doctor_names_the_extra_of_the_cuda_that_is_here(
    monkeypatch, driver, plugin, version, wrong
):
    monkeypatch.setattr(doctor, '_nvidia_gpus', lambda: [f'{driver}, a GPU'])
    monkeypatch.setattr(
        doctor.importlib.util, 'find_spec', lambda name: name == f'jax_cuda{plugin}_plugin' or None
    )
    ours = {f'jax-cuda{plugin}-plugin': version, 'jaxlib': metadata.version('jaxlib')}
    monkeypatch.setattr(doctor.metadata, 'version', ours.get)
    if wrong is None:
        assert doctor._check_accelerator() == 1
    else:
        with pytest.raises(UserError, match=wrong):
            doctor._check_accelerator()


@pytest.mark.parametrize('plugin, missing', [(None, r'vit_jax\[cuda13\].* and '), ('13', '')])
def test_the_doctor_says_what_a_gpu_that_was_asked_for_lacks(monkeypatch, plugin, missing):
    monkeypatch.setattr(doctor, '_nvidia_gpus', lambda: [])
    monkeypatch.setattr(
        doctor.importlib.util, 'find_spec', lambda name: name == f'jax_cuda{plugin}_plugin' or None
    )
    before = jax.config.jax_platforms
    try:
        for platforms in 'cuda', 'gpu', 'cuda,tpu':
            jax.config.update('jax_platforms', platforms)
            with pytest.raises(UserError, match=f'lacks .*{missing}the NVIDIA driver'):
                doctor._check_accelerator()
    finally:
        jax.config.update('jax_platforms', before)
    assert doctor._check_accelerator() == 0


@pytest.mark.full
def test_the_doctor_tries_a_bucket_with_and_without_an_experiment(bucket, tmp_path):
    workdir = '--workdir=gs://bucket/run'
    codes, text = asked(tmp_path, workdir)
    assert codes == [0] and bucket.names() == [], text
    assert (
        '\nworkdir     gs://bucket/run: objects can be written, read, listed and removed\n' in text
    )
    codes, text = asked(tmp_path, workdir, TINY)
    assert codes == [0] and bucket.names() == ['run/config.json'], text
    bucket.fault = lambda method, path: 403 if method == 'DELETE' else None
    for flags in [workdir], [workdir, TINY]:
        codes, text = asked(tmp_path, *flags)
        assert codes == [1] and 'permission storage.objects.delete is missing on bucket;' in text


@pytest.mark.full
def test_the_doctor_finds_what_a_training_finds_before_its_first_step(tmp_path, capsys):
    for path in itertools.product(['train', 'test'], ['cat', 'dog'], '01'):
        file = tmp_path.joinpath('photos', *path)
        file.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(f'{file}.png', np.zeros((8, 8, 3), np.uint8))
    config = tiny.experiment(data=str(tmp_path / 'photos'), eval_split='test')
    config.loader.placement = 'host'
    arguments = argparse.Namespace(config=config, workdir=None)
    doctor._check_training(Job(), arguments)
    said = capsys.readouterr().out
    vit_jax.save(networks.loaded(tiny.model(depth=4)), tmp_path / 'deeper.npz')
    config.start_from = str(tmp_path / 'deeper.npz')
    with pytest.raises(UserError, match='start_from: the arrays do not fit'):
        doctor._check_training(Job(), arguments)
    config.start_from, broken = None, tmp_path / 'photos/test/dog/1.png'
    broken.write_bytes(b'')
    with pytest.raises(UserError, match=f'{broken}: the file is empty'):
        doctor._check_training(Job(), arguments)
    config.loader.on_unreadable = 'skip'
    doctor._check_training(Job(), arguments)
    assert 'those to test on can be read' in said
    config.loss = lambda logits, targets: (logits - targets).mean()
    with pytest.raises(UserError, match='one number for each example'):
        doctor._check_training(Job(), arguments)


@pytest.mark.full
def test_the_doctor_compares_the_trainings_of_two_hosts(tmp_path):
    codes, text = asked(
        tmp_path, TINY, count=2, each=lambda index: [f'--config.seed={index}', '--seconds=60']
    )
    assert codes == [1, 1] and 'seed: 0 -> 1' in text
    codes, text = asked(
        tmp_path, TINY, count=2, each=lambda index: [f'--workdir={tmp_path / str(index)}']
    )
    assert codes == [1, 1] and 'workdir: ' in text
