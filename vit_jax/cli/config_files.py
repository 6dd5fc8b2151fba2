"""Reads the configuration file of `--config=FILE:ARGUMENT`."""

import collections
import contextlib
import difflib
import inspect
import pathlib
import pkgutil
import re
import sys
import traceback
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from vit_jax.base import MissingFile, UserError, records, require, usable
from vit_jax.base.errors import format_error
from vit_jax.base.files import Limit, read_file
from vit_jax.config import TrainConfig, read_config

_PACKAGE = pathlib.Path(__file__).parents[1]  # contains configs/ in an installed package
_MODULE = 'config_config'  # module name under which configuration files are executed


def read_config_file(given: str, kind: type[Any] = TrainConfig) -> Any:
    """Reads the TrainConfig or Study of FILE.py, FILE.py:ARGUMENT or WORKDIR/config.json.

    Raises UserError if the file or its get_config() is missing, or for wrong fields and values.
    """
    path, *argument = given.split(':', 1)
    file = _find(path)
    if file.suffix == '.json' and not argument:
        return _read_json(file, kind)
    require(file.suffix != '.json', f'--config={given}: config.json takes no argument')
    with _locate_errors(f'--config={path}', file):
        module = _execute(file)
        functions = [name for name, value in vars(module).items() if inspect.isroutine(value)]
        if not callable(getattr(module, 'get_config', None)):
            raise UserError(f'no function get_config(); {records.closest("get_config", functions)}')
        config = _call(module, argument)
        if not isinstance(config, kind):
            raise UserError(
                f'get_config() returned {type(config).__name__}; expected {kind.__name__}'
            )
        return records.validate_copy(config, where='config')


def load_function(given: str) -> Any:
    """Loads the function of `FILE.py:FUNCTION`. Raises UserError if it does not exist."""
    path, _, name = given.rpartition(':')
    file = pathlib.Path(path)
    require(file.is_file(), f'--head={given}: no such file; expected FILE.py:FUNCTION')
    with _locate_errors(f'--head={path}', file):
        values = vars(_execute(file))
    functions = [name for name, value in values.items() if callable(value)]
    if name not in functions:
        similar = records.closest(name, functions)
        raise UserError(f'--head={given}: no such function; {similar}')
    return values[name]


def _find(path: str) -> pathlib.Path:
    """Finds a file relative to the current folder, to this package or to its configs/."""
    for file in (pathlib.Path(path), _PACKAGE / path, _PACKAGE / 'configs' / path):
        if file.is_file():
            return file
    if pathlib.Path(path).is_dir():
        described = pathlib.Path(path) / 'config.json'
        hint = f'; did you mean {str(described)!r}?' if described.is_file() else ''
        raise UserError(f'--config={path}: a folder; expected a file{hint}')
    recipes = (file.relative_to(_PACKAGE) for file in (_PACKAGE / 'configs').rglob('*.py'))
    files = sorted({*recipes, *pathlib.Path(path).parent.glob('*.py')})
    close = difflib.get_close_matches(pathlib.Path(path).stem, [file.stem for file in files], n=1)
    similar = ' or '.join(repr(str(file)) for file in files if file.stem in close)
    hint = f'did you mean {similar}?' if similar else records.closest(path, map(str, files))
    raise MissingFile(f'--config={path}: no such file here or in {_PACKAGE}; {hint}')


def _execute(file: pathlib.Path) -> types.ModuleType:
    """Executes a Python file as a module, which may import other files of its folder."""
    module = types.ModuleType(_MODULE)
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses and typing look up names there
    sys.path += {str(file.parent.absolute())} - {*sys.path}
    # An import would write bytecode into the folder.
    text = read_file(file, Limit.TEXT_BYTES)
    require(b'\0' not in text, 'not a Python file')
    code = compile(text, str(file), 'exec', dont_inherit=True)
    exec(code, vars(module))
    return module


def _call(module: types.ModuleType, argument: list[str]) -> Any:
    """Calls get_config(). Raises UserError if the argument is missing, unexpected or unknown."""
    arguments = getattr(module, 'ARGUMENTS', ())
    try:
        inspect.signature(module.get_config).bind(*argument)
    except TypeError as error:
        known = f'; known: {", ".join(arguments)}' if arguments else ''
        needed = f'needs an argument, --config=FILE:ARGUMENT{known}'
        text = f'get_config() {"takes no argument" if argument else needed}'
        raise UserError(text) from error
    try:
        return module.get_config(*argument)
    except Exception as error:
        if argument and arguments and argument[0] not in arguments:
            nearest = records.closest(argument[0], arguments)
            raise UserError(f'unknown argument {argument[0]!r}; {nearest}') from error
        raise


