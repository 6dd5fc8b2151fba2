"""Where the time went: by definition all of it, and lost is what is done twice."""

import itertools
import json

import pytest

from vit_jax.experiment import goodput
from vit_jax.experiment.goodput import LOST, Ledger, read, totals
from vit_jax.training.loop import Clock


def line(began, at, **seconds):
    return {'began': began, 'step': at, 'seconds': seconds}


def test_what_was_done_after_the_checkpoint_that_is_resumed_is_lost():
    lines = [
        line(100.0, 0, start=5.0),
        line(100.0, 10, start=5.0, step=10.0),
        line(100.0, 15, start=5.0, step=15.0),  # killed later, at an unknown time
        line(140.0, 10, start=4.0),
        line(140.0, 20, start=4.0, step=9.0, evaluation=1.0),
    ]
    found = totals(lines)
    assert found == {'start': 9.0, 'step': 19.0, 'evaluation': 1.0, LOST: 25.0}
    assert sum(found.values()) == (140.0 + 14.0) - 100.0


def test_a_start_that_kept_nothing_is_lost_whole():
    lines = [line(0.0, 30, start=1.0, step=2.0), line(10.0, 20, start=1.0)]
    assert totals(lines) == {'start': 1.0, LOST: 10.0}


def test_a_start_that_came_to_no_step_is_lost_whole():
    lines = [
        line(0.0, None, start=1.0),  # stopped while it compiled
        line(10.0, 0, start=2.0),
        line(10.0, 5, start=2.0, step=5.0),
        line(10.0, 9, start=2.0, step=9.0),
        line(30.0, None, start=1.0),
        line(40.0, 5, start=1.0),
        line(40.0, 9, start=1.0, step=4.0),
    ]
    found = totals(lines)
    assert found == {'start': 3.0, 'step': 9.0, LOST: 10.0 + 13.0 + 10.0}
    assert sum(found.values()) == 45.0


def test_a_start_whose_newest_checkpoint_was_damaged_keeps_what_the_one_before_has():
    lines = [
        line(0.0, 0, start=1.0),
        line(0.0, 90, start=1.0, step=9.0),
        line(0.0, 100, start=1.0, step=10.0),
        line(20.0, 100, start=1.0),
        line(20.0, 110, start=1.0, step=1.0),  # with a checkpoint, which is damaged as that of 100
        line(30.0, 90, start=1.0),
        line(30.0, 120, start=1.0, step=3.0),
    ]
    assert totals(lines) == {'start': 2.0, 'step': 12.0, LOST: 10.0 + 10.0}


def test_the_parts_sum_to_the_time_between_the_first_start_and_the_last_line(tmp_path, monkeypatch):
    """With a clock that is told the time: three starts, killed in the middle of something."""
    now = [1000.0]
    monkeypatch.setattr('time.monotonic', lambda: now[0])
    monkeypatch.setattr('time.time', lambda: now[0] + 1e9)
    path = tmp_path / 'ledger.jsonl'
    for resumed, last in (0, 7), (5, 12), (10, 20):
        clock = Clock()
        now[0] += 3.0
        book = Ledger(path, clock)
        book.record('x', resumed)
        for step in range(resumed, last):
            with clock('step'):
                now[0] += 2.0
            with clock('evaluation'):
                now[0] += 0.25
            if step % 5 == 4:
                book.record('x', step + 1)
        book.record('x', last) if last == 20 else None
        now[0] += 0.0 if last == 20 else 11.0  # down
    found = totals(read(path))
    assert sum(found.values()) == pytest.approx(now[0] - 1000.0, abs=1e-3)
    assert found['step'] == 2.0 * 20 and found['evaluation'] == 0.25 * 20
    assert found['start'] == 9.0
    assert found[LOST] == 2 * 11.0 + (2 + 2) * 2.25


