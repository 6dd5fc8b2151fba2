"""What the programs take and say."""

import importlib
import io
import logging
import os
import pathlib
import re
import shutil
import subprocess
import sys

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from tests.hosts import hosts
from vit_jax.__main__ import programs
from vit_jax.base.errors import UserError
from vit_jax.cli import app, config_flags
from vit_jax.distributed.processes import Launch
from vit_jax.training.loop import NotFinite

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


def test_a_name_that_is_no_unicode_is_said_as_the_disk_has_it(monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), 'utf-8')
    monkeypatch.setattr(sys, 'stdout', output)
    monkeypatch.setattr(sys, 'argv', ['program'])
    with pytest.raises(SystemExit) as ended:
        app.run(lambda _: print(os.fsdecode(b'caf\xe9.jpg')) or 0, app.new_parser('x', ''))
    assert ended.value.code == 0
    assert output.buffer.getvalue() == b'caf\xe9.jpg\n'


QUICK = '--config=configs/quickstart.py'


def test_a_mistake_on_the_command_line_is_one_line_and_no_traceback(tmp_path):
    code, out, err = said(QUICK, f'--workdir={tmp_path / "run"}', '--config.modle.depth=2')
    message = "error: config.modle: no such field; did you mean 'model'?\n"
    assert (code, out, err) == (1, '', message)


@pytest.mark.full
def test_a_training_that_is_started_without_any_output_runs(tmp_path):
    command = f"exec '{sys.executable}' -m vit_jax.train --config=tests/tiny_config.py"
    command += f' --workdir={tmp_path}/run >&- 2>&-'
    run = subprocess.run(['bash', '-c', command], cwd=ROOT, timeout=200)
    assert run.returncode == 0


def started(monkeypatch, parser, *arguments):
    """The exit code of a program that returns its arguments, and these."""
    found = []
    monkeypatch.setattr(sys, 'argv', ['program', *arguments])
    with pytest.raises(SystemExit) as ended:
        app.run(lambda values: found.append(values) or 0, parser, on_devices=False)
    return ended.value.code, *found


@pytest.mark.parametrize(
    'given, meant',
    [
        ('--workdir=~/x', '--workdir=/home/me/x'),
        ('--config.evaluations.real.labels=~/real.json', None),
        ('~/photo.jpg', '/home/me/photo.jpg'),
        ('--workdir=./~', '--workdir=./~'),
        ('a=~/x', 'a=~/x'),
    ],
)
def test_a_tilde_is_the_home_wherever_a_path_begins(monkeypatch, given, meant):
    monkeypatch.setenv('HOME', '/home/me')
    assert config_flags.expand_home(given) == (meant or given.replace('~', '/home/me'))


CACHED = """
import sys, jax
from vit_jax.cli import app
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append('/cache_hits' in event))
def main(arguments):
    assert jax.jit(lambda x: x * 3)(2.0) == 6.0
    print(sum(hits))
    return 0
app.run(main, app.new_parser('name', ''))
"""


@pytest.mark.full
def test_the_next_start_loads_what_was_compiled_and_compiles_what_is_damaged(tmp_path):
    environment = {k: v for k, v in os.environ.items() if 'CACHE' not in k}
    environment['VIT_JAX_CACHE'] = str(tmp_path)

    def hits(**more):
        command = [sys.executable, '-c', CACHED]
        return int(subprocess.check_output(command, env=environment | more, text=True, timeout=100))

    assert hits(JAX_ENABLE_COMPILATION_CACHE='false') == 0 and not [*tmp_path.iterdir()]
    assert hits() == 0
    assert hits() > 0
    for path in (tmp_path / 'compiled').glob('*-cache'):
        path.write_bytes(path.read_bytes()[:-3])
    assert hits() == 0


def test_a_flag_that_a_program_would_ignore_is_refused(monkeypatch, capsys):
    for flag in '--config.seed=1', '--accept_config_changes', '--num_processes=2':
        assert started(monkeypatch, app.new_parser('name', ''), flag) == (2,)
        assert f'unrecognized arguments: {flag}' in capsys.readouterr().err
    with pytest.raises(ValueError, match='watchdog_seconds=0.0: expected at least 0.1'):
        Launch(watchdog_seconds=0.0)


def with_config():
    parser = app.new_parser('name', 'What it does.')
    app.add_config(parser)
    return parser


