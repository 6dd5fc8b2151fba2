"""Shared by all programs: arguments, the compilation cache, one-line errors, exit codes.

A program is a file in vit_jax/ with `make_parser()` and `main`. It ends in `run(main,
make_parser())`, or in `run_job`, if it may be one process of several.
"""

import argparse
import dataclasses
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

from vit_jax.base.errors import UserError, lacks_memory
from vit_jax.base.records import Record
from vit_jax.base.storage import is_remote
from vit_jax.checkpoints.remote import cache
from vit_jax.cli import config_files, config_flags, config_help, output
from vit_jax.config import TrainConfig
from vit_jax.data.image_decoding import MAX_PIXELS, MOST_PIXELS
from vit_jax.distributed import meshes
from vit_jax.distributed.processes import INTERRUPTED, Job, Launch, joined_job
from vit_jax.training.loop import NotFinite

_LESS_MEMORY = (
    'less is needed with a smaller batch (--batch_size, --config.batch_size, '
    '--config.eval_batch_size), --config.compute.remat=block or --config.accumulation_steps=2'
)
_MAX_COMPILED_BYTES = 4 * 2**30  # jax evicts the least recently used programs
_UNREAD = 141  # the exit code of a shell's command whose output is no longer read (SIGPIPE)


def run(
    main: Callable[[argparse.Namespace], int],
    parser: argparse.ArgumentParser,
    *,
    only_prints: bool = False,
    on_devices: bool = True,
) -> NoReturn:
    """Runs a program and exits with the code that `main` returns.

    Args:
      main: The program, given its arguments.
      parser: The parser of its arguments.
      only_prints: Exit if stdout is closed, as by `| head`, because nothing else is produced.
      on_devices: Call `prepare_devices` before `main`.
    """
    if not only_prints:
        output.outlive_readers()
    if hasattr(sys.stdout, 'reconfigure'):  # file names need not be Unicode
        sys.stdout.reconfigure(errors='surrogateescape')
    output.log_in_lines()
    try:
        arguments = parser.parse_args()
        if on_devices:
            prepare_devices()
        code = main(arguments)
        print(end='', flush=True)  # stdout may be closed
    except BrokenPipeError:
        os._exit(_UNREAD)
    except KeyboardInterrupt as error:
        report(error)
        os._exit(INTERRUPTED)  # without waiting for threads that compile or write
    except Exception as error:
        code = report(error)
    sys.exit(code)


def run_job(
    main: Callable[[argparse.Namespace, Job], int], parser: argparse.ArgumentParser
) -> NoReturn:
    """Runs a program like `run`, as one of the processes of a job (see `add_launch`)."""

    def start(arguments: argparse.Namespace) -> int:
        with joined_job(launch(arguments), report) as job:
            prepare_devices(processes=job.count)
            return main(arguments, job)

    run(start, parser, on_devices=False)


def report(error: BaseException) -> int:
    """Prints an error and returns the exit code.

    An error that the user can fix is one line; others, or all with --traceback, have a traceback.
    """
    is_fixable, text = isinstance(error, UserError | NotFinite), str(error)
    if isinstance(error, KeyboardInterrupt):
        is_fixable, text = True, 'interrupted'
    if lacks_memory(error):
        is_fixable, text = True, f'{text.splitlines()[0]}; {_LESS_MEMORY}'
    if is_fixable and '--traceback' not in sys.argv:
        # Background tasks of orbax that end with the process would have the last word.
        warnings.simplefilter('ignore')
        print(f'error: {text}', file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def prepare_devices(*, processes: int = 1) -> None:
    """Requires the devices of JAX_PLATFORMS, and sets the folder of jax's compilation cache.

    JAX_COMPILATION_CACHE_DIR names another folder, JAX_ENABLE_COMPILATION_CACHE=false disables the
    cache. Several processes have no default folder: a process that loads a program does not wait
    for the others, which compile it.
    """
    meshes.require_devices()
    if jax.config.values['jax_compilation_cache_dir'] is None and processes == 1:
        jax.config.update('jax_compilation_cache_dir', str(cache() / 'compiled'))
        jax.config.update('jax_compilation_cache_max_size', _MAX_COMPILED_BYTES)
        # Most programs are small.
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)