def test_hosts_whose_clocks_differ_by_an_hour_give_the_time_that_passed():
    """Three starts, 10 s apart, the second on a host whose clock is ahead, or behind."""
    for hour in 3600.0, -3600.0:
        lines = [
            line(100.0, 0, start=1.0),
            line(100.0, 5, start=1.0, step=5.0),
            line(110.0 + hour, 5, start=1.0),
            line(110.0 + hour, 9, start=1.0, step=4.0),
            line(120.0, 9, start=1.0),
            line(120.0, 10, start=1.0, step=1.0),
        ]
        assert totals(lines) == {'start': 3.0, 'step': 10.0, LOST: 4.0 + 5.0}
        assert totals(lines[:1] + lines[4:5] + lines[2:4])[LOST] >= 0.0


def test_a_complete_run_that_is_started_again_later_lost_nothing():
    complete = line(0.0, 9, step=9.0) | {'event': 'complete'}
    lines = [line(0.0, 5, step=5.0), complete, line(9e4, 9, start=1.0)]
    assert totals(lines) == {'step': 9.0, 'start': 1.0, LOST: 0.0}


def test_a_clock_that_was_set_back_a_day_loses_what_is_done_twice():
    lines = [line(9e4, 5, step=5.0), line(9e4, 9, step=9.0), line(0.0, 5, start=1.0)]
    assert totals(lines) == {'step': 5.0, 'start': 1.0, LOST: 4.0}


def test_the_time_of_a_start_is_its_own_and_the_rest_is_apart(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr('time.monotonic', lambda: now[0])
    monkeypatch.setattr('time.time', lambda: now[0])
    for run in 1, 2:
        book = Ledger(tmp_path / 'ledger.jsonl', Clock())
        assert book.run == run
        now[0] += 3.0 * run
        book.record('x', 0)
        now[0] += 10.0
    assert book.totals() == ({'start': 6.0}, {'start': 3.0, LOST: 10.0})


def test_a_start_that_was_rejected_is_not_told_of(tmp_path):
    path = tmp_path / 'ledger.jsonl'
    rejected = Ledger(path, Clock())
    rejected.record('starting', None)
    rejected.close()
    book = Ledger(path, Clock())
    for event, step in ('starting', None), ('saving', 5):
        book.record(event, step)
        assert book.totals()[1] == {}


def test_half_a_line_of_a_killed_run_is_passed_over(tmp_path):
    path = tmp_path / 'ledger.jsonl'
    path.write_text(json.dumps(line(1.0, 0, start=2.0)) + '\n{"began": 1.0, "st')
    assert totals(read(path)) == {'start': 2.0}
    Ledger(path, Clock()).record('x', 7)  # and does not take the next line with it
    assert [line['step'] for line in read(path)] == [0, 7]


def test_lines_that_are_damaged_are_left_out_and_named(tmp_path, caplog):
    path = tmp_path / 'ledger.jsonl'
    whole = json.dumps(line(1.0, 0, start=2.0)).encode()
    deep, odd = b'[' * 100_000, b'{"began": "x", "step": 1, "seconds": {}}'
    path.write_bytes(b'\n'.join([b'12', b'{}', b'\xff', deep, odd, whole, whole]))
    lines = read(path)
    assert len(lines) == 2 and totals(lines) == {'start': 2.0}
    assert [n for n in range(1, 8) if f'ledger.jsonl, line {n}: damaged' in caplog.text] == [
        *range(1, 6)
    ]
    assert totals(read(tmp_path / 'none')) == {}


def test_a_clock_that_stands_still_or_jumps_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr('time.monotonic', lambda: 5.0)
    jumps = itertools.count(1e9, -1e6)
    monkeypatch.setattr(goodput.time, 'time', lambda: next(jumps))
    book = Ledger(tmp_path / 'ledger.jsonl', Clock())
    for step in range(3):
        book.record('x', step)
    assert sum(book.totals()[0].values()) == 0.0
