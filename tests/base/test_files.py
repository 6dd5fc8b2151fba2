"""What a disk refuses is the user's to mend, and is named."""

import contextlib
import errno
import os
import socket

import numpy as np
import pytest

from tests import networks, tiny
from vit_jax.base import MissingFile, UnusableDisk, UserError
from vit_jax.base.storage import atomic_write, read_json_lines, usable, write_json
from vit_jax.checkpoints.formats import array_files
from vit_jax.data.sources import arrays, base, tables


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / 'file').write_text('old')
    with pytest.raises(UnusableDisk, match='file/below.json: Not a directory'):
        write_json(tmp_path / 'file' / 'below.json', {})
    with pytest.raises(MissingFile, match='none/below.json: No such file'):
        write_json(tmp_path / 'none' / 'below.json', {})
    with pytest.raises(UnusableDisk, match='file: No space left'), atomic_write(tmp_path / 'file'):
        raise OSError(errno.ENOSPC, 'No space left on device')
    assert (tmp_path / 'file').read_text() == 'old'
    (tmp_path / 'folder').mkdir()
    with pytest.raises(UserError, match='folder: a folder'):
        write_json(tmp_path / 'folder', {})
    assert not (tmp_path / 'folder.partial').exists()


def test_other_errors_pass_as_they_are():
    for error in KeyError('x'), UnusableDisk('said already'):
        with pytest.raises(type(error)) as raised, usable('here'):
            raise error
        assert raised.value is error


@pytest.mark.parametrize('kind', ['folder', 'device', 'pipe', 'socket'])
@pytest.mark.parametrize('reader', ['photo', 'table', 'labels', 'checkpoint', 'lines'])
def test_what_is_no_file_is_named_by_whatever_reads_it(tmp_path, reader, kind):
    """Reading a pipe would wait for ever, and /dev/zero fill the memory."""
    path = tmp_path / 'given'
    one = arrays.array_source(np.zeros((1, 8, 8), np.uint8), np.zeros(1, int), ['a'], name='one')
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listening:
        if kind == 'socket':
            listening.bind(str(path))
        elif kind == 'pipe':
            os.mkfifo(path)
        elif kind == 'device':
            path.symlink_to('/dev/zero')
        else:
            path.mkdir()
        read = {
            'photo': lambda: networks.loaded(tiny.model()).prepare(str(path)),
            'table': lambda: tables.table_splits(str(path)),
            'labels': lambda: base.relabelled(one, str(path)),
            'checkpoint': lambda: array_files.read_array_file(path),
            'lines': lambda: read_json_lines(path),
        }
        with pytest.raises(UserError, match=f'^{path}: '):
            read[reader]()
