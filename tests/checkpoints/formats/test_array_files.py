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
import types
import zipfile

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save, save_file

import vit_jax
from tests import reference
from vit_jax.base import UserError
from vit_jax.checkpoints.formats import array_files, torch_pickles
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


def _rebuild_tensor_v2(storage):
    """Stands for torch's function that makes a tensor."""


_rebuild_tensor_v2.__module__ = 'torch._utils'


class Storage:
    """Stands for the numbers of a tensor, which torch pickles by a persistent id."""


class Tensor:
    def __reduce__(self):
        return _rebuild_tensor_v2, (Storage(),)


class Settings:
    """Stands for an object of another class."""

    model = 'vit'


def pickled(value):
    class Pickler(pickle.Pickler):
        def persistent_id(self, part):
            return ('storage', '0') if isinstance(part, Storage) else None

    file = io.BytesIO()
    Pickler(file, protocol=2).dump(value)
    return file.getvalue()


ARRAYS = {'cls': Tensor(), 'norm': Tensor()}
ORDERED = collections.OrderedDict(ARRAYS)
OTHERS = {'args': Settings(), 'optimizer': {'state': {0: Tensor()}}, 'name': 'teacher'}
CONVERTED = {  # what the printed command takes
    'MAE': ({'model': ARRAYS} | OTHERS, "['model']"),
    'DINO': ({'student': ORDERED, 'teacher': collections.OrderedDict(ARRAYS)}, "['teacher']"),
    'order': (
        {'optimizer': ORDERED, 'state_dict': collections.OrderedDict(ARRAYS)},
        "['state_dict']",
    ),
    'timm': (OTHERS | {'state_dict': ARRAYS, 'arch': 'model'}, "['state_dict']"),
    'net': ({'config': {'model': ARRAYS}, 'net': ARRAYS, 'acc': Settings()}, "['net']"),
    'top': (ARRAYS | {'args': Settings()}, 'torch.is_tensor'),
    'module': ({'model': Settings()} | OTHERS, "['model'].state_dict()"),
    'only a module': (Settings(), ').state_dict()'),
    'none': ({'args': Settings(), 'model': {}}, 'no tensors were found'),
}


@pytest.mark.parametrize('name', CONVERTED)
@pytest.mark.parametrize('is_zip', [False, True])
def test_the_command_that_converts_a_file_takes_the_key_that_exists(
    name, is_zip, tmp_path, monkeypatch
):
    module = types.SimpleNamespace(_rebuild_tensor_v2=_rebuild_tensor_v2)
    monkeypatch.setitem(sys.modules, 'torch._utils', module)
    monkeypatch.setitem(sys.modules, 'torch', types.SimpleNamespace(_utils=module))
    contents, text = CONVERTED[name]
    path = tmp_path / 'x.pth'
    if is_zip:
        with zipfile.ZipFile(path, 'w') as archive:
            archive.writestr('x/data.pkl', pickled(contents))
    else:
        parts = 0x1950A86A20F9469CFC6C, 1001, {'little_endian': True}, contents
        path.write_bytes(b''.join(map(pickled, parts)) + b'rest')
    assert text in torch_pickles.describe_conversion(path)


def test_nothing_in_a_file_is_executed_to_find_the_key(tmp_path):
    trap = tmp_path / 'executed'
    (path := tmp_path / 'x.pth').write_bytes(
        pickled({'model': Executed(trap), 'a': [Executed(trap)]})
    )
    torch_pickles.describe_conversion(path)
    assert not trap.exists()
    pickle.loads(path.read_bytes())
    assert trap.exists()  # the trap works


def test_a_file_of_many_empty_pickles_does_not_hang(tmp_path):
    (path := tmp_path / 'x.pth').write_bytes(b'\x80\x02.' * 10**6)
    assert 'no tensors' in torch_pickles.describe_conversion(path)


def test_safetensors_are_written_as_by_the_library(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        'b': rng.normal(size=(3, 5)).astype(np.float32),
        'a': np.asfortranarray(rng.normal(size=(2, 7)).astype(np.float32)),
        'half': rng.normal(size=4).astype(np.float16),
        'brain': rng.normal(size=(1, 3)).astype(ml_dtypes.bfloat16),
        'scalar': np.float32(3),
        'empty': np.zeros((0, 2), np.float32),
    }
    with (tmp_path / 'x.safetensors').open('wb') as file:
        array_files.write_safetensors(file, arrays, {'key': 'value'})
    with safe_open(tmp_path / 'x.safetensors', 'numpy') as read:
        assert read.metadata() == {'format': 'pt', 'key': 'value'}
        for name, array in arrays.items():
            np.testing.assert_array_equal(read.get_tensor(name), array)
    one = {'a': arrays['b']}  # with several keys, the library's order of metadata varies
    array_files.write_safetensors(file := io.BytesIO(), one, {})
    assert file.getvalue() == save(one, {'format': 'pt'})


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
    'data, text',
    [
        (b'', 'empty'),
        (b'GIF89a', 'GIF89a'),
        (b'version https://git-lfs', 'git lfs pull'),
        (b'PK\3\4', 'end of the file'),
        (b'12345678{', 'bytes'),
    ],
    ids=str,
)
def test_other_files_are_rejected(data, text, tmp_path):
    (tmp_path / 'x.npz').write_bytes(data)
    rejected(tmp_path / 'x.npz', f'x.npz: .*{text}')


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
    """Bits flip at the start, at the end and anywhere, or the file is cut.

    safetensors files have no checksums, so that a flipped bit in their numbers is not noticed.
    """
    whole = vit_jax.load(reference.path('google_vit_token_prelogits'))
    path = tmp_path / 'copy.npz'
    vit_jax.save(whole, path)
    data = path.read_bytes()
    expected = jax.tree.leaves(whole.params)
    rng = np.random.default_rng(0)
    rejections = 0
    for number in range(24):
        copy = bytearray(data)
        ends = (0, 6000), (len(data) - 6000, len(data)), (0, len(data))
        for position in rng.integers(*ends[number % 3], 3):
            copy[position] ^= 1 << rng.integers(8)
        path.write_bytes(copy if number % 4 else copy[: len(copy) // 2])
        try:
            params = jax.tree.leaves(vit_jax.load(path).params)
        except UserError as error:
            assert '\n' not in str(error) and str(error).startswith(str(path)), error
            rejections += 1
            continue
        jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert rejections > 8


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
