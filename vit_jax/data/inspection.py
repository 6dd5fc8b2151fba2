"""Inspects stored images before training: counts per class, defects, a contact sheet."""

import collections
import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import cv2
import numpy as np

from vit_jax.base.array_types import UInt8
from vit_jax.data.image_preprocessing import decode
from vit_jax.data.sources.base import EncodedImage, Source

_SIGNATURES = {
    b'\xff\xd8': 'JPEG',
    b'\x89PNG': 'PNG',
    b'GIF8': 'GIF',
    b'BM': 'BMP',
    b'II*\0': 'TIFF',
    b'MM\0*': 'TIFF',
    b'RIFF': 'WebP',
}
_ENDINGS = {'.jpg': 'JPEG', '.jpeg': 'JPEG', '.tif': 'TIFF', '.tiff': 'TIFF', '.webp': 'WebP'}
_TEXT_WIDTH, _LEAST_SIDE = 170, 96  # pixels on the contact sheet


@dataclasses.dataclass
class Scan:
    """What was found in the images of one split."""

    class_counts: dict[str, int]
    formats: dict[str, int]
    heights: list[int]
    widths: list[int]
    unreadable: list[str]  # messages that name the image
    misnamed: list[str]  # their format is not that of their ending

    def values(self) -> dict[str, Any]:
        """As JSON values; heights and widths as [minimum, median, maximum]."""
        sides = {'height': self.heights, 'width': self.widths}
        return {
            'images': len(self.heights) + len(self.unreadable),
            'classes': self.class_counts,
            'formats': self.formats,
            'unreadable': self.unreadable,
            'misnamed': self.misnamed,
        } | {
            name: [int(q) for q in np.percentile(side, [0, 50, 100])] if side else []
            for name, side in sides.items()
        }


def scan(source: Source, pool: futures.Executor, done: Callable[[int], None]) -> Scan:
    """Reads and decodes every image of a source once; `done(1)` is called after each."""
    found = Scan(dict.fromkeys(source.class_names, 0), {}, [], [], [], [])
    formats: collections.Counter[str] = collections.Counter()
    counts = np.zeros(len(source.class_names), int)
    for index, (label, kind, shape, error) in enumerate(
        pool.map(lambda i: _examined(source, i), range(len(source)))
    ):
        done(1)
        if error:
            found.unreadable.append(error)
            continue
        counts[np.flatnonzero(label) if source.multi_label else label] += 1
        formats[kind] += 1
        found.heights.append(shape[0])
        found.widths.append(shape[1])
        name = source.name_of(index)
        ending = os.path.splitext(name)[1].lower()
        if ending and kind != 'array' and _ENDINGS.get(ending, ending[1:].upper()) != kind:
            found.misnamed.append(f'{name}: {kind}')
    found.class_counts = dict(zip(source.class_names, counts.tolist(), strict=True))
    found.formats = dict(formats.most_common())
    return found


def _examined(source: Source, index: int) -> tuple[Any, str, tuple[int, ...], str | None]:
    try:
        stored, label = source.read(index)
        return label, _format(stored), decode(stored, exif_rotation=True).shape, None
    except (ValueError, OSError) as error:
        return None, '', (), f'{source.name_of(index)}: {error}'


def _format(stored: EncodedImage) -> str:
    if isinstance(stored, np.ndarray):
        return 'array'
    known = (kind for start, kind in _SIGNATURES.items() if stored.startswith(start))
    return next(known, 'other')


def contact_sheet(
    rows: Sequence[tuple[str, Sequence[np.ndarray]]], heads: Sequence[str]
) -> UInt8[np.ndarray, 'h w 3']:
    """A picture of named rows of images of one size, with column titles `heads`."""
    height, width = rows[0][1][0].shape[:2]
    scale = max(1, -(-_LEAST_SIDE // min(height, width)))
    height, width = scale * height, scale * width
    head = _text(['', *heads], [_TEXT_WIDTH] + [width + 4] * len(heads), 24)
    lines = [head]
    for name, images in rows:
        tiles = [_framed(image, (height, width)) for image in images]
        lines.append(np.concatenate([_text([name], [_TEXT_WIDTH], height + 4), *tiles], axis=1))
    return np.concatenate(lines)


def _framed(image: np.ndarray, size: tuple[int, int]) -> UInt8[np.ndarray, 'h w 3']:
    """The image enlarged to a size, each pixel a square, with a white frame."""
    larger = cv2.resize(image, size[::-1], interpolation=cv2.INTER_NEAREST)
    return np.pad(larger, ((2, 2), (2, 2), (0, 0)), constant_values=255)


def _text(texts: Sequence[str], widths: Sequence[int], height: int) -> np.ndarray:
    """Texts side by side on white, cut to their widths in pixels."""
    line = np.full((height, sum(widths), 3), 255, np.uint8)
    for text, left, width in zip(texts, np.cumsum([0, *widths]), widths, strict=False):
        part = text if len(text) * 8 < width else text[: width // 8 - 2] + '..'
        place = int(left) + 4, height // 2 + 5
        cv2.putText(line, part, place, cv2.FONT_HERSHEY_SIMPLEX, 0.42, (0, 0, 0), 1, cv2.LINE_AA)
    return line
