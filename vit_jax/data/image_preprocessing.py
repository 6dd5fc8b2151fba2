"""Decodes stored images on the host and crops or resizes them to the size of the model.

What decodes and resizes is imported where it is used: the model and the update step need none.
"""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np

from vit_jax.base import Array, Float, Num, Record, UInt8, UserError, require, require_between
from vit_jax.data import jpeg_regions
from vit_jax.data.image_headers import Header, open_with_pillow, read_header

# `bilinear` is OpenCV's INTER_LINEAR, as in the paper's code: no smoothing before an image shrinks.
# The others are Pillow's, as in PyTorch's image processors, which smooth.
ResizeMethod = Literal['bilinear', 'bilinear_antialias', 'bicubic_antialias', 'lanczos_antialias']

# OpenCV multiplies the colors of TIFF by the transparency, replaces those of transparent pixels of
# GIF, and reads no CMYK of JPEG 2000; Pillow gives them as they are stored.
# OpenCV scales no PPM whose largest value is not 255 either.
_BY_PILLOW = frozenset({'AVIF', 'HEIF', 'TIFF', 'GIF', 'JPEG2000', 'PPM'})
_ORIENTATION, _BITS, _PHOTOMETRIC, _PLANAR = 0x0112, 258, 262, 284  # tags of EXIF and TIFF
_EXIF_WITHIN = 2**16 + 64  # bytes: the first segments of a file, of at most 64 KiB each
# More than any camera's single shot (200 megapixels); 0.8 GB as decoded RGB.
MAX_PIXELS = 2**28
MOST_PIXELS = 2**30  # that OpenCV decodes at all
# Larger than any crop of a photo; a strip of 1 x 65,500 pixels would be resized to 4 billion.
MOST_RESIZED = 2**26
Image = UInt8[np.ndarray, '_ _ 3']
if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage
NumpyOrJax = TypeVar('NumpyOrJax', np.ndarray, Array)
Size = tuple[int, int]
Sides = tuple[Any, Any]  # a size too, which may be one of a function that is being traced


@dataclasses.dataclass(kw_only=True)
class Resize(Record):
    """The whole image resized without keeping its aspect, as in the paper's evaluation."""

    random: ClassVar[bool] = False
    resize: ResizeMethod = 'bilinear'  # the others average what is made smaller

    def __call__(self, image: Image, size: Size, rng: np.random.Generator | None) -> Image:
        return _resized(image, size, self.resize)

    def placement(self, shape: Sides, size: Size) -> tuple[Sides, Sides]:
        """The size that an image of this shape is resized to, and the corner of what is cut."""
        return size, (0, 0)


