"""`--config=FILE:ARGUMENT` and `--config.FIELD=VALUE`: ml_collections' flags, for typed records.

The text is parsed by the field's type, as ml_collections knows neither choices nor unions nor "no
value". Whether a value makes sense, records check.
"""

import ast
import contextlib
import os
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from absl import flags
from ml_collections.config_flags import config_path
from ml_collections.config_flags.tuple_parser import TupleParser

from vit_jax.base import UserError, records, require
from vit_jax.command_line import config_files, config_help
from vit_jax.config import TrainConfig
from vit_jax.training.duration import Duration

R = TypeVar('R')

_PARSERS: dict[Any, Callable[[str], Any]] = {
    bool: flags.BooleanParser().parse,
    int: flags.IntegerParser().parse,
    float: flags.FloatParser().parse,
    tuple: TupleParser().parse,
    typing.Literal: str,
    str: str,
}


def at_home(argument: str) -> str:
    """The argument with ~ replaced at its start, and after `--FLAG=`, where bash leaves it."""
    flag = re.match(r'(--?[\w.]+=)?', argument)
    end = flag.end() if flag else 0
    return argument[:end] + os.path.expanduser(argument[end:])


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides among these arguments, as `FIELD=VALUE`, and all others.

    absl's other spellings of overrides are understood: `--config.FIELD VALUE`, `--config.FIELD`
    and `--noconfig.FIELD` for booleans, and one dash instead of two.
    """
    overrides, others, rest = [], [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if found := re.fullmatch(r'--?(no)?config\.([^=]+)(=.*)?', argument, re.DOTALL):
            negated, path, value = found.groups()
            if not value and not negated and rest and not re.match('--?[a-z]', rest[0]):
                value = f'={rest.pop(0)}'
            overrides.append(path + (value or ('=false' if negated else '=true')))
        else:
            others.append(argument)
    return overrides, others


def load(file: str, overrides: Sequence[str], kind: type[Any] = TrainConfig) -> Any:
    """What `FILE` or `FILE:ARGUMENT` describes, with each `FIELD=VALUE` set in this order.

    Raises UserError that names a wrong field or value, or shows what the file itself raised.
    """
    return overridden(config_files.read(file, kind), overrides, where='config')


def overridden(record: R, overrides: Sequence[str], *, where: str) -> R:
    """The same record, checked, after each `FIELD=VALUE` was set."""
    units: dict[str, str] = {}  # that are given of each duration
    for override in overrides:
        path, _, text = override.partition('=')
        holder, options = _field(record, path, where=where)
        value = _parsed(text, options, where=f'{where}.{path}')
        try:
            value = records.read(typing.Union[options], value, f'{where}.{path}')  # noqa: UP007
        except UserError as error:
            kinds = [] if isinstance(value, dict) else [*records.record_types(options).values()]
            more = config_help.field_hint(value, kinds, f'{where}.{path}') if kinds else ''
            raise UserError(f'{error}{more}') from error
        parent, _, name = path.rpartition('.')
        if isinstance(holder, Duration):
            other = units.setdefault(parent, name)
            require(other == name, f'{where}.{path}: {where}.{parent}.{other} is given too')
        config_path.set_value(name, holder, value)
    return records.checked(record, where=where)


def _field(record: Any, path: str, *, where: str) -> tuple[Any, tuple[Any, ...]]:
    """What holds a field, a record or a dict, and the types that the field may have.

    Raises UserError with the nearest name where there is no such field.
    """
    value, options = record, (type(record),)
    for name in path.split('.'):
        holder = value
        kinds = records.record_types(options if holder is None else [type(holder)])
        known = dict(hint for kind in kinds.values() for hint in records.hints(kind).items())
        if isinstance(holder, dict):
            known = {key: type(item) for key, item in holder.items()}
        if name not in known:
            text = config_help.nearest(type(record), name, known)
            if holder == {}:
                text = f"""there is none; --{where}="{{{name!r}: {{}}}}" makes one"""
            raise UserError(f'{where}.{name}: no such field; {text}')
        if holder is None:
            raise UserError(f'{where} is none: --{where}={" or ".join(kinds)} before its fields')
        options = records.alternatives(known[name])
        value = holder[name] if isinstance(holder, dict) else getattr(holder, name)
        if value is None and Duration in options:
            value = Duration(steps=0)  # until one of its units is assigned
            setattr(holder, name, value)
        where = f'{where}.{name}'
    return holder, options


def _parsed(text: str, options: Sequence[Any], *, where: str) -> Any:
    """The value that a text stands for, in a field of one of these types."""
    choices = [name for option in options for name in typing.get_args(option)]
    if text.lower() == 'none' and 'none' not in choices:
        if type(None) not in options:
            raise UserError(f'{where}=none: this field needs a value')
        return None
    if tuple[int, int] in options:
        if text.isdecimal():  # a square, not a tuple of one
            return int(text)
        sides = re.fullmatch(r'(\d+)\s*[xX×]\s*(\d+)', text)
        require(not sides, f'{where}={text}: expected {",".join(sides.groups() if sides else ())}')
    if tuple[str, ...] in options and not text.startswith(('(', '[', '"', "'")):
        return tuple(name.strip() for name in text.split(',') if name.strip())
    kinds = records.record_types(options)
    if len(kinds) == 1:
        kinds['build'] = next(iter(kinds.values()))  # ml_collections' word
    if text in kinds:
        return records.from_dict(kinds[text], {}, where=where)
    types = (typing.get_origin(option) or option for option in options)
    for parse in (_PARSERS[kind] for kind in types if kind in _PARSERS):
        with contextlib.suppress(TypeError, ValueError):
            return parse(text)
    with contextlib.suppress(SyntaxError, ValueError):
        return ast.literal_eval(text)
    return text
