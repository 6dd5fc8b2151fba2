"""Records: dataclasses of plain values that check themselves and are kept as JSON.

Every configuration and every checkpoint card is one. They are not frozen, because the command
line assigns to their fields; nothing else does, and `checked` looks at what was assigned.
"""

import collections.abc
import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

from vit_jax.base.errors import UserError

R = TypeVar('R')


class Record:
    """The base of dataclasses whose values are checked when they are made.

    The types of the fields are checked, which for `Literal['adamw', 'sgd']` are the choices, and
    then what `check` of the record says. Raises UserError that names the field.
    """

    def __post_init__(self) -> None:
        for name, hint in hints(type(self)).items():
            where = f'{type(self).__name__}.{name}'
            setattr(self, name, _read(hint, getattr(self, name), where))
        _check(self, type(self).__name__)

    def check(self) -> None:
        """Raises UserError, beginning with the field, for values that make no sense."""


def require(condition: bool, message: str) -> None:
    """Raises UserError with the message where the condition does not hold."""
    if not condition:
        raise UserError(message)


def require_between(
    record: Any,
    *names: str,
    low: int | float = float('-inf'),
    high: int | float = float('inf'),
    above: int | float = float('-inf'),
    below: int | float = float('inf'),
) -> None:
    """Raises UserError for a number of these fields outside low <= number <= high.

    `above` and `below` are bounds that the number itself must not reach. None and numbers in
    tuples are allowed; NaN is not.
    """
    bounds = {'at least': low, 'more than': above, 'at most': high, 'less than': below}
    said = ' and '.join(f'{w} {b:g}' for w, b in bounds.items() if abs(b) != float('inf'))
    for name in names:
        value = getattr(record, name)
        numbers = value if isinstance(value, tuple) else () if value is None else (value,)
        fits = all(low <= n <= high and above < n < below for n in numbers)
        require(fits, f'{name}={value!r}: expected {said}')


def _hints(cls: Any) -> dict[str, Any]:
    """The type of each field of a record, by name."""
    every = typing.get_type_hints(cls)
    return {field.name: every[field.name] for field in dataclasses.fields(cls)}


hints: Callable[[Any], dict[str, Any]] = functools.cache(_hints)


def _check(record: Any, where: str) -> None:
    try:
        record.check()
    except UserError as error:
        raise UserError(f'{where}.{error}') from error


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: what was probably meant."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f'did you mean {close[0]!r}?' if close else f'known: {", ".join(known)}'


def to_dict(record: Any) -> dict[str, Any]:
    """The record as JSON values. A field that may hold several kinds of record names its kind."""
    return {
        name: _to_plain(getattr(record, name), hint) for name, hint in hints(type(record)).items()
    }


def from_dict(cls: type[R], values: dict[str, Any], *, where: str) -> R:
    """The record of type `cls` with these values: the inverse of `to_dict`.

    Raises UserError, naming the field as `where.field`, for an unknown field, a value of another
    type, or one that is not among the field's choices.
    """
    known = hints(cls)
    for name in values:
        if name not in known:
            raise UserError(f'{where}.{name}: no such field; {nearest(name, known)}')
    read = {name: _read(known[name], v, f'{where}.{name}') for name, v in values.items()}
    try:
        return cls(**read)
    except TypeError as error:  # a field without a default is absent
        raise UserError(f'{where}: {error}') from error
    except UserError as error:  # of `check`, which does not know where the record stands
        raise UserError(f'{where}{str(error).removeprefix(cls.__name__)}') from error


def checked(record: R, *, where: str) -> R:
    """The same record with every value checked, whole numbers made floats where floats belong."""
    values = {
        name: _checked_within(getattr(record, name), f'{where}.{name}')
        for name in hints(type(record))
    }
    return from_dict(type(record), values, where=where)


def _checked_within(value: Any, where: str) -> Any:
    if isinstance(value, Record):
        return checked(value, where=where)
    if isinstance(value, dict):
        return {name: _checked_within(item, f'{where}.{name}') for name, item in value.items()}
    return value


