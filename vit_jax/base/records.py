"""Records: dataclasses that validate their values and are stored as JSON.

Configurations and checkpoint cards are records. A record is validated when it is created. Fields
may be assigned later, as configuration files and the command line do; `validated` checks a copy.
"""

import copy
import dataclasses
import difflib
import functools
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

import jax

from vit_jax.base.errors import UserError

R = TypeVar('R')


class Record:
    """Base class of dataclasses that validate their values when they are created.

    A value must have the type of its field; `Literal['adamw', 'sgd']` lists the possible values. A
    single number for a `tuple[int, int]`, a size (height, width), is used for both sides. A record
    in a field is copied. A subclass can define a method `check`, which raises UserError for
    impossible values.

    Raises:
      UserError: If a value has another type or `check` rejects it, or if an unknown field is
        assigned. The message names the field.
    """

    def __post_init__(self) -> None:
        where = type(self).__name__
        values = vars(self)
        for name, hint in field_types(type(self)).items():
            values[name] = parse(hint, values[name], f'{where}.{name}')
        try:
            self.check()
        except UserError as error:
            raise UserError(f'{where}.{error}') from error

    if not typing.TYPE_CHECKING:  # with __setattr__, mypy would accept any name

        def __setattr__(self, name: str, value: Any) -> None:
            field_type(type(self), name, type(self).__name__)
            super().__setattr__(name, value)

    def check(self) -> None:
        """Raises UserError for impossible values; the message begins with the field's name."""

    def override(self, name: str, value: Any) -> None:
        """Assigns a field by name; called for the command line and for studies."""
        setattr(self, name, value)


def require(condition: bool, message: str) -> None:
    """Raises UserError with the message if the condition is false."""
    if not condition:
        raise UserError(message)


_BOUNDS = {
    'low': ('at least', operator.ge),
    'above': ('more than', operator.gt),
    'high': ('at most', operator.le),
    'below': ('less than', operator.lt),
}


def require_between(record: Any, *names: str, **bounds: float) -> None:
    """Raises UserError unless the numbers in these fields are finite and within the bounds.

    The bounds are any of `low` and `high` (inclusive), `above` and `below` (exclusive). They also
    hold for each number of a tuple; None and strings are accepted.
    """
    expected = ' and '.join(f'{_BOUNDS[kind][0]} {bound}' for kind, bound in bounds.items())
    for name in names:
        value = getattr(record, name)
        values = value if isinstance(value, tuple) else (value,)
        numbers = [n for n in values if n is not None and not isinstance(n, str)]
        fits = all(_BOUNDS[kind][1](n, bounds[kind]) for n in numbers for kind in bounds)
        is_finite = all(abs(n) < math.inf for n in numbers)
        require(fits and is_finite, f'{name}={value!r}: expected {expected}')


def is_off(number: Any) -> bool:
    """Returns whether a number is 0 or None. Its operation is then left out.

    A traced number (see `replaced`) is never off.
    """
    return number is None or (not isinstance(number, jax.core.Tracer) and number == 0)


