"""A profile shows the steps that were asked for, and changes nothing else."""

import gzip
import json

import chex
import jax
import pytest
from rich.console import Console

from tests import tiny
from vit_jax.distributed.processes import Interrupted
from vit_jax.experiment import training_run
from vit_jax.training.duration import Duration


def steps_of(folder):
    """The numbers of the training steps in the profiles of a work directory."""
    found = set()
    for path in (folder / 'profile').rglob('perfetto_trace.json.gz'):
        events = json.loads(gzip.decompress(path.read_bytes()))['traceEvents']
        named = (event for event in events if event.get('name') == 'train')
        found |= {int(event['args']['step_num']) for event in named}
    return found


@pytest.mark.full
def test_a_profile_has_the_steps_that_were_asked_for_and_changes_nothing(tmp_path):
    plain = training_run.train(tiny.experiment(), str(tmp_path / 'plain'))
    config = tiny.experiment()
    result = training_run.train(config, str(tmp_path / 'run'), profile=range(3, 6))
    assert steps_of(tmp_path / 'run') == {4, 5, 6}
    chex.assert_trees_all_equal(result.state, plain.state)


@pytest.mark.full
@pytest.mark.parametrize('ending', [Interrupted, RuntimeError])
def test_a_run_that_ends_within_the_steps_writes_what_was_profiled(ending, tmp_path):
    """By a signal or by an error, before step 7 of steps 4 to 9."""

    def end(tick):
        if tick == 7:
            raise ending

    with pytest.raises(ending):
        job = tiny.WatchedJob(end)
        training_run.train(tiny.experiment(), str(tmp_path), profile=range(3, 9), job=job)
    assert steps_of(tmp_path) == {4, 5, 6}


@pytest.mark.full
def test_only_steps_that_this_start_runs_are_profiled(tmp_path, capsys):
    config, said = tiny.experiment(total=Duration(steps=4)), 'no profile: only steps'
    training_run.train(config, str(tmp_path), profile=range(4, 9))
    assert f'{said} 0:4' in capsys.readouterr().out
    config.total = Duration(steps=7)
    training_run.train(config, str(tmp_path), profile=range(2, 6), accept_changes=True)
    assert steps_of(tmp_path) == {5, 6}
    training_run.train(config, str(tmp_path), profile=range(2, 9))
    assert f'{said} 7:7' in capsys.readouterr().out


@pytest.mark.parametrize('fault', ['a file where the folder should be', 'another profiler'])
def test_a_profile_that_fails_ends_no_run(fault, tmp_path, caplog):
    if fault == 'another profiler':
        jax.profiler.start_trace(tmp_path / 'other')
    else:
        (tmp_path / 'profile').touch()
    with training_run.profiled(tmp_path / 'profile', Console(quiet=True)):
        jax.numpy.zeros(2)
    (record,) = caplog.records
    assert record.getMessage().startswith(f'no profile in {tmp_path}/profile: ')
    if fault == 'another profiler':
        jax.profiler.stop_trace()  # it is still running
        assert list((tmp_path / 'other').rglob('*.xplane.pb'))
