"""Pictures without matplotlib: a contact sheet of images, and a confusion matrix.

OpenCV brings the fonts: names of classes are shown in most scripts, on any machine.
"""

from collections.abc import Sequence
from typing import Literal

import cv2
import numpy as np
from PIL import Image

from vit_jax.base import Float, Int, UInt8

_TEXT, _WEIGHT, _LINE = 12, 400, 15  # letters: pixels, thickness; height of a line
_NAME_WIDTH = 170  # pixels at most
_HEAD_HEIGHT, _LEAST_SIDE, _FRAME = 24, 96, 2  # of the contact sheet
_LONGEST = 2000  # side of the matrix, in pixels
_WHITE, _DARK, _GREY = np.array([255, 255, 255]), np.array([8, 48, 107]), (128, 128, 128)

Pixels = UInt8[np.ndarray, 'h w 3']


def contact_sheet(
    rows: Sequence[tuple[str, Sequence[np.ndarray]]], heads: Sequence[str]
) -> Image.Image:
    """Draws named rows of images of one size, small ones enlarged, under the titles `heads`."""
    height, width = rows[0][1][0].shape[:2]
    scale = max(1, -(-_LEAST_SIDE // min(height, width)))
    height, width = scale * height + 2 * _FRAME, scale * width + 2 * _FRAME
    sheet = _blank(_HEAD_HEIGHT + len(rows) * height, _NAME_WIDTH + len(heads) * width)
    for column, head in enumerate(heads):
        _write(sheet, head, (_NAME_WIDTH + column * width + 4, _HEAD_HEIGHT // 2))
    for row, (name, images) in enumerate(rows):
        top = _HEAD_HEIGHT + row * height
        _write(sheet, _shorten(name, _NAME_WIDTH - 8), (4, top + height // 2))
        for column, image in enumerate(images):
            tile = image.repeat(scale, axis=0).repeat(scale, axis=1)
            y, x = top + _FRAME, _NAME_WIDTH + column * width + _FRAME
            sheet[y : y + len(tile), x : x + tile.shape[1]] = tile
    return Image.fromarray(sheet)


def confusion_matrix(matrix: Int[np.ndarray, 'k k'], names: Sequence[str]) -> Image.Image:
    """Draws a cell for each pair of classes, the darker the larger its share of the row.

    Cells have percentages if they are large enough. If not all names fit, every so many-th is
    written. More than 2,000 classes share cells with their neighbors.
    """
    together = -(-len(matrix) // _LONGEST)
    starts = np.arange(0, len(matrix), together)
    cells = np.add.reduceat(np.add.reduceat(matrix, starts, axis=0), starts, axis=1)
    shares = cells / np.maximum(1, cells.sum(axis=1, keepdims=True))
    cell = max(1, min(48, _LONGEST // len(cells)))
    every = -(-_LINE // cell)
    shown = [
        (cell * i, _shorten(names[int(starts[i])], _NAME_WIDTH))
        for i in range(0, len(cells), every)
    ]
    margin = 12 + max(_text_width(name) for _, name in shown)
    side, has_numbers = cell * len(cells), cell >= 30
    numbers = 'numbers: percent of the row' if has_numbers else 'dark: a large share of the row'
    text = f'rows: true class; columns: prediction; {numbers}'
    image = _blank(margin + side + 2 * _LINE, max(margin + side, _text_width(text)) + 8)
    above = _blank(side, margin)
    for at, name in shown:
        middle = at + (cell if cell >= _LINE else _LINE) // 2
        _write(image, name, (margin - 6, margin + middle), 'right')
        _write(above, name, (6, middle))
        if every > 1:
            image[margin + at, margin - 4 : margin] = image[margin - 4 : margin, margin + at] = 0
    turned = np.rot90(above)
    image[: margin - 4, margin : margin + side] = turned[: margin - 4]
    cv2.rectangle(image, (margin - 1, margin - 1), (margin + side, margin + side), _GREY)
    image[margin : margin + side, margin : margin + side] = _colored(shares, cell)
    for i, j in np.argwhere(shares >= 0.005).tolist() if has_numbers else ():
        place = margin + cell * j + cell // 2, margin + cell * i + cell // 2
        color = 255 if shares[i, j] > 0.25 else 0
        _write(image, f'{100 * shares[i, j]:.0f}', place, 'center', color)
    _write(image, text, (6, margin + side + _LINE))
    return Image.fromarray(image)


def _colored(shares: Float[np.ndarray, 'k k'], cell: int) -> Pixels:
    """Returns squares of `cell` pixels: white for zero, visibly darker for the smallest share."""
    depth = np.where(shares > 0, 0.3 + 0.7 * np.sqrt(shares), 0)[..., None]
    pixels: Pixels = np.rint(_WHITE + depth * (_DARK - _WHITE)).astype(np.uint8)
    return pixels.repeat(cell, axis=0).repeat(cell, axis=1)


def _blank(height: int, width: int) -> Pixels:
    return np.full((height, width, 3), 255, np.uint8)


def _printable(text: str) -> str:
    """Replaces characters that cannot be drawn, such as bytes of a name that is not UTF-8."""
    return ''.join(letter if letter.isprintable() else '?' for letter in text)


def _text_width(text: str) -> int:
    """Returns the width of the drawn text in pixels."""
    font = cv2.FontFace('sans')
    return int(cv2.getTextSize((0, 0), _printable(text), (0, 0), font, _TEXT, _WEIGHT)[2])


def _shorten(text: str, width: int) -> str:
    """Returns the text, cut and ended with three dots if it is wider than `width` pixels."""
    kept = len(text)
    while kept and _text_width(text[:kept] + '...' * (kept < len(text))) > width:
        kept -= 1
    return text[:kept] + '...' * (kept < len(text))


def _write(
    image: Pixels,
    text: str,
    place: tuple[int, int],
    align: Literal['left', 'center', 'right'] = 'left',
    color: int = 0,
) -> None:
    """Writes into the image at `place`: (x, y), with y the middle of the line."""
    x = place[0] - {'left': 0, 'center': _text_width(text) // 2, 'right': _text_width(text)}[align]
    baseline = place[1] + _TEXT // 3
    font = cv2.FontFace('sans')
    cv2.putText(image, _printable(text), (x, baseline), (color,) * 3, font, _TEXT, _WEIGHT)
