"""Files are written whole or not at all; inputs that block or never end are rejected at once."""

import io
import os
import pathlib
import signal
import subprocess
import sys
import threading
import zipfile

import numpy as np
import pytest

from tests import tiny
from vit_jax.base import MissingFile, StorageError, UserError, files, write_bytes, write_json
from vit_jax.base.files import Limit, atomic_write, read_json_lines
from vit_jax.base.npz import open_npz
from vit_jax.base.storage import usable
from vit_jax.checkpoints import digests, transfer
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats import array_files
from vit_jax.config import read_config
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.data.sources import arrays, base, imagenet, tables, tfds
from vit_jax.experiment import data_manifest


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / 'file').write_text('old')
    with pytest.raises(StorageError, match=f'^{tmp_path}/file/below.json: '):
        write_json(tmp_path / 'file' / 'below.json', {})
    with pytest.raises(MissingFile, match=f'^{tmp_path}/none/below.json: '):
        write_json(tmp_path / 'none' / 'below.json', {})
    with pytest.raises(StorageError, match=f'^{tmp_path}: '):
        write_json(tmp_path, {})
    (tmp_path / 'loop').symlink_to('loop')
    with pytest.raises(StorageError, match=f'^{tmp_path}/loop: '):
        write_json(tmp_path / 'loop', {})
    with pytest.raises(StorageError, match='^/dev/full: No space left'):
        write_json(pathlib.Path('/dev/full'), {})
    for error in KeyError('x'), StorageError('reported already'):
        with pytest.raises(type(error)) as raised, usable('here'):
            raise error
        assert raised.value is error


@pytest.mark.parametrize('error', [KeyError, KeyboardInterrupt, OSError])
def test_a_file_that_is_not_written_whole_keeps_its_contents(tmp_path, error):
    (path := tmp_path / 'file').write_text('old')
    with pytest.raises(error), atomic_write(path) as file:
        file.write(b'half')
        raise error
    assert path.read_text() == 'old' and list(tmp_path.iterdir()) == [path]


def test_the_file_that_a_link_names_is_replaced(tmp_path):
    (folder := tmp_path / 'data').mkdir()
    (tmp_path / 'link').symlink_to('data/file')
    (tmp_path / 'outer').symlink_to('link')
    for contents in b'new', b'replaced':  # the link is dangling at first
        write_bytes(tmp_path / 'outer', contents)
        assert (folder / 'file').read_bytes() == contents
        assert (tmp_path / 'outer').is_symlink() and (tmp_path / 'link').is_symlink()
    (folder / 'file').chmod(0o444)  # replaced, not opened
    write_bytes(folder / 'file', b'again')
    assert (tmp_path / 'outer').read_bytes() == b'again'


def test_pipes_and_devices_are_written_directly(tmp_path):
    os.mkfifo(pipe := tmp_path / 'pipe')
    (tmp_path / 'link').symlink_to('pipe')
    received = list[bytes]()
    for path in pipe, tmp_path / 'link':
        reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
        reader.start()
        write_bytes(path, b'contents')
        reader.join(10)
    assert received == [b'contents'] * 2 and pipe.is_fifo()
    write_bytes(pathlib.Path('/dev/null'), b'contents')
    assert not files.would_replace('/dev/null') and not files.would_replace(pipe)


@pytest.mark.gate
@pytest.mark.parametrize('name', ['/dev/stdout', '/dev/fd/1', '/proc/self/fd/1', 'link'])
def test_standard_output_in_a_file_is_continued(tmp_path, name):
    code = f"""
import os, pathlib
from vit_jax.base import write_bytes
print('before')
write_bytes(pathlib.Path({name!r}), b'contents\\n')
print('after', flush=True)
"""
    (tmp_path / 'link').symlink_to('/proc/self/fd/1')
    with (tmp_path / 'out').open('w') as out:
        subprocess.run([sys.executable, '-c', code], cwd=tmp_path, stdout=out, check=True)
    assert (tmp_path / 'out').read_text() == 'before\ncontents\nafter\n'
    assert sorted(os.listdir(tmp_path)) == ['link', 'out'] and (tmp_path / 'link').is_symlink()


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    path = tmp_path / 'file'
    with atomic_write(path) as first:
        first.write(b'first')
        with atomic_write(path) as second:
            second.write(b'second')
        assert path.read_bytes() == b'second'
        first.write(b' again')
    assert path.read_bytes() == b'first again' and list(tmp_path.iterdir()) == [path]


