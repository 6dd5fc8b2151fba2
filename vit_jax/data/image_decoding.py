"""Decodes encoded images, or a region of a JPEG, to RGB pixels.

Decoding libraries are imported inside functions because the model and the update step need none.
"""

import contextlib
import functools
import importlib
import io
import itertools
import re
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np

from vit_jax.base import UInt8, UserError, require
from vit_jax.base.files import Limit

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

Image = UInt8[np.ndarray, '_ _ 3']
MAX_PIXELS = int(Limit.IMAGE_PIXELS)
MAX_PIXELS_LIMIT = int(Limit.IMAGE_PIXELS_BY_USER)
# Supported formats, by Pillow's names.
_FORMATS = 'JPEG', 'PNG', 'GIF', 'BMP', 'TIFF', 'WEBP', 'JPEG2000', 'PPM', 'AVIF', 'HEIF'
# Pillow decodes the other formats: OpenCV multiplies the colors of TIFF by alpha, replaces the
# colors of transparent GIF pixels, cannot read CMYK in JPEG 2000, does not scale PPM to 8 bits, and
# rounds BMP with 16 bits per pixel otherwise.
_BY_OPENCV = 'PNG', 'WEBP'
_HEIC_BRANDS = b'heic', b'heix', b'heim', b'heis', b'hevc', b'mif1', b'msf1'  # after `ftyp`
HEIC_REMEDY = 'pip install pillow-heif to read HEIC photos, or convert them to JPEG'
# EXIF and TIFF tags.
_ORIENTATION = 0x0112
_BITS = 258
_PHOTOMETRIC = 262
_PLANAR = 284
# An image without any of these bytes has no orientation. TIFF is recognized by its first bytes.
_MARKS = (
    *(b'Exif\0', b'eXIf', b'EXIF', b'irot', b'imir'),
    *(b'Orientation', b'Raw profile', b'XML:com.adobe.xmp'),
)
_TIFF_STARTS = b'II*\0', b'MM\0*', b'II+\0', b'MM\0+'
_IN_XMP = re.compile(rb'tiff:Orientation(?:\s*=\s*["\']|(?:\s[^<>]*)?>)\s*([1-8])\b')
_PNG_ANIMATION = {b'acTL', b'fcTL', b'fdAT'}
_PNG_TEXTS = {b'tEXt', b'zTXt', b'iTXt'}
_PNG_START = b'\x89PNG\r\n\x1a\n'
_PNG_END = b'IEND\xaeB`\x82'  # type and checksum of the last chunk
# Keywords of text chunks of PNG that may hold an orientation.
_PNG_KEYWORDS = {
    b'XML:com.adobe.xmp',
    *(b'Raw profile type ' + x for x in (b'exif', b'APP1', b'xmp')),
}
# EXIF orientations for which the stored image is transposed, then has its rows or columns reversed.
_TRANSPOSED = {5, 6, 7, 8}
_ROWS_REVERSED = {3, 4, 7, 8}
_COLUMNS_REVERSED = {2, 3, 6, 7}
_INVERSE = {6: 8, 8: 6}  # the other orientations are their own inverse
Region = tuple[int, int, int, int]  # top, left, height, width
# Maps the (height, width) of an image to a region, and the factor by which it may be reduced.
ChooseRegion = Callable[[tuple[int, int]], tuple[Region, int]]


class Header(NamedTuple):
    """The format (Pillow's name) and the size in pixels of an image as it is stored."""

    kind: str
    height: int
    width: int
    is_plain_jpeg: bool = False  # True: simplejpeg can decode it


def read_header(stored: bytes | memoryview, max_pixels: int = MAX_PIXELS) -> Header:
    """Reads the header of an encoded image.

    Raises UserError if the format is not supported or the image has more than `max_pixels` pixels.
    """
    stored = bytes(stored)  # makes no copy of bytes
    require(len(stored) > 0, 'the file is empty')
    header = _read_jpeg_header(stored) if is_jpeg(stored) else None
    if header is None:
        is_png = stored.startswith(_PNG_START)
        image = open_with_pillow(_drop_png_metadata(stored) if is_png else stored)
        header = Header(image.format, image.height, image.width)
    if header.height * header.width > max_pixels:
        raise UserError(
            f'{header.width:,} x {header.height:,} pixels; expected at most {max_pixels:,}; '
            'raise max_pixels to read it'
        )
    return header