class _Parser(argparse.ArgumentParser):
    """Loads the configuration; reports a wrong flag in one line, with the nearest flag."""

    config_kind: type[Record] | None = None  # None: without configuration

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        overrides, words = config_flags.split([config_flags.expand_home(word) for word in words])
        self._check_flags(words)
        arguments = super().parse_args(words, namespace)
        file = getattr(arguments, 'config', None)
        if file is not None:
            arguments.config = config_flags.load(file, overrides, self.config_kind or TrainConfig)
        elif overrides:
            why = '--config=FILE is missing' if self.config_kind else 'there is no configuration'
            self.error(f'unrecognized arguments: --config.{overrides[0]}; {why}')
        return arguments

    def _check_flags(self, words: Sequence[str]) -> None:
        flags = [name for name in self._option_string_actions if name.startswith('--')]
        for word in words:
            flag = word.partition('=')[0]
            if flag.startswith('--') and flag not in flags:
                name = flag[2:].rpartition('.')[2]
                hint = config_help.suggest(self.config_kind, name, flags)
                self.error(f'unrecognized arguments: {word}; {hint}')
            if word in ('--config=', '--workdir='):
                self.error(f'{word}: expected a value')

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'error: {message} (--help lists all flags)\n')


class _HelpFull(argparse.Action):
    """Prints the help with all fields of the configuration, and exits."""

    def __call__(self, parser: Any, *_: Any) -> None:
        parser.epilog = config_help.describe_fields(parser.config_kind)
        parser.print_help()
        parser.exit()


def new_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of a program, which its docstring describes."""
    parser = _Parser(
        prog=f'python -m vit_jax.{name}',
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    text = 'show where any error comes from'
    parser.add_argument('--traceback', action='store_true', help=text)
    return parser


def add_config(
    parser: argparse.ArgumentParser,
    kind: type[Record] = TrainConfig,
    *,
    workdir: bool = True,
    required: bool = True,
) -> None:
    """Adds the arguments of a configuration, and of a directory for results."""
    assert isinstance(parser, _Parser)
    parser.config_kind = kind
    text = 'a file that defines get_config(), and the argument of that function'
    parser.add_argument('--config', required=required, metavar='FILE[:ARGUMENT]', help=text)
    text = 'any field of the configuration, such as --config.seed=1; none: no value'
    parser.add_argument('--config.FIELD', default=argparse.SUPPRESS, metavar='VALUE', help=text)
    if workdir:
        parser.add_argument('--workdir', required=required, metavar='DIR', help='of the results')
    text = 'show this help, and type, default and meaning of all fields of the configuration'
    parser.add_argument('--helpfull', action=_HelpFull, nargs=0, help=text)


def new_job_parser(
    name: str, description: str | None, *, required: bool = True, trains: bool = True
) -> argparse.ArgumentParser:
    """Returns the parser of a program with configuration and work directory in several processes.

    Args:
      name: The program.
      description: Its docstring.
      required: Whether the program needs configuration and work directory.
      trains: Whether the program trains.
    """
    parser = new_parser(name, description)
    add_config(parser, required=required)
    text = 'resume although the configuration has changed'
    parser.add_argument('--accept_config_changes', action='store_true', help=text)
    if trains:
        text = 'resume although the data have changed'
        parser.add_argument('--accept_data_changes', action='store_true', help=text)
        text = 'write a profile of the M - N steps after step N into WORKDIR/profile'
        parser.add_argument('--profile_steps', type=_steps, metavar='N:M', help=text)
    add_launch(parser)
    return parser


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a job of several processes (docs/multi_host.md)."""
    add = parser.add_argument_group('several hosts: detected in a cluster, or given').add_argument
    add('--distributed', choices=['auto', 'off'], default='auto', help='off: one process alone')
    add('--coordinator_address', metavar='HOST:PORT', help='of process 0')
    add('--num_processes', type=int, metavar='N', help='on all hosts together')
    add('--process_id', type=int, metavar='I', help='of this process, from 0')
    for name, text in {
        'start_seconds': 'to wait for the other processes',
        'heartbeat_seconds': 'without a sign of life, after which a process is dead',
        'watchdog_seconds': 'without a step, a batch or a save, after which a process exits',
    }.items():
        text = f'{text} ({getattr(Launch, name):g})'
        add(f'--{name}', type=float, default=getattr(Launch, name), metavar='S', help=text)