@pytest.mark.gate
def test_what_a_killed_writer_left_is_removed_by_the_next_one(tmp_path):
    path, other = tmp_path / 'file', tmp_path / 'file.csv'
    code = """
import pathlib, sys
from vit_jax.base.files import atomic_write
with atomic_write(pathlib.Path(sys.argv[1])) as file:
    file.write(b'half')
    print('open', flush=True)
    sys.stdin.read()
"""
    for target in path, other:
        command = [sys.executable, '-c', code, str(target)]
        writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b'open\n'
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    assert len(list(tmp_path.glob('*.vit_jax-partial'))) == 2
    (victim := tmp_path / 'victim').write_text('precious')
    (tmp_path / 'file.01234567.vit_jax-partial').symlink_to('victim')
    os.mkfifo(tmp_path / 'file.89abcdef.vit_jax-partial')
    write_bytes(path, b'whole')
    assert path.read_bytes() == b'whole' and not path.is_symlink()
    assert victim.read_text() == 'precious'
    assert len(list(tmp_path.glob('file.csv.*-partial'))) == 1  # of the other file


def test_what_is_written_can_be_read_by_those_who_can_read_other_files(tmp_path):
    write_bytes(path := tmp_path / 'file', b'contents')
    (other := tmp_path / 'other').touch()
    assert path.stat().st_mode == other.stat().st_mode


def test_a_name_of_the_largest_length_is_written(tmp_path):
    write_bytes(path := tmp_path / ('n' * 255), b'contents')
    assert path.read_bytes() == b'contents'


ONE = arrays.array_source(np.zeros((1, 8, 8), np.uint8), np.zeros(1, int), ['a'], name='one')
HEADLESS = Card(model=tiny.model(num_classes=None), grid=(2, 2), preprocessing=Preprocessing())
READERS = {
    'table.csv': tables.open_splits,
    'table.jsonl': tables.open_splits,
    'labels.json': lambda path: base.replace_labels(ONE, path),
    'arrays.npz': arrays._npz_splits,
    'weights.npz': lambda path: array_files.read_array_file(pathlib.Path(path)),
    'config.json': lambda path: array_files.read_json_object(pathlib.Path(path)),
    'head.npz': lambda path: transfer.with_class_vectors(HEADLESS, {}, path),
    'metrics.jsonl': lambda path: read_json_lines(pathlib.Path(path)),
    'manifest.json.gz': lambda path: data_manifest.read_manifest(pathlib.Path(path)),
    'photo.png': base.read_image_file,
    'names.txt': files.read_text,
    'run.json': lambda path: read_config(pathlib.Path(path)),
    'digest': lambda path: digests.crc32c(pathlib.Path(path)),
    'train.tar': lambda path: imagenet._open_train_tar(pathlib.Path(path)),
    'data.tfrecord': lambda path: tfds.read_tfrecords([path]),
}


@pytest.mark.parametrize('name', READERS)
def test_every_reader_rejects_what_is_no_file_at_once(tmp_path, name):
    path = tmp_path / name
    kinds = {
        'pipe': os.mkfifo,
        'zeros': lambda path: path.symlink_to('/dev/zero'),
        'noise': lambda path: path.symlink_to('/dev/urandom'),
        'terminal': lambda path: path.symlink_to('/dev/tty'),
        'folder': lambda path: path.mkdir(),
    }
    for kind, make in kinds.items():
        make(path)
        with pytest.raises((UserError, OSError)) as raised, usable(path):
            READERS[name](str(path))
        assert str(path) in str(raised.value), kind
        assert ('folder' in kind) or 'a pipe or device; expected a file' in str(raised.value)
        path.rename(tmp_path / kind)


def test_a_file_is_read_whole_however_little_each_call_returns(tmp_path, monkeypatch):
    (tmp_path / 'file').write_bytes(bytes(range(100)))
    read = os.read
    monkeypatch.setattr(os, 'read', lambda descriptor, count: read(descriptor, min(count, 7)))
    assert files.read_file(tmp_path / 'file', 100) == bytes(range(100))
    with pytest.raises(OSError, match='expected at most 99'):
        files.read_file(tmp_path / 'file', 99)


@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason='no files of size 0 in /proc')
def test_a_range_is_read_whole_however_little_each_call_returns(tmp_path, monkeypatch):
    (tmp_path / 'file').write_bytes(bytes(range(100)))
    descriptor = os.open(tmp_path / 'file', os.O_RDONLY)
    pread = os.pread
    monkeypatch.setattr(os, 'pread', lambda file, count, start: pread(file, min(3, count), start))
    assert files.read_range(descriptor, 50, 20) == bytes(range(20, 70))
    assert files.read_range(descriptor, 50, 90) == bytes(range(90, 100))
    os.close(descriptor)