def differences(old: Any, new: Any, where: str = '') -> list[str]:
    """One line `field: old -> new` for each leaf in which two `to_dict` results differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for name in sorted({*old, *new})
            for line in differences(
                old.get(name, '(absent)'),
                new.get(name, '(absent)'),
                f'{where}.{name}' if where else name,
            )
        ]
    return [] if old == new else [f'{where}: {old!r} -> {new!r}']


def _record_types(hint: Any) -> list[type]:
    return [t for t in alternatives(hint) if isinstance(t, type) and issubclass(t, Record)]


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types that a field may have: those of a union, or the one."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """A function of which only the name was kept, because text cannot hold it."""

    name: str  # MODULE:NAME

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise UserError(f'the function {self.name} is not in the file, which only names it')


def name_of(function: Callable[..., Any]) -> str:
    """MODULE:NAME of a function, for people and for comparisons."""
    if isinstance(function, Elsewhere):
        return function.name
    owner = function if hasattr(function, '__qualname__') else type(function)
    return f'{owner.__module__}:{owner.__qualname__}'


def text_of(value: str | Callable[..., Any]) -> str:
    """A text as it is, of a function its name."""
    return value if isinstance(value, str) else name_of(value)


def _to_plain(value: Any, hint: Any) -> Any:
    if isinstance(value, Record):
        kind = {'kind': type(value).__name__} if len(_record_types(hint)) > 1 else {}
        return kind | to_dict(value)
    if isinstance(value, tuple | list):
        return [_to_plain(item, type(item)) for item in value]
    if isinstance(value, dict):
        return {name: _to_plain(item, type(item)) for name, item in value.items()}
    return {'function': name_of(value)} if callable(value) else value


def _read(hint: Any, value: Any, where: str) -> Any:
    options = alternatives(hint)
    records = _record_types(hint)
    if value is None and type(None) in options:
        return None
    if isinstance(value, dict) and records and [*value] != ['function']:
        return _read_record(records, value, where)
    for option in options:
        if typing.get_origin(option) is tuple and isinstance(value, tuple | list):
            return _read_tuple(option, value, where)
        if typing.get_origin(option) is dict and isinstance(value, dict):
            key, item = typing.get_args(option)
            return {_read(key, k, where): _read(item, v, f'{where}.{k}') for k, v in value.items()}
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(option, type) and type(value) is option:
            return value
        if typing.get_origin(option) is Literal and value in typing.get_args(option):
            return value
        if typing.get_origin(option) is collections.abc.Callable:
            if callable(value):
                return value
            if isinstance(value, dict) and [*value] == ['function']:
                return Elsewhere(value['function'])
    expected = ' or '.join(_name(option) for option in options)
    raise UserError(f'{where}={value!r}: expected {expected}')


def _read_record(records: list[type], value: dict[str, Any], where: str) -> Any:
    if len(records) == 1:
        return from_dict(records[0], value, where=where)
    kinds = {record.__name__: record for record in records}
    kind = value.get('kind', records[0].__name__)  # the others came later
    if kind not in kinds:
        raise UserError(f'{where}.kind={kind!r}: expected one of {", ".join(kinds)}')
    return from_dict(kinds[kind], {k: v for k, v in value.items() if k != 'kind'}, where=where)


def _read_tuple(hint: Any, value: Sequence[Any], where: str) -> tuple[Any, ...]:
    items = typing.get_args(hint)
    if items[-1] is Ellipsis:
        items = (items[0],) * len(value)
    if len(items) != len(value):
        raise UserError(f'{where}={tuple(value)!r}: expected {_name(hint)}')
    return tuple(
        _read(item, v, f'{where}[{i}]')
        for i, (item, v) in enumerate(zip(items, value, strict=True))
    )


def _name(hint: Any) -> str:
    if hint is type(None):
        return 'nothing'
    if typing.get_origin(hint) is Literal:
        return f'one of {", ".join(map(str, typing.get_args(hint)))}'
    if typing.get_origin(hint) is collections.abc.Callable:
        return 'a function'
    return str(hint) if typing.get_origin(hint) else hint.__name__
