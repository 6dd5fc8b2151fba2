"""The ViTs that people use: networks of timm, transformers, OpenCLIP and DINOv2's own code."""

import json
import pathlib
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vit_jax
from tests import reference
from vit_jax.base.errors import UserError
from vit_jax.checkpoints.formats import array_files
from vit_jax.checkpoints.formats.inference import NeedsHint

# What a file does not say of itself.
HINTS = {
    'clip_timm_openai': {'gelu': 'exact'},
    'dinov2_orig': {'num_heads': 4, 'grid': (4, 4)},
}
NOT_SUPPORTED = {
    'beit_hf': "config.json: model_type='beit' is not supported",
    'beit_timm': 'beitv2_base_patch16_224: relative positions: not supported',
}
ALL = reference.families()
READ = sorted({name for name, _ in ALL} - {*NOT_SUPPORTED})


def marked(name, *more):
    full = [] if name in reference.COMMITTED_FAMILIES else [pytest.mark.full]
    return pytest.param(name, *more, marks=full)


def load(name, size, **changes):
    path = reference.family(name)
    return vit_jax.load(path, image_size=size, **HINTS.get(name, {}) | changes)


@pytest.mark.parametrize(
    'name, size', [marked(name, size) for name, size in ALL if name not in NOT_SUPPORTED]
)
def test_features_and_logits_are_those_of_the_library_at_every_size(name, size):
    io = reference.family_io(name, size)
    network = load(name, io['images'].shape[1:3])
    found, expected = network.features(io['images']), io['features']
    if 'features_dist' in io:
        expected = np.concatenate([expected, io['features_dist']], axis=1)
    elif name == 'deit_timm_dist':  # timm's are the mean of the two tokens
        found = np.mean(np.split(found, 2, axis=1), axis=0)
    # Wrong epsilons differ by 6e-5 at least, the wrong GELU by 1.8e-4.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    if 'logits' in io:
        np.testing.assert_allclose(network.logits(io['images']), io['logits'], rtol=0, atol=2e-5)


@pytest.mark.parametrize('name', [marked(name) for name in READ])
def test_photos_are_prepared_as_the_library_prepares_them(name):
    io = reference.family_io(name, None)
    if 'prepared' not in io:
        pytest.skip('the library has no preprocessing for it')
    expected = io['prepared'].reshape(io['prepared'].shape[-3:])
    network = load(name, expected.shape[:2])
    off = np.abs(network.prepare(io['photo']) - expected) * network.preprocessing.std
    # DINOv3's processor resizes without rounding to whole grey levels; all others are equal.
    assert off.max() <= (1 if name == 'dinov3_hf' else 1e-3)


def stored(path):
    """The arrays of a file, in its own type."""
    place = pathlib.Path(path)
    (place,) = place.glob('*.safetensors') if place.is_dir() else (place,)
    arrays = array_files.read_array_file(place).arrays
    return {name: (array.dtype, array.read().tobytes()) for name, array in arrays.items()}


@pytest.mark.parametrize('name', [marked(name) for name in READ])
def test_what_is_written_back_are_the_same_arrays(name, tmp_path):
    network = load(name, None)
    end = '.safetensors' if network.format == 'timm' else ''
    vit_jax.save(network, tmp_path / f'copy{end}', network.format)
    original = stored(reference.family(name))
    kept = {key: value for key, value in original.items() if key not in network.ignored}
    assert stored(tmp_path / f'copy{end}') == kept
    again = vit_jax.load(tmp_path / f'copy{end}')
    assert again == network


@pytest.mark.parametrize('name', NOT_SUPPORTED)
def test_what_is_not_supported_is_refused_by_name(name):
    with pytest.raises(UserError, match=re.escape(NOT_SUPPORTED[name])):
        vit_jax.load(reference.family(name))


def test_weights_of_quick_gelu_under_the_plain_name_ask_which():
    with pytest.raises(NeedsHint, match='trained with QuickGELU, .* say gelu=quick'):
        vit_jax.load(reference.family('clip_timm_openai'))
    io = reference.family_io('clip_timm_openai', None)
    found = load('clip_timm_openai', None, gelu='quick').features(io['images'])
    np.testing.assert_allclose(found, io['features_quickgelu'], rtol=0, atol=2e-5)


def test_a_processor_for_other_images_is_told_of():
    network = load('dinov2_hf', None)
    assert network.config.image_size == (42, 42)
    assert 'its processor makes images of 28x28: image_size=28' in network.report


def test_a_tower_of_timm_within_open_clip_is_that_network(tmp_path):
    alone = load('siglip_timm_remainder', None)
    arrays = load_file(f'{reference.family("siglip_timm_remainder")}/model.safetensors')
    tower = {f'visual.trunk.{name}': array for name, array in arrays.items()}
    text = {'text.token_embedding.weight': np.zeros((3, 2)), 'logit_scale': np.zeros(1)}
    save_file(tower | text, tmp_path / 'open_clip_model.safetensors')
    vision = {'timm_model_name': 'vit_so400m_patch14_siglip_384', 'timm_pool': 'map'}
    model = {'vision_cfg': vision | {'image_size': 36, 'timm_proj': 'none'}}
    prepared = {'mean': [0.5] * 3, 'std': [0.5] * 3, 'resize_mode': 'squash'}
    described = tmp_path / 'open_clip_config.json'
    described.write_text(json.dumps({'model_cfg': model, 'preprocess_cfg': prepared}))
    network = vit_jax.load(tmp_path, num_heads=4)
    assert network.config == alone.config and network.params.keys() == alone.params.keys()
    assert set(network.ignored) == {*text}
    crop = network.preprocessing.crop
    assert (crop.scale, crop.keep_aspect, crop.resize) == (1.0, False, 'bicubic_antialias')
    model['vision_cfg'] |= {'timm_proj': 'linear'}
    described.write_text(json.dumps({'model_cfg': model}))
    with pytest.raises(UserError, match="timm_proj='linear' is not supported"):
        vit_jax.load(tmp_path, num_heads=4)
