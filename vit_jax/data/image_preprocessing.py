"""Crops and resizes images on the host to the model's image size, and normalizes pixels.

OpenCV and Pillow are imported inside functions because the model and the update step need neither.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from vit_jax.base import (
    Array,
    Bool,
    Float,
    Num,
    Record,
    UInt8,
    UInt64,
    UserError,
    require,
    require_between,
)
from vit_jax.base.files import Limit
from vit_jax.data import sampling
from vit_jax.data.image_decoding import (
    MAX_PIXELS,
    Image,
    Region,
    apply_orientation,
    cut,
    decode,
    decode_region,
    region_decoder,
)

# `bilinear` is OpenCV's INTER_LINEAR without antialiasing, as in the paper's code. The others are
# Pillow's methods with antialiasing, as in PyTorch's image processors.
ResizeMethod = Literal['bilinear', 'bilinear_antialias', 'bicubic_antialias', 'lanczos_antialias']
NumpyOrJax = TypeVar('NumpyOrJax', np.ndarray, Array)
Size = tuple[int, int]
TracedSize = tuple[Any, Any]  # a size whose numbers may be traced by jax


@dataclasses.dataclass(kw_only=True)
class Resize(Record):
    """Resizes the whole image without keeping its aspect ratio, as in the paper's evaluation."""

    random: ClassVar[bool] = False
    resize: ResizeMethod = 'bilinear'  # the other methods use antialiasing

    def __call__(self, image: Image, size: Size, rng: np.random.Generator | None) -> Image:
        """Returns the resized image (h w 3); `rng` is not used."""
        return _resize(image, size, self.resize)

    def placement(self, shape: TracedSize, size: Size) -> tuple[TracedSize, TracedSize]:
        """Returns the resized size of an image of this shape, and the top left of the crop."""
        return size, (0, 0)


@dataclasses.dataclass(kw_only=True)
class CentralCrop(Record):
    """Resizes the image to just cover `scale` times the image size, and crops its center.

    With `rounding='nearest'`, sizes are rounded to the nearest pixel and the position of the crop
    is rounded down. timm and transformers round sizes down. timm, like torchvision, rounds the
    position of the crop to the nearest pixel, and a half to the even one.
    """

    random: ClassVar[bool] = False
    scale: float = 256 / 224  # ratio of the resized image to the crop
    keep_aspect: bool = True  # False: resize to exactly `scale` times the size (big_vision probes)
    resize: ResizeMethod = 'bilinear'  # the other methods use antialiasing
    rounding: Literal['nearest', 'timm', 'transformers'] = 'nearest'  # how sizes are rounded

    def check(self) -> None:
        require_between(self, 'scale', low=1, high=16)

    def __call__(self, image: Image, size: Size, rng: np.random.Generator | None) -> Image:
        """Returns the crop (h w 3) of an image; `rng` is not used."""
        resized, (top, left) = self.placement(image.shape[:2], size)
        image = _resize(image, resized, self.resize)
        return image[top : top + size[0], left : left + size[1]]

    def placement(self, shape: TracedSize, size: Size) -> tuple[TracedSize, TracedSize]:
        """Returns the resized size of an image of this shape, and the top left of the crop."""
        resized = self.resized_size(shape, size)
        divide = _rounded if self.rounding == 'timm' else operator.floordiv
        top = divide(resized[0] - size[0], 2)
        left = divide(resized[1] - size[1], 2)
        return resized, (top, left)

    def resized_size(self, old: TracedSize, size: Size) -> TracedSize:
        """Returns the size to which an image of size `old` is resized before cropping."""
        rounds_to_nearest = self.rounding == 'nearest'

        def scaled(side: int) -> int:
            # `scale` is a quotient such as 256 / 224: a product may be just below a whole number.
            exact = side * self.scale
            return round(exact) if rounds_to_nearest else math.floor(round(exact, 6))

        height = scaled(size[0])
        width = scaled(size[1])
        if not self.keep_aspect:
            return height, width
        if self.rounding == 'transformers':  # scales the shorter side even if the crop is no square
            height = width = max(min(height, width), *size)
        # timm resizes to a size that is not square with ResizeKeepRatio, which rounds to nearest.
        keeps_ratio = self.rounding == 'timm' and height != width
        divide = _rounded if rounds_to_nearest or keeps_ratio else operator.floordiv
        return _covering_size(old, (height, width), divide)