def is_jpeg(stored: bytes | memoryview | np.ndarray) -> TypeGuard[bytes]:
    """Returns whether the bytes start like a JPEG."""
    return not isinstance(stored, np.ndarray) and stored[:2] == b'\xff\xd8'


def _read_jpeg_header(stored: bytes) -> Header | None:
    import simplejpeg

    try:
        height, width, color_space, _ = simplejpeg.decode_jpeg_header(stored)
    except ValueError:  # Pillow decides whether the image is damaged
        return None
    is_plain = color_space not in ('CMYK', 'YCCK')  # libraries convert these differently
    return Header('JPEG', height, width, is_plain)


@functools.cache
def _pillow() -> Any:
    """Returns the module PIL.Image with all installed formats registered."""
    from PIL import Image

    with contextlib.suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    Image.init()
    return Image


def open_with_pillow(stored: bytes) -> Any:
    """Opens an image with Pillow, which decodes it lazily.

    Calls Pillow's function for the format instead of `PIL.Image.open`, which hides the reason of a
    failure and has a pixel limit for the whole process that a library should not change. TIFF and
    WebP still enforce that limit (179 million pixels by default).

    Raises UserError if the format is not supported or the start of the image is damaged.
    """
    formats = {kind: _pillow().OPEN[kind] for kind in _FORMATS if kind in _pillow().OPEN}
    fault = f'damaged, or not a supported format; expected {", ".join(formats)}'
    for kind, (open_image, accepts) in formats.items():
        try:
            if accepts(stored[:16]):
                return open_image(io.BytesIO(stored), '')
        except Exception as error:  # Pillow raises many exception types
            fault = _describe_damage(kind, error)
    is_heic = stored[4:8] == b'ftyp' and stored[8:12] in _HEIC_BRANDS
    if is_heic and 'HEIF' not in formats:
        fault = f'a HEIC photo; {HEIC_REMEDY}'
    raise UserError(fault)


def _describe_damage(kind: str, error: Exception) -> str:
    return f'damaged, or a variant of {kind} that is not supported ({error})'


@functools.cache
def formats_by_extension() -> dict[str, str]:
    """Returns the supported formats by file extension, such as `.jpg`."""
    formats = _pillow().registered_extensions()
    return {extension: kind for extension, kind in formats.items() if kind in _FORMATS}


def decode(
    stored: bytes | memoryview | np.ndarray, *, exif_rotation: bool, max_pixels: int = MAX_PIXELS
) -> Image:
    """Decodes an image to RGB with 8 bits per channel.

    Converts gray, CMYK, 16-bit and palette images to RGB. Drops transparency: a transparent pixel
    keeps its stored color. Detects the format from the bytes, not from a file name. The result is a
    uint8 array (h w 3).

    Args:
      stored: The bytes of an encoded file, or a uint8 array (h w), (h w 1) or (h w 3).
      exif_rotation: Whether to apply the EXIF orientation.
      max_pixels: The most pixels that the image may have; checked before decoding.

    Raises:
      UserError: If the bytes are not a complete image, or the image has too many pixels.
    """
    if isinstance(stored, np.ndarray):
        image = stored[..., None] if stored.ndim == 2 else stored
        return np.repeat(image, 3, axis=-1) if image.shape[-1] == 1 else image
    stored = bytes(stored)
    orientation = read_orientation(stored) if exif_rotation else 1
    if stored.startswith(_PNG_START):
        stored = _drop_png_metadata(stored)
    return apply_orientation(_decode_stored(stored, read_header(stored, max_pixels)), orientation)


