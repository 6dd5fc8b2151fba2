"""Decodes stored images of any format, or a region of a JPEG, into RGB pixels.

The libraries that decode are imported where they are used: the model and the update step need none.
"""

import contextlib
import functools
import importlib
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np

from vit_jax.base import UInt8, UserError, require

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

Image = UInt8[np.ndarray, '_ _ 3']
# More than any camera's single shot (200 megapixels); 0.8 GB as decoded RGB.
MAX_PIXELS = 2**28
MOST_PIXELS = 2**30  # the largest limit a user may set
# Supported formats, by Pillow's names for them.
_FORMATS = 'JPEG', 'PNG', 'GIF', 'BMP', 'TIFF', 'WEBP', 'JPEG2000', 'PPM', 'AVIF', 'HEIF'
# Pillow decodes the others. OpenCV multiplies the colors of TIFF by the transparency, replaces the
# colors of transparent pixels of GIF, reads no CMYK of JPEG 2000, and scales no PPM.
_BY_OPENCV = 'PNG', 'BMP', 'WEBP'
_HEIC_BRANDS = b'heic', b'heix', b'heim', b'heis', b'hevc', b'mif1', b'msf1'  # after `ftyp`
HEIC_REMEDY = 'pip install pillow-heif to read them, or convert them to JPEG'
_ORIENTATION, _BITS, _PHOTOMETRIC, _PLANAR = 0x0112, 258, 262, 284  # tags of EXIF and TIFF
_EXIF_WITHIN = 2**16 + 64  # bytes: the first segments of a file, of at most 64 KiB each
# By orientation: the stored image is transposed, then its rows or columns are reversed.
_TRANSPOSED, _ROWS_REVERSED, _COLUMNS_REVERSED = {5, 6, 7, 8}, {3, 4, 7, 8}, {2, 3, 6, 7}
Region = tuple[int, int, int, int]  # top, left, height and width
# Chooses a region of an image of this height and width, and how much smaller it may be decoded.
ChooseRegion = Callable[[tuple[int, int]], tuple[Region, int]]


class Header(NamedTuple):
    """Pillow's name of a format, and the size of the image in pixels, as it is stored."""

    kind: str
    height: int
    width: int
    is_plain_jpeg: bool = False  # simplejpeg decodes it


def read_header(stored: bytes, max_pixels: int = MAX_PIXELS) -> Header:
    """Reads the header of an encoded image.

    Raises UserError if the format is not supported, or the image has more than `max_pixels`.
    """
    require(len(stored) > 0, 'the file is empty')
    header = _read_jpeg_header(stored) if is_jpeg(stored) else None
    if header is None:
        image = open_with_pillow(stored)
        header = Header(image.format, image.height, image.width)
    if header.height * header.width > max_pixels:
        size = f'{header.width:,} x {header.height:,} pixels'
        raise UserError(f'{size}, more than max_pixels={max_pixels:,}: set that higher to read it')
    return header


def is_jpeg(stored: bytes | np.ndarray) -> TypeGuard[bytes]:
    """Whether these are the bytes of a JPEG, by its first two."""
    return isinstance(stored, bytes) and stored.startswith(b'\xff\xd8')


def _read_jpeg_header(stored: bytes) -> Header | None:
    import simplejpeg

    try:
        height, width, color_space, _ = simplejpeg.decode_jpeg_header(stored)
    except ValueError:  # Pillow judges what it cannot read
        return None
    is_plain = color_space not in ('CMYK', 'YCCK')  # which libraries convert differently
    return Header('JPEG', height, width, is_plain)


@functools.cache
def _pillow() -> Any:
    """Returns Pillow's `Image`, with all formats that are installed."""
    from PIL import Image

    with contextlib.suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    Image.init()
    return Image


def open_with_pillow(stored: bytes) -> Any:
    """Opens an image with Pillow, which decodes it when its pixels are requested.

    Calls Pillow's function for the format, not `PIL.Image.open`: that does not say why a function
    failed, and its limit of pixels holds for the whole process, so it is not ours to change. TIFF
    and WebP still enforce that limit (179 million pixels by default).

    Raises UserError if the format is not supported, or the start of the image is damaged.
    """
    formats = {kind: _pillow().OPEN[kind] for kind in _FORMATS if kind in _pillow().OPEN}
    fault = f'not a whole image of a supported format; expected {", ".join(formats)}'
    for kind, (open_image, accepts) in formats.items():
        try:
            if accepts(stored[:16]):
                return open_image(io.BytesIO(stored), '')
        except Exception as error:  # of many kinds
            fault = _describe_damage(kind, error)
    is_heic = stored[4:8] == b'ftyp' and stored[8:12] in _HEIC_BRANDS
    raise UserError(f'a HEIC photo: {HEIC_REMEDY}' if is_heic and 'HEIF' not in formats else fault)


