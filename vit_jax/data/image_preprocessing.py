"""What happens to one stored image on the host: decoded, then cut or squeezed to one size."""

import dataclasses
import importlib.util
import math
from typing import Any, ClassVar, Literal

import numpy as np

from vit_jax.base.array_types import Float, UInt8
from vit_jax.base.errors import UserError
from vit_jax.base.records import Record
from vit_jax.base.resampling import half_pixel

# How images are resized: the paper's code, TensorFlow and OpenCV do not smooth before they shrink
# an image; PyTorch's image processors (Pillow) do.
ResizeMethod = Literal['bilinear', 'bilinear_antialias', 'bicubic_antialias']

_HAS_SIMPLEJPEG = importlib.util.find_spec('simplejpeg') is not None
_EXIF_WITHIN = 2**16 + 64  # bytes: the first segments of a file, of at most 64 KiB each
Image = UInt8[np.ndarray, '_ _ 3']
Size = tuple[int, int]


@dataclasses.dataclass(kw_only=True)
class Resize(Record):
    """The whole image squeezed to the size, aspect not kept.

    What the paper's fine-tuning code does at evaluation.
    """

    random: ClassVar[bool] = False
    resize: ResizeMethod = 'bilinear'

    def __call__(self, image: Image, size: Size, rng: np.random.Generator | None) -> Image:
        return _resized(image, size, self.resize)


@dataclasses.dataclass(kw_only=True)
class CentralCrop(Record):
    """The image at `scale` times the size that it needs to cover; its middle cut out."""

    random: ClassVar[bool] = False
    scale: float = 256 / 224
    keep_aspect: bool = True  # False: squeezed to `scale` times the size, as in big_vision's probes
    resize: ResizeMethod = 'bilinear'

    def __call__(self, image: Image, size: Size, rng: np.random.Generator | None) -> Image:
        if self.keep_aspect:
            image = _covering(image, size, self.scale, self.resize)
        else:
            larger = round(size[0] * self.scale), round(size[1] * self.scale)
            image = _resized(image, larger, self.resize)
        top, left = (image.shape[0] - size[0]) // 2, (image.shape[1] - size[1]) // 2
        return image[top : top + size[0], left : left + size[1]]


@dataclasses.dataclass(kw_only=True)
class RandomCrop(Record):
    """As CentralCrop, but cut anywhere. 448 pixels for a crop of 384 in the paper's transfers."""

    random: ClassVar[bool] = True
    scale: float = 448 / 384

    def __call__(self, image: Image, size: Size, rng: np.random.Generator | None) -> Image:
        if rng is None:
            raise UserError('RandomCrop needs a random generator: it is for training only')
        image = _covering(image, size, self.scale, 'bilinear')
        top, left = (
            rng.integers(0, have - want + 1)
            for have, want in zip(image.shape[:2], size, strict=True)
        )
        return image[top : top + size[0], left : left + size[1]]


@dataclasses.dataclass(kw_only=True)
class InceptionCrop(Record):
    """A random part of the image, of random area and aspect, squeezed to the size.

    Drawn as TensorFlow's `sample_distorted_bounding_box` does, which the paper's code calls: the
    aspect first, then the height evenly among those that give an area within the range and fit
    into the image. Where none does in 100 attempts, it is the whole image.
    """

    random: ClassVar[bool] = True
    area: tuple[float, float] = (0.05, 1.0)  # of the image's
    aspect: tuple[float, float] = (3 / 4, 4 / 3)  # width / height

    def __call__(self, image: Image, size: Size, rng: np.random.Generator | None) -> Image:
        if rng is None:
            raise UserError('InceptionCrop needs a random generator: it is for training only')
        height, width = image.shape[:2]
        for _ in range(100):
            first, second, down, right = rng.random(4).tolist()
            aspect = self.aspect[0] + first * (self.aspect[1] - self.aspect[0])
            low, high = (round(math.sqrt(a * height * width / aspect)) for a in self.area)
            high = min(high, height, int((width + 0.5) / aspect))
            rows = min(low, high) + int(second * (max(0, high - low) + 1))
            columns = round(rows * aspect)
            share = rows * columns / (height * width)
            if columns <= width and self.area[0] <= share <= self.area[1] and min(rows, columns):
                top = int(down * (height - rows + 1))
                left = int(right * (width - columns + 1))
                image = image[top : top + rows, left : left + columns]
                break
        return _resized(image, size, 'bilinear')


