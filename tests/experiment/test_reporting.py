"""The lines that a run prints and writes: numbers of steps, skipped updates, and its time."""

import contextlib
import dataclasses
import datetime
import functools
import json
import math
import pathlib
import re
import sys

import pytest

from tests import tiny
from vit_jax.base import StorageError
from vit_jax.distributed.processes import Job
from vit_jax.evaluation.evaluator import summarize_evals
from vit_jax.experiment.build import build_experiment
from vit_jax.experiment.reporter import Reporter, read_events, sum_seconds
from vit_jax.training.duration import TrainLength
from vit_jax.training.loop import Clock
from vit_jax.training.losses import StepMetrics
from vit_jax.training.metrics import METRICS


@functools.cache
def experiment():
    config = tiny.experiment(batch_size=8, log_every_steps=20, tensorboard=True)  # numbers only
    return build_experiment(config)


def reporter_of(folder, steps, clock=None, writers=(), job=None):
    length = TrainLength(8, num_images=100, total_steps=steps.stop)
    config = dataclasses.replace(experiment().config, writers=writers)
    return Reporter(
        experiment()._replace(config=config, length=length),
        folder,
        steps=steps,
        progress={},
        clock=clock or Clock(),
        job=job or Job(),
    )


def report(folder, losses, skipped=(), writers=()):
    """The lines of the metrics file of these losses, with these steps skipped."""
    reporter = reporter_of(folder, range(len(losses)), writers=writers)
    with contextlib.closing(reporter):
        for step, loss in enumerate(losses, start=1):
            scalars = {'gradient_norm': 1.0, 'skipped': float(step in skipped)}
            sums = {'loss': 8 * loss, 'accuracy': 4.0}
            reporter.record_step(step, StepMetrics(sums, 8.0, scalars))
    return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


def test_a_full_disk_is_one_sentence_with_the_file(tmp_path, monkeypatch):
    """/dev/full takes every byte into the buffer, and none to the disk: at the close again."""
    open_as = pathlib.Path.open

    def opened(path, mode='r', **how):
        return open_as(pathlib.Path('/dev/full') if mode == 'a' else path, mode, **how)

    monkeypatch.setattr(pathlib.Path, 'open', opened)
    with pytest.raises(StorageError, match='metrics.jsonl'):
        report(tmp_path, [1.0] * 20)


def test_lines_have_the_wall_clock_in_utc_and_the_number_of_the_start(tmp_path):
    began = datetime.datetime.now(datetime.UTC)
    (line,) = report(tmp_path, [1.0] * 20)
    assert (line['run'], line['seconds'] < 60) == (1, True)
    written = datetime.datetime.fromisoformat(line['time'])
    assert began.replace(microsecond=0) <= written <= datetime.datetime.now(datetime.UTC)


def test_skipped_updates_are_counted_said_and_part_of_no_mean(tmp_path, capsys):
    losses = [math.nan] * 20 + [2.0] * 20
    losses[24] = losses[30] = math.nan
    lines = report(tmp_path, losses, skipped=[*range(1, 21), 25, 31])
    assert 'NaN' not in (tmp_path / 'metrics.jsonl').read_text()  # which is not JSON
    steps = [line['step'] for line in lines if line['kind'] == 'skipped']
    assert steps == [*range(1, 21), 25, 31]
    first, second = (line for line in lines if line['kind'] == 'train')
    assert (first['loss'], first['accuracy'], first['skipped']) == (None, None, 20)
    assert (second['loss'], second['skipped']) == (2.0, 2)
    assert re.search('step 25: .*loss nan, gradient_norm 1.0', capsys.readouterr().out)


def test_an_evaluation_shows_those_metrics_that_it_has():
    with_accuracy = {'loss': 2.0, 'accuracy': 0.5}
    evaluated = {'test': with_accuracy, 'pixels': {'loss': 0.25}}
    shown = [METRICS['loss'], METRICS['accuracy']]
    expected = 'test loss 2, accuracy 50.00%; pixels loss 0.25'
    assert summarize_evals(evaluated, shown) == expected


def test_the_seconds_of_all_starts_add_up(tmp_path, monkeypatch):
    """Three starts, of which two are killed in the middle of something."""
    now = [1000.0]
    monkeypatch.setattr('time.monotonic', lambda: now[0])
    for run, (resumed, last) in enumerate([(0, 7), (5, 12), (10, 20)], 1):
        clock = Clock()
        now[0] += 3.0
        reporter = reporter_of(tmp_path, range(resumed, 20), clock)
        reporter.record_event('training', resumed)
        for step in range(resumed, last):
            with clock('step'):
                now[0] += 2.0
            reporter.record_event('saving', step + 1)
        assert read_events(tmp_path / 'events.jsonl')[-1]['run'] == run
    seconds = sum_seconds(read_events(tmp_path / 'events.jsonl'))
    assert seconds == {'start': 9.0, 'step': (7 + 7 + 10) * 2.0}
    assert reporter.earlier_seconds == {'start': 6.0, 'step': (7 + 7) * 2.0}


def test_a_writer_gets_every_line_and_one_that_fails_is_said_once(tmp_path, caplog):
    got = []

    def broken(line):
        line.clear()
        raise OSError('the network is down')

    lines = report(tmp_path, [1.0, math.nan] * 20, skipped=[2], writers=(broken, got.append))
    assert got == lines
    (message,) = (record.getMessage() for record in caplog.records if record.name == 'root')
    assert 'broken' in message and 'the network is down' in message
    job = Job()
    job.index = 1
    other = reporter_of(tmp_path, range(9), writers=(got.append,), job=job)
    other.record_metrics('test', 1, {'loss': 1.0}, '')
    assert got == lines


def test_a_writer_that_exits_does_not_end_the_run(tmp_path):
    assert len(report(tmp_path, [1.0] * 20, writers=(lambda line: sys.exit(1),))) == 1


def test_half_a_line_of_a_killed_run_is_removed(tmp_path):
    path = tmp_path / 'events.jsonl'
    path.write_text('{"run": 4, "event": "saving", "step": 0, "time": 1.0, "seconds": {}}\n{"ru')
    reporter_of(tmp_path, range(10)).record_event('saving', 7)
    assert [(line['run'], line['step']) for line in read_events(path)] == [(4, 0), (5, 7)]