@pytest.mark.parametrize(
    'arguments, message',
    [
        ('--confg=a --workdir=b', "--confg=a; did you mean '--config'?"),
        ('--config=a --workdir=b --batch_size=3', "did you mean '--config.batch_size'?"),
        ('--config=a --workdir=b --epochs=3', "did you mean '--config.total.epochs'?"),
        ('--confg.batch_size=3 --workdir=b', "did you mean '--config.batch_size'?"),
        ('--config=a --workdri=b', "--workdri=b; did you mean '--workdir'?"),
        ('configs/quickstart.py --workdir=b', 'did you mean --config=configs/quickstart.py?'),
        ('--workdir=b own.py:argument', 'did you mean --config=own.py:argument?'),
        ('--config=a --config=b --workdir=c', '--config=b: expected one value of --config'),
        ('--config=a --workdir=', '--workdir=: expected one value of --workdir'),
        ('--workdir=b', 'required: --config'),
        ('--config=a --workdir', '--workdir: expected one argument'),
    ],
)
def test_a_wrong_flag_is_one_line_that_says_what_was_meant(monkeypatch, capsys, arguments, message):
    assert started(monkeypatch, with_config(), *arguments.split()) == (2,)
    out, err = capsys.readouterr()
    assert out == '' and err.startswith('error: ') and message in err and err.count('\n') == 1


def test_the_full_help_has_type_default_and_meaning_of_a_field(monkeypatch, capsys):
    assert started(monkeypatch, with_config(), '--helpfull') == (0,)
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith('    batch_size: int = 256'))
    assert line.endswith('  images of a step, on all devices together')


@pytest.mark.parametrize('flags', [[], ['--traceback']])
@pytest.mark.parametrize(
    'error, code, line',
    [
        (UserError('data=x: no such folder'), 1, 'error: data=x: no such folder\n'),
        (NotFinite('step 3: loss is nan'), 1, 'error: step 3: loss is nan\n'),
        (KeyboardInterrupt(), 130, 'error: interrupted\n'),
        (ValueError('a fault of ours'), 1, None),
        (OSError('a fault of ours'), 1, None),
        (RuntimeError('a fault of ours'), 1, None),
    ],
)
def test_an_error_is_one_line_where_the_user_can_mend_it(
    monkeypatch, capsys, error, code, line, flags
):
    def main(arguments):
        raise error

    monkeypatch.setattr(sys, 'argv', ['program', *flags])
    monkeypatch.setattr(os, '_exit', sys.exit)
    with pytest.raises(SystemExit) as ended:
        app.run(main, app.new_parser('name', ''))
    text = capsys.readouterr().err
    assert ended.value.code == code
    assert ('Traceback' in text and 'in main' in text) == (line is None or bool(flags))
    assert text.startswith(line or '') or flags


def test_a_device_with_too_little_memory_is_one_line_with_what_needs_less(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['program'])
    with pytest.raises(SystemExit) as ended:
        app.run(lambda _: jax.jit(lambda: jnp.zeros(2**45, jnp.int8))(), app.new_parser('n', ''))
    text = capsys.readouterr().err
    assert ended.value.code == 1 and text.count('\n') == 1
    assert text.startswith('error: RESOURCE_EXHAUSTED: ') and '--config.compute.remat=block' in text


@pytest.mark.parametrize(
    'command',
    [
        'predict tests/reference/bigvision_map.npz tests/reference',
        'train --config=tests/tiny_config.py --workdir=/no/where',
        'doctor',
    ],
)
def test_a_platform_that_is_not_here_is_one_sentence(monkeypatch, command):
    monkeypatch.setenv('JAX_PLATFORMS', 'cuda')
    name, *arguments = command.split()
    code, _, err = said(*arguments, name=name)
    (line,) = (line for line in err.splitlines() if line.startswith('error: '))
    assert code == 1 and 'JAX_PLATFORMS=cuda: ' in line and 'Traceback' not in err


def test_a_result_that_cannot_be_printed_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['program'])
    with open('/dev/full', 'w') as full:
        monkeypatch.setattr(sys, 'stdout', full)
        with pytest.raises(SystemExit) as ended:
            app.run(lambda arguments: print(98) or 0, app.new_parser('n', ''), only_prints=True)
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert ended.value.code == 1 and 'No space left' in capsys.readouterr().err


def test_warnings_are_named_by_their_level(monkeypatch, capsys):
    def main(arguments):
        logging.getLogger('any').warning('careful')
        logging.getLogger('any').error('bad')
        return 0

    monkeypatch.setattr(sys, 'argv', ['program'])
    with pytest.raises(SystemExit):
        app.run(main, app.new_parser('name', ''))
    assert capsys.readouterr().err == 'warning: careful\nerror: bad\n'


