"""Arrays in files of other systems, found by name and read one at a time; nothing is executed.

What a file declares is checked against what it holds before anything is allocated, and its headers
and the number of its arrays are bounded: only weights that it holds cost memory and time. An npz
member carries a checksum; a safetensors file does not, so the ones that we write carry digests.
"""

import collections
import contextlib
import functools
import hashlib
import io
import json
import math
import pathlib
import re
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.base import MissingFile, UserError, atomic_write, close_by, require_regular
from vit_jax.checkpoints.formats import wrappers
from vit_jax.checkpoints.formats.json_files import check_length, json_object
from vit_jax.checkpoints.formats.pickles import check_pickle, plain_tensors
from vit_jax.checkpoints.published import FILES

# Of names of files of weights.
ENDINGS = '.safetensors', '.npz', '.bin', '.pth', '.pt', '.ckpt', '.tar'
_IMAGES = '.jpg', '.jpeg', '.png', '.webp', '.tif', '.tiff', '.gif', '.bmp'
# Of a directory or repository: JSON files beside weights, transformers' and timm's, OpenCLIP's, and
# files of weights, the first that is there; pickles only where there is nothing else.
DESCRIPTIONS = (
    'config.json',
    'preprocessor_config.json',
    'processor_config.json',
    'open_clip_config.json',
)
WEIGHTS = 'model.safetensors', 'open_clip_model.safetensors', 'pytorch_model.bin'
INDEX = '.index.json'  # after the name of one that is in several files
DIGESTS = 'vit_jax.sha256'  # in a safetensors file's metadata: digests by name
# The largest published ViT has under 1,000 arrays, 22 billion parameters, and 100 kB of names.
_MOST_ARRAYS = 10_000
_LONGEST_NPY_HEADER = 2**14  # bytes; numpy refuses more than 10,000
# The arrays of a file may be this many times larger than the file, or have so many bytes.
_EXPANSION, _SMALL = 4, 2**28


class NotFiniteArray(UserError):
    """A file whose arrays hold NaN or infinity: which one, and how many."""


class LazyArray(NamedTuple):
    """An array in a file, and its type there.

    `read` returns it as float32. It raises UserError, which does not name the file, where the
    array is not finite or of a type that float32 does not hold, and errors of many kinds where
    the file is damaged: it is to be called within `error_prefix`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


class ArrayFile(NamedTuple):
    """The arrays of a file by name, and what else it holds."""

    arrays: dict[str, LazyArray]
    metadata: dict[str, str]  # text in the header of a safetensors file
    ignored: tuple[str, ...] = ()  # names of values that are not arrays
    remarks: tuple[str, ...] = ()  # which of several copies of the weights these are
    wanted: str = ''  # the requested key, if the file does not have it


def read_array_file(path: pathlib.Path, key: str = '') -> ArrayFile:
    """The arrays of an npz, safetensors or PyTorch file, told apart by content, not by name.

    `key` is that of the weights to take of a PyTorch file with several; others keep it as `wanted`.

    Raises UserError, in one sentence that names the file, for anything else.
    """
    require_regular(path)
    with error_prefix(path):
        with path.open('rb') as file:
            start = file.read(16)
        if not start:
            raise UserError('the file is empty')
        if b'git-lfs' in start or start.startswith(b'version https'):
            raise UserError('a git-lfs pointer: the weights themselves were not fetched')
        if start[:4] == b'PK\x03\x04':
            with _BoundedReads(path) as file:
                zipfile.ZipFile(file)
            archive = zipfile.ZipFile(path)
            members = _checked_members(archive, path.stat().st_size)
            pickles = [member for member in members if member.filename.endswith('/data.pkl')]
            if not pickles:
                return _npz(archive)._replace(wanted=key)
            return _torch_zip(path, archive, pickles, key)
        if start[8:9] == b'{':
            check_length(int.from_bytes(start[:8], 'little'))
            return _safetensors(path)._replace(wanted=key)
        if start[:1] == b'\x80':  # a pickle, as PyTorch wrote it before 1.6
            return _torch_legacy(path, key)
        raise UserError(
            f'begins with {start[:8]!r}: neither npz, nor safetensors, nor a PyTorch file'
        )


def read_array_files(paths: Iterable[pathlib.Path], key: str = '') -> ArrayFile:
    """Several files as one. Raises UserError where a name is in two of them."""
    merged = ArrayFile({}, {})
    for path in paths:
        file = read_array_file(path, key)
        with error_prefix(path):
            if twice := merged.arrays.keys() & file.arrays.keys():
                raise UserError(f'{min(twice)} is in another file too')
            merged.arrays.update(file.arrays)
            _check_count(merged.arrays)
        merged.metadata.update(file.metadata)
        ignored, remarks = merged.ignored + file.ignored, merged.remarks + file.remarks
        merged = merged._replace(ignored=ignored, remarks=remarks, wanted=file.wanted)
    return merged


def write_npz(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes an npz file."""
    with atomic_write(path) as partial, partial.open('wb') as file:
        np.savez(file, allow_pickle=False, **arrays)


