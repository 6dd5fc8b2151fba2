"""Crops or resizes images on the host to the size of the model, and scales their pixels.

OpenCV and Pillow are imported where they are used: the model and the update step need neither.
"""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from vit_jax.base import Array, Float, Num, Record, require, require_between
from vit_jax.data.image_decoding import MAX_PIXELS, Image, Region, cut, decode, decode_region

# `bilinear` is OpenCV's INTER_LINEAR, as in the paper's code: no smoothing before an image shrinks.
# The others are Pillow's, as in PyTorch's image processors, which smooth.
ResizeMethod = Literal['bilinear', 'bilinear_antialias', 'bicubic_antialias', 'lanczos_antialias']
NumpyOrJax = TypeVar('NumpyOrJax', np.ndarray, Array)
Size = tuple[int, int]
Sides = tuple[Any, Any]  # a size too, perhaps of numbers that jax traces


@dataclasses.dataclass(kw_only=True)
class Resize(Record):
    """The whole image resized without keeping its aspect, as in the paper's evaluation."""

    random: ClassVar[bool] = False
    resize: ResizeMethod = 'bilinear'  # the others average what is made smaller

    def __call__(self, image: Image, size: Size, rng: np.random.Generator | None) -> Image:
        return _resized(image, size, self.resize)

    def placement(self, shape: Sides, size: Size) -> tuple[Sides, Sides]:
        """Returns the size that an image of this shape is resized to, and the crop's corner."""
        return size, (0, 0)


@dataclasses.dataclass(kw_only=True)
class CentralCrop(Record):
    """The image resized to just cover `scale` times the size, then its middle.

    Sizes are rounded to the nearest pixel, and the place of the crop down. Other libraries round
    sizes down; timm, like torchvision, rounds the place of the crop to the nearest even pixel.
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
        """Returns the size that an image of this shape is resized to, and the crop's corner."""
        resized = self.larger(shape, size)
        spare = resized[0] - size[0], resized[1] - size[1]
        top, left = (_rounded(n, 2) if self.rounding == 'timm' else n // 2 for n in spare)
        return resized, (top, left)

    def larger(self, old: Sides, size: Size) -> Sides:
        """Returns the size that an image of the size `old` is resized to before it is cropped."""
        # The scale is a quotient: a product just below a whole number is that number.
        nearest = self.rounding == 'nearest'
        rounded = round if nearest else lambda side: math.floor(round(side, 6))
        height, width = rounded(size[0] * self.scale), rounded(size[1] * self.scale)
        if not self.keep_aspect:
            return height, width
        if self.rounding == 'transformers':  # the shorter side, whatever the shape of the crop
            height = width = max(min(height, width), *size)
        # timm's ResizeKeepRatio, used for sizes that are no squares, rounds to the nearest.
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
        assert rng is not None  # random crops are for training only
        scaled = round(size[0] * self.scale), round(size[1] * self.scale)
        if self.keep_aspect:
            scaled = _covering(image.shape[:2], scaled, _rounded)
        image = _resized(image, scaled, 'bilinear')
        top, left = (rng.integers(0, h - s + 1) for h, s in zip(image.shape[:2], size, strict=True))
        return image[top : top + size[0], left : left + size[1]]


@dataclasses.dataclass(kw_only=True)
class InceptionCrop(Record):
    """A region of random area and aspect, resized to the size (Szegedy et al. 2015).

    With `reduced`, a JPEG is decoded at a half, a quarter or an eighth of its size if at least
    2 x 2 pixels are left for each of the result. Only large photos change: for a result of 224
    pixels, regions of 896 and more.
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
        assert rng is not None  # random crops are for training only
        return _resized(cut(image, self.region(image.shape[:2], rng)), size, 'bilinear')

    def region(self, shape: Size, rng: np.random.Generator) -> Region:
        """Draws the top, left, height and width of a part of an image of this shape.

        As TensorFlow's `sample_distorted_bounding_box` in the paper's code: first the aspect, then
        the height, uniformly among those that give a legal area and fit into the image. After 100
        attempts without one, it is the whole image.
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
        """Returns 1, 2, 4 or 8: how much smaller a JPEG is decoded for this region and result."""
        if not self.reduced:
            return 1
        larger = min(side // (2 * wanted) for side, wanted in zip(region, size, strict=True))
        return next((n for n in (8, 4, 2) if n <= larger), 1)


Crop = Resize | CentralCrop | RandomCrop | InceptionCrop


@dataclasses.dataclass(kw_only=True)
class Preprocessing(Record):
    """How a stored image becomes the model's input (see `normalize`); saved in checkpoints."""

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
            scale = 'expected a scale of 0 to 255, not of 0 to 1; multiply by 255'
            require(max(values) > 0.95 or not any(values), f'{name}={values}: {scale}')


def normalize(
    images: Num[NumpyOrJax, '... c'], preprocessing: Preprocessing
) -> Float[NumpyOrJax, '... c']:
    """Maps pixels of 0 to 255 to the model's float32 input: (value - mean) / std by channel."""
    mean, std = (np.asarray(v, np.float32) for v in (preprocessing.mean, preprocessing.std))
    return (images.astype(np.float32) - mean) / std


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
    """Returns the crop of the decoded image, `crop(decode(stored), size, rng)`.

    Decodes no more of a JPEG than an InceptionCrop keeps, to the same bits and with the same
    errors; but a large one at a smaller size, see `InceptionCrop.reduced`. Damage below the crop is
    found only if a JPEG is read `to_end`, which is not needed for one that is known to be whole.
    """
    how: dict[str, Any] = {'exif_rotation': exif_rotation, 'max_pixels': max_pixels}
    if not isinstance(crop, InceptionCrop) or rng is None:
        return crop(decode(stored, **how), size, rng)

    def choose(shape: Size) -> tuple[Region, int]:
        region = crop.region(shape, rng)
        return region, crop.reduction(region[2:], size)

    return _resized(decode_region(stored, choose, to_end=to_end, **how), size, 'bilinear')


def _resized(image: Image, size: Size, method: ResizeMethod) -> Image:
    if image.shape[:2] == size:
        return image
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
    """`round(number / divisor)` of whole numbers, which jax may trace."""
    quotient, rest = number // divisor, number % divisor
    return quotient + (2 * rest + quotient % 2 > divisor)  # a half is rounded to the even number


def _larger(one: Any, other: Any) -> Any:
    """`max` of numbers that jax may trace."""
    return one + (other - one) * (other > one)
