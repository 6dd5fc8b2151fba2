"""Files that other systems write: arrays, found by name and read one at a time, and JSON objects.

Nothing in a file is executed. An npz member and a PyTorch file carry checksums, which are compared;
a safetensors file does not.
"""

import contextlib
import functools
import io
import json
import os
import pathlib
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import ml_dtypes  # comes with jax
import numpy as np

from vit_jax.base import MissingFile, Record, UserError, atomic_write, records, require

R = TypeVar('R', bound=Record)
# Endings of files of weights.
ENDINGS = '.safetensors', '.npz', '.bin', '.pth', '.pt', '.ckpt', '.tar'
# The JSON files next to weights in a folder of transformers, timm or OpenCLIP.
DESCRIPTIONS: tuple[str, ...] = 'config.json', 'open_clip_config.json'
DESCRIPTIONS += 'preprocessor_config.json', 'processor_config.json'
# The weights of such a folder are in the first of these files that exists, or in its shards.
WEIGHTS = 'model.safetensors', 'open_clip_model.safetensors', 'pytorch_model.bin'
INDEX = '.index.json'  # added to the name of a file of weights that is split into shards
_TYPES = {'F64': 'float64', 'F32': 'float32', 'F16': 'float16', 'BF16': 'bfloat16'}


class LazyArray(NamedTuple):
    """An array in a file, with its type there.

    `read` returns it as float32. It raises UserError if the array is not finite or of a type that
    float32 does not hold, and other errors if the file is damaged: call it within `error_prefix`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


class JsonObject(dict[str, Any]):
    """A JSON object and its place, such as `config.json.model_args`, which errors name."""

    def __init__(self, values: Any, where: str) -> None:
        require(isinstance(values, dict), f'{where}={values!r}: expected a JSON object')
        super().__init__(values)
        self.where = where

    def part(self, name: str) -> 'JsonObject':
        """Returns the JSON object under a name; an empty one if it is absent or null."""
        values = self.get(name)
        return JsonObject({} if values is None else values, f'{self.where}.{name}')

    def expect(self, values: Mapping[str, Any]) -> None:
        """Raises UserError unless each of these keys has this value, is null, or is absent."""
        for name, only in values.items():
            value = only if self.get(name) is None else self[name]
            wrong = f'{self.where}.{name}={value!r} is not supported: expected {only!r}'
            require(value == only, wrong)

    def record(self, cls: type[R], *, ignored: str, defaults: Mapping[str, Any] = {}) -> R:
        """Returns the record of the fields that `cls` has.

        A key that is absent or null has the value in `defaults`, or the default of the field.

        Raises:
          UserError: That names the key: a value that the record rejects, or a key that is neither a
            field nor matches the regular expression `ignored`.
        """
        stated = {name: value for name, value in self.items() if value is not None}
        for name in sorted({*stated} - {*records.field_types(cls)}):
            unknown = f'{self.where}.{name}={stated[name]!r:.80} is not supported'
            known = re.fullmatch(ignored, name) is not None
            require(known, f'{unknown}; remove it if it does not change the outputs of the model')
        values = {**defaults, **stated}
        fields = {name: values[name] for name in records.field_types(cls) if name in values}
        return records.from_dict(cls, fields, where=self.where)


class FileContents(NamedTuple):
    """The arrays of a checkpoint by name, and everything that describes them."""

    arrays: Mapping[str, LazyArray]
    metadata: Mapping[str, str] = {}  # text in the header of a safetensors file
    descriptions: Mapping[str, JsonObject] = {}  # DESCRIPTIONS next to the arrays
    key: str = ''  # the part of the arrays that `FILE:KEY` names, unless it is taken out already
    ignored: tuple[str, ...] = ()  # names of arrays that were left out
    remarks: tuple[str, ...] = ()  # why others were left out

    def description(self, name: str) -> JsonObject:
        """Returns the JSON object of this file; an empty one if there is no such file."""
        return self.descriptions.get(name, JsonObject({}, name))


def read_array_file(path: pathlib.Path) -> FileContents:
    """Opens an npz, safetensors or PyTorch file, told apart by content, not by name.

    Raises UserError, in one sentence that begins with the path, for any other file.
    """
    with error_prefix(path):
        with path.open('rb') as file:
            start = file.read(16)
        if start[:2] == b'PK':
            with zipfile.ZipFile(path) as archive:
                is_torch = any(name.endswith('/data.pkl') for name in archive.namelist())
                damaged = archive.testzip() if is_torch else None  # torch compares no checksums
            require(damaged is None, f'{damaged} is damaged: its checksum is not the stored one')
            return FileContents(_torch(path) if is_torch else _npz(path))
        if start[8:9] == b'{':
            return _safetensors(path)
        if start[:1] == b'\x80':  # a pickle, as PyTorch wrote it before 1.6
            return FileContents(_torch(path))
        lfs = '; run `git lfs pull`' if start.startswith(b'version ') else ''
        raise UserError(f'begins with {start[:8]!r}; expected npz, safetensors or PyTorch{lfs}')


def read_json(path: pathlib.Path) -> JsonObject:
    """Reads a JSON file. Raises UserError that begins with the path."""
    with error_prefix(path):
        return JsonObject(json.loads(path.read_text()), path.name)


def read_descriptions(folder: pathlib.Path) -> dict[str, JsonObject]:
    """Reads the descriptions in a folder, by name."""
    # A link to nowhere is an error: a cache that was copied without its files has such links.
    there = [name for name in DESCRIPTIONS if os.path.lexists(folder / name)]
    return {name: read_json(folder / name) for name in there}


def write_npz(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes an npz file."""
    with atomic_write(path) as partial, partial.open('wb') as file:
        np.savez(file, allow_pickle=False, **arrays)


