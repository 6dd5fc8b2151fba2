"""Reads and writes the preprocessor_config.json of transformers."""

import dataclasses
import re
from typing import Any, Literal, NamedTuple

from vit_jax.base import Record, UserError
from vit_jax.base.files import Limit
from vit_jax.checkpoints.formats.array_files import JsonObject
from vit_jax.checkpoints.formats.base import CLIP, HALF, IMAGENET, Scaling, check_scaling
from vit_jax.data.image_preprocessing import CentralCrop, Crop, Preprocessing, Resize, ResizeMethod
from vit_jax.models import ViTConfig

Size = int | tuple[int, int] | dict[str, int]
# By Pillow's constants.
_RESIZE_METHODS: dict[int, ResizeMethod] = {
    1: 'lanczos_antialias',
    2: 'bilinear_antialias',
    3: 'bicubic_antialias',
}
_IMAGENET = {'image_mean': IMAGENET[0], 'image_std': IMAGENET[1]}
_CLIP = {
    'image_mean': CLIP[0],
    'image_std': CLIP[1],
    'resample': 3,
    'do_center_crop': True,
    'default_to_square': False,
}
# Keys without effect on RGB images, and keys that `parse` checks separately.
_NO_EFFECT = r'_.*|\w+_(type|class|format|grouping)|device|do_(convert_rgb|resize|pad)|pad_size'
# Default values of the classes XImageProcessor, by X.
_DEFAULTS: dict[str, dict[str, Any]] = {
    'ViT': {'resample': 2},
    'Siglip': {'resample': 3},
    'DeiT': {'resample': 3, 'size': 256, 'do_center_crop': True},
    'DINOv3ViT': _IMAGENET,
    'CLIP': _CLIP,
    'Bit': _CLIP,
    'Dinov2': _CLIP | _IMAGENET | {'size': 256},  # BitImageProcessor as published with DINOv2
}


@dataclasses.dataclass
class _Processor(Record):
    """The keys of a preprocessor_config.json."""

    size: Size = 224
    crop_size: Size = 224
    default_to_square: bool = True  # a single number sets both sides; False: the shorter one
    resample: Literal[1, 2, 3] = 2
    image_mean: Scaling = HALF
    image_std: Scaling = HALF
    do_center_crop: bool = False
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True

    def check(self) -> None:
        check_scaling(self, 'image_mean', 'image_std')


def parse(declared: JsonObject, family: str) -> tuple[Preprocessing, tuple[int, int]]:
    """Parses a preprocessor_config.json.

    Args:
      declared: The JSON object; empty if there is no such file.
      family: The model_type. It determines the class of the processor if the file does not.

    Returns:
      The preprocessing, and the size (height, width) of the images that it produces.

    Raises:
      UserError: If the preprocessing is not supported.
    """
    start = family.replace('_', '')  # such as dinov3vit
    usual = next((kind for kind in _DEFAULTS if start.startswith(kind.lower())), 'ViT')
    name = declared.get('image_processor_type') or declared.get('feature_extractor_type') or usual
    kind = re.sub('(ImageProcessor(Fast|Pil)?|FeatureExtractor)$', '', str(name))
    if kind not in _DEFAULTS:
        known = ', '.join(f'{kind}ImageProcessor' for kind in _DEFAULTS)
        raise UserError(f'{declared.where}: {name} is not supported; expected one of {known}')
    declared.expect({'do_resize': True, 'do_pad': False})
    processor = declared.record(_Processor, ignored=_NO_EFFECT, defaults=_DEFAULTS[kind])
    crop, size = _crop(processor, declared.where)
    factor = processor.rescale_factor if processor.do_rescale else 1.0
    mean = processor.image_mean if processor.do_normalize else (0.0, 0.0, 0.0)
    std = processor.image_std if processor.do_normalize else (1.0, 1.0, 1.0)
    scaled_mean: Any = tuple(value / factor for value in mean)
    scaled_std: Any = tuple(value / factor for value in std)
    preprocessing = Preprocessing(crop=crop, exif_rotation=False, mean=scaled_mean, std=scaled_std)
    return preprocessing, size


class _TargetSize(NamedTuple):
    """Size of a resized or cropped image."""

    keep_aspect: bool  # if true, height and width are both the target length of the shorter side
    height: int
    width: int


def _crop(processor: _Processor, where: str) -> tuple[Crop, tuple[int, int]]:
    """Returns the crop, and the size (height, width) of its result."""
    is_square = processor.default_to_square
    keep_aspect, height, width = _target_size(processor.size, f'{where}: size', is_square=is_square)
    if not all(1 <= side <= Limit.MODEL_SIDE for side in (height, width)):
        raise _unsupported(processor, where, f'sides from 1 to {Limit.MODEL_SIDE:,} pixels')
    method = _RESIZE_METHODS[processor.resample]
    if not processor.do_center_crop:
        if keep_aspect:
            raise _unsupported(processor, where, 'height and width')
        return Resize(resize=method), (height, width)
    cropped = _target_size(processor.crop_size, f'{where}: crop_size', is_square=True)
    is_within = cropped.height <= height and cropped.width <= width
    has_same_aspect = keep_aspect or height * cropped.width == width * cropped.height
    if not is_within or not has_same_aspect:
        expected = 'a crop within the size, with the same aspect ratio'
        raise _unsupported(processor, where, expected)
    crop = CentralCrop(
        scale=min(height, width) / min(cropped.height, cropped.width),
        keep_aspect=keep_aspect,
        resize=method,
        rounding='transformers',
    )
    return crop, (cropped.height, cropped.width)


def _unsupported(processor: _Processor, where: str, expected: str) -> UserError:
    sizes = f'size={processor.size}, crop_size={processor.crop_size}'
    return UserError(f'{where}: {sizes} is not supported; expected {expected}')


def _target_size(size: Size, where: str, *, is_square: bool) -> _TargetSize:
    """Returns the target size. Raises UserError if `size` has other keys or another length."""
    match size:
        case int():
            return _TargetSize(keep_aspect=not is_square, height=size, width=size)
        case {'shortest_edge': edge} if len(size) == 1:
            return _TargetSize(keep_aspect=True, height=edge, width=edge)
        case (height, width) | {'height': height, 'width': width} if len(size) == 2:
            return _TargetSize(keep_aspect=False, height=height, width=width)
    raise UserError(f'{where}={size} is not supported; expected height and width, or shortest_edge')


def describe(config: ViTConfig, preprocessing: Preprocessing) -> dict[str, Any]:
    """Returns the preprocessor_config.json that is closest to a preprocessing."""
    crop = preprocessing.crop
    size = _named(config.image_size)
    values: dict[str, Any] = {'image_processor_type': 'ViTImageProcessor', 'size': size}
    if isinstance(crop, CentralCrop):
        if crop.keep_aspect and size['height'] != size['width']:  # the shorter side covers both
            crop = dataclasses.replace(crop, rounding='transformers')
        larger = crop.resized_size(config.image_size, config.image_size)
        resized = {'shortest_edge': min(larger)} if crop.keep_aspect else _named(larger)
        values = {'image_processor_type': 'BitImageProcessor', 'do_center_crop': True}
        values |= {'size': resized, 'crop_size': size}
    numbers = {method: number for number, method in _RESIZE_METHODS.items()}
    return values | {
        'resample': numbers.get(getattr(crop, 'resize', 'bilinear'), 2),
        'image_mean': [value / 255 for value in preprocessing.mean],
        'image_std': [value / 255 for value in preprocessing.std],
    }


def _named(size: tuple[int, int]) -> dict[str, int]:
    return {'height': size[0], 'width': size[1]}
