"""Reads npz, safetensors and PyTorch files array by array, and the JSON files next to them.

No code in a file is executed. The checksums of npz and PyTorch files are verified; safetensors
files have none.
"""

import contextlib
import functools
import importlib.util
import io
import json
import os
import pathlib
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NamedTuple, TypeVar

import ml_dtypes  # comes with jax
import numpy as np

from vit_jax.base import (
    MissingFile,
    Record,
    StorageError,
    UserError,
    atomic_write,
    files,
    records,
    require,
)
from vit_jax.base.files import Limit, open_file
from vit_jax.base.npz import open_npz
from vit_jax.checkpoints.formats import torch_pickles

R = TypeVar('R', bound=Record)
# File endings of weights.
ENDINGS = '.safetensors', '.npz', '.bin', '.pth', '.pt', '.ckpt', '.tar'
# The JSON files next to weights in a folder of transformers, timm or OpenCLIP.
DESCRIPTIONS = (
    'config.json',
    'open_clip_config.json',
    'preprocessor_config.json',
    'processor_config.json',
)
# The first of these files that exists, or its shards, contains the weights of such a folder.
WEIGHTS = 'model.safetensors', 'open_clip_model.safetensors', 'pytorch_model.bin'
INDEX = '.index.json'  # suffix of the index of a file of weights that is split into shards
# numpy's names of the types of safetensors.
_TYPES = {
    'F64': 'float64',
    'F32': 'float32',
    'F16': 'float16',
    'BF16': 'bfloat16',
    'BOOL': 'bool',
    **{f'I{bits}': f'int{bits}' for bits in (8, 16, 32, 64)},
    **{f'U{bits}': f'uint{bits}' for bits in (8, 16, 32, 64)},
}


class DamagedFile(UserError):
    """A file that cannot be read, such as one that was downloaded in part."""