def test_the_programs_are_listed_without_jax_and_started_by_name(tmp_path):
    listed = """
import runpy, sys
sys.argv[1:] = []
runpy.run_module('vit_jax', run_name='__main__')
assert 'jax' not in sys.modules
"""
    done = subprocess.run([sys.executable, '-c', listed], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *listed, _, page = done.stdout.splitlines()[2:]
    assert page == f'Documentation: {ROOT / "docs/index.md"}'
    lines = [line.split(maxsplit=1) for line in listed]
    files = [path.stem for path in (ROOT / 'vit_jax').glob('*.py')]
    doors = {'__init__', '__main__', 'config', 'pretrained'}
    assert [name for name, _ in lines] == sorted({*files} - doors)
    assert dict(lines)['train'] == 'Trains a Vision Transformer'
    piped = f'{sys.executable} -m vit_jax | true'
    done = subprocess.run(['sh', '-c', piped], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ''
    with hosts(tmp_path, ['vit_jax', 'plan', '--help']) as (host,):
        assert host.wait() == 0 and '--topology' in host.text
    with hosts(tmp_path, ['vit_jax', '--version']) as (host,):
        assert host.wait() == 0 and f'vit_jax {vit_jax.__version__}' in host.text
    with hosts(tmp_path, ['vit_jax', 'trian']) as (host,):
        assert host.wait() == 2 and "did you mean 'train'?" in host.text


@pytest.mark.parametrize(
    'given, told',
    [
        ('--version', 'vit_jax 0'),
        ('help', 'vit_jax PROGRAM'),
        ('help nothing', ''),
        ('help doctor', 'usage: '),
    ],
)
def test_help_and_version_are_there_in_any_spelling(given, told):
    words = [sys.executable, '-m', 'vit_jax', *given.split()]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith(told) and (done.returncode == 0) == bool(told)


def test_help_names_every_flag_of_every_program_with_its_meaning():
    parsers = {
        name: importlib.import_module(f'vit_jax.{name}').make_parser() for name in programs()
    }
    for name, parser in parsers.items():
        assert type(parser) is type(app.new_parser('', '')), f'{name}: errors are not one line'
        flags = [action for action in parser._actions if action.option_strings]
        assert not [action.dest for action in flags if not action.help], name
    with_config = {'--config', '--config.FIELD', '--helpfull'}
    launch = {'--distributed', '--coordinator_address', '--num_processes', '--watchdog_seconds'}
    job = with_config | launch | {'--workdir', '--accept_config_changes'}
    training = job | {'--accept_data_changes', '--profile_steps'}
    for name, flags in {
        'train': training,
        'fewshot': job,
        'doctor': training,
        'inspect_data': with_config | {'--workdir'},
        'plan': with_config | {'--topology', '--num_classes', '--num_images', '--largest'},
    }.items():
        said = {*re.findall(r'--[\w.]+', parsers[name].format_help())}
        assert flags <= said and not said & (training - flags), name


CHECKPOINT = 'tests/reference/google_vit_token_prelogits.npz'


@pytest.mark.full
@pytest.mark.parametrize(
    'command, file',
    [
        (f'evaluate {CHECKPOINT} --by_number --data={{data}} --out={{out}}', 'evaluation.json'),
        (
            'inspect_data --config=tests/tiny_config.py --config.data={data} --workdir={out}',
            'data.json',
        ),
        (f'predict {CHECKPOINT} {{photo}} --features={{out}}/features.npz', 'features.npz'),
        ('train --config=tests/tiny_config.py --workdir={out}', 'checkpoints/60'),
    ],
)
def test_what_a_program_writes_is_written_when_nobody_reads_what_it_says(command, file, tmp_path):
    for name in 'abcdefghijk':
        (tmp_path / 'data' / 'test' / name).mkdir(parents=True)
        photo = tmp_path / 'data' / 'test' / name / 'x.png'
        cv2.imwrite(str(photo), np.zeros((8, 8, 3), np.uint8))
    shutil.copytree(tmp_path / 'data' / 'test', tmp_path / 'data' / 'train')
    (tmp_path / 'out').mkdir()
    places = {'data': tmp_path / 'data', 'out': tmp_path / 'out', 'photo': photo}
    asked = [sys.executable, '-m', *f'vit_jax.{command.format(**places)}'.split()]
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing) as closed:
        done = subprocess.run(asked, cwd=ROOT, stdout=closed, stderr=closed, timeout=200)
    assert done.returncode in (0, 1) and (tmp_path / 'out' / file).exists()


def test_fine_tuning_without_a_checkpoint_says_what_is_missing(tmp_path):
    code, _, err = said(
        '--config=configs/finetune/transfer.py', f'--workdir={tmp_path / "run"}', name='finetune'
    )
    assert code == 1
    assert err.startswith('error: fine-tuning needs a checkpoint: --config.start_from=FILE, ')


@pytest.mark.full
def test_the_directory_of_another_run_is_refused_with_advice_that_helps(tmp_path):
    probe = (
        '--config=configs/fewshot/linear.py',
        '--config.start_from=tests/reference/bigvision_map.npz',
        f'--workdir={tmp_path / "probe"}',
    )
    code, _, err = said(*probe, name='fewshot')
    assert (code, err) == (0, '')
    (tmp_path / 'probe/checkpoints/5').mkdir(parents=True)
    code, _, err = said(*probe, '--config.seed=1', name='fewshot')
    assert code == 1 and 'seed: 0 -> 1\n' in err and 'go on with --accept_config_changes' in err
    code, _, err = said(*probe, '--config.seed=1', '--accept_config_changes', name='fewshot')
    assert code == 0
