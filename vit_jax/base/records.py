"""Records: dataclasses that validate their values and are stored as JSON.

Configurations and checkpoint cards are records. `Record.validate` checks a record when it is
created. Fields may be assigned later, as configuration files and the command line do. Code that
gets a record from a user therefore calls `validate_copy` once, and passes the copy on.
"""

import copy
import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

import jax

from vit_jax.base.errors import UserError

R = TypeVar('R', bound='Record')


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
        self.validate(type(self).__name__)

    def validate(self, where: str) -> None:
        """Converts all values to the types of their fields, in place, and checks them.

        Records in fields are replaced by validated copies. Raises UserError, whose message starts
        with `where`, for the reasons above.
        """
        values = vars(self)
        for name, options in field_options(type(self)).items():
            values[name] = parse(options, values[name], f'{where}.{name}')
        try:
            self.check()
        except UserError as error:
            raise UserError(f'{where}.{error}') from error

    if not typing.TYPE_CHECKING:  # with __setattr__, mypy would accept any name

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in field_types(type(self)):
                raise _unknown_field(type(self), name, type(self).__name__)
            super().__setattr__(name, value)

    def check(self) -> None:
        """Raises UserError for impossible values; the message starts with the field's name."""

    def override(self, name: str, value: Any) -> None:
        """Assigns a field by name; called for the command line and for studies."""
        setattr(self, name, value)


def require(condition: bool, message: str) -> None:
    """Raises UserError with the message if the condition is false."""
    if not condition:
        raise UserError(message)


def require_between(
    record: Any,
    *names: str,
    low: float = -math.inf,
    above: float = -math.inf,
    high: float = math.inf,
    below: float = math.inf,
) -> None:
    """Raises UserError unless the numbers in these fields are finite and within the bounds.

    `low` and `high` are inclusive, `above` and `below` exclusive. The bounds also hold for each
    number of a tuple; None and strings are accepted.
    """
    for name in names:
        value = getattr(record, name)
        for number in value if isinstance(value, tuple) else (value,):
            if number is None or isinstance(number, str):
                continue
            if not (low <= number <= high and above < number < below):
                bounds = {'at least': low, 'more than': above, 'at most': high, 'less than': below}
                given = (
                    f'{text} {bound}' for text, bound in bounds.items() if abs(bound) < math.inf
                )
                raise UserError(f'{name}={value!r}: expected {" and ".join(given)}')


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


def _read_options(cls: Any) -> Mapping[str, tuple[Any, ...]]:
    return {name: union_members(hint) for name, hint in field_types(cls).items()}


#: Returns the possible types of each field of a record class, by name: the members of its union.
field_options: Callable[[Any], Mapping[str, tuple[Any, ...]]] = functools.cache(_read_options)


def _unknown_field(cls: Any, name: str, where: str) -> UserError:
    return UserError(f'{where}.{name}: no such field; {closest(name, field_types(cls))}')


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
        children: dict[str, Any] = {}
        for where, holder in holders.items():
            items = holder if parent == '*' else {parent: getattr(holder, parent)}
            children |= {f'{where}{key}.': child for key, child in items.items()}
        holders = children
    return [(f'{where}{name}', holder, name) for where, holder in holders.items()]


