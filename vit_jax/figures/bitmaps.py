"""Draws pictures without matplotlib: contact sheets of images, and a confusion matrix.

The fonts are part of OpenCV, so that class names in most scripts can be drawn on any machine.
"""

from collections.abc import Sequence

import cv2
import numpy as np
from PIL import Image

from vit_jax.base import Float, Int, UInt8

# Lengths are in pixels.
_TEXT = 12  # font size
_WEIGHT = 400  # font weight
_LINE = 15  # line height
_NAME_WIDTH = 170  # maximum
_TILE = 192  # side of an image in the contact sheet
_GAP = 8  # distance of images in the contact sheet
_MAX_MATRIX_PIXELS = 2000  # maximum side of the matrix
_WHITE = np.array([255, 255, 255])
_DARK = np.array([8, 48, 107])
_GRAY = 128, 128, 128

Pixels = UInt8[np.ndarray, 'h w 3']


def draw_contact_sheet(
    tiles: Sequence[tuple[np.ndarray, Sequence[str]]], columns: int = 6
) -> Image.Image:
    """Draws images of any size, scaled to fit into equal squares, above their lines of text."""
    height = _TILE + _LINE * max(len(lines) for _, lines in tiles) + _GAP
    columns = min(columns, len(tiles))
    sheet = _blank(-(-len(tiles) // columns) * height + _GAP, columns * (_TILE + _GAP) + _GAP)
    for number, (image, lines) in enumerate(tiles):
        row, column = divmod(number, columns)
        top = row * height + _GAP
        left = column * (_TILE + _GAP) + _GAP
        scale = _TILE / max(image.shape[:2])
        h, w = (max(1, round(side * scale)) for side in image.shape[:2])
        method = cv2.INTER_NEAREST if scale > 2 else cv2.INTER_AREA
        y = top + (_TILE - h) // 2
        x = left + (_TILE - w) // 2
        sheet[y : y + h, x : x + w] = cv2.resize(image, (w, h), interpolation=method)
        middle = top + _TILE + _LINE // 2
        for line in lines:
            _write(sheet, _shorten(line, _TILE), left, middle)
            middle += _LINE
    return Image.fromarray(sheet)


def draw_confusion_matrix(matrix: Int[np.ndarray, 'k k'], names: Sequence[str]) -> Image.Image:
    """Draws a cell per pair of classes; darker cells have a larger share of their row.

    Large cells contain percentages. If there is no room for all names, every n-th is written. With
    more than 2,000 classes, neighboring classes share a cell.
    """
    per_cell = -(-len(matrix) // _MAX_MATRIX_PIXELS)
    starts = np.arange(0, len(matrix), per_cell)
    cells = np.add.reduceat(np.add.reduceat(matrix, starts, axis=0), starts, axis=1)
    shares = cells / np.maximum(1, cells.sum(axis=1, keepdims=True))
    cell = max(1, min(48, _MAX_MATRIX_PIXELS // len(cells)))
    shown = range(0, len(cells), -(-_LINE // cell))
    labels = [_shorten(names[int(starts[i])], _NAME_WIDTH) for i in shown]
    margin = 12 + max(map(_text_width, labels))
    side = cell * len(cells)
    caption = 'rows: true class; columns: prediction; numbers: percent of the row'
    image = _blank(margin + side + 2 * _LINE, max(margin + side, _text_width(caption)) + 8)
    above = _blank(side, margin)
    for i, name in zip(shown, labels, strict=True):
        middle = cell * i + max(cell, _LINE) // 2
        _write(image, name, margin - 6 - _text_width(name), margin + middle)
        _write(above, name, 6, middle)
    image[:margin, margin : margin + side] = np.rot90(above)
    cv2.rectangle(image, (margin - 1, margin - 1), (margin + side, margin + side), _GRAY)
    image[margin : margin + side, margin : margin + side] = _colored(shares, cell)
    if cell >= 30:  # pixels; smaller cells have no room for percentages
        for i, j in np.argwhere(shares >= 0.005).tolist():
            percent = f'{100 * shares[i, j]:.0f}'
            color = 255 if shares[i, j] > 0.25 else 0
            x = margin + cell * j + (cell - _text_width(percent)) // 2
            _write(image, percent, x, margin + cell * i + cell // 2, color)
    _write(image, caption, 6, margin + side + _LINE)
    return Image.fromarray(image)


def _colored(shares: Float[np.ndarray, 'k k'], cell: int) -> Pixels:
    """Returns squares of `cell` pixels. Zero is white, and any other share visibly darker."""
    depth = np.where(shares > 0, 0.3 + 0.7 * np.sqrt(shares), 0)[..., None]
    pixels: Pixels = np.rint(_WHITE + depth * (_DARK - _WHITE)).astype(np.uint8)
    return pixels.repeat(cell, axis=0).repeat(cell, axis=1)


def _blank(height: int, width: int) -> Pixels:
    return np.full((height, width, 3), 255, np.uint8)


def _printable(text: str) -> str:
    """Replaces characters that cannot be drawn, such as bytes that are not UTF-8."""
    return ''.join(letter if letter.isprintable() else '?' for letter in text)


def _text_width(text: str) -> int:
    """Returns the width of the drawn text in pixels."""
    font = cv2.FontFace('sans')
    return int(cv2.getTextSize((0, 0), _printable(text), (0, 0), font, _TEXT, _WEIGHT)[2])


def _shorten(text: str, width: int) -> str:
    """Shortens text that is wider than `width` pixels, with three dots at the end."""
    if _text_width(text) <= width:
        return text
    kept = len(text) - 1
    while kept > 0 and _text_width(f'{text[:kept]}...') > width:
        kept -= 1
    return f'{text[:kept]}...'


def _write(image: Pixels, text: str, x: int, middle: int, color: int = 0) -> None:
    """Writes text into the image, starting at `x` and vertically centered at `middle`."""
    start = x, middle + _TEXT // 3
    font = cv2.FontFace('sans')
    cv2.putText(image, _printable(text), start, (color, color, color), font, _TEXT, _WEIGHT)
