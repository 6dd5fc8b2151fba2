"""Damage and sudden death: what a checkpoint's files may suffer, and what is left to go on from."""

import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys

import chex
import numpy as np
import pytest

from tests import tiny
from tests.hosts import environment
from vit_jax.base import UnusableDisk, UserError, storage
from vit_jax.checkpoints import digests, store
from vit_jax.checkpoints.digests import Damaged, verify_digests, write_digests
from vit_jax.experiment import training_run

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """A run with checkpoints 5 and 10."""
    folder = tmp_path_factory.mktemp('run')
    return training_run.train(tiny.experiment(checkpoint_every_steps=5), str(folder))


def files(folder):
    return [path for path in sorted(folder.rglob('*')) if path.is_file()]


def flip(path, position):
    """The file with the bit of this number the other way round."""
    data = bytearray(path.read_bytes())
    data[position // 8] ^= 1 << position % 8
    path.write_bytes(data)


def test_every_one_of_a_hundred_flipped_bits_is_noticed_and_named(run):
    """Bits drawn from all bytes of a checkpoint, data and descriptions alike."""
    verify_digests(run.checkpoint)
    paths = files(run.checkpoint)
    ends = np.cumsum([8 * path.stat().st_size for path in paths])
    for bit in np.random.default_rng(0).integers(ends[-1], size=100):
        path = paths[np.searchsorted(ends, bit, side='right')]
        position = int(bit - ends[-1]) % (8 * path.stat().st_size)
        flip(path, position)
        with pytest.raises(Damaged) as error:
            verify_digests(run.checkpoint)
        named = str(path.relative_to(run.checkpoint)) in str(error.value)
        assert named or path.name == 'digests.json'
        flip(path, position)
    verify_digests(run.checkpoint)


def test_a_file_that_is_cut_flipped_or_missing_is_noticed_and_named(run, tmp_path):
    copy = tmp_path / '10'
    for damage in ('cut', 'flipped', 'gone'):
        shutil.copytree(run.checkpoint, copy)
        path = max(files(copy / 'params'), key=lambda path: path.stat().st_size)
        if damage == 'cut':
            path.write_bytes(path.read_bytes()[:-1])
        elif damage == 'flipped':
            flip(path, 4 * path.stat().st_size)
        else:
            path.unlink()
        with pytest.raises(Damaged, match=f'damaged since it was written: params/.*{path.name}'):
            verify_digests(copy)
        with pytest.raises(Damaged, match='damaged since it was written'):
            store.load_params(str(copy))
        shutil.rmtree(copy)


@pytest.mark.full
def test_a_hidden_file_that_came_later_is_no_damage(run, tmp_path, caplog):
    folder = tmp_path / 'run'
    shutil.copytree(run.folder, folder)
    for step in '5', '10':
        (folder / 'checkpoints' / step / 'params' / '.DS_Store').touch()
    again = training_run.train(tiny.experiment(checkpoint_every_steps=5), str(folder))
    assert 'moved to' not in caplog.text
    chex.assert_trees_all_equal(again.state, run.state)


def test_a_disk_that_cannot_be_read_is_no_damage(run, tmp_path, monkeypatch):
    """It is said, and nothing is moved."""
    folder = tmp_path / 'run'
    shutil.copytree(run.folder, folder)

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(digests, 'crc32c', fail)
    with pytest.raises(UnusableDisk, match=f'{folder}.*: Input/output error'):
        store.quarantine_damaged(folder)
    assert (folder / 'checkpoints' / '10').is_dir()


def test_a_checkpoint_under_the_name_of_another_step_is_refused_and_stays(run, tmp_path):
    folder = tmp_path / 'run'
    shutil.copytree(run.folder, folder)
    (folder / 'checkpoints' / '10').rename(folder / 'checkpoints' / '12')
    with pytest.raises(UserError, match=r'checkpoints/12 is of step 10; .*: name it so'):
        store.quarantine_damaged(folder)
    assert sorted(p.name for p in (folder / 'checkpoints').glob('[0-9]*')) == ['12', '5']


def test_digests_that_are_no_json_are_damage(run, tmp_path):
    copy = tmp_path / '10'
    shutil.copytree(run.checkpoint, copy)
    for text in '[' * 100_000, '[]', '{}', '', '{"a"', None:
        (copy / 'digests.json').unlink()
        if text is not None:
            (copy / 'digests.json').write_text(text)
        with pytest.raises(Damaged, match='damaged since it was written: digests.json'):
            verify_digests(copy)


def test_a_checkpoint_that_never_had_a_card_is_rejected_and_not_moved(run, tmp_path):
    copy = tmp_path / 'checkpoints' / '10'
    shutil.copytree(run.checkpoint, copy)
    (copy / 'card.json').unlink()
    write_digests(copy)
    with pytest.raises(UserError, match='10: .*card.json'):
        store.load_card(str(copy))
    with pytest.raises(UserError, match='card.json'):
        store.quarantine_damaged(tmp_path)
    assert copy.is_dir()


@pytest.mark.full
def test_a_run_whose_checkpoints_are_all_damaged_is_not_trained_again_without_a_word(run, tmp_path):
    """It says how to start from step 0, each time it is started, until that is done."""
    folder = tmp_path / 'run'
    shutil.copytree(run.folder, folder)
    for step in '5', '10':
        flip(files(folder / 'checkpoints' / step / 'params')[0], 0)
    config = tiny.experiment(checkpoint_every_steps=5)
    for names in ['checkpoints/10: damaged', 'checkpoints/5: damaged'], []:
        with pytest.raises(UserError, match=f'remove {folder}/checkpoints/damaged') as error:
            training_run.train(config, str(folder))
        assert all(name in str(error.value) for name in names)
    shutil.rmtree(folder / 'checkpoints/damaged')
    chex.assert_trees_all_equal(training_run.train(config, str(folder)).state, run.state)


@pytest.mark.parametrize('kind', ['device', 'pipe', 'nothing'])
@pytest.mark.parametrize('name', ['params/manifest.ocdbt', 'card.json', 'digests.json', 'new'])
def test_a_checkpoint_with_something_else_than_files_is_no_checkpoint(run, tmp_path, kind, name):
    """A pipe would never end, and /dev/zero fill the memory."""
    copy = tmp_path / '10'
    shutil.copytree(run.checkpoint, copy)
    path = copy / name
    path.unlink(missing_ok=True)
    if kind == 'pipe':
        os.mkfifo(path)
    else:
        path.symlink_to('/dev/zero' if kind == 'device' else 'gone')
    for read in store.load_card, store.load_params:
        with pytest.raises(UserError, match='10: '):
            read(str(copy))


@pytest.mark.full
def test_a_run_goes_on_where_it_is_copied_to_from_a_disk_to_a_bucket_and_back(
    run, tmp_path, bucket, caplog
):
    there, back = storage.folder('gs://bucket/run'), tmp_path / 'back'
    for path in run.folder.rglob('*'):
        if path.is_file() and path.name != '.lock':
            (there / path.relative_to(run.folder)).write_bytes(path.read_bytes())
    config = tiny.experiment(checkpoint_every_steps=5)
    for folder in there, back:
        assert store.load_card(str(folder))[0]['step'] == 10
        chex.assert_trees_all_equal(training_run.train(config, str(folder)).state, run.state)
        assert digests.steps(folder / 'checkpoints') == [10, 5]
        for name in bucket.names() if folder == there else ():
            path = back / name.removeprefix('run/')
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bucket.objects[name].data)
    assert 'damaged' not in caplog.text