@dataclasses.dataclass(kw_only=True)
class CentralCrop(Record):
    """The image resized to just cover `scale` times the size, then its middle.

    Sizes are rounded to the nearest pixel, and the middle's place down. Other libraries round
    sizes down; timm, as torchvision, rounds the place to the nearest even pixel.
    """

    random: ClassVar[bool] = False
    scale: float = 256 / 224  # of the resized image to the crop
    keep_aspect: bool = True  # False: resized to exactly `scale` times the size (big_vision probes)
    resize: ResizeMethod = 'bilinear'  # the others average what is made smaller
    rounding: Literal['nearest', 'timm', 'transformers'] = 'nearest'  # of sizes to pixels

    def check(self) -> None:
        require_between(self, 'scale', low=1, high=16)

    def __call__(self, image: Image, size: Size, rng: np.random.Generator | None) -> Image:
        resized, (top, left) = self.placement(image.shape[:2], size)
        image = _resized(image, resized, self.resize)
        return image[top : top + size[0], left : left + size[1]]

    def placement(self, shape: Sides, size: Size) -> tuple[Sides, Sides]:
        """The size that an image of this shape is resized to, and the corner of what is cut."""
        resized = self.larger(shape, size)
        spare = resized[0] - size[0], resized[1] - size[1]
        top, left = (_rounded(n, 2) if self.rounding == 'timm' else n // 2 for n in spare)
        return resized, (top, left)

    def larger(self, old: Sides, size: Size) -> Sides:
        """The size to which an image of the size `old` is resized before it is cut."""
        # The scale is a quotient: a product just below a whole number is that number.
        nearest = self.rounding == 'nearest'
        rounded = round if nearest else lambda side: math.floor(round(side, 6))
        height, width = rounded(size[0] * self.scale), rounded(size[1] * self.scale)
        if not self.keep_aspect:
            return height, width
        if self.rounding == 'transformers':  # the shorter side, whatever the shape of the crop
            height = width = max(min(height, width), *size)
        # timm's ResizeKeepRatio, for images that are to be no squares, rounds to the nearest.
        nearest |= self.rounding == 'timm' and height != width
        return _covering(old, (height, width), _rounded if nearest else operator.floordiv)


@dataclasses.dataclass(kw_only=True)
class RandomCrop(Record):
    """A crop at a random place of the resized image: 384 of 448 pixels in the paper's transfers."""

    random: ClassVar[bool] = True
    scale: float = 448 / 384  # of the resized image to the crop
    keep_aspect: bool = True  # False: resized to exactly `scale` times the size, as in BiT

    def check(self) -> None:
        require_between(self, 'scale', low=1)

    def __call__(self, image: Image, size: Size, rng: np.random.Generator | None) -> Image:
        if rng is None:
            raise UserError('RandomCrop needs a random generator: it is for training only')
        scaled = round(size[0] * self.scale), round(size[1] * self.scale)
        if self.keep_aspect:
            scaled = _covering(image.shape[:2], scaled, _rounded)
        image = _resized(image, scaled, 'bilinear')
        top, left = (rng.integers(0, h - s + 1) for h, s in zip(image.shape[:2], size, strict=True))
        return image[top : top + size[0], left : left + size[1]]


@dataclasses.dataclass(kw_only=True)
class InceptionCrop(Record):
    """A region of random area and aspect, resized to the size (Szegedy et al. 2015).

    With `reduced` a JPEG of whose region every pixel of the result would have 4 x 4 or more is
    decoded at a half, a quarter or an eighth of its size, so that 2 x 2 or more are left to resize.
    That is for large photos: of a region below 896 pixels nothing changes for images of 224.
    """

    random: ClassVar[bool] = True
    area: tuple[float, float] = (0.05, 1.0)  # as a fraction of the image's
    aspect: tuple[float, float] = (3 / 4, 4 / 3)  # width / height
    reduced: bool = True  # decode a large JPEG at a half, a quarter or an eighth of its size

    def check(self) -> None:
        require_between(self, 'area', above=0, high=1)
        require_between(self, 'aspect', above=0)
        for name in 'area', 'aspect':
            low, high = getattr(self, name)
            require(low <= high, f'{name}={(low, high)}: expected the smaller number first')

    def __call__(self, image: Image, size: Size, rng: np.random.Generator | None) -> Image:
        if rng is None:
            raise UserError('InceptionCrop needs a random generator: it is for training only')
        top, left, rows, columns = self.region(image.shape[:2], rng)
        return _resized(image[top : top + rows, left : left + columns], size, 'bilinear')

    def region(self, shape: Size, rng: np.random.Generator) -> tuple[int, int, int, int]:
        """Top, left, height and width of a random part of an image of this shape.

        Drawn as by TensorFlow's `sample_distorted_bounding_box`, as in the paper's code: first the
        aspect, then the height, uniformly among those that give a legal area and fit into the
        image. After 100 attempts without one, it is the whole image.
        """
        height, width = shape
        for _ in range(100):
            first, second, down, right = rng.random(4).tolist()
            aspect = self.aspect[0] + first * (self.aspect[1] - self.aspect[0])
            low, high = (round(math.sqrt(a * height * width / aspect)) for a in self.area)
            high = min(high, height, int((width + 0.5) / aspect))
            rows = min(low, high) + int(second * (max(0, high - low) + 1))
            columns = round(rows * aspect)
            share = rows * columns / (height * width)
            if columns <= width and self.area[0] <= share <= self.area[1] and min(rows, columns):
                top, left = int(down * (height - rows + 1)), int(right * (width - columns + 1))
                return top, left, rows, columns
        return 0, 0, height, width

    def reduction(self, region: Size, size: Size) -> int:
        """At what fraction of its size a JPEG is decoded, for such a region and such a result."""
        if not self.reduced:
            return 1
        larger = min(side // (2 * wanted) for side, wanted in zip(region, size, strict=True))
        return next((n for n in (8, 4, 2) if n <= larger), 1)


Crop = Resize | CentralCrop | RandomCrop | InceptionCrop


@dataclasses.dataclass(kw_only=True)
class Preprocessing(Record):
    """How a stored image becomes the model's input, see `normalize`; saved with a checkpoint."""

    crop: Crop = dataclasses.field(default_factory=Resize)  # how it gets the model's size
    exif_rotation: bool = True  # False: the camera's rotation is ignored, as in the original code
    mean: tuple[float, float, float] = (127.5, 127.5, 127.5)  # of 0..255, subtracted
    std: tuple[float, float, float] = (127.5, 127.5, 127.5)  # then divided by

    def check(self) -> None:
        require(not self.crop.random, 'crop: random crops are for augmentation.crop')
        require_between(self, 'mean', low=0, high=255)
        require_between(self, 'std', low=0.1, high=10_000)
        for name in 'mean', 'std':  # of pixels: at least 1, or 0 where nothing is subtracted
            values = getattr(self, name)
            right = 'these are of 0..1, expected those of 0..255: multiply by 255'
            require(max(values) > 0.95 or not any(values), f'{name}={values}: {right}')


def normalize(
    images: Num[NumpyOrJax, '... c'], preprocessing: Preprocessing
) -> Float[NumpyOrJax, '... c']:
    """The model's input, float32, of pixel values 0 to 255: (value - mean) / std by channel."""
    mean, std = (np.asarray(v, np.float32) for v in (preprocessing.mean, preprocessing.std))
    return (images.astype(np.float32) - mean) / std


def decode(
    stored: bytes | np.ndarray, *, exif_rotation: bool, max_pixels: int = MAX_PIXELS
) -> Image:
    """The RGB image, 8 bits a channel, of an encoded file's bytes or of a uint8 array.

    Gray, CMYK, 16-bit and palette images become RGB; transparency is dropped, and the color of a
    transparent pixel is the stored one. The format is taken from the bytes, not from a file name.
    Raises UserError for bytes that are not a complete image, and, before anything is decoded, for
    one of more than `max_pixels`.
    """
    if isinstance(stored, np.ndarray):
        image = stored[..., None] if stored.ndim == 2 else stored
        return np.repeat(image, 3, axis=-1) if image.shape[-1] == 1 else image
    header = _bounded_header(stored, max_pixels)
    kind = header.kind
    if kind in _BY_PILLOW or header.is_cmyk:
        return _decode_with_pillow(stored, kind, exif_rotation)
    if kind == 'JPEG' and not (exif_rotation and _may_be_turned(stored)):
        import simplejpeg

        # The same bits as OpenCV's in 0.9 of the time. What it cannot read, Pillow judges.
        try:
            return simplejpeg.decode_jpeg(stored)
        except ValueError:
            return _decode_with_pillow(stored, kind, exif_rotation)
    import cv2

    flags = cv2.IMREAD_COLOR_RGB | (0 if exif_rotation else cv2.IMREAD_IGNORE_ORIENTATION)
    try:
        decoded: Image | None = cv2.imdecode(np.frombuffer(stored, np.uint8), flags)
    except cv2.error as error:
        raise UserError(f'not a readable image: {error.err}') from error
    if decoded is None:
        raise UserError('not a whole image of a known format')
    return decoded


def decode_and_crop(
    stored: bytes | np.ndarray,
    crop: Crop,
    size: Size,
    rng: np.random.Generator | None,
    *,
    exif_rotation: bool,
    max_pixels: int = MAX_PIXELS,
    to_end: bool = True,
) -> Image:
    """The crop of the decoded image, to the bit and with its errors; of large JPEGs, see
    InceptionCrop, that of a smaller one.

    Of a JPEG no more is decoded than an InceptionCrop keeps, where jpeg_regions.py can. Unless it
    is read `to_end`, which one that is known to be whole need not be, damage below it is not met.
    """
    if isinstance(stored, bytes) and isinstance(crop, InceptionCrop) and rng is not None:
        before = rng.bit_generator.state
        part = _region(stored, crop, size, rng, exif_rotation, max_pixels, to_end=to_end)
        if part is not None:
            return _resized(part, size, 'bilinear')
        rng.bit_generator.state = before
    image = decode(stored, exif_rotation=exif_rotation, max_pixels=max_pixels)
    return crop(image, size, rng)


def _region(
    stored: bytes,
    crop: InceptionCrop,
    size: Size,
    rng: np.random.Generator,
    exif_rotation: bool,
    max_pixels: int,
    *,
    to_end: bool,
) -> Image | None:
    """What the crop cuts from a JPEG; None of what has to be decoded whole."""
    if not stored.startswith(b'\xff\xd8'):
        return None
    header = _bounded_header(stored, max_pixels)
    if header.is_cmyk:
        return None
    turned = jpeg_regions.orientation(stored) if exif_rotation and _may_be_turned(stored) else 1
    if turned is None:
        return None
    shape = jpeg_regions.upright((header.height, header.width), turned)
    region = crop.region(shape, rng)
    reduction = crop.reduction(region[2:], size)
    return jpeg_regions.decode_region(
        stored, region, shape, turned, reduction=reduction, to_end=to_end
    )


def _bounded_header(stored: bytes, max_pixels: int) -> Header:
    require(len(stored) > 0, 'the file is empty')
    header = read_header(stored)
    if header.height * header.width > max_pixels:
        size = f'{header.width:,} x {header.height:,} pixels'
        raise UserError(f'{size}, more than max_pixels={max_pixels:,}: set that higher to read it')
    return header


def _may_be_turned(stored: bytes) -> bool:
    return stored.find(b'Exif\0', 0, _EXIF_WITHIN) >= 0


def _decode_with_pillow(stored: bytes, kind: str, exif_rotation: bool) -> Image:
    try:
        return to_rgb(open_with_pillow(stored, kind), exif_rotation=exif_rotation)
    except UserError:
        raise
    except Exception as error:  # of many kinds
        or_else = ', or a compression that is not supported' if kind == 'TIFF' else ''
        raise UserError(f'not a whole image{or_else}: {error}') from error


def to_rgb(image: 'PillowImage', *, exif_rotation: bool) -> Image:
    """The RGB pixels of a Pillow image, by the rules of `decode`."""
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


def _resized(image: Image, size: Size, method: ResizeMethod) -> Image:
    if image.shape[:2] == size:
        return image
    if size[0] * size[1] > MOST_RESIZED:
        shape, resized = (f'{width:,} x {height:,}' for height, width in (image.shape[:2], size))
        raise UserError(f'{shape} pixels are too long and thin; the crop would resize to {resized}')
    if method == 'bilinear':
        import cv2

        return cv2.resize(image, size[::-1], interpolation=cv2.INTER_LINEAR)
    from PIL import Image as pillow

    name = method.removesuffix('_antialias').upper()
    return np.asarray(pillow.fromarray(image).resize(size[::-1], pillow.Resampling[name]))


def _covering(shape: Sides, size: Size, divided: Callable[[Any, Any], Any]) -> Sides:
    """The smallest size of the aspect of `shape` that covers `size`."""
    (height, width), (rows, columns) = shape, size
    return (
        _larger(rows, divided(columns * height, width)),
        _larger(columns, divided(rows * width, height)),
    )


def _rounded(number: Any, divisor: Any) -> Any:
    """`round` of a quotient in whole numbers, which a function that is traced rounds alike."""
    quotient, rest = number // divisor, number % divisor
    return quotient + (2 * rest + quotient % 2 > divisor)  # of a half: to the even one


def _larger(one: Any, other: Any) -> Any:
    """`max`, which traced numbers do not have."""
    return one + (other - one) * (other > one)
