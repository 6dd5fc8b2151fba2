"""The entry points of all programs: arguments, a quiet screen, errors in one line."""

import argparse
import contextlib
import dataclasses
import functools
import io
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import jax

from vit_jax.base.errors import UserError, lacks_memory
from vit_jax.base.records import nearest
from vit_jax.base.storage import is_remote
from vit_jax.checkpoints.download import cache
from vit_jax.cli import config_files, config_flags, config_help, output
from vit_jax.config import TrainConfig
from vit_jax.data.image_preprocessing import MAX_PIXELS, MOST_PIXELS
from vit_jax.distributed import meshes
from vit_jax.distributed.clusters import Launch
from vit_jax.distributed.processes import INTERRUPTED, Job, joined_job
from vit_jax.studies.config import Study
from vit_jax.training.loop import NotFinite

_LESS_MEMORY = (
    'less is needed with a smaller batch (--batch_size, --config.batch_size, '
    '--config.eval_batch_size), --config.compute.remat=block or --config.accumulation_steps=2'
)
_MAX_COMPILED_BYTES = 4 * 2**30  # jax evicts the least recently used programs
_UNREAD = 141  # the code of a shell's command whose output nobody reads (SIGPIPE)


class Invocation(NamedTuple):
    """The arguments of a program that is one process of a job."""

    config: TrainConfig
    workdir: str
    accept_changes: bool  # resume in a work directory of another configuration
    accept_data_changes: bool  # resume in a work directory of a run on other data
    job: Job
    profile: range | None = None  # steps


def run(
    main: Callable[[argparse.Namespace], int],
    parser: argparse.ArgumentParser,
    *,
    only_prints: bool = False,
) -> None:
    """Runs a program and exits with the code that `main` returns.

    With the arguments of `add_config`, `arguments.config` is the configuration. A closed pipe does
    not end the program, unless it `only_prints`.
    """
    if not only_prints:
        output.outlive_readers()
    with _started(parser) as arguments:
        if 'distributed' not in arguments:  # else `main` does it when the job is known
            meshes.require_devices()
            keep_programs(arguments)
        code = main(arguments)
        print(end='', flush=True)  # stdout may be closed
        sys.exit(code)


def run_job(
    main: Callable[[Invocation], None], *, name: str, description: str | None, trains: bool = True
) -> None:
    """Runs a program with configuration and work directory, as one of the processes of a job."""

    def start(arguments: argparse.Namespace, job: Job) -> int:
        invocation = Invocation(
            config=arguments.config,
            workdir=arguments.workdir,
            accept_changes=arguments.accept_config_changes,
            accept_data_changes=trains and arguments.accept_data_changes,
            job=job,
            profile=arguments.profile_steps if trains else None,
        )
        main(invocation)
        return 0

    parser = new_parser(name, description)
    add_job(parser, trains=trains)
    run_together(start, parser)


def run_together(
    main: Callable[[argparse.Namespace, Job], int], parser: argparse.ArgumentParser
) -> None:
    """Runs a program, as `run` does, as one of the processes of a job (see `add_launch`)."""
    output.outlive_readers()
    with _started(parser) as arguments:
        with joined_job(launch(arguments), reporter(arguments)) as job:
            meshes.require_devices()
            keep_programs(arguments, job)
            code = main(arguments, job)
        print(end='', flush=True)
        sys.exit(code)


@contextlib.contextmanager
def _started(parser: argparse.ArgumentParser) -> Iterator[argparse.Namespace]:
    """Yields the parsed arguments. Reports an error in the body, and exits."""
    parser.add_argument('--traceback', action='store_true', help='show where any error comes from')
    text = 'folder of compiled programs; none: do not keep them (~/.cache/vit_jax/compiled)'
    parser.add_argument('--compiled', action=_Once, type=local_path, metavar='DIR', help=text)
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names need not be Unicode
        sys.stdout.reconfigure(errors='surrogateescape')
    overrides, others = config_flags.split([config_flags.at_home(text) for text in sys.argv[1:]])
    arguments = parser.parse_args(others)
    if overrides and getattr(arguments, 'config', None) is None:
        why = '--config=FILE is missing' if 'config' in arguments else 'there is no configuration'
        parser.error(f'unrecognized arguments: --config.{overrides[0]}; {why}')
    output.log_in_lines()
    try:
        if getattr(arguments, 'config', None) is not None:
            arguments.config = config_flags.load(arguments.config, overrides, arguments.config_kind)
        yield arguments
    except BrokenPipeError:  # as in `| head -1`
        os._exit(_UNREAD)
    except KeyboardInterrupt as error:
        reporter(arguments)(error)
        os._exit(INTERRUPTED)  # without waiting for threads that compile or write
    except Exception as error:
        sys.exit(reporter(arguments)(error))


