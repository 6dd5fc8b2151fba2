"""The file of `--config=FILE:ARGUMENT`: found from any folder, and executed."""

import contextlib
import difflib
import inspect
import pathlib
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

from vit_jax.base import MissingFile, UserError, records, require, usable
from vit_jax.config import TrainConfig, read_config

_PACKAGE = pathlib.Path(__file__).parents[1]  # which has configs/ too
_MODULE = 'config_config'  # as ml_collections names it


def read(given: str, kind: type[Any] = TrainConfig) -> Any:
    """Reads the TrainConfig or Study of FILE.py, FILE.py:ARGUMENT or WORKDIR/config.json.

    Raises UserError if there is none, and for wrong fields and values in it.
    """
    path, *argument = given.split(':', 1)
    file = _found(path)
    if file.suffix == '.json' and not argument:
        return _recorded(file, kind)
    with _add_line(path, file):
        module = _executed(file)
    get_config = getattr(module, 'get_config', None)
    if not callable(get_config):
        raise UserError(f'--config={path}: it defines no get_config()')
    known = getattr(module, 'ARGUMENTS', ())
    _check_argument(get_config, argument, f'--config={given}', known)
    try:
        with _add_line(path, file):
            config = get_config(*argument)
    except Exception as error:
        if argument and known and argument[0] not in known:
            nearest = records.nearest(argument[0], known)
            raise UserError(f'--config={given}: no {argument[0]!r}; {nearest}') from error
        raise
    if not isinstance(config, kind):
        text = f'get_config() returned {type(config).__name__}; expected {kind.__name__}'
        raise UserError(f'--config={path}: {text}')
    with _add_line(path, file):
        return records.checked(config, where='config')


def function(given: str) -> Any:
    """Returns the function of `FILE.py:FUNCTION`. Raises UserError if there is none."""
    path, _, name = given.rpartition(':')
    file = pathlib.Path(path)
    require(file.is_file(), f'--head={given}: expected FILE.py:FUNCTION, of a file that exists')
    with _add_line(path, file):
        found = vars(_executed(file))
    own = [known for known, value in found.items() if callable(value)]
    require(name in own, f'--head={given}: no such function; {records.nearest(name, own)}')
    return found[name]


def _found(path: str) -> pathlib.Path:
    """Finds a file in the current folder, or in the configs/ of this package."""
    for file in (pathlib.Path(path), _PACKAGE / path, _PACKAGE / 'configs' / path):
        if file.is_file():
            return file
    near = pathlib.Path(path) if pathlib.Path(path).is_dir() else pathlib.Path(path).parent
    known = [str(file) for file in near.glob('*.py')]
    known += [str(file.relative_to(_PACKAGE)) for file in (_PACKAGE / 'configs').rglob('*.py')]
    stems = {name: pathlib.Path(name).stem for name in known}
    close = difflib.get_close_matches(pathlib.Path(path).stem, stems.values(), n=1)
    alike = sorted({repr(name) for name in known if stems[name] in close})
    meant = f'did you mean {" or ".join(alike)}?' if alike else records.nearest(path, {*known})
    raise MissingFile(f'--config={path}: no such file, here or in {_PACKAGE}; {meant}')


def _executed(file: pathlib.Path) -> types.ModuleType:
    """Executes a configuration as a module, which may import files of its folder."""
    module = types.ModuleType(_MODULE)
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses and typing look for names there
    sys.path += {str(file.parent.absolute())} - {*sys.path}
    # An import would write byte code into the folder.
    code = compile(file.read_bytes(), str(file), 'exec', dont_inherit=True)
    exec(code, vars(module))
    return module


def _check_argument(get_config: Any, argument: list[str], where: str, known: Any) -> None:
    """Raises UserError if get_config() takes no argument, or needs one."""
    try:
        inspect.signature(get_config).bind(*argument)
    except TypeError as error:
        text = 'get_config() takes no argument'
        if not argument:
            text = 'get_config() needs an argument, --config=FILE:ARGUMENT'
            text += f'; known: {", ".join(known)}' if known else ''
        raise UserError(f'{where}: {text}') from error


@contextlib.contextmanager
def _add_line(path: str, file: pathlib.Path) -> Iterator[None]:
    """Names the file and its line in a UserError; other errors keep Python's traceback."""
    try:
        yield
    except UserError as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(file)]
        where = f', line {lines[-1]}' if lines else ''
        raise UserError(f'--config={path}{where}: {error}') from error


def _recorded(file: pathlib.Path, kind: type[Any]) -> Any:
    """The configuration that a work directory keeps, where it names no functions."""

    def refuse_function(values: dict[str, Any]) -> dict[str, Any]:
        if [*values] == ['function']:
            text = f'it only names the function {values["function"]}'
            raise UserError(f'{text}: take the FILE.py that has it')
        return values

    try:
        with usable(file):
            values = read_config(file, object_hook=refuse_function)
        return records.from_dict(kind, values, where='config')
    except (ValueError, RecursionError) as error:
        raise UserError(f'--config={file}: {error}') from error
