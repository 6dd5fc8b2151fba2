import functools
import itertools
import typing

import jax
import numpy as np
import pytest

from vit_jax.checkpoints.formats.stablehlo import preprocess
from vit_jax.data.image_preprocessing import (
    CentralCrop,
    Preprocessing,
    Resize,
    ResizeMethod,
)

METHODS = typing.get_args(ResizeMethod)
GREY_LEVELS = {'mean': (0.0,) * 3, 'std': (1.0,) * 3}
CROPS = [
    functools.partial(Resize),
    functools.partial(CentralCrop, scale=8 / 7),
    functools.partial(CentralCrop, scale=1.3, keep_aspect=False),
    functools.partial(CentralCrop, scale=1 / 0.9, rounding='timm'),
    functools.partial(CentralCrop, scale=8 / 7, rounding='transformers'),
]
SHAPES = [(50, 37), (9, 61), (24, 16), (1, 1), (3, 700), (48, 32), (375, 500), (512, 681)]


def noise(shape):
    return np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)


def compiled(image, size, preprocessing):
    return np.asarray(jax.jit(lambda x: preprocess(x, size, preprocessing))(image[None]))[0]


def far(image, size, crop):
    """How many grey levels each number is from what the crop itself makes."""
    found = compiled(image, size, Preprocessing(crop=crop, **GREY_LEVELS))
    np.testing.assert_array_equal(found, found.astype(np.uint8))  # whole ones, as 8 bits hold
    return np.abs(found - crop(image, size, None))


@pytest.mark.parametrize('crop', CROPS[:2])
@pytest.mark.parametrize('method', METHODS)
def test_compiled_it_is_the_crop_within_a_grey_level(crop, method):
    assert far(noise((50, 37)), (24, 16), crop(resize=method)).max() <= 1


@pytest.mark.full
@pytest.mark.parametrize('size', [(24, 16), (224, 224)])
@pytest.mark.parametrize('crop', CROPS)
@pytest.mark.parametrize('method', METHODS)
def test_it_is_so_for_every_crop_and_shape(crop, method, size):
    for shape in SHAPES:
        apart = far(noise(shape), size, crop(resize=method))
        assert apart.max() <= 2 and (apart > 1).mean() < 1e-4, (shape, apart.max())


@pytest.mark.parametrize('method', METHODS)
def test_what_is_not_resized_is_exact(method):
    assert far(noise((13, 18)), (13, 18), Resize(resize=method)).max() == 0


@pytest.mark.parametrize('rounding', ['nearest', 'timm', 'transformers'])
def test_the_same_pixels_are_cut_from_images_of_any_shape(rounding):
    """Traced, sizes are numbers of 32 bits, which must not grow too large on the way."""
    crop = CentralCrop(rounding=rounding, scale=1 / 0.95)
    cut = jax.jit(lambda shape: crop.placement(shape, (384, 256)))
    for shape in itertools.product((1, 7, 375, 500, 681, 65_536), repeat=2):
        expected = crop.placement(shape, (384, 256))
        assert jax.tree.map(int, cut(shape)) == expected, shape