def keep_programs(arguments: argparse.Namespace, job: Job | None = None) -> str:
    """Sets jax's compilation cache; returns its folder, or why there is none.

    The folder is --compiled, JAX_COMPILATION_CACHE_DIR, or one in the user's own cache. Several
    processes use the last only on request: a process that loads a program does not wait for the
    others, which compile it.
    """
    requested, preset = arguments.compiled, jax.config.values['jax_compilation_cache_dir']
    if requested == 'none':
        jax.config.update('jax_enable_compilation_cache', False)
    if not jax.config.values['jax_enable_compilation_cache']:
        return 'none (disabled)'
    if requested is None and preset is not None:
        return f'{preset} (JAX_COMPILATION_CACHE_DIR)'
    if requested is None and job is not None and job.count > 1:
        return 'none with several processes; --compiled=DIR sets a folder that all of them share'
    folder = requested or str(cache() / 'compiled')
    jax.config.update('jax_compilation_cache_dir', folder)
    jax.config.update('jax_compilation_cache_max_size', _MAX_COMPILED_BYTES)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)  # most programs are small
    return folder


def reporter(arguments: argparse.Namespace) -> Callable[[BaseException], int]:
    """Returns a function that prints an error and returns the exit code.

    An error that the user can fix is one line, all others have a traceback.
    """

    def report(error: BaseException) -> int:
        interrupted = isinstance(error, KeyboardInterrupt)
        text = 'interrupted' if interrupted else str(error)
        fixable = isinstance(error, UserError | NotFinite | KeyboardInterrupt)
        if lacks_memory(error):
            fixable, text = True, f'{text.splitlines()[0]}; {_LESS_MEMORY}'
        if arguments.traceback or not fixable:
            traceback.print_exception(error)
        else:
            # Background tasks of orbax that end with the process would have the last word.
            warnings.simplefilter('ignore')
            print(f'error: {text}', file=sys.stderr, flush=True)
        return INTERRUPTED if interrupted else 1

    return report


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and which flag was probably meant."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        before = ''
        for text in args or ():
            flag = text.partition('=')[0]
            if flag.startswith('--') and flag not in self._option_string_actions:
                self.error(f'unrecognized arguments: {text}; {self._suggest(flag)}')
            follows = re.fullmatch('-[^=]+', before)  # the flag whose value it is
            if re.match(r'[^-].*\.py(:|$)', text) and not follows and self._takes_config:
                self.error(f'unrecognized arguments: {text}; did you mean --config={text}?')
            before = text
        return super().parse_args(args, namespace)

    def _suggest(self, flag: str) -> str:
        """Ends an error message about an unknown flag: the flag or the field that was meant."""
        known = [name[2:] for name in self._option_string_actions if name.startswith('--')]
        if not self._takes_config:
            return nearest(flag, [f'--{name}' for name in known])
        field = flag[2:].rpartition('.')[2]
        text = config_help.suggest(self.get_default('config_kind'), field, known)
        return re.sub(r"'([\w.=]+)'", r"'--\1'", text)

    @property
    def _takes_config(self) -> bool:
        return '--config' in self._option_string_actions

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'error: {message} (--help lists all flags)\n')


