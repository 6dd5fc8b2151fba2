"""The preprocessor_config.json of transformers: how images are prepared, read and written."""

import dataclasses
import re
from typing import Any, Literal

from vit_jax.base import Record, UserError, require
from vit_jax.checkpoints.formats.base import (
    CLIP,
    HALF,
    IMAGENET,
    Scaling,
    check_scaling,
    described,
)
from vit_jax.data.image_preprocessing import (
    CentralCrop,
    Crop,
    Preprocessing,
    Resize,
    ResizeMethod,
)
from vit_jax.models import ViTConfig
from vit_jax.models.config import LARGEST

_IMAGENET = dict(zip(('image_mean', 'image_std'), IMAGENET, strict=True))
_CLIP = dict(zip(('image_mean', 'image_std'), CLIP, strict=True))
# By Pillow's numbers.
_RESIZE_METHODS: dict[int, ResizeMethod] = {1: 'lanczos_antialias'}
_RESIZE_METHODS |= {2: 'bilinear_antialias', 3: 'bicubic_antialias'}
# What the classes do where their file does not say it: `shorter` is what one number as a size is.
_DEFAULTS: dict[str, dict[str, Any]] = {
    'ViT': {'resample': 2},
    'Beit': {'resample': 3},
    'Siglip': {'resample': 3},
    'DeiT': {'resample': 3, 'size': 256, 'do_center_crop': True},
    'DINOv3ViT': {'resample': 2} | _IMAGENET,
    'CLIP': {'resample': 3, 'do_center_crop': True, 'shorter': True} | _CLIP,
    'Bit': {'resample': 3, 'do_center_crop': True, 'shorter': True} | _CLIP,
    'ViTHybrid': {'resample': 3, 'do_center_crop': True, 'shorter': True} | _CLIP,
}
_PUBLISHED = _DEFAULTS | {'Bit': _DEFAULTS['Bit'] | {'size': 256} | _IMAGENET}


@dataclasses.dataclass
class _Processor(Record):
    """What is read of a preprocessor_config.json."""

    size: int | dict[str, int] | tuple[int, int] = 224
    crop_size: int | dict[str, int] | tuple[int, int] = 224
    resample: int = 2
    image_mean: Scaling = HALF
    image_std: Scaling = HALF
    do_resize: bool = True
    do_center_crop: bool = False
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    do_pad: bool = False
    shorter: bool = False  # of the class, not of the file

    def check(self) -> None:
        for name in 'size', 'crop_size':
            size = getattr(self, name)
            sides = size.values() if isinstance(size, dict) else (size,)
            sides = size if isinstance(size, tuple) else sides
            fits = all(0 < side <= LARGEST for side in sides)
            require(fits, f'{name}={size}: expected pixels from 1 to {LARGEST:,}')
        require(self.resample in _RESIZE_METHODS, f'resample={self.resample} is not supported')
        require(0 < self.rescale_factor <= 1, f'rescale_factor={self.rescale_factor}')
        require(not self.do_pad, 'do_pad=True is not supported')
        check_scaling(self, 'image_mean', 'image_std')


def read(declared: dict[str, Any], family: str) -> tuple[Preprocessing, tuple[int, int]]:
    """What a preprocessor_config.json says, and the size (height, width) of images that it makes.

    `family` names the class of processors that a model has where no file says it. Raises UserError
    for a preprocessing that is not supported.
    """
    where, defaults = 'preprocessor_config.json', _DEFAULTS
    name = declared.get('image_processor_type') or declared.get('feature_extractor_type')
    if not declared:
        defaults = _PUBLISHED
    elif name is not None:
        family = re.sub('(ImageProcessor(Fast|Pil)?|FeatureExtractor)$', '', str(name))
    known = ', '.join(f'{each}ImageProcessor' for each in defaults)
    require(family in defaults, f'{where}: {name} is not supported: expected one of {known}')
    processor = described(_Processor, defaults[family] | _stated(declared), where=where)
    square = declared.get('default_to_square')
    wrong = f'{where}: default_to_square={square} is not supported for {family}ImageProcessor'
    plain = isinstance(processor.size, int)
    require(square is None or not plain or square is not processor.shorter, wrong)
    try:
        crop, size = _crop(processor)
    except UserError as error:
        raise UserError(f'{where}: {error}') from error
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


