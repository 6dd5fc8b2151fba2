"""Reads the configuration file of `--config=FILE:ARGUMENT`."""

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
from typing import Any

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
    require(file.suffix == '.py', f'--config={path}: expected FILE.py or WORKDIR/config.json')
    with _locate_errors(f'--config={path}', file):
        module = _execute(file)
        functions = [name for name, value in vars(module).items() if inspect.isroutine(value)]
        missing = f'expected a function get_config(); found: {", ".join(functions) or "none"}'
        require(callable(getattr(module, 'get_config', None)), missing)
        config = _call(module, argument)
        text = f'get_config() returned {type(config).__name__}; expected {kind.__name__}'
        require(isinstance(config, kind), text)
        return records.validated(config, where='config')


def load_function(given: str) -> Any:
    """Loads the function of `FILE.py:FUNCTION`. Raises UserError if it does not exist."""
    path, _, name = given.rpartition(':')
    file = pathlib.Path(path)
    is_python = file.is_file() and file.suffix == '.py'
    require(is_python, f'--head={given}: expected FILE.py:FUNCTION, with a file that exists')
    with _locate_errors(f'--head={path}', file):
        values = vars(_execute(file))
    functions = [name for name, value in values.items() if callable(value)]
    unknown = f'--head={given}: no such function; {records.closest(name, functions)}'
    require(name in functions, unknown)
    return values[name]


def _find(path: str) -> pathlib.Path:
    """Finds a file relative to the current folder, to this package or to its configs/."""
    for file in (pathlib.Path(path), _PACKAGE / path, _PACKAGE / 'configs' / path):
        if file.is_file():
            return file
    described = pathlib.Path(path) / 'config.json'
    is_folder = f'--config={path}: a folder; expected a file'
    hint = f'; did you mean {str(described)!r}?' if described.is_file() else ''
    require(not pathlib.Path(path).is_dir(), f'{is_folder}{hint}')
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
    code = compile(read_file(file, Limit.TEXT_BYTES), str(file), 'exec', dont_inherit=True)
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
        place, line, text = _find_place(error, file) or (file.absolute(), None, _describe(error))
        if isinstance(error, SyntaxError) and error.filename is not None:
            place, line = pathlib.Path(error.filename).absolute(), error.lineno
        where = given + ('' if place == file.absolute() else f': {place}')
        where += '' if line is None else f', line {line}'
        raise UserError(f'{where}: {text}') from error


def describe_error_of_user(error: BaseException) -> str | None:
    """Describes an error in a function of the configuration file; None if it is elsewhere."""
    file = getattr(sys.modules.get(_MODULE), '__file__', None)
    found = _find_place(error, pathlib.Path(file)) if file else None
    return found and f'{found[0]}, line {found[1]}: {found[2]}'


def _find_place(error: BaseException, file: pathlib.Path) -> tuple[pathlib.Path, int, str] | None:
    """Returns the file, the line and a description of an error in the user's code, if it is one."""
    frames = [
        (pathlib.Path(frame.f_code.co_filename).absolute(), line, frame)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    for place, line, frame in reversed(frames):
        if _is_of_user(place, file):
            return place, line, _describe(error, {**frame.f_globals, **frame.f_locals})
    return None


def _is_of_user(place: pathlib.Path, file: pathlib.Path) -> bool:
    """Returns whether a file of code is the configuration or one that it imports."""
    if place == file.absolute():
        return True
    is_installed = 'site-packages' in place.parts or place.is_relative_to(_PACKAGE)
    return place.is_relative_to(file.parent.absolute()) and place.exists() and not is_installed


def _describe(error: BaseException, variables: Mapping[str, Any] = {}) -> str:
    """Describes an exception of the user's code; suggests a variable for a misspelled one."""
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
