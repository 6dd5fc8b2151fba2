"""Weights as training programs of PyTorch keep them: under keys, behind prefixes, in copies."""

import argparse
import pathlib

import numpy as np
import pytest

import vit_jax
from tests import tiny
from tests.networks import loaded
from vit_jax.base.errors import UserError
from vit_jax.checkpoints.formats import array_files, timm, wrappers

REASON = 'the torch extra is not installed'
EXTRA = np.zeros(2, np.float32)


def network(number, *, head=True):
    """The arrays of a small ViT in timm's names; every number is `number`."""
    names = ['cls_token', 'pos_embed', 'patch_embed.proj.weight', 'patch_embed.proj.bias']
    names += [
        f'blocks.{layer}.{name}' for layer in (0, 1) for name in ('norm1.bias', 'mlp.fc1.bias')
    ]
    names += ['norm.weight'] + ['head.weight', 'head.bias'] * head
    return {name: np.full(2, number, np.float32) for name in names}


def under(prefix, arrays):
    return {f'{prefix}{name}': array for name, array in arrays.items()}


RAW, AVERAGE = network(0), network(1)
NO_HEAD = network(0, head=False), network(1, head=False)
OPTIMIZER = {'state': {0: {'exp_avg': EXTRA}}, 'param_groups': [{'lr': 0.1}]}
DINO = under('backbone.', NO_HEAD[1]) | {
    'head.mlp.0.weight': EXTRA,
    'head.last_layer.weight': EXTRA,
}
MOCO = {
    **under('module.base_encoder.', NO_HEAD[1]),
    **under('module.momentum_encoder.', NO_HEAD[0]),
    'module.base_encoder.head.0.weight': EXTRA,
    'module.predictor.0.weight': EXTRA,
}
CHUNKS = {name.replace('blocks.', 'blocks.0.'): array for name, array in NO_HEAD[1].items()}
COMPILED = {name.replace('.1.', '.1._orig_mod.'): array for name, array in AVERAGE.items()}
# What each file holds; all but the AVERAGE is not to be taken.
FILES = {
    'plain': AVERAGE,
    'timm': {'epoch': 1, 'state_dict': RAW, 'state_dict_ema': AVERAGE, 'optimizer': OPTIMIZER},
    'timm without an average': {'state_dict': AVERAGE, 'state_dict_ema': None, 'metric': 1.0},
    'DeiT': {'model': RAW, 'model_ema': AVERAGE, 'optimizer': OPTIMIZER},
    'torchvision': {'model': RAW, 'model_ema': under('module.', AVERAGE) | {'n_averaged': EXTRA}},
    'DINO': {'student': under('module.backbone.', RAW), 'teacher': DINO, 'loss': {'c': EXTRA}},
    'DINOv2': {'teacher': under('backbone.', CHUNKS) | under('ibot_head.', {'mlp.0.bias': EXTRA})},
    'I-JEPA': {
        'encoder': under('module.', NO_HEAD[0]),
        'target_encoder': under('module.', NO_HEAD[1]),
        'predictor': {'mask_token': EXTRA},
    },
    'MAE': {'model': NO_HEAD[1] | {'decoder_pos_embed': EXTRA, 'decoder_blocks.0.bias': EXTRA}},
    'MoCo-v3': {'arch': 'vit', 'state_dict': MOCO, 'optimizer': OPTIMIZER},
    'Lightning': {'state_dict': under('model.', AVERAGE), 'hyper_parameters': {'lr': 0.1}},
    'Lightning, two': {
        'state_dict': under('student_backbone.', RAW) | under('teacher_backbone.', AVERAGE)
    },
    'DistributedDataParallel, compiled': {'model': under('module._orig_mod.', AVERAGE)},
    'blocks compiled': COMPILED,
    'FSDP': {'model': under('_fsdp_wrapped_module.', AVERAGE)},
    'DeepSpeed': {'module': under('module.', AVERAGE), 'ds_version': '0.1'},
    'nested': {'model': {'state_dict': AVERAGE, 'step': 1}},
    'SimMIM': {'model': under('encoder.', NO_HEAD[1]) | {'decoder.0.weight': EXTRA}},
    **{key: {key: AVERAGE, 'epoch': 3} for key in ('teacher', 'ema', 'net', 'model_state')},
}