def test_a_run_falls_back_loudly_to_the_checkpoint_before(run, tmp_path, caplog):
    folder = tmp_path / 'run'
    shutil.copytree(run.folder, folder)
    array = max(files(folder / 'checkpoints' / '10' / 'training'), key=lambda p: p.stat().st_size)
    flip(array, 1000)
    again = training_run.train(tiny.experiment(checkpoint_every_steps=5), str(folder))
    assert 'checkpoints/10: damaged since it was written: training/' in caplog.text
    assert f'moved to {folder}/checkpoints/damaged/10-' in caplog.text
    chex.assert_trees_all_equal(again.state, run.state)
    assert sorted(p.name for p in (folder / 'checkpoints').glob('[0-9]*')) == ['10', '5']
    verify_digests(folder / 'checkpoints' / '10')


@pytest.mark.full
def test_what_has_lost_its_digests_is_passed_over_too(run, tmp_path, caplog):
    folder = tmp_path / 'run'
    shutil.copytree(run.folder, folder)
    (folder / 'checkpoints' / '10' / 'digests.json').unlink()
    (folder / 'checkpoints' / '12').mkdir()
    again = training_run.train(tiny.experiment(checkpoint_every_steps=5), str(folder))
    for step in 10, 12:
        assert f'checkpoints/{step}: damaged since it was written: digests.json' in caplog.text
    chex.assert_trees_all_equal(again.state, run.state)


@pytest.mark.full
def test_a_crash_at_any_file_operation_of_saving_leaves_what_can_be_restored(tmp_path):
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
    found, killed_in_removal = set(), 0
    for last in range(1, operations + 1):
        folder = tmp_path / str(last)
        said = store.quarantine_damaged(folder)
        assert not said, (last, said)
        listed = [int(p.name) for p in (folder / 'checkpoints').glob('*') if p.name.isdecimal()]
        assert max(listed) in (2, 3)
        found.add(max(listed))
        for step in listed:
            params = store.load_params(str(folder / 'checkpoints' / str(step)))
            np.testing.assert_array_equal(params['a'], np.full(100, step, np.float32))
        killed_in_removal += len(listed) > 2 or (folder / 'checkpoints/.partial-1').exists()
        store.Checkpoints(folder, keep=2).close()  # the next start removes what is left over
        assert {path.name for path in (folder / 'checkpoints').iterdir()} <= {'1', '2', '3'}
    assert killed_in_removal > 5
    assert found == {2, 3}  # killed before and after the third was complete


def test_digests_are_of_all_files_but_their_own(tmp_path):
    (tmp_path / 'a').mkdir()
    (tmp_path / 'a' / 'b').write_bytes(bytes(32))
    write_digests(tmp_path)
    digests = json.loads((tmp_path / 'digests.json').read_text())
    # RFC 3720, appendix B.4: the CRC-32C of 32 zero bytes is aa 36 91 8a, the lowest byte first.
    assert digests == {'a/b': '32 bytes, CRC-32C ipE2qg=='}
