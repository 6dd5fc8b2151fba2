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


@pytest.mark.full
def test_the_example_of_the_docs_runs_where_this_package_cannot_be_imported(tmp_path):
    names = tuple(f'bird {i}' for i in range(tiny.CLASSES))
    crop = CentralCrop(resize='bicubic_antialias')
    network = loaded(tiny.model(), class_names=names, preprocessing=Preprocessing(crop=crop))
    notes = vit_jax.save(network, tmp_path / 'vit.stablehlo')
    assert any('turned as their camera says' in note for note in notes)
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
    image = network.prepare(tmp_path / 'photo.jpg')
    expected = network.probabilities(image[None])[0]
    best = np.argsort(-expected)[:5]
    found = [line.rsplit(' ', 1) for line in run.stdout.splitlines()]
    assert [name for name, _ in found] == [names[index] for index in best]
    np.testing.assert_allclose([float(p) for _, p in found], expected[best], atol=2e-3)


@pytest.mark.full
@pytest.mark.parametrize(
    'config, loss, dtype',
    [
        (tiny.model(image_size=(12, 8)), None, None),
        (tiny.model(image_size=(12, 8)), None, 'bfloat16'),
        (tiny.model(pool='gap', positions='sincos2d', num_classes=None), None, None),
        (tiny.model(pool='map', gelu='exact'), 'sigmoid', None),
        (tiny.model(pool='none', representation_size=6), 'my.module:loss', None),
        (HYBRID, 'softmax', None),
        (RESNET, None, None),
    ],
)
def test_a_program_gives_what_the_network_gives(config, loss, dtype, tmp_path):
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
    images = np.stack([network.prepare(photo) for photo in photos])
    headless = config.num_classes is None
    expected = network.features(images) if headless else network.probabilities(images)
    assert about['outputs'].startswith('features' if headless else 'probabilities')
    assert ('(sigmoid)' in about['outputs']) == (loss == 'sigmoid')
    for count in 3, 1:
        found = program.call(params, photos[:count])
        np.testing.assert_allclose(found, expected[:count], atol=2e-5)
    assert program.call(params, PHOTO[None]).shape == expected[:1].shape


def test_a_program_says_what_it_is(tmp_path):
    network = loaded(tiny.model(), class_names=tuple('abcdefghij'))
    (note,) = vit_jax.save(network, tmp_path / 'x.stablehlo')
    program, about, params = opened(tmp_path / 'x.stablehlo')
    probabilities = 'probabilities (softmax): float32[b,10]'
    assert note == f'images uint8[b,h,w,3] to {probabilities}, for cpu, cuda, tpu'
    assert about['inputs'] == ['parameters by name', 'images: uint8[b,h,w,3]']
    assert (about['outputs'], about['platforms']) == (probabilities, ['cpu', 'cuda', 'tpu'])
    assert about['card']['class_names'] == [*'abcdefghij']
    assert about['card']['model']['image_size'] == [8, 8]
    assert program.platforms == ('cpu', 'cuda', 'tpu')
    # Nothing but jax's own checks of shapes: no callback, no kernel of one platform.
    calls = set(re.findall(r'custom_call @(\w+)', program.mlir_module()))
    assert calls == {'shape_assertion'}
    assert {array.dtype for array in params.values()} == {np.dtype('float32')}


def test_what_gives_nothing_for_a_photo_is_refused(tmp_path):
    path, network = tmp_path / 'x.stablehlo', loaded(tiny.model())
    zeros = jax.tree.map(np.zeros_like, network.params['head'])
    for wrong, message in [
        (loaded(tiny.model(channels=1)), 'channels=1: a program takes photos, which have 3'),
        (changed(network, params=network.params | {'head': zeros}), 'the head is all zeros.*drop'),
    ]:
        with pytest.raises(UserError, match=message):
            vit_jax.save(wrong, path)
    with pytest.raises(UserError, match='x.npz: the format stablehlo is a file whose name ends'):
        vit_jax.save(network, tmp_path / 'x.npz', 'stablehlo')
    assert not [*tmp_path.iterdir()]


def test_without_flatbuffers_it_is_said_what_to_install(tmp_path, monkeypatch):
    def missing(*_, **__):
        raise ImportError('flatbuffers')

    monkeypatch.setattr(export.Exported, 'serialize', missing)
    with pytest.raises(UserError, match=r"needs flatbuffers: pip install 'vit_jax\[export\]'"):
        vit_jax.save(loaded(tiny.model(depth=1)), tmp_path / 'x.stablehlo')


def test_a_program_is_not_read_back(tmp_path):
    vit_jax.save(loaded(tiny.model(depth=1)), tmp_path / 'x.stablehlo')
    with pytest.raises(UserError, match='x.stablehlo: a program, made to be run: load the check'):
        vit_jax.load(tmp_path / 'x.stablehlo')


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
@pytest.mark.parametrize('method', METHODS)
def test_it_is_so_for_every_crop_and_shape(method):
    """Each program is for one shape: every crop has two of them, each method all."""
    for number, crop in enumerate(CROPS, METHODS.index(method)):
        size = ((24, 16), (224, 224))[number % 2]
        for shape in SHAPES[number % 4 :: 4]:
            apart = far(noise(shape), size, crop(resize=method))
            assert apart.max() <= 2 and (apart > 1).mean() < 1e-4, (crop, shape, apart.max())


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
