import io
import json
import math
import pathlib
import subprocess
import sys
import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import vit_jax
from tests import reference
from vit_jax.checkpoints.card import Hints
from vit_jax.checkpoints.formats import array_files, pickles
from vit_jax.checkpoints.formats.array_files import read_array_file, write_safetensors
from vit_jax.checkpoints.formats.opening import open_checkpoint

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


def memory_of_refusing(path, message):
    """Bytes that Python holds at most while a file is refused."""
    tracemalloc.start()
    try:
        refused(path, message)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_long_header_is_refused_before_it_is_read(tmp_path):
    size = 2 * 10**7
    cls = b'\x93NUMPY\x02\x00' + size.to_bytes(4, 'little') + b' ' * size
    zipped(tmp_path / 'x.npz', **{'cls.npy': cls})
    assert memory_of_refusing(tmp_path / 'x.npz', 'cls.npy: EOF.* array header') < size / 2
    header = json.dumps({'__metadata__': {'card': ' ' * size}}).encode()
    (tmp_path / 'x.safetensors').write_bytes(len(header).to_bytes(8, 'little') + header)
    message = 'describes itself in 20,000,030 bytes, at most 8,388,608 are read'
    assert memory_of_refusing(tmp_path / 'x.safetensors', message) < size / 2
    zipped(tmp_path / 'y.npz', **{'cls.npy': npy(np.zeros(3))})
    data = (tmp_path / 'y.npz').read_bytes()
    members = b''.join([data[data.index(b'PK\1\2') : data.index(b'PK\5\6')]] * (size // 53))
    data = data[: data.index(b'PK\1\2')] + members + data[data.index(b'PK\5\6') :]
    data = data[:-10] + len(members).to_bytes(4, 'little') + data[-6:]
    (tmp_path / 'y.npz').write_bytes(data)
    assert memory_of_refusing(tmp_path / 'y.npz', 'describes itself in 19,999,9') < size / 2


def test_the_number_of_arrays_and_of_files_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(array_files, '_MOST_ARRAYS', 3)
    arrays = {name: np.zeros(0, np.float32) for name in 'abcd'}
    np.savez(tmp_path / 'x.npz', **arrays)
    save_file(arrays, tmp_path / 'x.safetensors')
    for name in 'x.npz', 'x.safetensors':
        refused(tmp_path / name, 'holds 4 arrays, at most 3 are read')
    files = {'ab': arrays | {'c': None, 'd': None}, 'cd': arrays | {'a': None, 'b': None}}
    for file, named in files.items():
        named = {name: array for name, array in named.items() if array is not None}
        save_file(named, tmp_path / f'{file}.safetensors')
    index = {'weight_map': {n: f'{file}.safetensors' for file in files for n in file}}
    folder = tmp_path / 'model.safetensors.index.json'
    folder.write_text(json.dumps(index))
    with pytest.raises(ValueError, match='cd.safetensors: holds 4 arrays, at most 3 are read'):
        vit_jax.load(tmp_path)
    folder.write_text(json.dumps({'weight_map': {str(i): f'{i}.bin' for i in range(1001)}}))
    with pytest.raises(ValueError, match='index.json: names 1,001 files, at most 1,000 are read'):
        vit_jax.load(tmp_path)


@pytest.mark.parametrize('odd', ['[1]', 'null', '3', '{"a": 1}', '{"a": null}', '{}'])
def test_an_odd_index_is_one_sentence(odd, tmp_path):
    index = tmp_path / 'model.safetensors.index.json'
    for text in odd, f'{{"weight_map": {odd}}}':
        index.write_text(text)
        with pytest.raises(ValueError, match='index.json: (expected a JSON|weight_map|names)'):
            vit_jax.load(tmp_path)


@pytest.mark.parametrize(
    'text, message',
    [
        ('[1]', 'expected a JSON object, not'),
        ('null', 'expected a JSON object, not None'),
        ('[' * 100_000, 'recursion'),
        (f'{{"a": {"9" * 5000}}}', 'a whole number of 5,000 digits'),
        (' ' * 2**23 + '{}', 'describes itself in 8,388,[0-9]+ bytes'),
    ],
    ids=['list', 'null', 'deep', 'digits', 'long'],
)
def test_an_odd_description_is_one_sentence(text, message, tmp_path):
    (tmp_path / 'config.json').write_text(text)
    arrays = {'a': np.zeros(1, np.float32)}
    np.savez(tmp_path / 'x.npz', **arrays)
    with pytest.raises(ValueError, match=f'config.json: .*{message}'):
        vit_jax.load(tmp_path)
    for name in array_files.DIGESTS, 'vit_jax.card':
        save_file(arrays, tmp_path / 'x.safetensors', {name: text})
        with pytest.raises(ValueError, match=message):
            vit_jax.load(tmp_path / 'x.safetensors')


@pytest.mark.parametrize(
    'begin, end',
    [
        (b'}', b'K\x01s.'),  # as the key of a dictionary
        (b'ccollections\nOrderedDict\n]', b'K\x01\x86a\x85R.'),  # of one that a function makes
    ],
)
def test_a_pickle_whose_keys_would_be_hashed_for_ever_is_refused(begin, end, tmp_path):
    pair = b'h\x00\x86q\x00'  # of the newest value, twice; the memo holds it then
    pickle = b'\x80\x02' + begin + b')q\x00' + 100 * pair + end
    with zipfile.ZipFile(tmp_path / 'x.pth', 'w') as archive:
        archive.writestr('archive/data.pkl', pickle)
    (tmp_path / 'legacy.pth').write_bytes(pickle)
    for name in 'x.pth', 'legacy.pth':
        refused(tmp_path / name, 'holds a pickle of more than')


@pytest.mark.parametrize('new', [True, False])
def test_tensors_that_are_larger_than_their_file_are_refused(new, tmp_path, monkeypatch):
    torch = pytest.importorskip('torch', reason='the torch extra is not installed')
    path, save = tmp_path / 'x.pth', torch.save
    save({'a': torch.zeros(1).expand(10**9)}, path, _use_new_zipfile_serialization=new)
    refused(path, 'declares 4,000,000,000 bytes of arrays in a file of')
    deep = (0,)
    for _ in range(200):
        deep = deep, deep
    save({'a': torch.zeros(1), 'b': {'c': deep}}, path, _use_new_zipfile_serialization=new)
    refused(path, 'holds a pickle of more than')
    save({'a': torch.zeros(1), 'b': {(0, 1): 2}}, path, _use_new_zipfile_serialization=new)
    assert read_array_file(path).ignored == ('b',)
    monkeypatch.setattr(pickles, '_MOST_OPCODES', 10)
    refused(path, 'holds a pickle of more than 10 operations')


@pytest.mark.full
def test_bombs_cost_no_memory(tmp_path):
    """Files of some megabytes that would take hundreds, or gigabytes."""
    program = [sys.executable, '-m', 'tests.checkpoints.bombs', str(tmp_path)]
    run = subprocess.run(program, cwd=ROOT, timeout=200, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.full
def test_a_checkpoint_of_22_billion_parameters_is_opened(tmp_path):
    """The sizes of "Scaling Vision Transformers to 22 Billion Parameters", in sparse shards."""
    width, mlp, depth = 6144, 24_576, 48
    shapes = {
        'cls_token': [1, 1, width],
        'pos_embed': [1, 257, width],
        'patch_embed.proj.weight': [width, 3, 14, 14],
        'patch_embed.proj.bias': [width],
        **{f'norm.{leaf}': [width] for leaf in ('weight', 'bias')},
    }
    for block in (f'blocks.{i}' for i in range(depth)):
        shapes |= {f'{block}.norm{i}.{n}': [width] for i in (1, 2) for n in ('weight', 'bias')}
        sizes = {'attn.qkv': [3 * width, width], 'attn.proj': [width, width]}
        sizes |= {'mlp.fc1': [mlp, width], 'mlp.fc2': [width, mlp]}
        shapes |= {f'{block}.{name}.weight': size for name, size in sizes.items()}
        shapes |= {f'{block}.{name}.bias': size[:1] for name, size in sizes.items()}
    weight_map = {name: f'{i % 20}.safetensors' for i, name in enumerate(shapes)}
    for file in {*weight_map.values()}:
        header, end = {}, 0
        for name in (name for name, where in weight_map.items() if where == file):
            begin, end = end, end + 4 * math.prod(shapes[name])
            header[name] = {'dtype': 'F32', 'shape': shapes[name], 'data_offsets': [begin, end]}
        text = json.dumps(header).encode()
        with (tmp_path / file).open('wb') as shard:
            shard.write(len(text).to_bytes(8, 'little') + text)
            shard.truncate(8 + len(text) + end)
    index = tmp_path / 'model.safetensors.index.json'
    index.write_text(json.dumps({'weight_map': weight_map}))
    opened = open_checkpoint(str(tmp_path), Hints(num_heads=48))
    assert opened.card.model.depth == depth
    assert '21,7' in opened.report[0]


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
    with pytest.raises(FileNotFoundError, match='neither a complete checkpoint'):
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


COPIES = 24  # of each file


@pytest.mark.full
def test_damage_is_an_error_or_harmless(tmp_path):
    """Some hundreds of damaged files, in a process whose memory and time are bounded."""
    program = [sys.executable, '-m', 'tests.checkpoints.damage', str(tmp_path), str(COPIES)]
    run = subprocess.run(program, cwd=ROOT, timeout=400, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    counts = json.loads(run.stdout.splitlines()[-1])
    assert len(counts) >= len(reference.COMMITTED)
    for name, outcomes in counts.items():
        assert outcomes['refused'] > COPIES / 4, (name, outcomes)
        assert sum(outcomes.values()) == COPIES, (name, outcomes)
