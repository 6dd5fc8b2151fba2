"""What a disk refuses is the user's to mend, and is named."""

import errno

import pytest

from vit_jax.base.atomic_files import atomic_write, write_json
from vit_jax.base.errors import MissingFile, UnusableDisk, usable


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / 'file').write_text('old')
    with pytest.raises(UnusableDisk, match='file: Not a directory'):
        write_json(tmp_path / 'file' / 'below.json', {})
    with pytest.raises(MissingFile, match='none: No such file'):
        write_json(tmp_path / 'none' / 'below.json', {})
    with pytest.raises(UnusableDisk, match='file: No space left'), atomic_write(tmp_path / 'file'):
        raise OSError(errno.ENOSPC, 'No space left on device')
    assert (tmp_path / 'file').read_text() == 'old'
    (tmp_path / 'folder').mkdir()
    with pytest.raises(UnusableDisk, match='folder: Is a directory'):
        write_json(tmp_path / 'folder', {})
    assert not (tmp_path / 'folder.partial').exists()


def test_other_errors_pass_as_they_are():
    for error in KeyError('x'), UnusableDisk('said already'):
        with pytest.raises(type(error)) as raised, usable('here'):
            raise error
        assert raised.value is error
