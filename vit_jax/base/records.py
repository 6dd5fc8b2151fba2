"""Records: dataclasses of plain values that check themselves and are kept as JSON.

Every configuration and every checkpoint card is one. A record is checked when it is made. Fields
can be assigned, as configuration files and the command line do: `checked` makes a checked copy.
"""

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

from vit_jax.base.errors import UserError

R = TypeVar('R')


class Record:
    """The base of dataclasses that check their values when they are made.

    A value has the type of its field, which for `Literal['adamw', 'sgd']` lists the choices. One
    number for a `tuple[int, int]`, a size (height, width), stands for both sides. A record within
    another one is copied.

    Raises:
      UserError: That names the field, for a value of another type, and values that `check` rejects.
        Assigning an unknown field raises it too.
    """

    def __post_init__(self) -> None:
        own = type(self).__name__
        values = vars(self)
        for name, hint in hints(type(self)).items():
            values[name] = read(hint, values[name], f'{own}.{name}')
        try:
            self.check()
        except UserError as error:
            raise UserError(f'{own}.{error}') from error

    if not typing.TYPE_CHECKING:  # where it would allow any name

        def __setattr__(self, name: str, value: Any) -> None:
            field_type(type(self), name, type(self).__name__)
            super().__setattr__(name, value)

    def check(self) -> None:
        """Raises UserError, beginning with the field, for values that make no sense."""

    def override(self, name: str, value: Any) -> None:
        """Assigns a field by its name, as the command line and a study do."""
        setattr(self, name, value)


def require(condition: bool, message: str) -> None:
    """Raises UserError with the message where the condition does not hold."""
    if not condition:
        raise UserError(message)


_BOUNDS = {
    'low': ('at least', operator.ge),
    'above': ('more than', operator.gt),
    'high': ('at most', operator.le),
    'below': ('less than', operator.lt),
}


def require_between(record: Any, *names: str, **bounds: float) -> None:
    """Raises UserError unless low <= number <= high, above < number < below in these fields.

    Takes any of these four bounds. None, words and numbers in tuples are allowed; infinite numbers
    and NaN are not.
    """
    wanted = ' and '.join(f'{_BOUNDS[kind][0]} {bound}' for kind, bound in bounds.items())
    for name in names:
        value = getattr(record, name)
        values = value if isinstance(value, tuple) else (value,)
        numbers = [n for n in values if n is not None and not isinstance(n, str)]
        fits = all(_BOUNDS[kind][1](n, bounds[kind]) for n in numbers for kind in bounds)
        is_finite = all(abs(n) < math.inf for n in numbers)
        require(fits and is_finite, f'{name}={value!r}: expected {wanted}')


def require_pattern(pattern: str) -> None:
    """Raises UserError unless the pattern is a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f'{pattern!r} is no regular expression: {error}') from error


def _read_hints(cls: Any) -> Mapping[str, Any]:
    known = typing.get_type_hints(cls)
    return {each.name: known[each.name] for each in dataclasses.fields(cls)}


#: Returns the type of each field of a record, by name.
hints: Callable[[Any], Mapping[str, Any]] = functools.cache(_read_hints)


def field_type(cls: Any, name: str, where: str) -> Any:
    """Returns the type of a field. Raises UserError, with the nearest name, if it is unknown."""
    known = hints(cls)
    if name not in known:
        raise UserError(f'{where}.{name}: no such field; {nearest(name, known)}')
    return known[name]


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message about an unknown name: what was probably meant."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f'did you mean {close[0]!r}?' if close else f'known: {", ".join(known[:60]) or "none"}'


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Returns the types that a field may have: the types of a union, or the one."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def record_types(options: Iterable[Any]) -> dict[str, Any]:
    """Returns the records among these types, by name."""
    return {t.__name__: t for t in options if isinstance(t, type) and issubclass(t, Record)}


def to_dict(record: Any) -> dict[str, Any]:
    """Returns the record as JSON values. If a field may hold several kinds, it names its kind."""
    known = hints(type(record)).items()
    return {name: _to_plain(getattr(record, name), hint) for name, hint in known}


def _to_plain(value: Any, hint: Any) -> Any:
    if isinstance(value, Record):
        several = len(record_types(alternatives(hint))) > 1
        return ({'kind': type(value).__name__} if several else {}) | to_dict(value)
    if isinstance(value, tuple | list):
        return [_to_plain(item, type(item)) for item in value]
    if isinstance(value, dict):
        return {name: _to_plain(item, type(item)) for name, item in value.items()}
    return {'function': text_of(value)} if callable(value) else value


def from_dict(cls: type[R], values: dict[str, Any], *, where: str) -> R:
    """Returns the record of type `cls` with these JSON values: the inverse of `to_dict`.

    Raises:
      UserError: That names `where.field`, as described in `Record`, and for a missing value.
    """
    own = {}
    for name, value in values.items():  # the new record copies the records among its values
        own[name] = read(field_type(cls, name, where), value, f'{where}.{name}', copies=False)
    try:
        return cls(**own)
    except TypeError as error:  # a field without a default is absent
        raise UserError(f'{where}: {error}') from error
    except UserError as error:
        raise UserError(f'{where}{str(error).removeprefix(cls.__name__)}') from error


def checked(record: R, *, where: str) -> R:
    """Returns a checked copy of a record and all records in it."""
    return from_dict(type(record), vars(record), where=where)


def with_values(record: R, values: Mapping[str, Any], *, where: str) -> R:
    """Returns a checked copy with other values of fields, which have paths such as `model.depth`.

    Raises UserError for an unknown field or a value that it cannot have.
    """
    copy = checked(record, where=where)
    for path, value in values.items():
        *parents, name = path.split('.')
        holder: Any = copy
        for parent in parents:
            holder = getattr(holder, parent, None)
        require(isinstance(holder, Record), f'{where}.{path}: no such field')
        holder.override(name, value)
    return checked(copy, where=where)


def differences(old: Any, new: Any, where: str = '') -> list[str]:
    """Returns a line `field: old -> new` for each leaf in which two `to_dict` results differ."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return [] if old == new else [f'{where}: {old!r} -> {new!r}']
    lines = []
    for name in sorted({*old, *new}):
        was, now = old.get(name, '(absent)'), new.get(name, '(absent)')
        lines += differences(was, now, f'{where}.{name}' if where else name)
    return lines


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """A function of which only the name was kept, because text cannot hold it."""

    name: str  # MODULE:NAME

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise UserError(f'the function {self.name} is not in the file, which only names it')