def write_safetensors(
    path: pathlib.Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes a safetensors file."""
    from safetensors.numpy import save_file

    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    with atomic_write(path) as partial:
        # `format` tells transformers that these are tensors of a PyTorch model.
        save_file(arrays, str(partial), metadata={'format': 'pt', **metadata})


@contextlib.contextmanager
def error_prefix(path: pathlib.Path | str) -> Iterator[None]:
    """Turns every error into a UserError of one line that begins with the path.

    Not to be nested: the path would be there twice.
    """
    try:
        yield
    except FileNotFoundError as error:
        remote = 'a remote name begins with hf:, augreg:, vit:, https:// or gs://'
        raise MissingFile(f'{path}: no such file or folder; {remote}') from error
    except Exception as error:  # zipfile, numpy, safetensors and torch raise many kinds
        lines = str(error).strip().splitlines() or [type(error).__name__]
        kind = type(error) if isinstance(error, UserError) else UserError
        raise kind(f'{path}: {lines[0][:300]}') from error


def _npz(path: pathlib.Path) -> dict[str, LazyArray]:
    archive = zipfile.ZipFile(path)

    def read(member: str) -> np.ndarray:  # all of it, so that zipfile compares the checksum
        array: np.ndarray = np.load(io.BytesIO(archive.read(member)), allow_pickle=False)
        return array

    arrays = {}
    for member in archive.namelist():
        name = member.removesuffix('.npy')
        with archive.open(member) as file:
            np.lib.format.read_magic(file)  # version 1.0, unless an array has named fields
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        arrays[name] = _lazy(name, shape, dtype, functools.partial(read, member))
    return arrays


def _safetensors(path: pathlib.Path) -> FileContents:
    from safetensors import safe_open

    file = safe_open(str(path), framework='numpy')
    arrays = {}
    for name in file.keys():
        part = file.get_slice(name)
        dtype = np.dtype(_TYPES.get(part.get_dtype(), 'void'))
        read = functools.partial(file.get_tensor, name)
        arrays[name] = _lazy(name, tuple(part.get_shape()), dtype, read)
    return FileContents(arrays, file.metadata() or {})


def _torch(path: pathlib.Path) -> dict[str, LazyArray]:
    import torch

    try:
        loaded = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as error:  # of many kinds
        held = re.search(r'GLOBAL ([\w.]+)', str(error))
        saved = "torch.save(torch.load('FILE', weights_only=False)['state_dict'], 'weights.pth')"
        raise UserError(
            f'{held[1] if held else type(error).__name__}: only tensors are unpickled; '
            f'if you trust the file: python -c "import torch; {saved}"'
        ) from error
    arrays = {}
    for name, tensor in _flatten(loaded, torch.Tensor):
        dtype = np.dtype(str(tensor.dtype).removeprefix('torch.'))
        read = functools.partial(lambda tensor: tensor.detach().float().numpy(), tensor)
        arrays[name] = _lazy(name, tuple(tensor.shape), dtype, read)
    return arrays


def _flatten(value: Any, leaf: type, *keys: str) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested dictionaries, each with its keys, joined with dots."""
    if isinstance(value, leaf):
        yield '.'.join(keys), value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flatten(part, leaf, *keys, str(key))


def _lazy(
    name: str, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[], np.ndarray]
) -> LazyArray:
    """Returns the array that is read as float32 and checked to be finite."""
    if dtype == 'V2':  # numpy files store bfloat16 as two bytes without a meaning
        dtype = np.dtype(ml_dtypes.bfloat16)

    def checked() -> np.ndarray:
        known = 'float32', 'float16', 'bfloat16'
        require(dtype.name in known, f'{name}: got {dtype.name}; expected {", ".join(known)}')
        array = read()
        array = array.view(dtype) if array.dtype.kind == 'V' else array
        values = array.astype(np.float32)
        require(bool(np.isfinite(values).all()), f'{name}: got NaN or Inf; expected finite values')
        return values

    return LazyArray(shape, dtype, checked)
