"""What the programs take and say."""

import contextlib
import functools
import importlib
import logging
import os
import pathlib
import re
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import vit_jax
from tests import tiny
from tests.hosts import hosts
from tests.test_architecture import DOORS
from vit_jax import __main__, finetune
from vit_jax.base.errors import UserError
from vit_jax.cli import app, config_files, config_flags, output
from vit_jax.distributed.processes import Job
from vit_jax.experiment import training_run
from vit_jax.training.loop import NotFiniteError

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


def exit_code(monkeypatch, main, *arguments, parser=None, **options):
    """The exit code of a program of this process."""
    monkeypatch.setattr(sys, 'argv', ['program', *arguments])
    with pytest.raises(SystemExit) as ended:
        app.run(main or (lambda arguments: 0), parser or app.new_parser('name', ''), **options)
    return ended.value.code


def test_a_file_name_that_is_no_unicode_is_printed_as_it_is(monkeypatch, capfdbinary):
    assert exit_code(monkeypatch, lambda _: print(os.fsdecode(b'caf\xe9.jpg')) or 0) == 0
    assert capfdbinary.readouterr().out == b'caf\xe9.jpg\n'


@pytest.mark.parametrize(
    'encoding, text, expected',
    [
        ('utf-8', 'chi\u00e9n \u732b', 'chi\u00e9n \u732b'.encode()),
        ('latin-1', 'chi\u00e9n \u732b', b'chi\xe9n \\u732b'),
        ('ascii', 'chi\u00e9n \U0001f600', b'chi\\xe9n \\U0001f600'),
        ('ascii', 'caf\udce9', b'caf\xe9'),
    ],
)
def test_a_letter_that_the_terminal_lacks_is_escaped(
    encoding, text, expected, tmp_path, monkeypatch
):
    with (tmp_path / 'out').open('w', encoding=encoding) as out, monkeypatch.context() as patch:
        patch.setattr(sys, 'stdout', out)
        assert exit_code(patch, lambda _: print(text) or 0) == 0
    assert (tmp_path / 'out').read_bytes() == expected + b'\n'


