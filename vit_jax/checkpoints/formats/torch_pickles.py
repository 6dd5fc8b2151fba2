"""Suggests the command that converts a rejected PyTorch file, without executing code in it."""

import collections
import contextlib
import io
import pathlib
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.base import UserError
from vit_jax.base.files import Limit, open_file

# Keys under which training programs store the arrays of a model, the preferred ones first.
_KEYS = 'state_dict', 'model_state_dict', 'model', 'teacher', 'student', 'net', 'module', 'ema'
_MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of a file of PyTorch before 1.6
_PYTHON = 'if you trust the file, convert it: python -c "import torch; {}"'
_SAVE = "torch.save({}, 'weights.pth')"
_LOAD = "torch.load('FILE', weights_only=False)"


def reject_programs(members: Sequence[str]) -> None:
    """Raises UserError if a zip file with these members is a TorchScript program."""
    if any(name.endswith('/constants.pkl') for name in members):
        command = _SAVE.format("torch.jit.load('FILE').state_dict()")
        raise UserError(
            f'a TorchScript program; expected a file of tensors; {_PYTHON.format(command)}'
        )


def describe_conversion(path: pathlib.Path) -> str:
    """Describes the command that extracts the arrays, by the contents of the file."""
    contents = None
    with contextlib.suppress(Exception):  # of damaged files
        contents = _read_structure(path)
    if isinstance(contents, Mapping):
        for key in _KEYS:
            if _has_tensors(contents.get(key)):
                return _PYTHON.format(_SAVE.format(f'{_LOAD}[{key!r}]'))
            if isinstance(contents.get(key), _Inert):  # a model as an object
                return _PYTHON.format(_SAVE.format(f'{_LOAD}[{key!r}].state_dict()'))
        if _has_tensors(contents):
            tensors = f'{{k: v for k, v in {_LOAD}.items() if torch.is_tensor(v)}}'
            return _PYTHON.format(_SAVE.format(tensors))
    elif isinstance(contents, _Inert):
        return _PYTHON.format(_SAVE.format(f'{_LOAD}.state_dict()'))
    return 'no tensors were found in it; expected npz, safetensors or PyTorch'


class _Inert:
    """Stands for an object of any class; keeps nothing and does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> '_Inert':
        return object.__new__(cls)

    def __setstate__(self, _: Any) -> None: ...

    def __setitem__(self, *_: Any) -> None: ...

    def append(self, _: Any) -> None: ...

    def extend(self, _: Any) -> None: ...


class _Tensor(_Inert):
    """Stands for a tensor."""


class _Unpickler(pickle.Unpickler):
    """Restores dictionaries, lists, texts and numbers, and stand-ins for everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ('collections', 'OrderedDict'):
            return collections.OrderedDict
        return _Tensor if module == 'torch._utils' and name.startswith('_rebuild') else _Inert

    def persistent_load(self, _: Any) -> Any:
        return _Inert()  # the storage of a tensor


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(v, _Tensor) for v in value.values())


def _read_structure(path: pathlib.Path) -> Any:
    """Returns the object in a PyTorch file, with stand-ins for everything that needs code."""
    with open_file(path) as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                name = next(name for name in archive.namelist() if name.endswith('/data.pkl'))
                with archive.open(name) as member:
                    stream = io.BytesIO(member.read(Limit.PICKLE_BYTES))
        else:
            file.seek(0)
            stream = io.BytesIO(file.read(Limit.PICKLE_BYTES))
    first = _Unpickler(stream).load()
    if first != _MAGIC:
        return first
    for _ in range(2):  # the version, and properties of the system
        _Unpickler(stream).load()
    return _Unpickler(stream).load()
