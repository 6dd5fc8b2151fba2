"""A program is the network: run by jax alone, it gives what the network gives."""

import functools
import itertools
import json
import pathlib
import re
import subprocess
import sys
import typing

import jax
import numpy as np
import pytest
from jax import export
from PIL import Image

import vit_jax
from tests import tiny
from tests.networks import HYBRID, RESNET, changed, loaded
from vit_jax.base.errors import UserError
from vit_jax.checkpoints.formats.stablehlo import preprocess
from vit_jax.data.image_preprocessing import CentralCrop, Preprocessing, Resize, ResizeMethod

PAGE = pathlib.Path(__file__).parents[3] / 'docs' / 'export.md'
PHOTO = np.kron(np.random.default_rng(0).integers(0, 256, (4, 6, 3)), np.ones((9, 7, 1)))
PHOTO = PHOTO.astype(np.uint8)


def opened(path):
    """The program, what it says of itself, and its parameters, as its user reads them."""
    with np.load(path) as file:
        parts = dict(file)
    program = export.deserialize(parts.pop('program').tobytes())
    return program, json.loads(parts.pop('card').tobytes()), parts


@pytest.mark.gate
def test_the_example_of_the_docs_runs_where_this_package_cannot_be_imported(tmp_path):
    names = tuple(f'bird {i}' for i in range(tiny.CLASSES))
    crop = CentralCrop(resize='bicubic_antialias')
    network = loaded(tiny.model(), class_names=names, preprocessing=Preprocessing(crop=crop))
    notes = vit_jax.save(network, tmp_path / 'vit.stablehlo')
    assert any('EXIF' in note for note in notes)
    Image.fromarray(PHOTO).save(tmp_path / 'photo.jpg')
    example = re.search('```python\n(.*?)```', PAGE.read_text(), re.DOTALL)[1]
    assert "'/tmp/vit/" in example
    example = example.replace('/tmp/vit/', f'{tmp_path}/')
    refuse = "import sys\nsys.modules |= dict.fromkeys(['vit_jax', 'flax', 'cv2', 'orbax'])\n"
    run = subprocess.run(
        [sys.executable, '-c', refuse + example],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    image = network.preprocess(tmp_path / 'photo.jpg')
    expected = network.probabilities(image[None])[0]
    best = np.argsort(-expected)[:5]
    found = [line.rsplit(' ', 1) for line in run.stdout.splitlines()]
    assert [name for name, _ in found] == [names[index] for index in best]
    np.testing.assert_allclose([float(p) for _, p in found], expected[best], atol=2e-3)


@pytest.mark.parametrize(
    'config, loss, dtype',
    [
        (tiny.model(image_size=(12, 8)), None, 'bfloat16'),
        pytest.param(tiny.model(pool='map', gelu='exact'), 'sigmoid', None, marks=pytest.mark.gate),
        pytest.param(
            tiny.model(pool='none', positions='sincos2d', num_classes=None),
            None,
            None,
            marks=pytest.mark.gate,
        ),
        pytest.param(HYBRID, 'softmax', None, marks=pytest.mark.nightly),
        pytest.param(RESNET, None, None, marks=pytest.mark.nightly),
    ],
)
def test_a_program_computes_what_the_model_computes_and_describes_itself(
    config, loss, dtype, tmp_path
):
    network = loaded(config, loss=loss)
    path = tmp_path / 'x.stablehlo'
    vit_jax.save(network, path, dtype=dtype)
    program, about, params = opened(path)
    if dtype == 'bfloat16':
        rounded = jax.tree.map(lambda a: a.astype(dtype).astype('float32'), network.params)
        network = changed(network, params=rounded)
        assert {array.dtype.name for array in params.values()} == {'uint16'}
    size = config.image_size
    photos = np.random.default_rng(0).integers(0, 256, (3, *size, 3), dtype=np.uint8)
    images = np.stack([network.preprocess(photo) for photo in photos])
    headless = config.num_classes is None
    expected = network.features(images) if headless else network.probabilities(images)
    for count in 3, 1:
        found = program.call(params, photos[:count])
        np.testing.assert_allclose(found, expected[:count], atol=2e-5)
    assert program.call(params, PHOTO[None]).shape == expected[:1].shape
    kind = 'sigmoid' if loss == 'sigmoid' else 'softmax'
    assert about['outputs'].startswith('features' if headless else f'probabilities ({kind})')
    assert about['card']['model']['image_size'] == [*size]
    assert program.platforms == ('cpu', 'cuda', 'tpu')
    # Nothing but jax's own checks of shapes: no callback, no kernel of one platform.
    calls = set(re.findall(r'custom_call @(\w+)', program.mlir_module()))
    assert calls <= {'shape_assertion'}
    with pytest.raises(UserError, match='x.stablehlo: a program'):  # only jax reads it
        vit_jax.load(path)


def test_models_without_photos_or_without_a_trained_head_are_rejected(tmp_path):
    network = loaded(tiny.model())
    zeros = jax.tree.map(np.zeros_like, network.params['head'])
    untrained = changed(network, params=network.params | {'head': zeros})
    for wrong, name in (loaded(tiny.model(channels=1)), 'channels=1'), (untrained, '--drop_head'):
        with pytest.raises(UserError, match=name):
            vit_jax.save(wrong, tmp_path / 'x.stablehlo')
    assert not [*tmp_path.iterdir()]


def test_a_program_needs_an_extra_that_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'flatbuffers', None)
    with pytest.raises(UserError, match=r'vit_jax\[export\]'):
        vit_jax.save(loaded(tiny.model()), tmp_path / 'x.stablehlo')


