"""What the screen says."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.hosts import hosts
from vit_jax.command_line import app

ROOT = pathlib.Path(__file__).parents[2]


def said(*arguments, name='train'):
    done = subprocess.run(
        [sys.executable, '-m', f'vit_jax.{name}', *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stdout, done.stderr


QUICK = '--config=configs/quickstart.py'


@pytest.mark.parametrize(
    'path, message',
    [
        ('modle', "config.modle: no such field; did you mean 'model'?"),
        ('model.dept', "config.model.dept: no such field; did you mean 'depth'?"),
        ('fewshot.shot', "config.fewshot.shot: no such field; did you mean 'shots'?"),
        (
            'augmentation.crop.scal',
            "config.augmentation.crop.scal: no such field; did you mean 'scale'",
        ),
    ],
)
def test_an_unknown_field_suggests_the_nearest(path, message, capsys):
    with pytest.raises(SystemExit):
        app._check_field(path.split('.'))
    assert message in capsys.readouterr().err


def test_every_field_passes_that_check():
    for path in 'data', 'model.depth', 'preprocessing.crop.scale', 'fewshot.shots', 'mesh.fsdp':
        app._check_field(path.split('.'))


def test_a_mistake_on_the_command_line_is_one_line_and_no_traceback(tmp_path):
    cases = {
        ('--config.modle.depth=2',): "error: config.modle: no such field; did you mean 'model'?\n",
        ('--config.model.pool=max',): (
            "error: config.model.pool='max': expected one of cls, gap, map, none\n"
        ),
        ('--config.eval_every_steps=none', '--config.seed=none'): (
            'error: config.seed=none: this field needs a value\n'
        ),
    }
    for arguments, message in cases.items():
        code, out, err = said(QUICK, f'--workdir={tmp_path / "run"}', *arguments)
        assert code != 0 and err == message and out == ''


def test_a_configuration_takes_an_argument_after_a_colon(tmp_path):
    (tmp_path / 'named.py').write_text(
        'from vit_jax.config import TrainConfig\n'
        'from vit_jax.training.duration import Duration\n'
        'def get_config(data):\n'
        "    return TrainConfig(data=data, start_from='nowhere', total=Duration(steps=1))\n"
    )
    code, _, err = said(f'--config={tmp_path}/named.py:no/such', f'--workdir={tmp_path}/run')
    assert code == 1 and "data='no/such': no such folder" in err


def test_an_argument_that_a_configuration_does_not_know_is_named(tmp_path):
    config = 'configs/pretrain/vit.py:imagenet,B/17'
    code, out, err = said(f'--config={config}', f'--workdir={tmp_path}/run')
    assert code == 2 and out == ''
    assert err == f"error: --config={config}: no 'imagenet,B/17'; did you mean 'imagenet,B/16'?\n"


def test_help_names_every_flag(tmp_path):
    flags = '--config=', '--config.FIELD=', '--workdir=', '--accept_config_changes', '--distributed'
    for name in 'train', 'finetune', 'fewshot', 'inspect_data', 'plan', 'doctor':
        with hosts(tmp_path, [f'vit_jax.{name}', '--help']) as (host,):
            assert host.wait() == 0
        assert f'python -m vit_jax.{name}' in host.text
        for flag in flags if name not in ('plan', 'doctor') else ():
            assert flag in host.text


def test_none_is_no_value_but_where_it_is_a_choice(tmp_path):
    command = ['vit_jax.train', '--config=tests/tiny_config.py', f'--workdir={tmp_path}/run']
    command += ['--config.total.steps=1', '--config.schedule.warmup.steps=0']
    command += ['--config.compute.remat=none', '--config.checkpoint_every_steps=none']
    with hosts(tmp_path, command) as (host,):
        assert host.wait() == 0, host.text
    values = json.loads((tmp_path / 'run/config.json').read_text())
    assert values['compute']['remat'] == 'none' and values['checkpoint_every_steps'] is None


def test_fine_tuning_without_a_checkpoint_says_what_is_missing(tmp_path):
    code, _, err = said(
        '--config=configs/finetune/transfer.py', f'--workdir={tmp_path / "run"}', name='finetune'
    )
    assert code == 1
    assert err == 'error: fine-tuning needs a checkpoint: --config.start_from=FILE or WORKDIR\n'


def test_the_road_of_the_readme_in_small(tmp_path):
    """Pre-train, fine-tune at another shape, probe: the commands, and what they say at the end."""
    small = '--config.total.steps=2', '--config.schedule.warmup.steps=1', '--config.batch_size=16'
    run, tuned = tmp_path / 'run', tmp_path / 'tuned'
    code, out, err = said(QUICK, f'--workdir={run}', *small)
    assert (code, err) == (0, '')
    for word in 'reached', 'checkpoint', 'metrics', 'time', 'next':
        assert f'\n{word} ' in out
    code, out, err = said(
        '--config=configs/finetune/transfer.py',
        f'--config.start_from={run}',
        '--config.image_size=24,16',
        f'--workdir={tuned}',
        *small,
        name='finetune',
    )
    assert (code, err) == (0, '') and 'resized from 4x4 to 6x4 patches' in out
    code, out, err = said(
        '--config=configs/fewshot/linear.py',
        f'--config.start_from={tuned}',
        f'--workdir={tmp_path / "probe"}',
        name='fewshot',
    )
    assert (code, err) == (0, '') and ' 25 shots' in out and 'fewshot.json' in out