def _decode_stored(stored: bytes, header: Header) -> Image:
    """Decodes an image without applying its orientation."""
    if header.is_plain_jpeg:
        import simplejpeg

        with contextlib.suppress(ValueError):  # Pillow decides whether the image is damaged
            return simplejpeg.decode_jpeg(stored)
    # libpng prints a message if the end is missing.
    is_cut_off = header.kind == 'PNG' and stored.rfind(_PNG_END) < 0
    if header.kind in _BY_OPENCV and not is_cut_off:
        import cv2

        flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
        with contextlib.suppress(cv2.error):
            decoded: Image | None = cv2.imdecode(np.frombuffer(stored, np.uint8), flags)
            if decoded is not None:
                return decoded
    try:
        return decode_pillow(open_with_pillow(stored), exif_rotation=False)
    except UserError:
        raise
    except Exception as error:  # Pillow raises many exception types
        raise UserError(_describe_damage(header.kind, error)) from error


def decode_pillow(image: 'PillowImage', *, exif_rotation: bool) -> Image:
    """Converts a Pillow image to RGB pixels as `decode` does.

    Pillow turns a TIFF upright when it loads the pixels. If that has happened before, the stored
    orientation is not known any more.
    """
    stored_orientation = read_orientation(image)
    pixels = _to_rgb(image)
    orientation = read_orientation(image)
    if exif_rotation:
        return apply_orientation(pixels, orientation)
    if orientation != stored_orientation:  # Pillow has turned the image upright
        return apply_orientation(pixels, _INVERSE.get(stored_orientation, stored_orientation))
    return pixels


def read_orientation(image: 'bytes | PillowImage') -> int:
    """Returns the orientation of an image in the numbers of EXIF, 1 (upright) to 8.

    Reads EXIF, and XMP if EXIF has no orientation. For AVIF, reads the transformations in the
    container. Returns 1 if there is no orientation or the metadata are damaged.
    """
    with contextlib.suppress(Exception):  # Pillow raises many exception types
        if not isinstance(image, bytes):
            return _find_in_pillow(image)
        searched = image[: _find_scan(image)] if is_jpeg(image) else image
        if image.startswith(_TIFF_STARTS) or any(mark in searched for mark in _MARKS):
            if image.startswith(_PNG_START):
                return _find_in_png(image)
            if is_jpeg(image):  # also with a damaged list of further images, which Pillow rejects
                return _find_in_pillow(_pillow().OPEN['JPEG'][0](io.BytesIO(image), ''))
            return _find_in_pillow(open_with_pillow(image))
    return 1


def _find_scan(jpeg: bytes) -> int:
    """Returns where the first scan begins, after all metadata; the end if segments are damaged."""
    position = 2
    while jpeg[position : position + 1] == b'\xff':
        marker = jpeg[position + 1 : position + 2]
        if marker == b'\xda':
            return position
        length = int.from_bytes(jpeg[position + 2 : position + 4], 'big')
        position += 1 if marker == b'\xff' else 2 + length  # a segment may begin with many 0xff
    return len(jpeg)


def _find_in_pillow(image: 'PillowImage') -> int:
    if (orientation := _parse_orientation(image.getexif().get(_ORIENTATION))) is not None:
        return orientation
    for keyword in 'xmp', 'Raw profile type APP1', 'Raw profile type xmp':
        metadata = image.info.get(keyword, b'')
        if isinstance(metadata, str):
            metadata = metadata.encode()
        if keyword.startswith('Raw') and metadata:
            metadata = _parse_profile(metadata)
        if (orientation := _find_in_metadata(metadata)) is not None:
            return orientation
    return 1


def _find_in_png(stored: bytes) -> int:
    """Finds the orientation in a PNG without decompressing its pixels and other texts."""
    metadata: list[bytes] = []
    for chunk in _png_chunks(stored):
        data = stored[chunk.start + 8 : chunk.end - 4]
        if chunk.kind == b'eXIf':
            metadata.insert(0, data)
        elif chunk.kind in _PNG_TEXTS and data.partition(b'\0')[0] in _PNG_KEYWORDS:
            with contextlib.suppress(Exception):  # of damaged texts
                metadata.append(_read_png_text(chunk.kind, data))
    return next(filter(None, map(_find_in_metadata, metadata)), 1)


def _read_png_text(kind: bytes, data: bytes) -> bytes:
    """Returns the contents of a text chunk of a PNG, up to a limit."""
    keyword, _, text = data.partition(b'\0')
    is_compressed = False
    if kind == b'zTXt':  # a byte for the compression method
        is_compressed = True
        text = text[1:]
    elif kind == b'iTXt':  # flag and method of compression, language, translated keyword
        is_compressed = text[0] == 1
        text = text[2:].split(b'\0', 2)[-1]
    if is_compressed:
        text = zlib.decompressobj().decompress(text, Limit.METADATA_BYTES)
    return _parse_profile(text) if keyword.startswith(b'Raw') else text


