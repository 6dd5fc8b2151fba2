"""The ViTs that people use: networks of timm, transformers, OpenCLIP and DINOv2's own code."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vit_jax
from tests import reference, tiny
from vit_jax.base.errors import UserError
from vit_jax.checkpoints.formats import array_files
from vit_jax.checkpoints.formats.inference import NeedsHint
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.experiment.build import open_start

# What files of transformers do not say without their config.json.
UNDESCRIBED = {
    'clip_hf': {'gelu': 'quick'},
    'clip_hf_vision': {'gelu': 'exact'},
    'deit_hf': {},
    'deit_hf_dist': {},
    'dino_hf': {},
    'dinov2_hf': {},
    'dinov2_hf_linear': {},
    'dinov2_hf_reg4': {},
    'dinov2_hf_swiglu': {},
    'dinov3_hf': {'grid': (4, 4), 'num_heads': 2},
    'ijepa_hf': {},
    'mae_hf': {},
    'siglip_hf': {},
    'siglip_hf_linear': {},
}
# Sizes for which positions are stored, where the processor makes images of another size.
STORED = {'dinov2_hf': 42, 'dinov2_hf_linear': 48, 'dinov2_hf_reg4': 48}
NOT_SUPPORTED = {'beit_hf': 'beit', 'beit_timm': 'beitv2_base_patch16_224'}
ALL = reference.families()
READ = sorted({name for name, _ in ALL} - {*NOT_SUPPORTED})


def marked(name):
    return pytest.param(
        name, marks=[] if name in reference.COMMITTED_FAMILIES else pytest.mark.nightly
    )


def load(name, size, **changes):
    path = reference.family(name)
    return vit_jax.load(path, image_size=size, **reference.FAMILY_HINTS.get(name, {}) | changes)


@pytest.mark.parametrize('name', [marked(name) for name in READ])
def test_photos_are_prepared_as_the_library_prepares_them(name):
    io = reference.family_io(name, None)
    if 'prepared' not in io:
        pytest.skip('the library has no preprocessing for it')
    expected = io['prepared'].reshape(io['prepared'].shape[-3:])
    network = load(name, expected.shape[:2])
    off = np.abs(network.preprocess(io['photo']) - expected) * network.preprocessing.std
    # DINOv3's processor resizes without rounding to whole gray levels; all others are equal.
    assert off.max() <= (1 if name == 'dinov3_hf' else 1e-3)


def stored(path):
    """The arrays of a file, in its own type."""
    place = pathlib.Path(path)
    (place,) = place.glob('*.safetensors') if place.is_dir() else (place,)
    arrays = array_files.read_array_file(place).arrays
    return {name: (array.dtype, array.read().tobytes()) for name, array in arrays.items()}


@pytest.mark.parametrize('name', [marked(name) for name in READ])
def test_what_is_written_back_are_the_same_arrays(name, tmp_path):
    network = load(name, STORED.get(name))
    end = '.safetensors' if network.format in ('timm', 'vit5') else ''
    vit_jax.save(network, tmp_path / f'copy{end}', network.format)
    original = stored(reference.family(name))
    kept = {key: value for key, value in original.items() if key not in network.ignored}
    assert stored(tmp_path / f'copy{end}') == kept
    again = vit_jax.load(tmp_path / f'copy{end}')
    assert again == network


@pytest.mark.parametrize('name', [marked(name) for name in UNDESCRIBED])
def test_without_config_json_the_arrays_say_which_model_of_transformers_it_is(name, tmp_path):
    for file in pathlib.Path(reference.family(name)).iterdir():
        if file.name != 'config.json':
            shutil.copyfile(file, tmp_path / file.name)
    for hint in UNDESCRIBED[name]:
        with pytest.raises(NeedsHint, match=hint):
            vit_jax.load(tmp_path, **{'num_heads': 4} | UNDESCRIBED[name] | {hint: None})
    inferred = vit_jax.load(tmp_path, **{'num_heads': 4} | UNDESCRIBED[name])
    described = load(name, None)
    assert inferred.config == described.config
    assert inferred.preprocessing == described.preprocessing
    assert sum('no config.json' in line for line in inferred.report) == 1


def test_a_siglip_without_a_head_and_a_description_is_a_siglip(tmp_path):
    folder = pathlib.Path(reference.family('siglip_hf_linear'))
    config = json.loads((folder / 'config.json').read_text())
    config['vision_config'] |= {'vision_use_head': False}
    (tmp_path / 'config.json').write_text(json.dumps(config))
    arrays = load_file(folder / 'model.safetensors').items()
    tower = {n: a for n, a in arrays if n.startswith('vision_model.') and '.head.' not in n}
    save_file(tower, tmp_path / 'model.safetensors')
    described = vit_jax.load(tmp_path)
    (tmp_path / 'config.json').unlink()
    assert vit_jax.load(tmp_path, num_heads=described.config.num_heads) == described


@pytest.mark.parametrize('name', NOT_SUPPORTED)
def test_what_is_not_supported_is_refused_by_name(name):
    with pytest.raises(UserError, match=f'{NOT_SUPPORTED[name]}.* not supported'):
        vit_jax.load(reference.family(name))


def test_a_vit5_with_other_frequencies_is_rejected_and_no_format_loses_its_rotation(tmp_path):
    source = f'{reference.family("vit5")}'
    with pytest.raises(UserError, match='timm.* positions=learned_rope'):
        vit_jax.save(load('vit5', None), tmp_path / 'x.safetensors', 'timm')
    name = 'blocks.1.attn.rope_reg.freqs'
    arrays = load_file(source)
    save_file(arrays | {name: 2 * arrays[name]}, tmp_path / 'x.safetensors')
    with pytest.raises(UserError, match=name):
        vit_jax.load(tmp_path / 'x.safetensors')


def test_weights_of_quick_gelu_under_the_plain_name_ask_which(tmp_path):
    source = reference.family('clip_timm_openai')
    with pytest.raises(NeedsHint, match='gelu=quick'):
        vit_jax.load(source)
    quick = load('clip_timm_openai', None, gelu='quick')
    io = reference.family_io('clip_timm_openai', None)
    found = quick.features(io['images'])
    np.testing.assert_allclose(found, io['features_quickgelu'], rtol=0, atol=2e-5)
    # A repository of the hub may have OpenCLIP's description too.
    folder = shutil.copytree(source, tmp_path / 'x', copy_function=shutil.copyfile)
    clip = {'model_cfg': {'quick_gelu': True, 'embed_dim': 8, 'vision_cfg': {}}}
    (folder / 'open_clip_config.json').write_text(json.dumps(clip))
    assert vit_jax.load(folder).config == quick.config


@pytest.mark.nightly  # its file is in ../shared only
def test_images_have_the_size_that_the_processor_of_the_checkpoint_makes():
    path, io = reference.family('dinov2_hf'), reference.family_io('dinov2_hf', '28x28')
    network = vit_jax.load(path)
    assert network == vit_jax.load(path, image_size=28) and network.config.image_size == (28, 28)
    assert any('image size 28x28, from the JSON file' in line for line in network.report)
    np.testing.assert_allclose(network.features(io['images']), io['features'], rtol=0, atol=2e-5)
    assert network.preprocess(np.zeros((40, 50, 3), np.uint8)).shape == (28, 28, 3)


@pytest.mark.nightly  # its file is in ../shared only
def test_a_training_takes_the_size_of_the_processor_unless_it_names_one():
    path = reference.family('dinov2_hf')
    for size, expected in ((None, (28, 28)), ((42, 56), (42, 42))):
        start = open_start(tiny.experiment(start_from=path, model=None, image_size=size))
        assert start.card.model.image_size == expected


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
    with pytest.raises(UserError, match='timm_proj'):
        vit_jax.load(tmp_path, num_heads=4)


@pytest.mark.parametrize('prefix', ['module.', 'clip_model.', 'alone'])
def test_a_clip_within_other_modules_or_alone_is_the_same(prefix, tmp_path):
    folder = pathlib.Path(reference.family('clip_openclip'))
    arrays = load_file(folder / 'open_clip_model.safetensors')
    if prefix == 'alone':  # the image tower by itself
        arrays = {n.removeprefix('visual.'): a for n, a in arrays.items() if 'visual.' in n}
    else:
        arrays = {f'{prefix}{name}': array for name, array in arrays.items()}
    save_file(arrays, tmp_path / 'x.safetensors')
    with pytest.raises(NeedsHint, match='gelu=quick'):
        vit_jax.load(tmp_path / 'x.safetensors')
    network = load('clip_openclip', None)
    assert vit_jax.load(tmp_path / 'x.safetensors', gelu='quick', num_heads=4) == network
    shutil.copyfile(folder / 'open_clip_config.json', tmp_path / 'open_clip_config.json')
    assert vit_jax.load(tmp_path / 'x.safetensors') == network
    with pytest.raises(UserError, match='gelu=tanh'):
        vit_jax.load(tmp_path / 'x.safetensors', gelu='tanh')


def test_a_projection_has_logits_but_no_probabilities(tmp_path):
    network = load('clip_openclip', None)
    assert f'a projection to {network.config.num_classes};' in network.report[1]
    images = np.zeros((1, *network.config.image_size, 3), np.float32)
    assert network.logits(images).shape == (1, network.config.num_classes)
    for wrong in lambda: network.probabilities(images), network.require_head:
        with pytest.raises(UserError, match='projection'):
            wrong()
    card = dataclasses.replace(network.card, preprocessing=Preprocessing())
    other = dataclasses.replace(network, card=card)
    assert len(vit_jax.save(network, tmp_path / 'a', 'open_clip')) == 1
    assert 'preprocess images' in vit_jax.save(other, tmp_path / 'b', 'open_clip')[1]
    vit_jax.save(network, tmp_path / 'c', 'huggingface')
    assert 'LABEL' not in (tmp_path / 'c' / 'config.json').read_text()


@pytest.mark.parametrize(
    'off, std', [(('do_normalize',), 255), (('do_normalize', 'do_rescale'), 1)]
)
def test_a_processor_that_leaves_a_step_out_scales_otherwise(off, std, tmp_path):
    source = reference.family('dinov3_hf')
    folder = shutil.copytree(source, tmp_path / 'x', copy_function=shutil.copyfile)
    path = folder / 'preprocessor_config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | dict.fromkeys(off, False)))
    assert vit_jax.load(folder).preprocessing.std == (std, std, std)


def test_the_head_of_timms_clip_is_a_projection_unless_it_was_trained(tmp_path):
    described = load('clip_timm_openai', None)
    assert described.params['head']['bias'].any() != described.card.is_projection
    arrays = load_file(pathlib.Path(reference.family('clip_timm_openai')) / 'model.safetensors')
    path = tmp_path / 'x.safetensors'
    for bias, projects in (0, True), (1, False):
        save_file(arrays | {'head.bias': np.full_like(arrays['head.bias'], bias)}, path)
        with pytest.raises(NeedsHint, match='gelu=quick'):
            vit_jax.load(path, num_heads=4)
        network = vit_jax.load(path, num_heads=4, gelu='quick')
        assert network.card.is_projection is projects
    assert network.config.layer_norm_epsilon == 1e-5
    assert network.preprocessing.mean == described.preprocessing.mean
    assert any('no config.json' in line for line in network.report)


def test_a_file_with_a_mask_token_is_prepared_as_metas_dinov2():
    mean = load('dinov2_orig', None).preprocessing.mean
    assert mean == pytest.approx((123.675, 116.28, 103.53))
