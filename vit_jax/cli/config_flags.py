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
from ml_collections.config_flags.tuple_parser import TupleParser

from vit_jax.base import UserError, records, require
from vit_jax.cli import config_files, config_help
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
    """Expands ~ at the start of an argument, and after `--FLAG=`, where bash does not."""
    flag = re.match(r'(--?[\w.]+=)?', argument)
    end = flag.end() if flag else 0
    return argument[:end] + os.path.expanduser(argument[end:])


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates overrides, as `FIELD=VALUE`, from all other arguments.

    An override is `--config.FIELD=VALUE`, `--config.FIELD VALUE`, or `--config.FIELD` for true.
    """
    overrides, others, rest = [], [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith('--config.'):
            others.append(argument)
            continue
        override = argument.removeprefix('--config.')
        if '=' not in override:
            has_value = rest and not rest[0].startswith('--')
            override += f'={rest.pop(0) if has_value else "true"}'
        overrides.append(override)
    return overrides, others


def load(file: str, overrides: Sequence[str], kind: type[Any] = TrainConfig) -> Any:
    """Reads the configuration `FILE` or `FILE:ARGUMENT`, and sets each `FIELD=VALUE` in this order.

    Raises UserError that names a wrong field or value.
    """
    return overridden(config_files.read(file, kind), overrides, where='config')


def overridden(record: R, overrides: Sequence[str], *, where: str) -> R:
    """Sets each `FIELD=VALUE` in a record, and returns it checked."""
    units: dict[str, str] = {}  # that are given of each duration
    for override in overrides:
        path, _, text = override.partition('=')
        holder, options = _field(record, path, where=where)
        value = _parsed(text, options, where=f'{where}.{path}')
        try:
            value = records.read(typing.Union[options], value, f'{where}.{path}')  # noqa: UP007
        except UserError as error:
            kinds = [] if isinstance(value, dict) else [*records.record_types(options).values()]
            more = config_help.suggest_field(value, kinds, f'{where}.{path}') if kinds else ''
            raise UserError(f'{error}{more}') from error
        parent, _, name = path.rpartition('.')
        if isinstance(holder, Duration):
            other = units.setdefault(parent, name)
            require(other == name, f'{where}.{path}: {where}.{parent}.{other} is given too')
        if isinstance(holder, records.Record):
            holder.override(name, value)
        else:
            holder[name] = value
    return records.checked(record, where=where)


def _field(record: Any, path: str, *, where: str) -> tuple[Any, tuple[Any, ...]]:
    """Returns the holder of a field, a record or a dict, and the possible types of the field.

    Raises UserError with the nearest name if there is no such field.
    """
    value, options = record, (type(record),)
    for name in path.split('.'):
        holder = value
        kinds = records.record_types(options if holder is None else [type(holder)])
        known = dict(hint for kind in kinds.values() for hint in records.hints(kind).items())
        if isinstance(holder, dict):
            known = {key: type(item) for key, item in holder.items()}
        if name not in known:
            text = config_help.suggest(type(record), name, known)
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
    """Parses the text of a field that has one of these types."""
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