def _parse_profile(text: bytes) -> bytes:
    """Parses a raw profile of ImageMagick: a blank line, a name, a length, and hex digits."""
    return bytes.fromhex(''.join(text.decode().split('\n')[3:]))


def _find_in_metadata(metadata: bytes) -> int | None:
    """Returns the orientation that EXIF or XMP states, or None."""
    if metadata.startswith((b'Exif\0', *_TIFF_STARTS)):
        (exif := _pillow().Exif()).load(metadata)
        return _parse_orientation(exif.get(_ORIENTATION))
    match = _IN_XMP.search(metadata)
    return int(match[1]) if match else None


def _parse_orientation(value: Any) -> int | None:
    """Parses the value of the tag, which some programs write with another type."""
    value = value[0] if isinstance(value, bytes) and value else value
    with contextlib.suppress(TypeError, ValueError):
        number = int(value)
        return number if number == float(value) and 1 <= number <= 8 else None
    return None


class _PngChunk(NamedTuple):
    """A chunk of a PNG."""

    kind: bytes
    start: int
    end: int


def _png_chunks(stored: bytes) -> Iterator[_PngChunk]:
    """Yields the chunks of a PNG; ignores what follows the last chunk, IEND."""
    start = len(_PNG_START)
    for number in itertools.count():
        if start >= len(stored):
            break
        require(number < Limit.PNG_CHUNKS, f'a PNG of more than {Limit.PNG_CHUNKS:,} chunks')
        end = start + 12 + int.from_bytes(stored[start : start + 4], 'big')
        kind = stored[start + 4 : start + 8]
        yield _PngChunk(kind, start, end)
        start = len(stored) if kind == b'IEND' else end


def _drop_png_metadata(stored: bytes) -> bytes:
    """Returns a PNG without texts and profiles, which libraries decompress within limits.

    Of an animation, only the image that programs without animations show is left.
    """
    dropped = {*_PNG_TEXTS, b'iCCP', b'eXIf', *_PNG_ANIMATION}
    chunks = [*_png_chunks(stored)]
    if not any(chunk.kind in dropped for chunk in chunks):
        return stored
    kept = [stored[chunk.start : chunk.end] for chunk in chunks if chunk.kind not in dropped]
    return b''.join([_PNG_START, *kept])


def apply_orientation(image: Image, orientation: int) -> Image:
    """Turns an image that is stored in this EXIF orientation upright."""
    import cv2  # transposes 3 times and mirrors 17 times as fast as numpy

    if orientation in _TRANSPOSED:
        image = cv2.transpose(image)
    if orientation in _ROWS_REVERSED:
        image = cv2.flip(image, 0)
    if orientation in _COLUMNS_REVERSED:
        image = cv2.flip(image, 1)
    return image


def _to_rgb(image: 'PillowImage') -> Image:
    """Returns the stored RGB pixels of a Pillow image, converted as `decode` describes."""
    is_16_bit = image.mode.startswith('I;16') or (image.mode == 'I' and image.format == 'PPM')
    if image.mode == 'F' or (image.mode.startswith('I') and not is_16_bit):
        raise UserError(
            f"float, signed or 32-bit pixels (Pillow's mode {image.mode}) are not supported; "
            'expected unsigned, 8 or 16 bits per channel'
        )
    if image.format == 'TIFF':
        tags: Any = image.tag_v2  # type: ignore[attr-defined]
        is_misread = tags.get(_PLANAR) == 2 or tags.get(_PHOTOMETRIC) == 0
        if is_misread and max(tags.get(_BITS, (8,))) == 16:
            raise UserError(
                'a 16-bit TIFF with planar configuration 2 or WhiteIsZero is not supported; '
                'expected interleaved RGB with black as 0, or 8 bits'
            )
    if is_16_bit:  # `convert` would clip values above 255 to white
        high_byte = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
        return np.repeat(high_byte[..., None], 3, axis=-1)
    if image.mode == 'La':
        image = image.convert('LA')
    return np.asarray(image.convert('RGB'))


