"""The doctor stands in for a training: it takes its flags, and does what that does at its start."""

import json

import pytest

from tests.hosts import hosts

TINY = '--config=tests/tiny_config.py'


def asked(folder, *flags, count=1, **more):
    """The exit codes, and what all processes said."""
    with hosts(folder, ['vit_jax.doctor', *flags], count, **more) as started:
        codes = [host.wait() for host in started]
        return codes, ''.join(host.text for host in started)


@pytest.mark.full
def test_the_doctor_does_what_a_training_does_before_it_compiles(tmp_path):
    workdir = f'--workdir={tmp_path / "run"}'
    codes, text = asked(tmp_path, TINY, workdir, '--config.seed=3', '--watchdog_seconds=60')
    assert codes == [0] and text.endswith('result      all is well\n'), text
    for line in f'workdir     {tmp_path / "run"}: ', 'data        1,438 training images':
        assert f'\n{line}' in text
    kept = json.loads((tmp_path / 'run/config.json').read_text())
    assert kept['seed'] == 3 and not (tmp_path / 'run/checkpoints').exists()
    (tmp_path / 'run/checkpoints/5').mkdir(parents=True)  # of an experiment that has begun
    codes, text = asked(tmp_path, TINY, workdir, '--config.seed=4')
    assert codes == [1] and 'seed: 3 -> 4' in text and 'all is well' not in text
    codes, text = asked(tmp_path, TINY, '--config.data=nowhere')
    assert codes == [1] and "error: data='nowhere': no such folder" in text
    codes, text = asked(tmp_path, workdir)
    assert codes == [1] and '--config is missing' in text


@pytest.mark.full
def test_the_doctor_compares_the_trainings_of_two_hosts(tmp_path):
    codes, text = asked(
        tmp_path, TINY, count=2, each=lambda index: [f'--config.seed={index}', '--seconds=60']
    )
    assert codes == [1, 1] and 'seed: 0 -> 1 here' in text
    codes, text = asked(
        tmp_path, TINY, count=2, each=lambda index: [f'--workdir={tmp_path / str(index)}']
    )
    assert codes == [1, 1] and 'workdir: ' in text
