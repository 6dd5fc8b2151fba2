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
from vit_jax.experiment.reporter import read_events
from vit_jax.studies import history, planned_runs
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import ScheduleConfig


def experiment(**changes):
    """An accuracy that rises and falls: the rate is too high. Another evaluation is at the end."""
    evals = {
        'end': EvalConfig(split='test[50:66]', every_steps=1000),
        'val': EvalConfig(split='test[:50]', every_steps=2),
    }
    schedule = ScheduleConfig(learning_rate=0.03, warmup=Duration(steps=2))
    values = {'evals': evals, 'keep_best': 'val/accuracy', 'patience': 2, 'eval_split': 'test'}
    values |= {'total': Duration(steps=60), 'schedule': schedule, 'ema_decay': 0.5, 'seed': 8}
    values |= {'checkpoint_every_steps': 4, 'keep_checkpoints': 1}
    return tiny.experiment(**(values | changes))


def kept(result):
    return sorted(map(int, os.listdir(result.folder / 'checkpoints')))


def assert_same(found, whole):
    chex.assert_trees_all_equal(found.state, whole.state)
    assert without_speed(found.folder) == without_speed(whole.folder)
    assert (kept(found), found.selection) == (kept(whole), whole.selection)
    assert history.read_history(found.folder, '').event == 'complete'


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    return training_run.train(experiment(), str(tmp_path_factory.mktemp('best') / 'whole'))


@pytest.mark.parametrize(
    'ticks',
    [
        pytest.param((16,), marks=pytest.mark.gate),  # in the third evaluation
        pytest.param((16, 13), marks=pytest.mark.nightly),  # and at a later step
    ],
)
def test_a_killed_run_without_improvement_ends_like_an_uninterrupted_one(whole, ticks, tmp_path):
    best, last = whole.selection.step, int(whole.state.step)
    assert last == best + 4 < 60 and kept(whole) == [best, last]
    assert best % 4 > 0  # no other checkpoint is due there
    values = history.read_history(whole.folder, '').numbers['val/accuracy']
    assert values[best] == whole.selection.value == max(values.values())
    assert 'end' in whole.evals
    for tick in ticks:
        with pytest.raises(RuntimeError, match='the power'):
            training_run.train(experiment(), str(tmp_path / 'parts'), job=crash_at(tick))
        if tick == ticks[0]:
            assert read_events(tmp_path / 'parts/events.jsonl')[-1]['event'] == 'evaluating val'
    for _ in range(2):  # starting a complete run again changes nothing
        assert_same(training_run.train(experiment(), str(tmp_path / 'parts')), whole)


@pytest.mark.nightly
def test_a_complete_run_continues_with_more_patience(whole, tmp_path):
    folder = str(tmp_path / 'longer')
    training_run.train(experiment(), folder)
    patient = training_run.train(experiment(patience=4), str(tmp_path / 'patient'))
    longer = training_run.train(experiment(patience=4), folder)
    chex.assert_trees_all_equal(longer.state, patient.state)
    assert longer.selection == patient.selection and kept(longer) == kept(patient) != kept(whole)


REJECTED = [
    ({'keep_best': 'val/top1'}, 'end/macro_f1, val/accuracy, val/loss'),
    ({'keep_best': 'fewshot/1_shot_accuracy', 'fewshot': FewshotConfig()}, 'val/accuracy'),
    ({'keep_best': 'end/loss'}, '--config.evals.end.every_steps=6'),
    ({'keep_best': None}, 'keep_best'),
]


@pytest.mark.parametrize('changes, name', REJECTED)
def test_what_selects_nothing_is_rejected_before_compilation(tmp_path, monkeypatch, changes, name):
    monkeypatch.delattr(training_run, 'compile_programs')
    with pytest.raises(UserError, match=re.escape(name)):
        training_run.train(experiment(**changes), str(tmp_path / 'run'))
    assert not (tmp_path / 'run').exists()


@pytest.mark.gate
def test_a_selection_on_other_images_starts_anew_and_the_report_knows_it(whole, tmp_path):
    folder = str(tmp_path / 'run')
    first = training_run.train(experiment(total=Duration(steps=4)), folder)
    evals = {'val': EvalConfig(split='train[:50]', every_steps=2)}
    changes = {'evals': evals, 'total': Duration(steps=8), 'patience': None}
    second = training_run.train(experiment(**changes), folder, accept_changes=True)
    assert second.selection.split != first.selection.split
    run = history.read_history(second.folder, '')
    best = planned_runs.find_best_step(run, 'val/accuracy')
    assert best == second.selection.step
    assert run.numbers['val/accuracy'][best] == second.selection.value
    lines = [line for line in run.lines if line['kind'] == 'val' and line['step'] >= best]
    assert lines[0]['run'] == 2