@pytest.mark.parametrize('only_prints', [False, True])
def test_a_program_runs_without_standard_output(only_prints, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(sys, 'stdout', None)
        done = []
        main = lambda _: print(sys.stdout.isatty()) or done.append(1) or 0  # noqa: E731
        assert exit_code(patch, main, only_prints=only_prints) == 0 and done
    assert not capsys.readouterr().err


def test_what_a_name_could_do_to_the_terminal_is_escaped():
    for letter in '\n\x1b\x07\x7f\x9b\u202e\u2066\u2028\u2029\u200f':
        assert output.escape_controls(f'a{letter}b').isascii()
    assert output.escape_controls('\u732b \u00e9 \u0627') == '\u732b \u00e9 \u0627'


def test_an_interrupt_during_the_imports_is_one_line(tmp_path):
    """Also if a library ignores it, as callbacks of Python do."""
    (tmp_path / 'jax.py').write_text(
        'import time\n'
        'print("importing", flush=True)\n'
        'try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    time.sleep(60)\n'
    )
    environment = os.environ | {'PYTHONPATH': f'{tmp_path}:{pathlib.Path.cwd()}'}
    process = subprocess.Popen(
        [sys.executable, '-m', 'vit_jax.train'],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == 'importing\n'
    # Python runs the handler between two instructions: a signal just before the sleep waits until
    # it ends. A user would press Ctrl-C again, too.
    errors = None
    while errors is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            _, errors = process.communicate(timeout=1)
    assert (process.returncode, errors) == (130, 'error: interrupted\n')


@pytest.mark.parametrize('words', [['-m', 'vit_jax'], ['-mvit_jax'], ['-um', 'vit_jax']])
def test_a_program_is_started_with_any_flags_of_python(words):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith('usage:'), done.stderr


def with_config():
    parser = app.new_parser('name', 'What it does.')
    app.add_config_flags(parser)
    return parser


@pytest.mark.parametrize(
    'arguments, name',
    [
        ('--confg=a --workdir=b', "--confg=a; .*'--config'"),
        ('--config=a --batch_size=3', "'--config.batch_size'"),
        ('--config=a --epochs=3', "'--config.total.epochs'"),
        ('--confg.batch_size=3', "'--config.batch_size'"),
        ('--config=a --workdir=', '--workdir='),
        ('--workdir=b', '--config'),
        ('--config=a --workdir', '--workdir'),
        ('--config=a --num_processes=2', '--num_processes=2'),  # of other programs
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(monkeypatch, capsys, arguments, name):
    assert exit_code(monkeypatch, None, *arguments.split(), parser=with_config()) == 2
    out, err = capsys.readouterr()
    assert out == '' and err.startswith('error: ') and re.search(name, err) and err.count('\n') == 1
    assert exit_code(monkeypatch, None, '--config.seed=1', parser=app.new_parser('name', '')) == 2


@pytest.mark.parametrize('words', [['--data='], ['--data', ''], ['a', ''], [''], ['a', '--x=']])
def test_a_value_that_is_empty_is_rejected(monkeypatch, capsys, words):
    """For example `--data=$DATA` if the variable is not set."""
    parser = app.new_parser('name', 'What it does.')
    parser.add_argument('images', nargs='*')
    parser.add_argument('--data')
    parser.add_argument('--x')
    assert exit_code(monkeypatch, lambda arguments: 0, *words, parser=parser) == 2
    assert 'expected a value' in capsys.readouterr().err
    parser.add_argument('--only', default='')
    for words in ['a=', '--x=b='], ['--only='], ['--x', 'b=']:
        assert exit_code(monkeypatch, lambda arguments: 0, *words, parser=parser) == 0


@pytest.mark.parametrize('given', ['~/x', '--workdir=~/x', '--config.data=~/x'])
def test_a_tilde_is_the_home_where_a_path_begins(monkeypatch, given):
    monkeypatch.setenv('HOME', '/home/me')
    assert config_flags.expand_home(given) == given.replace('~', '/home/me')
    assert config_flags.expand_home('a=~/x') == 'a=~/x'


def test_the_full_help_has_type_default_and_meaning_of_a_field(monkeypatch, capsys):
    assert exit_code(monkeypatch, None, '--helpfull', parser=with_config()) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith('    batch_size: int = 256'))
    fields = (ROOT / 'vit_jax/config.py').read_text()
    (comment,) = re.findall('    batch_size: int = 256  # (.*)', fields)
    assert line.endswith(f'  {comment}')


@pytest.mark.parametrize('flags', [[], ['--traceback']])
@pytest.mark.parametrize(
    'error, code, line',
    [
        (UserError('data=x: no such folder'), 1, 'error: data=x: no such folder\n'),
        (NotFiniteError('step 3: loss is nan'), 1, 'error: step 3: loss is nan\n'),
        (KeyboardInterrupt(), 130, 'error: interrupted\n'),
        (OSError('a fault of the program'), 1, None),
    ],
)
def test_an_error_that_the_user_can_fix_is_one_line(monkeypatch, capsys, error, code, line, flags):
    def main(arguments):
        raise error

    monkeypatch.setattr(os, '_exit', sys.exit)  # after Ctrl-C
    assert exit_code(monkeypatch, main, *flags) == code
    text = capsys.readouterr().err
    assert ('Traceback' in text and 'in main' in text) == (line is None or bool(flags))
    assert text.startswith(line or '') or flags


@pytest.mark.parametrize('encoding', ['ascii', 'utf-8'])
def test_a_path_that_the_system_cannot_encode_is_one_line(monkeypatch, capsys, encoding):
    monkeypatch.setattr(sys, 'getfilesystemencoding', lambda: encoding)
    assert exit_code(monkeypatch, lambda arguments: '/a/\xe4\udc00'.encode(encoding)) == 1
    assert ('PYTHONUTF8=1' in capsys.readouterr().err) == (encoding == 'ascii')


def test_an_error_in_a_function_of_the_user_is_one_line(monkeypatch, capsys, tmp_path):
    (tmp_path / 'own.py').write_text('def f(arguments):\n    return 1 / 0')
    function = config_files.load_function(f'{tmp_path}/own.py:f')
    assert exit_code(monkeypatch, function) == 1
    assert capsys.readouterr().err.startswith(f'error: {tmp_path}/own.py, line 2: ')


def test_too_little_memory_on_a_device_is_one_line_with_what_needs_less(monkeypatch, capsys):
    allocate = jax.jit(lambda: jnp.zeros(2**45, jnp.int8))
    assert exit_code(monkeypatch, lambda _: allocate()) == 1
    text = capsys.readouterr().err
    assert text.startswith('error: RESOURCE_EXHAUSTED: ') and text.count('\n') == 1
    assert '--config.compute.remat=block' in text


@pytest.mark.gate
def test_a_missing_platform_is_one_sentence(monkeypatch):
    monkeypatch.setenv('JAX_PLATFORMS', 'cuda')
    code, _, err = said('--config=tests/tiny_config.py', '--workdir=/no/where')
    (line,) = (line for line in err.splitlines() if line.startswith('error: '))
    assert code == 1 and 'JAX_PLATFORMS=cuda: ' in line and 'Traceback' not in err


def test_a_result_that_cannot_be_printed_is_an_error(monkeypatch, capsys):
    with open('/dev/full', 'w') as full, monkeypatch.context() as patch:
        patch.setattr(sys, 'stdout', full)
        assert exit_code(patch, lambda _: print(98) or 0, only_prints=True) == 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert 'No space left' in capsys.readouterr().err


def test_a_warning_is_one_line_with_its_level(monkeypatch, capsys):
    assert exit_code(monkeypatch, lambda _: logging.warning('careful') or 0) == 0
    assert capsys.readouterr().err == 'warning: careful\n'


@pytest.mark.filterwarnings('ignore:.*found in sys.modules')
def test_the_programs_are_listed_without_jax_and_started_by_name(monkeypatch, capsys):
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
    files = {path.stem for path in (ROOT / 'vit_jax').glob('*.py')}
    assert [name for name, _ in lines] == sorted(files - {'__init__', '__main__', *DOORS})
    docstring = importlib.import_module('vit_jax.train').__doc__
    assert docstring.startswith(dict(lines)['train'])
    for words, code, text in (
        (['plan', '--help'], 0, '--topology'),
        (['--version'], None, f'vit_jax {vit_jax.__version__}\n'),
        (['trian'], 2, "'train'"),
    ):
        monkeypatch.setattr(sys, 'argv', ['vit_jax', *words])
        with pytest.raises(SystemExit) if code is not None else contextlib.nullcontext() as ended:
            __main__.main()
        assert text in ''.join(capsys.readouterr())
        assert code is None or ended.value.code == code


def test_help_names_every_flag_of_every_program_with_its_meaning():
    for name in __main__.find_programs():
        parser = importlib.import_module(f'vit_jax.{name}').make_parser()
        assert type(parser) is type(app.new_parser('', '')), f'{name}: errors are not one line'
        flags = [action for action in parser._actions if action.option_strings]
        assert not [action.dest for action in flags if not action.help], name
        needed = {
            'train': {'--profile_steps', '--accept_data_changes', '--watchdog_seconds'},
            'fewshot': {'--accept_config_changes', '--num_processes'},
            'doctor': {'--config.FIELD', '--coordinator_address'},
        }.get(name, set())
        assert needed <= {*re.findall(r'--[\w.]+', parser.format_help())}, name


def test_an_error_of_the_configuration_is_one_line(tmp_path, monkeypatch, capsys):
    config = '--config=configs/finetune/transfer.py', f'--workdir={tmp_path / "run"}'
    for flags, name in ((), '--config.start_from=FILE'), (['--config.modle.depth=2'], "'model'"):
        parser = finetune.make_parser()
        tune = functools.partial(finetune.main, job=Job())
        assert exit_code(monkeypatch, tune, *config, *flags, parser=parser) == 1
        out, err = capsys.readouterr()
        assert out == '' and err.startswith('error: ') and name in err and err.count('\n') == 1


CHECKPOINT = 'tests/reference/bigvision_map.npz'


@pytest.mark.parametrize(
    'name, arguments',
    [
        ('inspect_data', '--config=configs/finetune/folder.py --config.data=DATA --workdir=OUT'),
        ('evaluate', f'{CHECKPOINT} --data=DATA --out=OUT'),
        ('visualize', f'{CHECKPOINT} --images=DATA --out=OUT'),
    ],
)
def test_no_program_writes_among_the_images_that_it_reads(tmp_path, name, arguments):
    (tmp_path / 'cat').mkdir()
    program, out = importlib.import_module(f'vit_jax.{name}'), tmp_path / 'out'
    words = arguments.replace('DATA', str(tmp_path)).replace('OUT', str(out)).split()
    with pytest.raises(UserError, match=f'{out}: inside the image folder {tmp_path}'):
        program.main(program.make_parser().parse_args(words))
    with pytest.raises(UserError, match=f'{out}: inside the image folder {tmp_path}'):
        training_run.train(tiny.experiment(data=str(tmp_path)), str(out))
    assert not out.exists()


@pytest.mark.gate
def test_the_directory_of_another_run_is_rejected_with_the_flag_that_accepts_it(tmp_path):
    probe = (
        'vit_jax.fewshot',
        '--config=configs/fewshot/linear.py',
        '--config.start_from=tests/reference/bigvision_map.npz',
        f'--workdir={tmp_path / "probe"}',
    )
    with hosts(tmp_path, probe) as [process]:
        assert process.wait() == 0
    (tmp_path / 'probe/checkpoints/5').mkdir(parents=True)
    code, _, err = said(*probe[1:], '--config.seed=1', name='fewshot')
    assert code == 1 and 'seed: 0 -> 1' in err and '--accept_config_changes' in err
    with hosts(tmp_path, [*probe, '--config.seed=1', '--accept_config_changes']) as [process]:
        assert process.wait() == 0