def _describe_damage(kind: str, error: Exception) -> str:
    return f'not a whole image, or a kind of {kind} that is not supported: {error}'


@functools.cache
def formats_by_ending() -> dict[str, str]:
    """The formats by the endings of their files' names, `.jpg`."""
    endings = _pillow().registered_extensions()
    return {ending: kind for ending, kind in endings.items() if kind in _FORMATS}


def decode(
    stored: bytes | np.ndarray, *, exif_rotation: bool, max_pixels: int = MAX_PIXELS
) -> Image:
    """Returns the RGB image, 8 bits a channel, of an encoded file's bytes or of a uint8 array.

    Gray, CMYK, 16-bit and palette images become RGB; transparency is dropped, and the color of a
    transparent pixel is the stored one. The format is taken from the bytes, not from a file name.
    Raises UserError for bytes that are not a complete image, and, before anything is decoded, for
    one of more than `max_pixels`.
    """
    if isinstance(stored, np.ndarray):
        image = stored[..., None] if stored.ndim == 2 else stored
        return np.repeat(image, 3, axis=-1) if image.shape[-1] == 1 else image
    header = read_header(stored, max_pixels)
    if header.is_plain_jpeg:
        import simplejpeg

        with contextlib.suppress(ValueError):  # Pillow judges what it cannot read
            image = simplejpeg.decode_jpeg(stored)
            return turn_upright(image, read_orientation(stored) if exif_rotation else 1)
    if header.kind in _BY_OPENCV:
        import cv2

        flags = cv2.IMREAD_COLOR_RGB | (0 if exif_rotation else cv2.IMREAD_IGNORE_ORIENTATION)
        with contextlib.suppress(cv2.error):
            decoded: Image | None = cv2.imdecode(np.frombuffer(stored, np.uint8), flags)
            if decoded is not None:
                return decoded
    try:
        return to_rgb(open_with_pillow(stored), exif_rotation=exif_rotation)
    except UserError:
        raise
    except Exception as error:  # of many kinds
        raise UserError(_describe_damage(header.kind, error)) from error


def read_orientation(stored: bytes) -> int:
    """Returns how a JPEG is stored by its EXIF, 1 (upright) to 8; 1 if its EXIF is damaged."""
    if stored.find(b'Exif\0', 0, _EXIF_WITHIN) < 0:
        return 1
    with contextlib.suppress(Exception):  # of many kinds
        orientation = open_with_pillow(stored).getexif().get(_ORIENTATION)
        return orientation if orientation in range(1, 9) else 1
    return 1


def turn_upright(image: Image, orientation: int) -> Image:
    """Turns an image that is stored in an orientation of EXIF."""
    import cv2  # a tenth of numpy's time

    if orientation in _TRANSPOSED:
        image = cv2.transpose(image)
    if orientation in _ROWS_REVERSED:
        image = cv2.flip(image, 0)
    if orientation in _COLUMNS_REVERSED:
        image = cv2.flip(image, 1)
    return image


def to_rgb(image: 'PillowImage', *, exif_rotation: bool) -> Image:
    """Returns the RGB pixels of a Pillow image, by the rules of `decode`."""
    from PIL import ImageOps

    is_16_bit = image.mode.startswith('I;16') or (image.mode == 'I' and image.format == 'PPM')
    if image.mode == 'F' or (image.mode.startswith('I') and not is_16_bit):
        kind = f"float, signed or 32-bit numbers (Pillow's mode {image.mode})"
        raise UserError(f'{kind} are not supported; expected 8 or 16 bits a channel, unsigned')
    if image.format == 'TIFF':
        tags: Any = image.tag_v2  # type: ignore[attr-defined]
        misread = tags.get(_PLANAR) == 2 or tags.get(_PHOTOMETRIC) == 0
        if misread and max(tags.get(_BITS, (8,))) == 16:
            text = 'with 16 bits a channel, and separate planes or 0 for white'
            raise UserError(f'TIFF {text}, is not supported; expected chunky RGB, or 8 bits')
        if not exif_rotation:  # Pillow turns it when it loads the pixels
            image.getexif().pop(_ORIENTATION, None)
    image = ImageOps.exif_transpose(image) if exif_rotation else image
    if is_16_bit:  # `convert` makes white of all that is above 255
        high = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
        return np.repeat(high[..., None], 3, axis=-1)
    return np.asarray(image.convert('RGB'))


