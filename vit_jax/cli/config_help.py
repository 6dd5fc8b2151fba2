"""Help about the fields of a configuration, and hints for wrong names and values."""

import collections.abc
import dataclasses
import difflib
import inspect
import re
import textwrap
import typing
from collections.abc import Collection, Sequence
from typing import Any

from vit_jax.base import records
from vit_jax.base.records import Record
from vit_jax.cli import synonyms
from vit_jax.models import ViTConfig
from vit_jax.training.duration import Duration

_WIDTH = 96


def meanings(cls: type[Record]) -> str:
    """Types, defaults and meanings of all fields, a section for each kind of record."""
    return '\n\n'.join(_section(kind, paths) for kind, paths in places(cls).items())


def comments(cls: type[Record]) -> dict[str, str]:
    """The comments on the lines of each field of a record in its source, inherited fields too."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__[:-1]):
        name = ''  # of the field that a line belongs to
        for line in inspect.getsource(owner).splitlines():
            if field := re.match(r' {4}(\w+): ', line):
                name = field[1]
            elif re.match(r' {4}[^ )]', line):
                name = ''
            comment = line.partition('  # ')[2]
            if name and comment:
                found[name] = f'{found.get(name, "")} {comment}'.strip()
    return found


def paths(cls: type[Record]) -> list[str]:
    """Where each field within a record is: `FIELD.FIELD`."""
    found = [(path, kind) for kind, places in places(cls).items() for path in places]
    return [f'{path}.{name}' for path, kind in found for name in records.hints(kind)]


def suggest(cls: type[Record] | None, name: str, known: Collection[str]) -> str:
    """Ends an error message about a name that is none of the `known` flags or fields.

    The name may be another program's name for a field of the record `cls`, a field elsewhere in
    it, or a misspelled one.
    """
    if cls is not None:
        if text := synonyms.translate(name, paths(cls)):
            return text
        # The first of several fields with the same name.
        fields = {path.rpartition('.')[2]: path for path in reversed(paths(cls))}
        close = [] if name in fields else difflib.get_close_matches(name, known)
        for field in difflib.get_close_matches(name, fields):
            if not close and field not in known:
                return f"did you mean '--{fields[field]}'?"
    return records.nearest(name, known)


def suggest_field(value: Any, kinds: Sequence[type[Record]], where: str) -> str:
    """Ends an error message about a number or a word in place of a record: what to set instead."""
    if len(kinds) > 1:
        choices = ' or '.join(f'--{where}={kind.__name__}' for kind in kinds)
        variant = '; in a file, model=vit_jax.models.variant(NAME) sets the architecture'
        return f': {choices}{variant if ViTConfig in kinds else ""}'
    fields = ', '.join(records.hints(kinds[0]))
    if kinds[0] is Duration:
        unit = 'fraction' if str(value).startswith('0.') else 'epochs'
        return f', for example --{where}.{unit}={value}; its units: {fields}'
    return f'; its fields, as in --{where}.FIELD=VALUE: {fields}'


def places(cls: type[Record]) -> dict[type[Record], list[str]]:
    """Each kind of record within this one, itself first, with the fields that may hold it."""
    found = {cls: ['config']}
    waiting = [cls]
    for holder in waiting:  # which grows
        for name, hint in records.hints(holder).items():
            for option in records.alternatives(hint):
                of_many = typing.get_origin(option) is dict
                kinds = records.record_types(typing.get_args(option) if of_many else [option])
                for kind in kinds.values():
                    if kind not in found:
                        waiting.append(kind)
                    place = f'{found[holder][0]}.{name}{".NAME" if of_many else ""}'
                    if place not in found.setdefault(kind, []):
                        found[kind].append(place)
    return found


def _section(kind: Any, paths: list[str]) -> str:
    """The fields of a record, with what its source says of them."""
    lines = [textwrap.fill(', '.join(f'--{path}.FIELD' for path in paths), _WIDTH)]
    owners = [owner for owner in kind.__mro__ if issubclass(owner, Record) and owner is not Record]
    meaning = '\n\n'.join(inspect.cleandoc(owner.__doc__ or '') for owner in owners)
    lines += [textwrap.indent(f'{kind.__name__}: {meaning}', '  ')]
    meant, hints = comments(kind), records.hints(kind)
    for field in dataclasses.fields(kind):
        text = f'    {field.name}: {type_text(hints[field.name])}{_default(field)}'
        lines.append(f'{text:<44}  {meant.get(field.name, "")}'.rstrip())
    return '\n'.join(lines)


def type_text(hint: Any) -> str:
    """A type as the command line takes it."""
    if hint is type(None):
        return 'none'
    if len(options := records.alternatives(hint)) > 1:
        return ' or '.join(map(type_text, options))
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return '|'.join(map(str, typing.get_args(hint)))
    if origin is collections.abc.Callable:
        return 'function'
    return re.sub(r'\b\w+\.', '', str(hint)) if origin else hint.__name__


def _default(field: 'dataclasses.Field[Any]') -> str:
    if field.default is not dataclasses.MISSING:
        return f' = {"none" if field.default is None else field.default}'
    return '' if field.default_factory is not dataclasses.MISSING else ', required'
