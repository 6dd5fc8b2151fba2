"""Which classes are taken for which others: numbers of each class, and a picture of them all."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from vit_jax.base import Float, Int, Num, UInt8

_NAME_LENGTH, _TEXT_HEIGHT, _LONGEST = 24, 14, 2000  # letters; pixels of a line, of a side
_WHITE, _DARK = np.array([255, 255, 255]), np.array([8, 48, 107])


def confusion_matrix(
    labels: Int[np.ndarray, 'n'], predicted: Int[np.ndarray, 'n'], *, classes: int
) -> Int[np.ndarray, 'k k']:
    """How many images of each class (row) were taken for which (column)."""
    pairs = labels.astype(np.int64) * classes + predicted
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def class_means(
    values: Num[np.ndarray, 'n'], targets: Num[np.ndarray, 'n ...'], *, classes: int
) -> Float[np.ndarray, 'k']:
    """The mean over the images of each class, of numbers (n) or rows (n k); NaN without images."""
    images, labels = np.nonzero(targets) if targets.ndim == 2 else (np.arange(len(values)), targets)
    totals = np.bincount(labels, weights=values[images], minlength=classes)
    with np.errstate(invalid='ignore'):
        return totals / np.bincount(labels, minlength=classes)


def confusions(matrix: Int[np.ndarray, 'k k'], names: Sequence[str]) -> list[dict[str, Any]]:
    """What was taken for what, the most frequent first: `class`, `taken_for`, `images`."""
    wrong = matrix * (1 - np.eye(len(matrix), dtype=matrix.dtype))
    rows, columns = np.nonzero(wrong)
    order = np.argsort(-wrong[rows, columns], kind='stable')
    return [
        {'class': names[i], 'taken_for': names[j], 'images': int(wrong[i, j])}
        for i, j in zip(rows[order].tolist(), columns[order].tolist(), strict=True)
    ]


def picture(matrix: Int[np.ndarray, 'k k'], names: Sequence[str]) -> Image.Image:
    """The matrix with a cell for each pair of classes, dark where many of a row's images are.

    Few classes have their names and per cent; of many, every so many-th has its name, and of more
    than 2,000 neighbours share a cell.
    """
    together = -(-len(matrix) // _LONGEST)
    starts = np.arange(0, len(matrix), together)
    cells = np.add.reduceat(np.add.reduceat(matrix, starts, axis=0), starts, axis=1)
    shares = cells / np.maximum(1, cells.sum(axis=1, keepdims=True))
    cell = max(1, min(48, _LONGEST // len(cells)))
    every = -(-_TEXT_HEIGHT // cell)
    shown = [(cell * i, names[int(starts[i])]) for i in range(0, len(cells), every)]
    margin = 8 + 7 * min(_NAME_LENGTH, max(len(name) for _, name in shown))
    side = cell * len(cells)
    width, height = max(margin + side + 8, 420), margin + side + 2 * _TEXT_HEIGHT
    image = Image.new('RGB', (width, height), 'white')
    image.paste(_coloured(shares, cell), (margin, margin))
    draw, top = ImageDraw.Draw(image), Image.new('RGB', (margin, side), 'white')
    above = ImageDraw.Draw(top)
    for at, name in shown:
        middle = at + cell / 2 if cell >= _TEXT_HEIGHT else at + _TEXT_HEIGHT / 2
        draw.text((margin - 6, margin + middle), name[:_NAME_LENGTH], 'black', anchor='rm')
        above.text((6, middle), name[:_NAME_LENGTH], 'black', anchor='lm')
        if every > 1:
            draw.line([(margin - 4, margin + at), (margin - 1, margin + at)], 'black')
            draw.line([(margin + at, margin - 4), (margin + at, margin - 1)], 'black')
    image.paste(top.transpose(Image.Transpose.ROTATE_90), (margin, 0))
    draw.rectangle((margin - 1, margin - 1, margin + side, margin + side), outline='gray')
    if cell >= 30:
        for i, j in np.argwhere(shares >= 0.005).tolist():
            centre = margin + cell * (j + 0.5), margin + cell * (i + 0.5)
            colour = 'white' if shares[i, j] > 0.25 else 'black'
            draw.text(centre, f'{100 * shares[i, j]:.0f}', colour, anchor='mm')
    text = 'rows: true class; columns: prediction; dark: a large share of the row'
    draw.text((6, margin + side + 6), text, 'black')
    return image


def _coloured(shares: Float[np.ndarray, 'k k'], cell: int) -> Image.Image:
    """Squares of so many pixels, white for nothing at all; the least share can be seen."""
    depth = np.where(shares > 0, 0.3 + 0.7 * np.sqrt(shares), 0)[..., None]
    pixels: UInt8[np.ndarray, 'h w 3'] = np.rint(_WHITE + depth * (_DARK - _WHITE)).astype(np.uint8)
    return Image.fromarray(pixels.repeat(cell, axis=0).repeat(cell, axis=1))
