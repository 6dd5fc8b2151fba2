"""What the files beside the arrays say is taken, or rejected by file and field."""

import dataclasses
import functools
import json
import pathlib
import shutil

import pytest
from safetensors.numpy import save_file

import vit_jax
from tests import reference, tiny
from tests.networks import contents, loaded
from vit_jax.base.errors import UserError
from vit_jax.checkpoints.formats import huggingface, timm
from vit_jax.checkpoints.formats.array_files import JsonObject

NAN = float('nan')
CONFIG, PROCESSOR, OPEN_CLIP = 'config.json', 'preprocessor_config.json', 'open_clip_config.json'
EXACT = tiny.model(gelu='exact')
LAYER_SCALED = dataclasses.replace(EXACT, layer_scale=1e-5, num_classes=None)
TINY = {
    'hf': EXACT,
    'hf dino': LAYER_SCALED,
    'hf registers': dataclasses.replace(LAYER_SCALED, registers=2),
    'timm': EXACT,
}
TIMM = {'architecture': 'vit_base_patch16_224', 'model_args': {'num_heads': 2}}


# By model and file: keys with a value that is rejected, and the name in the error.
WRONG = {
    ('hf', CONFIG): [
        ({'layer_norm_eps': NAN}, 'epsilon'),
        ({'layer_norm_eps': '1e-6'}, f'{CONFIG}.layer_norm_eps'),
        ({'num_attention_heads': '12'}, f'{CONFIG}.num_attention_heads'),
        ({'num_attention_heads': 5}, 'num_heads=5'),
        ({'hidden_size': -16}, 'width'),
        ({'hidden_size': 32}, 'patch_embeddings'),
        ({'image_size': [8, 8, 8]}, f'{CONFIG}.image_size'),
        ({'image_size': 64}, 'position_embeddings'),
        ({'patch_size': 2}, 'patch_embeddings'),
        ({'num_hidden_layers': 4}, 'encoder.layer.3'),
        ({'hidden_act': 'relu'}, f'{CONFIG}.hidden_act'),
        ({'auto_map': {'AutoModel': 'mine.Mine'}}, 'auto_map'),
        ({'quantization_config': {'bits': 4}}, 'quantization_config'),
        ({'model_type': None}, 'model_type'),
        ({'qkv_bias': False}, 'key.bias'),
        ({'id2label': {'10': 'a'}}, 'id2label: unexpected key .10'),
        ({'id2label': {'3': None}}, 'id2label.*None.*3'),
    ],
    ('hf', PROCESSOR): [
        ({'image_mean': [0.5, NAN, 0.5]}, f'{PROCESSOR}.image_mean'),
        ({'image_mean': [128, 128, 128]}, f'{PROCESSOR}.image_mean'),
        ({'image_std': [0, 0, 0]}, f'{PROCESSOR}.image_std'),
        ({'resample': 17}, f'{PROCESSOR}.resample'),
        ({'size': 'a'}, f'{PROCESSOR}.size'),
        ({'size': 4097}, 'expected sides from 1 to 4,096'),
        ({'size': {'height': 0, 'width': 8}}, 'expected sides from 1'),
        ({'do_center_crop': True, 'size': {'height': 8, 'width': 8}, 'crop_size': -1}, 'scale'),
        ({'size': {'height': 32, 'width': 32, 'shortest_edge': 32}}, 'shortest_edge'),
        ({'do_resize': False}, 'do_resize'),
        ({'do_pad': True}, 'do_pad'),
        ({'default_to_square': False, 'size': 8}, 'size=8'),
        ({'image_processor_type': 'ConvNextImageProcessor'}, 'ConvNext'),
    ],
    ('hf dino', CONFIG): [
        ({'num_register_tokens': 4}, 'register_tokens'),
        ({'mlp_ratio': 3}, 'fc1'),
        ({'use_swiglu_ffn': True}, 'weights_in'),
    ],
    ('hf registers', CONFIG): [({'num_register_tokens': 0}, 'register_tokens')],
    ('timm', CONFIG): [
        ({'model_args': 3}, 'model_args'),
        ({'model_args': {'num_heads': '12'}}, 'num_heads'),
        ({'model_args': {'act_layer': 'relu'}}, 'act_layer'),
        ({'model_args': {'qk_norm': True}}, 'q_norm'),
        ({'pretrained_cfg': {'crop_pct': NAN}}, 'crop_pct'),
        ({'pretrained_cfg': {'mean': [0.5]}}, 'mean'),
        ({'pretrained_cfg': {'crop_mode': 'border'}}, 'crop_mode'),
        ({'pretrained_cfg': {'interpolation': 'random'}}, 'interpolation'),
        ({'label_names': 'abc'}, 'label_names'),
        ({'architecture': None}, 'architecture'),
        ({'num_classes': 9}, 'head'),
        ({'num_classes': 0}, 'head'),
        ({'model_args': {'depth': 9}}, 'blocks'),
        ({'architecture': 'eva02_base_patch14_448'}, 'eva02'),
    ],
    ('siglip_timm_remainder', CONFIG): [
        ({'model_args': {'global_pool': 'avgmax'}}, 'avgmax'),
        ({'model_args': {'pool_include_prefix': True}}, 'pool_include_prefix'),
        ({'model_args': {'act_layer': 'silu'}}, 'mlp'),
    ],
    ('dinov3_hf', CONFIG): [
        ({'hidden_act': 'silu'}, 'gate'),
        ({'rope_theta': 10.0}, 'rope_theta'),
        ({'rope_parameters': {'rope_theta': 9}}, 'rope_theta'),
        ({'rope_scaling': {'factor': 2}}, 'rope_scaling'),
        ({'value_bias': False}, 'v_proj.bias'),
        ({'mlp_bias': False}, 'mlp_bias'),
        ({'use_gated_mlp': True}, 'use_gated_mlp'),
    ],
    ('siglip_hf_linear', CONFIG): [({'vision_config': []}, 'vision_config')],
    ('clip_openclip', OPEN_CLIP): [
        ({'model_cfg': 3}, 'model_cfg'),
        ({'model_cfg': {'quick_gelu': 'false'}}, 'quick_gelu'),
        ({'model_cfg': {'embed_dim': 3}}, 'proj'),
        ({'model_cfg': {'vision_cfg': {'attentional_pool': True}}}, 'attentional_pool'),
    ],
}