class LazyArray(NamedTuple):
    """Shape, stored type and reader of an array in a file.

    `read` returns the array as float32. It raises UserError if the array is not finite or has a
    type that float32 cannot represent, and other errors if the file is damaged; call it within
    `error_prefix`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


class JsonObject(dict[str, Any]):
    """A JSON object, and its location for errors, such as `config.json.model_args`."""

    def __init__(self, values: Any, where: str) -> None:
        require(isinstance(values, dict), f'{where}={values!r}: expected a JSON object')
        super().__init__(values)
        self.where = where

    def part(self, name: str) -> 'JsonObject':
        """Returns the JSON object under a key; an empty one if it is absent or null."""
        values = self.get(name)
        return JsonObject({} if values is None else values, f'{self.where}.{name}')

    def expect(self, values: Mapping[str, Any]) -> None:
        """Raises UserError unless every key in `values` has its value, is null or is absent."""
        for name, only in values.items():
            value = only if self.get(name) is None else self[name]
            require(
                value == only,
                f'{self.where}.{name}={value!r} is not supported; expected {only!r}',
            )

    def record(self, cls: type[R], *, ignored: str, defaults: Mapping[str, Any] = {}) -> R:
        """Parses the object as a record.

        Args:
          cls: The type of the record.
          ignored: Regular expression of keys that need not be fields.
          defaults: Values for absent and null keys; else the defaults of the fields.

        Raises:
          UserError: If a value is invalid, or a key is not a field and not ignored; the message
            names the key.
        """
        stated = {name: value for name, value in self.items() if value is not None}
        for name in sorted({*stated} - {*records.field_types(cls)}):
            require(
                re.fullmatch(ignored, name) is not None,
                f'{self.where}.{name}={stated[name]!r:.80} is not supported; '
                'remove the key if it does not change the model',
            )
        values = {**defaults, **stated}
        fields = {name: values[name] for name in records.field_types(cls) if name in values}
        return records.from_dict(cls, fields, where=self.where)


class FileContents(NamedTuple):
    """The arrays of a checkpoint by name, and everything that describes them."""

    arrays: Mapping[str, LazyArray]
    metadata: Mapping[str, str] = {}  # from the header of a safetensors file
    descriptions: Mapping[str, JsonObject] = {}  # contents of DESCRIPTIONS, by file name
    key: str = ''  # KEY of `FILE:KEY`; empty once `arrays` contains only the arrays under it
    ignored: tuple[str, ...] = ()  # names of arrays that do not belong to the selected model
    remarks: tuple[str, ...] = ()  # lines for the report about the selection

    def description(self, name: str) -> JsonObject:
        """Returns the contents of a JSON file; an empty object if there is no such file."""
        return self.descriptions.get(name, JsonObject({}, name))


def read_array_file(path: pathlib.Path) -> FileContents:
    """Opens an npz, safetensors or PyTorch file; detects the type from the content.

    Raises:
      UserError: If the file has another type or is damaged; the message starts with the path.
    """
    with error_prefix(path):
        with open_file(path) as file:
            start = file.read(16)
        if not start:
            raise DamagedFile('the file is empty')
        if start[:2] == b'PK':
            with open_file(path) as file:
                if not zipfile.is_zipfile(file):
                    raise DamagedFile('the end of the file is missing')
                archive = zipfile.ZipFile(file)  # closed with the file
                is_torch = any(name.endswith('/data.pkl') for name in archive.namelist())
                torch_pickles.reject_programs(archive.namelist())
                damaged = archive.testzip() if is_torch else None  # torch compares no checksums
            if damaged is not None:
                raise DamagedFile(f'{damaged}: damaged (wrong checksum); download it again')
            if is_torch:
                return FileContents(_torch(path))
            return FileContents({n: _lazy(n, *array) for n, array in open_npz(path).items()})
        if start[8:9] == b'{':
            size = int.from_bytes(start[:8], 'little')
            require(
                size <= Limit.HEADER_BYTES,
                f'a header of {size:,} bytes; expected at most {Limit.HEADER_BYTES:,}',
            )
            return _safetensors(path)
        if start[:1] == b'\x80':  # a pickle, the file format of PyTorch before 1.6
            return FileContents(_torch(path))
        lfs = '; run `git lfs pull`' if start.startswith(b'version ') else ''
        raise DamagedFile(f'starts with {start[:8]!r}; expected npz, safetensors or PyTorch{lfs}')


def read_json_object(path: pathlib.Path) -> JsonObject:
    """Reads a JSON object. Raises UserError with a message that starts with the path."""
    with error_prefix(path):
        return JsonObject(files.read_json(path), path.name)


def read_descriptions(folder: pathlib.Path) -> dict[str, JsonObject]:
    """Reads the files of DESCRIPTIONS that a folder contains, by name."""
    # A broken link is an error: a cache that was copied without its blobs contains such links.
    names = [name for name in DESCRIPTIONS if os.path.lexists(folder / name)]
    return {name: read_json_object(folder / name) for name in names}


def write_npz(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes an npz file."""
    with atomic_write(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def write_safetensors(
    file: IO[bytes] | io.BufferedIOBase,
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
) -> None:
    """Writes the contents of a safetensors file, array by array.

    The library would need the memory of the whole model once more, or replace the file itself.
    """
    types = {name: code for code, name in _TYPES.items()}
    # `format` tells transformers that these are tensors of a PyTorch model.
    header: dict[str, Any] = {'__metadata__': {'format': 'pt', **metadata}}
    # Larger types come first, so that all arrays are aligned.
    ordered = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    end = 0
    for name in ordered:
        array = arrays[name]
        start = end
        end += array.nbytes
        header[name] = {
            'dtype': types[array.dtype.name],
            'shape': [*array.shape],
            'data_offsets': [start, end],
        }
    header_bytes = json.dumps(header, separators=(',', ':')).encode()
    header_bytes += b' ' * (-len(header_bytes) % 8)
    file.write(len(header_bytes).to_bytes(8, 'little') + header_bytes)
    for name in ordered:
        file.write(np.ascontiguousarray(arrays[name]).tobytes())
    file.flush()


@contextlib.contextmanager
def error_prefix(path: pathlib.Path | str) -> Iterator[None]:
    """Converts every error into a UserError with one line that starts with the path.

    Must not be nested, or the message has the path twice.
    """
    try:
        yield
    except FileNotFoundError as error:
        remote = 'remote names start with hf:, augreg:, vit:, https:// or gs://'
        raise MissingFile(f'{path}: no such file or folder; {remote}') from error
    except UserError as error:
        raise type(error)(f'{path}: {str(error).splitlines()[0]}') from error
    except OSError as error:
        raise StorageError(f'{path}: {error.strerror or error}') from error
    except Exception as error:  # zipfile, numpy, safetensors and torch raise many types
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise DamagedFile(f'{path}: {lines[0][:300]}') from error


def _safetensors(path: pathlib.Path) -> FileContents:
    from safetensors import safe_open

    file = safe_open(str(path), framework='numpy')
    arrays = {}
    for name in file.keys():
        stored = file.get_slice(name)
        dtype = np.dtype(_TYPES.get(stored.get_dtype(), 'void'))
        read = functools.partial(file.get_tensor, name)
        arrays[name] = _lazy(name, tuple(stored.get_shape()), dtype, read)
    return FileContents(arrays, file.metadata() or {})


def _torch(path: pathlib.Path) -> dict[str, LazyArray]:
    require(
        importlib.util.find_spec('torch') is not None,
        "a PyTorch file needs torch: pip install 'vit_jax[torch]', "
        'or save the weights as safetensors',
    )
    import torch

    try:
        loaded = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as error:  # torch raises many types
        class_in_file = re.search(r'GLOBAL ([\w.]+)', str(error))
        reason = class_in_file[1] if class_in_file else type(error).__name__
        raise UserError(
            f'not loaded ({reason}): only tensors are unpickled; '
            f'{torch_pickles.describe_conversion(path)}'
        ) from error
    arrays = {}
    for name, tensor in _flatten(loaded, torch.Tensor):
        dtype = np.dtype(str(tensor.dtype).removeprefix('torch.'))
        read = functools.partial(lambda tensor: tensor.detach().float().numpy(), tensor)
        arrays[name] = _lazy(name, tuple(tensor.shape), dtype, read)
    return arrays


def _flatten(value: Any, leaf: type, *keys: str) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested dictionaries by their keys, joined with dots."""
    if isinstance(value, leaf):
        yield '.'.join(keys), value
    elif isinstance(value, Mapping):
        for key, nested in value.items():
            yield from _flatten(nested, leaf, *keys, str(key))


def _lazy(
    name: str, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[], np.ndarray]
) -> LazyArray:
    """Wraps `read` so that it returns finite float32 values or raises UserError."""
    if dtype == 'V2':  # numpy stores bfloat16 as two bytes of void type
        dtype = np.dtype(ml_dtypes.bfloat16)

    def checked() -> np.ndarray:
        types = 'float32', 'float16', 'bfloat16'
        require(dtype.name in types, f'{name}: got {dtype.name}; expected {", ".join(types)}')
        array = read()
        array = array.view(dtype) if array.dtype.kind == 'V' else array
        values = array.astype(np.float32)
        require(bool(np.isfinite(values).all()), f'{name}: got NaN or Inf; expected finite values')
        return values

    return LazyArray(shape, dtype, checked)