class _Once(argparse.Action):
    """Keeps a value that may be given once."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        if (first := getattr(namespace, self.dest)) is not None:
            parser.error(f'{option}={values}: {option}={first} is given too')
        if not values:
            parser.error(f'{option}=: expected {self.metavar}')
        setattr(namespace, self.dest, values)


class _HelpFull(argparse.Action):
    """Prints the help with all fields of the configuration, and ends the program."""

    def __call__(self, parser: Any, *_: Any) -> None:
        parser.epilog = config_help.meanings(parser.get_default('config_kind'))
        parser.print_help()
        parser.exit()


def new_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of a program, described by its docstring."""
    return _Parser(
        prog=f'python -m vit_jax.{name}',
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_config(
    parser: argparse.ArgumentParser,
    kind: type[TrainConfig] | type[Study] = TrainConfig,
    *,
    workdir: bool = True,
    required: bool = True,
) -> None:
    """The arguments of a program with a configuration, and a directory for its results."""
    parser.set_defaults(config_kind=kind)
    what = 'study' if kind is Study else 'experiment'
    text = f'the {what}: a file that defines get_config(), and an argument for that'
    add = functools.partial(parser.add_argument, action=_Once, required=required)
    add('--config', metavar='FILE[:ARGUMENT]', help=text)
    example = 'base.model.depth=6' if kind is Study else 'model.depth=6'
    text = f'any field of it, such as --config.{example}; none: no value'
    parser.add_argument('--config.FIELD', default=argparse.SUPPRESS, metavar='VALUE', help=text)
    if workdir:
        add('--workdir', metavar='DIR', help='for the results')
    text = 'this help, with type, default and meaning of all fields'
    parser.add_argument('--helpfull', action=_HelpFull, nargs=0, help=text)
    parser.epilog = f'fields of a configuration:\n{config_help.names(kind)}'


def add_job(parser: argparse.ArgumentParser, *, required: bool = True, trains: bool = True) -> None:
    """The arguments of a program that is one of the processes of a job."""
    add_config(parser, required=required)
    text = 'resume in a directory of another configuration'
    parser.add_argument('--accept_config_changes', action='store_true', help=text)
    if trains:
        text = 'resume in a directory of a run on other data'
        parser.add_argument('--accept_data_changes', action='store_true', help=text)
        text = 'write a profile of the M - N steps after step N into WORKDIR/profile'
        add_once = functools.partial(parser.add_argument, action=_Once, type=_steps)
        add_once('--profile_steps', metavar='N:M', help=text)
    add_launch(parser)


def add_launch(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which process of which job this is (see "Many hosts")."""
    group = parser.add_argument_group('several hosts: their place in a cluster is found, or given')
    text = 'off: one process alone'
    group.add_argument('--distributed', choices=['auto', 'off'], default='auto', help=text)
    group.add_argument('--coordinator_address', metavar='HOST:PORT', help='of process 0')
    group.add_argument('--num_processes', type=int, metavar='N', help='on all hosts together')
    group.add_argument('--process_id', type=int, metavar='I', help='of this process, from 0')
    for name, text in {
        'start_seconds': 'to wait for the other processes',
        'heartbeat_seconds': 'without a sign of life, after which a process is dead',
        'watchdog_seconds': 'without a step, a batch or a save, after which a process exits',
    }.items():
        default = getattr(Launch, name)
        text = f'{text} ({default:g})'
        group.add_argument(f'--{name}', type=float, default=default, metavar='S', help=text)


def launch(arguments: argparse.Namespace) -> Launch:
    """What the arguments of `add_launch` say."""
    values = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Launch)}
    return Launch(**values | {'distributed': arguments.distributed == 'auto'})


def add_reading(parser: argparse.ArgumentParser) -> None:
    """The arguments of a program that shows images to a network."""
    parser.add_argument('--batch_size', type=positive, default=32, metavar='N', help='(32)')
    text = f'pixels of an image at most ({MAX_PIXELS:,})'
    parser.add_argument('--max_pixels', type=_pixels, default=MAX_PIXELS, metavar='N', help=text)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """The arguments of `vit_jax.load` about what a file does not say, and about what changes."""
    hints = parser.add_argument_group('what the file does not say of itself')
    hints.add_argument('--grid', type=_pair, metavar='H,W', help='patches of its positions')
    hints.add_argument('--num_heads', type=positive, metavar='N', help='of attention')
    hints.add_argument(
        '--gelu', choices=['tanh', 'exact', 'quick'], help='which formula the MLPs have'
    )
    text = 'that its norms add to the variance'
    hints.add_argument('--layer_norm_epsilon', type=float, metavar='E', help=text)
    text = "of a head of one's own, as it was trained"
    hints.add_argument('--head', metavar='FILE.py:FUNCTION', help=text)
    changed = parser.add_argument_group('what is changed')
    text = 'in pixels; positions are resized'
    changed.add_argument('--image_size', type=_pair, metavar='H,W', help=text)
    text = 'in pixels; the embedding is resized'
    changed.add_argument('--patch_size', type=_pair, metavar='H,W', help=text)


def overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those of `add_overrides` that were given."""
    names = 'grid', 'num_heads', 'gelu', 'layer_norm_epsilon', 'image_size', 'patch_size'
    values = {name: getattr(arguments, name) for name in names}
    values['head'] = arguments.head and config_files.function(arguments.head)
    return {name: value for name, value in values.items() if value is not None}


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not a whole number of at least 1')
    return int(text)


def local_path(text: str) -> str:
    """A path on a disk, where results can be written."""
    if is_remote(text):
        raise argparse.ArgumentTypeError(f'{text!r}: expected a path on a disk')
    return text


def _pixels(text: str) -> int:
    if positive(text) > MOST_PIXELS:
        raise argparse.ArgumentTypeError(f'{text}: expected at most {MOST_PIXELS:,}')
    return int(text)


def _steps(text: str) -> range:
    """`10:15`, the five steps from the state after step 10 to that after step 15."""
    first, _, last = text.partition(':')
    if not (re.fullmatch('[0-9]+:[0-9]+', text) and int(first) < int(last)):
        raise argparse.ArgumentTypeError(
            f'{text!r}: expected FIRST:LAST, two steps of which the first is smaller, such as 10:15'
        )
    return range(int(first), int(last))


def _pair(text: str) -> tuple[int, int]:
    """`384` or `384,256`."""
    if not re.fullmatch(r'\d+(,\d+)?', text):
        raise argparse.ArgumentTypeError(f'{text!r} is neither HEIGHT,WIDTH nor one number')
    sides = [int(side) for side in text.split(',')]
    return sides[0], sides[-1]