@contextlib.contextmanager
def _locate_errors(given: str, file: pathlib.Path) -> Iterator[None]:
    """Converts an exception of the user's code into a UserError with the file and the line.

    `given` is the flag with its value. --traceback shows the whole traceback.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        own = [each for each in _list_frames(error) if _is_of_user(each.file, file)]
        place = own[-1] if own else _Frame(file.absolute(), None, {})
        if isinstance(error, SyntaxError) and error.filename is not None:
            place = _Frame(pathlib.Path(error.filename).absolute(), error.lineno, {})
        where = given + ('' if place.file == file.absolute() else f': {place.file}')
        where += '' if place.line is None else f', line {place.line}'
        raise UserError(f'{where}: {_describe(error, place.variables)}') from error


def describe_error_of_user(error: BaseException) -> str | None:
    """Describes an error raised by a function of the user or by a library that it called.

    Returns None for other errors. The user's functions are those in the configuration file that was
    read last and in the other files of its folder.
    """
    if _MODULE not in sys.modules:
        return None
    file = pathlib.Path(str(sys.modules[_MODULE].__file__))
    frames = [each for each in _list_frames(error) if not _is_of_library(each.file)]
    if not frames or file.is_relative_to(_PACKAGE) or not _is_of_user(frames[-1].file, file):
        return None
    text = _describe(error, frames[-1].variables)
    hint = '' if '--traceback' in text else '; --traceback shows where'
    return f'{frames[-1].file}, line {frames[-1].line}: {text}{hint}'


class _Frame(NamedTuple):
    """A call in a traceback."""

    file: pathlib.Path
    line: int | None
    variables: Mapping[str, Any]


def _list_frames(error: BaseException) -> list[_Frame]:
    """Returns the calls of a traceback, the innermost last."""
    return [
        _Frame(
            pathlib.Path(frame.f_code.co_filename).absolute(),
            line,
            collections.ChainMap(frame.f_locals, frame.f_globals),
        )
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]


def _is_of_user(place: pathlib.Path, file: pathlib.Path) -> bool:
    """Returns whether a file of code is the configuration or one that it imports."""
    if place == file.absolute():
        return True
    is_ours = place.is_relative_to(_PACKAGE) or _is_of_library(place)
    return place.is_relative_to(file.parent.absolute()) and place.exists() and not is_ours


def _is_of_library(place: pathlib.Path) -> bool:
    """Returns whether a file of code belongs to Python or to an installed package."""
    is_of_python = any(place.is_relative_to(path) for path in (sys.prefix, sys.base_prefix))
    return is_of_python or not {'site-packages', 'dist-packages'}.isdisjoint(place.parts)


def _describe(error: BaseException, variables: Mapping[str, Any]) -> str:
    """Describes an exception of the user's code; suggests the most similar of its `variables`."""
    if isinstance(error, UserError):
        return str(error)
    text = format_error(error)
    if isinstance(error, SyntaxError):
        return f'{error.msg}: {(error.text or "").strip()}'
    if isinstance(error, ModuleNotFoundError):
        parent, _, name = str(error.name).rpartition('.')
        modules = pkgutil.iter_modules(getattr(sys.modules.get(parent), '__path__', None))
        return text + _suggest(name, [module.name for module in modules])
    if isinstance(error, ImportError):
        missing = re.match("cannot import name '(.+?)'", str(error))
        known = vars(sys.modules[error.name]) if error.name in sys.modules else {}
        return text + (_suggest(missing[1], known) if missing else '')
    if isinstance(error, NameError):
        return text + _suggest(error.name, variables)
    if isinstance(error, AttributeError):
        return text + _suggest(error.name, dir(error.obj))
    keyword = re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", text)
    for cls in records.all_records() if keyword else ():
        if keyword and cls.__name__ == keyword[1]:
            hint = records.closest(keyword[2], records.field_types(cls))
            return f'{cls.__name__} has no field {keyword[2]!r}; {hint}'
    return f'{type(error).__name__}: {text}; --traceback shows where'


def _suggest(name: str | None, known: Iterable[str]) -> str:
    """Returns a suffix for a message that suggests a similar public name, or an empty string."""
    names = [each for each in known if not each.startswith('_')]
    close = difflib.get_close_matches(name or '', names, n=1)
    return f'; did you mean {close[0]!r}?' if close else ''


def _read_json(file: pathlib.Path, kind: type[Any]) -> Any:
    """Reads the config.json of a work directory, in which functions are stored as names only."""
    try:
        with usable(file):
            return records.from_dict(kind, read_config(file), where='config')
    except ValueError as error:
        raise UserError(f'--config={file}: {error}') from error
