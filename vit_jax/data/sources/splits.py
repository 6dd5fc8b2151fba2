"""Splits by name, cut and joined, in the words of TFDS: `train[:800]+validation[:200]`."""

import re
from collections.abc import Callable

from vit_jax.base import UserError, counted
from vit_jax.data.sources.base import Source, joined, select

_EXPECTED = 'expected a name, or NAME[:90%], NAME[90%:], NAME[10:20], or several joined by +'


def taken(split: str, whole: Callable[[str], Source], *, of: str) -> Source:
    """The images of `NAME`, of a slice `NAME[10%:200]`, or of several of these joined by `+`.

    `whole` opens the split of a name, `of` names the data in messages. Raises UserError for an
    empty slice, and where splits of different classes are joined.
    """
    parts = [_part(text.strip(), split, whole, of) for text in split.split('+')]
    for part in parts[1:]:
        if (part.class_names, part.multi_label) != (parts[0].class_names, parts[0].multi_label):
            raise UserError(f'split {split!r} of {of}: its parts have different classes')
    return joined(parts) if len(parts) > 1 else parts[0]


def split_names(split: str) -> list[str]:
    """The names in it, without their slices."""
    return [text.partition('[')[0].strip() for text in split.split('+')]


def _part(text: str, split: str, whole: Callable[[str], Source], of: str) -> Source:
    match = re.fullmatch(r'([^\[\]]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?', text)
    if not match:
        raise UserError(f'split {split!r}: {_EXPECTED}')
    name, *bounds = match.groups()
    source = whole(name)
    start, stop = (None if bound is None else _index(bound, len(source)) for bound in bounds)
    selected = range(len(source))[start:stop]
    if not selected:
        there = f'{name} has {counted(len(source), "image")}'
        raise UserError(f'split {text!r} of {of} is empty: {there}')
    return source if len(selected) == len(source) else select(source, selected)


def _index(bound: str, length: int) -> int:
    return round(int(bound[:-1]) * length / 100) if bound[-1] == '%' else int(bound)
