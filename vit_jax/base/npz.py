"""Reads npz files array by array, without executing code and without trusting declared sizes."""

import functools
import io
import math
import os
import zipfile
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vit_jax.base.files import open_file

_MAX_DEFLATE_RATIO = 1100  # 1032 is possible


class StoredArray(NamedTuple):
    """An array in a file: shape, type, and a function that reads it and checks its checksum."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


def open_npz(path: str | os.PathLike[str] | io.BufferedIOBase) -> dict[str, StoredArray]:
    """Reads the shapes and types of the arrays in an npz file, by name.

    Args:
      path: The path of the file, or an open file.

    Raises:
      OSError: If the file cannot be opened.
      ValueError: If an array contains Python objects, or has another size than its header says.
      zipfile.BadZipFile and others: If the file is damaged or of another kind.
    """
    file = open_file(path) if isinstance(path, str | os.PathLike) else path
    archive = zipfile.ZipFile(file)
    in_file = file.seek(0, os.SEEK_END)
    arrays: dict[str, StoredArray] = {}
    for member in archive.infolist():
        name = member.filename.removesuffix('.npy')
        is_plain = member.compress_type == zipfile.ZIP_STORED
        most = min(member.compress_size, in_file) * (1 if is_plain else _MAX_DEFLATE_RATIO)
        _require(
            member.file_size <= most,
            f'{name}: declares {member.file_size:,} bytes; the file contains at most {most:,}',
        )
        with archive.open(member) as opened:
            version = np.lib.format.read_magic(opened)
            # numpy writes 1.0, except for arrays with many named fields.
            _require(version == (1, 0), f'{name}: version {version} of npy; expected (1, 0)')
            shape, _, dtype = np.lib.format.read_array_header_1_0(opened)
            size = opened.tell() + math.prod(shape) * dtype.itemsize
        _require(not dtype.hasobject, f'{name}: contains Python objects; expected numbers or text')
        _require(
            member.file_size == size,
            f'{name}: has {member.file_size:,} bytes; expected {size:,} (from its header)',
        )
        arrays[name] = StoredArray(shape, dtype, functools.partial(_read, archive, member))
    return arrays


def decode_names(names: np.ndarray) -> list[str]:
    """Converts an array of texts, of bytes in UTF-8 or of integers to a list of names."""
    texts = [n.decode() if isinstance(n, bytes) else str(n) for n in np.atleast_1d(names).tolist()]
    return [text.strip() for text in texts]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    contents = archive.read(member)  # the whole member, so that zipfile compares the checksum
    array: np.ndarray = np.load(io.BytesIO(contents), allow_pickle=False)
    return array
