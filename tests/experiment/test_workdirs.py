"""A work directory: whose it is, and what happens where nothing can be written."""

import json
import os
import subprocess
import sys

import pytest

from tests import tiny
from tests.hosts import ROOT, environment, hosts
from vit_jax.base import records
from vit_jax.base.errors import UserError
from vit_jax.checkpoints.digests import verify_digests
from vit_jax.checkpoints.store import load_card
from vit_jax.cli import config_files
from vit_jax.config import FORMAT, read_config
from vit_jax.distributed.meshes import MeshConfig
from vit_jax.distributed.processes import Job
from vit_jax.experiment import training_run, workdirs
from vit_jax.studies import history

VALUES = records.to_dict(tiny.experiment())


def test_two_runs_in_one_directory_are_refused_and_the_first_is_not_disturbed(tmp_path):
    with workdirs.open_workdir(str(tmp_path), VALUES, Job()):
        held = (tmp_path / '.lock').read_text()
        with pytest.raises(ValueError, match=f'process {os.getpid()} '):
            with workdirs.open_workdir(str(tmp_path), VALUES, Job()):
                pass
        assert (tmp_path / '.lock').read_text() == held
        (tmp_path / '.lock').write_text('\x1b[2J of a terminal')
        with pytest.raises(ValueError, match=str(tmp_path)) as error:
            with workdirs.open_workdir(str(tmp_path), VALUES, Job()):
                pass
        assert 'terminal' not in str(error.value)
    with workdirs.open_workdir(str(tmp_path), VALUES, Job()):  # free again
        assert (tmp_path / '.lock').read_text() != held


def test_another_mesh_or_loader_is_no_other_experiment(tmp_path):
    with workdirs.open_workdir(str(tmp_path), VALUES, Job()):
        (tmp_path / 'checkpoints' / '5').mkdir(parents=True)
    other = records.to_dict(tiny.experiment(mesh=MeshConfig(fsdp=2)))
    other['loader']['threads'] = 3
    with workdirs.open_workdir(str(tmp_path), other, Job()):
        pass
    assert read_config(tmp_path / 'config.json') == other


@pytest.mark.parametrize('path', ['/proc/run', '/dev/null/run'])
def test_where_nothing_can_be_written_nothing_is_computed(path):
    def loss(logits, targets):
        raise AssertionError('traced')

    with pytest.raises(UserError, match=path.rpartition('/')[0]):
        training_run.train(tiny.experiment(loss=loss), path)


@pytest.mark.gate
def test_a_full_disk_is_said_within_a_logging_interval_and_the_checkpoint_before_is_whole(tmp_path):
    """From the save at step 20 on, the system lets no file grow beyond 8 kB."""
    command = ['-m', 'tests.faulty', 'full_disk:19,slow:150', '--config=tests/tiny_config.py']
    done = subprocess.run(  # through a pipe, which has no size
        [sys.executable, *command, f'--workdir={tmp_path}/run'],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    where = f'{tmp_path}/run/checkpoints'
    assert lines[-1].startswith(f'error: {where}: ')
    # Said at the first report after writing has failed; the save itself takes some steps.
    reported = [line for line in lines if line.startswith('step ')]
    assert reported[-1].startswith(('step 20/60', 'step 25/60', 'step 30/60'))
    verify_digests(tmp_path / 'run/checkpoints/10')
    assert load_card(str(tmp_path / 'run'))[0]['step'] == 10


@pytest.mark.gate
@pytest.mark.parametrize('step', [9, 10])
def test_a_directory_that_is_removed_under_its_run_is_said(step, tmp_path):
    """Before and while the files of a checkpoint are written, which may make it again."""
    command = ['tests.faulty', f'gone:{step},slow:50', '--config=tests/tiny_config.py']
    with hosts(tmp_path, [*command, f'--workdir={tmp_path}/run']) as (host,):
        assert host.wait() == 1
    said = host.text.splitlines()[-1]
    assert said.startswith('error: ') and f'{tmp_path}/run' in said


@pytest.mark.parametrize('text', ['{}', '{"compute": null}'])
def test_a_run_without_a_dtype_is_not_resumed(tmp_path, text):
    (tmp_path / 'checkpoints' / '5').mkdir(parents=True)
    (tmp_path / 'config.json').write_text(json.dumps(json.loads(text) | {'format': FORMAT}))
    with pytest.raises(UserError, match='config.json: '):
        workdirs.read_dtype(str(tmp_path))


@pytest.mark.parametrize('text', ['', '[]', '{"data": ', '[' * 100_000, None])
def test_a_run_whose_configuration_cannot_be_read_is_not_resumed(tmp_path, text):
    (tmp_path / 'checkpoints' / '5').mkdir(parents=True)
    if text is not None:
        (tmp_path / 'config.json').write_text(text)
    with pytest.raises(UserError, match='config.json: '):
        with workdirs.open_workdir(str(tmp_path), VALUES, Job(), accept_changes=True):
            pass


@pytest.mark.parametrize('number', [None, 1, '2', FORMAT + 1])
def test_a_work_directory_of_another_format_is_rejected(tmp_path, number):
    with workdirs.open_workdir(str(tmp_path), VALUES, Job()):
        (tmp_path / 'checkpoints' / '5').mkdir(parents=True)
    file = tmp_path / 'config.json'
    values = json.loads(file.read_text()) | {'format': number}
    if number is None:
        del values['format']
    file.write_text(json.dumps(values))
    message = rf'{file}: .*\b{number}\b.*\b{FORMAT}\b[^\n]*$'
    for accept in False, True:
        with pytest.raises(UserError, match=message):
            with workdirs.open_workdir(str(tmp_path), VALUES, Job(), accept_changes=accept):
                pass
    with pytest.raises(UserError, match=message):
        history.read_history(tmp_path, 'run')
    with pytest.raises(UserError, match=message):
        config_files.read_config_file(str(file))
    assert json.loads(file.read_text()) == values


def test_a_run_with_another_order_of_images_is_read_and_not_resumed(tmp_path):
    with workdirs.open_workdir(str(tmp_path), VALUES, Job()):
        (tmp_path / 'checkpoints' / '5').mkdir(parents=True)
    file = tmp_path / 'config.json'
    file.write_text(json.dumps(json.loads(file.read_text()) | {'format': 4}))
    with pytest.raises(UserError, match='format is 4; expected 5'):
        with workdirs.open_workdir(str(tmp_path), VALUES, Job(), accept_changes=True):
            pass
    assert history.read_history(tmp_path, 'run').config == VALUES