@dataclasses.dataclass(kw_only=True)
class RandomCrop(Record):
    """Crops the resized image at a random place: 384 of 448 pixels in the paper's fine-tuning."""

    random: ClassVar[bool] = True
    scale: float = 448 / 384  # ratio of the resized image to the crop
    keep_aspect: bool = True  # False: resize to exactly `scale` times the size, as in BiT

    def check(self) -> None:
        require_between(self, 'scale', low=1)

    def __call__(self, image: Image, size: Size, rng: np.random.Generator | None) -> Image:
        """Returns a crop (h w 3) of an image; `rng` draws its position."""
        assert rng is not None  # random crops are for training only
        scaled = round(size[0] * self.scale), round(size[1] * self.scale)
        if self.keep_aspect:
            scaled = _covering_size(image.shape[:2], scaled, _rounded)
        image = _resize(image, scaled, 'bilinear')
        return _crop_at_random(image, size, rng)


@dataclasses.dataclass(kw_only=True)
class SimpleRandomCrop(Record):
    """Resizes the shorter side to the image size, pads and crops at random (DeiT III, section 3.2).

    The crop contains most of the image, unlike an InceptionCrop. The padding mirrors the image
    without repeating its edge. Sizes are rounded down, as in torchvision.
    """

    random: ClassVar[bool] = True
    padding: int = 4  # mirrored pixels on each side
    resize: ResizeMethod = 'bicubic_antialias'  # bilinear is faster, but without antialiasing

    def check(self) -> None:
        require_between(self, 'padding', low=0, high=1024)

    def __call__(self, image: Image, size: Size, rng: np.random.Generator | None) -> Image:
        """Returns a crop (h w 3) of an image; `rng` draws its position."""
        import cv2

        assert rng is not None  # random crops are for training only
        image = _resize(
            image, _covering_size(image.shape[:2], size, operator.floordiv), self.resize
        )
        pixels = self.padding
        image = cv2.copyMakeBorder(image, pixels, pixels, pixels, pixels, cv2.BORDER_REFLECT_101)
        return _crop_at_random(image, size, rng)


