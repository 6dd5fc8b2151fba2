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
import typing

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from tests.hosts import hosts
from vit_jax.__main__ import programs
from vit_jax.base import records
from vit_jax.base.errors import UserError
from vit_jax.cli import app, config_files, config_flags
from vit_jax.config import TrainConfig
from vit_jax.distributed.clusters import Launch
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
    cases = {
        ('--config.modle.depth=2',): "error: config.modle: no such field; did you mean 'model'?\n",
        ('--config.model.pool=max',): (
            "error: config.model.pool='max': expected one of cls, gap, map, none, cls_gap, "
            'cls_dist\n'
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
    assert code == 1 and "data='no/such': no such folder; expected a folder that" in err


def test_an_argument_that_a_configuration_does_not_know_is_named(tmp_path):
    config = 'configs/pretrain/vit.py:imagenet,B/17'
    code, out, err = said(f'--config={config}', f'--workdir={tmp_path}/run')
    assert code == 1 and out == ''
    file = config.partition(':')[0]
    meant = "no argument 'imagenet,B/17'; did you mean 'imagenet,B/16'?"
    assert err == f'error: --config={file}: {meant}\n'


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
        ('--compiled=~/x', '--compiled=/home/me/x'),
        ('-compiled=~', '-compiled=/home/me'),
        ('--config.data=~/photos', '--config.data=/home/me/photos'),
        ('--config.evaluations.real.labels=~/real.json', None),
        ('~/photo.jpg', '/home/me/photo.jpg'),
        ('~root/x', f'{os.path.expanduser("~root")}/x'),
        ('--workdir=~root/run', f'--workdir={os.path.expanduser("~root")}/run'),
        ('--workdir=~nobody-of-this-name/run', '--workdir=~nobody-of-this-name/run'),
        ('--workdir=./~', '--workdir=./~'),
        ('--workdir=a/~/b', '--workdir=a/~/b'),
        ('--workdir=run~', '--workdir=run~'),
        ('a=~/x', 'a=~/x'),
    ],
)
def test_a_tilde_is_the_home_wherever_a_path_begins(monkeypatch, given, meant):
    monkeypatch.setenv('HOME', '/home/me')
    assert config_flags.at_home(given) == (meant or given.replace('~', '/home/me'))
    if given == '--compiled=~/x':
        assert started(monkeypatch, app.new_parser('n', ''), given)[1].compiled == '/home/me/x'


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

    def hits(*flags):
        command = [sys.executable, '-c', CACHED, *flags]
        return int(subprocess.check_output(command, env=environment, text=True, timeout=100))

    assert hits('--compiled=none') == 0 and not [*tmp_path.iterdir()]
    assert hits() == 0
    assert hits() > 0
    for path in (tmp_path / 'compiled').glob('*-cache'):
        path.write_bytes(path.read_bytes()[:-3])
    assert hits() == 0
    assert hits(f'--compiled={tmp_path / "other"}') == 0
    assert [*(tmp_path / 'other').glob('*-cache')]


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


def fields(cls, path='config'):
    """All that a command line can name, as the records are nested."""
    for name, hint in records.hints(cls).items():
        yield f'--{path}', name, hint
        for option in records.alternatives(hint):
            kinds = records.record_types([option, *typing.get_args(option)]).values()
            place = f'{path}.{name}.NAME' if typing.get_origin(option) is dict else f'{path}.{name}'
            for kind in kinds:
                yield from fields(kind, place)


def test_the_full_help_says_what_every_field_of_a_configuration_is(monkeypatch, capsys):
    assert started(monkeypatch, with_config(), '--helpfull') == (0,)
    sections = capsys.readouterr().out.split('\n\n--')
    for path, name, hint in fields(TrainConfig):
        (*_, (text, line)) = [
            (text, found.group())
            for text in sections
            if re.search(rf'{path[2:]}\.FIELD\b', text.partition(':')[0])
            for found in re.finditer(rf'^    {name}: .*', text, re.M)
        ]
        choices = '|' in line or records.record_types(records.alternatives(hint))
        comment = re.search(r' {2}\S', line.lstrip())
        told = len(re.findall(rf'\b{name}\b', text)) > 1 or comment
        assert told or choices or typing.get_origin(hint) is dict, (path, name)
    (batch,) = (line for line in sections[1].splitlines() if 'batch_size: int = 256' in line)
    assert batch.endswith('  images of a step, on all devices together')


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


ABSENT = ['cuda', *(pytest.param(x, marks=pytest.mark.full) for x in ('gpu', 'rocm', 'tpu', 'no'))]


@pytest.mark.parametrize('platform', ABSENT)
@pytest.mark.parametrize(
    'command',
    [
        'predict tests/reference/bigvision_map.npz tests/reference',
        'train --config=tests/tiny_config.py --workdir=/no/where',
        'doctor',
    ],
)
def test_a_device_that_was_asked_for_and_is_not_here_is_one_sentence(
    monkeypatch, platform, command
):
    monkeypatch.setenv('JAX_PLATFORMS', platform)
    name, *arguments = command.split()
    code, _, err = said(*arguments, name=name)
    (line,) = (line for line in err.splitlines() if line.startswith('error: '))
    assert code == 1 and f'JAX_PLATFORMS={platform}: ' in line and 'Traceback' not in err


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
        ('-V', 'vit_jax 0'),
        ('version', 'vit_jax 0'),
        ('--help', 'vit_jax PROGRAM'),
        ('help', 'vit_jax PROGRAM'),
        ('help nothing', ''),
        ('help doctor', 'usage: '),
    ],
)
def test_help_and_version_are_there_in_any_spelling(given, told):
    words = [sys.executable, '-m', 'vit_jax', *given.split()]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith(told) and (done.returncode == 0) == bool(told)


@pytest.mark.parametrize('given', ['folder.py', 'folder', 'finetune/folder', 'foldr.py'])
def test_the_file_of_a_configuration_is_found_by_its_name(tmp_path, given):
    with pytest.raises(UserError, match='configs/finetune/folder.py') as error:
        config_files.read(str(tmp_path / given) if given == 'folder.py' else given)
    assert str(error.value).count('.py') <= 3


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
        'doctor': training | {'--seconds'},
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
