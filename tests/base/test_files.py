"""Files and folders that cannot be used are named in a UserError."""

import errno
import os

import numpy as np
import pytest

from vit_jax.base import MissingFile, StorageError, UserError
from vit_jax.base.storage import atomic_write, read_json_lines, usable, write_json
from vit_jax.checkpoints.formats import array_files
from vit_jax.data.sources import arrays, base, tables


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / 'file').write_text('old')
    with pytest.raises(StorageError, match='file/below.json'):
        write_json(tmp_path / 'file' / 'below.json', {})
    with pytest.raises(MissingFile, match='none/below.json: '):
        write_json(tmp_path / 'none' / 'below.json', {})
    with pytest.raises(StorageError, match='/file: '), atomic_write(tmp_path / 'file') as half:
        half.write_text('half')
        raise OSError(errno.ENOSPC, 'No space left on device')
    assert (tmp_path / 'file').read_text() == 'old'
    os.mkfifo(pipe := tmp_path / 'pipe')
    with pytest.raises(UserError, match='pipe'):
        write_json(pipe, {})
    for error in KeyError('x'), StorageError('reported already'):
        with pytest.raises(type(error)) as raised, usable('here'):
            raise error
        assert raised.value is error


def test_a_folder_is_rejected_by_every_reader(tmp_path):
    (path := tmp_path / 'given').mkdir()
    one = arrays.array_source(np.zeros((1, 8, 8), np.uint8), np.zeros(1, int), ['a'], name='one')
    for read in (
        lambda: tables.open_splits(str(path)),
        lambda: base.replace_labels(one, str(path)),
        lambda: array_files.read_array_file(path),
        lambda: read_json_lines(path),
        lambda: write_json(path, {}),
    ):
        with pytest.raises(UserError, match=f'^{path}: '):
            read()