Crop = Resize | CentralCrop | RandomCrop | InceptionCrop


@dataclasses.dataclass(kw_only=True)
class Preprocessing(Record):
    """From a stored image to what the model sees, where nothing is random.

    It belongs to a checkpoint and is saved with it: evaluation, few-shot and prediction use it.
    Pixel values 0 to 255 become (value - mean) / std, by channel.
    """

    crop: Crop = dataclasses.field(default_factory=Resize)
    exif_rotation: bool = True  # False: as the original code, which ignores the camera's rotation
    mean: tuple[float, float, float] = (127.5, 127.5, 127.5)
    std: tuple[float, float, float] = (127.5, 127.5, 127.5)

    def scaled(self, images: Any) -> Any:
        """Pixel values as the model takes them, float32: arrays of numpy or of jax."""
        mean, std = (np.asarray(values, np.float32) for values in (self.mean, self.std))
        return (images.astype(np.float32) - mean) / std


def decode(stored: bytes | np.ndarray, *, exif_rotation: bool) -> Image:
    """The RGB image, 8 bits a channel, from an encoded file's bytes or from a uint8 array.

    Grey, CMYK, 16-bit and palette images become RGB; transparency is dropped. The content counts,
    not the file's name. Raises UserError where the bytes are no whole image.
    """
    if isinstance(stored, np.ndarray):
        image = stored[..., None] if stored.ndim == 2 else stored
        return np.repeat(image, 3, axis=-1) if image.shape[-1] == 1 else image
    fast = _fast_jpeg(stored, exif_rotation=exif_rotation)
    if fast is not None:
        return fast
    import cv2  # loads here, so that the model and the update step do not need it

    flags = cv2.IMREAD_COLOR_RGB | (0 if exif_rotation else cv2.IMREAD_IGNORE_ORIENTATION)
    if not stored:
        raise UserError('the file is empty')
    try:
        decoded: Image | None = cv2.imdecode(np.frombuffer(stored, np.uint8), flags)
    except cv2.error as error:
        raise UserError(f'not a readable image: {error.err}') from error
    if decoded is None:
        raise UserError('not a whole image of a known format')
    return decoded


def _fast_jpeg(stored: bytes, *, exif_rotation: bool) -> Image | None:
    """A JPEG that needs no rotation, the same bits a tenth faster; None where it is none."""
    if not _HAS_SIMPLEJPEG or not stored.startswith(b'\xff\xd8'):
        return None
    if exif_rotation and b'Exif\0' in stored[:_EXIF_WITHIN]:
        return None
    import simplejpeg

    try:
        return simplejpeg.decode_jpeg(stored)
    except ValueError:  # of a kind that it does not know, or damaged: OpenCV decides
        return None


def _resized(image: Image, size: Size, resize: str) -> Image:
    import cv2

    if image.shape[:2] == size:
        return image
    if resize == 'bilinear':
        return cv2.resize(image, size[::-1], interpolation=cv2.INTER_LINEAR)
    # Pillow keeps 8 bits between its two passes, and begins with rows only where they alone shrink.
    rows_first = size[0] < image.shape[0] and size[1] > image.shape[1]
    for axis in (0, 1) if rows_first else (1, 0):
        cubic = resize == 'bicubic_antialias'
        weights = half_pixel(image.shape[axis], size[axis], cubic=cubic, antialias=True)
        image = _along(image, weights, axis=axis)
    return image


def _along(image: Image, weights: Float[np.ndarray, 'new old'], *, axis: int) -> Image:
    """The image resampled along one axis: one sum over the few pixels that each new one takes."""
    new, old = weights.shape
    taps = int((weights != 0).sum(axis=1).max())
    first = np.minimum((weights != 0).argmax(axis=1), old - taps)
    shape = [1, 1, 1]
    shape[axis] = new
    total: np.ndarray | float = 0.0
    for tap in range(taps):
        weight = weights[np.arange(new), first + tap].astype(np.float32).reshape(shape)
        total = total + image.take(first + tap, axis=axis) * weight
    return np.clip(np.rint(total), 0, 255).astype(np.uint8)


def _covering(image: Image, size: Size, scale: float, resize: str) -> Image:
    """The image resized, aspect kept, to just cover `scale` times the size."""
    height, width = image.shape[:2]
    factor = scale * max(size[0] / height, size[1] / width)
    covering = max(size[0], round(height * factor)), max(size[1], round(width * factor))
    return _resized(image, covering, resize)
