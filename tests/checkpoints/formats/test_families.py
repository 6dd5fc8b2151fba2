"""The ViTs that people use: networks of timm, transformers, OpenCLIP and DINOv2's own code."""

import dataclasses
import json
import pathlib
import re
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

# Sizes for which positions are stored, where the processor makes images of another size.
STORED = {'dinov2_hf': 42, 'dinov2_hf_linear': 48, 'dinov2_hf_reg4': 48}
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
    return vit_jax.load(path, image_size=size, **reference.FAMILY_HINTS.get(name, {}) | changes)


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


@pytest.mark.full
@pytest.mark.parametrize('name', [marked(name) for name in READ])
def test_what_is_written_back_are_the_same_arrays(name, tmp_path):
    network = load(name, STORED.get(name))
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


def test_images_have_the_size_that_the_processor_of_the_checkpoint_makes():
    path, io = reference.family('dinov2_hf'), reference.family_io('dinov2_hf', '28x28')
    network = vit_jax.load(path)
    assert network == vit_jax.load(path, image_size=28) and network.config.image_size == (28, 28)
    assert any('28x28, as its own processor makes them' in line for line in network.report)
    np.testing.assert_allclose(network.features(io['images']), io['features'], rtol=0, atol=2e-5)
    assert network.prepare(np.zeros((40, 50, 3), np.uint8)).shape == (28, 28, 3)
    stored = vit_jax.load(path, image_size=42)
    assert stored.config.image_size == (42, 42)
    assert stored.params['pos_embedding'].shape[1] == 1 + 3 * 3


@pytest.mark.parametrize('sizes', [{'size': 48}, {'size': 64, 'crop_size': 24}])
def test_any_processor_of_transformers_says_the_size(sizes, tmp_path):
    folder = shutil.copytree(reference.path('hf_vit'), tmp_path / 'net')
    crops = {'do_center_crop': 'crop_size' in sizes, 'image_processor_type': 'DeiTImageProcessor'}
    (folder / 'preprocessor_config.json').write_text(json.dumps(sizes | crops))
    network, made = vit_jax.load(folder), [*sizes.values()][-1]
    assert network.config.image_size == (made, made)
    assert network == vit_jax.load(folder, image_size=made)
    assert vit_jax.load(folder, image_size=32).config.image_size == (32, 32)


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
    with pytest.raises(UserError, match="timm_proj='linear' is not supported"):
        vit_jax.load(tmp_path, num_heads=4)


@pytest.mark.parametrize('prefix', ['', 'module.', 'model.', 'clip_model.', 'alone'])
def test_a_clip_without_a_description_says_what_is_assumed(prefix, tmp_path):
    described = load('clip_openclip', None)
    arrays = load_file(f'{reference.family("clip_openclip")}/open_clip_model.safetensors')
    if prefix == 'alone':  # the image tower by itself
        arrays = {n.removeprefix('visual.'): a for n, a in arrays.items() if 'visual.' in n}
    else:
        arrays = {f'{prefix}{name}': array for name, array in arrays.items()}
    save_file(arrays, tmp_path / 'x.safetensors')
    network = vit_jax.load(tmp_path / 'x.safetensors', gelu='quick', num_heads=4)
    assert network == described
    assert any('the class token is pooled' in line for line in network.report)


def test_a_projection_gives_what_is_compared_with_texts_and_no_probabilities(tmp_path):
    network = load('clip_openclip', None)
    assert f'a projection to {network.config.num_classes};' in network.report[1]
    assert 'it has no classes' in network.report[-1]
    images = np.zeros((1, *network.config.image_size, 3), np.float32)
    assert network.logits(images).shape == (1, network.config.num_classes)
    with pytest.raises(UserError, match='its head is a projection, .*: use logits, the features'):
        network.probabilities(images)
    with pytest.raises(UserError, match='its head is a projection'):
        network.require_head()
    changed = dataclasses.replace(network.card, preprocessing=Preprocessing())
    other = dataclasses.replace(network, card=changed)
    assert len(vit_jax.save(network, tmp_path / 'a', 'open_clip')) == 1
    assert 'prepares images otherwise' in vit_jax.save(other, tmp_path / 'b', 'open_clip')[1]
    vit_jax.save(network, tmp_path / 'c', 'huggingface')
    assert 'LABEL' not in (tmp_path / 'c' / 'config.json').read_text()


