"""Builds a configuration from the flags `--config=FILE:ARGUMENT` and `--config.FIELD=VALUE`.

A value is parsed according to the type of its field. The records validate it.
"""

import ast
import os
import re
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from ml_collections.config_flags.tuple_parser import TupleParser

from vit_jax.base import UserError, records, require
from vit_jax.cli import config_files, config_help
from vit_jax.config import TrainConfig
from vit_jax.training.duration import Duration

R = TypeVar('R', bound=records.Record)

_BOOLEANS = {'true': True, '1': True, 'false': False, '0': False}


def expand_home(argument: str) -> str:
    """Expands ~ at the start of an argument and after `--FLAG=`, where bash does not expand it."""
    flag = re.match(r'(--?[\w.]+=)?', argument)
    end = flag.end() if flag else 0
    return argument[:end] + os.path.expanduser(argument[end:])


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the overrides among the arguments, as `FIELD=VALUE`, and all other arguments.

    An override is `--config.FIELD=VALUE`, `--config.FIELD VALUE`, or `--config.FIELD` for true.
    """
    overrides = []
    others = []
    rest = list(arguments)
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
    """Reads the configuration `FILE` or `FILE:ARGUMENT` and applies each `FIELD=VALUE` in order.

    Raises UserError for unknown fields and wrong values.
    """
    config = config_files.read_config_file(file, kind)  # is validated: errors name the file
    return apply_overrides(config, overrides, where='config') if overrides else config


def apply_overrides(record: R, overrides: Sequence[str], *, where: str) -> R:
    """Returns a validated copy of the record with each `FIELD=VALUE` assigned."""
    record = records.copy_record(record)
    units: dict[str, str] = {}  # the unit that is set for each Duration
    for override in overrides:
        path, _, text = override.partition('=')
        holder, options = _find_field(record, path, where=where)
        value = _parse(text, options, where=f'{where}.{path}')
        try:
            value = records.parse(options, value, f'{where}.{path}')
        except UserError as error:
            kinds = [] if isinstance(value, dict) else [*records.record_types(options).values()]
            more = config_help.suggest_field(value, kinds, f'{where}.{path}') if kinds else ''
            if 'Callable' in str(error):
                more += '; a function can be set only in a configuration file'
            raise UserError(f'{error}{more}') from error
        parent, _, name = path.rpartition('.')
        if isinstance(holder, Duration):
            other = units.setdefault(parent, name)
            require(other == name, f'{where}.{path}, {where}.{parent}.{other}: expected only one')
        if isinstance(holder, records.Record):
            holder.override(name, value)
        else:
            holder[name] = value
    record.validate(where)
    return record


def _find_field(record: Any, path: str, *, where: str) -> tuple[Any, tuple[Any, ...]]:
    """Returns the record or dict that contains a field, and the possible types of the field.

    Raises UserError with the most similar name if the field does not exist.
    """
    value = record
    options: tuple[Any, ...] = (type(record),)
    for name in path.split('.'):
        holder = value
        kinds = records.record_types(options if holder is None else [type(holder)])
        fields: dict[str, tuple[Any, ...]] = {}
        for kind in kinds.values():
            fields.update(records.field_options(kind))
        if isinstance(holder, dict):
            fields = {key: (type(item),) for key, item in holder.items()}
        if name not in fields:
            text = config_help.suggest(type(record), name, fields)
            if holder == {}:
                text = f"""to add it, set --{where}="{{{name!r}: {{}}}}" first"""
            raise UserError(f'{where}.{name}: no such field; {text}')
        if holder is None:
            raise UserError(f'{where}: not set; set --{where}={" or ".join(kinds)} first')
        options = fields[name]
        value = holder[name] if isinstance(holder, dict) else getattr(holder, name)
        if value is None and Duration in options:
            value = Duration(steps=0)  # until one of its units is assigned
            setattr(holder, name, value)
        where = f'{where}.{name}'
    return holder, options


def _holds_strings(options: tuple[Any, ...]) -> bool:
    """Returns whether a field may hold a tuple of strings, alone or among other items."""
    tuples = [option for option in options if typing.get_origin(option) is tuple]
    return any(str in records.union_members(typing.get_args(option)[0]) for option in tuples)


def _parse(text: str, options: tuple[Any, ...], *, where: str) -> Any:
    """Parses the text of a field that may have any of these types."""
    choices = [name for option in options for name in typing.get_args(option)]
    if text.lower() == 'none' and 'none' not in choices:
        require(type(None) in options, f'{where}=none: this field cannot be None')
        return None
    if tuple[int, int] in options and (sides := re.fullmatch(r'(\d+)\s*[xX×]\s*(\d+)', text)):
        raise UserError(f'{where}={text}: expected {sides[1]},{sides[2]}')
    if _holds_strings(options) and not text.startswith(('(', '[', '"', "'")):
        return tuple(name.strip() for name in text.split(',') if name.strip())
    kinds = records.record_types(options)
    if text in kinds:
        return records.from_dict(kinds[text], {}, where=where)
    if bool in options:
        return _BOOLEANS.get(text.lower(), text)
    if tuple[bool, ...] in options:
        return tuple(_BOOLEANS.get(word.lower(), word) for word in re.findall(r'\w+', text))
    if str in options:
        require(text != '', f"{where}='': expected a value")
        return text
    is_list = options in ((tuple[int, ...],), (tuple[float, ...],))
    try:
        return TupleParser().parse(text) if is_list else ast.literal_eval(text)
    except (SyntaxError, TypeError, ValueError):
        return text
