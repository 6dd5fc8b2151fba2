"""Files of arrays: read exactly, nothing in them is executed, and damage is noticed."""

import argparse
import collections
import io
import json
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import vit_jax
from benchmarks import fault_injection
from tests import reference
from vit_jax.base import UserError
from vit_jax.checkpoints.formats import torch_pickles
from vit_jax.checkpoints.formats.array_files import read_array_file

BLOCK = 'Transformer/encoderblock_0'


def original():
    with np.load(reference.path('google_vit_token_prelogits')) as file:
        return dict(file)


def rejected(path, name):
    """In one sentence, which begins with the file."""
    with pytest.raises(UserError, match=name) as error:
        vit_jax.load(path)
    text = str(error.value)
    assert text.startswith(str(path)) and '\n' not in text and len(text) < 600, text


class Executed:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def test_pickle_is_never_executed(tmp_path):
    trap, path = tmp_path / 'executed', tmp_path / 'evil.npz'
    np.savez(path, **original() | {'cls': np.array([Executed(trap)], dtype=object)})
    rejected(path, 'cls')
    assert not trap.exists()
    np.load(path, allow_pickle=True)['cls']
    assert trap.exists()  # the trap works


@pytest.mark.nightly
def test_pickle_of_a_pytorch_file_is_never_executed(tmp_path):
    torch = pytest.importorskip('torch', reason='the torch extra is not installed')
    trap, path = tmp_path / 'executed', tmp_path / 'x.pth'
    for new in True, False:
        torch.save({'cls': Executed(trap)}, path, _use_new_zipfile_serialization=new)
        rejected(path, 'only tensors are unpickled')
        assert not trap.exists()


class Tensor:
    """Stands for a tensor, which torch pickles by a persistent id."""


class Settings:
    """Stands for an object that torch does not unpickle, which has a text in front of it."""

    model = 'vit'


def pickled(value):
    class Pickler(pickle.Pickler):
        def persistent_id(self, part):
            return ('storage', '0') if isinstance(part, Tensor) else None

    file = io.BytesIO()
    Pickler(file, protocol=2).dump(value)
    return file.getvalue()


ARRAYS = {'cls': Tensor(), 'norm': Tensor()}
OTHERS = {'args': Settings(), 'optimizer': {'state': {0: Tensor()}}, 'name': 'teacher'}
CONVERTED = {  # what the printed command takes
    'MAE': ({'model': ARRAYS} | OTHERS, "['model']"),
    'DINO': (
        {'student': ARRAYS, 'teacher': collections.OrderedDict(ARRAYS)} | OTHERS,
        "['teacher']",
    ),
    'timm': (OTHERS | {'state_dict': ARRAYS, 'arch': 'model'}, "['state_dict']"),
    'net': ({'net': ARRAYS, 'acc': Settings()}, "['net']"),
    'top': (ARRAYS | {'args': Settings()}, 'torch.is_tensor'),
    'none': ({'args': Settings(), 'model': {}}, 'contains no tensors'),
}


@pytest.mark.parametrize('name', CONVERTED)
@pytest.mark.parametrize('is_zip', [False, True])
def test_the_command_that_converts_a_file_takes_the_key_that_exists(name, is_zip, tmp_path):
    contents, text = CONVERTED[name]
    path = tmp_path / 'x.pth'
    if is_zip:
        with zipfile.ZipFile(path, 'w') as archive:
            archive.writestr('x/data.pkl', pickled(contents))
    else:
        path.write_bytes(
            pickled(0x1950A86A20F9469CFC6C) + pickled(1001) + pickled(contents) + b'rest'
        )
    assert text in torch_pickles.describe_conversion(path)


def test_a_torchscript_program_is_named(tmp_path):
    with zipfile.ZipFile(path := tmp_path / 'x.pt', 'w') as archive:
        for name in 'x/data.pkl', 'x/constants.pkl', 'x/code/model.py':
            archive.writestr(name, b'')
    rejected(path, 'TorchScript.*torch.jit.load')


@pytest.mark.nightly
@pytest.mark.parametrize('key', ['state_dict', 'model', 'teacher', 'net', ''])
def test_the_printed_command_converts_a_file(key, tmp_path):
    torch = pytest.importorskip('torch', reason='the torch extra is not installed')
    tensors = {'a': torch.arange(4.0), 'b': torch.ones(2)}
    for number, new in enumerate((True, False)):
        contents = {key: tensors} if key else tensors
        path = tmp_path / f'{number}.pth'
        others = {'args': argparse.Namespace(model='x'), 'best': np.float64(1)}
        torch.save(contents | others, path, _use_new_zipfile_serialization=new)
        with pytest.raises(UserError) as raised:
            read_array_file(path)
        command = re.search('python -c "(.*)"', str(raised.value))[1].replace('FILE', str(path))
        subprocess.run([sys.executable, '-c', command], cwd=tmp_path, check=True)
        assert {*read_array_file(tmp_path / 'weights.pth').arrays} == {'a', 'b'}
        (tmp_path / 'weights.pth').unlink()