def unwrapped(contents, wanted=''):
    """The arrays, and what is said of the choice."""
    found = wrappers.by_key(contents, wanted, np.ndarray)
    inside = wrappers.by_prefix(found.arrays, found.wanted)
    return inside.arrays, found.remarks + inside.remarks


@pytest.mark.parametrize('name', FILES)
def test_weights_are_found_and_averaged_ones_preferred(name):
    arrays, remarks = unwrapped(FILES[name])
    expected = NO_HEAD[1] if 'head.bias' not in arrays else AVERAGE
    assert arrays.keys() == expected.keys()
    assert all(array[0] == 1 for array in arrays.values())
    several = 'student' in str(FILES[name]) or any(array is RAW for array in FILES[name].values())
    assert bool(remarks) >= several


@pytest.mark.parametrize(
    ('name', 'wanted'),
    [
        ('timm', 'state_dict'),
        ('DINO', 'student'),
        ('MoCo-v3', 'module.momentum_encoder'),
        ('Lightning, two', 'student_backbone'),
    ],
)
def test_another_copy_is_chosen_by_its_key_or_its_prefix(name, wanted):
    arrays, _ = unwrapped(FILES[name], wanted)
    assert all(array[0] == 0 for array in arrays.values()) and 'pos_embed' in arrays


@pytest.mark.parametrize(
    ('contents', 'wanted', 'message'),
    [
        ({'mine': RAW, 'epoch': 1}, '', 'arrays under mine; say which with FILE:mine'),
        ({'net': RAW, 'model': RAW}, '', 'several networks: net, model; say which'),
        ({'epoch': 1, 'best': 2.0}, '', 'its keys are epoch, best'),
        ({}, '', 'its keys are none'),
        (under('backbone.', NO_HEAD[0]) | {'fc.weight': EXTRA}, '', 'fc.weight is not .*:backbone'),
        (under('net.', RAW) | under('model.', RAW), '', 'several networks: model, net; say which'),
        ({'model': RAW}, 'ema', "nothing is under 'ema'"),
        (under('net.', RAW), 'ema', "nothing is under 'ema'; networks are under net"),
    ],
)
def test_what_no_rule_decides_is_asked_for(contents, wanted, message):
    with pytest.raises(UserError, match=message):
        unwrapped(contents, wanted)


def test_a_copy_within_itself_ends():
    contents = {'epoch': 1}
    contents['model'] = {'model': contents}
    with pytest.raises(UserError):
        unwrapped(contents)


def test_files_of_pytorch_are_read_under_any_name(tmp_path):
    torch = pytest.importorskip('torch', reason=REASON)
    vit = loaded(tiny.model(gelu='exact'), timm.TIMM)
    vit_jax.save(vit, tmp_path / 'x.safetensors')
    read = array_files.read_array_file(tmp_path / 'x.safetensors').arrays
    arrays = {name: torch.from_numpy(array.read()) for name, array in read.items()}
    zeros = {name: 0 * array for name, array in arrays.items()}
    for name in 'x.ckpt', 'checkpoint.pth.tar', 'best.pt':
        contents = {'state_dict': zeros, 'state_dict_ema': under('module.', arrays), 'epoch': 1}
        torch.save(contents, tmp_path / name)
        again = vit_jax.load(tmp_path / name, grid=vit.config.grid, num_heads=vit.config.num_heads)
        np.testing.assert_array_equal(again.params['head']['bias'], vit.params['head']['bias'])
        assert 'weights: state_dict_ema (averaged); not used: state_dict' in again.report
        raw = vit_jax.load(
            f'{tmp_path / name}:state_dict', grid=vit.config.grid, num_heads=vit.config.num_heads
        )
        assert not raw.params['head']['bias'].any()


@pytest.mark.parametrize('value', [argparse.Namespace(lr=1), pathlib.PurePosixPath('x')])
def test_a_file_with_other_objects_is_rejected_with_a_way_out(value, tmp_path):
    torch = pytest.importorskip('torch', reason=REASON)
    torch.save({'state_dict': {}, 'args': value}, tmp_path / 'model_best.pth.tar')
    with pytest.raises(UserError, match=f'{type(value).__name__}.*python -c "import torch; .*'):
        vit_jax.load(tmp_path / 'model_best.pth.tar')
