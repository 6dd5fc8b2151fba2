"""The preprocessor_config.json of transformers: how images are prepared, read and written."""

import dataclasses
import re
from typing import Any, Literal

from vit_jax.base import Record, UserError, require
from vit_jax.checkpoints.formats.array_files import JsonObject
from vit_jax.checkpoints.formats.base import CLIP, HALF, IMAGENET, Scaling, check_scaling
from vit_jax.data.image_preprocessing import CentralCrop, Crop, Preprocessing, Resize, ResizeMethod
from vit_jax.models import ViTConfig

Size = int | dict[str, int] | tuple[int, int]
# By Pillow's numbers.
_RESIZE_METHODS: dict[int, ResizeMethod] = {1: 'lanczos_antialias'}
_RESIZE_METHODS |= {2: 'bilinear_antialias', 3: 'bicubic_antialias'}
_IMAGENET = {'image_mean': IMAGENET[0], 'image_std': IMAGENET[1]}
_CLIP = {'image_mean': CLIP[0], 'image_std': CLIP[1], 'resample': 3}
_CLIP |= {'do_center_crop': True, 'default_to_square': False}
# What the classes do by default: XImageProcessor.
_DEFAULTS: dict[str, dict[str, Any]] = {
    'ViT': {'resample': 2},
    'Siglip': {'resample': 3},
    'DeiT': {'resample': 3, 'size': 256, 'do_center_crop': True},
    'DINOv3ViT': _IMAGENET,
    'CLIP': _CLIP,
    'Bit': _CLIP,
    'Dinov2': _CLIP | _IMAGENET | {'size': 256},  # Bit's, as published with DINOv2
}


@dataclasses.dataclass
class _Processor(Record):
    """The keys of a preprocessor_config.json."""

    size: Size = 224
    crop_size: Size = 224
    default_to_square: bool = True  # whether one number is both sides, or the shorter one
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
    """Returns the preprocessing, and the size (height, width) of the images that it makes.

    Args:
      declared: The preprocessor_config.json; empty if there is none.
      family: The class of processors, unless the file names another one.

    Raises:
      UserError: If the preprocessing is not supported.
    """
    name = declared.get('image_processor_type') or declared.get('feature_extractor_type')
    if name is not None:
        family = re.sub('(ImageProcessor(Fast|Pil)?|FeatureExtractor)$', '', str(name))
    known = ', '.join(f'{each}ImageProcessor' for each in _DEFAULTS)
    wrong = f'{declared.where}: {name} is not supported: expected one of {known}'
    require(family in _DEFAULTS, wrong)
    declared.expect({'do_resize': True, 'do_pad': False})
    processor = declared.record(_Processor, defaults=_DEFAULTS[family])
    crop, size = _crop(processor, declared.where)
    factor = processor.rescale_factor if processor.do_rescale else 1.0
    mean = processor.image_mean if processor.do_normalize else (0.0, 0.0, 0.0)
    std = processor.image_std if processor.do_normalize else (1.0, 1.0, 1.0)
    preprocessing = Preprocessing(
        crop=crop,
        exif_rotation=False,
        mean=(mean[0] / factor, mean[1] / factor, mean[2] / factor),
        std=(std[0] / factor, std[1] / factor, std[2] / factor),
    )
    return preprocessing, size


def _crop(processor: _Processor, where: str) -> tuple[Crop, tuple[int, int]]:
    """Returns how an image gets its size, and the size."""
    method = _RESIZE_METHODS[processor.resample]
    resized = _sides(processor.size, square=processor.default_to_square)
    cut = _sides(processor.crop_size, square=True) if processor.do_center_crop else resized
    wrong = f'{where}: size={processor.size}, crop_size={processor.crop_size} is not supported'
    if cut is None or resized is None or isinstance(cut, int):
        raise UserError(f'{wrong}: expected height and width')
    if not processor.do_center_crop:
        return Resize(resize=method), cut
    keep_aspect = isinstance(resized, int)
    height, width = (resized, resized) if isinstance(resized, int) else resized
    fits = cut[0] <= height and cut[1] <= width
    fits = fits and (keep_aspect or height * cut[1] == width * cut[0])
    require(fits, f'{wrong}: expected a crop within the size, of the same aspect')
    scale = min(height, width) / min(cut)
    crop = CentralCrop(scale=scale, keep_aspect=keep_aspect, resize=method, rounding='transformers')
    return crop, cut


def _sides(size: Size, *, square: bool) -> tuple[int, int] | int | None:
    """Returns (height, width), or the length of the shorter side; None for other sizes."""
    match size:
        case int():
            return (size, size) if square else size
        case {'shortest_edge': edge} if len(size) == 1:
            return edge
        case {'height': height, 'width': width} if len(size) == 2:
            return height, width
    return size if isinstance(size, tuple) else None


def written(config: ViTConfig, preprocessing: Preprocessing) -> dict[str, Any]:
    """Returns the preprocessor_config.json, as far as transformers has such a preprocessing."""
    crop, kind = preprocessing.crop, 'ViT'
    both = dict(zip(('height', 'width'), config.image_size, strict=True))
    sizes: dict[str, Any] = {'size': both}
    if isinstance(crop, CentralCrop):
        kind = 'Bit' if crop.keep_aspect else 'DeiT'
        if crop.keep_aspect and both['height'] != both['width']:  # the shorter side covers both
            crop = dataclasses.replace(crop, rounding='transformers')
        larger = crop.larger(config.image_size, config.image_size)
        sides = {'height': larger[0], 'width': larger[1]}
        size = {'shortest_edge': min(larger)} if crop.keep_aspect else sides
        sizes = {'do_center_crop': True, 'size': size, 'crop_size': both}
    numbers = {method: number for number, method in _RESIZE_METHODS.items()}
    return sizes | {
        'image_processor_type': f'{kind}ImageProcessor',
        'resample': numbers.get(getattr(crop, 'resize', 'bilinear'), 2),
        'image_mean': [value / 255 for value in preprocessing.mean],
        'image_std': [value / 255 for value in preprocessing.std],
    }
