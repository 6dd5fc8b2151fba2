"""JSON objects: the descriptions beside arrays, and those within files of arrays."""

import json
import os
import pathlib
from typing import Any

from vit_jax.base import UserError, require

_LONGEST = 2**23  # bytes; an index of the arrays of the largest ViT has a hundredth of that
_DIGITS = 20  # of a whole number: the largest that means anything has 64 bits


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file beside arrays; {} where there is no such file.

    Raises UserError, which does not name the path, for what is there and is none: also for a link
    to nowhere, as a cache holds that was copied without what its links lead to.
    """
    if not os.path.lexists(path):
        return {}
    require(path.is_file(), 'expected a file, but it is a folder, or a link that leads to none')
    check_length(path.stat().st_size)
    return json_object(path.read_text())


def json_object(text: str) -> dict[str, Any]:
    """The JSON object that a text holds. Raises UserError for other values, and within it for whole
    numbers that no field can have, and for texts that are no Unicode."""
    values = json.loads(text, parse_int=_whole)
    require(isinstance(values, dict), f'expected a JSON object, not {repr(values)[:100]}')
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        odd = error.object[error.start : error.end]
        raise UserError(f'holds {odd!r}, half of a character') from error
    return values


def check_length(size: int) -> None:
    """Raises UserError for a description that is too long to be one of a network."""
    if size > _LONGEST:
        raise UserError(f'describes itself in {size:,} bytes, at most {_LONGEST:,} are read')


def _whole(text: str) -> int:
    require(len(text) <= _DIGITS, f'holds a whole number of {len(text):,} digits')
    return int(text)
