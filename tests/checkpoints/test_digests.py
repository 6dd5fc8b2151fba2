"""Damage and sudden death: what happens to a checkpoint's files, and from where a run resumes."""

import errno
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import chex
import numpy as np
import pytest

from tests import tiny
from tests.hosts import environment
from vit_jax.base import StorageError, UserError, storage
from vit_jax.checkpoints import digests, store
from vit_jax.checkpoints.digests import DamagedCheckpoint, verify_digests, write_digests
from vit_jax.experiment import training_run

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """A run with checkpoints 5 and 10."""
    folder = tmp_path_factory.mktemp('run')
    return training_run.train(tiny.experiment(checkpoint_every_steps=5), str(folder))


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the work directory, to be damaged."""
    return shutil.copytree(run.folder, tmp_path / 'run')


def resume(folder):
    return training_run.train(tiny.experiment(checkpoint_every_steps=5), str(folder))


def files(folder):
    return [path for path in sorted(folder.rglob('*')) if path.is_file()]


def flip(path, position):
    """Flips the bit of this number."""
    data = bytearray(path.read_bytes())
    data[position // 8] ^= 1 << position % 8
    path.write_bytes(data)


@pytest.mark.gate
def test_each_of_a_hundred_flipped_bits_is_noticed_and_its_file_named(run):
    """Bits drawn from all bytes of a checkpoint, arrays and descriptions."""
    verify_digests(run.checkpoint)
    paths = files(run.checkpoint)
    ends = np.cumsum([8 * path.stat().st_size for path in paths])
    for bit in np.random.default_rng(0).integers(ends[-1], size=100):
        path = paths[np.searchsorted(ends, bit, side='right')]
        position = int(bit - ends[-1]) % (8 * path.stat().st_size)
        flip(path, position)
        with pytest.raises(DamagedCheckpoint) as error:
            verify_digests(run.checkpoint)
        named = str(path.relative_to(run.checkpoint)) in str(error.value)
        assert named or path.name == 'digests.json'
        flip(path, position)
    verify_digests(run.checkpoint)


@pytest.mark.parametrize('damage', ['cut', 'missing'])
@pytest.mark.gate
def test_a_file_that_is_cut_or_missing_is_named(copy, damage):
    folder = copy / 'checkpoints/10'
    path = max(files(folder / 'params'), key=lambda path: path.stat().st_size)
    data = path.read_bytes()
    path.unlink()
    if damage == 'cut':
        path.write_bytes(data[:-1])
    for read in verify_digests, lambda folder: store.load_params(str(folder)):
        with pytest.raises(DamagedCheckpoint, match=f'10: .*{path.name}'):
            read(folder)


@pytest.mark.gate
def test_a_description_that_cannot_be_read_is_named_as_damaged(copy):
    """The digests of descriptions are compared only if reading them fails."""
    folder = copy / 'checkpoints/10'
    readers = {store.CARD: lambda: store.load_card(str(folder))}
    readers['params/_METADATA'] = lambda: store.count_params(folder)
    for name, read in readers.items():
        path = folder / name
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(DamagedCheckpoint, match=f'10: .*{path.name}'):
            read()
        path.write_bytes(data)


@pytest.mark.gate
@pytest.mark.parametrize('text', ['[]', '{}', '', '{"a"', None])
def test_digests_that_cannot_be_read_are_damage(copy, text):
    folder = copy / 'checkpoints/10'
    (folder / 'digests.json').unlink()
    if text is not None:
        (folder / 'digests.json').write_text(text)
    with pytest.raises(DamagedCheckpoint, match='digests.json'):
        verify_digests(folder)


def test_digests_are_of_the_bytes_of_each_file(tmp_path):
    (tmp_path / 'a').mkdir()
    (tmp_path / 'a' / 'b').write_bytes(bytes(32))
    write_digests(tmp_path)
    # RFC 3720, appendix B.4: the CRC-32C of 32 zero bytes is aa 36 91 8a, the lowest byte first.
    expected = {'a/b': '32 bytes, CRC-32C ipE2qg=='}
    assert json.loads((tmp_path / 'digests.json').read_text()) == expected


@pytest.mark.gate
def test_a_disk_that_cannot_be_read_is_no_damage(copy, monkeypatch):
    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(digests, 'crc32c', fail)
    with pytest.raises(StorageError, match=str(copy)):
        store.quarantine_damaged(copy)
    assert (copy / 'checkpoints/10').is_dir()


@pytest.mark.gate
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one_with_a_warning(run, copy, caplog):
    folder = copy / 'checkpoints'
    array = max(files(folder / '10/training'), key=lambda path: path.stat().st_size)
    flip(array, 1000)
    (folder / '12').mkdir()  # one that has lost its digests
    chex.assert_trees_all_equal(resume(copy).state, run.state)
    for step, file in ('10', 'training/'), ('12', 'digests.json'):
        assert re.search(f'checkpoints/{step}: .*{file}', caplog.text)
        assert f'{folder}/damaged/{step}-' in caplog.text
    assert digests.list_steps(folder) == [10, 5]
    verify_digests(folder / '10')


@pytest.mark.gate
def test_a_run_without_a_sound_checkpoint_stops_until_the_damaged_ones_are_removed(copy):
    for step in '5', '10':
        flip(files(copy / 'checkpoints' / step / 'params')[0], 0)
    for names in ['checkpoints/10', 'checkpoints/5'], []:
        with pytest.raises(UserError, match=f'remove {copy}/checkpoints/damaged') as error:
            resume(copy)
        assert all(f'{name}: damaged' in str(error.value) for name in names)
    shutil.rmtree(copy / 'checkpoints/damaged')
    assert store.quarantine_damaged(copy) == []


@pytest.mark.gate
def test_a_run_resumes_after_it_was_copied_to_a_bucket_and_back(run, tmp_path, bucket, caplog):
    remote, back = storage.resolve_folder('gs://bucket/run'), tmp_path / 'back'
    for path in files(run.folder):
        if path.name != '.lock':
            (remote / path.relative_to(run.folder)).write_bytes(path.read_bytes())
    for folder in remote, back:
        chex.assert_trees_all_equal(resume(folder).state, run.state)
        assert digests.list_steps(folder / 'checkpoints') == [10, 5]
        for name in bucket.names() if folder == remote else ():
            path = back / name.removeprefix('run/')
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bucket.objects[name].data)
    assert 'damaged' not in caplog.text


@pytest.mark.gate
def test_a_kill_at_any_file_operation_of_a_save_leaves_a_checkpoint_to_restore(tmp_path):
    """Killed at each operation of one save and of the removal of the oldest, one after another."""
    done = subprocess.run(
        [sys.executable, '-m', 'tests.checkpoints.crashing', str(tmp_path)],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=180,
        check=True,
    )
    operations = int(done.stdout.split()[-1])
    assert operations >= 20
    newest, killed_in_removal = set(), 0
    for last in range(1, operations + 1):
        folder = tmp_path / str(last) / 'checkpoints'
        assert store.quarantine_damaged(folder.parent) == [], last
        steps = digests.list_steps(folder)
        newest.add(steps[0])
        for step in steps:
            params = store.load_params(str(folder / str(step)))
            np.testing.assert_array_equal(params['a'], np.full(100, step, np.float32))
        killed_in_removal += len(steps) > 2 or any(folder.glob('.partial-1-*'))
        digests.remove_partial(folder)  # as the next start does
        assert {path.name for path in folder.iterdir()} <= {'1', '2', '3'}
    assert killed_in_removal > 5
    assert newest == {2, 3}  # killed before and after the third was complete