def test_a_file_without_a_size_is_read_to_its_end():
    read = files.read_file('/proc/self/status', 2**20)
    assert read.startswith(b'Name:') and b'Threads:' in read
    assert files.read_file('/proc/sys/kernel/pid_max', 100).strip().isdigit()


@pytest.mark.skipif(not os.access('/proc/kmsg', os.R_OK), reason='only root can read /proc/kmsg')
def test_a_file_that_waits_for_events_does_not_block(tmp_path):
    (path := tmp_path / 'events').symlink_to('/proc/kmsg')
    with usable(path):
        assert len(files.read_file(path, 2**16)) <= 2**16


def test_a_file_is_read_up_to_its_limit(tmp_path):
    (path := tmp_path / 'file').write_bytes(b'12345678')
    assert files.read_file(path, 8) == b'12345678'
    with pytest.raises(StorageError, match=f'^{path}: 8 bytes; expected at most 7'), usable(path):
        files.read_file(path, 7)
    with path.open('wb') as file:  # a sparse file takes no room on the disk
        file.truncate(Limit.JSON_BYTES + 1)
    with pytest.raises(StorageError, match='67,108,865 bytes; expected at most'), usable(path):
        files.read_json(path)
    assert files.parse_json('[' * 500 + ']' * 500)
    with pytest.raises(ValueError, match='nested'):
        files.parse_json('[' * 100_000)


def npz(path, members, **options):
    with zipfile.ZipFile(path, 'w', **options) as archive:
        for name, contents in members.items():
            archive.writestr(f'{name}.npy', contents)


def npy(array, **options):
    np.save(file := io.BytesIO(), array, **options)
    return file.getvalue()


def declaring(shape):
    """Returns the header of an array of this shape, without contents."""
    file = io.BytesIO()
    header = {'descr': '<f4', 'fortran_order': False, 'shape': shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()


@pytest.mark.parametrize(
    ('contents', 'text'),
    [
        (npy(np.ones(3, np.float32)) + bytes(100), 'a: has 240 bytes; expected 140'),
        (npy(np.ones(3, np.float32))[:-1], 'a: has 139 bytes; expected 140'),
        (declaring((2**40,)), 'a: has 128 bytes; expected 4,398,046,511,232'),
        (declaring((-1,)), 'a'),
        (npy(np.array([{}]), allow_pickle=True), 'a: contains Python objects'),
        (npy(np.ones(3, np.float32)).replace(b'\x01\x00', b'\x09\x00', 1), 'version'),
        (b'', ''),
    ],
)
def test_an_array_whose_size_differs_from_its_header_is_not_read(tmp_path, contents, text):
    for method in zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED:
        npz(path := tmp_path / 'x.npz', {'a': contents}, compression=method)
        with pytest.raises(UserError, match=f'^{path}: .*{text}'):
            array_files.read_array_file(path)
        with pytest.raises(UserError, match=f'^{path}: '):
            arrays._npz_splits(str(path))


def test_an_archive_that_declares_more_than_it_has_is_not_read(tmp_path):
    npz(path := tmp_path / 'x.npz', {'a': npy(np.ones(3, np.float32))})
    stored = path.read_bytes()
    size = (140).to_bytes(4, 'little')
    assert stored.count(size) == 4  # in the local header and in the directory, of both sizes
    path.write_bytes(stored.replace(size, (2**31).to_bytes(4, 'little')))
    with pytest.raises(UserError, match=f'^{path}: a: declares 2,147,483,648 bytes'):
        array_files.read_array_file(path)


def test_all_arrays_of_numpy_are_read(tmp_path):
    written = {
        'scalar': np.float32(3),
        'empty': np.zeros((0, 3), np.int8),
        'columns': np.asfortranarray(np.arange(6).reshape(2, 3)),
        'text': np.array(['ä', 'b']),
    }
    for write in np.savez, np.savez_compressed:
        write(path := tmp_path / 'x.npz', **written)
        for name, stored in open_npz(path).items():
            np.testing.assert_array_equal(stored.read(), written[name])


def test_a_header_of_safetensors_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / 'x.safetensors'
    path.write_bytes((Limit.HEADER_BYTES + 1).to_bytes(8, 'little') + b'{' + bytes(100))
    with pytest.raises(UserError, match=f'^{path}: a header of 16,777,217 bytes; expected at most'):
        array_files.read_array_file(path)
