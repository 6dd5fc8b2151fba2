"""Flags, compilation cache, one-line errors and exit codes of all programs.

A program is a file in vit_jax/ with the functions `make_parser` and `main`. Its last line calls
`run(main, make_parser())`, or `run_job` if it can run in several processes.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

import vit_jax
from vit_jax.base.errors import TransientError, UserError, is_out_of_memory
from vit_jax.base.files import cache_folder
from vit_jax.base.records import Record
from vit_jax.base.storage import is_remote
from vit_jax.cli import config_files, config_flags, config_help, output
from vit_jax.config import TrainConfig
from vit_jax.data.image_decoding import MAX_PIXELS, MAX_PIXELS_LIMIT
from vit_jax.distributed import meshes
from vit_jax.distributed.processes import EXIT_INTERRUPTED, Job, LaunchConfig, join_job
from vit_jax.training.loop import NotFiniteError

_LESS_MEMORY = (
    'to use less memory, reduce the batch size (--batch_size, --config.batch_size, '
    '--config.eval_batch_size) or set --config.compute.remat=block or --config.accumulation_steps=2'
)
_MAX_COMPILED_BYTES = 4 * 2**30  # of the cache: jax evicts the least recently used programs
_BROKEN_PIPE = 141  # exit code after SIGPIPE in a shell: the output is no longer read


def run(
    main: Callable[[argparse.Namespace], int],
    parser: argparse.ArgumentParser,
    *,
    only_prints: bool = False,
    on_devices: bool = True,
) -> NoReturn:
    """Runs a program and exits with the code that `main` returns.

    Args:
      main: Runs the program with the parsed arguments and returns its exit code.
      parser: Parses the arguments.
      only_prints: Whether the program only prints. It then exits if stdout is closed, as by
        `| head`.
      on_devices: Whether to call `prepare_devices` before `main`.
    """
    output.set_up(only_prints=only_prints)
    try:
        arguments = parser.parse_args()
        if on_devices:
            prepare_devices()
        if signal.getsignal(signal.SIGINT) is vit_jax.exit_on_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # so that files are removed
        code = main(arguments)
        print(end='', flush=True)  # raises BrokenPipeError here if stdout is closed
    except BrokenPipeError:
        os._exit(_BROKEN_PIPE)
    except KeyboardInterrupt as error:
        report(error)
        os._exit(EXIT_INTERRUPTED)  # does not wait for threads that compile or write
    except Exception as error:
        code = report(error)
    sys.exit(code)


def run_job(
    main: Callable[[argparse.Namespace, Job], int], parser: argparse.ArgumentParser
) -> NoReturn:
    """Runs a program like `run`, in one or several processes (see `add_launch_flags`)."""

    run(functools.partial(_join_and_run, main), parser, on_devices=False)


def run_with_job(
    main: Callable[[argparse.Namespace, Job], int],
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    started: float | None,
) -> int:
    """Runs a program like `run_job`, but returns the exit code, except after an error in the job.

    `started` is the time since 1970 at which the program started; None: that of the process.
    """
    try:
        arguments = parser.parse_args(words)
    except UserError as error:
        return report(error)
    return _join_and_run(main, arguments, started)


def _join_and_run(
    main: Callable[[argparse.Namespace, Job], int],
    arguments: argparse.Namespace,
    started: float | None = None,
) -> int:
    with join_job(parse_launch(arguments), report) as job:
        job.started = started or job.started
        prepare_devices(processes=job.count)
        return main(arguments, job)


def report(error: BaseException) -> int:
    """Prints an error and returns the exit code.

    Prints errors that the user can fix on one line, and other errors with a traceback. Prints all
    errors with a traceback if --traceback is set.
    """
    text = _describe(error)
    if text is None or '--traceback' in sys.argv:
        traceback.print_exception(error)
    else:
        # The error should be the last line, not a warning of orbax's background tasks at exit.
        warnings.simplefilter('ignore')
        print(f'error: {text}', file=sys.stderr, flush=True)
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _describe(error: BaseException) -> str | None:
    """Describes an error that the user can fix; returns None for other errors."""
    if isinstance(error, KeyboardInterrupt):
        return 'interrupted'
    if is_out_of_memory(error):
        return f'{str(error).splitlines()[0]}; {_LESS_MEMORY}'
    if isinstance(error, UserError | TransientError | NotFiniteError):
        return str(error)
    if (described := config_files.describe_error_of_user(error)) is not None:
        return described
    encoding = sys.getfilesystemencoding()
    if isinstance(error, UnicodeEncodeError) and error.encoding == encoding != 'utf-8':
        return f'{error.object!a:.200} cannot be encoded in {encoding}; set PYTHONUTF8=1'
    return None


def prepare_devices(*, processes: int = 1) -> None:
    """Checks that the devices of JAX_PLATFORMS exist, and enables jax's compilation cache.

    The cache is the folder `compiled` of `cache()`. JAX_COMPILATION_CACHE_DIR sets another folder,
    and JAX_ENABLE_COMPILATION_CACHE=false disables the cache. With several processes the cache has
    no default folder: a process that loads a program from its cache would not wait for the
    processes that compile it.
    """
    meshes.require_devices()
    if jax.config.values['jax_compilation_cache_dir'] is None and processes == 1:
        jax.config.update('jax_compilation_cache_dir', str(cache_folder() / 'compiled'))
        jax.config.update('jax_compilation_cache_max_size', _MAX_COMPILED_BYTES)
        # By default jax does not cache programs that compile in less than 1 s, as most of these do.
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)


class _Parser(argparse.ArgumentParser):
    """Loads the configuration; reports an unknown flag on one line, with the most similar flag."""

    config_kind: type[Record] | None = None  # None: the program has no --config

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        overrides, words = config_flags.split([config_flags.expand_home(word) for word in words])
        self._check_flags(words)
        arguments = super().parse_args(words, namespace)
        file = getattr(arguments, 'config', None)
        if file is not None:
            arguments.config = config_flags.load(file, overrides, self.config_kind or TrainConfig)
        elif overrides:
            why = 'it needs --config=FILE' if self.config_kind else 'this program has no --config'
            self.error(f'unrecognized arguments: --config.{overrides[0]}; {why}')
        return arguments

    def _check_flags(self, words: Sequence[str]) -> None:
        flags = [name for name in self._option_string_actions if name.startswith('--')]
        for word in itertools.takewhile(lambda word: word != '--', words):
            flag = word.partition('=')[0]
            if flag.startswith('--') and flag not in flags:
                name = flag[2:].rpartition('.')[2]
                hint = config_help.suggest(self.config_kind, name, flags)
                self.error(f'unrecognized arguments: {word}; {hint}')
            if word == f'{flag}=' and flag in flags and self.get_default(flag[2:]) != '':
                self.error(f'{word}: expected a value')
        if '' in words:
            index = words.index('')
            before = words[index - 1] if index else self.prog
            self.error(f"{before} '': expected a value; is a variable of the shell not set?")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'error: {message} (--help lists all flags)\n')


class _HelpFull(argparse.Action):
    """Prints the help, including all fields of the configuration, and exits."""

    def __call__(self, parser: Any, *_: Any) -> None:
        parser.epilog = config_help.describe_fields(parser.config_kind)
        parser.print_help()
        parser.exit()


def new_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of the program `vit_jax.NAME`, with the flags that all programs have."""
    parser = _Parser(
        prog=f'python -m vit_jax.{name}',
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument('--traceback', action='store_true', help='print tracebacks of errors')
    return parser


def add_config_flags(
    parser: argparse.ArgumentParser,
    kind: type[Record] = TrainConfig,
    *,
    workdir: bool = True,
    required: bool = True,
) -> None:
    """Adds --config, --config.FIELD, --helpfull and, if `workdir` is True, --workdir."""
    assert isinstance(parser, _Parser)
    parser.config_kind = kind
    add = parser.add_argument
    add(
        '--config',
        required=required,
        metavar='FILE[:ARGUMENT]',
        help='Python file that defines get_config(ARGUMENT), or the config.json of a work '
        'directory',
    )
    add(
        '--config.FIELD',
        default=argparse.SUPPRESS,
        metavar='VALUE',
        help='set any field of the configuration, such as --config.seed=1; '
        'the VALUE none unsets it',
    )
    if workdir:
        add(
            '--workdir',
            required=required,
            metavar='DIR',
            help='output directory (of a training run: checkpoints and metrics)',
        )
    add(
        '--helpfull',
        action=_HelpFull,
        nargs=0,
        help='show this help, and the type, default and meaning of all fields of the configuration',
    )


def new_job_parser(
    name: str, description: str | None, *, required: bool = True, trains: bool = True
) -> argparse.ArgumentParser:
    """Returns the parser of a program with --config and --workdir that may have several processes.

    Args:
      name: The program's module in `vit_jax`.
      description: The program's docstring.
      required: Whether --config and --workdir are required.
      trains: Whether to add the flags of training.
    """
    parser = new_parser(name, description)
    add_config_flags(parser, required=required)
    add = parser.add_argument
    add(
        '--accept_config_changes',
        action='store_true',
        help='resume even if the configuration has changed',
    )
    if trains:
        add(
            '--accept_data_changes',
            action='store_true',
            help='resume even if the data has changed',
        )
        add(
            '--profile_steps',
            type=_step_range,
            metavar='N:M',
            help='write a profile of steps N+1 to M to WORKDIR/profile',
        )
    add_launch_flags(parser)
    return parser


def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of jobs with several processes (see docs/multi_host.md)."""
    add = parser.add_argument_group('several hosts').add_argument
    add(
        '--distributed',
        choices=['auto', 'off'],
        default='auto',
        help='auto: connect to the other processes of a detected cluster; '
        'off: run a single process',
    )
    add('--coordinator_address', metavar='HOST:PORT', help="process 0's address; default: detected")
    add('--num_processes', type=int, metavar='N', help='processes on all hosts; default: detected')
    add('--process_id', type=int, metavar='I', help='process index, from 0; default: detected')
    add(
        '--start_seconds',
        type=float,
        default=LaunchConfig.start_seconds,
        metavar='S',
        help='seconds to wait for the other processes (default: %(default)g)',
    )
    add(
        '--heartbeat_seconds',
        type=float,
        default=LaunchConfig.heartbeat_seconds,
        metavar='S',
        help='seconds until a silent process counts as dead (default: %(default)g)',
    )
    add(
        '--watchdog_seconds',
        type=float,
        default=LaunchConfig.watchdog_seconds,
        metavar='S',
        help='exit if a step, batch or save takes S seconds (default: %(default)g)',
    )


def parse_launch(arguments: argparse.Namespace) -> LaunchConfig:
    """Returns the configuration that the arguments of `add_launch_flags` describe."""
    values = {
        field.name: getattr(arguments, field.name) for field in dataclasses.fields(LaunchConfig)
    }
    return LaunchConfig(**values | {'distributed': arguments.distributed == 'auto'})


def add_image_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of programs that load a model and run it on images."""
    add = parser.add_argument
    add(
        '--batch_size',
        type=positive_int,
        default=32,
        metavar='N',
        help='images per batch (default: 32)',
    )
    add(
        '--max_pixels',
        type=_pixels,
        default=MAX_PIXELS,
        metavar='N',
        help=f'reject images with more pixels (default: {MAX_PIXELS:,})',
    )
    add_checkpoint_flags(parser)


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags for the arguments of `vit_jax.load` that complete or change a checkpoint."""
    add = parser.add_argument_group('properties that the checkpoint does not state').add_argument
    add('--grid', type=_pair, metavar='H,W', help='grid of the position embeddings, in patches')
    add('--num_heads', type=positive_int, metavar='N', help='number of attention heads')
    add('--gelu', choices=['tanh', 'exact', 'quick'], help='formula of the GELU in MLPs')
    add('--layer_norm_epsilon', type=float, metavar='E', help='epsilon in LayerNorm')
    add(
        '--head',
        metavar='FILE.py:FUNCTION|FILE.npz',
        help='function from num_classes to a flax head; or class vectors (docs/checkpoints.md)',
    )
    add = parser.add_argument_group('changes to the model').add_argument
    add('--image_size', type=_pair, metavar='H,W', help='in pixels; resizes position embeddings')
    add('--patch_size', type=_pair, metavar='H,W', help='in pixels; resizes the patch embedding')


def checkpoint_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `add_checkpoint_flags` that are set."""
    names = 'grid', 'num_heads', 'gelu', 'layer_norm_epsilon', 'image_size', 'patch_size'
    values = {name: getattr(arguments, name) for name in names}
    is_function = arguments.head and not arguments.head.endswith('.npz')
    values['head'] = config_files.load_function(arguments.head) if is_function else arguments.head
    return {name: value for name, value in values.items() if value is not None}


def positive_int(text: str) -> int:
    """Parses a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text!r}: expected a positive integer')
    return int(text)


def numbers(text: str) -> list[float]:
    """Parses numbers that are separated by commas."""
    return [float(number) for number in text.split(',')]


def local_path(text: str) -> str:
    """Parses a path on a disk; rejects URLs."""
    if is_remote(text):
        raise argparse.ArgumentTypeError(f'{text!r}: expected a path on a disk')
    return text


def _pixels(text: str) -> int:
    if positive_int(text) > MAX_PIXELS_LIMIT:
        raise argparse.ArgumentTypeError(f'{text}: expected at most {MAX_PIXELS_LIMIT:,}')
    return int(text)


def _step_range(text: str) -> range:
    """Parses `10:15`, which stands for steps 11 to 15: the range from state 10 to state 15."""
    first, _, last = text.partition(':')
    if not (re.fullmatch('[0-9]+:[0-9]+', text) and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f'{text!r}: expected N:M with N < M, such as 10:15')
    return range(int(first), int(last))


def _pair(text: str) -> tuple[int, int]:
    """Parses `384` or `384,256`."""
    if not re.fullmatch(r'\d+(,\d+)?', text):
        raise argparse.ArgumentTypeError(f'{text!r}: expected HEIGHT,WIDTH or one number')
    sides = [int(side) for side in text.split(',')]
    return sides[0], sides[-1]
