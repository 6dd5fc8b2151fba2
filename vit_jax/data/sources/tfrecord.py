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


def read_tfrecords(
    paths: Sequence[str | os.PathLike[str]],
) -> tuple[np.ndarray, Callable[[int], bytes]]:
    """The checksums of the records of all files, and a function that reads one by its index.

    The checksums of lengths are verified here, that of a record when it is read. UserError names
    file and offset if one is wrong or the file ends early.
    """
    files = [(os.fspath(path), os.open(path, os.O_RDONLY)) for path in paths]  # for `pread`
    found = [_walk(path, descriptor) for path, descriptor in files]
    offsets = [offset for offset, _ in found]
    ends = np.cumsum([len(of_file) for of_file in offsets])

    def read(index: int) -> bytes:
        number = int(np.searchsorted(ends, index, side='right'))
        path, descriptor = files[number]
        return _read(path, descriptor, int(offsets[number][index - ends[number]]))

    return np.concatenate([np.zeros(0, np.int64), *(checksums for _, checksums in found)]), read


def _walk(path: str, descriptor: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each record begins, and its checksum, as it is written."""
    size, offset, offsets, checksums = os.fstat(descriptor).st_size, 0, list[int](), bytearray()
    header = os.pread(descriptor, _HEADER.size, 0)
    while offset < size:
        offsets.append(offset)
        offset += _HEADER.size + _length(path, header, offset) + 4
        after = os.pread(descriptor, 4 + _HEADER.size, offset - 4)
        checksums += after[:4]
        header = after[4:]
    if offset != size:
        raise UserError(f'{path}: the file ends within the record at byte {offsets[-1]}')
    return np.array(offsets, np.int64), np.frombuffer(checksums, '<u4').astype(np.int64)


def _length(path: str, header: bytes, offset: int) -> int:
    """The length of the record at an offset, of which the header was read."""
    if len(header) < _HEADER.size:
        raise UserError(f'{path}: the file ends within the record at byte {offset}')
    length, checksum = _HEADER.unpack(header)
    if checksum != masked_crc(header[:8]):
        raise UserError(f'{path}: the length of the record at byte {offset} is damaged')
    return int(length)


def _read(path: str, descriptor: int, offset: int) -> bytes:
    length = _length(path, os.pread(descriptor, _HEADER.size, offset), offset)
    data = os.pread(descriptor, length + 4, offset + _HEADER.size)
    if len(data) != length + 4 or struct.unpack('<I', data[-4:])[0] != masked_crc(data[:-4]):
        raise UserError(f'{path}: the record at byte {offset} is damaged')
    return data[:-4]


def masked_crc(data: bytes) -> int:
    """The checksum of the TFRecord format: CRC-32C, rotated, with a constant added."""
    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
