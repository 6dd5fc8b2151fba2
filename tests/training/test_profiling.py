"""A profile shows the requested steps, and changes nothing else."""

import gzip
import json

import chex
import pytest
from rich.console import Console

from tests import tiny
from vit_jax.base import storage
from vit_jax.experiment import training_run
from vit_jax.training import loop
from vit_jax.training.duration import Duration


def steps_of(folder):
    """The numbers of the training steps in the profiles of a work directory."""
    found = set()
    for path in (folder / 'profile').rglob('perfetto_trace.json.gz'):
        events = json.loads(gzip.decompress(path.read_bytes()))['traceEvents']
        named = (event for event in events if event.get('name') == 'train')
        found |= {int(event['args']['step_num']) for event in named}
    return found


@pytest.mark.gate
def test_a_profile_has_the_requested_steps_of_this_start_and_changes_nothing(tmp_path):
    config = tiny.experiment(total=Duration(steps=7))
    plain = training_run.train(config, str(tmp_path / 'plain'))
    result = training_run.train(config, str(tmp_path / 'run'), profile=range(2, 5))
    assert steps_of(tmp_path / 'run') == {3, 4, 5}
    chex.assert_trees_all_equal(result.state, plain.state)
    config.total = Duration(steps=10)
    folder = str(tmp_path / 'plain')
    training_run.train(config, folder, profile=range(2, 20), accept_changes=True)
    assert steps_of(tmp_path / 'plain') == {8, 9, 10}


@pytest.mark.gate
def test_a_run_that_fails_within_the_steps_writes_the_profile_until_then(tmp_path):
    def fail(tick):
        if tick == 7:
            raise RuntimeError('the disk is on fire')

    job = tiny.WatchedJob(fail)
    with pytest.raises(RuntimeError, match='on fire'):
        training_run.train(tiny.experiment(), str(tmp_path), profile=range(3, 9), job=job)
    assert steps_of(tmp_path) == {4, 5, 6}


@pytest.mark.gate
def test_a_profile_that_cannot_be_written_costs_no_training(tmp_path, caplog):
    (tmp_path / 'profile').write_text('a file in the place of the folder')
    result = training_run.train(tiny.experiment(), str(tmp_path), profile=range(2, 4))
    assert result.checkpoint.exists() and str(tmp_path / 'profile') in caplog.text


@pytest.mark.gate
def test_a_profile_of_a_run_on_a_bucket_is_in_its_work_directory(bucket):
    folder, batches = storage.resolve_folder('gs://bucket/of/run/profile'), [{}, {}, {}]
    profiled = loop.profile_steps(iter(batches), range(3), range(1, 2), folder, Console(quiet=True))
    assert [*profiled] == batches
    assert any(name.endswith('perfetto_trace.json.gz') for name in bucket.names('of/run/profile/'))