@functools.cache
def folder_of(name, root):
    """A network with the description that its library would write, and without our card."""
    folder = root / name
    if name not in TINY:
        return shutil.copytree(reference.family(name), folder, copy_function=shutil.copyfile)
    folder.mkdir()
    path = folder / 'model.safetensors'
    if name == 'timm':
        vit_jax.save(loaded(TINY[name], timm.TIMM), path)
        (folder / CONFIG).write_text(json.dumps(TIMM))
    else:
        vit_jax.save(loaded(TINY[name], huggingface.HUGGINGFACE), folder)
    save_file(contents(path), path)
    model = vit_jax.load(folder).config
    assert dataclasses.replace(model, position_resize='bilinear') == TINY[name]
    return folder


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    return tmp_path_factory.mktemp('described')


@pytest.mark.parametrize('name, file', WRONG)
def test_what_a_file_says_that_is_odd_or_not_supported_is_rejected(name, file, root):
    folder = folder_of(name, root)
    folder.chmod(0o755)
    path = pathlib.Path(folder / file)
    original = path.read_text()
    for changes, message in WRONG[name, file]:
        said = json.loads(original)
        for key, value in changes.items():
            merged = isinstance(value, dict) and isinstance(said.get(key), dict)
            said[key] = said[key] | value if merged else value
        path.write_text(json.dumps(said))
        with pytest.raises(UserError, match=message) as caught:
            vit_jax.load(folder)
        assert str(caught.value).startswith(str(folder)) and '\n' not in str(caught.value)
    path.write_text(original)


