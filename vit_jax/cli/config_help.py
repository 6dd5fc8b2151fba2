"""Help about the fields of a configuration, and hints for wrong names and values."""

import ast
import collections.abc
import dataclasses
import difflib
import functools
import inspect
import io
import re
import sys
import textwrap
import tokenize
import typing
from collections.abc import Collection, Sequence
from typing import Any

from vit_jax.base import records
from vit_jax.base.records import Record
from vit_jax.cli import synonyms
from vit_jax.models import ViTConfig
from vit_jax.training.duration import Duration

_WIDTH = 96


def names(cls: type[Record]) -> str:
    """The names of all fields, a paragraph for each kind of record."""
    parts = []
    for kind, paths in places(cls).items():
        fields = f'{", ".join(paths)} ({kind.__name__}): {", ".join(records.hints(kind))}'
        parts.append(textwrap.fill(fields, _WIDTH, initial_indent='  ', subsequent_indent=' ' * 6))
    return '\n'.join(parts)


def meanings(cls: type[Record]) -> str:
    """Types, defaults and meanings of all fields, a section for each kind of record."""
    return '\n\n'.join(_section(kind, paths) for kind, paths in places(cls).items())


def comments(cls: type[Record]) -> dict[str, str]:
    """The comments on the lines of each field of a record in its source, inherited fields too."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__[:-1]):
        tree, texts = _parsed(owner.__module__)
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        for node in classes[owner.__name__].body:
            if isinstance(node, ast.AnnAssign):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                said = [texts[line] for line in lines if line in texts]
                found[ast.unparse(node.target)] = ' '.join(said)
    return found


@functools.cache
def _parsed(module: str) -> tuple[ast.Module, dict[int, str]]:
    """The source of a module, and the comment on each of its lines."""
    source = inspect.getsource(sys.modules[module])
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts = {t.start[0]: t.string.lstrip('# ') for t in tokens if t.type == tokenize.COMMENT}
    return ast.parse(source), texts


def paths(cls: type[Record]) -> list[str]:
    """Where each field within a record is: `FIELD.FIELD`."""
    found = [(path, kind) for kind, places in places(cls).items() for path in places]
    return [f'{path}.{name}' for path, kind in found for name in records.hints(kind)]


def suggest(cls: type[Record], name: str, here: Collection[str]) -> str:
    """Ends an error message about a name that is none of the fields `here`.

    It may be another program's name for a field, a field elsewhere in the record, a misspelled
    one, or the initials of one (`wd`).
    """
    # Of several fields with the same name, the first.
    fields = {path.rpartition('.')[2]: path for path in reversed(paths(cls))}
    if name not in fields or name == 'num_classes':
        if text := synonyms.translate(name, paths(cls), here):
            return text
    close = [name] if name in fields else difflib.get_close_matches(name, here)
    if not close:
        close = [field for field in fields if _initials(field) == name]
        close += difflib.get_close_matches(name, fields)
    elsewhere = next((fields[one] for one in close if one in fields and one not in here), None)
    return f'did you mean {elsewhere!r}?' if elsewhere else records.nearest(name, here)


def _initials(field: str) -> str:
    return ''.join(word[0] for word in field.split('_'))


def suggest_field(value: Any, kinds: Sequence[type[Record]], where: str) -> str:
    """Ends an error message about a number or a word in place of a record: what to set instead."""
    if len(kinds) > 1:
        names = [kind.__name__ for kind in kinds]
        meant = [name for name in names if str(value).lower() in name.lower()]
        example = f', for example --{where}={(meant or names)[0]}'
        variant = '; in a file, model=vit_jax.models.variant(NAME) sets the architecture'
        return example + (variant if ViTConfig in kinds else '')
    fields = ', '.join(records.hints(kinds[0]))
    if kinds[0] is Duration:
        unit = 'fraction' if str(value).startswith('0.') else 'epochs'
        return f', for example --{where}.{unit}={value}; its units: {fields}'
    return f'; its fields, as in --{where}.FIELD=VALUE: {fields}'


def places(cls: type[Record]) -> dict[type[Record], list[str]]:
    """Each kind of record within this one, itself first, with the fields that may hold it."""
    found = {cls: ['config']}
    waiting = [(cls, 'config')]
    while waiting:
        holder, path = waiting.pop(0)
        for name, hint in records.hints(holder).items():
            for option in records.alternatives(hint):
                of_many = typing.get_origin(option) is dict
                kinds = records.record_types(typing.get_args(option) if of_many else [option])
                for kind in kinds.values():
                    place = f'{path}.{name}.NAME' if of_many else f'{path}.{name}'
                    if kind not in found:
                        waiting.append((kind, place))
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
        lines.append(f'{text:<44}  {meant[field.name]}'.rstrip())
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