def write_safetensors(
    path: pathlib.Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes a safetensors file, with the digest of every array."""
    from safetensors.numpy import save_file

    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    digests = {name: _digest(array) for name, array in arrays.items()}
    with atomic_write(path) as partial:
        # `format` tells transformers that these are tensors of a PyTorch model.
        text = {'format': 'pt', DIGESTS: json.dumps(digests)} | dict(metadata)
        save_file(arrays, str(partial), metadata=text)


@contextlib.contextmanager
def error_prefix(path: pathlib.Path | str) -> Iterator[None]:
    """Makes of every error within a UserError of one line that begins with the path.

    Not to be nested: the path would be there twice.
    """
    try:
        yield
    except FileNotFoundError as error:
        what, how = 'file', ''
        if not str(path).lower().endswith((*ENDINGS, *_IMAGES)):  # the name of a model?
            what, how = 'file or folder', _meant(str(path))
        raise MissingFile(f'{path}: no such {what}{close_by(path) or how}') from error
    except IsADirectoryError as error:
        raise UserError(f'{path}: is a directory, expected a file') from error
    except ModuleNotFoundError as error:
        raise UserError(f'{path}: reading it needs the package {error.name}') from error
    except Exception as error:  # zipfile, numpy, safetensors and torch raise many kinds
        lines = str(error).strip().splitlines() or [type(error).__name__]
        kind = type(error) if isinstance(error, UserError) else UserError
        raise kind(f'{path}: {lines[0][:300]}') from error


def _meant(name: str) -> str:
    """The end of an error message: the name of something elsewhere that was meant."""
    bare = name.replace('ViT-', '').replace('_', '/')
    found = [known for known in FILES if known.partition(':')[2] == bare]
    is_name = re.fullmatch(r'[\w-]+/[\w.-]+', name)
    if is_name and not (found or pathlib.Path(name).parent.exists()):
        found = [f'hf:{name}']
    elif re.fullmatch(r'(vit|deit3?|eva|beit)_\w+(\.\w+)?', name):  # as timm calls its own
        found = [f'hf:timm/{name}']
    if found:
        return f'; did you mean {" or ".join(found)}?'
    return '; what is elsewhere begins with hf:, augreg:, vit:, https:// or gs://'


def _checked_names(names: Iterable[str]) -> None:
    """Refuses names that would mean another place if someone unpacked them."""
    for name in names:
        parts = re.split(r'[/\\]', name)
        if '..' in parts or parts[0] == '' or '\0' in name or ':' in parts[0]:
            raise UserError(f'the name {name!r} is absolute, leads upwards or holds a NUL')


def _check_count(names: Collection[str]) -> None:
    """Raises UserError for more arrays than a network has."""
    if len(names) > _MOST_ARRAYS:
        raise UserError(f'holds {len(names):,} arrays, at most {_MOST_ARRAYS:,} are read')


def _check_declared(declared: int, file_size: int) -> None:
    """Raises UserError for arrays of which the file cannot hold the numbers."""
    if declared > max(_SMALL, _EXPANSION * file_size):
        raise UserError(f'declares {declared:,} bytes of arrays in a file of {file_size:,}')


class _BoundedReads(io.FileIO):
    """Refuses long reads: zipfile reads the list of members at once, whatever its length."""

    def read(self, size: int | None = -1, /) -> bytes:
        check_length(size or 0)
        return super().read(size) or b''


def _checked_members(archive: zipfile.ZipFile, file_size: int) -> list[zipfile.ZipInfo]:
    """What is in a zip file, after its declarations were found possible."""
    members = archive.infolist()
    names = [member.orig_filename for member in members]
    _check_count(names)
    _checked_names(names)
    if twice := [name for name, count in collections.Counter(names).items() if count > 1]:
        raise UserError(f'{twice[0]} is in it twice')
    packed = sum(member.compress_size for member in members)
    declared = sum(member.file_size for member in members)
    for member in members:
        name, size, held = member.filename, member.file_size, member.compress_size
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UserError(f'{name}: compressed in an unknown way')
        if member.compress_type == zipfile.ZIP_STORED and size != held:
            raise UserError(f'{name}: declares {size:,} bytes, holds {held:,}')
    if packed > file_size:
        raise UserError(f'declares {packed:,} bytes of members in a file of {file_size:,}')
    _check_declared(declared, file_size)
    return members


def _npz(archive: zipfile.ZipFile) -> ArrayFile:
    def read(member: zipfile.ZipInfo) -> np.ndarray:
        with archive.open(member) as file:  # to its end, where zipfile compares the checksum
            return np.lib.format.read_array(file, allow_pickle=False)

    arrays = {}
    for member in archive.infolist():
        name = member.filename.removesuffix('.npy')
        if name == member.filename:
            raise UserError(f'{name} is no array of numpy')
        with archive.open(member) as file:
            start = io.BytesIO(file.read(_LONGEST_NPY_HEADER))
        shape, dtype = _npy_header(start, member)
        arrays[name] = _float32(name, shape, dtype, functools.partial(read, member))
    return ArrayFile(arrays, {})


def _npy_header(file: Any, member: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type, after they were compared with the size of the member."""
    name, npy = member.filename, np.lib.format
    headers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    version = npy.read_magic(file)
    if version not in headers:
        raise UserError(f'{name}: version {version} of the npy format')
    try:
        shape, _, dtype = headers[version](file)
    except ValueError as error:
        raise UserError(f'{name}: {error}') from error
    if dtype.hasobject or dtype.fields:
        raise UserError(f'{name} holds Python objects, which only pickle could read')
    if any(side < 0 for side in shape):
        raise UserError(f'{name} has the shape {shape}')
    declared = file.tell() + math.prod(shape) * dtype.itemsize
    if declared != member.file_size:
        name = name.removesuffix('.npy')
        raise UserError(f'{name} declares {declared:,} bytes, holds {member.file_size:,}')
    return tuple(map(int, shape)), dtype


def _safetensors(path: pathlib.Path) -> ArrayFile:
    from safetensors import safe_open

    with safe_open(str(path), framework='numpy') as file:
        metadata = dict(file.metadata() or {})
        _check_count(file.keys())
        slices = {name: file.get_slice(name) for name in file.keys()}
        shapes = {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    _checked_names(shapes)
    digests = json_object(metadata.pop(DIGESTS, '{}'))

    # An open handle keeps mapped what was read through it: it is opened anew after 256 MiB, not
    # for each array, as opening reads the header, which may be long.
    opened = functools.partial(safe_open, str(path), framework='numpy')
    handle, left = opened(), _SMALL

    def read(name: str) -> np.ndarray:
        nonlocal handle, left
        if left <= 0:
            handle, left = opened(), _SMALL
        array: np.ndarray = handle.get_tensor(name)
        left -= array.nbytes
        if name in digests and _digest(array) != digests[name]:
            raise UserError(f'{name} is damaged: its digest is not the one that was written')
        return array

    arrays = {
        name: _float32(name, shape, _torch_dtype(name, dtype), functools.partial(read, name))
        for name, (shape, dtype) in shapes.items()
    }
    return ArrayFile(arrays, metadata)


def _torch_zip(
    path: pathlib.Path, archive: zipfile.ZipFile, pickles: Iterable[zipfile.ZipInfo], key: str
) -> ArrayFile:
    for pickle in pickles:
        with archive.open(pickle) as file:
            check_pickle(file)
    if damaged := archive.testzip():  # torch itself does not look at the checksums
        raise UserError(f'{damaged} is damaged: its checksum is not the stored one')
    return _torch(path, key)


def _torch_legacy(path: pathlib.Path, key: str) -> ArrayFile:
    with path.open('rb') as file:
        for _ in range(5):  # magic number, version, platform, tensors, names of their storages
            check_pickle(file)
    return _torch(path, key)


def _torch(path: pathlib.Path, key: str) -> ArrayFile:
    import torch

    with plain_tensors():
        loaded = torch.load(path, map_location='cpu', weights_only=True)
    if not isinstance(loaded, dict):
        raise UserError(f'holds a {type(loaded).__name__}, not tensors by name')
    tensors, ignored, remarks, wanted = wrappers.by_key(loaded, key, torch.Tensor)
    _check_count(tensors)
    _checked_names(tensors)
    # Several tensors may share numbers, and a small one be expanded to any size.
    _check_declared(
        sum(t.numel() * t.element_size() for t in tensors.values()), path.stat().st_size
    )

    def array(tensor: Any) -> np.ndarray:
        if tensor.dtype == torch.bfloat16:  # which numpy() does not know
            return (
                tensor.detach()
                .contiguous()
                .view(torch.int16)
                .numpy()
                .view(_as_bfloat16(np.dtype('V2')))
            )
        return tensor.detach().numpy()

    arrays = {}
    for name, tensor in tensors.items():
        dtype = array(tensor[:0] if tensor.ndim else tensor).dtype
        read = functools.partial(array, tensor)
        arrays[name] = _float32(name, tuple(tensor.shape), dtype, read)
    return ArrayFile(arrays, {}, ignored, remarks, wanted)


def _float32(
    name: str, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[], np.ndarray]
) -> LazyArray:
    """An array that is read as float32, every number of it looked at."""

    def checked() -> np.ndarray:
        array = read()
        array = array.view(_as_bfloat16(array.dtype))
        if array.dtype.name not in ('float32', 'float16', 'bfloat16'):
            raise UserError(f'{name} is {array.dtype}, not float32, float16 or bfloat16')
        values = array.astype(np.float32)
        if wrong := values.size - np.count_nonzero(np.isfinite(values)):
            raise NotFiniteArray(f'{name} holds {wrong} values that are not finite (NaN or Inf)')
        return values

    return LazyArray(shape, _as_bfloat16(dtype), checked)


def _as_bfloat16(dtype: np.dtype) -> np.dtype:
    """bfloat16 for two bytes without a meaning, as which numpy files store it; else the same."""
    import ml_dtypes  # comes with jax

    return np.dtype(ml_dtypes.bfloat16) if dtype == np.dtype('V2') else dtype


def _torch_dtype(name: str, dtype: str) -> np.dtype:
    known = {'F64': 'f8', 'F32': 'f4', 'F16': 'f2', 'BF16': 'V2'}
    known |= {'I64': 'i8', 'I32': 'i4', 'I16': 'i2', 'I8': 'i1', 'U8': 'u1', 'BOOL': '?'}
    if dtype not in known:
        raise UserError(f'{name} is of the type {dtype}, which is not read')
    return np.dtype(known[dtype])


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).view(np.uint8).data).hexdigest()
