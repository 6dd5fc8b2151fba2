"""The file of `--config=FILE:ARGUMENT`: found from any folder, executed, its errors its own."""

import contextlib
import difflib
import inspect
import itertools
import pathlib
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

from vit_jax.base import MissingFile, UserError, records, require, usable
from vit_jax.config import Study, TrainConfig, read_config

_PACKAGE = pathlib.Path(__file__).parents[1]  # which has configs/ too
_MODULE = 'config_config'  # as ml_collections names it


def read(given: str, kind: type[Any] = TrainConfig) -> Any:
    """The TrainConfig or Study of FILE.py, FILE.py:ARGUMENT or a work directory's config.json.

    Raises UserError where there is none; of an error of the file itself, with its own lines alone.
    """
    path, *argument = given.split(':', 1)
    file = _found(path)
    if file.suffix == '.json' and not argument:
        return _recorded(file, kind)
    with _errors_of(path, file):
        module = _executed(file)
    get_config = getattr(module, 'get_config', None)
    if not callable(get_config):
        raise UserError(f'--config={path}: it defines no get_config()')
    known = getattr(module, 'ARGUMENTS', ())
    _check_argument(get_config, argument, f'--config={given}', known)
    try:
        with _errors_of(path, file):
            config = get_config(*argument)
    except UserError as error:
        if argument and known and argument[0] not in known:
            nearest = records.nearest(argument[0], known)
            raise UserError(f'--config={given}: no {argument[0]!r}; {nearest}') from error
        raise
    if not isinstance(config, kind):
        programs = {Study: 'study', TrainConfig: 'train'}
        own = programs.get(type(config))
        gave = f'get_config() gave {type(config).__name__}, no {kind.__name__}'
        takes = f'; python -m vit_jax.{own} takes it' if own else ''
        raise UserError(f'--config={path}: {gave}{takes}')
    with _errors_of(path, file):
        return records.checked(config, where='config')


def function(given: str) -> Any:
    """The function of `FILE.py:FUNCTION`. Raises UserError where there is none."""
    path, _, name = given.rpartition(':')
    file = pathlib.Path(path)
    require(file.is_file(), f'--head={given}: expected FILE.py:FUNCTION, of a file that exists')
    with _errors_of(path, file):
        found = vars(_executed(file))
    own = [known for known, value in found.items() if callable(value)]
    require(name in own, f'--head={given}: no such function; {records.nearest(name, own)}')
    return found[name]


def _found(path: str) -> pathlib.Path:
    """The file of this name here, else the one that came with this package, in its configs/."""
    for file in (pathlib.Path(path), _PACKAGE / path, _PACKAGE / 'configs' / path):
        if file.is_file():
            return file
    near = pathlib.Path(path) if pathlib.Path(path).is_dir() else pathlib.Path(path).parent
    known = [str(file) for file in near.glob('*.py') if _may_be_one(file)]
    known += [str(file.relative_to(_PACKAGE)) for file in (_PACKAGE / 'configs').rglob('*.py')]
    stems = {name: pathlib.Path(name).stem for name in known}
    close = difflib.get_close_matches(pathlib.Path(path).stem, stems.values(), n=1)
    alike = sorted({repr(name) for name in known if stems[name] in close})
    meant = f'did you mean {" or ".join(alike)}?' if alike else records.nearest(path, {*known})
    raise MissingFile(f'--config={path}: no such file, here or in {_PACKAGE}; {meant}')


def _may_be_one(file: pathlib.Path) -> bool:
    """Does it look like a configuration? Others need not be proposed."""
    try:
        return file.is_file() and b'def get_config' in file.read_bytes()
    except OSError:
        return False


def _executed(file: pathlib.Path) -> types.ModuleType:
    """The module of a configuration, which may import what lies beside it."""
    module = types.ModuleType(_MODULE)
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # where dataclasses and typing look for names
    sys.path += {str(file.parent.absolute())} - {*sys.path}
    # Not by an import, which would write beside it.
    code = compile(file.read_bytes(), str(file), 'exec', dont_inherit=True)
    exec(code, vars(module))
    return module


def _check_argument(get_config: Any, argument: list[str], where: str, known: Any) -> None:
    """Raises UserError where get_config() takes no argument, or needs one."""
    try:
        inspect.signature(get_config).bind(*argument)
    except TypeError as error:
        text = 'get_config() takes no argument'
        if not argument:
            text = 'get_config() needs an argument, --config=FILE:ARGUMENT'
            text += f'; known: {", ".join(known)}' if known else ''
        raise UserError(f'{where}: {text}') from error


@contextlib.contextmanager
def _errors_of(path: str, file: pathlib.Path) -> Iterator[None]:
    """Around what the file does: its errors become a UserError that shows no line of ours."""
    try:
        yield
    except UserError as error:
        lines = [frame.lineno for frame in _frames(error, file) if frame.filename == str(file)]
        where = f', line {lines[-1]}' if lines else ''
        raise UserError(f'--config={path}{where}: {error}') from error
    except Exception as error:
        raise UserError(f'--config={path} {_shown(error, _frames(error, file))}') from error


def raised(error: BaseException) -> str:
    """What a function of the configuration's file raised, with its own lines; '' if none did."""
    module = sys.modules.get(_MODULE)
    file = pathlib.Path(module.__file__ or '') if module else pathlib.Path()
    frames = _frames(error, file)
    return f'--config={file} {_shown(error, frames)}' if frames else ''


def _shown(error: BaseException, frames: list[traceback.FrameSummary]) -> str:
    notes = getattr(error, '__notes__', [])
    notes[:] = [note for note in notes if 'JAX has removed its internal frames' not in note]
    lines = traceback.format_list(frames) + traceback.format_exception_only(error)
    return f'raised\n{"".join(lines).rstrip()}'


def _frames(error: BaseException, file: pathlib.Path) -> list[traceback.FrameSummary]:
    """Where it was raised, from the file's first line on, without what the package does."""
    ours = (str(_PACKAGE), '<')  # Python's own import, and what dataclasses wrote
    frames = traceback.extract_tb(error.__traceback__)
    begun = itertools.dropwhile(lambda frame: frame.filename != str(file), frames)
    return [f for f in begun if f.filename == str(file) or not f.filename.startswith(ours)]


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
