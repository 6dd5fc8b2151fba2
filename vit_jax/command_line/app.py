"""What the programs share: flags, one-line errors, a quiet screen."""

import argparse
import contextlib
import dataclasses
import functools
import logging as log_formats
import pathlib
import re
import runpy
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

from vit_jax.base import records
from vit_jax.config import TrainConfig
from vit_jax.parallel.clusters import Launch
from vit_jax.parallel.processes import REQUEUE, Interrupted, Job, joined
from vit_jax.training.loop import NotFinite

_HERE = pathlib.Path(__file__).parent.parent
_USAGE = """
  --config=FILE[:ARGUMENT]    the experiment: a file that defines get_config()
  --config.FIELD=VALUE        any field of it, such as --config.model.depth=6; =none for no value
  --workdir=DIR               where the results go; a run that was stopped goes on there
  --accept_config_changes     go on in a directory that holds a run of another configuration
  --distributed=off           one process, whatever cluster it may be on; else it finds its place,
  --coordinator_address=HOST:PORT --num_processes=N --process_id=I    or is told it
  --start_seconds, --heartbeat_seconds, --watchdog_seconds            README, "Many hosts"

The fields are described in vit_jax/config.py."""
_OURS = ValueError, OSError, NotFinite


def train(run: Callable[[TrainConfig, str, bool, Job], None], description: str) -> None:
    """Reads `--config` and `--workdir` and runs, as one of the processes of a job."""
    workdir = flags.DEFINE_string('workdir', None, 'Where the results go.')
    accept = flags.DEFINE_bool(
        'accept_config_changes', False, 'Go on in a work directory of another configuration.'
    )
    launch = launch_flags()
    flags.mark_flag_as_required('workdir')

    def with_job(config: TrainConfig) -> None:
        with joined(launch(), report) as job:
            try:
                run(config, typing.cast(str, workdir.value), accept.value, job)
            except Interrupted as stop:
                if job.index == 0:
                    print(f'{stop}\nthe same command goes on (exit code {REQUEUE}: requeue)')
                sys.exit(REQUEUE)

    start(with_job, description)


def launch_flags() -> Callable[[], Launch]:
    """Defines the flags that say how this process was started; what gives their values."""
    distributed = flags.DEFINE_enum('distributed', 'auto', ['auto', 'off'], 'off: one process.')
    address = flags.DEFINE_string('coordinator_address', None, 'HOST:PORT of process 0.')
    count = flags.DEFINE_integer('num_processes', None, 'Of all hosts together.', lower_bound=1)
    index = flags.DEFINE_integer('process_id', None, 'Of this process.', lower_bound=0)
    seconds = {
        name: flags.DEFINE_float(name, getattr(Launch(), name), text, lower_bound=0.1)
        for name, text in (
            ('start_seconds', 'To wait for the other processes.'),
            ('heartbeat_seconds', 'Without a sign of life, after which a process is dead.'),
            ('watchdog_seconds', 'Without a step or an evaluated batch, then all stacks and end.'),
        )
    }

    def launch() -> Launch:
        return Launch(
            distributed=distributed.value == 'auto',
            coordinator_address=address.value,
            num_processes=count.value,
            process_id=index.value,
            **{name: flag.value for name, flag in seconds.items()},
        )

    return launch


def bare(run: Callable[[], None], description: str) -> None:
    """Runs a program that has flags, but no configuration."""

    def main(arguments: Sequence[str]) -> None:
        if len(arguments) > 1:
            _fail(f'unexpected argument {arguments[1]!r}')
        _quiet()
        with _explained():
            run()

    app.run(main, flags_parser=functools.partial(_parse, description))


def _register_choices(kind: type) -> None:
    """ml_collections parses what it is told of; the record itself checks the choice."""
    for hint in records.hints(kind).values():
        for option in (hint, *typing.get_args(hint)):
            if typing.get_origin(option) is typing.Literal:
                config_flags.register_flag_parser_for_type(option, flags.ArgumentParser())
            elif isinstance(option, type) and issubclass(option, records.Record):
                _register_choices(option)


def start(run: Callable[[TrainConfig], None], description: str) -> None:
    """Reads `--config` and runs; what the user can mend is said in one line."""
    _register_choices(TrainConfig)
    config = config_flags.DEFINE_config_file(
        'config', None, 'The experiment: a file that defines get_config(), and :ARGUMENT for it.'
    )
    flags.mark_flag_as_required('config')

    def main(arguments: Sequence[str]) -> None:
        if len(arguments) > 1:
            _fail(f'unexpected argument {arguments[1]!r}: settings are --config.FIELD=VALUE')
        _quiet()
        file = config_flags.get_config_filename(flags.FLAGS['config']).split(':')[0]
        if not pathlib.Path(file).is_file():
            _fail(f'--config={file}: no such file')
        if not isinstance(config.value, TrainConfig):
            _fail(f'--config: get_config() gave {type(config.value).__name__}, not a TrainConfig')
        with _explained():
            run(config.value)

    app.run(main, flags_parser=functools.partial(_parse, description))


def run(main: Callable[[argparse.Namespace], int], parser: argparse.ArgumentParser) -> None:
    """Runs a program of plain arguments; what the user can mend is said in one line."""
    arguments = parser.parse_args()
    _quiet()
    with _explained():
        sys.exit(main(arguments))