METHODS = typing.get_args(ResizeMethod)
GRAY_LEVELS = {'mean': (0.0,) * 3, 'std': (1.0,) * 3}
CROPS = [
    functools.partial(Resize),
    functools.partial(CentralCrop, scale=8 / 7),
    functools.partial(CentralCrop, scale=1.3, keep_aspect=False),
    functools.partial(CentralCrop, scale=1 / 0.9, rounding='timm'),
    functools.partial(CentralCrop, scale=8 / 7, rounding='transformers'),
]
SHAPES = [(50, 37), (9, 61), (24, 16), (1, 1), (3, 700), (375, 500), (512, 681)]


def difference(shape, size, crop):
    """How many gray levels each pixel of white noise is from what the crop itself makes."""
    image = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    how = Preprocessing(crop=crop, **GRAY_LEVELS)
    found = np.asarray(jax.jit(lambda x: preprocess(x, size, how))(image[None]))[0]
    np.testing.assert_array_equal(found, found.astype(np.uint8))  # whole gray levels
    return np.abs(found - crop(image, size, None))


@pytest.mark.parametrize('method', METHODS)
def test_preprocessing_is_the_crop_within_a_gray_level(method):
    assert difference((50, 37), (24, 16), CentralCrop(resize=method)).max() <= 1
    assert difference((13, 18), (13, 18), Resize(resize=method)).max() == 0  # nothing is resized


@pytest.mark.gate
@pytest.mark.parametrize('number, shape', [*enumerate(SHAPES)])
def test_preprocessing_is_the_crop_for_every_shape(number, shape):
    """Each shape with a method and crop of its own: each pair is another program to compile."""
    for method in METHODS:
        crop = CROPS[(number + METHODS.index(method)) % len(CROPS)](resize=method)
        apart = difference(shape, ((24, 16), (224, 224))[number % 2], crop)
        assert apart.max() <= 2 and (apart > 1).mean() < 1e-4, (crop, apart.max())


@pytest.mark.parametrize('rounding', ['nearest', 'timm', 'transformers'])
def test_the_same_pixels_are_cut_from_images_of_any_shape(rounding):
    """Traced sizes are 32-bit numbers, which must not grow too large on the way."""
    crop = CentralCrop(rounding=rounding, scale=1 / 0.95)
    cut = jax.jit(lambda shape: crop.placement(shape, (384, 256)))
    for shape in itertools.product((1, 7, 375, 500, 681, 65_536), repeat=2):
        expected = crop.placement(shape, (384, 256))
        assert jax.tree.map(int, cut(shape)) == expected, shape