PARTS = 'vision_config', 'model_args', 'pretrained_cfg', 'preprocess_cfg', 'model_cfg', 'vision_cfg'


@pytest.mark.parametrize('name, file', WRONG)
def test_a_key_that_nobody_knows_is_rejected_by_file_and_name(name, file, root):
    path = folder_of(name, root) / file
    path.parent.chmod(0o755)
    original = path.read_text()
    said = json.loads(original)
    objects = [said]
    for part in PARTS:
        objects += [each[part] for each in objects if part in each]
    for values in objects:
        values['mystery'] = 1
        path.write_text(json.dumps(said))
        with pytest.raises(UserError, match=f'{file}.*mystery'):
            vit_jax.load(path.parent)
        del values['mystery']
    path.write_text(original)


@pytest.mark.parametrize(
    'id2label',
    [
        {'1': 'a', '2': 'b', '3': 'c'},
        {'0': 'a', '2': 'b'},
        {'a': 0, 'b': 1, 'c': 2},
        {'0': 'a', '1': None, '2': 'c'},
        {'0': 'a', '1': ['b'], '2': 'c'},
        {'00': 'a', '01': 'b', '02': 'c'},
    ],
)
def test_class_names_with_other_numbers_are_rejected(id2label):
    described = JsonObject({'id2label': {'0': 'a', '1': 7, '2': 'c'}}, CONFIG)
    assert huggingface._class_names(described, 3) == ('a', '7', 'c')
    with pytest.raises(UserError, match='id2label'):
        huggingface._class_names(JsonObject({'id2label': id2label}, CONFIG), 3)


def test_older_names_and_forms_of_transformers_mean_the_same(root, tmp_path):
    folder = shutil.copytree(folder_of('hf', root), tmp_path / 'hf')
    network = vit_jax.load(folder)
    config, processor = (json.loads((folder / file).read_text()) for file in (CONFIG, PROCESSOR))
    height, width = network.config.image_size
    sizes = height, [height, width], [2 * height, width]
    acts = {'gelu_new': 'tanh', 'gelu_python': 'exact', 'gelu_fast': 'tanh'}
    for size, (act, gelu) in zip(sizes, acts.items(), strict=True):
        (folder / CONFIG).write_text(json.dumps(config | {'hidden_act': act}))
        (folder / PROCESSOR).write_text(json.dumps(processor | {'size': size, 'do_pad': None}))
        again = vit_jax.load(folder)
        image_size = (2 * height, width) if size is sizes[-1] else (height, width)
        assert again.config == dataclasses.replace(network.config, gelu=gelu, image_size=image_size)
        assert again.preprocessing == network.preprocessing


def test_what_a_timm_description_states_twice_or_in_part(root):
    path = folder_of('timm', root) / CONFIG
    # The number of classes alone says nothing about images; timm's defaults complete what does.
    for said, mean in ({'num_classes': tiny.CLASSES}, 127.5), ({'crop_pct': 1.0}, 123.675):
        path.write_text(json.dumps(TIMM | said))
        assert vit_jax.load(path.parent).preprocessing.mean[0] == pytest.approx(mean)
    # timm overrides what pretrained_cfg says by what stands beside it.
    # Sizes come from the arrays, whatever the arguments say.
    stated = {'num_classes': tiny.CLASSES, 'model_args': {'embed_dim': 99, 'num_heads': 2}}
    said = {'pretrained_cfg': {'num_classes': 9, 'input_size': (1, 8, 8)}}
    names = [f'label {i}' for i in range(tiny.CLASSES)]
    for key in 'label_names', 'labels':  # the second is an older name
        path.write_text(json.dumps(TIMM | stated | said | {key: names}))
        network = vit_jax.load(path.parent)
        assert network.config.num_classes == tiny.CLASSES
        assert network.class_names == tuple(names)