def require_pattern(pattern: str) -> None:
    """Raises UserError unless the pattern is a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f'{pattern!r} is not a regular expression: {error}') from error


def _read_hints(cls: Any) -> Mapping[str, Any]:
    types_by_name = typing.get_type_hints(cls)
    return {field.name: types_by_name[field.name] for field in dataclasses.fields(cls)}


#: Returns the type of each field of a record class, by name.
field_types: Callable[[Any], Mapping[str, Any]] = functools.cache(_read_hints)


def field_type(cls: Any, name: str, where: str) -> Any:
    """Returns the type of a field. Raises UserError with the most similar name if it is unknown."""
    fields = field_types(cls)
    if name not in fields:
        raise UserError(f'{where}.{name}: no such field; {closest(name, fields)}')
    return fields[name]


def default_of(cls: Any, name: str) -> Any:
    """Returns the default value of a field that has one."""
    (field,) = (field for field in dataclasses.fields(cls) if field.name == name)
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return field.default_factory()


def find_fields(record: Record, path: str) -> list[tuple[str, Record, str]]:
    """Finds the fields that a path names; `*` stands for each key of a dictionary of records.

    Returns the path of each field, the record that contains it, and its name there.
    """
    *parents, name = path.split('.')
    holders: dict[str, Any] = {'': record}
    for parent in parents:
        holders = {
            f'{where}{key}.': value
            for where, holder in holders.items()
            for key, value in (
                holder.items() if parent == '*' else [(parent, getattr(holder, parent))]
            )
        }
    return [(f'{where}{name}', holder, name) for where, holder in holders.items()]


def closest(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: a similar known name, or known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f'did you mean {close[0]!r}?' if close else f'known: {", ".join(known[:60]) or "none"}'


def all_records() -> list[type[Record]]:
    """Returns all record classes that are defined."""
    found = [Record]
    for cls in found:
        found += cls.__subclasses__()
    return found


def union_members(hint: Any) -> tuple[Any, ...]:
    """Returns the members of a union type; a tuple of the type itself for other types."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def record_types(options: Iterable[Any]) -> dict[str, Any]:
    """Returns the record classes among these types, by name."""
    return {t.__name__: t for t in options if isinstance(t, type) and issubclass(t, Record)}


def to_dict(record: Any) -> dict[str, Any]:
    """Converts a record to JSON values.

    If a field may hold records of several classes, its dict has the class name under `kind`.
    """
    fields = field_types(type(record)).items()
    return {name: _to_plain(getattr(record, name), hint) for name, hint in fields}


def _to_plain(value: Any, hint: Any) -> Any:
    if isinstance(value, Record):
        several = len(record_types(union_members(hint))) > 1
        return ({'kind': type(value).__name__} if several else {}) | to_dict(value)
    if isinstance(value, tuple | list):
        return [_to_plain(item, type(item)) for item in value]
    if isinstance(value, dict):
        return {name: _to_plain(item, type(item)) for name, item in value.items()}
    return {'function': text_of(value)} if callable(value) else value


def from_dict(cls: type[R], values: dict[str, Any], *, where: str) -> R:
    """Creates a record of class `cls` from JSON values: the inverse of `to_dict`.

    Args:
      cls: The class.
      values: A value for each field; fields with defaults may be left out.
      where: The name of the record in messages, such as `config`.

    Raises:
      UserError: If a field is missing or unknown, or for the reasons that `Record` lists. The
        message names `where.field`.
    """
    fields = {}
    for name, value in values.items():  # the new record copies the records in its fields
        fields[name] = parse(field_type(cls, name, where), value, f'{where}.{name}', copies=False)
    try:
        return cls(**fields)
    except TypeError as error:  # a field without a default is missing
        raise UserError(f'{where}: {error}') from error
    except UserError as error:
        raise UserError(f'{where}{str(error).removeprefix(cls.__name__)}') from error


def validated(record: R, *, where: str) -> R:
    """Returns a validated copy of a record and of all records in it.

    Numbers that jax traces are not checked.
    """
    traced = {name: x for name, x in vars(record).items() if isinstance(x, jax.core.Tracer)}
    known = {name: x for name, x in vars(record).items() if name not in traced}
    return replaced(from_dict(type(record), known, where=where), traced)


def with_values(record: R, values: Mapping[str, Any], *, where: str) -> R:
    """Returns a validated copy with new values of some fields.

    Args:
      record: The record.
      values: The new values by the path of the field, such as `model.depth`.
      where: The name of the record in messages, such as `config`.

    Raises:
      UserError: If a field is unknown or a value is impossible.
    """
    copy = validated(record, where=where)
    for path, value in values.items():
        *parents, name = path.split('.')
        holder: Any = copy
        for parent in parents:
            holder = getattr(holder, parent, None)
        require(isinstance(holder, Record), f'{where}.{path}: no such field')
        holder.override(name, value)
    return validated(copy, where=where)


