"""Records: dataclasses of plain values that check themselves and are kept as JSON.

Every configuration and every checkpoint card is one. They are not frozen, because configurations
and the command line assign to their fields; `checked` looks at what was assigned.
"""

import collections.abc
import contextlib
import dataclasses
import difflib
import functools
import hashlib
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, TypeVar

from vit_jax.base.errors import UserError

R = TypeVar('R')
_LISTED = 60  # names in a message: all taps of a network, not a thousand classes


class Record:
    """The base of dataclasses that are checked when they are made: UserError names the field.

    Assigning to a field that does not exist raises UserError too. First the types are looked at,
    which for `Literal['adamw', 'sgd']` are the choices, then what `check` says. One number for a
    `tuple[int, int]`, a size (height, width), is that of both sides.
    """

    def __new__(cls, *_: Any, **values: Any) -> Any:
        _require_known(values, hints(cls), cls.__name__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, hint in hints(type(self)).items():
            where = f'{type(self).__name__}.{name}'
            setattr(self, name, read(hint, getattr(self, name), where, again=False))
        try:
            self.check()
        except UserError as error:
            raise UserError(f'{type(self).__name__}.{error}') from error

    if not typing.TYPE_CHECKING:  # where it would allow any name

        def __setattr__(self, name: str, value: Any) -> None:
            _require_known([name], hints(type(self)), type(self).__name__)
            super().__setattr__(name, value)

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
    """Raises UserError unless low <= number <= high, above < number < below in these fields.

    None, words and numbers in tuples are allowed; NaN is not.
    """
    bounds = {'at least': low, 'more than': above, 'at most': high, 'less than': below}
    wanted = ' and '.join(
        f'{w} {b if isinstance(b, int) else f"{b:g}"}'
        for w, b in bounds.items()
        if abs(b) != float('inf')
    )
    for name in names:
        value = getattr(record, name)
        values = value if isinstance(value, tuple) else (value,)
        numbers = [n for n in values if n is not None and not isinstance(n, str)]
        fits = all(low <= n <= high and above < n < below for n in numbers)
        infinite = any(isinstance(n, float) and not math.isfinite(n) for n in numbers)
        finite = ', a finite number' if infinite else ''
        require(fits, f'{name}={value!r}: expected {wanted}{finite}')


def require_pattern(pattern: str) -> None:
    """Raises UserError for what is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f'{pattern!r} is no regular expression: {error}') from error


def hints(cls: Any) -> Mapping[str, Any]:
    """The type of each field of a record, by name."""
    return _hints(cls)


def _hints_of(cls: Any) -> Mapping[str, Any]:
    known = typing.get_type_hints(cls)
    return types.MappingProxyType({each.name: known[each.name] for each in dataclasses.fields(cls)})


_hints: Callable[[Any], Mapping[str, Any]] = functools.cache(_hints_of)


def _require_known(names: Iterable[str], known: Collection[str], where: str) -> None:
    for name in names:
        if name not in known:
            raise UserError(f'{where}.{name}: no such field; {nearest(name, known)}')


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: what was probably meant."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    listed = [*known[:_LISTED], *(['...'] if len(known) > _LISTED else [])]
    return f'did you mean {close[0]!r}?' if close else f'known: {", ".join(listed) or "none"}'


def to_dict(record: Any) -> dict[str, Any]:
    """The record as JSON values. A field that may hold several kinds of record names its kind."""
    known = hints(type(record)).items()
    return {name: _to_plain(getattr(record, name), hint) for name, hint in known}


def from_dict(cls: type[R], values: dict[str, Any], *, where: str) -> R:
    """The record of type `cls` with these values: the inverse of `to_dict`.

    Raises UserError that names `where.field`, for an unknown field or a value that it cannot have.
    """
    known = hints(cls)
    _require_known(values, known, where)
    values = {name: read(known[name], v, f'{where}.{name}') for name, v in values.items()}
    try:
        return cls(**values)
    except TypeError as error:  # a field without a default is absent
        raise UserError(f'{where}: {error}') from error
    except UserError as error:  # of `check`, which does not know where the record stands
        raise UserError(f'{where}{str(error).removeprefix(cls.__name__)}') from error


def checked(record: R, *, where: str) -> R:
    """The same record with every value checked, whole numbers made floats where floats belong."""
    return from_dict(type(record), vars(record), where=where)


def with_values(record: R, values: Mapping[str, Any], *, where: str) -> R:
    """A copy with other values of fields, which are named from the record on: `model.depth`.

    Raises UserError, with the nearest name, for a field that is not there or a value that it
    cannot have.
    """
    copy = checked(record, where=where)
    for path, value in values.items():
        holder, at = copy, where
        *parents, name = path.split('.')
        for parent in parents:
            _hint(holder, parent, at)
            holder, at = getattr(holder, parent), f'{at}.{parent}'
        setattr(holder, name, read(_hint(holder, name, at), value, f'{at}.{name}'))
    return checked(copy, where=where)


def _hint(holder: Any, name: str, where: str) -> Any:
    """The type of a field. Raises UserError where there is none of this name."""
    require(isinstance(holder, Record), f'{where}={holder!r} has no field {name!r}')
    _require_known([name], hints(type(holder)), where)
    return hints(type(holder))[name]


def differences(old: Any, new: Any, where: str = '') -> list[str]:
    """One line `field: old -> new` for each leaf in which two `to_dict` results differ."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return [] if old == new else [f'{where}: {old!r} -> {new!r}']
    lines = []
    for name in sorted({*old, *new}):
        was, now = old.get(name, '(absent)'), new.get(name, '(absent)')
        lines += differences(was, now, f'{where}.{name}' if where else name)
    return lines


def record_types(options: Iterable[Any]) -> dict[str, Any]:
    """The records among these types, by name."""
    return {t.__name__: t for t in options if isinstance(t, type) and issubclass(t, Record)}


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


def text_of(value: str | Callable[..., Any]) -> str:
    """A text as it is, of a function MODULE:NAME, for people and for comparisons.

    A function without a name of its own (a lambda) is told from others by a digest of its source,
    if its source is available. A function from `eval` has no source: Python 3.13 would return that
    of `python -c`.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Elsewhere):
        return value.name
    owner = value if hasattr(value, '__qualname__') else type(value)
    name = f'{owner.__module__}:{owner.__qualname__}'
    if '<' not in name:
        return name
    with contextlib.suppress(OSError, TypeError):  # typed in, or computed
        if inspect.getfile(owner) != '<string>':
            name += '#' + hashlib.sha256(inspect.getsource(owner).encode()).hexdigest()[:8]
    return name


def _to_plain(value: Any, hint: Any) -> Any:
    if isinstance(value, Record):
        several = len(record_types(alternatives(hint))) > 1
        return ({'kind': type(value).__name__} if several else {}) | to_dict(value)
    if isinstance(value, tuple | list):
        return [_to_plain(item, type(item)) for item in value]
    if isinstance(value, dict):
        return {name: _to_plain(item, type(item)) for name, item in value.items()}
    return {'function': text_of(value)} if callable(value) else value


def read(hint: Any, value: Any, where: str, *, again: bool = True) -> Any:
    """The value of a field of this type from its JSON value. UserError where it cannot be one.

    Records are checked `again`, as their fields may have been assigned since they were made.
    """
    options = alternatives(hint)
    kinds = record_types(options)
    named = isinstance(value, dict) and [*value] == ['function']
    if isinstance(value, dict) and kinds and not named:
        kind = next(iter(kinds))
        if len(kinds) > 1:
            kind = value.get('kind', '')
            require(kind in kinds, f'{where}.kind={kind!r}: expected one of {", ".join(kinds)}')
            value = {name: one for name, one in value.items() if name != 'kind'}
        return from_dict(kinds[kind], value, where=where)
    if hint is Any:
        return value
    for option in options:
        origin, items = typing.get_origin(option), typing.get_args(option)
        if items == (int, int) and origin is tuple and type(value) is int:
            return value, value
        if origin is tuple and isinstance(value, tuple | list):
            items = (items[0],) * len(value) if items[-1] is Ellipsis else items
            require(len(items) == len(value), f'{where}={tuple(value)!r}: expected {option}')
            places = ((items[i], v, f'{where}[{i}]') for i, v in enumerate(value))
            return tuple(read(*place, again=again) for place in places)
        if origin is dict and isinstance(value, dict):
            key, item = items
            own = {k: read(item, v, f'{where}.{k}', again=again) for k, v in value.items()}
            return {read(key, k, where): v for k, v in own.items()}
        if option is float and type(value) is int:
            return float(value)
        if type(value) is option:  # NoneType too
            return checked(value, where=where) if again and option in kinds.values() else value
        if origin is Literal and type(value) in map(type, items) and value in items:
            return value
        if origin is collections.abc.Callable and (named or callable(value)):
            return Elsewhere(value['function']) if named else value
    raise UserError(f'{where}={value!r}: expected {_names(options)}')


def _names(options: Iterable[Any]) -> str:
    values: list[str] = []
    kinds: list[str] = []
    for hint in options:
        if typing.get_origin(hint) is Literal:
            values += map(str, typing.get_args(hint))
        else:
            kinds.append(_name(hint))
    if values:
        kinds.insert(0, f'one of {", ".join(values)}' if len(values) > 1 else values[0])
    return ' or '.join(kinds)


def _name(hint: Any) -> str:
    if hint is type(None):
        return 'nothing'
    origin = typing.get_origin(hint)
    if origin is collections.abc.Callable:
        return 'a function'
    return str(hint) if origin else hint.__name__
