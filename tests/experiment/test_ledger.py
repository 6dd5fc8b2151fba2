"""Where the time went: by definition all of it, and lost is what is done twice."""

import pytest

from tests import tiny
from vit_jax.distributed.processes import Job
from vit_jax.experiment.build import build_experiment
from vit_jax.experiment.reporter import (
    LOST,
    Reporter,
    console_of,
    read_ledger,
    seconds_before,
)
from vit_jax.training.loop import Clock


def event(name, at_step, at, **seconds):
    return {'run': 1, 'event': name, 'step': at_step, 'time': at, 'seconds': seconds}


def report(experiment, folder, steps, clock):
    console = console_of(Job())
    return Reporter(experiment, folder, steps=steps, progress={}, clock=clock, console=console)


def test_what_was_done_after_the_checkpoint_that_is_resumed_is_lost():
    events = [
        event('training', 0, 105.0, start=5.0),
        event('saving', 10, 115.0, start=5.0, step=10.0),
        event('reported', 15, 120.0, start=5.0, step=15.0),  # killed later, at an unknown time
    ]
    assert seconds_before(events, 10, 140.0) == {'start': 5.0, 'step': 10.0, LOST: 25.0}


def test_a_first_start_has_no_earlier_time():
    assert seconds_before([], 0, 5.0) == {}


def test_a_checkpoint_before_a_damaged_one_keeps_what_was_done_up_to_it():
    events = [
        event('saving', 90, 10.0, step=9.0),
        event('saving', 100, 11.0, step=10.0),
        event('training', 100, 20.0, step=10.0, lost=8.0),
    ]
    assert seconds_before(events, 90, 30.0) == {'step': 9.0, LOST: 20.0}


def test_a_complete_run_that_is_started_again_later_lost_nothing():
    events = [event('saving', 9, 5.0, step=5.0), event('complete', 9, 6.0, step=6.0)]
    assert seconds_before(events, 9, 9e4) == {'step': 6.0}


def test_a_host_whose_clock_is_behind_loses_no_negative_time():
    assert seconds_before([event('saving', 9, 9e4, step=5.0)], 9, 0.0) == {'step': 5.0, LOST: 0.0}


@pytest.fixture
def now(monkeypatch):
    """The time that all clocks show."""
    now = [1000.0]
    monkeypatch.setattr('time.monotonic', lambda: now[0])
    monkeypatch.setattr('time.time', lambda: now[0] + 1e9)
    return now


def test_the_parts_sum_to_the_time_between_the_first_start_and_the_last_line(tmp_path, now):
    """Three starts, killed in the middle of something."""
    experiment = build_experiment(tiny.experiment())
    for run, (resumed, last) in enumerate([(0, 7), (5, 12), (10, 20)], 1):
        clock = Clock()
        now[0] += 3.0
        reporter = report(experiment, tmp_path, range(resumed, 20), clock)
        reporter.record_event('training', resumed)
        for step in range(resumed, last):
            with clock('step'):
                now[0] += 2.0
            with clock('evaluation'):
                now[0] += 0.25
            if step % 5 == 4:
                reporter.record_event('saving', step + 1)
        now[0] += 0.0 if last == 20 else 11.0  # down
        assert read_ledger(tmp_path / 'ledger.jsonl')[-1]['run'] == run
    found = read_ledger(tmp_path / 'ledger.jsonl')[-1]['seconds']
    assert sum(found.values()) == pytest.approx(now[0] - 1000.0, abs=1e-3)
    lost = 2 * 11.0 + (2 + 2) * 2.25
    assert found == {'start': 9.0, 'step': 40.0, 'evaluation': 5.0, LOST: lost}
    own = {'start': 3.0, 'step': 20.0, 'evaluation': 2.5}
    assert reporter.earlier == {'start': 6.0, 'step': 20.0, 'evaluation': 2.5, LOST: lost}
    assert clock.seconds == own


def test_half_a_line_of_a_killed_run_is_removed(tmp_path):
    path = tmp_path / 'ledger.jsonl'
    path.write_text('{"run": 4, "event": "saving", "step": 0, "time": 1.0, "seconds": {}}\n{"ru')
    reporter = report(build_experiment(tiny.experiment()), tmp_path, range(10), Clock())
    reporter.record_event('saving', 7)
    assert [(line['run'], line['step']) for line in read_ledger(path)] == [(4, 0), (5, 7)]