def replaced(record: R, values: Mapping[str, Any]) -> R:
    """Returns a copy of a record and of all records in it, with new values by path.

    The values are not checked. They can be traced by jax, like the arguments of a program.
    """
    new = copy.copy(record)
    for name, value in vars(record).items():
        vars(new)[name] = replaced(value, {}) if isinstance(value, Record) else value
    for path, value in values.items():
        name, _, rest = path.partition('.')
        setattr(new, name, replaced(getattr(new, name), {rest: value}) if rest else value)
    return new


def differences(old: Any, new: Any, where: str = '') -> list[str]:
    """Returns a line `field: old -> new` for each difference between two results of `to_dict`."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return [] if old == new else [f'{where}: {old!r} -> {new!r}']
    lines = []
    for name in sorted({*old, *new}):
        before, after = old.get(name, '(absent)'), new.get(name, '(absent)')
        lines += differences(before, after, f'{where}.{name}' if where else name)
    return lines


@dataclasses.dataclass(frozen=True)
class UnresolvedFunction:
    """Stands for a function that was stored in JSON, where only its name is kept."""

    name: str  # MODULE:NAME

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise UserError(f'function {self.name}: JSON stores only its name; use --config=FILE.py')


def text_of(value: str | Callable[..., Any]) -> str:
    """Returns the name MODULE:NAME of a function; returns a string unchanged."""
    if isinstance(value, str):
        return value
    if isinstance(value, UnresolvedFunction):
        return value.name
    owner = value if hasattr(value, '__qualname__') else type(value)
    return f'{owner.__module__}:{owner.__qualname__}'


def parse(hint: Any, value: Any, where: str, *, copies: bool = True) -> Any:
    """Parses the value of a field of this type from a Python or JSON value.

    A record is returned as a validated copy, or unchanged if `copies` is False. Raises UserError,
    whose message begins with `where`, if the value has another type.
    """
    options = union_members(hint)
    kinds = record_types(options)
    is_name = isinstance(value, dict) and [*value] == ['function']
    if isinstance(value, dict) and kinds and not is_name:
        kind = next(iter(kinds)) if len(kinds) == 1 else value.get('kind', '')
        require(kind in kinds, f'{where}.kind={kind!r}: expected one of {", ".join(kinds)}')
        fields = {k: v for k, v in value.items() if k != 'kind' or len(kinds) == 1}
        return from_dict(kinds[kind], fields, where=where)
    for option in options:
        origin, items = typing.get_origin(option), typing.get_args(option)
        if items == (int, int) and origin is tuple and type(value) is int:
            return value, value
        if origin is tuple and isinstance(value, tuple | list):
            items = (items[0],) * len(value) if items[-1] is Ellipsis else items
            require(len(items) == len(value), f'{where}={tuple(value)!r}: expected {option}')
            pairs = enumerate(zip(items, value, strict=True))
            return tuple(parse(item, each, f'{where}[{i}]') for i, (item, each) in pairs)
        if origin is dict and isinstance(value, dict):
            key, item = items
            return {parse(key, k, where): parse(item, v, f'{where}.{k}') for k, v in value.items()}
        if option is float and type(value) is int:
            return float(value)
        if option is Any or type(value) is option:  # the option for None is NoneType
            is_record = isinstance(value, Record)
            return validated(value, where=where) if is_record and copies else value
        if origin is Literal and type(value) in map(type, items) and value in items:
            return value
        if origin is Callable and (is_name or callable(value)):
            return UnresolvedFunction(value['function']) if is_name else value
    raise UserError(f'{where}={value!r}: expected {format_type(hint)}')


def format_type(hint: Any) -> str:
    """Formats a type as messages and help show it, such as `cls|gap or none`."""
    if hint is type(None):
        return 'none'
    if len(options := union_members(hint)) > 1:
        return ' or '.join(map(format_type, options))
    origin = typing.get_origin(hint)
    if origin is Literal:
        return '|'.join(map(str, typing.get_args(hint)))
    if origin is Callable:
        return 'function'
    return re.sub(r'\b\w+\.', '', str(hint)) if origin else str(hint.__name__)