def closest(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: a similar known name, or known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f'did you mean {close[0]!r}?' if close else f'known: {", ".join(known[:60]) or "none"}'


def all_records() -> list[type[Record]]:
    """Returns all record classes that are defined."""
    classes = [Record]
    for cls in classes:
        classes += cls.__subclasses__()
    return classes


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
    fields = field_options(type(record)).items()
    return {name: _to_plain(getattr(record, name), options) for name, options in fields}


def _to_plain(value: Any, options: tuple[Any, ...] = ()) -> Any:
    """Converts the value of a field that may have any of these types."""
    if isinstance(value, Record):
        several = len(record_types(options)) > 1
        return ({'kind': type(value).__name__} if several else {}) | to_dict(value)
    if isinstance(value, tuple | list):
        return [_to_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _to_plain(item) for name, item in value.items()}
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
    for name, value in values.items():
        if name not in field_types(cls):
            raise _unknown_field(cls, name, where)
        fields[name] = parse(field_options(cls)[name], value, f'{where}.{name}')
    try:
        return cls(**fields)
    except TypeError as error:  # a field without a default is missing
        raise UserError(f'{where}: {error}') from error
    except UserError as error:
        raise UserError(f'{where}{str(error).removeprefix(cls.__name__)}') from error


def validate_copy(record: R, *, where: str) -> R:
    """Returns a validated copy of a record and of all records in it."""
    new = copy.copy(record)
    new.validate(where)  # copies the records in its fields
    return new


def with_values(record: R, values: Mapping[str, Any], *, where: str) -> R:
    """Returns a validated copy with new values of some fields.

    Args:
      record: The record.
      values: The new values by the path of the field, such as `model.depth`.
      where: The name of the record in messages, such as `config`.

    Raises:
      UserError: If a field is unknown or a value is impossible.
    """
    new = copy_record(record)
    for path, value in values.items():
        *parents, name = path.split('.')
        holder: Any = new
        for parent in parents:
            holder = getattr(holder, parent, None)
        require(isinstance(holder, Record), f'{where}.{path}: no such field')
        holder.override(name, value)
    new.validate(where)
    return new


def copy_record(record: R) -> R:
    """Returns a copy of a record and of all records in it. The values are not checked."""
    new = copy.copy(record)
    for name, value in vars(record).items():
        if isinstance(value, Record | dict | tuple):
            vars(new)[name] = _copy_records(value)
    return new


def _copy_records(value: Any) -> Any:
    """Copies a value and the records in it."""
    if isinstance(value, Record):
        return copy_record(value)
    if type(value) is dict:
        return {name: _copy_records(item) for name, item in value.items()}
    return tuple(map(_copy_records, value)) if type(value) is tuple else value


def replaced(record: R, values: Mapping[str, Any]) -> R:
    """Returns a copy of a record and of all records in it, with new values by path.

    The values are not checked. They can be traced by jax, like the arguments of a program.
    """
    new = copy_record(record)
    for path, value in values.items():
        *parents, name = path.split('.')
        setattr(functools.reduce(getattr, parents, new), name, value)
    return new


def differences(old: Any, new: Any, where: str = '') -> list[str]:
    """Returns a line `field: old -> new` for each difference between two results of `to_dict`."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return [] if old == new else [f'{where}: {old!r} -> {new!r}']
    lines = []
    for name in sorted({*old, *new}):
        path = f'{where}.{name}' if where else name
        lines += differences(old.get(name, '(absent)'), new.get(name, '(absent)'), path)
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


def parse(options: tuple[Any, ...], value: Any, where: str) -> Any:
    """Parses a Python or JSON value of a field that may have any of these types.

    The first type that fits is used (see `field_options`). A record is returned as a validated
    copy. Raises UserError, whose message starts with `where`, if the value has another type.
    """
    if isinstance(value, dict) and not _is_function_name(value):
        if kinds := record_types(options):
            return _parse_record(kinds, value, where)
    for option in options:
        if option is Any or type(value) is option:  # the option for None is NoneType
            return validate_copy(value, where=where) if isinstance(value, Record) else value
        if _is_convertible(option, value):
            return _convert(option, value, where)
    raise UserError(f'{where}={value!r}: expected {_format_options(options)}')


def _is_function_name(value: Any) -> bool:
    """Returns whether a value is the JSON of a function (see `to_dict`)."""
    return isinstance(value, dict) and [*value] == ['function']


def _parse_record(kinds: Mapping[str, Any], values: dict[str, Any], where: str) -> Any:
    """Creates a record of one of these classes from the result of `to_dict`."""
    if len(kinds) == 1:
        (cls,) = kinds.values()
        return from_dict(cls, values, where=where)
    kind = values.get('kind', '')
    if not isinstance(kind, str) or kind not in kinds:
        raise UserError(f'{where}.kind={kind!r}: expected one of {", ".join(kinds)}')
    fields = {name: value for name, value in values.items() if name != 'kind'}
    return from_dict(kinds[kind], fields, where=where)


def _is_convertible(option: Any, value: Any) -> bool:
    """Returns whether `_convert` accepts a value, whose items may still be wrong."""
    origin = typing.get_origin(option)
    if origin is Literal:
        choices = typing.get_args(option)
        return type(value) in map(type, choices) and value in choices
    if origin is tuple:
        is_size = option == tuple[int, int] and type(value) is int
        return is_size or isinstance(value, tuple | list)
    if origin is dict:
        return isinstance(value, dict)
    if origin is Callable:
        return callable(value) or _is_function_name(value)
    return option is float and type(value) is int


def _convert(option: Any, value: Any, where: str) -> Any:
    """Converts a value and its items to a type that is not a class, or to float."""
    origin = typing.get_origin(option)
    if origin is tuple:
        return _convert_tuple(option, value, where)
    if origin is dict:
        keys, items = map(union_members, typing.get_args(option))
        return {
            parse(keys, key, where): parse(items, item, f'{where}.{key}')
            for key, item in value.items()
        }
    if origin is Callable:
        return UnresolvedFunction(value['function']) if _is_function_name(value) else value
    return float(value) if option is float else value


def _convert_tuple(option: Any, value: Any, where: str) -> tuple[Any, ...]:
    """Converts the items of a tuple or list, or the number that is both sides of a size."""
    if type(value) is int:
        return value, value
    hints = typing.get_args(option)
    if hints[-1] is Ellipsis:
        hints = hints[:1] * len(value)
    if len(hints) != len(value):
        raise UserError(f'{where}={tuple(value)!r}: expected {option}')
    items = []
    for index, (hint, item) in enumerate(zip(hints, value, strict=True)):
        items.append(parse(union_members(hint), item, f'{where}[{index}]'))
    return tuple(items)


def format_type(hint: Any) -> str:
    """Formats a type as messages and help show it, such as `cls|gap or none`."""
    if hint is type(None):
        return 'none'
    if len(options := union_members(hint)) > 1:
        return _format_options(options)
    origin = typing.get_origin(hint)
    if origin is Literal:
        return '|'.join(map(str, typing.get_args(hint)))
    if origin is Callable:
        return 'function'
    return re.sub(r'\b\w+\.', '', str(hint)) if origin else str(hint.__name__)


def _format_options(options: Iterable[Any]) -> str:
    return ' or '.join(map(format_type, options))