@dataclasses.dataclass(kw_only=True)
class InceptionCrop(Record):
    """Crops a region of random area and aspect ratio, and resizes it (Szegedy et al. 2015).

    With `reduced`, a JPEG is decoded at 1/2, 1/4 or 1/8 of its size if that leaves at least 2 x 2
    pixels for each pixel of the result. Only large photos change: at an image size of 224, regions
    of 896 pixels and more.
    """

    random: ClassVar[bool] = True
    area: tuple[float, float] = (0.05, 1.0)  # range of the region's fraction of the image
    aspect: tuple[float, float] = (3 / 4, 4 / 3)  # range of width / height
    reduced: bool = True  # decode a large JPEG at 1/2, 1/4 or 1/8 of its size

    def check(self) -> None:
        require_between(self, 'area', above=0, high=1)
        require_between(self, 'aspect', above=0)
        for name in 'area', 'aspect':
            low, high = getattr(self, name)
            require(low <= high, f'{name}={(low, high)}: expected the smaller number first')

    def __call__(self, image: Image, size: Size, rng: np.random.Generator | None) -> Image:
        """Returns a resized region (h w 3) of an image; `rng` draws the region."""
        assert rng is not None  # random crops are for training only
        region = self.region(image.shape[:2], rng.integers(2**64, dtype=np.uint64))
        return _resize(cut(image, region), size, 'bilinear')

    def region(self, shape: Size, key: np.uint64) -> Region:
        """Draws the top, left, height and width of a region of an image of this shape.

        Follows TensorFlow's `sample_distorted_bounding_box`, as in the paper's code: draws the
        aspect ratio, then the height, uniformly among the heights with an allowed area that fit
        into the image. Returns the whole image after 100 failed attempts. Attempt i uses the
        numbers 4 i to 4 i + 3 of the stream of the image's key. jpeg_region.c has the same rule.
        """
        height, width = shape
        for first in range(0, 400, 4):
            drawn = sampling.draw_uniform(np.array([key]), range(first, first + 4))
            ratio, size, down, right = drawn[0].tolist()
            aspect = self.aspect[0] + ratio * (self.aspect[1] - self.aspect[0])
            low = round(math.sqrt(self.area[0] * height * width / aspect))
            high = round(math.sqrt(self.area[1] * height * width / aspect))
            high = min(high, height, int((width + 0.5) / aspect))
            rows = min(low, high) + int(size * (max(0, high - low) + 1))
            columns = round(rows * aspect)
            share = rows * columns / (height * width)
            is_allowed = self.area[0] <= share <= self.area[1]  # rejects empty regions too
            if columns <= width and is_allowed:
                top = int(down * (height - rows + 1))
                left = int(right * (width - columns + 1))
                return top, left, rows, columns
        return 0, 0, height, width

    def reduction(self, region: Size, size: Size) -> int:
        """Returns the factor 1, 2, 4 or 8 by which a JPEG is reduced to decode this region."""
        if not self.reduced:
            return 1
        largest = min(region[0] // (2 * size[0]), region[1] // (2 * size[1]))
        return next((factor for factor in (8, 4, 2) if factor <= largest), 1)


Crop = Resize | CentralCrop | RandomCrop | SimpleRandomCrop | InceptionCrop


@dataclasses.dataclass(kw_only=True)
class Preprocessing(Record):
    """How a stored image becomes the model's input (see `normalize`); saved in checkpoints."""

    crop: Crop = dataclasses.field(default_factory=Resize)  # how images get the model's image size
    exif_rotation: bool = True  # False: ignore the EXIF orientation, as in the original code
    mean: tuple[float, float, float] = (127.5, 127.5, 127.5)  # subtracted from RGB of 0 to 255
    std: tuple[float, float, float] = (127.5, 127.5, 127.5)  # divides the difference

    def check(self) -> None:
        require(not self.crop.random, 'crop: got a random crop; set it as augmentation.crop')
        require_between(self, 'mean', low=0, high=255)
        require_between(self, 'std', low=0.1, high=10_000)
        for name in 'mean', 'std':  # rejects values for pixels of 0 to 1; a mean may be 0
            values = getattr(self, name)
            require(
                max(values) > 0.95 or not any(values),
                f'{name}={values}: expected values for pixels of 0 to 255, not 0 to 1; '
                'multiply by 255',
            )


def normalize(
    images: Num[NumpyOrJax, '... c'], preprocessing: Preprocessing
) -> Float[NumpyOrJax, '... c']:
    """Maps pixels of 0 to 255 to the model's float32 input: (pixel - mean) / std per channel."""
    mean = np.asarray(preprocessing.mean, np.float32)
    std = np.asarray(preprocessing.std, np.float32)
    return (images.astype(np.float32) - mean) / std


def decode_and_crop(
    stored: bytes | memoryview | np.ndarray,
    crop: Crop,
    size: Size,
    key: np.uint64 | None,
    *,
    exif_rotation: bool,
    max_pixels: int = MAX_PIXELS,
) -> Image:
    """Decodes and crops an image.

    An InceptionCrop decodes a large JPEG at a reduced size (see `InceptionCrop.reduced`).

    Args:
      stored: The bytes of an encoded file, or uint8 pixels.
      crop: The crop.
      size: The (height, width) of the result.
      key: The key of the image's random numbers; None for crops that are not random.
      exif_rotation: Whether to apply the EXIF orientation.
      max_pixels: The most pixels that the whole image may have.
    """
    options: dict[str, Any] = {'exif_rotation': exif_rotation, 'max_pixels': max_pixels}
    if not isinstance(crop, InceptionCrop) or key is None:
        rng = None if key is None else sampling.make_generators(np.array([key]))[0]
        return crop(decode(stored, **options), size, rng)

    def choose(shape: Size) -> tuple[Region, int]:
        region = crop.region(shape, key)
        return region, crop.reduction(region[2:], size)

    return _resize(decode_region(stored, choose, **options), size, 'bilinear')


_MOST_PIXELS = 2**22  # of the regions of a call, besides the first one


def crop_jpegs(
    files: Sequence[bytes | memoryview],
    crop: InceptionCrop,
    keys: UInt64[np.ndarray, 'n'],
    results: Sequence[UInt8[np.ndarray, 'h w 3']],
    *,
    exif_rotation: bool,
    max_pixels: int,
    to_end: Bool[np.ndarray, 'n'],
) -> list[bool]:
    """Decodes only the crops of JPEGs, and writes what `decode_and_crop` would return to `results`.

    Without a `region_decoder`, crops none of the files.

    Args:
      files: The bytes of encoded files.
      crop: The crop.
      keys: The keys of the images' random numbers.
      results: The memory for each crop.
      exif_rotation: Whether to apply the EXIF orientation.
      max_pixels: The most pixels that a whole image may have.
      to_end: For each file, whether to detect damage below the region, which takes an eighth of the
        decoding time of a photo of 0.1 MB.

    Returns:
      Whether each file was cropped. False for files that are not JPEGs, or are unusual, damaged or
      too large.
    """
    import cv2

    decoder = region_decoder()
    is_cropped = [False] * len(files)
    if decoder is None:
        return is_cropped
    height, width, _ = results[0].shape
    options = *crop.area, *crop.aspect, height, width, crop.reduced, exif_rotation, max_pixels
    regions = np.zeros((len(files), 7), np.int32)
    decoder.find_regions(tuple(files), np.ascontiguousarray(keys), regions, options)
    regions[:, 5] = to_end
    pixels = np.prod(regions[:, 2:4], axis=1, dtype=np.int64)  # 0: the decoder cannot read the file
    calls = np.cumsum(pixels) // _MOST_PIXELS
    for call in np.unique(calls[pixels > 0]):
        rows = np.flatnonzero((calls == call) & (pixels > 0)).tolist()
        images = tuple(np.empty((*regions[row, 2:4], 3), np.uint8) for row in rows)
        chosen = tuple(files[row] for row in rows)
        is_decoded = decoder.decode_regions(chosen, regions[rows], images)
        for row, image in itertools.compress(zip(rows, images, strict=True), is_decoded):
            turned = apply_orientation(image, int(regions[row, 6]))
            cv2.resize(turned, (width, height), results[row], interpolation=cv2.INTER_LINEAR)
            is_cropped[row] = True
    return is_cropped


def _crop_at_random(image: Image, size: Size, rng: np.random.Generator) -> Image:
    height, width = size
    top = rng.integers(0, image.shape[0] - height + 1)
    left = rng.integers(0, image.shape[1] - width + 1)
    return image[top : top + height, left : left + width]


def _resize(image: Image, size: Size, method: ResizeMethod) -> Image:
    if image.shape[:2] == size:
        return image
    old_height, old_width = image.shape[:2]
    height, width = size
    if height * width > Limit.RESIZED_PIXELS:
        raise UserError(
            f'{old_width:,} x {old_height:,} pixels, which would be resized to '
            f'{width:,} x {height:,}; expected at most {Limit.RESIZED_PIXELS:,} pixels'
        )
    if method == 'bilinear':
        import cv2

        return cv2.resize(image, size[::-1], interpolation=cv2.INTER_LINEAR)
    from PIL import Image as pillow

    name = method.removesuffix('_antialias').upper()
    return np.asarray(pillow.fromarray(image).resize(size[::-1], pillow.Resampling[name]))


def _covering_size(shape: TracedSize, size: Size, divide: Callable[[Any, Any], Any]) -> TracedSize:
    """Returns the smallest size with the aspect ratio of `shape` that covers `size`."""
    height, width = shape
    rows, columns = size
    return (
        _max(rows, divide(columns * height, width)),
        _max(columns, divide(rows * width, height)),
    )


def _rounded(number: Any, divisor: Any) -> Any:
    """Computes `round(number / divisor)` of integers that jax may trace."""
    quotient = number // divisor
    remainder = number % divisor
    rounds_up = 2 * remainder + quotient % 2 > divisor  # a half is rounded to the even number
    return quotient + rounds_up


def _max(first: Any, second: Any) -> Any:
    """Computes `max(first, second)` of integers that jax may trace."""
    return first + (second - first) * (second > first)