def _stated(declared: dict[str, Any]) -> dict[str, Any]:
    """What the file says; `shorter` is not for it."""
    return {n: v for n, v in declared.items() if v is not None and n != 'shorter'}


def _crop(processor: _Processor) -> tuple[Crop, tuple[int, int]]:
    """How an image gets its size, and which."""
    method = _RESIZE_METHODS[processor.resample]
    right = 'images of many sizes would reach the network'
    require(processor.do_resize, f'do_resize=False is not supported: {right}')
    resized = _pair(processor.size, shorter=processor.shorter)
    if not processor.do_center_crop:
        wrong = f'size={processor.size} without do_center_crop is not supported: {right}'
        require(isinstance(resized, tuple), wrong)
        assert isinstance(resized, tuple)
        return Resize(resize=method), resized
    cut = _pair(processor.crop_size, shorter=False)
    require(isinstance(cut, tuple), f'crop_size={processor.crop_size} is not supported')
    assert isinstance(cut, tuple)
    keep_aspect = isinstance(resized, int)
    sides = (resized, resized) if isinstance(resized, int) else resized
    wrong = f'crop_size={processor.crop_size} is not supported with size={processor.size}'
    require(cut[0] <= sides[0] and cut[1] <= sides[1], f'{wrong}: it is larger')
    even = keep_aspect or sides[0] * cut[1] == sides[1] * cut[0]
    require(even, f'{wrong}: another aspect')
    crop = CentralCrop(
        scale=min(sides) / min(cut), keep_aspect=keep_aspect, resize=method, rounding='transformers'
    )
    return crop, cut


def _pair(size: int | dict[str, int] | tuple[int, int], *, shorter: bool) -> tuple[int, int] | int:
    """(height, width) in pixels; a number is the length of the shorter side."""
    match size:
        case int():
            return size if shorter else (size, size)
        case {'shortest_edge': edge} if len(size) == 1:
            return edge
        case {'height': height, 'width': width} if len(size) == 2:
            return height, width
        case tuple():
            return size
    raise UserError(f'size={size} is not supported: expected height and width, or shortest_edge')


def written(config: ViTConfig, preprocessing: Preprocessing) -> dict[str, Any]:
    """The preprocessor_config.json, as far as transformers has such a preprocessing."""
    crop, (height, width) = preprocessing.crop, config.image_size
    both: dict[str, int] = {'height': height, 'width': width}
    values: dict[str, Any] = {'size': both}
    kind: Literal['ViT', 'DeiT', 'Bit'] = 'ViT'
    if isinstance(crop, CentralCrop):
        cut = {'do_center_crop': True, 'crop_size': both}
        if crop.keep_aspect and height != width:  # the shorter side covers both
            crop = dataclasses.replace(crop, rounding='transformers')
        larger = crop.larger(config.image_size, config.image_size)
        sides: dict[str, int] = dict(zip(both, larger, strict=True))
        edge = {'shortest_edge': min(larger)}
        kind = 'Bit' if crop.keep_aspect else 'DeiT'
        values = {'size': edge if crop.keep_aspect else sides} | cut
    method: ResizeMethod = getattr(crop, 'resize', 'bilinear')
    resample = {of: number for number, of in _RESIZE_METHODS.items()}.get(method, 2)
    return values | {
        'image_processor_type': f'{kind}ImageProcessor',
        'do_resize': True,
        'resample': resample,
        'do_rescale': True,
        'rescale_factor': 1 / 255,
        'do_normalize': True,
        'image_mean': [value / 255 for value in preprocessing.mean],
        'image_std': [value / 255 for value in preprocessing.std],
    }