SAID = [
    ('dinov3_hf', 'config.json', {'hidden_act': 'silu'}, "hidden_act='silu', but .* a plain MLP"),
    ('dinov3_hf', 'config.json', {'rope_theta': 10.0}, 'rope_theta=10: only 100 is supported'),
    ('dinov3_hf', 'config.json', {'patch_size': 16}, r'says patch_size=\(16, 16\), the arrays'),
    ('dinov3_hf', 'config.json', {'image_size': 20_000}, 'a grid of 2,500x2,500: more than 1,048,'),
    ('dinov3_hf', 'config.json', {'model_type': []}, r'model_type=\[\]: expected a name'),
    ('dinov3_hf', 'config.json', {'architectures': 3}, 'architectures=3: expected a list of names'),
    ('dinov3_hf', 'preprocessor_config.json', {'do_resize': False}, 'do_resize=False is not supp'),
    ('dinov3_hf', 'preprocessor_config.json', {'do_pad': True}, 'do_pad=True is not supported'),
    (
        'dinov3_hf',
        'preprocessor_config.json',
        {'image_processor_type': 'CLIPImageProcessor', 'do_center_crop': False, 'size': 32},
        'without do_center_crop is not supported',
    ),
    (
        'dinov3_hf',
        'preprocessor_config.json',
        {'image_processor_type': 'ConvNextImageProcessor'},
        'ConvNextImageProcessor is not supported: expected one of ViTImageProcessor',
    ),
    ('siglip_hf_linear', 'config.json', {'vision_config': []}, r'config.json.vision_config=\[\]'),
    ('deit_hf_dist', 'config.json', {'num_hidden_layers': 3}, 'says num_hidden_layers=3'),
    (
        'deit_hf_dist',
        'config.json',
        {'qkv_bias': False},
        'says that there is no bias, but .*key.bias is',
    ),
    (
        'deit_hf_dist',
        'config.json',
        {'model_type': None},
        'is not transformers',
    ),
    (
        'deit_hf_dist',
        'config.json',
        {'id2label': {'7': 'a'}},
        'a name for each number from "0"',
    ),
    ('deit_hf_dist', 'config.json', {'id2label': {'0': '\ud800'}}, 'half of a character'),
    ('deit_hf_dist', 'config.json', {'quantization_config': {'bits': 4}}, 'quantization_config='),
    (
        'deit_hf_dist',
        'preprocessor_config.json',
        {'size': {'height': 32, 'width': 32, 'shortest_edge': 32}},
        'size=.* is not supported',
    ),
    (
        'deit_hf_dist',
        'preprocessor_config.json',
        {'image_processor_type': 'CLIPImageProcessor', 'size': 32, 'default_to_square': True},
        'default_to_square=True is not supported for CLIPImageProcessor',
    ),
    ('dinov2_timm_swiglu', 'config.json', {'global_pool': 'avg'}, "global_pool=.'avg', 'token'"),
    ('dinov3_hf', 'config.json', {'value_bias': False}, 'no bias, but layer.0.attention.v_proj'),
    ('dinov3_hf', 'config.json', {'mlp_bias': False}, 'no bias, but layer.0.mlp.up_proj.bias is'),
    ('dinov3_hf', 'config.json', {'use_gated_mlp': True}, 'says use_gated_mlp=True, the arrays'),
    ('dinov3_hf', 'config.json', {'rope_parameters': {'rope_theta': 9}}, 'rope_theta=9: only 100'),
    ('dinov3_hf', 'config.json', {'rope_scaling': {'factor': 2}}, 'rope_scaling=.* is not supp'),
    (
        'siglip_hf_linear',
        'config.json',
        {'vision_config': {'model_type': 'clip_vision_model'}},
        "vision_config.model_type='clip_vision_model' within model_type='siglip'",
    ),
    (
        'clip_openclip',
        'open_clip_config.json',
        {'model_cfg': {'vision_cfg': {'image_size': 32, 'mlp_ratio': float('nan')}}},
        'mlp_ratio',
    ),
    ('clip_openclip', 'open_clip_config.json', {'model_cfg': 3}, 'model_cfg=3: expected a JSON'),
    (
        'clip_openclip',
        'open_clip_config.json',
        {'model_cfg': {'quick_gelu': 'false'}},
        "quick_gelu='false': true or false",
    ),
    (
        'clip_openclip',
        'open_clip_config.json',
        {'model_cfg': {'vision_cfg': {'attentional_pool': True}}},
        'attentional_pool=True is not supported',
    ),
    (
        'clip_openclip',
        'open_clip_config.json',
        {'model_cfg': {'embed_dim': 3}},
        'model_cfg says embed_dim=3, the arrays',
    ),
    (
        'clip_openclip',
        'open_clip_config.json',
        {'model_cfg': {'vision_cfg': {'image_size': 32, 'mlp_ratio': 3.0}}},
        r'vision_cfg says mlp_ratio=3.0, the arrays ',
    ),
    *(
        ('siglip_timm_remainder', 'config.json', {part: changes}, message)
        for part, changes, message in (
            ('global_pool', 'avgmax', "global_pool='avgmax' is not supported"),
            ('global_pool', 'token', "global_pool='token': its arrays are those of .*'map'"),
            ('architecture', None, 'is not timm.s, as the arrays are: it has no architecture'),
            ('model_args', {'init_values': 1e-5}, 'says init_values=1e-05, no array has them'),
            ('num_classes', 3, 'config.json says num_classes=3, the arrays 0'),
            ('model_args', [], r'config.json.model_args=\[\]: expected a JSON object'),
            ('model_args', {'act_layer': 'relu'}, "act_layer='relu' is not supported"),
            ('model_args', {'act_layer': 'silu'}, 'says act_layer=silu, the arrays a plain MLP'),
            ('model_args', {'pool_include_prefix': True}, 'pool_include_prefix=True is not supp'),
            ('model_args', {'depth': 3}, 'config.json.model_args says depth=3, the arrays 2'),
            ('model_args', {'patch_size': 3}, r'says patch_size=\(3, 3\), the arrays'),
            ('model_args', {'mlp_ratio': 1.0}, 'says mlp_ratio=1.0, the arrays'),
            ('model_args', {'qk_norm': True}, 'model_args: qk_norm=True is not supported'),
            ('pretrained_cfg', {'crop_mode': 'border'}, "crop_mode='border' is not supported"),
            ('pretrained_cfg', {'interpolation': 'random'}, "interpolation='random' is not supp"),
            ('architecture', 'eva02_base_patch14_448', 'EVA-02.s rotation .* not supported'),
        )
    ),
]