def launch(arguments: argparse.Namespace) -> Launch:
    """Returns the Launch of the arguments of `add_launch`."""
    values = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Launch)}
    return Launch(**values | {'distributed': arguments.distributed == 'auto'})


def add_reading(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a program that loads a model and shows it images."""
    parser.add_argument('--batch_size', type=positive, default=32, metavar='N', help='(32)')
    text = f'pixels of the largest image ({MAX_PIXELS:,})'
    parser.add_argument('--max_pixels', type=_pixels, default=MAX_PIXELS, metavar='N', help=text)
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `vit_jax.load`: facts that a file may lack, and changes."""
    add = parser.add_argument_group('facts that the checkpoint may lack').add_argument
    add('--grid', type=_pair, metavar='H,W', help='grid of its position embeddings, in patches')
    add('--num_heads', type=positive, metavar='N', help='attention heads')
    add('--gelu', choices=['tanh', 'exact', 'quick'], help='formula of the GELU in MLPs')
    add('--layer_norm_epsilon', type=float, metavar='E', help='added to the variance in norms')
    add('--head', metavar='FILE.py:FUNCTION', help='the function that made its custom head')
    add = parser.add_argument_group('changes of the model').add_argument
    add('--image_size', type=_pair, metavar='H,W', help='in pixels; positions are resized')
    add('--patch_size', type=_pair, metavar='H,W', help='in pixels; the embedding is resized')


def overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the given arguments of `add_overrides`."""
    names = 'grid', 'num_heads', 'gelu', 'layer_norm_epsilon', 'image_size', 'patch_size'
    values = {name: getattr(arguments, name) for name in names}
    values['head'] = arguments.head and config_files.load_function(arguments.head)
    return {name: value for name, value in values.items() if value is not None}


def positive(text: str) -> int:
    """Parses a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not a whole number of at least 1')
    return int(text)


def local_path(text: str) -> str:
    """Parses a path on a disk, where results can be written."""
    if is_remote(text):
        raise argparse.ArgumentTypeError(f'{text!r}: expected a path on a disk')
    return text


def _pixels(text: str) -> int:
    if positive(text) > MOST_PIXELS:
        raise argparse.ArgumentTypeError(f'{text}: expected at most {MOST_PIXELS:,}')
    return int(text)


def _steps(text: str) -> range:
    """Parses `10:15`, the steps from the state after step 10 to that after step 15."""
    first, _, last = text.partition(':')
    if not (re.fullmatch('[0-9]+:[0-9]+', text) and int(first) < int(last)):
        expected = 'FIRST:LAST, two steps of which the first is smaller, such as 10:15'
        raise argparse.ArgumentTypeError(f'{text!r}: expected {expected}')
    return range(int(first), int(last))


def _pair(text: str) -> tuple[int, int]:
    """Parses `384` or `384,256`."""
    if not re.fullmatch(r'\d+(,\d+)?', text):
        raise argparse.ArgumentTypeError(f'{text!r} is neither HEIGHT,WIDTH nor one number')
    sides = [int(side) for side in text.split(',')]
    return sides[0], sides[-1]
