"""TFRecord files at random access, without TensorFlow.

A record is its length (8 bytes), a checksum of the length, its bytes, and a checksum of these; both
are masked CRC-32C. Offsets are found by walking from length to length.
"""

import os
import struct
from collections.abc import Callable, Sequence

import google_crc32c
import numpy as np

from vit_jax.base.errors import UserError

_HEADER = struct.Struct('<QI')  # length, checksum of the length


def read_tfrecords(paths: Sequence[str | os.PathLike[str]]) -> tuple[int, Callable[[int], bytes]]:
    """The number of records in all files, and a function that reads one by its index.

    The checksums of lengths are verified here, that of a record when it is read. UserError names
    file and offset if one is wrong or the file ends early.
    """
    files = [(str(path), os.open(path, os.O_RDONLY)) for path in paths]  # pread has no position
    offsets = [_offsets(path, descriptor) for path, descriptor in files]
    ends = np.cumsum([len(of_file) for of_file in offsets])

    def read(index: int) -> bytes:
        number = int(np.searchsorted(ends, index, side='right'))
        return _read(*files[number], int(offsets[number][index - ends[number]]))

    return int(ends[-1]) if files else 0, read


def _offsets(path: str, descriptor: int) -> np.ndarray:
    size, offset, found = os.fstat(descriptor).st_size, 0, []
    while offset < size:
        found.append(offset)
        offset += _HEADER.size + _length(path, descriptor, offset) + 4
    if offset != size:
        raise UserError(f'{path}: the file ends within the record at byte {found[-1]}')
    return np.array(found, np.int64)


def _length(path: str, descriptor: int, offset: int) -> int:
    header = os.pread(descriptor, _HEADER.size, offset)
    if len(header) < _HEADER.size:
        raise UserError(f'{path}: the file ends within the record at byte {offset}')
    length, checksum = _HEADER.unpack(header)
    if checksum != masked_crc(header[:8]):
        raise UserError(f'{path}: the length of the record at byte {offset} is damaged')
    return int(length)


def _read(path: str, descriptor: int, offset: int) -> bytes:
    length = _length(path, descriptor, offset)
    data = os.pread(descriptor, length + 4, offset + _HEADER.size)
    if len(data) != length + 4 or struct.unpack('<I', data[-4:])[0] != masked_crc(data[:-4]):
        raise UserError(f'{path}: the record at byte {offset} is damaged')
    return data[:-4]


def masked_crc(data: bytes) -> int:
    """The checksum of the TFRecord format: CRC-32C, rotated, with a constant added."""
    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