def _quiet() -> None:
    """Warnings only, as plain lines."""
    logging.set_verbosity(logging.WARNING)
    logging.get_absl_handler().setFormatter(log_formats.Formatter('warning: %(message)s'))
    # Each array that orbax cannot write would tell of itself; the first is raised, and said once.
    for name in 'absl', 'asyncio':
        log_formats.getLogger(name).setLevel(log_formats.CRITICAL)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """The arguments of `vit_jax.load` about what a file does not say, and about what changes."""
    said = parser.add_argument_group('what the file does not say of itself')
    said.add_argument('--grid', type=_pair, metavar='H,W', help='patches of its positions')
    said.add_argument('--num_heads', type=positive, metavar='N')
    said.add_argument('--gelu', choices=['tanh', 'exact'])
    said.add_argument('--layer_norm_epsilon', type=float, metavar='E')
    changed = parser.add_argument_group('what is changed')
    changed.add_argument('--image_size', type=_pair, metavar='H,W')
    changed.add_argument('--patch_size', type=_pair, metavar='H,W')


def overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those of `add_overrides` that were given."""
    names = 'grid', 'num_heads', 'gelu', 'layer_norm_epsilon', 'image_size', 'patch_size'
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not a whole number of at least 1')
    return int(text)


def _pair(text: str) -> tuple[int, int]:
    """`384` or `384,256`."""
    if not re.fullmatch(r'\d+(,\d+)?', text):
        raise argparse.ArgumentTypeError(f'{text!r} is neither HEIGHT,WIDTH nor one number')
    sides = [int(side) for side in text.split(',')]
    return sides[0], sides[-1]


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """What goes wrong within ends the program, and is said."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(report(error))


def report(error: BaseException) -> int:
    """Says what the user can mend in one line, anything else with its traceback; the exit code."""
    if isinstance(error, KeyboardInterrupt):
        text = 'interrupted; the same command goes on from what is complete'
        print(f'error: {text}', file=sys.stderr)
        return 130
    if isinstance(error, _OURS) and _raised_by_us(error):
        print(f'error: {error}', file=sys.stderr)
    else:
        traceback.print_exception(error)
    return 1


def _parse(description: str, arguments: list[str]) -> list[str]:
    """absl parsing, with our words for a field that does not exist."""
    if {'--help', '-h'} & set(arguments):
        print(f'{description.strip()}\n{_USAGE}')
        sys.exit(0)
    # ml_collections cannot set an optional number to nothing: `=none` is ours.
    absent = [a for a in arguments if a.startswith('--config.') and _is_none(a)]
    try:
        rest: list[str] = flags.FLAGS([a for a in arguments if a not in absent])
        for argument in absent:
            _unset(flags.FLAGS.config, argument.removeprefix('--config.')[: -len('=none')])
        return rest
    except flags.Error as error:
        _fail(f'{error}\n{description}', code=2)
    except (KeyError, AttributeError, TypeError, ValueError, OSError, ImportError) as error:
        for argument in arguments:
            if argument.startswith('--config.'):
                _check_field(argument.removeprefix('--config.').split('=')[0].split('.'))
        if isinstance(error, KeyError):
            _check_argument(arguments)
        if _raised_by_us(error) or 'get_config()' in str(error):
            _fail(str(error), code=2)
        raise
    raise AssertionError('unreachable')


def _is_none(argument: str) -> bool:
    """Does it take the value from a field? Some have `none` among their choices."""
    path, _, value = argument.removeprefix('--config.').partition('=')
    choices = [
        typing.get_args(records.hints(kind).get(path.split('.')[-1]))
        for kind in _kinds(path.split('.')[:-1])
    ]
    return value.lower() == 'none' and not any('none' in names for names in choices)


def _unset(config: TrainConfig, path: str) -> None:
    """Sets an optional field to None."""
    *parents, name = path.split('.')
    _check_field([*parents, name])
    holder = functools.reduce(getattr, parents, config)
    if type(None) not in typing.get_args(typing.get_type_hints(type(holder))[name]):
        _fail(f'config.{path}=none: this field needs a value', code=2)
    setattr(holder, name, None)


def _check_field(names: list[str]) -> None:
    """Says which of the dotted names of a field does not exist, and which was probably meant."""
    for depth, name in enumerate(names):
        hints = {k for kind in _kinds(names[:depth]) for k in typing.get_type_hints(kind)}
        if name not in hints:
            where = '.'.join(['config', *names[: depth + 1]])
            _fail(f'{where}: no such field; {records.nearest(name, hints)}', code=2)


def _kinds(names: Sequence[str]) -> list[type]:
    """The records that may stand at these dotted names; none where there is no such field."""
    kinds: list[type] = [TrainConfig]
    for name in names:
        hints = [typing.get_type_hints(kind).get(name) for kind in kinds]
        kinds = [
            t
            for hint in hints
            for t in (hint, *typing.get_args(hint))
            if dataclasses.is_dataclass(t) and isinstance(t, type)
        ]
    return kinds


def _check_argument(arguments: list[str]) -> None:
    """Says which arguments a configuration takes, where it was given another one."""
    named = [a.partition('=')[2] for a in arguments if a.startswith('--config=')]
    file, _, argument = named[-1].partition(':') if named else ('', '', '')
    if pathlib.Path(file).is_file():
        known = runpy.run_path(file).get('ARGUMENTS', ())
        if argument not in known:
            _fail(
                f'--config={file}:{argument}: no {argument!r}; {records.nearest(argument, known)}',
                code=2,
            )


def _raised_by_us(error: BaseException) -> bool:
    """Was it raised in this package or in a configuration, and not by a library underneath?"""
    frames = traceback.extract_tb(error.__traceback__)
    file = pathlib.Path(frames[-1].filename)
    return _HERE in file.parents or 'configs' in file.parts


def _fail(message: str, *, code: int = 1) -> typing.NoReturn:
    print(f'error: {message}', file=sys.stderr)
    sys.exit(code)