@pytest.mark.parametrize('name, file, changes, message', SAID)
def test_what_a_file_says_that_is_odd_or_not_supported_is_refused(
    name, file, changes, message, tmp_path
):
    folder = tmp_path / 'copy'
    shutil.copytree(reference.family(name), folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    said = json.loads((folder / file).read_text())
    for key, value in changes.items():
        merged = isinstance(value, dict) and isinstance(said.get(key), dict)
        said[key] = said[key] | value if merged else value
    (folder / file).write_text(json.dumps(said))
    with pytest.raises(UserError, match=message) as caught:
        vit_jax.load(folder)
    assert str(caught.value).startswith(str(folder)) and '\n' not in str(caught.value)


def test_preparation_counts_what_the_processor_says(tmp_path):
    folder = tmp_path / 'copy'
    shutil.copytree(reference.family('dinov3_hf'), folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    path = folder / 'preprocessor_config.json'
    usual = vit_jax.load(folder).preprocessing
    path.write_text(json.dumps(json.loads(path.read_text()) | {'do_normalize': False}))
    assert vit_jax.load(folder).preprocessing.std == (255, 255, 255)
    path.write_text(json.dumps(json.loads(path.read_text()) | {'do_rescale': False}))
    assert vit_jax.load(folder).preprocessing.std == (1, 1, 1)
    first = {'image_processor': {'image_processor_type': 'SiglipImageProcessor', 'size': 32}}
    (folder / 'processor_config.json').write_text(json.dumps(first))
    assert vit_jax.load(folder).preprocessing.mean == (127.5, 127.5, 127.5) != usual.mean


def alone(name, folder):
    """The arrays of a reference in a file of its own, without what describes them."""
    path = pathlib.Path(reference.family(name))
    path = path if path.is_file() else path / 'model.safetensors'
    return shutil.copyfile(path, folder / 'alone.safetensors')


def test_arrays_alone_are_asked_for_or_taken_as_their_authors_use_them(tmp_path):
    path = alone('clip_timm_openai', tmp_path)
    with pytest.raises(NeedsHint, match='without config.json: say gelu=quick'):
        vit_jax.load(path, num_heads=4)
    network = vit_jax.load(path, num_heads=4, gelu='quick')
    described = load('clip_timm_openai', None, gelu='quick')
    assert network.config.layer_norm_epsilon == described.config.layer_norm_epsilon == 1e-5
    assert network.preprocessing.mean == described.preprocessing.mean
    assert 'no config.json: images are prepared as for CLIP' in network.report
    of_meta = load('dinov2_orig', None)
    assert of_meta.preprocessing.mean == pytest.approx((123.675, 116.28, 103.53))
    with pytest.raises(UserError, match="DINOv3's need the config.json beside them"):
        path = alone('dinov3_hf', tmp_path)  # transformers' says which it is; timm's does not
        arrays = {'patch_embed.proj.weight': np.zeros((8, 3, 4, 4), np.float32)}
        save_file(arrays | {'norm.weight': np.ones(8, np.float32)}, path)
        vit_jax.load(path, num_heads=2)


def test_the_head_of_timms_clip_is_a_projection_unless_it_was_trained(tmp_path):
    network = load('clip_timm_openai', None)
    assert network.params['head']['bias'].any() != network.card.projects
    arrays = load_file(pathlib.Path(reference.family('clip_timm_openai')) / 'model.safetensors')
    for bias, projects in (0, True), (1, False):
        save_file(
            arrays | {'head.bias': np.full_like(arrays['head.bias'], bias)},
            tmp_path / 'x.safetensors',
        )
        network = vit_jax.load(tmp_path / 'x.safetensors', num_heads=4, gelu='quick')
        assert network.card.projects is projects