@functools.cache
def region_decoder() -> Any:
    """Returns the module that decodes regions, or None if it is not built or fails to load.

    It is built from jpeg_region.c by `pip install` if there are a C compiler and the headers of
    libjpeg-turbo 2.1 or newer. No package on PyPI does the same: of the decoders that crop while
    they decode, nvImageCodec 0.9 returns gray pixels for damaged data without an error.
    """
    with contextlib.suppress(ImportError):
        return importlib.import_module('vit_jax.data.jpeg_region')
    return None


def describe_decoder() -> str:
    """Describes how the crops of JPEGs for training are decoded here."""
    if region_decoder() is not None:
        return f'of a JPEG only the crop is decoded, by libjpeg-turbo {region_decoder().version}'
    needs = 'a C compiler and the headers of libjpeg-turbo 2.1 (Debian: libjpeg62-turbo-dev)'
    return f'JPEGs are decoded whole: with {needs} pip install builds a decoder of crops alone'


def decode_region(
    stored: bytes | np.ndarray,
    choose: ChooseRegion,
    *,
    exif_rotation: bool,
    max_pixels: int = MAX_PIXELS,
    to_end: bool = True,
) -> Image:
    """Decodes a region of an image: the pixels that `decode` returns there, or its errors.

    With a `region_decoder` pixels outside of the region of a JPEG are not computed.

    Args:
      stored: An encoded file's bytes, or a uint8 array.
      choose: Returns a region of the upright image, and a reduction of 1, 2, 4 or 8; is called
        once. A JPEG is decoded that much smaller on each side: each of its pixels is made of as
        many frequencies as it can show. A region that does not end with whole pixels of the smaller
        image is a little larger.
      exif_rotation: Whether the image is turned upright.
      max_pixels: The most pixels that the whole image may have.
      to_end: Whether to look for damage below the region of a JPEG, which takes an eighth of the
        time for a photo of 0.1 MB.
    """
    region = None
    if is_jpeg(stored) and (header := read_header(stored, max_pixels)).is_plain_jpeg:
        orientation = read_orientation(stored) if exif_rotation else 1
        shape = header.height, header.width
        shape = shape[::-1] if orientation in _TRANSPOSED else shape
        region, reduction = choose(shape)
        part, shape = _as_stored(region, shape, orientation, reduction)
        image = _decode_jpeg_region(stored, part, shape, reduction=reduction, to_end=to_end)
        if image is not None:
            return turn_upright(image, orientation)
    whole = decode(stored, exif_rotation=exif_rotation, max_pixels=max_pixels)
    return cut(whole, region or choose((whole.shape[0], whole.shape[1]))[0])


def cut(image: Image, region: Region) -> Image:
    """Returns a region of decoded pixels."""
    top, left, rows, columns = region
    return image[top : top + rows, left : left + columns]


def _as_stored(
    region: Region, shape: tuple[int, int], orientation: int, reduction: int
) -> tuple[Region, tuple[int, int]]:
    """Returns the region and shape of an upright image as it is stored, and decoded smaller."""
    top, left, rows, columns = region
    bottom, right = -(-(top + rows) // reduction), -(-(left + columns) // reduction)
    top, left = top // reduction, left // reduction
    rows, columns = bottom - top, right - left
    height, width = (-(-side // reduction) for side in shape)
    if orientation in _ROWS_REVERSED:
        top = height - top - rows
    if orientation in _COLUMNS_REVERSED:
        left = width - left - columns
    if orientation in _TRANSPOSED:
        return (left, top, columns, rows), (width, height)
    return (top, left, rows, columns), (height, width)


def _decode_jpeg_region(
    stored: bytes, region: Region, shape: tuple[int, int], *, reduction: int, to_end: bool
) -> Image | None:
    """Returns a region of an image of this shape; None if it is damaged anywhere or has 12 bits."""
    if region_decoder() is not None:
        pixels = np.empty((*region[2:], 3), np.uint8)
        is_whole = region_decoder().decode_into(stored, pixels, region, reduction, to_end)
        return pixels if is_whole else None
    import simplejpeg

    with contextlib.suppress(ValueError):
        whole = simplejpeg.decode_jpeg(stored, min_height=shape[0], min_width=shape[1])
        return cut(whole, region) if whole.shape[:2] == shape else None
    return None