@functools.cache
def region_decoder() -> Any:
    """Returns the module vit_jax.data.jpeg_region, or None if it is not built or fails to load.

    `pip install` builds it from jpeg_region.c if there are a C compiler and the headers of
    libjpeg-turbo 2.1 or newer. No package on PyPI can replace it: nvImageCodec 0.9 also crops while
    decoding, but returns gray pixels for damaged data without an error.
    """
    with contextlib.suppress(ImportError):
        module = importlib.import_module('vit_jax.data.jpeg_region')
        return module if hasattr(module, 'decode_regions') else None  # else of an older version
    return None


def describe_decoder() -> str:
    """Describes in a sentence how training crops of JPEGs are decoded in this installation."""
    if region_decoder() is not None:
        return f'decodes only the crop of a JPEG, with libjpeg-turbo {region_decoder().version}'
    return (
        'decodes whole JPEGs; to decode only crops, install a C compiler and the headers of '
        'libjpeg-turbo 2.1 (Debian: libjpeg62-turbo-dev) and reinstall vit_jax'
    )


def decode_region(
    stored: bytes | memoryview | np.ndarray,
    choose: ChooseRegion,
    *,
    exif_rotation: bool,
    max_pixels: int = MAX_PIXELS,
) -> Image:
    """Decodes an image and returns a region of it.

    With a reduction of 1, gives the same pixels and errors as `decode`.

    Args:
      stored: The bytes of an encoded file, or a uint8 array.
      choose: Maps the (height, width) of the upright image to a region of it and a reduction of 1,
        2, 4 or 8; is called once. Each side of a JPEG is decoded smaller by this factor, in the
        frequency domain. The region is extended to whole pixels of the smaller image.
      exif_rotation: Whether to apply the EXIF orientation.
      max_pixels: The most pixels that the whole image may have.
    """
    region = None
    stored = bytes(stored) if isinstance(stored, memoryview) else stored
    if is_jpeg(stored) and (header := read_header(stored, max_pixels)).is_plain_jpeg:
        orientation = read_orientation(stored) if exif_rotation else 1
        upright = header.height, header.width
        if orientation in _TRANSPOSED:
            upright = header.width, header.height
        region, reduction = choose(upright)
        stored_region, shape = _as_stored(region, upright, orientation, reduction)
        image = _decode_reduced(stored, shape)
        if image is not None:
            return apply_orientation(cut(image, stored_region), orientation)
    whole = decode(stored, exif_rotation=exif_rotation, max_pixels=max_pixels)
    if region is None:
        region, _ = choose((whole.shape[0], whole.shape[1]))
    return cut(whole, region)


def cut(image: Image, region: Region) -> Image:
    """Returns this region of decoded pixels."""
    top, left, rows, columns = region
    return image[top : top + rows, left : left + columns]


def _as_stored(
    region: Region, shape: tuple[int, int], orientation: int, reduction: int
) -> tuple[Region, tuple[int, int]]:
    """Converts a region and the shape of an upright image to the stored, reduced image."""

    def ceil_divide(pixels: int) -> int:
        return -(-pixels // reduction)

    top, left, rows, columns = region
    bottom = ceil_divide(top + rows)
    right = ceil_divide(left + columns)
    top = top // reduction
    left = left // reduction
    rows = bottom - top
    columns = right - left
    height = ceil_divide(shape[0])
    width = ceil_divide(shape[1])
    if orientation in _ROWS_REVERSED:
        top = height - top - rows
    if orientation in _COLUMNS_REVERSED:
        left = width - left - columns
    if orientation in _TRANSPOSED:
        return (left, top, columns, rows), (width, height)
    return (top, left, rows, columns), (height, width)


def _decode_reduced(stored: bytes, shape: tuple[int, int]) -> Image | None:
    """Decodes a JPEG that has this shape when reduced; returns None if it is damaged."""
    import simplejpeg

    with contextlib.suppress(ValueError):
        image = simplejpeg.decode_jpeg(stored, min_height=shape[0], min_width=shape[1])
        return image if image.shape[:2] == shape else None
    return None
