"""Each file of a killed run is damaged: it resumes to the same bits, or stops with a sentence.

python -m pytest -m '' tests/experiment/test_damaged_files.py
"""

import random
import re
import shutil
import signal
import zlib

import jax
import pytest

from tests import tiny_config
from tests.hosts import assert_same, hosts, result
from vit_jax.base import UserError
from vit_jax.checkpoints import digests
from vit_jax.experiment.training_run import train
from vit_jax.training.duration import Duration

STEPS, EVERY = 20, 5


def flip_bit(data):
    place = random.Random(zlib.crc32(data)).randrange(8 * max(1, len(data)))
    flipped = bytearray(data or b'\0')
    flipped[place // 8] ^= 1 << place % 8
    return bytes(flipped)


def cut_last_line(data):
    text = data.rstrip()
    start = text.rfind(b'\n') + 1
    return text[: (start + len(text)) // 2]


DAMAGES = {
    'emptied': lambda data: b'',
    'cut': lambda data: data[: len(data) // 2],
    'half a line': cut_last_line,
    'a number': lambda data: b'12\n',
    'a list': lambda data: b'[]\n' + data.partition(b'\n')[2],  # replaces the first line
    'deep': lambda data: b'[' * 100_000 + data,
    'not UTF-8': lambda data: b'\xff\xfe' + data,
    'flipped': flip_bit,
}


def damage(path, kind):
    """Damages a file as DAMAGES[kind] does, removes it, or adds another file to its folder."""
    if kind == 'removed':
        path.unlink()
    elif kind == 'stray':
        (path.parent / '.nfs0001').write_bytes(b'stray')
    else:
        path.write_bytes(DAMAGES[kind](path.read_bytes()))


# Each file of a checkpoint has a digest, so that some kinds of damage are enough for it.
OF_ALL_FILES = 'emptied', 'a list', 'flipped', 'removed', 'stray'


def get_config():
    config = tiny_config.get_config()
    config.total = Duration(steps=STEPS)
    config.checkpoint_every_steps = EVERY
    return config


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """The result of an uninterrupted run."""
    folder = tmp_path_factory.mktemp('whole')
    train(get_config(), str(folder / 'run'))
    return result(folder)


@pytest.fixture(scope='module')
def killed(tmp_path_factory):
    """The work directory of a killed run, and a file of each kind in it and its last checkpoint."""
    folder = tmp_path_factory.mktemp('killed')
    command = ['tests.faulty', 'slow:300', '--config=tests/tiny_config.py']
    command += [f'--config.total.steps={STEPS}', f'--config.checkpoint_every_steps={EVERY}']
    command += [f'--workdir={folder}/run']
    run = folder / 'run'
    with hosts(folder, command, devices=len(jax.devices())) as (host,):
        host.wait_until(lambda: len(digests.list_steps(run / 'checkpoints')) > 1, 'checkpoints')
        host.signal(signal.SIGKILL)
        assert host.wait() == -signal.SIGKILL
    newest = digests.list_steps(run / 'checkpoints')[0]
    paths = [*run.glob('*'), *sorted((run / f'checkpoints/{newest}').rglob('*'))]
    names = {}
    for path in paths:
        if path.is_file():
            kind = re.sub('[0-9a-f]{16,}', 'data', path.name)
            names[kind] = str(path.relative_to(run))
    return run, [*names.values()]


@pytest.mark.nightly
@pytest.mark.parametrize('kind', [*DAMAGES, 'removed', 'stray'])
def test_a_run_with_a_damaged_file_resumes_to_the_same_bits_or_stops_with_a_sentence(
    kind, killed, whole, tmp_path, caplog
):
    """A warning names a damaged checkpoint. An unknown file in a checkpoint is ignored."""
    run, names = killed
    assert len(names) > 10
    if kind not in OF_ALL_FILES:
        names = [name for name in names if not name.startswith('checkpoints')]
    for name in names:
        shutil.copytree(run, tmp_path / 'run')
        damage(tmp_path / 'run' / name, kind)
        caplog.clear()
        try:
            train(get_config(), str(tmp_path / 'run'))
        except UserError:
            pass
        else:
            if name.startswith('checkpoints') and kind != 'stray':
                assert str(tmp_path / 'run/checkpoints') in caplog.text, name
            params, lines = result(tmp_path)
            if name == 'metrics.jsonl':  # its lines may be lost
                lines = whole[1]
            assert_same((params, lines), whole)
        shutil.rmtree(tmp_path / 'run')
