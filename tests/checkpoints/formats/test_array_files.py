import io
import json
import pathlib
import subprocess
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import vit_jax
from tests import reference
from vit_jax.checkpoints.formats.array_files import read_array_file, write_safetensors

ROOT = pathlib.Path(__file__).parents[3]


def original():
    with np.load(reference.path('google_vit_token_prelogits')) as file:
        return dict(file)


def written(path, **changes):
    """The reference file with arrays replaced, or left out where they are None."""
    arrays = original() | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return str(path)


def refused(path, message):
    """One sentence, that begins with the file."""
    with pytest.raises(ValueError, match=message) as error:
        vit_jax.load(str(path))
    text = str(error.value)
    assert text.startswith(str(path)) and '\n' not in text and len(text) < 600, text


def npy(array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def zipped(path, **members):
    with zipfile.ZipFile(path, 'w') as archive:
        for name, data in members.items():
            archive.writestr(name, data)


class Executed:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def test_pickle_is_never_executed(tmp_path):
    trap = tmp_path / 'executed'
    evil = np.array([Executed(trap)], dtype=object)
    np.savez(tmp_path / 'evil.npz', **original() | {'cls': evil})
    refused(tmp_path / 'evil.npz', 'cls.npy holds Python objects, which only pickle could read')
    assert not trap.exists()
    np.load(tmp_path / 'evil.npz', allow_pickle=True)['cls']
    assert trap.exists()  # the trap works


def test_pickle_of_a_pytorch_file_is_never_executed(tmp_path):
    torch = pytest.importorskip('torch', reason='the torch extra is not installed')
    trap = tmp_path / 'executed'
    for new in True, False:
        torch.save({'cls': Executed(trap)}, tmp_path / 'x.pth', _use_new_zipfile_serialization=new)
        refused(tmp_path / 'x.pth', 'nothing else is unpickled')
        assert not trap.exists()


def test_what_a_training_run_of_pytorch_keeps_beside_its_weights_is_listed(tmp_path):
    torch = pytest.importorskip('torch', reason='the torch extra is not installed')
    tensors = {'a': torch.arange(4.0), 'b': torch.arange(3, dtype=torch.bfloat16), 'step': 7}
    wrapped = {'model': tensors, 'optimizer': {'lr': 0.1}, 'epoch': 3}
    torch.save(wrapped, tmp_path / 'x.pth')
    contents = read_array_file(tmp_path / 'x.pth')
    assert contents.ignored == ('optimizer', 'epoch', 'step')
    np.testing.assert_array_equal(contents.arrays['a'].read(), [0, 1, 2, 3])
    assert contents.arrays['b'].dtype.name == 'bfloat16'
    np.testing.assert_array_equal(contents.arrays['b'].read(), [0, 1, 2])


@pytest.mark.parametrize('name', ['../head/kernel', '/head/kernel', 'head/../../x', 'C:/head'])
def test_names_that_lead_elsewhere_are_refused(name, tmp_path):
    written(tmp_path / 'x.npz', **{name: np.zeros(2, np.float32)})
    refused(tmp_path / 'x.npz', 'is absolute, leads upwards or holds a NUL')
    save_file({name: np.zeros(2, np.float32)}, tmp_path / 'x.safetensors')
    refused(tmp_path / 'x.safetensors', 'is absolute, leads upwards or holds a NUL')


def test_a_nul_in_a_name_is_refused(tmp_path):
    data = pathlib.Path(written(tmp_path / 'x.npz')).read_bytes()
    (tmp_path / 'x.npz').write_bytes(data.replace(b'head/bias.npy', b'head/bi\0s.npy'))
    refused(tmp_path / 'x.npz', 'leads upwards or holds a NUL')


def test_a_header_that_declares_more_than_the_file_has_is_refused_before_allocating(tmp_path):
    huge = npy(np.zeros((1, 1, 32), np.float32)).replace(b'(1, 1, 32)', b'(9, 9, 9999999999)')
    members = {f'{name}.npy': npy(array) for name, array in original().items()}
    zipped(tmp_path / 'x.npz', **members | {'cls.npy': huge})
    refused(tmp_path / 'x.npz', r'cls declares 3,239,999,999,\d+ bytes, holds')

    file = io.BytesIO()
    with zipfile.ZipFile(file, 'w', zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr('bomb.npy', npy(np.zeros(10**8, np.float32)))
    (tmp_path / 'x.npz').write_bytes(file.getvalue())
    refused(tmp_path / 'x.npz', r'declares 400,\S+ bytes of arrays in a file of')

    header = json.dumps({'a': {'dtype': 'F32', 'shape': [10**10], 'data_offsets': [0, 4 * 10**10]}})
    data = len(header).to_bytes(8, 'little') + header.encode() + bytes(64)
    (tmp_path / 'x.safetensors').write_bytes(data)
    refused(tmp_path / 'x.safetensors', '(?i)header|invalid')
    (tmp_path / 'x.safetensors').write_bytes((10**15).to_bytes(8, 'little') + b'{' + bytes(64))
    refused(tmp_path / 'x.safetensors', '(?i)header')


def test_an_npz_that_was_compressed_is_read(tmp_path):
    np.savez_compressed(tmp_path / 'x.npz', **original())
    images, logits = reference.images_and_logits('google_vit_token_prelogits')
    np.testing.assert_allclose(vit_jax.load(f'{tmp_path}/x.npz').logits(images), logits, atol=1e-5)


def test_what_is_no_checkpoint_at_all_is_named(tmp_path):
    cases = {
        'empty': (b'', 'the file is empty'),
        'text': (b'hello, world, this is text', "begins with b'hello, w': neither npz"),
        'pointer': (b'version https://git-lfs.github.com/spec/v1', 'a git-lfs pointer'),
        'truncated': (pathlib.Path(written(tmp_path / 'x.npz')).read_bytes()[:99_999], 'not a zip'),
    }
    for name, (data, message) in cases.items():
        (tmp_path / name).write_bytes(data)
        refused(tmp_path / name, message)
    zipped(tmp_path / 'other.zip', **{'readme.txt': b'text'})
    refused(tmp_path / 'other.zip', 'readme.txt is no array of numpy')
    np.savez(tmp_path / 'other.npz', weights=np.zeros(3, np.float32))
    refused(tmp_path / 'other.npz', r"those of no known ViT: \['weights'\]")
    np.savez(tmp_path / 'bit.npz', **{'root_block/conv_root/kernel': np.zeros((7, 7, 3, 64))})
    refused(tmp_path / 'bit.npz', "of BiT's pre-activation ResNet, which is not the one")
    with pytest.raises(FileNotFoundError, match='no such'):
        vit_jax.load(str(tmp_path / 'absent.npz'))
    (tmp_path / 'nothing').mkdir()
    with pytest.raises(FileNotFoundError, match='neither a checkpoint'):
        vit_jax.load(str(tmp_path / 'nothing'))


def test_arrays_that_do_not_fit_are_named(tmp_path):
    path = tmp_path / 'x.npz'
    block, nan = 'Transformer/encoderblock_0', np.full(11, np.nan, np.float32)
    cases = [
        ({f'{block}/LayerNorm_0/scale': None}, f'1 arrays are missing: {block}/LayerNorm_0/scale'),
        ({'extra/kernel': np.zeros(3, np.float32)}, '1 arrays are not known: extra/kernel'),
        ({'cls': np.zeros((1, 1, 33), np.float32)}, r'cls has the shape \(1, 1, 33\), which does'),
        ({'cls': np.zeros((1, 1, 32), int)}, 'cls is int64, not float32, float16 or bfloat16'),
        ({'cls': np.zeros((1, 1, 32))}, 'cls is float64, not float32'),
        ({'head/bias': nan}, r'head/bias holds 11 values that are not finite \(NaN or Inf\)'),
        ({'embedding/kernel': None}, 'the array embedding/kernel is missing'),
        ({'embedding/kernel': np.zeros((3, 32), np.float32)}, r'\(3, 32\), expected 4 axes'),
        ({f'{block}/MlpBlock_3/Dense_0/bias': None}, 'Dense_0/bias is missing'),
    ]
    for changes, message in cases:
        refused(written(path, **changes), message)
    arrays = {name.replace('encoderblock_1', 'encoderblock_7'): a for name, a in original().items()}
    np.savez(path, **arrays)
    refused(path, '16 arrays are missing: Transformer/encoderblock_1/.*16 arrays are not known')


def test_a_name_that_is_twice_in_a_zip_is_refused(tmp_path):
    written(tmp_path / 'x.npz')
    with zipfile.ZipFile(tmp_path / 'x.npz', 'a') as archive, pytest.warns(UserWarning):
        archive.writestr('cls.npy', npy(np.ones((1, 1, 32), np.float32)))
    refused(tmp_path / 'x.npz', 'cls.npy is in it twice')


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


def test_what_is_written_can_be_read_by_those_who_can_read_other_files(tmp_path):
    write_safetensors(tmp_path / 'x.safetensors', {'a': np.ones(8, np.float32)}, {})
    (tmp_path / 'other').touch()
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1 and len(list(tmp_path.iterdir())) == 2


def test_a_flipped_bit_in_a_safetensors_file_of_ours_is_found(tmp_path):
    path = tmp_path / 'x.safetensors'
    write_safetensors(path, {'a': np.ones(8, np.float32), 'b': np.ones(8, np.float32)}, {})
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    arrays = read_array_file(path).arrays
    arrays['a'].read()
    with pytest.raises(ValueError, match='b is damaged: its digest is not the one'):
        arrays['b'].read()


@pytest.mark.parametrize('copies', [4, pytest.param(40, marks=pytest.mark.full)])
def test_damage_is_an_error_or_harmless(copies, tmp_path):
    """Some hundreds of damaged files, in a process whose memory and time are bounded."""
    program = [sys.executable, '-m', 'tests.checkpoints.damage', str(tmp_path), str(copies)]
    run = subprocess.run(program, cwd=ROOT, timeout=400, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    counts = json.loads(run.stdout.splitlines()[-1])
    assert len(counts) >= len(reference.COMMITTED)
    for name, outcomes in counts.items():
        assert outcomes['refused'] > copies / 4, (name, outcomes)
        assert sum(outcomes.values()) == copies, (name, outcomes)
