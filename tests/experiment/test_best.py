"""The best checkpoint of a run is kept, and a run without a better one ends."""

import os
import re

import chex
import pytest

from tests import tiny
from tests.experiment.test_training_run import crash_at, without_speed
from vit_jax.base.errors import UserError
from vit_jax.config import EvalConfig
from vit_jax.evaluation.probing import FewshotConfig
from vit_jax.experiment import training_run
from vit_jax.studies import history
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import ScheduleConfig


def experiment(**changes):
    """An accuracy that rises and falls: the rate is too high. One evaluation is at the end."""
    values = {
        'total': Duration(steps=60),
        'schedule': ScheduleConfig(learning_rate=0.03, warmup=Duration(steps=2)),
        'ema_decay': 0.5,
        'evals': {
            'end': EvalConfig(split='test[50:66]', every_steps=1000),
            'val': EvalConfig(split='test[:50]', every_steps=2),
        },
        'eval_split': 'test',
        'checkpoint_every_steps': 3,
        'keep_checkpoints': 1,
        'keep_best': 'val/accuracy',
        'patience': 2,
    }
    return tiny.experiment(**(values | changes))


def kept(result):
    return sorted(os.listdir(result.folder / 'checkpoints'), key=int)


def assert_same(found, expected):
    chex.assert_trees_all_equal(found.state, expected.state)
    assert without_speed(found.folder) == without_speed(expected.folder)
    assert kept(found) == kept(expected) and found.selection == expected.selection


@pytest.mark.full
def test_a_run_without_improvement_is_complete_however_often_it_was_killed(tmp_path, capsys):
    whole = training_run.train(experiment(), str(tmp_path / 'whole'))
    best, last = whole.selection.step, int(whole.state.step)
    assert last == best + 4 < 60 and kept(whole) == [str(best), str(last)]
    values = history.read_history(whole.folder, '').numbers['val/accuracy']
    assert values[best] == whole.selection.value == max(values.values())
    assert [line['step'] for line in without_speed(whole.folder) if line['kind'] == 'end'] == [last]

    heartbeat, parts = 12, None  # more than those from one checkpoint to the next
    while parts is None:
        try:
            job = crash_at(heartbeat)
            parts = training_run.train(experiment(), str(tmp_path / 'parts'), job=job)
        except RuntimeError:
            heartbeat += 1
    assert heartbeat > 13
    assert_same(parts, whole)

    again = training_run.train(experiment(), str(tmp_path / 'parts'))
    assert_same(again, whole)
    assert '--config.patience' in capsys.readouterr().out
    ended = history.read_history(again.folder, '')
    assert ended.event == 'complete' and max(ended.numbers['val/loss']) == last

    patient = training_run.train(experiment(patience=4), str(tmp_path / 'patient'))
    longer = training_run.train(experiment(patience=4), str(tmp_path / 'parts'))
    assert int(longer.state.step) > last
    chex.assert_trees_all_equal(longer.state, patient.state)
    assert longer.selection == patient.selection and kept(longer) == kept(patient)


@pytest.mark.full
def test_the_best_is_kept_where_no_checkpoint_was_due_and_training_goes_on(tmp_path):
    config = experiment(total=Duration(steps=20), patience=None, checkpoint_every_steps=None)
    result = training_run.train(config, str(tmp_path))
    values = history.read_history(result.folder, '').numbers['val/accuracy']
    assert int(result.state.step) == 20
    assert values[result.selection.step] == max(values.values())
    assert kept(result) == sorted({str(result.selection.step), '20'}, key=int)


@pytest.mark.parametrize(
    'changes, name',
    [
        ({'keep_best': 'vla/accuracy'}, 'val/accuracy'),
        ({'keep_best': 'val/top1'}, 'end/top5_accuracy, val/accuracy, val/loss'),
        ({'keep_best': 'loss'}, 'val/loss'),
        ({'keep_best': 'fewshot/1_shot_accuracy', 'fewshot': FewshotConfig()}, 'val/accuracy'),
        ({'keep_best': 'end/loss', 'patience': 1}, '--config.eval_every_steps'),
    ],
)
def test_what_selects_nothing_is_rejected_before_anything_is_compiled(
    tmp_path, monkeypatch, changes, name
):
    monkeypatch.delattr(training_run, 'compile_programs')
    with pytest.raises(UserError, match=f'config.*{re.escape(name)}'):
        training_run.train(experiment(**changes), str(tmp_path / 'run'))
    assert not (tmp_path / 'run').exists()


def test_patience_needs_something_to_wait_for():
    with pytest.raises(UserError, match='patience=2.*keep_best'):
        experiment(keep_best=None)
