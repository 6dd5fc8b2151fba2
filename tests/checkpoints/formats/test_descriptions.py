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
from tests.networks import HYBRID, contents, loaded
from vit_jax.base.errors import UserError
from vit_jax.checkpoints.formats import huggingface, timm

NAN = float('nan')
CONFIG, PROCESSOR, OPEN_CLIP = 'config.json', 'preprocessor_config.json', 'open_clip_config.json'
EXACT = tiny.model(gelu='exact')
LAYER_SCALED = dataclasses.replace(EXACT, layer_scale=1e-5, num_classes=None)
TINY = {
    'hf': EXACT,
    'hf hybrid': dataclasses.replace(HYBRID, gelu='exact'),
    'hf dino': LAYER_SCALED,
    'hf registers': dataclasses.replace(LAYER_SCALED, registers=2),
    'timm': EXACT,
}
TIMM = {'architecture': 'vit_base_patch16_224', 'model_args': {'num_heads': 2}}


def nonsense(file, values, part=None):
    """Each value of each field, which is rejected by the name of the field."""
    for field, wrong in values.items():
        name = rf'{file}\.{f"{part}." if part else ""}{field}'
        for value in wrong:
            yield {part: {field: value}} if part else {field: value}, name


MEANS = [0.5, NAN, 0.5], 0.5, ['a' * 9] * 3, [0.5], [128, 128, 128]
LENGTHS = -16, 0, 1e400, {}
# By network and file: what it says, and what is said of that.
WRONG = {
    ('hf', CONFIG): [
        *nonsense(
            CONFIG,
            {
                'layer_norm_eps': (NAN, -1, 0, 1e30, '1e-6', [1e-6]),
                'num_attention_heads': (0, -3, '12', 2.0, 2.5, True),
                'hidden_size': LENGTHS,
                'num_hidden_layers': LENGTHS,
                'intermediate_size': LENGTHS,
                'image_size': (0, -8, [8], 'large', [8, 8, 8]),
                'hidden_act': (['gelu'],),
            },
        ),
        ({'num_hidden_layers': 4}, 'says num_hidden_layers=4, the arrays 3'),
        ({'hidden_act': 'swish'}, "hidden_act='swish' is not one of"),
        ({'auto_map': {'AutoModel': 'mine.Mine'}}, 'auto_map: .* computed by code of its own'),
    ],
    ('hf', PROCESSOR): nonsense(
        PROCESSOR,
        {
            'image_mean': MEANS,
            'image_std': (*MEANS, [0, 0, 0], [0.5, -0.5, 0.5]),
            'resample': (17,),
            'size': ({'shortest_edge': -1}, 'a', 1e9),
            'crop_size': ({'height': 0, 'width': 8},),
        },
    ),
    ('hf hybrid', CONFIG): [
        ({'backbone_config': {key: value}}, f'config.json.backbone_config says {key}=')
        for key, value in {
            'num_groups': 8,
            'hidden_act': 'gelu',
            'global_padding': None,
            'embedding_dynamic_padding': False,
            'layer_type': 'preactivation',
            'out_features': ['stage1'],
            'depths': [9, 9, 9],
        }.items()
    ],
    ('hf dino', CONFIG): [({'model_type': 'dinov2_with_registers'}, 'the arrays have none')],
    ('hf registers', CONFIG): [({'model_type': 'dinov2'}, 'the arrays have registers')],
    ('timm', CONFIG): [
        *nonsense(
            CONFIG,
            {
                'num_heads': (0, -3, '12', 2.0),
                'act_layer': (['gelu'],),
                'mlp_ratio': (NAN, -1, 1e300),
            },
            'model_args',
        ),
        *nonsense(
            CONFIG,
            {
                'crop_pct': (-1, 1e-9, 7, NAN, 'all'),
                'mean': ([0.5], 'mean', [NAN] * 3, [128] * 3),
                'std': ([0, 0, 0], [-1, 1, 1], [1e30] * 3),
            },
            'pretrained_cfg',
        ),
        *nonsense(CONFIG, {'model_args': (3,), 'label_names': ('abc',)}),
        ({'architecture': 'resnet50'}, 'resnet50: none of the ViTs of timm: not supported'),
        ({'pretrained_cfg': {'num_classes': 9}}, 'pretrained_cfg says num_classes=9, .* arrays 10'),
        ({'pretrained_cfg': {'input_size': (1, 8, 8)}}, 'input_size says channels=1, the arrays 3'),
    ],
    ('siglip_timm_remainder', CONFIG): [
        ({'global_pool': 'avgmax'}, "global_pool='avgmax' is not supported"),
        ({'global_pool': 'token'}, "global_pool='token': its arrays are those of .*'map'"),
        ({'architecture': None}, 'is not timm.s, as the arrays are: it has no architecture'),
        ({'architecture': 'eva02_base_patch14_448'}, 'EVA-02.s rotation .* not supported'),
        ({'num_classes': 3}, 'config.json says num_classes=3, the arrays 0'),
        ({'model_args': []}, r'config.json.model_args=\[\]: expected a JSON object'),
        ({'model_args': {'init_values': 1e-5}}, 'says init_values=1e-05, no array has them'),
        ({'model_args': {'act_layer': 'relu'}}, "act_layer='relu' is not supported"),
        ({'model_args': {'act_layer': 'silu'}}, 'says act_layer=silu, the arrays a plain MLP'),
        ({'model_args': {'pool_include_prefix': True}}, 'pool_include_prefix=True is not supp'),
        ({'model_args': {'depth': 3}}, 'config.json.model_args says depth=3, the arrays 2'),
        ({'model_args': {'patch_size': 3}}, r'says patch_size=\(3, 3\), the arrays'),
        ({'model_args': {'mlp_ratio': 1.0}}, 'says mlp_ratio=1.0, the arrays'),
        ({'model_args': {'qk_norm': True}}, 'model_args: qk_norm=True is not supported'),
        ({'pretrained_cfg': {'crop_mode': 'border'}}, "crop_mode='border' is not supported"),
        ({'pretrained_cfg': {'interpolation': 'random'}}, "interpolation='random' is not supp"),
    ],
    ('dinov2_timm_swiglu', CONFIG): [({'global_pool': 'avg'}, "global_pool=.'avg', 'token'")],
    ('dinov3_hf', CONFIG): [
        ({'hidden_act': 'silu'}, "hidden_act='silu', but .* a plain MLP"),
        ({'rope_theta': 10.0}, 'rope_theta=10: only 100 is supported'),
        ({'rope_parameters': {'rope_theta': 9}}, 'rope_theta=9: only 100'),
        ({'rope_scaling': {'factor': 2}}, 'rope_scaling=.* is not supp'),
        ({'patch_size': 16}, r'says patch_size=\(16, 16\), the arrays'),
        ({'image_size': 20_000}, 'a grid of 2,500x2,500: more than 1,048,'),
        ({'model_type': []}, r'model_type=\[\]: expected a name'),
        ({'architectures': 3}, 'architectures=3: expected a list of names'),
        ({'value_bias': False}, 'no bias, but layer.0.attention.v_proj'),
        ({'mlp_bias': False}, 'no bias, but layer.0.mlp.up_proj.bias is'),
        ({'use_gated_mlp': True}, 'says use_gated_mlp=True, the arrays'),
    ],
    ('dinov3_hf', PROCESSOR): [
        ({'do_resize': False}, 'do_resize=False is not supp'),
        ({'do_pad': True}, 'do_pad=True is not supported'),
        (
            {'image_processor_type': 'CLIPImageProcessor', 'do_center_crop': False, 'size': 32},
            'without do_center_crop is not supported',
        ),
        (
            {'image_processor_type': 'ConvNextImageProcessor'},
            'ConvNextImageProcessor is not supported: expected one of ViTImageProcessor',
        ),
    ],
    ('siglip_hf_linear', CONFIG): [
        ({'vision_config': []}, r'config.json.vision_config=\[\]'),
        ({'vision_config': {'model_type': 'clip_vision_model'}}, 'vision_model. within .*siglip'),
    ],
    ('deit_hf_dist', CONFIG): [
        ({'num_hidden_layers': 3}, 'says num_hidden_layers=3'),
        ({'qkv_bias': False}, 'says that there is no bias, but .*key.bias is'),
        ({'model_type': None}, 'is not transformers'),
        ({'id2label': {'7': 'a'}}, 'a name for each number from "0"'),
        ({'id2label': {'0': '\ud800'}}, 'half of a character'),
        ({'quantization_config': {'bits': 4}}, 'quantization_config='),
    ],
    ('deit_hf_dist', PROCESSOR): [
        ({'size': {'height': 32, 'width': 32, 'shortest_edge': 32}}, 'size=.* is not supported'),
        (
            {'image_processor_type': 'CLIPImageProcessor', 'size': 32, 'default_to_square': True},
            'default_to_square=True is not supported for CLIPImageProcessor',
        ),
    ],
    ('clip_openclip', OPEN_CLIP): [
        ({'model_cfg': 3}, 'model_cfg=3: expected a JSON'),
        ({'model_cfg': {'quick_gelu': 'false'}}, "quick_gelu='false': true or false"),
        ({'model_cfg': {'embed_dim': 3}}, 'model_cfg says embed_dim=3, the arrays'),
        *(
            ({'model_cfg': {'vision_cfg': {'image_size': 32} | values}}, message)
            for values, message in [
                ({'mlp_ratio': NAN}, 'mlp_ratio'),
                ({'mlp_ratio': 3.0}, 'vision_cfg says mlp_ratio=3.0, the arrays '),
                ({'attentional_pool': True}, 'attentional_pool=True is not supported'),
            ]
        ),
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


def test_what_a_timm_description_states_twice_or_in_part(root):
    path = folder_of('timm', root) / CONFIG
    # The number of classes alone is no way to prepare images.
    for said in {}, {'num_classes': tiny.CLASSES}:
        path.write_text(json.dumps(TIMM | said))
        assert vit_jax.load(path.parent).preprocessing.mean == (127.5, 127.5, 127.5)
    # timm overrides what pretrained_cfg says by what stands beside it.
    stated = {'num_classes': tiny.CLASSES, 'model_args': {'in_chans': 3, 'num_heads': 2}}
    said = {'pretrained_cfg': {'num_classes': 9, 'input_size': (1, 8, 8)}}
    path.write_text(json.dumps(TIMM | stated | said))
    assert vit_jax.load(path.parent).config.num_classes == tiny.CLASSES
    names = [f'label {i}' for i in range(tiny.CLASSES)]
    path.write_text(json.dumps(TIMM | {'label_names': names}))
    assert vit_jax.load(path.parent).class_names == tuple(names)
