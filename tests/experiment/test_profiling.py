"""A profile shows the steps that were asked for, and changes nothing else."""

import gzip
import json

import chex
import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from tests import tiny
from vit_jax.base.errors import UserError
from vit_jax.experiment import training_run
from vit_jax.training.losses import StepMetrics
from vit_jax.training.update import TrainState


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


def test_steps_beyond_the_end_are_refused_and_those_before_the_start_are_no_more(tmp_path, capsys):
    with pytest.raises(UserError, match='--profile_steps=8:12: this run ends with step 10'):
        training_run.train(tiny.experiment(), str(tmp_path), profile=range(8, 12))
    assert not (tmp_path / 'metrics.jsonl').exists()
    where = {'first': 7, 'folder': tmp_path, 'console': Console()}
    assert training_run.profiled(print, range(2, 7), **where) is print
    assert 'steps 2 to 7 are done, this is step 7' in capsys.readouterr().out


@pytest.mark.parametrize('fault', ['a file where the folder should be', 'another profiler'])
def test_a_profile_that_fails_ends_no_run(fault, tmp_path, caplog):
    if fault == 'another profiler':
        jax.profiler.start_trace(tmp_path / 'other')
    else:
        (tmp_path / 'profile').touch()
    where = {'first': 0, 'folder': tmp_path / 'profile', 'console': Console(quiet=True)}
    state, metrics = TrainState(jnp.int32(0), {}, (), None), StepMetrics({}, 0.0, {})
    update = training_run.profiled(lambda *_: (state, metrics), range(0, 1), **where)
    assert update(state, {}) == (state, metrics)
    assert caplog.records[-1].getMessage().startswith(f'no profile in {tmp_path}/profile: ')