def text_of(value: str | Callable[..., Any]) -> str:
    """Returns a text as it is, of a function MODULE:NAME, for people and for comparisons."""
    if isinstance(value, str):
        return value
    if isinstance(value, Elsewhere):
        return value.name
    owner = value if hasattr(value, '__qualname__') else type(value)
    return f'{owner.__module__}:{owner.__qualname__}'


def read(hint: Any, value: Any, where: str, *, copies: bool = True) -> Any:
    """Returns the value of a field of this type from a value of the type or its JSON value.

    Returns a checked copy of a record, or the record itself if `copies` is False.
    Raises UserError, which begins with `where`, for any other value.
    """
    options = alternatives(hint)
    kinds = record_types(options)
    is_name = isinstance(value, dict) and [*value] == ['function']
    if isinstance(value, dict) and kinds and not is_name:
        kind = next(iter(kinds)) if len(kinds) == 1 else value.get('kind', '')
        require(kind in kinds, f'{where}.kind={kind!r}: expected one of {", ".join(kinds)}')
        own = {k: v for k, v in value.items() if k != 'kind' or len(kinds) == 1}
        return from_dict(kinds[kind], own, where=where)
    for option in options:
        origin, items = typing.get_origin(option), typing.get_args(option)
        if items == (int, int) and origin is tuple and type(value) is int:
            return value, value
        if origin is tuple and isinstance(value, tuple | list):
            items = (items[0],) * len(value) if items[-1] is Ellipsis else items
            require(len(items) == len(value), f'{where}={tuple(value)!r}: expected {option}')
            pairs = enumerate(zip(items, value, strict=True))
            return tuple(read(item, each, f'{where}[{i}]') for i, (item, each) in pairs)
        if origin is dict and isinstance(value, dict):
            key, item = items
            return {read(key, k, where): read(item, v, f'{where}.{k}') for k, v in value.items()}
        if option is float and type(value) is int:
            return float(value)
        if option is Any or type(value) is option:  # NoneType too
            is_record = isinstance(value, Record)
            return checked(value, where=where) if is_record and copies else value
        if origin is Literal and type(value) in map(type, items) and value in items:
            return value
        if origin is Callable and (is_name or callable(value)):
            return Elsewhere(value['function']) if is_name else value
    raise UserError(f'{where}={value!r}: expected {type_text(hint)}')


def type_text(hint: Any) -> str:
    """Returns a type as the command line writes it, such as `cls|gap or none`."""
    if hint is type(None):
        return 'none'
    if len(options := alternatives(hint)) > 1:
        return ' or '.join(map(type_text, options))
    origin = typing.get_origin(hint)
    if origin is Literal:
        return '|'.join(map(str, typing.get_args(hint)))
    if origin is Callable:
        return 'function'
    return re.sub(r'\b\w+\.', '', str(hint)) if origin else str(hint.__name__)
