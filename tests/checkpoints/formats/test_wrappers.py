"""Weights as training programs of PyTorch keep them: under keys, behind prefixes, in copies."""

import argparse

import numpy as np
import pytest

import vit_jax
from tests import tiny
from tests.networks import loaded
from vit_jax.base.errors import UserError
from vit_jax.checkpoints.formats import array_files, timm
from vit_jax.checkpoints.formats.array_files import FileContents
from vit_jax.checkpoints.formats.opening import OWN_PREFIXES
from vit_jax.checkpoints.formats.wrappers import unwrap

NAMES = 'cls_token', 'patch_embed.proj.weight', 'blocks.0.mlp.fc1.bias', 'norm.weight', 'head.bias'


def under(prefix, value, names=NAMES):
    """The arrays of a small ViT in timm's names; each of them is `value`."""
    return {f'{prefix}{name}': value for name in names}


HUGGINGFACE = 'vit.embeddings.patch_embeddings.projection.weight', 'classifier.bias'
SIGLIP = 'embeddings.patch_embedding.weight', 'head.probe', 'head.mlp.fc1.weight'
OPEN_CLIP = 'visual.ln_pre.weight', 'visual.conv1.weight', 'logit_scale'
# What each file holds; all but the arrays that are 1 are left out.
FILES = {
    'plain': under('', 1),
    'timm': under('state_dict.', 0) | under('state_dict_ema.', 1) | {'optimizer.state.0.x': 0},
    'DeiT': under('model.', 0) | under('model_ema.', 1),
    'torchvision': under('model.', 0) | under('model_ema.module.', 1) | {'model_ema.n_averaged': 0},
    'DINO': under('student.module.backbone.', 0)
    | under('teacher.backbone.', 1)
    | {'teacher.head.mlp.0.weight': 0},
    'I-JEPA': under('encoder.module.', 0) | under('target_encoder.module.', 1),
    'MAE': under('model.', 1) | {'model.decoder_pos_embed': 0, 'model.decoder_blocks.0.bias': 0},
    'Lightning': under('state_dict.student_backbone.', 0)
    | under('state_dict.teacher_backbone.', 1),
    'compiled': under('model.module._orig_mod.', 1),
    'sharded': under('module.', 1, [n.replace('mlp', '_fsdp_wrapped_module.mlp') for n in NAMES]),
    'in chunks': under('teacher.backbone.', 1, [n.replace('ks.0', 'ks.1.0') for n in NAMES]),
    'SigLIP alone': under('', 1, SIGLIP),
    'nested': under('model.state_dict.', 1),
    'own key': under('mine.', 1),
    'transformers': under('module.', 1, HUGGINGFACE),
    'OpenCLIP': under('state_dict.module.', 1, OPEN_CLIP),
}


def model_of(arrays, key=''):
    return unwrap(FileContents(arrays, key=key), OWN_PREFIXES)


@pytest.mark.parametrize('file', FILES)
def test_weights_are_found_and_averaged_ones_preferred(file):
    found = model_of(FILES[file])
    names = {'transformers': HUGGINGFACE, 'OpenCLIP': OPEN_CLIP, 'SigLIP alone': SIGLIP}
    names = names.get(file, NAMES)
    assert found.arrays == under('', 1, names)
    assert len(found.ignored) == sum(value == 0 for value in FILES[file].values())
    several = sum(name.endswith('cls_token') for name in FILES[file]) > 1
    assert bool(found.remarks) == several


@pytest.mark.parametrize(
    'file, key', [('timm', 'state_dict'), ('DINO', 'student'), ('Lightning', 'student_backbone')]
)
def test_another_copy_is_chosen_by_its_key_or_its_prefix(file, key):
    assert model_of(FILES[file], key).arrays == under('', 0)


@pytest.mark.parametrize(
    'arrays, key, name',
    [
        (under('net.', 0) | under('model.', 0), '', 'FILE:net'),
        (under('model.', 0), 'ema', 'ema'),
        (under('', 0), 'ema', 'ema'),
    ],
)
def test_a_choice_that_is_open_is_asked_for(arrays, key, name):
    with pytest.raises(UserError, match=name):
        model_of(arrays, key)


@pytest.mark.parametrize('prefix', OWN_PREFIXES)
def test_a_prefix_of_a_library_is_no_wrapper_so_that_the_head_stays(prefix):
    names = f'{prefix}embeddings.patch_embeddings.projection.weight', 'classifier.weight'
    assert [*model_of(under('', 1, names), '').arrays] == [*names]
    assert [*model_of(under('module.', 1, names), '').arrays] == [*names]


@pytest.mark.nightly
def test_files_of_pytorch_are_read_under_any_name(tmp_path):
    torch = pytest.importorskip('torch', reason='the torch extra is not installed')
    vit = loaded(tiny.model(gelu='exact'), timm.TIMM)
    vit_jax.save(vit, tmp_path / 'x.safetensors')
    read = array_files.read_array_file(tmp_path / 'x.safetensors').arrays
    arrays = {name: torch.from_numpy(array.read()) for name, array in read.items()}
    zeros = {name: 0 * array for name, array in arrays.items()}
    averaged = {f'module.{name}': array for name, array in arrays.items()}
    contents = {'state_dict': zeros, 'state_dict_ema': averaged, 'epoch': 1}
    hints = {'grid': vit.config.grid, 'num_heads': vit.config.num_heads}
    for name in 'x.ckpt', 'checkpoint.pth.tar':
        torch.save(contents, tmp_path / name)
        again = vit_jax.load(tmp_path / name, **hints)
        np.testing.assert_array_equal(again.params['head']['bias'], vit.params['head']['bias'])
        assert any('state_dict_ema' in line for line in again.report)
        raw = vit_jax.load(f'{tmp_path / name}:state_dict', **hints)
        assert not raw.params['head']['bias'].any()
    torch.save(contents | {'args': argparse.Namespace(lr=1)}, tmp_path / 'best.pt')
    with pytest.raises(UserError, match='Namespace'):
        vit_jax.load(tmp_path / 'best.pt', **hints)
