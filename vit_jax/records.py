"""Records: dataclasses of plain values that are checked by type and kept as JSON.

Every configuration and every checkpoint card is one. They are not frozen, because the command
line assigns to their fields; nothing else does.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

R = TypeVar('R')


def choice(default: str, *others: str) -> Any:
    """A string field that must be one of the given values; the first is the default."""
    return dataclasses.field(default=default, metadata={'choices': (default, *others)})


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: what was probably meant."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f'did you mean {close[0]!r}?' if close else f'known: {", ".join(known)}'


def to_dict(record: Any) -> dict[str, Any]:
    """The record as JSON values. A field that may hold several kinds of record names its kind."""
    hints = typing.get_type_hints(type(record))
    return {
        field.name: _to_plain(getattr(record, field.name), hints[field.name])
        for field in dataclasses.fields(record)
    }


def from_dict(cls: type[R], values: dict[str, Any], *, where: str) -> R:
    """The record of type `cls` with these values: the inverse of `to_dict`.

    Raises ValueError, naming the field as `where.field`, for an unknown field, a value of another
    type, or one that is not among the field's choices.
    """
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            raise ValueError(f'{where}.{name}: no such field; {nearest(name, fields)}')
    read = {}
    for name, value in values.items():
        read[name] = _read(hints[name], value, f'{where}.{name}')
        choices = fields[name].metadata.get('choices')
        if choices and read[name] not in choices:
            raise ValueError(f'{where}.{name}={value!r}: expected one of {", ".join(choices)}')
    try:
        return cls(**read)
    except TypeError as error:  # a field without a default is absent
        raise ValueError(f'{where}: {error}') from error


def checked(record: R, *, where: str) -> R:
    """The same record with every value checked, whole numbers made floats where floats belong."""
    return from_dict(type(record), to_dict(record), where=where)


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
    types_ = (t for t in _alternatives(hint) if isinstance(t, type))
    return [t for t in types_ if dataclasses.is_dataclass(t)]


def _alternatives(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _to_plain(value: Any, hint: Any) -> Any:
    if dataclasses.is_dataclass(value):
        kind = {'kind': type(value).__name__} if len(_record_types(hint)) > 1 else {}
        return kind | to_dict(value)
    if isinstance(value, tuple | list):
        return [_to_plain(item, type(item)) for item in value]
    if isinstance(value, dict):
        return {name: _to_plain(item, type(item)) for name, item in value.items()}
    return value


def _read(hint: Any, value: Any, where: str) -> Any:
    options = _alternatives(hint)
    records = _record_types(hint)
    if value is None and type(None) in options:
        return None
    if isinstance(value, dict) and records:
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
    expected = ' or '.join(_name(option) for option in options)
    raise ValueError(f'{where}={value!r}: expected {expected}')


def _read_record(records: list[type], value: dict[str, Any], where: str) -> Any:
    if len(records) == 1:
        return from_dict(records[0], value, where=where)
    kinds = {record.__name__: record for record in records}
    kind = value.get('kind', records[0].__name__)  # the others came later
    if kind not in kinds:
        raise ValueError(f'{where}.kind={kind!r}: expected one of {", ".join(kinds)}')
    return from_dict(kinds[kind], {k: v for k, v in value.items() if k != 'kind'}, where=where)


def _read_tuple(hint: Any, value: Sequence[Any], where: str) -> tuple[Any, ...]:
    items = typing.get_args(hint)
    if items[-1] is Ellipsis:
        items = (items[0],) * len(value)
    if len(items) != len(value):
        raise ValueError(f'{where}={tuple(value)!r}: expected {_name(hint)}')
    return tuple(
        _read(item, v, f'{where}[{i}]')
        for i, (item, v) in enumerate(zip(items, value, strict=True))
    )


def _name(hint: Any) -> str:
    if hint is type(None):
        return 'nothing'
    return str(hint) if typing.get_origin(hint) else hint.__name__
