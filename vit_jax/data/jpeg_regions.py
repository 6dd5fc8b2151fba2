"""Decodes a region of a JPEG, where that was built: the pixels that a whole image would have there.

A region that is far larger than what is made of it is decoded at a fraction of its size.

What lies outside is not computed. jpeg_region.c is built by `pip install` where there are a C
compiler and the headers of libjpeg-turbo 2.1 or newer. No package on PyPI does the same: of those
that cut while they decode, nvImageCodec 0.9 makes grey pixels of damaged data without an error.
"""

import contextlib
import functools
import importlib
import importlib.util
import struct
from typing import Any

import numpy as np

from vit_jax.base.array_types import UInt8
from vit_jax.data.image_headers import open_with_pillow

_ORIENTATION = 274  # the tag of EXIF: how an upright image was stored, 1 to 8
_MODULE = 'vit_jax.data.jpeg_region'
_ARGUMENTS = 2  # which the module takes; one that was built from earlier code takes others
# By orientation: an image that is stored so is transposed, then its rows or columns reversed.
_TRANSPOSED, _ROWS_REVERSED, _COLUMNS_REVERSED = {5, 6, 7, 8}, {3, 4, 7, 8}, {2, 3, 6, 7}
Region = tuple[int, int, int, int]  # top, left, height and width


@functools.cache
def decoder() -> Any:
    """Returns the module that decodes regions, or None if it is not built or fails to load.

    Avoids `find_spec` because it raises ValueError if another thread is importing the module.
    """
    with contextlib.suppress(ImportError):  # not built, or its library is gone
        module = importlib.import_module(_MODULE)
        return module if getattr(module, 'arguments', 1) == _ARGUMENTS else None
    return None


def described() -> str:
    """What decodes the crops of JPEGs for training here, in words."""
    if decoder() is not None:
        return f'of a JPEG only the crop is decoded, by libjpeg-turbo {decoder().version}'
    if importlib.util.find_spec(_MODULE) is not None:
        text = 'JPEGs are decoded whole: what decodes crops alone was built, and does not load here'
        return f'{text}, or is of an earlier version: pip install again'
    needs = 'a C compiler and the headers of libjpeg-turbo 2.1 (Debian: libjpeg62-turbo-dev)'
    return f'JPEGs are decoded whole: with {needs} pip install builds what decodes crops alone'


def orientation(stored: bytes) -> int | None:
    """How an image was stored by its EXIF, 1 (upright) to 8; None where that is not plain.

    Plain is one number of 16 bits. Of anything else Pillow and OpenCV make different things, and
    OpenCV decodes the images that are decoded whole.
    """
    try:
        exif = open_with_pillow(stored, 'JPEG').info.get('exif', b'').removeprefix(b'Exif\0\0')
        if not exif:
            return 1
        order = {b'MM\0*': '>', b'II*\0': '<'}[exif[:4]]
        (start,) = struct.unpack_from(f'{order}I', exif, 4)
        (count,) = struct.unpack_from(f'{order}H', exif, start)
        tags = [struct.unpack_from(f'{order}HHIH', exif, start + 2 + 12 * n) for n in range(count)]
    except Exception:  # of many kinds
        return None
    match [found for tag, *found in tags if tag == _ORIENTATION]:
        case []:
            return 1
        case [[3, 1, turned]] if 1 <= turned <= 8:
            return turned
    return None


def upright(shape: tuple[int, int], turned: int) -> tuple[int, int]:
    """The height and width, seen upright, of an image that is stored with these."""
    return shape[::-1] if turned in _TRANSPOSED else shape


def decode_region(
    stored: bytes,
    region: Region,
    shape: tuple[int, int],
    turned: int,
    *,
    reduction: int = 1,
    to_end: bool = True,
) -> UInt8[np.ndarray, 'h w 3'] | None:
    """The region of the upright image; `shape` is the size that it has when it is upright.

    With a `reduction` of 2, 4 or 8 the image is that much smaller on each side: each of its pixels
    is made of as many frequencies as it can show, and takes so much less time. A region that does
    not end with whole pixels of it is a little larger then. Returns None for what may be wrong:
    there is no decoder, the file is damaged anywhere, or it has 12 bits. Damage below the region is
    looked for only `to_end`, which takes an eighth of the time of a photo of 0.1 MB.
    """
    top, left, rows, columns = region
    bottom, right = -(-(top + rows) // reduction), -(-(left + columns) // reduction)
    top, left = top // reduction, left // reduction
    rows, columns = bottom - top, right - left
    shape = -(-shape[0] // reduction), -(-shape[1] // reduction)
    if turned in _ROWS_REVERSED:
        top = shape[0] - top - rows
    if turned in _COLUMNS_REVERSED:
        left = shape[1] - left - columns
    if turned in _TRANSPOSED:
        top, left, rows, columns = left, top, columns, rows
    pixels = None
    if decoder() is not None:
        pixels = np.empty((rows, columns, 3), np.uint8)
        if not decoder().decode_into(stored, pixels, (top, left, rows, columns), reduction, to_end):
            return None
    elif reduction > 1 and (whole := _reduced(stored, upright(shape, turned))) is not None:
        pixels = whole[top : top + rows, left : left + columns]
    if pixels is None:
        return None
    if turned in _TRANSPOSED:
        pixels = pixels.swapaxes(0, 1)
    if turned in _ROWS_REVERSED:
        pixels = pixels[::-1]
    if turned in _COLUMNS_REVERSED:
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def _reduced(stored: bytes, shape: tuple[int, int]) -> UInt8[np.ndarray, 'h w 3'] | None:
    """The whole image, as it is stored, at the size that has just this shape."""
    import simplejpeg

    height, width = shape
    try:
        image = simplejpeg.decode_jpeg(stored, 'RGB', min_height=height, min_width=width)
    except ValueError:
        return None
    return image if image.shape[:2] == shape else None
