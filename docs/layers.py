"""Draws layers.svg from the table of allowed imports: python -m docs.layers."""

import pathlib

from tests.test_architecture import LAYERS

PICTURE = pathlib.Path(__file__).with_suffix('.svg')
# The purpose of each layer, in the order of LAYERS.
MEANINGS = (
    'parse flags, run, print results',
    'flags; figures',
    'memory of an experiment; sets of experiments',
    'one experiment: build, compile, run, report',
    'what a run learns, and how it is measured',
    'the typed configuration of an experiment',
    'accuracy, few-shot linear probe, other probes',
    'a model from any checkpoint',
    'saving, digests, formats of other libraries',
    'analysis; training; images and batches',
    'models; meshes and sharding',
    'records, names, errors, atomic file writes',
)
_WIDTH, _HEIGHT, _GAP, _MARGIN = 720, 56, 26, 16
_ROOM = 116  # a folder's width


def picture() -> str:
    """Draws a box with the folders of each layer; arrows show the direction of imports."""
    height = len(LAYERS) * (_HEIGHT + _GAP) - _GAP + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
        ' font-family="sans-serif" role="img">',
        '<title>The layers of vit_jax: each imports only from the layers below it</title>',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for place, (rooms, meaning) in enumerate(zip(LAYERS, MEANINGS, strict=True)):
        top = _MARGIN + place * (_HEIGHT + _GAP)
        parts += _layer(top, sorted(rooms), meaning)
        if place + 1 < len(LAYERS):
            parts += _arrow(top + _HEIGHT)
    return '\n'.join([*parts, '</svg>', ''])


def _layer(top: int, rooms: list[str], meaning: str) -> list[str]:
    inner = _WIDTH - 2 * _MARGIN
    parts = [
        f'<rect x="{_MARGIN}" y="{top}" width="{inner}" height="{_HEIGHT}" rx="8"'
        ' fill="#eef3fa" stroke="#7a93b8"/>',
        f'<text x="{_WIDTH / 2}" y="{top + _HEIGHT - 9}" font-size="12.5" fill="#44546a"'
        f' text-anchor="middle">{meaning}</text>',
    ]
    left = (_WIDTH - len(rooms) * (_ROOM + 10) + 10) / 2
    for place, room in enumerate(rooms):
        x = left + place * (_ROOM + 10)
        parts += [
            f'<rect x="{x:g}" y="{top + 7}" width="{_ROOM}" height="25" rx="5" fill="#ffffff"'
            ' stroke="#7a93b8"/>',
            f'<text x="{x + _ROOM / 2:g}" y="{top + 24}" font-size="14" fill="#10243e"'
            f' text-anchor="middle">{room}</text>',
        ]
    return parts


def _arrow(top: int) -> list[str]:
    x, end = _WIDTH / 2, top + _GAP
    return [
        f'<path d="M{x:g} {top + 3}V{end - 9}" stroke="#7a93b8" stroke-width="2"/>',
        f'<path d="M{x - 6:g} {end - 10}h12l-6 8z" fill="#7a93b8"/>',
    ]


if __name__ == '__main__':
    PICTURE.write_text(picture())