@pytest.mark.nightly
def test_tensors_of_a_pytorch_file_are_read_by_their_keys(tmp_path):
    torch = pytest.importorskip('torch', reason='the torch extra is not installed')
    tensors = {'a': torch.arange(4.0), 'b': torch.arange(3, dtype=torch.bfloat16), 'step': 7}
    path = tmp_path / 'x.pth'
    for new in True, False:
        torch.save({'model': tensors, 'epoch': 3}, path, _use_new_zipfile_serialization=new)
        arrays = read_array_file(path).arrays
        assert {*arrays} == {'model.a', 'model.b'}
        assert arrays['model.b'].dtype.name == 'bfloat16'
        np.testing.assert_array_equal(arrays['model.b'].read(), [0, 1, 2])
        np.testing.assert_array_equal(arrays['model.a'].read(), [0, 1, 2, 3])
    with zipfile.ZipFile(path, 'w') as archive:  # whose checksums torch does not compare
        archive.writestr('x/data.pkl', b'1234')
    path.write_bytes(path.read_bytes().replace(b'1234', b'1235'))
    rejected(path, 'data.pkl')


@pytest.mark.parametrize(
    'data', [b'', b'GIF89a', b'version https://git-lfs', b'PK\3\4', b'12345678{'], ids=str
)
def test_other_files_are_rejected(data, tmp_path):
    (tmp_path / 'x.npz').write_bytes(data)
    rejected(tmp_path / 'x.npz', 'x.npz')


@pytest.mark.parametrize('text', ['[1]', 'null', '{', '[' * 100_000])
def test_a_description_that_is_no_json_object_is_rejected(text, tmp_path):
    arrays = {'a': np.zeros(1, np.float32)}
    save_file(arrays, tmp_path / 'x.safetensors', {'vit_jax.card': text})
    rejected(tmp_path / 'x.safetensors', 'x.safetensors')
    save_file(arrays, tmp_path / 'x.safetensors')
    for name in 'config.json', 'preprocessor_config.json', 'model.safetensors.index.json':
        (tmp_path / name).write_text(text)
        rejected(tmp_path, name)
        (tmp_path / name).unlink()
    (tmp_path / 'config.json').symlink_to('nowhere')
    rejected(tmp_path, 'config.json')


@pytest.mark.parametrize(
    'name, array',
    [
        (f'{BLOCK}/LayerNorm_0/scale', None),
        ('embedding/kernel', None),
        (f'{BLOCK}/MlpBlock_3/Dense_0/bias', None),
        ('extra/kernel', np.zeros(3, np.float32)),
        ('cls', np.zeros((1, 1, 33), np.float32)),
        ('head/kernel', np.zeros((11, 11), np.float32)),
        ('embedding/kernel', np.zeros((3, 32), np.float32)),
        ('cls', np.zeros((1, 1, 32), int)),
        ('cls', np.zeros((1, 1, 32))),
        ('head/bias', np.full(11, np.nan, np.float32)),
    ],
)
def test_an_array_that_does_not_fit_is_named(name, array, tmp_path):
    arrays = original() | {name: array}
    path = tmp_path / 'x.npz'
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    rejected(path, name)


def test_half_precision_is_read_exactly(tmp_path):
    rng = np.random.default_rng(0)
    for dtype in ml_dtypes.bfloat16, np.float16:
        array = rng.normal(size=(3, 5)).astype(dtype)
        np.savez(tmp_path / 'x.npz', a=array)  # numpy calls bfloat16 two bytes of nothing
        save_file({'a': array}, tmp_path / 'x.safetensors')
        for name in 'x.npz', 'x.safetensors':
            stored = read_array_file(tmp_path / name).arrays['a']
            assert stored.dtype == array.dtype and stored.shape == (3, 5)
            np.testing.assert_array_equal(stored.read(), array.astype(np.float32))


@pytest.mark.gate
def test_damage_to_an_npz_is_an_error_or_harmless(tmp_path):
    counts = fault_injection.damage_copies('google_vit_token_prelogits', tmp_path, 24)
    assert counts['rejected'] > 8


def test_shards_are_one_checkpoint(tmp_path):
    whole, folder = reference.path('hf_vit'), tmp_path / 'sharded'
    shutil.copytree(whole, folder)
    arrays = read_array_file(folder / 'model.safetensors').arrays
    (folder / 'model.safetensors').unlink()
    parts = {'a.safetensors': sorted(arrays)[::2], 'b.safetensors': sorted(arrays)[1::2]}
    for file, part in parts.items():
        save_file({name: arrays[name].read() for name in part}, folder / file)
    index = folder / 'model.safetensors.index.json'
    named = {name: file for file, part in parts.items() for name in part}
    index.write_text(json.dumps({'weight_map': named}))
    assert vit_jax.load(folder) == vit_jax.load(whole)
    (folder / 'b.safetensors').unlink()
    with pytest.raises(UserError, match='b.safetensors'):
        vit_jax.load(folder)
