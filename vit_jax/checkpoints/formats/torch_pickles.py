"""Finds out how a PyTorch file that is not loaded can be converted, without unpickling it."""

import pathlib
import pickletools
import zipfile
from collections.abc import Iterator, Sequence

from vit_jax.base import UserError
from vit_jax.base.files import Limit, open_file

# Keys under which training programs store the arrays of a model, the preferred ones first.
_KEYS = (
    'state_dict',
    'model_state_dict',
    'model',
    'teacher',
    'student',
    'net',
    'module',
    'model_ema',
)
_PYTHON = 'if you trust the file, convert it: python -c "import torch; {}"'
_SAVE = "torch.save({}, 'weights.pth')"


def reject_programs(members: Sequence[str]) -> None:
    """Raises UserError if a zip file with these members is a TorchScript program."""
    if any(name.endswith('/constants.pkl') for name in members):
        command = _SAVE.format("torch.jit.load('FILE').state_dict()")
        text = 'a TorchScript program; expected a file of tensors'
        raise UserError(f'{text}; {_PYTHON.format(command)}')


def describe_conversion(path: pathlib.Path) -> str:
    """Describes the command that extracts the arrays, by the key that the file contains."""
    loaded = "torch.load('FILE', weights_only=False)"
    keys, has_tensors = _read_keys(path)
    if not has_tensors:
        return 'the file contains no tensors; expected npz, safetensors or PyTorch'
    key = next((key for key in _KEYS if key in keys), None)
    tensors = f'{{k: v for k, v in {loaded}.items() if torch.is_tensor(v)}}'
    return _PYTHON.format(_SAVE.format(tensors if key is None else f'{loaded}[{key!r}]'))


def _read_keys(path: pathlib.Path) -> tuple[set[str], bool]:
    """Returns the texts that are followed by a dictionary, and whether there are tensors."""
    keys, text, has_tensors = set[str](), '', False
    for name, argument in _read_operations(path):
        if name in ('PUT', 'BINPUT', 'LONG_BINPUT', 'MEMOIZE', 'MARK'):
            continue
        is_ordered = name == 'GLOBAL' and argument == 'collections OrderedDict'
        if name in ('EMPTY_DICT', 'DICT') or is_ordered:
            keys.add(text)
        has_tensors = has_tensors or name in ('BINPERSID', 'PERSID')
        text = str(argument) if 'UNICODE' in name else ''
    return keys, has_tensors


def _read_operations(path: pathlib.Path) -> Iterator[tuple[str, object]]:
    """Yields the operations of all pickles in a file, up to the first damage."""
    with open_file(path) as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                name = next(name for name in archive.namelist() if name.endswith('/data.pkl'))
                with archive.open(name) as member:
                    contents = member.read(Limit.PICKLE_BYTES)
        else:  # before PyTorch 1.6: several pickles, and then the tensors
            file.seek(0)
            contents = file.read(Limit.PICKLE_BYTES)
    start = 0
    while start < len(contents):
        try:
            for operation, argument, position in pickletools.genops(contents[start:]):
                yield operation.name, argument
                end = position or 0
        except ValueError:
            return
        start += end + 1
